"""Ctrl-C and SIGTERM in the first seconds of a program."""

import signal

import pytest

from MaxText import exit_codes
from tests.house.sources import REPOSITORY
from tests.parallelism.child_programs import ended, started, wait_for

IMPORTS = """
    import time
    from MaxText import early_signals

    early_signals.install("__main__", also_sigterm=True)
    print("importing", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize(
    ("number", "expected"),
    [(signal.SIGINT, exit_codes.INTERRUPTED), (signal.SIGTERM, exit_codes.PREEMPTED)],
)
@pytest.mark.usefixtures("ctrl_c_counts")
def test_a_signal_among_the_imports_ends_without_a_word(number, expected):
    with started(IMPORTS) as process:
        wait_for(process, "importing")
        process.send_signal(number)
        assert ended(process) == (expected, "")


@pytest.mark.usefixtures("ctrl_c_counts")
def test_a_signal_while_the_program_is_started_again_is_not_lost():
    program = """
        import os, signal, sys
        from MaxText import early_signals

        if "AGAIN" not in os.environ:
            early_signals.hold_back()
            os.kill(os.getpid(), signal.SIGTERM)
            code = open("/proc/self/cmdline").read().split("\\0")[:-1]
            os.execve(sys.executable, code, os.environ | {"AGAIN": "1"})
        print("again", flush=True)
        early_signals.install("__main__", also_sigterm=True)
        print("not reached")
    """
    with started(program) as process:
        assert ended(process) == (exit_codes.PREEMPTED, "again\n")


def test_what_is_imported_changes_no_handler(ctrl_c_counts):
    program = """
        import signal
        from MaxText import early_signals

        early_signals.install("MaxText.train", also_sigterm=True)
        print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
        early_signals.install("__main__")
        early_signals.leave_to_python()
        print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
    """
    with started(program) as process:
        assert ended(process) == (0, "True\nTrue\n")


def test_every_program_takes_them_over_before_its_imports():
    programs = [
        path for path in (REPOSITORY / "MaxText").glob("*.py") if "sys.path[0]" in path.read_text()
    ]
    assert len(programs) == 11
    for path in programs:
        _, after = path.read_text().split("sys.path[0] = ")
        lines = [line for line in after.splitlines()[1:] if line]
        assert lines[0] == "from MaxText import early_signals", path
        assert lines[1].startswith("early_signals.install(__name__"), path
