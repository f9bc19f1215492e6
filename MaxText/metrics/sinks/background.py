"""Threads for writing to slow places, to never block the run."""

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

# seconds between tries of an upload
_FIRST_WAIT = 1.0
_LONGEST_WAIT = 60.0


class BackgroundSink(Sink):
    """Passes events to a sink in order; reports problems once.

    An error ends the sink, not the run. If the queue is full, later events are dropped.
    """

    def __init__(self, sink: Sink, name: str, *, remedy: str = "", max_waiting: int = _MAX_WAITING):
        """Starts the thread; `remedy` tells users how to recover missed events."""
        self._sink = sink
        self._name = name
        self._remedy = f"; {remedy}" if remedy else ""
        self._max_waiting = max_waiting
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._ends = self._disabled = self._has_dropped = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def write(self, event: Event) -> None:
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
        if not self._ends and self._tasks.qsize() < self._max_waiting:
            self._tasks.put(self._sink.flush)

    def request_close(self) -> None:
        if not self._ends:
            self._ends = True
            self._tasks.put(None)

    def close(self, until: float | None = None) -> None:
        self.request_close()
        now = time.monotonic()
        self._thread.join(max(0.0, SECONDS_TO_CLOSE if until is None else until - now))
        if self._thread.is_alive():
            # At interpreter exit, libraries would wait for the same thing as the thread.
            processes.mark_thread_hung()
            self._disable("it was still busy at the end of the run")

    def _work(self) -> None:
        try:
            while (task := self._tasks.get()) is not None and not self._disabled:
                task()
            self._sink.close()
        except Exception as error:  # any failure ends the sink, none the run
            self._disable(first_line(error))
            self._sink.discard()

    def _disable(self, why: str) -> None:
        is_first = not self._disabled
        self._disabled = True
        if is_first:
            sys.stderr.write(
                f"warning: {self._name} disabled after an error: {why.rstrip('.')}. Training "
                f"continues{self._remedy}.\n"
            )


class BackgroundUploader:
    """Writes contents on a thread, skipping outdated ones, with retries."""

    def __init__(self, path: epath.Path):
        self._path = path
        self._content: Callable[[], bytes] = bytes
        self._asked = self._tried = self._done = 0  # sequence numbers of writes
        self._ends = self._warned = False
        self._changed = threading.Condition()
        threading.Thread(target=self._work, name="records", daemon=True).start()

    def write(self, content: Callable[[], bytes]) -> None:
        """Schedules a write; the thread calls `content` at each try."""
        with self._changed:
            self._content = content
            self._asked += 1
            self._changed.notify_all()

    @property
    def is_durable(self) -> bool:
        return self._done >= self._asked

    def wait_durable(self, until: float) -> None:
        """Waits until the newest contents are stored or failed, or `until`."""
        with self._changed:
            asked = self._asked
            self._changed.wait_for(lambda: self._tried >= asked, max(0.0, until - time.monotonic()))

    def close(self, until: float) -> None:
        """Waits for pending writes and ends the thread. Idempotent."""
        self.wait_durable(until)
        with self._changed:
            self._ends = True
            left = not self.is_durable
            self._changed.notify_all()
        if left:
            self._warn("timed out at the end of the run")

    def _work(self) -> None:
        wait: float | None = None  # seconds until a retry
        while True:
            with self._changed:
                # A new write retries at once, because its caller waits for the result.
                self._changed.wait_for(lambda: self._ends or self._asked > self._tried, wait)
                if self._ends and self._asked == self._tried:
                    return
                number = self._asked
                content = self._content
            try:
                self._path.write_bytes(content())
                done = number
                wait = None
            except Exception as error:  # storage clients raise anything
                self._warn(first_line(error))
                done = self._done
                wait = min(max(_FIRST_WAIT, 2 * (wait or 0.0)), _LONGEST_WAIT)
            with self._changed:
                self._tried = number
                self._done = done
                self._changed.notify_all()

    def _warn(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            sys.stderr.write(
                f"warning: upload of {self._path} failed: {why.rstrip('.')}. Training continues, "
                "and the upload is retried.\n"
            )
