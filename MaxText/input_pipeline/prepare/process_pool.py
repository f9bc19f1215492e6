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

    Args:
      function: Must be importable by the workers.
      shared: The first argument of every call; sent to each process once.
      jobs: The second arguments, which are pickled.
      num_processes: At 1 or less, jobs run in this process.

    Raises:
      UserError: A process was killed.
      Exception: Any error of `function`. No more jobs are started then, and those in progress
        finish, except after Ctrl-C.
    """
    num_processes = min(num_processes, len(jobs))
    if num_processes <= 1:
        for number, job in enumerate(jobs):
            yield number, function(shared, job)
        return
    # Not forked: forking a process with threads (tokenizers, jax) can deadlock.
    context = multiprocessing.get_context("spawn")
    other_processes = {*multiprocessing.active_children()}
    with notices_blocked():
        pool = ProcessPoolExecutor(
            num_processes, context, initializer=_start, initargs=(function, shared)
        )
    try:
        # Before `_start` ignores Ctrl-C, new processes would print tracebacks of their imports.
        with notices_blocked(signal.SIGINT):
            number_of_future = {pool.submit(_work, job): number for number, job in enumerate(jobs)}
        processes = {*multiprocessing.active_children()} - other_processes
        pending = {*number_of_future}
        while pending:
            # The executor misses the death of its newest process while others give no result.
            if any(process.exitcode is not None for process in processes):
                raise BrokenProcessPool
            done, pending = wait(pending, _POLL_SECONDS, FIRST_COMPLETED)
            for future in done:
                yield number_of_future[future], future.result()
    except BaseException as error:
        is_broken = isinstance(error, BrokenProcessPool)
        if is_broken or not isinstance(error, Exception):
            # Do not wait for running jobs after Ctrl-C. In a broken pool the executor kills all
            # processes except one that was just starting, and would wait for that one.
            for process in {*multiprocessing.active_children()} - other_processes:
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
    """Initializes a worker process."""
    global _task
    # Ctrl-C and notices reach all processes; the parent stops the workers in order.
    for signal_number in (signal.SIGINT, *NOTICES):
        signal.signal(signal_number, signal.SIG_IGN)
    end_with_parent()
    _task = functools.partial(function, shared)


def _work(job: Any) -> Any:
    """Runs a job in a worker process."""
    assert _task is not None
    return _task(job)


def run_jobs(
    title: str,
    function: Callable[[Shared, Any], Result],
    shared: Shared,
    jobs: Sequence[Any],
    *,
    sizes: Sequence[int],
    max_processes: int,
    log: Callable[[str], None],
    ledger: Path | None = None,
) -> list[Result]:
    """Returns the results of map_in_processes in the order of the jobs, and logs progress.

    Args:
      title: What the jobs do, for the progress lines.
      function: As in map_in_processes.
      shared: As in map_in_processes.
      jobs: As in map_in_processes.
      sizes: Bytes that each job reads. Small jobs get fewer processes.
      max_processes: 0 is the number of cores.
      log: Takes progress lines.
      ledger: Folder for the results of finished jobs, see run_once. Only jobs without a result in
        it run. The results must be JSON values.
    """
    if ledger is not None:
        ledger.mkdir(exist_ok=True)
        num_finished = sum(1 for _ in ledger.glob("*.json"))
        if num_finished:
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
    function: Callable[[Shared, Job], Any],
    ledger: Path,
    shared: Shared,
    numbered_job: tuple[int, Job],
) -> Any:
    """Returns the result of a job from the ledger, or runs it.

    A ledger is a folder with the result of job 17, as JSON, in 000017.json. It is written last:
    files of the job are complete, even if its process was killed right afterwards.
    """
    number, job = numbered_job
    entry = ledger / f"{number:06d}.json"
    if not entry.exists():
        atomic_write_text(entry, json.dumps(function(shared, job)))
    return json.loads(entry.read_text(encoding="utf-8"))


def progress_in_bytes(
    title: str, num_bytes: int, log: Callable[[str], None]
) -> Callable[[int], None]:
    """Returns a function to call with the bytes done since its last call.

    It logs the progress and the expected remaining time every 10 seconds.
    """
    start_time = time.monotonic()
    last_log_time = start_time
    done_bytes = 0

    def advance(more_bytes: int) -> None:
        nonlocal done_bytes, last_log_time
        done_bytes += more_bytes
        current_time = time.monotonic()
        if current_time - last_log_time > _PROGRESS_SECONDS and done_bytes < num_bytes:
            last_log_time = current_time
            elapsed = current_time - start_time
            remaining = elapsed * (num_bytes - done_bytes) / max(done_bytes, 1)
            log(
                f"{title}: {done_bytes / 1e6:,.1f} of {num_bytes / 1e6:,.1f} MB, "
                f"{remaining:,.0f} s left"
            )

    return advance
