"""Ctrl-C, SIGTERM and notices: while importing, before and in a step, twice, and ignored."""

import os
import pty
import re
import signal
import subprocess
import sys
import textwrap

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

    program_start.install("__main__")
    print("importing")  # reaches a pipe at once
    time.sleep(60)
"""
NOTICES = ("SIGHUP", "SIGUSR1", "SIGUSR2")
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
        *((LOOP, "loop", "step 3", name, SAVES.format(name, "Preempted")) for name in NOTICES),
        *((LOOP, "", "installed", name, f"{name} before the first step.*\n") for name in NOTICES),
        *((IMPORTS, "", "importing", name, "") for name in NOTICES),
    ],
)
@pytest.mark.usefixtures("ctrl_c_counts")
def test_a_signal(program, how, moment, number, said):
    """A step is finished and its state saved; before the first one the program ends at once."""
    with started(program, how) as process:
        assert "saving" not in wait_for(process, moment)
        process.send_signal(signal.Signals[number])
        code, output = ended(process)
    expected = exit_codes.INTERRUPTED if number == "SIGINT" else exit_codes.PREEMPTED
    assert code == expected, output
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


@pytest.mark.parametrize("number", ["SIGTERM", *NOTICES])
def test_who_ignores_a_signal_goes_on_ignoring_it(number):
    """As nohup does with SIGHUP."""
    program = """
        import signal, sys
        from MaxText import program_start
        from MaxText.runtime.preemption import PreemptionHandler

        number = signal.Signals[sys.argv[1]]
        signal.signal(number, signal.SIG_IGN)
        program_start.install("__main__")
        signal.raise_signal(number)
        program_start.leave_to_python()
        signal.raise_signal(number)
        stop = PreemptionHandler.install()
        signal.raise_signal(number)
        print("requested:", stop.requested(0))
    """
    with started(program, number) as process:
        assert ended(process) == (0, "requested: False\n")


# A process that saves for a while after the first signal.
SAVING = """
    import sys, time
    from MaxText.runtime.preemption import PreemptionHandler

    stop = PreemptionHandler.install()
    step = 0
    while not stop.requested(step):
        print("step", step, flush=True)
        time.sleep(0.01)
    print("saving", flush=True)
    time.sleep(1)
    print("saved", flush=True)
    sys.exit(stop.exit_code)
"""


@pytest.mark.parametrize(
    "numbers", [["SIGHUP", "SIGHUP"], ["SIGUSR1", "SIGTERM"], ["SIGTERM", "SIGUSR2"]], ids=str
)
def test_a_notice_and_another_signal_do_not_end_the_save(numbers):
    """A closing terminal sends SIGHUP twice; SLURM sends SIGTERM at the limit after --signal."""
    with started(SAVING) as process:
        wait_for(process, "step 0")
        process.send_signal(signal.Signals[numbers[0]])
        wait_for(process, "saving\n")
        process.send_signal(signal.Signals[numbers[1]])
        code, output = ended(process)
    assert code == exit_codes.PREEMPTED
    assert output.endswith("saved\n")


def test_a_terminal_that_closes(tmp_path):
    """The process saves, although its standard output no longer exists."""
    take_terminal = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
    program = take_terminal + textwrap.dedent(SAVING).replace(
        'print("saved", flush=True)', f"open({str(tmp_path / 'end')!r}, 'w').write('saved')"
    )
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=REPOSITORY,
        start_new_session=True,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    ) as process:
        os.close(theirs)
        while b"step 0" not in os.read(ours, 1 << 16):
            pass
        os.close(ours)  # as when an SSH session ends: the kernel sends SIGHUP
        assert process.wait(timeout=60) == exit_codes.PREEMPTED
    assert (tmp_path / "end").read_text() == "saved"


@pytest.mark.parametrize("number", ["SIGTERM", *NOTICES])
def test_other_programs_clean_up_first(number):
    program = """
        import time
        from MaxText import program_start

        program_start.install("__main__")
        from MaxText.config import command_line

        with command_line.exit_on_user_error("Interrupted; nothing was written."):
            try:
                print("working", flush=True)
                time.sleep(60)
            finally:
                print("cleaned up", flush=True)
    """
    with started(program) as process:
        wait_for(process, "working")
        process.send_signal(signal.Signals[number])
        code, output = ended(process)
    assert code == exit_codes.PREEMPTED
    assert output == "cleaned up\nInterrupted; nothing was written.\n"


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
        program_start.install("__main__", tune_malloc=True)
        print("not reached")
    """
    with started(program, options=["-u"], environment={"GLIBC_TUNABLES": ""}) as process:
        assert ended(process) == (exit_codes.PREEMPTED, "started\nstarted\n")


def test_what_is_imported_changes_no_handler(ctrl_c_counts):
    program = """
        import signal
        from MaxText import program_start

        program_start.install("MaxText.train")
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
    assert len(programs) == 14
    for path in programs:
        _, after = path.read_text().split("sys.path[0] = ")
        words = after.partition("\n")[2].lstrip()
        assert words.startswith(
            "from MaxText import program_start\n\nprogram_start.install(__name__"
        ), path
