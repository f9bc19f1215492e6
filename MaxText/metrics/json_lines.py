"""events.jsonl and metrics.jsonl: crash-safe JSON Lines, cut back when a run resumes."""

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import IO, Any, AnyStr

from etils import epath

from MaxText.metrics.background_uploader import BackgroundUploader
from MaxText.metrics.events import EVENTS_FILE, PHASES, REPEATED, Event, Sink
from MaxText.storage.atomic import atomic_write_text
from MaxText.storage.paths import is_object_store_path, parse_path

METRICS_FILE = "metrics.jsonl"
SECONDS_TO_CLOSE = 60.0  # limit on the time that closing waits for sinks

Keep = Callable[[dict[str, Any]], bool]


class JsonlFile(Sink):
    """A growing file of JSON rows; `append` is durable against crashes.

    Object stores (gs://) cannot append, so rows go into segments of 4 MiB, `name.jsonl`,
    `name.1.jsonl` and so on; a thread rewrites the newest one as a whole after `flush`. Failures
    there log a warning, and the next `flush` tries again.
    """

    def __init__(self, path: str | epath.Path, keep: Keep | None, segment_bytes: int = 4 << 20):
        """Opens the file; drops malformed rows and those without `keep`.

        `keep` None keeps all rows, for a file shared by runs.
        """
        self.path = epath.Path(path)
        self._segment_bytes = segment_bytes
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[str] | None = None
        self._object: BackgroundUploader | None = None
        self._open(keep)

    def _open(self, keep: Keep | None) -> None:
        is_remote = is_object_store_path(self.path)
        existing = list(_segments(self.path)) or [self.path]
        lines: list[str] = []
        if keep is not None or is_remote:
            for segment in existing:
                lines = _kept(segment, keep or (lambda _row: True))
        self._number, self._segment = len(existing) - 1, existing[-1]
        self._last = lines[-1] if lines else ""
        if is_remote:
            self._begin(lines)
            return
        # Line-buffered, so that a killed process loses no finished row.
        self._file = open(self._segment, "a", buffering=1)  # noqa: SIM115
        if keep is None and self._segment.read_bytes()[-1:] not in (b"", b"\n"):
            self._file.write("\n")

    def _begin(self, lines: list[str]) -> None:
        self._lines = lines
        self._last = lines[-1] if lines else ""
        self._changed = False  # since the last hand-over to the writer
        self._object = BackgroundUploader(_segment(self.path, self._number))
        self._full: list[BackgroundUploader] = []  # full segments still being written

    def truncate(self, keep: Keep) -> None:
        """Atomically removes the newest rows by `keep`."""
        if self._file is None:
            kept = [line for line, row in _rows(self._lines) if keep(row)]
            if kept or self._number == 0:
                self._lines, self._changed = kept, True
                self._last = kept[-1] if kept else ""
                return
        self.close()
        self._open(keep)

    def append(self, row: Mapping[str, Any]) -> None:
        """Adds a row; NaN and infinity become null."""
        line = self._last = _line(row)
        if self._file is None:
            self._lines.append(line)
            self._changed = True
        else:
            self._file.write(line + "\n")

    @property
    def newest(self) -> dict[str, Any]:
        """The last row; empty if there is none, or if it is in a full segment."""
        return json.loads(self._last) if self._last else {}

    def amend(self, more: Mapping[str, Any]) -> None:
        """Adds fields to the newest row of a file with a single writer."""
        old, new = self._last, _line({**self.newest, **more})
        if self._file is None:
            self._lines[-1] = new
            self._changed = True
        else:
            # The new row is longer, so one write replaces the old one.
            with open(self._segment, "r+b") as file:
                file.seek(-len(old.encode()) - 1, os.SEEK_END)
                file.write(f"{new}\n".encode())
        self._last = new

    def flush(self) -> None:
        """Makes rows durable: locally at once, else soon (`wait_durable`)."""
        if self._object is not None:
            if self._changed:
                lines = list(self._lines)  # a copy, because rows may change during the write
                self._object.write(lambda: "".join(f"{line}\n" for line in lines).encode())
                self._changed = False
            self._next_segment()
        elif self._file is not None and not self._file.closed:
            self._file.flush()
            os.fsync(self._file.fileno())

    def _next_segment(self) -> None:
        assert self._object is not None
        for segment in [segment for segment in self._full if segment.is_durable]:
            segment.close(time.monotonic())
            self._full.remove(segment)
        if sum(map(len, self._lines)) >= self._segment_bytes:
            full = [*self._full, self._object]
            self._number += 1
            self._begin([])
            self._full = full

    def wait_durable(self, until: float) -> None:
        if self._object is not None:
            for segment in (*self._full, self._object):
                segment.wait_durable(until)

    def close(self, until: float | None = None) -> None:
        """Flushes and closes, waiting for an object store. Idempotent."""
        if self._object is not None:
            self.flush()
            until = time.monotonic() + SECONDS_TO_CLOSE if until is None else until
            for segment in (*self._full, self._object):
                segment.close(until)
            self._full = []
        elif self._file is not None:
            self.flush()
            self._file.close()


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


def _segment(path: epath.Path, number: int) -> epath.Path:
    return path if number == 0 else path.parent / f"{path.stem}.{number}{path.suffix}"


def _segments(path: epath.Path) -> Iterator[epath.Path]:
    number = 0
    while (segment := _segment(path, number)).exists():
        yield segment
        number += 1


def _kept(path: epath.Path, keep: Keep) -> list[str]:
    """Returns the rows to keep, after removing the others atomically."""
    if not path.exists():
        return []
    content = path.read_bytes()
    kept = [line.decode() for line, row in _rows(content.split(b"\n")) if keep(row)]
    wanted = "".join(f"{line}\n" for line in kept)
    if wanted.encode() != content:
        atomic_write_text(path, wanted)
    return kept


def last_change(path: str | epath.Path) -> float:
    """Returns the newest segment's modification time; 0 without one."""
    return max((segment.stat().mtime for segment in _segments(epath.Path(path))), default=0.0)


def read_rows(path: str | epath.Path) -> list[dict[str, Any]]:
    """Returns all complete rows, over all segments."""
    return list(stream_rows(path))


def stream_rows(path: str | epath.Path) -> Iterator[dict[str, Any]]:
    """Yields the rows one at a time, in constant memory."""
    for segment in _segments(epath.Path(path)):
        with segment.open("rb") as lines:
            yield from (row for _, row in _rows(lines))


def _rows(lines: Iterable[AnyStr]) -> Iterator[tuple[AnyStr, dict[str, Any]]]:
    for line in lines:
        try:
            # Otherwise json guesses the encoding of bytes.
            row = json.loads(line.decode() if isinstance(line, bytes) else line)
        except (ValueError, RecursionError):
            continue  # truncated by a crash, damaged, or empty
        if isinstance(row, dict):
            is_earlier = isinstance(row.get("event"), str) and "attempt" in row
            yield line, _current_event(row) if is_earlier else row


# Names in events of earlier versions, read for one release.
_KINDS = {"rewind": "rollback", "retry": "data_retry"}
_PHASES = {"start_up": "startup", "finish": "shutdown"}
_FIELDS = {
    "attempt": "restart", "unigram_entropy": "unigram_entropy_nats",
    "to": "restored_step", "noticed": "detected_step", "began": "onset_step",
}  # fmt: skip


def _current_event(row: dict[str, Any]) -> dict[str, Any]:
    kind, phase = row["event"], row.get("phase")
    if kind == "skip":
        kind = "record_skipped" if row.pop("what", "") == "record" else "step_skipped"
    row = {_FIELDS.get(name, name): value for name, value in row.items()}
    return {**row, "event": _KINDS.get(kind, kind), "phase": _PHASES.get(str(phase), phase)}


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps({name: to_json_value(value) for name, value in row.items()}, allow_nan=False)


def to_json_value(value: Any) -> Any:
    """Converts containers and array scalars; non-finite numbers to None."""
    if isinstance(value, Mapping):
        return {str(name): to_json_value(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | bool | None) else str(value)
