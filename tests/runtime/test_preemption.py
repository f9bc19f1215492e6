"""Ctrl-C and SIGTERM: among the imports, before the first step, in a step, twice, and ignored."""

import re
import signal

import pytest

from MaxText import exit_codes
from tests.house.sources import REPOSITORY
from tests.programs import ended, started, wait_for

LOOP = """
    import signal, sys, time
    from MaxText import exit_codes
    from MaxText.runtime.preemption import PreemptionHandler

    stop = PreemptionHandler.install()
    if "compile" in sys.argv:  # Python's handler never runs while C code does not return
        signal.signal(signal.SIGINT, lambda *_: None)
    print("installed", stop.is_pending(), flush=True)
    for step in range(10_000 if "loop" in sys.argv else 0):
        time.sleep(0.01)
        if stop.requested(step):
            print("pending:", stop.is_pending(), "saving after", step, flush=True)
            print(stop.summary(step, "first"))
            sys.exit(stop.exit_code)
        print("step", step, flush=True)
    time.sleep(60)
"""


IMPORTS = """
    import time
    from MaxText import program_start

    program_start.install("__main__", also_sigterm=True)
    print("importing")  # reaches a pipe at once
    time.sleep(60)
"""
SAVES = r"(?s).*{}.*\npending: True saving after \d+\n{}.*run_name=first.*"


@pytest.mark.parametrize(
    ("program", "how", "moment", "number", "said"),
    [
        (LOOP, "loop", "step 3", "SIGTERM", SAVES.format("SIGTERM", "Preempted")),
        (LOOP, "loop", "step 3", "SIGINT", SAVES.format("Ctrl-C", "Interrupted")),
        (LOOP, "", "installed False", "SIGTERM", "SIGTERM before the first step.*\n"),
        (LOOP, "compile", "installed False", "SIGINT", "Ctrl-C before the first step.*\n"),
        (IMPORTS, "", "importing", "SIGTERM", ""),
        (IMPORTS, "", "importing", "SIGINT", ""),
    ],
)
@pytest.mark.usefixtures("ctrl_c_counts")
def test_a_signal(program, how, moment, number, said):
    """A step is finished and its state saved; before the first one the program ends at once."""
    with started(program, how) as process:
        assert "saving" not in wait_for(process, moment)
        process.send_signal(signal.Signals[number])
        code, output = ended(process)
    expected = {"SIGTERM": exit_codes.PREEMPTED, "SIGINT": exit_codes.INTERRUPTED}
    assert code == expected[number], output
    assert re.fullmatch(said, output)
    assert output.count("saving after") == said.count("saving after")


def test_a_second_one_ends_a_process_that_does_not_come_to_python():
    # CDLL gives Python's lock back, as jax does while it waits for a device.
    program = """
        import ctypes
        from MaxText.runtime.preemption import PreemptionHandler

        stop = PreemptionHandler.install()
        while True:
            stop.requested(0)
            print("waiting", flush=True)
            ctypes.CDLL(None).sleep(60)
    """
    with started(program) as process:
        wait_for(process, "waiting")
        process.send_signal(signal.SIGTERM)
        wait_for(process, "SIGTERM")
        process.send_signal(signal.SIGTERM)
        code, output = ended(process)
    assert code == 128 + signal.SIGTERM
    assert "second SIGTERM" in output


def test_who_ignores_sigterm_goes_on_ignoring_it():
    program = """
        import signal
        from MaxText.runtime.preemption import PreemptionHandler

        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        stop = PreemptionHandler.install()
        signal.raise_signal(signal.SIGTERM)
        print("requested:", stop.requested(0))
    """
    with started(program) as process:
        assert ended(process) == (0, "requested: False\n")


@pytest.mark.usefixtures("ctrl_c_counts")
def test_a_signal_while_the_program_is_started_again_is_not_lost():
    program = """
        import os, signal
        from MaxText import program_start

        def signaled(*arguments, execve=os.execve):
            os.kill(os.getpid(), signal.SIGTERM)
            execve(*arguments)

        os.execve = signaled
        print("started", flush=True)
        program_start.install("__main__", also_sigterm=True, tune_malloc=True)
        print("not reached")
    """
    with started(program, options=["-u"], environment={"GLIBC_TUNABLES": ""}) as process:
        assert ended(process) == (exit_codes.PREEMPTED, "started\nstarted\n")


def test_what_is_imported_changes_no_handler(ctrl_c_counts):
    program = """
        import signal
        from MaxText import program_start

        program_start.install("MaxText.train", also_sigterm=True)
        print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
        program_start.install("__main__")
        program_start.leave_to_python()
        print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
    """
    with started(program) as process:
        assert ended(process) == (0, "True\nTrue\n")


def test_every_program_takes_them_over_before_its_imports():
    programs = [
        path for path in (REPOSITORY / "MaxText").glob("*.py") if "sys.path[0]" in path.read_text()
    ]
    assert len(programs) == 12
    for path in programs:
        _, after = path.read_text().split("sys.path[0] = ")
        words = after.partition("\n")[2].lstrip()
        assert words.startswith(
            "from MaxText import program_start\n\nprogram_start.install(__name__"
        ), path
