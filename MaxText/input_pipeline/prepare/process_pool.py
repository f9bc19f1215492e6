"""Runs independent jobs in local processes, with progress and a ledger."""

import functools
import json
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, TypeVar

from MaxText.errors import UserError
from MaxText.input_pipeline.end_with_parent import end_with_parent
from MaxText.program_start import NOTICES, notices_blocked
from MaxText.runtime.cores import num_cores
from MaxText.storage.atomic import atomic_write_text

Shared = TypeVar("Shared")
Job = TypeVar("Job")
Result = TypeVar("Result")

# Less takes no longer than a process to start, which is up to a second.
_BYTES_PER_PROCESS = 2**24
_POLL_SECONDS = 0.5
_PROGRESS_SECONDS = 10.0


def map_in_processes(
    function: Callable[[Shared, Job], Result],
    shared: Shared,
    jobs: Sequence[Job],
    num_processes: int,
) -> Iterator[tuple[int, Result]]:
    """Yields the number and function(shared, job) of each job, in any order.

    `function` must be importable; `shared` is sent to each process once. Raises UserError if a
    process was killed, or any error of `function`: no more jobs are started then, and those in
    progress finish, except after Ctrl-C.
    """
    num_processes = min(num_processes, len(jobs))
    if num_processes <= 1:
        for number, job in enumerate(jobs):
            yield number, function(shared, job)
        return
    # Not forked: forking a process with threads (tokenizers, jax) can deadlock.
    context = multiprocessing.get_context("spawn")
    others = {*multiprocessing.active_children()}
    with notices_blocked():
        pool = ProcessPoolExecutor(
            num_processes, context, initializer=_start, initargs=(function, shared)
        )
    try:
        # Before `_start` ignores Ctrl-C, new processes would print tracebacks of their imports.
        with notices_blocked(signal.SIGINT):
            number_of = {pool.submit(_work, job): number for number, job in enumerate(jobs)}
        processes = {*multiprocessing.active_children()} - others
        waiting = {*number_of}
        while waiting:
            # The executor misses the death of its newest process while others give no result.
            if any(process.exitcode is not None for process in processes):
                raise BrokenProcessPool
            done, waiting = wait(waiting, _POLL_SECONDS, FIRST_COMPLETED)
            yield from ((number_of[future], future.result()) for future in done)
    except BaseException as error:
        is_broken = isinstance(error, BrokenProcessPool)
        if is_broken or not isinstance(error, Exception):
            # Do not wait for running jobs after Ctrl-C. In a broken pool the executor kills all
            # processes except one that was just starting, and would wait for that one.
            for process in {*multiprocessing.active_children()} - others:
                process.kill()
        if is_broken:
            raise UserError(
                "A process that prepares data was killed, by hand or out of memory. Run the same "
                "command to resume. A smaller prepare_num_workers needs less memory."
            ) from error
        raise
    finally:
        pool.shutdown(cancel_futures=True)


_task: Callable[[Any], Any] | None = None  # of a worker process


def _start(function: Callable[..., Any], shared: Any) -> None:
    global _task
    # Ctrl-C and notices reach all processes; the parent stops the workers in order.
    for number in (signal.SIGINT, *NOTICES):
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()
    _task = functools.partial(function, shared)


def _work(job: Any) -> Any:
    assert _task is not None
    return _task(job)


def run_jobs(
    title: str,
    function: Callable[[Shared, Any], Result],
    shared: Shared,
    jobs: Sequence[Any],
    sizes: Sequence[int],
    max_processes: int,
    log: Callable[[str], None],
    ledger: Path | None = None,
) -> list[Result]:
    """Returns the results of map_in_processes in order, showing progress.

    `sizes` are the bytes of each job. At `max_processes` 0 the limit is the number of cores. With a
    `ledger` only jobs without a result in it run, see run_once.
    """
    if ledger is not None:
        ledger.mkdir(exist_ok=True)
        if num_finished := sum(1 for _ in ledger.glob("*.json")):
            log(f"Resuming: {num_finished:,} of {len(jobs):,} parts are finished")
        function = functools.partial(run_once, function, ledger)
        jobs = [*enumerate(jobs)]
    advance = progress_in_bytes(title, sum(sizes), log)
    results: dict[int, Result] = {}
    num_processes = min(max_processes or num_cores(), sum(sizes) // _BYTES_PER_PROCESS)
    for number, result in map_in_processes(function, shared, jobs, num_processes):
        results[number] = result
        advance(sizes[number])
    return [results[number] for number in range(len(jobs))]


def run_once(
    function: Callable[[Shared, Job], Any], ledger: Path, shared: Shared, numbered: tuple[int, Job]
) -> Any:
    """Returns the result of a job from the ledger, or runs it.

    A ledger is a folder with the result of job 17, as JSON, in 000017.json. It is written last:
    files of the job are complete, even if its process was killed right afterwards.
    """
    number, job = numbered
    record = ledger / f"{number:06d}.json"
    if not record.exists():
        atomic_write_text(record, json.dumps(function(shared, job)))
    return json.loads(record.read_text(encoding="utf-8"))


def progress_in_bytes(
    title: str, num_bytes: int, log: Callable[[str], None]
) -> Callable[[int], None]:
    """Returns a function to call with the bytes done since the last call."""
    start = shown = time.monotonic()
    done = 0

    def advance(more: int) -> None:
        nonlocal done, shown
        done += more
        now = time.monotonic()
        if now - shown > _PROGRESS_SECONDS and done < num_bytes:
            shown = now
            left = (now - start) * (num_bytes - done) / max(done, 1)
            log(f"{title}: {done / 1e6:,.1f} of {num_bytes / 1e6:,.1f} MB, {left:,.0f} s left")

    return advance
