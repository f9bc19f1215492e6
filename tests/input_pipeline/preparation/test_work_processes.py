"""Work in several processes, and how its progress is shown."""

import multiprocessing
import os
import signal
import time

import pytest

from MaxText.errors import UserError
from MaxText.input_pipeline.preparation import progress, work_processes


def multiply(factor, number, advance):
    """Work that says in which process it was done."""
    if number < 0:
        raise UserError("below 0")
    if number == 1000:
        os.kill(os.getpid(), signal.SIGKILL)
    advance(number)
    return factor * number, os.getpid()


@pytest.mark.parametrize("num_processes", [1, 2])
def test_every_job_is_done_once(num_processes):
    done = []
    jobs = list(range(20))
    results = list(work_processes.run(multiply, 3, jobs, num_processes, done.append))
    assert sorted(result for result, _ in results) == [3 * number for number in jobs]
    assert sum(done) == sum(jobs)
    assert (os.getpid() in {process for _, process in results}) == (num_processes == 1)


def test_one_job_needs_no_process():
    assert list(work_processes.run(multiply, 3, [2], 8, lambda done: None)) == [(6, os.getpid())]
    assert list(work_processes.run(multiply, 3, [], 8, lambda done: None)) == []


def test_mistakes_come_through():
    with pytest.raises(UserError, match="below 0"):
        list(work_processes.run(multiply, 3, [1, -1, 2], 2, lambda done: None))


def test_a_killed_process_is_reported():
    with pytest.raises(UserError, match="was killed, by hand or for want of memory"):
        list(work_processes.run(multiply, 3, [1000, 1000], 2, lambda done: None))


class SlowToSend:
    """Takes a second to be sent to the second process."""

    def __init__(self):
        self.times = 0

    def __getstate__(self):
        self.times += 1
        if self.times == 2:
            time.sleep(1)
        return {}


def kill_itself(shared, number, advance):
    """Ends its process as kill -9 does."""
    del shared, number, advance
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_killed_while_another_one_starts():
    with pytest.raises(UserError, match="was killed, by hand or for want of memory"):
        list(work_processes.run(kill_itself, SlowToSend(), [0, 1, 2], 2, lambda done: None))
    assert multiprocessing.active_children() == []


def kill_itself_while_it_reports(shared, number, advance):
    """Holds the lock of the counter when it ends."""
    del shared, number
    advance.__closure__[0].cell_contents.get_lock().acquire()
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_killed_while_it_reports():
    with pytest.raises(UserError, match="was killed, by hand or for want of memory"):
        list(work_processes.run(kill_itself_while_it_reports, None, [0, 1], 2, lambda done: None))


def wait_long(shared, number, advance):
    """Work that goes on when the program is interrupted."""
    del shared, number
    advance(1)
    time.sleep(60)


def test_an_interrupt_does_not_wait_for_work_that_has_begun():
    def interrupt(done):
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(work_processes.run(wait_long, None, [0, 1, 2], 2, interrupt))
    assert multiprocessing.active_children() == []


def test_lines_where_there_is_no_terminal(monkeypatch):
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: False, raising=False)
    monkeypatch.setattr(progress, "_SILENT_SECONDS", 0.0)
    seconds = iter(range(0, 1000, 10))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(seconds))
    lines = []
    with progress.show_progress("Encoding", 4_000_000, lines.append) as advance:
        for _ in range(8):
            advance(500_000)
    assert lines == [
        "Encoding: 1.0 of 4.0 MB, 60 s left",
        "Encoding: 2.0 of 4.0 MB, 40 s left",
        "Encoding: 3.0 of 4.0 MB, 20 s left",
    ]


def test_a_bar_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: True, raising=False)
    with progress.show_progress("Encoding", 10, pytest.fail) as advance:
        advance(10)
    assert "Encoding" in capsys.readouterr().err
