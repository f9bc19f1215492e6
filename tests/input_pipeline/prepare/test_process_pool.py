"""Work in several processes, and the lock of a dataset in preparation."""

import contextlib
import multiprocessing
import os
import signal
import socket
import time

import pytest

from MaxText.errors import UserError
from MaxText.input_pipeline.prepare.process_pool import map_in_processes
from MaxText.storage import atomic
from tests.refusals import refused


def run(function, shared, jobs, num_processes, advance=lambda done: None):
    return list(map_in_processes(function, shared, jobs, num_processes, advance))


def multiply(factor, number, advance):
    """Work that says in which process it was done."""
    if number < 0:
        raise UserError("below 0")
    advance(number)
    return factor * number, os.getpid()


@pytest.mark.parametrize("num_processes", [1, 2])
def test_every_job_is_done_once(num_processes):
    done = []
    jobs = list(range(20))
    results = run(multiply, 3, jobs, num_processes, done.append)
    assert sorted(result for result, _ in results) == [3 * number for number in jobs]
    assert sum(done) == sum(jobs)
    assert (os.getpid() in {process for _, process in results}) == (num_processes == 1)
    assert run(multiply, 3, [2], 8) == [(6, os.getpid())]  # one job needs no process
    assert run(multiply, 3, [], 8) == []
    refused("below 0", run, multiply, 3, [1, -1, 2], num_processes)


def kill_itself(shared, number, advance):
    del number
    if shared == "lock held":
        advance.__closure__[0].cell_contents.get_lock().acquire()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("shared", ["lock free", "lock held"])
def test_killed_process_is_reported(shared):
    refused("killed", run, kill_itself, shared, [0, 1], 2)
    assert multiprocessing.active_children() == []


def wait_long(shared, number, advance):
    del shared, number
    advance(1)
    time.sleep(60)


def test_an_interrupt_does_not_wait_for_work():
    def interrupt(done):
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(wait_long, None, [0, 1, 2], 2, interrupt)
    assert multiprocessing.active_children() == []


def test_a_lock_says_who_holds_it(tmp_path):
    lock, lines, other = tmp_path / ".d.lock", [], contextlib.ExitStack()
    other.enter_context(atomic.lock(lock, print))
    with atomic.lock(lock, lambda line: (lines.append(line), other.close())):
        assert lock.exists()
    assert not lock.exists()
    (line,) = lines
    assert f"process {os.getpid()} on {socket.gethostname()}" in line
