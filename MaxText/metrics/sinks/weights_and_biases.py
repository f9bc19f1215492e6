"""Weights & Biases: a run under one id, over all its restarts.

W&B must never block a run: the thread of the `BackgroundSink` in front of this sink imports the
package, connects and uploads.

events.jsonl is the record of a run; W&B gets a copy. W&B's process loses its buffer when it is
killed, and an error ends this sink before the run, so a restart sends the rows of events.jsonl
again that may not have arrived. W&B's row numbers only grow, so the column `step` is the axis of
all charts. Of a step with several rows, after a restart or a rollback, the last one is valid.
"""

import functools
import html
import importlib.util
import json
import pathlib
import secrets
from collections.abc import Mapping
from typing import Any

from etils import epath

from MaxText.config.training_sections import MonitoringConfig
from MaxText.errors import UserError
from MaxText.metrics.events import EVENTS_FILE, Event, Sink
from MaxText.metrics.json_lines import stream_rows
from MaxText.storage.atomic import atomic_write_text

# {"id": text, "rows": row numbers taken, "time": of the newest event that has surely arrived}.
STATE_FILE = "wandb.json"

_ROWS = ("step", "evaluation")  # events that become a row of W&B's history
_AXIS = "step"  # column used as the axis of charts
_RESERVED = 1000  # row numbers taken at a time; those that a killed run leaves are a gap

_CONNECT_SECONDS = 45.0
_UPLOAD_SECONDS = 45.0


class WandbSink(Sink):
    """Sends steps, evaluations, samples, configuration and final state."""

    def __init__(
        self,
        monitoring: MonitoringConfig,
        run_folder: epath.Path,
        run_name: str,
        config_flat: Mapping[str, Any],
        first_step: int,
    ):
        """Checks the package; connects at the first event.

        Args:
          monitoring: Project, entity and mode of W&B.
          run_folder: The folder of the run, with events.jsonl and the state of this sink.
          run_name: Name of the run in W&B.
          config_flat: The configuration, by key.
          first_step: The first step of this start; 0 creates a new W&B run.

        Raises:
          UserError: The package wandb is not installed.
        """
        package = importlib.util.find_spec("wandb")
        # A folder named wandb, which W&B itself creates, looks like a package without origin.
        if package is None or package.origin is None:
            raise UserError(
                "enable_wandb=true needs the package wandb, which is not installed. Run: "
                "pip install '.[wandb]'"
            )
        self._monitoring = monitoring
        self._folder = epath.Path(run_folder)
        self._run_name = run_name
        self._config = dict(config_flat)
        self._first_step = first_step
        self._exit_code = 1  # unless the run reports completion
        # W&B's process writes to local disks only.
        is_remote = str(run_folder).startswith("gs://")
        self._parent = pathlib.Path.cwd() if is_remote else pathlib.Path(run_folder)
        self.remedy = (
            "a restart of the unfinished run sends what W&B lacks, and `wandb sync` what is in "
            f"{self._parent / 'wandb'}"
        )

    def write(self, event: Event) -> None:
        """Sends an event, after connecting if it is the first."""
        run = self._run
        if event.kind in ("start", "resume"):
            run.summary.update(_scalars(event.fields))
        elif event.kind in _ROWS and event.step is not None:
            self._log(run, event.step, event.fields, event.time)
        elif event.kind == "sample" and event.step is not None:
            import wandb

            sample = wandb.Html(f"<pre>{html.escape(event.fields['text'])}</pre>")
            run.log({"sample": sample, _AXIS: event.step}, step=self._next_row())
        elif event.kind == "stop":
            reason = event.fields.get("reason")
            run.summary["stop"] = reason
            self._exit_code = 0 if reason == "completed" else 1
        self._newest = event.time

    def flush(self) -> None:
        """Records which events have surely arrived."""
        # W&B has uploaded what was handed over long before the last flush.
        self._state["time"] = self._flushed - _UPLOAD_SECONDS
        self._flushed = self._newest
        self._save()

    def close(self, until: float | None = None) -> None:
        """Waits for the upload, and records that all has arrived."""
        self._run.finish(exit_code=self._exit_code)
        self._state |= {"rows": self._row, "time": self._newest}
        self._save()

    @functools.cached_property
    def _run(self) -> Any:
        """Returns the W&B run, after sending rows of earlier attempts again."""
        import wandb

        self._save()  # the id, also if the run is killed before its first row
        # No W&B output on the terminal, and above all no prompt for a key, which would block.
        quiet = {"silent": True, "console": "off"}
        wandb.setup(wandb.Settings(**quiet))
        kind = self._config.get("decoder_block")
        model = self._config.get("model_name")
        run = wandb.init(
            project=self._monitoring.wandb.project,
            entity=self._monitoring.wandb.entity or None,
            name=self._run_name,
            id=self._state["id"],
            resume="allow",
            mode=self._monitoring.wandb.mode,
            dir=str(self._parent),
            config=self._config,
            allow_val_change=True,
            tags=[tag for tag in (kind, model) if tag and tag != "default"],
            settings=wandb.Settings(
                **quiet,
                disable_git=True,  # the remote's URL may hold a password
                disable_code=True,
                init_timeout=_CONNECT_SECONDS,
                finish_timeout=_UPLOAD_SECONDS,
                finish_timeout_raises=True,
            ),
        )
        run.define_metric(_AXIS)
        run.define_metric("*", step_metric=_AXIS)
        state = self._state
        self._row = max(state["rows"], run.starting_step)
        self._newest = state["time"]
        self._flushed = state["time"]
        recorded_rows = stream_rows(self._folder / EVENTS_FILE) if self._first_step else ()
        for row in recorded_rows:
            is_earlier = row.get("event") in _ROWS and row["step"] < self._first_step
            if is_earlier and row["time"] > state["time"]:
                self._log(run, row["step"], row, row["time"])
        return run

    def _log(self, run: Any, step: int, fields: Mapping[str, Any], walltime: float) -> None:
        """Adds a row of metrics; `walltime` is in Unix seconds."""
        tags = {name: value for name, value in _scalars(fields).items() if "/" in name}
        run.log({**tags, _AXIS: step, "_timestamp": walltime}, step=self._next_row())

    def _next_row(self) -> int:
        """Returns an unused row number, after reserving a range of them on disk if needed."""
        if self._row >= self._state["rows"]:
            self._state["rows"] = self._row + _RESERVED
            self._save()
        self._row += 1
        return self._row - 1

    @functools.cached_property
    def _state(self) -> dict[str, Any]:
        """The contents of STATE_FILE; new ones for a new run."""
        path = self._folder / STATE_FILE
        state = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        # Training restarted at 0 may differ, and W&B cannot take rows back.
        if state is None or (self._first_step == 0 and state["rows"] > 0):
            state = {"id": secrets.token_hex(4), "rows": 0, "time": 0.0}
        return state

    def _save(self) -> None:
        atomic_write_text(self._folder / STATE_FILE, json.dumps(self._state) + "\n")


def _scalars(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that are numbers or texts; array scalars as numbers."""
    scalars = {}
    for name, field in fields.items():
        value = field.item() if hasattr(field, "item") else field
        if isinstance(value, str | int | float):
            scalars[name] = value
    return scalars
