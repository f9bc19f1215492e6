"""Events of a run, as rows of events.jsonl, the source of all records.

docs/reference/run_folder_and_events.md lists the fields of each kind.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

EVENTS_FILE = "events.jsonl"
SECONDS_TO_CLOSE = 60.0  # limit on the time that closing waits for sinks

# Kind of event -> phase that the preceding time was spent in.
PHASES: dict[str, str] = {
    "start": "startup",
    "resume": "startup",
    "config_change": "startup",
    "compile": "compile",
    "step": "train",
    "step_skipped": "train",
    "record_skipped": "train",
    "rollback": "train",
    "data_retry": "train",
    "growth": "startup",
    "evaluation": "evaluation",
    "checkpoint": "checkpoint",
    "sample": "shutdown",
    "stop": "shutdown",
}

# Kinds repeated by an attempt that resumes before the last step of the previous one.
REPEATED = (
    "step", "step_skipped", "record_skipped", "rollback", "data_retry", "evaluation", "checkpoint",
    "sample",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Event:
    """A row of events.jsonl."""

    kind: str
    time: float  # Unix seconds at its end
    restart: int = 0  # starts of the program in this run folder before this one
    step: int | None = None  # from 0
    seconds: float = 0.0  # wall time, to be summed by phase
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        return {
            "time": round(self.time, 3),
            "event": self.kind,
            "phase": PHASES[self.kind],
            "restart": self.restart,
            "step": self.step,
            "seconds": round(self.seconds, 6),
            **self.fields,
        }


class Sink:
    """A destination of events, called from one thread; times are monotonic."""

    def write(self, event: Event) -> None:
        """Handles an event without blocking the training loop."""
        raise NotImplementedError

    def flush(self) -> None:
        """Makes events durable, as far as possible without waiting."""

    def wait_durable(self, until: float) -> None:
        """Waits until flushed rows needed for a resume are durable or failed."""

    def request_close(self) -> None:
        """Requests closing without waiting for it."""

    def close(self, until: float | None = None) -> None:
        """Flushes and releases all, by default in a minute. Idempotent."""
