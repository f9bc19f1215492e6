"""Reads batches in processes of their own.

Steps are dealt out in turn: of N processes, process n reads the steps n, n + N, n + 2N, ... A pipe
to each process carries step numbers one way and batches the other. Nothing else is shared. There
are no queues, semaphores or shared memory, which a process that is killed would leave behind, and
which Python reports as leaked at the end. So the processes can be killed at any moment.
"""

import atexit
import contextlib
import multiprocessing
import multiprocessing.util  # noqa: F401
import pickle
import signal
import traceback
import weakref
from collections.abc import Iterator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING

import numpy as np

from MaxText.errors import UserError
from MaxText.input_pipeline.end_with_parent import end_with_parent
from MaxText.program_start import notices_blocked

if TYPE_CHECKING:
    from MaxText.input_pipeline.sequences.batch_source import BatchSource

_BATCHES_AHEAD = 2  # requested from each process
_SECONDS_TO_END = 2.0  # a killed process ends at once, except in a read of some network storage

# Processes to kill before multiprocessing waits for them at the end of the program: it would send
# them SIGTERM, which they block.
_running: set[BaseProcess] = set()


def _kill(processes: Sequence[BaseProcess]) -> None:
    """Kills processes, and waits shortly for their end."""
    for process in processes:
        process.kill()
    for process in processes:
        process.join(_SECONDS_TO_END)
    _running.difference_update(processes)


# Functions that are registered later are called earlier, and multiprocessing.util registers its own
# when it is imported, as it is above.
atexit.register(lambda: _kill(list(_running)))


class ReaderProcesses:
    """Processes that read the batches of some steps, for one iteration in order."""

    def __init__(self, source: "BatchSource", steps: range, num_processes: int):
        """Starts the processes, at most one for each of `steps`."""
        self._steps = steps
        self._is_closed = False
        self._connections: list[Connection] = []
        self._processes: list[BaseProcess] = []
        weakref.finalize(self, _kill, self._processes)
        # Not forked: forking a process with threads (jax) can deadlock.
        context = multiprocessing.get_context("spawn")
        # It would unblock signals when it starts.
        resource_tracker.ensure_running()
        # The main process decides what a signal means: readers go on until it stops them.
        with notices_blocked(signal.SIGINT, signal.SIGTERM):
            for _ in range(min(num_processes, len(steps))):
                connection, reader_connection = context.Pipe()
                process = context.Process(
                    target=_serve, args=(source, reader_connection), name="batches", daemon=True
                )
                process.start()
                _running.add(process)
                self._processes.append(process)
                self._connections.append(connection)
                reader_connection.close()  # else the end of the process would go unnoticed

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        """Yields the batches in the order of steps.

        Raises OSError if a process ended, and any error from reading a batch.
        """
        num_processes = len(self._connections)
        num_ahead = num_processes * _BATCHES_AHEAD
        num_steps = len(self._steps)
        for index in range(min(num_ahead, num_steps)):
            self._request(index)
        for index in range(num_steps):
            batch = self._receive(index % num_processes)
            if isinstance(batch, Exception):
                raise batch
            if index + num_ahead < num_steps:
                self._request(index + num_ahead)
            yield batch

    def _request(self, index: int) -> None:
        """Asks the process of a step, by its index in `steps`, to read it."""
        connection = self._connections[index % len(self._connections)]
        # What a process that ended does not take is noticed when its batch is missing.
        with contextlib.suppress(ConnectionError):
            connection.send(self._steps[index])

    def _receive(self, process_index: int) -> dict[str, np.ndarray] | Exception:
        """Returns the next batch of a process, or the error that it had."""
        try:
            return self._connections[process_index].recv()
        except (EOFError, ConnectionError) as error:
            process = self._processes[process_index]
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


def _serve(source: "BatchSource", connection: Connection) -> None:
    """Sends the batch of each step that is asked for, until the main process ends."""
    end_with_parent()
    # Either error means that the main process is gone.
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            step = connection.recv()
            connection.send(_read(source, step))


def _read(source: "BatchSource", step: int) -> dict[str, np.ndarray] | Exception:
    """Returns a batch, or its error in a form that can be sent to the main process."""
    try:
        return source[step]
    except (UserError, OSError) as error:
        if _can_be_sent(error):
            return error
        return RuntimeError(f"In the reader:\n{traceback.format_exc()}")
    except Exception:
        return RuntimeError(f"In the reader:\n{traceback.format_exc()}")


def _can_be_sent(error: Exception) -> bool:
    """Returns whether an error survives pickling."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return False
    return True
