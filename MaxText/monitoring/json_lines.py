"""events.jsonl and metrics.jsonl: files of JSON rows that survive crashes.

A run that resumes at step s repeats steps that the killed one had recorded, so opening a file
removes the rows of step s and later. A rollback does the same to metrics.jsonl.
"""

import contextlib
import itertools
import json
import math
import os
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from etils import epath

from MaxText.monitoring.events import EVENTS_FILE, PHASES, REPEATED, SECONDS_TO_CLOSE, Event, Sink
from MaxText.monitoring.sinks.background import BackgroundUploader
from MaxText.storage.atomic import atomic_write_bytes
from MaxText.storage.paths import is_object_store_path, parse_path
from MaxText.value_types import JsonValue

METRICS_FILE = "metrics.jsonl"
_LONGEST_ROW = 1 << 20  # bytes of a row to amend

Keep = Callable[[dict[str, Any]], bool]


class JsonlFile(Sink):
    """A growing file of JSON rows; `append` is durable against crashes.

    Object stores (gs://) cannot append, so rows go into segments of 4 MiB, `name.jsonl`,
    `name.1.jsonl` and so on. The newest one grows in a temporary folder; a thread uploads it as a
    whole after `flush`. Failures there log a warning, and the next `flush` tries again.
    """

    def __init__(self, path: str | epath.Path, keep: Keep | None, segment_bytes: int = 4 << 20):
        """Opens the file; drops malformed rows and those that `keep` refuses.

        Args:
          path: Path of the first segment, local or in an object store.
          keep: Gets a row and returns whether it stays. None keeps all rows, for a file shared by
            runs.
          segment_bytes: Size after which a new segment begins in an object store.
        """
        self.path = epath.Path(path)
        self._segment_bytes = segment_bytes
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._uploads: list[BackgroundUploader] = []  # of segments in a bucket, the newest last
        self._temporary: tempfile.TemporaryDirectory | None = None
        self._open(keep)

    def _open(self, keep: Keep | None) -> None:
        existing = list(_segments(self.path)) or [self.path]
        if keep is not None:
            for segment in existing:
                _drop(segment, keep)
        is_stored = is_object_store_path(self.path) and existing[-1].exists()
        self._begin(len(existing) - 1, existing[-1].read_bytes() if is_stored else b"")

    def _begin(self, number: int, content: bytes = b"") -> None:
        """Opens a segment, or the local copy of one in a bucket."""
        segment = _segment(self.path, number)
        self._number = number
        self._local = segment
        if is_object_store_path(self.path):
            self._temporary = self._temporary or tempfile.TemporaryDirectory(prefix="records_")
            self._local = pathlib.Path(self._temporary.name, segment.name)
            self._local.write_bytes(content)
            self._uploaded = content
            self._uploads.append(BackgroundUploader(segment))
        self._open_local()

    def _open_local(self) -> None:
        # Unbuffered, so that a killed process loses no finished row, and so that rows which could
        # not be written are in `_unwritten` and nowhere else.
        self._file = open(self._local, "ab", buffering=0)  # noqa: SIM115
        with open(self._local, "rb") as file:
            file.seek(max(os.path.getsize(self._local) - _LONGEST_ROW, 0))
            content = file.read()
        self._last = content.rstrip(b"\n").rpartition(b"\n")[2].decode(errors="replace")
        self._unwritten = b"" if content[-1:] in (b"", b"\n") else b"\n"
        self._write_out()

    def _write_out(self) -> None:
        """Writes the rows that are not in the file yet; OSError names the file."""
        with self._naming_file():
            while self._unwritten:
                # Fewer bytes than asked for are written where a disk becomes full.
                written = self._file.write(self._unwritten)
                self._unwritten = self._unwritten[written:]

    @contextlib.contextmanager
    def _naming_file(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            error.filename = error.filename or str(self._local)
            raise

    def truncate(self, keep: Keep) -> None:
        """Atomically removes the newest rows that `keep` refuses."""
        self._write_out()
        _drop(self._local, keep)
        replaced_file = self._file
        self._open_local()
        replaced_file.close()
        if self._number and not self._last:
            # Older segments may have rows to remove.
            self.close()
            self._open(keep)

    def append(self, row: Mapping[str, Any]) -> None:
        """Adds a row; NaN and infinity become null.

        Raises:
          OSError: If it cannot be written now. The next call tries again.
        """
        self._last = _line(row)
        self._unwritten += f"{self._last}\n".encode()
        self._write_out()

    @property
    def newest(self) -> dict[str, Any]:
        """The last row; empty if there is none, or if it is in a full segment."""
        return json.loads(self._last) if self._last else {}

    def amend(self, fields: Mapping[str, Any]) -> None:
        """Adds fields to the newest row of a file with a single writer.

        Raises:
          OSError: If it cannot be written now. The next call of any method tries again.
        """
        old_row = f"{self._last}\n".encode()
        self._last = _line({**self.newest, **fields})
        new_row = f"{self._last}\n".encode()
        if self._unwritten:  # ends in the old row, whole or in part
            start = len(self._unwritten) - len(old_row)
            if start >= 0:
                self._unwritten = self._unwritten[:start] + new_row
                self._write_out()
                return
            self._write_out()
        # The new row is longer, so one write replaces the old one.
        with self._naming_file(), open(self._local, "r+b", buffering=0) as file:
            position = file.seek(-len(old_row), os.SEEK_END)
            try:
                written = file.write(new_row)
            except OSError:
                written = 0
                raise
            finally:
                if written < len(new_row):  # it is appended as a whole
                    self._unwritten = new_row
                    file.truncate(position)
        self._write_out()

    def flush(self) -> None:
        """Makes rows durable: locally at once, else soon (`wait_durable`)."""
        if self._file.closed:
            return
        self._write_out()
        if not self._uploads:
            with self._naming_file():
                os.fsync(self._file.fileno())
            return
        content = self._local.read_bytes()
        if content != self._uploaded:
            self._uploads[-1].write(lambda: content)
            self._uploaded = content
        for upload in self._uploads[:-1]:  # of full segments
            if upload.is_durable:
                upload.close(time.monotonic())
                self._uploads.remove(upload)
        if len(content) >= self._segment_bytes:
            self._file.close()
            os.unlink(self._local)  # its upload holds the content
            self._begin(self._number + 1)

    def wait_durable(self, until: float) -> None:
        """Waits for uploads to an object store; there are none of a local file."""
        for upload in self._uploads:
            upload.wait_durable(until)

    def close(self, until: float | None = None) -> None:
        """Flushes and closes, waiting for an object store. Idempotent."""
        until = time.monotonic() + SECONDS_TO_CLOSE if until is None else until
        try:
            self.flush()
        finally:
            for upload in self._uploads:
                upload.close(until)
            self._uploads = []
            self._file.close()
            if self._temporary is not None:
                self._temporary.cleanup()
                self._temporary = None


class EventFile(JsonlFile):
    """Appends each event as a row of events.jsonl.

    Attributes:
      restart: Starts of the program in this folder before this one.
      lost: Cost of the removed rows, which this start repeats: {"steps": n, "seconds": {phase: s}}.
    """

    def __init__(self, folder: epath.Path, first_step: int, *, first_evaluation: int | None = None):
        """Opens the file and removes the rows that this start repeats.

        Args:
          folder: The folder of the run.
          first_step: The first step of this start.
          first_evaluation: The step after which it evaluates first, if that is not `first_step` or
            later: one that makes up for an evaluation begins a step earlier.
        """
        if first_evaluation is None:
            first_evaluation = first_step
        self.restart = 0
        self.lost: dict[str, Any] = {"steps": 0, "seconds": {}}

        def keep(row: dict[str, Any]) -> bool:
            if row.get("event") not in PHASES:
                return False  # not an event of this program
            if row["event"] in ("start", "resume"):
                self.restart += 1
            first_removed = first_evaluation if row["event"] == "evaluation" else first_step
            if row["event"] not in REPEATED or (row.get("step") or 0) < first_removed:
                return True
            seconds = self.lost["seconds"]
            phase = str(row.get("phase"))
            seconds[phase] = round(seconds.get(phase, 0.0) + (row.get("seconds") or 0.0), 6)
            if row["event"] == "step":
                self.lost["steps"] += row.get("updates") or 1
            return False

        super().__init__(folder / EVENTS_FILE, keep)

    def write(self, event: Event) -> None:
        """Appends the event."""
        self.append(event.row())


class MetricsFile(JsonlFile):
    """Appends the metrics of each report under MaxText's tags.

    Evaluation metrics join the row of their step, if that was reported and the file is not shared.
    """

    def __init__(self, folder: epath.Path, metrics_file: str, run_name: str, first_step: int):
        """Opens the file and removes the rows from `first_step` on.

        Args:
          folder: The folder of the run, for metrics.jsonl.
          metrics_file: Path of a file that other runs may write, too, in place of metrics.jsonl; ""
            for none. Nothing is removed there, so repeated steps occur twice.
          run_name: Stored in each row.
          first_step: The first step of this start.
        """
        self._run_name = run_name
        self._is_shared = bool(metrics_file)
        path = parse_path(metrics_file, "metrics_file") if metrics_file else folder / METRICS_FILE
        super().__init__(path, None if self._is_shared else self._before(first_step))

    def _before(self, step: int) -> Callable[[dict[str, Any]], bool]:
        return lambda row: row.get("step", -1) < step

    def write(self, event: Event) -> None:
        """Appends a step, adds an evaluation to its step, and removes what is rolled back."""
        if event.kind == "rollback" and not self._is_shared:
            self.truncate(self._before(event.fields["restored_step"]))
        elif event.kind in ("step", "evaluation"):
            prefix = "" if event.kind == "step" else "eval/"
            tags = {
                name: value
                for name, value in event.fields.items()
                if "/" in name and name.startswith(prefix)
            }
            joins = event.kind == "evaluation" and not self._is_shared
            if joins and self.newest.get("step") == event.step:
                self.amend(tags)
            else:
                row = {"step": event.step, "run_name": self._run_name, "time": round(event.time, 3)}
                self.append({**row, **tags})


def _segment(path: epath.Path, number: int) -> epath.Path:
    return path if number == 0 else path.parent / f"{path.stem}.{number}{path.suffix}"


def _segments(path: epath.Path) -> Iterator[epath.Path]:
    segments = (_segment(path, number) for number in itertools.count())
    return itertools.takewhile(lambda segment: segment.exists(), segments)


def _drop(path: epath.Path | pathlib.Path, keep: Keep) -> None:
    """Atomically removes malformed rows and those that `keep` refuses."""
    if not path.exists():
        return
    content = path.read_bytes()
    lines = [line + b"\n" for line, row in _rows(content.split(b"\n")) if keep(row)]
    new_content = b"".join(lines)
    if new_content != content:
        atomic_write_bytes(path, new_content)


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


def _rows(lines: Iterable[bytes]) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yields each line that is a JSON object, and the object."""
    for line in lines:
        try:
            row = json.loads(line.decode())  # otherwise json guesses the encoding
        except (ValueError, RecursionError):
            continue  # truncated by a crash, damaged, or empty
        if isinstance(row, dict):
            yield line, row


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps({name: to_json_value(value) for name, value in row.items()}, allow_nan=False)


def to_json_value(value: Any) -> JsonValue:
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
