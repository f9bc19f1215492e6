"""What happens in a run, as rows of events.jsonl: the one record that everything else is fed from.

A row is an object of JSON with these fields, and beside them the facts of its kind:

  time     Unix seconds at which what it describes ended
  event    its kind, see PHASES
  phase    what the program was doing until then, see PHASES
  attempt  0 for the first start of the program in this run folder, 1 for its first restart, ...
  step     the update it belongs to, counted from 0; null where there is none
  seconds  wall time it took, to be added up by phase; 0 for what takes none

docs/report.md says what the facts of each kind are.
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
    """One thing that happened.

    Attributes:
      kind: one of PHASES.
      time: Unix seconds at its end.
      attempt: starts of the program in this run folder before this one.
      step: the update it belongs to, from 0; None where there is none.
      seconds: wall time it took.
      facts: JSON values by name; numbers of steps and evaluations under MaxText's tags.
      report: what a step or an evaluation says on the terminal; not stored.
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
        """The event as it stands in events.jsonl."""
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
    """Where events go. Called from one thread."""

    def write(self, event: Event) -> None:
        """Takes an event; must not hold up the training loop."""

    def flush(self) -> None:
        """Makes what was taken durable, as far as the place allows without a wait."""

    def close(self) -> None:
        """Flushes and lets go of files and threads. Safe to call twice."""


@runtime_checkable
class Record(Sink, Protocol):
    """What a run goes on from: a sink of which no row may be missing beside a checkpoint."""

    def settle(self, until: float) -> None:
        """Waits until what was flushed is durable, or cannot be; `until` of time.monotonic."""


@runtime_checkable
class Tracker(Sink, Protocol):
    """A sink with a thread of its own, which shows a run to people."""

    def end(self) -> None:
        """Asks for the close, without waiting for it."""

    def wait(self, until: float) -> None:
        """Waits until it has closed after `end`; `until` of time.monotonic."""
