"""Reader processes leave nothing behind, however they and their program end."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from MaxText.errors import UserError
from MaxText.input_pipeline.reader_processes import ReaderProcesses

# A program that reads, and how it ends.
_PROGRAM = """
import os, signal, sys, time
sys.path.insert(0, {root!r})
from MaxText.input_pipeline.reader_processes import ReaderProcesses
from tests.input_pipeline.test_reader_processes import Steps

if __name__ == "__main__":
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
    readers = ReaderProcesses(Steps(), range(10**9), 3)
    batches = iter(readers)
    assert [next(batches)["step"] for _ in range(7)] == list(range(7))
    print(*[process.pid for process in readers._processes], flush=True)
    if "close" in sys.argv:
        readers.close()
    if "wait" in sys.argv:
        time.sleep(60)
    if "error" in sys.argv:
        raise SystemExit("the only message")
"""


class Steps:
    """Step s is {"step": s}, with an error from step `wrong` on."""

    def __init__(self, wrong: int = -1, error: Exception | None = None, hang: bool = False):
        self.wrong = wrong
        self.error = error
        self.hang = hang

    def __getitem__(self, step: int):
        if self.hang:
            time.sleep(1000)
        if step >= self.wrong >= 0:
            raise self.error
        return {"step": step, "text": "x" * 300_000}


class NotPicklableError(OSError):
    def __init__(self, number, text):
        super().__init__(f"{number} {text}")


class RaisesNotPicklable(Steps):
    def __getitem__(self, step: int):
        raise NotPicklableError(3, "step")


def start(folder: Path, *arguments: str) -> subprocess.Popen:
    program = folder / "program.py"
    program.write_text(_PROGRAM.format(root=str(Path(__file__).parents[2])))
    return subprocess.Popen(
        [sys.executable, str(program), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def assert_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("arguments", "message"), [(["close"], ""), ([], ""), (["error"], "the only message\n")]
)
def test_a_normal_end(tmp_path, arguments, message):
    process = start(tmp_path, *arguments)
    output, errors = process.communicate(timeout=120)
    assert errors == message
    assert_gone([int(pid) for pid in output.split()])


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name
)
@pytest.mark.parametrize("is_group", [False, True])
def test_signals(tmp_path, number, is_group):
    process = start(tmp_path, "wait")
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    (os.killpg if is_group else os.kill)(process.pid, number)
    _, errors = process.communicate(timeout=120)
    assert errors == ""
    assert_gone(pids)


def test_signals_of_the_run_do_not_end_readers():
    readers = ReaderProcesses(Steps(), range(20), 2)
    batches = iter(readers)
    assert next(batches)["step"] == 0
    for process in readers._processes:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            os.kill(process.pid, number)
    assert [batch["step"] for batch in batches] == list(range(1, 20))
    readers.close()
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_errors_come_at_their_step():
    for error in (OSError(5, "step 3"), ConnectionResetError("step 3"), UserError("step 3")):
        readers = ReaderProcesses(Steps(3, error), range(10), 2)
        batches = iter(readers)
        assert [next(batches)["step"] for _ in range(3)] == [0, 1, 2]
        with pytest.raises(type(error), match="step 3"):
            next(batches)
        readers.close()
    readers = ReaderProcesses(RaisesNotPicklable(), range(10), 1)
    with pytest.raises(RuntimeError, match=r"In the reader:[\s\S]*3 step"):
        next(iter(readers))
    readers.close()


def test_a_killed_process_and_one_that_hangs():
    readers = ReaderProcesses(Steps(), range(1000), 2)
    batches = iter(readers)
    next(batches)
    readers._processes[1].kill()
    with pytest.raises(OSError, match=r"a reader process ended \(exit code -9\)"):
        list(batches)
    readers.close()
    hanging = ReaderProcesses(Steps(hang=True), range(10), 2)
    start_of_close = time.monotonic()
    hanging.close()
    assert time.monotonic() - start_of_close < 20
    assert not any(process.is_alive() for process in hanging._processes)
