"""Reads batches in processes of their own.

Steps are dealt out in turn: of N processes, process n reads the steps n, n + N, n + 2N, ... A pipe
to each process carries step numbers one way and batches the other. Nothing else is shared. There
are no queues, semaphores or shared memory, which a process that is killed would leave behind, and
which Python reports as leaked at the end. So the processes can be killed at any moment.
"""

import atexit
import contextlib
import multiprocessing
import multiprocessing.util
import pickle
import signal
import traceback
import weakref
from collections.abc import Iterable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from MaxText.errors import UserError
from MaxText.input_pipeline.end_with_parent import end_with_parent
from MaxText.program_start import notices_blocked

if TYPE_CHECKING:
    from MaxText.input_pipeline.sequences.global_batch import GlobalBatch

_BATCHES_AHEAD = 2  # requested from each process
_SECONDS_TO_END = 2.0  # a killed process ends at once, except in a read of some network storage

# Processes to kill before multiprocessing waits for them at the end of the program: it would send
# them SIGTERM, which they block.
_running: set[Any] = set()


def _kill(processes: Iterable[Any]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join(_SECONDS_TO_END)
    _running.difference_update(processes)


# Functions that are registered later are called earlier, and multiprocessing.util registers its own
# when it is imported, as it is above.
atexit.register(lambda: _kill(list(_running)))


class ReaderProcesses:
    """Processes that read the batches of some steps."""

    def __init__(self, source: "GlobalBatch", steps: range, num_processes: int):
        self._steps = steps
        self._is_closed = False
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        weakref.finalize(self, _kill, self._processes)
        # Not forked: forking a process with threads (jax) can deadlock.
        context = multiprocessing.get_context("spawn")
        # It would unblock signals when it starts.
        resource_tracker.ensure_running()
        # The main process decides what a signal means: readers go on until it stops them.
        with notices_blocked(signal.SIGINT, signal.SIGTERM):
            for _ in range(min(num_processes, len(steps))):
                connection, of_process = context.Pipe()
                process = context.Process(
                    target=_serve, args=(source, of_process), name="batches", daemon=True
                )
                process.start()
                _running.add(process)
                self._processes.append(process)
                self._connections.append(connection)
                of_process.close()  # else the end of the process would go unnoticed

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yields the batches in the order of steps.

        Raises OSError if a process ended, and any error from reading a batch.
        """
        num_processes = len(self._connections)
        num_ahead = num_processes * _BATCHES_AHEAD
        for number in range(min(num_ahead, len(self._steps))):
            self._request(number)
        for number in range(len(self._steps)):
            batch = self._receive(number % num_processes)
            if isinstance(batch, Exception):
                raise batch
            if number + num_ahead < len(self._steps):
                self._request(number + num_ahead)
            yield batch

    def _request(self, number: int) -> None:
        # What a process that ended does not take is noticed when its batch is missing.
        with contextlib.suppress(ConnectionError):
            self._connections[number % len(self._connections)].send(self._steps[number])

    def _receive(self, index: int) -> dict[str, Any] | Exception:
        try:
            return self._connections[index].recv()
        except (EOFError, ConnectionError) as error:
            process = self._processes[index]
            if not self._is_closed:
                process.join(_SECONDS_TO_END)
            raise OSError(
                f"a reader process ended (exit code {process.exitcode}). See above for the cause "
                "(often memory: lower grain_worker_count)"
            ) from error

    def close(self) -> None:
        """Ends the processes, even ones that hang, without waiting for a read in progress."""
        self._is_closed = True
        _kill(self._processes)


def _serve(source: "GlobalBatch", connection: Connection) -> None:
    """Sends the batch of each step that is asked for, until the main process ends."""
    end_with_parent()
    # Either error means that the main process is gone.
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            step = connection.recv()
            connection.send(_read(source, step))


def _read(source: "GlobalBatch", step: int) -> dict[str, Any] | Exception:
    """Returns a batch, or its error in a form that arrives intact."""
    try:
        return source[step]
    except (UserError, OSError) as error:
        if _can_be_sent(error):
            return error
        return RuntimeError(f"In the reader:\n{traceback.format_exc()}")
    except Exception:
        return RuntimeError(f"In the reader:\n{traceback.format_exc()}")


def _can_be_sent(error: Exception) -> bool:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return False
    return True
