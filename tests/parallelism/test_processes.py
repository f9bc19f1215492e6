"""How one process of several ends after an exception."""

import jax
import pytest

from MaxText.errors import UserError
from MaxText.parallelism import processes
from tests.parallelism.child_programs import ended, started

FAIL = """
    import sys, threading, time
    from MaxText.errors import UserError
    from MaxText.parallelism import processes
    from MaxText.parallelism.watchdog import Watchdog

    processes.begin(2)
    # What an interpreter that ends would wait for.
    threading.Thread(target=time.sleep, args=(60,)).start()
    print("printed")
    try:
        with_file = Watchdog(sys.argv[2], 1.0, 0, 2).start()
        exec(sys.argv[1])
    except BaseException as error:
        processes.fail(error, with_file)
"""


@pytest.mark.parametrize(
    ("statement", "code", "said"),
    [
        ("raise UserError('mend it')", 2, "error: mend it\n"),
        ("raise KeyError('ours')", 1, "Traceback"),
        ("raise KeyboardInterrupt", 130, ""),
        ("sys.exit(5)", 5, ""),
        ("raise RuntimeError('Gloo all-reduce failed')", 76, "1  has left no file"),
    ],
    ids=["mistake", "bug", "Ctrl-C", "exit", "peer"],
)
def test_codes_and_what_is_said(statement, code, said, tmp_path):
    with started(FAIL, statement, str(tmp_path)) as process:
        ended_with, output = ended(process)
    assert ended_with == code, output
    assert output.startswith("printed\n")
    assert said in output


def test_a_run_of_one_process_is_left_alone():
    processes.fail(ValueError("ours"))  # returns
    processes.leave()
    assert processes.count() == 1


def caused_by(error):
    try:
        try:
            raise error
        except RuntimeError as cause:
            raise UserError("the checkpoint could not be written") from cause
    except UserError as outer:
        return outer


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (ValueError("UNKNOWN: Gloo all-reduce failed: Connection closed by peer"), True),
        (jax.errors.JaxRuntimeError("UNAVAILABLE: failed to connect"), True),
        (jax.errors.JaxRuntimeError("ABORTED: the coordination service says so"), True),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory"), False),
        (caused_by(RuntimeError("Barrier timed out")), True),
        (caused_by(RuntimeError("no space left on device")), False),
        (UserError("the barrier of sizes"), False),
        (OSError("Connection reset by peer"), False),  # of storage
        (ValueError("UNAVAILABLE: storage.example"), False),
        (TypeError("gloo"), False),
    ],
)
def test_a_lost_process_is_told_from_an_error(error, lost):
    assert processes.is_peer_lost(error) is lost
