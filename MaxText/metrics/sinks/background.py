"""Threads that write to slow storage and trackers, so that they never block a run."""

import functools
import queue
import sys
import threading
import time
from collections.abc import Callable

from etils import epath

from MaxText.errors import first_line
from MaxText.metrics.events import SECONDS_TO_CLOSE, Event, Sink
from MaxText.runtime import processes

_MAX_WAITING = 10_000  # queue size in events, some 10 MB
# Kinds that may be dropped, because only these could fill the memory.
_DROPPABLE = ("step", "evaluation")

# Between tries of an upload.
_FIRST_RETRY_SECONDS = 1.0
_LONGEST_RETRY_SECONDS = 60.0


class BackgroundSink(Sink):
    """Passes events to a sink in order; reports problems once.

    An error ends the sink, not the run. If the queue is full, later events are dropped.
    """

    def __init__(self, sink: Sink, name: str, *, remedy: str = "", max_waiting: int = _MAX_WAITING):
        """Starts the thread.

        Args:
          sink: Gets the events, on the thread alone.
          name: Of the destination, for messages.
          remedy: Tells users how to recover events that were missed after an error; "" for no way.
          max_waiting: Events in the queue from which on steps and evaluations are dropped.
        """
        self._sink = sink
        self._name = name
        self._remedy = f"; {remedy}" if remedy else ""
        self._max_waiting = max_waiting
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._ends = False
        self._disabled = False
        self._has_dropped = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def write(self, event: Event) -> None:
        """Queues an event; drops a step or an evaluation if the queue is full."""
        if self._ends or self._disabled:
            return
        if self._tasks.qsize() < self._max_waiting or event.kind not in _DROPPABLE:
            self._tasks.put(functools.partial(self._sink.write, event))
        elif not self._has_dropped:
            self._has_dropped = True
            sys.stderr.write(
                f"warning: {self._name} cannot keep up: dropping events (events.jsonl is "
                "complete)\n"
            )

    def flush(self) -> None:
        """Queues a flush."""
        if not self._ends and self._tasks.qsize() < self._max_waiting:
            self._tasks.put(self._sink.flush)

    def request_close(self) -> None:
        """Lets the thread close the sink after the events in the queue."""
        if not self._ends:
            self._ends = True
            self._tasks.put(None)

    def close(self, until: float | None = None) -> None:
        """Waits for the thread, and gives it up at `until`."""
        self.request_close()
        timeout = SECONDS_TO_CLOSE if until is None else until - time.monotonic()
        self._thread.join(max(0.0, timeout))
        if self._thread.is_alive():
            # At interpreter exit, libraries would wait for the same thing as the thread.
            processes.mark_thread_hung()
            self._disable("it was still busy at the end of the run")

    def _work(self) -> None:
        try:
            while True:
                task = self._tasks.get()
                if task is None or self._disabled:
                    break
                task()
            self._sink.close()
        except Exception as error:  # any failure ends the sink, none the run
            self._disable(first_line(error))
            self._sink.discard()

    def _disable(self, reason: str) -> None:
        """Ends the sink, with a warning the first time."""
        is_first = not self._disabled
        self._disabled = True
        if is_first:
            sys.stderr.write(
                f"warning: {self._name} disabled after an error: {reason.rstrip('.')}. Training "
                f"continues{self._remedy}.\n"
            )


class BackgroundUploader:
    """Writes a file on a thread, again and again as a whole, with retries.

    If several versions wait, only the newest one is written.
    """

    def __init__(self, path: epath.Path):
        self._path = path
        self._content: Callable[[], bytes] = bytes
        # Sequence numbers of the newest write that was requested, tried and completed.
        self._requested = 0
        self._tried = 0
        self._completed = 0
        self._ends = False
        self._warned = False
        self._changed = threading.Condition()
        threading.Thread(target=self._work, name="records", daemon=True).start()

    def write(self, content: Callable[[], bytes]) -> None:
        """Schedules a write; the thread calls `content` at each try."""
        with self._changed:
            self._content = content
            self._requested += 1
            self._changed.notify_all()

    @property
    def is_durable(self) -> bool:
        """Whether the newest contents are stored."""
        return self._completed >= self._requested

    def wait_durable(self, until: float) -> None:
        """Waits until the newest contents are stored or failed, or `until`."""
        with self._changed:
            newest_write = self._requested
            self._changed.wait_for(
                lambda: self._tried >= newest_write, max(0.0, until - time.monotonic())
            )

    def close(self, until: float) -> None:
        """Waits for pending writes and ends the thread. Idempotent."""
        self.wait_durable(until)
        with self._changed:
            self._ends = True
            is_unfinished = not self.is_durable
            self._changed.notify_all()
        if is_unfinished:
            self._warn("timed out at the end of the run")

    def _work(self) -> None:
        """Writes the newest contents until `close`, and tries again after a failure."""
        retry_seconds: float | None = None  # until a retry; None if there is nothing to retry
        while True:
            with self._changed:
                # A new write retries at once, because its caller waits for the result.
                self._changed.wait_for(
                    lambda: self._ends or self._requested > self._tried, retry_seconds
                )
                if self._ends and self._requested == self._tried:
                    return
                number = self._requested
                content = self._content
            try:
                self._path.write_bytes(content())
                completed = number
                retry_seconds = None
            except Exception as error:  # storage clients raise anything
                self._warn(first_line(error))
                completed = self._completed
                doubled = 2 * (retry_seconds or 0.0)
                retry_seconds = min(max(_FIRST_RETRY_SECONDS, doubled), _LONGEST_RETRY_SECONDS)
            with self._changed:
                self._tried = number
                self._completed = completed
                self._changed.notify_all()

    def _warn(self, reason: str) -> None:
        """Warns of a failed upload, once."""
        if not self._warned:
            self._warned = True
            sys.stderr.write(
                f"warning: upload of {self._path} failed: {reason.rstrip('.')}. Training "
                "continues, and the upload is retried.\n"
            )
