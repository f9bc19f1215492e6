"""events.jsonl and metrics.jsonl: all events, and rows of numbers."""

from collections.abc import Callable, Mapping
from typing import Any

from etils import epath

from MaxText.metrics.events import EVENTS_FILE, PHASES, REPEATED, Event
from MaxText.metrics.json_lines import JsonlFile
from MaxText.storage.paths import parse_path

METRICS_FILE = "metrics.jsonl"


class EventFile(JsonlFile):
    """Appends each event as a row; `lost` is the cost of removed rows."""

    def __init__(self, folder: epath.Path, first_step: int, *, first_evaluation: int | None = None):
        """Opens the file; removes rows from `first_step` on."""
        first_of = {"evaluation": first_step if first_evaluation is None else first_evaluation}
        self.restart = 0
        self.lost: dict[str, Any] = {"steps": 0, "seconds": {}}

        def keep(row: dict[str, Any]) -> bool:
            if row.get("event") not in PHASES:
                return False  # not an event of this program
            if row["event"] in ("start", "resume"):
                self.restart += 1
            first = first_of.get(row["event"], first_step)
            if row["event"] not in REPEATED or (row.get("step") or 0) < first:
                return True
            seconds = self.lost["seconds"]
            phase = str(row.get("phase"))
            seconds[phase] = round(seconds.get(phase, 0.0) + (row.get("seconds") or 0.0), 6)
            if row["event"] == "step":
                self.lost["steps"] += row.get("updates") or 1
            return False

        super().__init__(folder / EVENTS_FILE, keep)

    def write(self, event: Event) -> None:
        self.append(event.row())


class MetricsFile(JsonlFile):
    """Appends the metrics of each report under MaxText's tags.

    Evaluation metrics join the row of their step, if that was reported and the file is not shared.
    """

    def __init__(self, folder: epath.Path, metrics_file: str, run_name: str, first_step: int):
        """Opens the file and removes this run's rows from `first_step` on.

        Not from a `metrics_file`, which other runs may write: repeated steps occur twice there.
        """
        self._run_name = run_name
        self._is_shared = bool(metrics_file)
        path = parse_path(metrics_file, "metrics_file") if metrics_file else folder / METRICS_FILE
        super().__init__(path, None if self._is_shared else self._before(first_step))

    def _before(self, step: int) -> Callable[[dict[str, Any]], bool]:
        return lambda row: row.get("step", -1) < step

    def write(self, event: Event) -> None:
        if event.kind == "rollback":
            if not self._is_shared:
                self.truncate(self._before(event.fields["restored_step"]))
        elif event.kind == "step":
            tags = {name: value for name, value in event.fields.items() if "/" in name}
            self._append(event, tags)
        elif event.kind == "evaluation":
            tags = {name: v for name, v in event.fields.items() if name.startswith("eval/")}
            if self.newest.get("step") == event.step and not self._is_shared:
                self.amend(tags)
            else:
                self._append(event, tags)

    def _append(self, event: Event, tags: Mapping[str, Any]) -> None:
        time = round(event.time, 3)
        self.append({"step": event.step, "run_name": self._run_name, "time": time, **tags})
