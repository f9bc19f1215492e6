"""metrics.jsonl: one row of numbers per report, under MaxText's tags."""

from collections.abc import Callable, Mapping
from typing import Any

from etils import epath

from MaxText.metrics.events import Event
from MaxText.metrics.json_lines import JsonLines
from MaxText.storage.paths import parse_path

METRICS_FILE = "metrics.jsonl"


class MetricsFile:
    """Appends the metrics of each report, with the time in Unix seconds.

    Evaluation metrics join the row of their step, if that was reported and the file is not shared.
    """

    def __init__(self, folder: epath.Path, metrics_file: str, run_name: str, first_step: int):
        """Opens the file and removes this run's rows from `first_step` on.

        Not from a `metrics_file`, which other runs may write: repeated steps occur twice there.
        """
        self._run_name = run_name
        self._is_shared = bool(metrics_file)
        path = parse_path(metrics_file, "metrics_file") if metrics_file else folder / METRICS_FILE
        self._rows = JsonLines(path, None if self._is_shared else self._before(first_step))

    def _before(self, step: int) -> Callable[[dict[str, Any]], bool]:
        return lambda row: row.get("step", -1) < step

    def write(self, event: Event) -> None:
        if event.kind == "rewind":
            if not self._is_shared:
                self._rows.cut_back(self._before(event.facts["to"]))
        elif event.kind == "step":
            tags = {name: value for name, value in event.facts.items() if "/" in name}
            self._append(event, tags)
        elif event.kind == "evaluation":
            tags = {name: v for name, v in event.facts.items() if name.startswith("eval/")}
            if self._rows.newest.get("step") == event.step and not self._is_shared:
                self._rows.amend(tags)
            else:
                self._append(event, tags)

    def _append(self, event: Event, tags: Mapping[str, Any]) -> None:
        time = round(event.time, 3)
        self._rows.append({"step": event.step, "run_name": self._run_name, "time": time, **tags})

    def flush(self) -> None:
        self._rows.flush()

    def settle(self, until: float) -> None:
        self._rows.settle(until)

    def close(self) -> None:
        self._rows.close()
