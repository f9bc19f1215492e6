"""Work in several processes, and the lock of a dataset in preparation."""

import multiprocessing
import os
import signal
import time

import pytest

from MaxText.errors import UserError
from MaxText.input_pipeline.prepare.process_pool import map_in_processes
from tests.refusals import refused


def run(function, shared, jobs, num_processes):
    return [result for _, result in map_in_processes(function, shared, jobs, num_processes)]


def multiply(factor, number):
    """Work that says in which process it was done."""
    if number < 0:
        raise UserError("below 0")
    return factor * number, os.getpid()


@pytest.mark.parametrize("num_processes", [1, 2])
def test_every_job_is_done_once(num_processes):
    jobs = list(range(20))
    pairs = list(map_in_processes(multiply, 3, jobs, num_processes))
    assert sorted((job, product) for job, (product, _) in pairs) == [(n, 3 * n) for n in jobs]
    assert (os.getpid() in {process for _, (_, process) in pairs}) == (num_processes == 1)
    assert run(multiply, 3, [2], 8) == [(6, os.getpid())]  # one job needs no process
    assert run(multiply, 3, [], 8) == []
    refused("below 0", run, multiply, 3, [1, -1, 2], num_processes)


def kill_itself(shared, number):
    del shared, number
    os.kill(os.getpid(), signal.SIGKILL)


def test_killed_process_is_reported():
    refused("killed", run, kill_itself, None, [0, 1], 2)
    assert multiprocessing.active_children() == []


def wait_unless_first(shared, number):
    del shared
    time.sleep(60 * bool(number))


def test_an_interrupt_does_not_wait_for_work():
    next(results := map_in_processes(wait_unless_first, None, [0, 1, 2], 2))
    with pytest.raises(KeyboardInterrupt):
        results.throw(KeyboardInterrupt)
    assert multiprocessing.active_children() == []
