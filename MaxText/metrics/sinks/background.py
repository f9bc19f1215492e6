"""A sink on a thread, so that a slow one never blocks the run."""

import collections
import sys
import threading
import time

from MaxText.metrics.events import Event, Sink
from MaxText.metrics.json_lines import SECONDS_TO_CLOSE
from MaxText.runtime import processes

_MAX_WAITING = 10_000  # queue size in events, some 10 MB
# Kinds that may be dropped, because only these could fill the memory.
_DROPPABLE = ("step", "evaluation")
_FLUSH = "flush"


class BackgroundSink:
    """Passes events to a sink in order; errors and dropped events are reported once.

    An error ends the sink, not the run. If the queue is full, later events are dropped.
    """

    def __init__(self, sink: Sink, name: str, *, remedy: str = "", max_waiting: int = _MAX_WAITING):
        """Starts the thread; `remedy` tells users how to recover missed events."""
        self._sink = sink
        self._name = name
        self._remedy = f"; {remedy}" if remedy else ""
        self._max_waiting = max_waiting
        self._waiting: collections.deque[Event | str] = collections.deque()
        self._ends = self._disabled = self._has_dropped = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def write(self, event: Event) -> None:
        self._ask(event)

    def flush(self) -> None:
        self._ask(_FLUSH)

    def request_close(self) -> None:
        with self._changed:
            self._ends = True
            self._changed.notify_all()

    def wait(self, until: float) -> None:
        """Waits until it has closed after `request_close`, or until `until` of time.monotonic."""
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            # At interpreter exit, libraries would wait for the same thing as the thread.
            processes.mark_thread_hung()
            self._disable("it was still busy at the end of the run")

    def close(self) -> None:
        self.request_close()
        self.wait(time.monotonic() + SECONDS_TO_CLOSE)

    def _ask(self, task: Event | str) -> None:
        with self._changed:
            if self._ends or self._disabled:
                return
            if task is _FLUSH and self._waiting and self._waiting[-1] is _FLUSH:
                return
            is_droppable = isinstance(task, Event) and task.kind in _DROPPABLE
            if len(self._waiting) < self._max_waiting or not is_droppable:
                self._waiting.append(task)
                self._changed.notify_all()
                return
            is_first, self._has_dropped = not self._has_dropped, True
        if is_first:
            sys.stderr.write(
                f"warning: {self._name} cannot keep up: dropping events (events.jsonl is "
                "complete)\n"
            )

    def _work(self) -> None:
        try:
            while (task := self._next()) is not None:
                if isinstance(task, Event):
                    self._sink.write(task)
                else:
                    self._sink.flush()
            self._sink.close()
        except Exception as error:  # any failure ends the sink, none the run
            self._disable((str(error).strip() or type(error).__name__).splitlines()[0])

    def _next(self) -> Event | str | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ends)
            return self._waiting.popleft() if self._waiting else None

    def _disable(self, why: str) -> None:
        with self._changed:
            is_first, self._disabled = not self._disabled, True
            self._waiting.clear()
        if is_first:
            sys.stderr.write(
                f"warning: {self._name} disabled after an error: {why.rstrip('.')}. Training "
                f"continues{self._remedy}.\n"
            )
