"""A sink on a thread, to never block the run."""

import queue
import sys
import threading
import time

from MaxText.errors import first_line
from MaxText.metrics.events import Event, Sink
from MaxText.metrics.json_lines import SECONDS_TO_CLOSE
from MaxText.runtime import processes

_MAX_WAITING = 10_000  # queue size in events, some 10 MB
# Kinds that may be dropped, because only these could fill the memory.
_DROPPABLE = ("step", "evaluation")
_FLUSH = "flush"


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
        self._tasks: queue.SimpleQueue[Event | str | None] = queue.SimpleQueue()
        self._ends = self._disabled = self._has_dropped = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def write(self, event: Event) -> None:
        if self._ends or self._disabled:
            return
        if self._tasks.qsize() < self._max_waiting or event.kind not in _DROPPABLE:
            self._tasks.put(event)
        elif not self._has_dropped:
            self._has_dropped = True
            sys.stderr.write(
                f"warning: {self._name} cannot keep up: dropping events (events.jsonl is "
                "complete)\n"
            )

    def flush(self) -> None:
        if not self._ends and self._tasks.qsize() < self._max_waiting:
            self._tasks.put(_FLUSH)

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
                if isinstance(task, Event):
                    self._sink.write(task)
                else:
                    self._sink.flush()
            self._sink.close()
        except Exception as error:  # any failure ends the sink, none the run
            self._disable(first_line(error))

    def _disable(self, why: str) -> None:
        is_first, self._disabled = not self._disabled, True
        if is_first:
            sys.stderr.write(
                f"warning: {self._name} disabled after an error: {why.rstrip('.')}. Training "
                f"continues{self._remedy}.\n"
            )
