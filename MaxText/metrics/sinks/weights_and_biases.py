"""Weights & Biases: a run under one id, over all its restarts.

W&B must never block a run: the thread of the `BackgroundSink` in front of this sink imports the
package, connects and uploads.

events.jsonl is the record of a run; W&B gets a copy. On restart, W&B (online the server, offline
the local files) tells the first row it lacks, and the steps from there are resent from
events.jsonl. So every step occurs once, whatever was killed and when.

W&B's row numbers only grow (its `rewind` is a preview that servers may lack). So the column `step`
is the axis of all charts, and after a rollback or a changed configuration the repeated steps get
new rows, of which the last one is valid (offline_history.StepCounter).
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
from MaxText.metrics.sinks.offline_history import StepCounter, next_step
from MaxText.storage.atomic import atomic_write_text

# {"id": text, "last_step": newest step handed to W&B or null, "shifts": see StepCounter,
# "rollbacks": number of the newest rollback in W&B's rows}.
STATE_FILE = "wandb.json"

_ROWS = ("step", "evaluation")  # events that become a row of W&B's history
_AXIS = "step"  # column used as the axis of charts

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
        """Does not connect yet; `first_step` 0 creates a new W&B run."""
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

    @property
    def remedy(self) -> str:
        return (
            "a restart of the unfinished run sends what W&B lacks, and `wandb sync` what is in "
            f"{self._local_folder() / 'wandb'}"
        )

    def write(self, event: Event) -> None:
        run, state = self._run, self._stored_state
        if event.kind in ("start", "resume"):
            run.summary.update(_scalars(event.fields))
        elif event.kind in _ROWS and event.step is not None:
            if event.step >= self._counter.first_missing:
                self._log(event.step, event.fields, event.time)
                is_first, state["last_step"] = state["last_step"] is None, event.step
                if is_first:
                    self._save(state)
        elif event.kind == "sample" and event.step is not None:
            import wandb

            sample = wandb.Html(f"<pre>{html.escape(event.fields['text'])}</pre>")
            row = {"sample": sample, _AXIS: event.step}
            run.log(row, step=self._counter.row(event.step))
        elif event.kind == "rollback":
            self._roll_back(event.fields)
        elif event.kind == "config_change":
            self._counter.repeat_from(self._first_step)
            self._save(state)
        elif event.kind == "stop":
            reason = event.fields.get("reason")
            run.summary["stop"] = reason
            self._exit_code = 0 if reason == "completed" else 1

    def flush(self) -> None:
        self._save(self._stored_state)

    def close(self, until: float | None = None) -> None:
        run = self._run  # may change the state
        self._save(self._stored_state)
        run.finish(exit_code=self._exit_code)

    @functools.cached_property
    def _counter(self) -> StepCounter:
        if self._monitoring.wandb.mode == "online":
            next_row = self._connection.starting_step
        else:
            next_row = next_step(self._local_folder() / "wandb", self._stored_state["id"])
        return StepCounter(self._stored_state["shifts"], next_row)

    @functools.cached_property
    def _connection(self) -> Any:
        import wandb

        # No W&B output on the terminal, and above all no prompt for a key, which would block.
        quiet = {"silent": True, "console": "off"}
        wandb.setup(wandb.Settings(**quiet))
        kind, model = self._config.get("decoder_block"), self._config.get("model_name")
        run = wandb.init(
            project=self._monitoring.wandb.project,
            entity=self._monitoring.wandb.entity or None,
            name=self._run_name,
            id=self._stored_state["id"],
            resume="allow",
            mode=self._monitoring.wandb.mode,
            dir=str(self._local_folder()),
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
        return run

    @functools.cached_property
    def _run(self) -> Any:
        """Returns the W&B run, after resending missing rows of earlier attempts."""
        run, first_step = self._connection, self._first_step
        if first_step == 0:
            return run
        events, rollbacks = self._folder / EVENTS_FILE, []
        for row in stream_rows(events):
            if row.get("event") == "rollback" and row["restored_step"] < first_step:
                rollbacks.append(row)
                self._roll_back(row)
        missing = range(self._counter.first_missing, first_step)
        if not missing:
            return run
        recorded = (row for row in stream_rows(events) if row.get("event") in _ROWS)
        for row in (row for row in recorded if row["step"] in missing):
            # The file is truncated meanwhile, so its row order says nothing.
            if all(
                row["time"] > each["time"] or row["step"] < each["restored_step"]
                for each in rollbacks
            ):
                self._log(row["step"], row, row["time"])
        return run

    def _log(self, step: int, fields: Mapping[str, Any], time: float) -> None:
        tags = {name: value for name, value in _scalars(fields).items() if "/" in name}
        row = {**tags, _AXIS: step, "_timestamp": time}
        self._connection.log(row, step=self._counter.row(step))

    def _roll_back(self, rollback: Mapping[str, Any]) -> None:
        # Rollbacks without a number are from older versions and were handled then.
        if rollback.get("number", 0) > self._stored_state["rollbacks"]:
            self._stored_state["rollbacks"] = rollback["number"]
            self._counter.repeat_from(rollback["restored_step"])
            self._save(self._stored_state)

    def _local_folder(self) -> pathlib.Path:
        """Returns the parent of `wandb`: W&B's process writes to local disks only."""
        if str(self._folder).startswith("gs://"):
            return pathlib.Path.cwd()
        return pathlib.Path(self._folder)

    @functools.cached_property
    def _stored_state(self) -> dict[str, Any]:
        path = self._folder / STATE_FILE
        state = json.loads(path.read_text()) if path.exists() else None
        # Training restarted at 0 may differ, and W&B cannot take rows back.
        if state is None or (self._first_step == 0 and state["last_step"] is not None):
            state = {"id": secrets.token_hex(4), "last_step": None}
            self._save(state)
        # Earlier versions wrote "rewinds".
        return {"shifts": [[0, 0]], "rollbacks": state.get("rewinds", 0)} | state

    def _save(self, state: Mapping[str, Any]) -> None:
        atomic_write_text(self._folder / STATE_FILE, json.dumps(state) + "\n")


def _scalars(fields: Mapping[str, Any]) -> dict[str, Any]:
    plain = {
        name: value.item() if hasattr(value, "item") else value for name, value in fields.items()
    }
    return {name: value for name, value in plain.items() if isinstance(value, str | int | float)}
