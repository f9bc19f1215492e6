"""events.jsonl: every event of a run, over all its attempts."""

from typing import Any

from etils import epath

from MaxText.metrics.events import EVENTS_FILE, PHASES, REPEATED, Event
from MaxText.metrics.json_lines import JsonLines


class EventFile:
    """Appends each event as a row; `lost` is the cost of the rows removed on resume."""

    def __init__(self, folder: epath.Path, first_step: int, *, first_evaluation: int | None = None):
        """Opens the file and removes rows from `first_step` or `first_evaluation` on."""
        first_of = {"evaluation": first_step if first_evaluation is None else first_evaluation}
        self.attempt = 0
        self.lost: dict[str, Any] = {"steps": 0, "seconds": {}}

        def keep(row: dict[str, Any]) -> bool:
            if row.get("event") not in PHASES:
                return False  # not an event of this program
            if row["event"] in ("start", "resume"):
                self.attempt += 1
            first = first_of.get(row["event"], first_step)
            if row["event"] not in REPEATED or (row.get("step") or 0) < first:
                return True
            seconds = self.lost["seconds"]
            phase = str(row.get("phase"))
            seconds[phase] = round(seconds.get(phase, 0.0) + (row.get("seconds") or 0.0), 6)
            if row["event"] == "step":
                self.lost["steps"] += row.get("updates") or 1
            return False

        self._rows = JsonLines(folder / EVENTS_FILE, keep)

    def write(self, event: Event) -> None:
        self._rows.append(event.row())

    def flush(self) -> None:
        self._rows.flush()

    def settle(self, until: float) -> None:
        self._rows.settle(until)

    def close(self) -> None:
        self._rows.close()
