"""Experiment trackers: a run under one id, over all its restarts.

A tracker must never block a run: the thread of the `BackgroundSink` in front of this sink imports
the package, connects and uploads.

events.jsonl is the record of a run; a tracker gets a copy. Its buffer may be lost when the run is
killed, and an error ends this sink before the run, so a restart sends the rows of events.jsonl
again that may not have arrived. Trackers cannot take rows back: of a step with several rows, after
a restart or a rollback, the last one is valid.
"""

import functools
import importlib.util
import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from etils import epath

from MaxText.config.training_sections import MonitoringConfig
from MaxText.errors import UserError
from MaxText.monitoring.events import EVENTS_FILE, Event, Sink
from MaxText.monitoring.json_lines import stream_rows
from MaxText.storage.atomic import atomic_write_text
from MaxText.storage.paths import is_object_store_path

_ROWS = ("step", "evaluation")  # events that become a row of metrics

Scalars = dict[str, Any]  # numbers and texts by name


def check_packages(monitoring: MonitoringConfig) -> None:
    """Checks that the packages of the enabled trackers are installed, without importing them.

    Raises:
      UserError: One is missing. The message has the command that installs it.
    """
    enabled = {
        "wandb": monitoring.enable_wandb and monitoring.wandb.mode != "disabled",
        "trackio": monitoring.enable_trackio,
        "mlflow": monitoring.enable_mlflow,
    }
    for name in (name for name, is_enabled in enabled.items() if is_enabled):
        package = importlib.util.find_spec(name)
        # A folder of the package's name, as some create, looks like a package without origin.
        if package is None or package.origin is None:
            raise UserError(
                f"enable_{name}=true needs the package {name}, which is not installed. Run: "
                f"pip install '.[{name}]'"
            )


class TrackerSink(Sink):
    """Sends steps, evaluations, samples, configuration and final state to a tracker.

    A subclass connects, and says how each of them is sent.

    Attributes:
      state_file: Name in the run folder: {"id": text, "rows": more than 0 once rows were sent,
        "time": of the newest event that has surely arrived}.
      upload_seconds: Within which the tracker has stored what it was handed.
    """

    state_file: ClassVar[str]
    upload_seconds: ClassVar[float]

    def __init__(
        self,
        run_folder: str | epath.Path,
        run_name: str,
        config_flat: Mapping[str, Any],
        first_step: int,
    ):
        """Connects at the first event.

        Args:
          run_folder: The folder of the run, with events.jsonl and the state of this sink.
          run_name: Name of the run in the tracker.
          config_flat: The configuration, by key.
          first_step: The first step of this start; 0 creates a new run in the tracker.
        """
        self.folder = epath.Path(run_folder)
        self.run_name = run_name
        self.config = dict(config_flat)
        self.first_step = first_step
        self._reason: str | None = None
        # Trackers write to local disks only.
        self.is_remote = is_object_store_path(str(run_folder))

    def local_folder(self, folder: Path) -> Path:
        """Returns a folder of the run's storage, or the working directory instead of a bucket."""
        return Path.cwd() if self.is_remote else folder.absolute()

    def connect(self) -> Any:
        """Returns the tracker's run, new or resumed, under the id of `state`."""
        raise NotImplementedError

    def log_summary(self, scalars: Scalars) -> None:
        """Sends the facts of a start."""
        raise NotImplementedError

    def log_row(self, step: int, metrics: Scalars, walltime: float) -> None:
        """Sends the metrics of a step or an evaluation; `walltime` is in Unix seconds."""
        raise NotImplementedError

    def log_sample(self, step: int, text: str) -> None:
        """Sends a generated text."""
        raise NotImplementedError

    def finish(self, reason: str | None) -> None:
        """Ends the tracker's run and waits until all has arrived.

        Args:
          reason: Of the event "stop"; None if the run ended without one.
        """
        raise NotImplementedError

    def write(self, event: Event) -> None:
        """Sends an event, after connecting if it is the first."""
        self._connect_once()
        if event.kind in ("start", "resume"):
            self.log_summary(_scalars(event.fields))
        elif event.kind in _ROWS and event.step is not None:
            self._log(event.step, event.fields, event.time)
        elif event.kind == "sample" and event.step is not None:
            self.log_sample(event.step, event.fields["text"])
        elif event.kind == "stop":
            self._reason = event.fields.get("reason")
        self._newest = event.time

    def flush(self) -> None:
        """Records which events have surely arrived."""
        self._connect_once()
        # What was handed over before the last flush was stored long ago.
        self.state["time"] = self._flushed - self.upload_seconds
        self._flushed = self._newest
        self.save_state()

    def close(self, until: float | None = None) -> None:
        """Waits for the upload, and records that all has arrived."""
        self._connect_once()
        self.finish(self._reason)
        self.state["time"] = self._newest
        self.save_state()

    @functools.cached_property
    def run(self) -> Any:
        """The tracker's run."""
        return self.connect()

    @functools.cached_property
    def state(self) -> dict[str, Any]:
        """The contents of the state file; new ones for a new run."""
        path = self.folder / self.state_file
        state = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        # Training restarted at 0 may differ.
        if state is None or (self.first_step == 0 and state["rows"] > 0):
            state = {"id": secrets.token_hex(4), "rows": 0, "time": 0.0}
        return state

    def save_state(self) -> None:
        """Writes the state file."""
        atomic_write_text(self.folder / self.state_file, json.dumps(self.state) + "\n")

    def _connect_once(self) -> None:
        """Connects, and sends rows of earlier restarts again that may not have arrived."""
        if "run" in self.__dict__:
            return
        self.save_state()  # the id, also if the run is killed before its first row
        state = self.state
        _ = self.run
        self._newest = state["time"]
        self._flushed = state["time"]
        recorded_rows = stream_rows(self.folder / EVENTS_FILE) if self.first_step else ()
        for row in recorded_rows:
            is_earlier = row.get("event") in _ROWS and row["step"] < self.first_step
            if is_earlier and row["time"] > state["time"]:
                self._log(row["step"], row, row["time"])

    def _log(self, step: int, fields: Mapping[str, Any], walltime: float) -> None:
        metrics = {name: value for name, value in _scalars(fields).items() if "/" in name}
        self.log_row(step, metrics, walltime)
        if not self.state["rows"]:
            self.state["rows"] = 1
            self.save_state()


def _scalars(fields: Mapping[str, Any]) -> Scalars:
    """Returns the fields that are numbers or texts; array scalars as numbers."""
    scalars = {}
    for name, field in fields.items():
        value = field.item() if hasattr(field, "item") else field
        if isinstance(value, str | int | float):
            scalars[name] = value
    return scalars
