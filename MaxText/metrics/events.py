"""Events of a run, as rows of events.jsonl, from which all other records derive.

A row is a JSON object with these fields and the facts of its kind:

  time     Unix seconds at which it ended
  event    its kind, see PHASES
  phase    what the program was doing until then, see PHASES
  attempt  0 for the first start of the program in this run folder, 1 for its first restart, ...
  step     the update it belongs to, from 0, or null
  seconds  wall time, to be added up by phase

docs/report.md documents the facts of each kind.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

EVENTS_FILE = "events.jsonl"

# Kind of event -> what the time up to it was spent on.
PHASES: dict[str, str] = {
    "start": "start_up",
    "resume": "start_up",
    "config_change": "start_up",
    "compile": "compile",
    "step": "train",
    "skip": "train",
    "rewind": "train",
    "retry": "train",
    "growth": "start_up",
    "evaluation": "evaluation",
    "checkpoint": "checkpoint",
    "sample": "finish",
    "stop": "finish",
}

# Kinds that an attempt does again when it begins at an earlier step than the last one had reached.
REPEATED = ("step", "skip", "rewind", "retry", "evaluation", "checkpoint", "sample")


@dataclasses.dataclass(frozen=True)
class Event:
    """An event, see above.

    Attributes:
      facts: JSON values by name; metrics of steps and evaluations under MaxText's tags.
      report: For the terminal; not stored.
    """

    kind: str
    time: float
    attempt: int = 0
    step: int | None = None
    seconds: float = 0.0
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    report: Any = None

    @property
    def phase(self) -> str:
        """What the time up to the event was spent on."""
        return PHASES[self.kind]

    def row(self) -> dict[str, Any]:
        """Returns the event as a row of events.jsonl."""
        return {
            "time": round(self.time, 3),
            "event": self.kind,
            "phase": self.phase,
            "attempt": self.attempt,
            "step": self.step,
            "seconds": round(self.seconds, 6),
            **self.facts,
        }


class Sink(Protocol):
    """A destination of events. Called from one thread."""

    def write(self, event: Event) -> None:
        """Takes an event; must not block the training loop."""

    def flush(self) -> None:
        """Makes events durable, as far as possible without waiting."""

    def close(self) -> None:
        """Flushes and releases files and threads. Safe to call twice."""


@runtime_checkable
class Record(Sink, Protocol):
    """A sink that resuming needs: no row may be missing next to a checkpoint."""

    def settle(self, until: float) -> None:
        """Waits for flushed rows to be durable or to fail, until `until` of time.monotonic."""


@runtime_checkable
class Tracker(Sink, Protocol):
    """A sink with its own thread, for people to watch a run."""

    def end(self) -> None:
        """Requests closing, without waiting for it."""

    def wait(self, until: float) -> None:
        """Waits until it has closed after `end`, or until `until` of time.monotonic."""
