"""Weights & Biases: a run under one id, over all its restarts.

W&B's row numbers only grow, so the column `step` is the axis of all charts.
"""

import html
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etils import epath

from MaxText.config.training_sections import WandbConfig
from MaxText.monitoring.sinks.tracker import Scalars, TrackerSink

_AXIS = "step"  # column used as the axis of charts
_RESERVED = 1000  # row numbers taken at a time; those that a killed run leaves are a gap

_CONNECT_SECONDS = 45.0


class WandbSink(TrackerSink):
    """Sends a run to Weights & Biases. Its state's "rows" are the row numbers taken."""

    state_file = "wandb.json"
    upload_seconds = 45.0

    def __init__(
        self,
        wandb: WandbConfig,
        run_folder: str | epath.Path,
        run_name: str,
        config_flat: Mapping[str, Any],
        first_step: int,
    ):
        """As of TrackerSink; `wandb` says project, entity and mode."""
        super().__init__(run_folder, run_name, config_flat, first_step)
        self._wandb = wandb
        self._parent = self.local_folder(Path(run_folder))
        self.remedy = (
            "a restart of the unfinished run sends what W&B lacks, and `wandb sync` what is in "
            f"{self._parent / 'wandb'}"
        )

    def connect(self) -> Any:
        """Returns the W&B run."""
        import wandb

        # No W&B output on the terminal, and above all no prompt for a key, which would block.
        quiet = {"silent": True, "console": "off"}
        wandb.setup(wandb.Settings(**quiet))
        kind = self.config.get("decoder_block")
        model = self.config.get("model_name")
        run = wandb.init(
            project=self._wandb.project,
            entity=self._wandb.entity or None,
            name=self.run_name,
            id=self.state["id"],
            resume="allow",
            mode=self._wandb.mode,
            dir=str(self._parent),
            config=self.config,
            allow_val_change=True,
            tags=[tag for tag in (kind, model) if tag and tag != "default"],
            settings=wandb.Settings(
                **quiet,
                disable_git=True,  # the remote's URL may hold a password
                disable_code=True,
                init_timeout=_CONNECT_SECONDS,
                finish_timeout=self.upload_seconds,
                finish_timeout_raises=True,
            ),
        )
        run.define_metric(_AXIS)
        run.define_metric("*", step_metric=_AXIS)
        self._row = max(self.state["rows"], run.starting_step)
        return run

    def log_summary(self, scalars: Scalars) -> None:
        """Sets the summary."""
        self.run.summary.update(scalars)

    def log_row(self, step: int, metrics: Scalars, walltime: float) -> None:
        """Adds a row of the history."""
        self.run.log({**metrics, _AXIS: step, "_timestamp": walltime}, step=self._next_row())

    def log_sample(self, step: int, text: str) -> None:
        """Adds a row with the text as HTML."""
        import wandb

        sample = wandb.Html(f"<pre>{html.escape(text)}</pre>")
        self.run.log({"sample": sample, _AXIS: step}, step=self._next_row())

    def finish(self, reason: str | None) -> None:
        """Ends the run with an exit code: 0 only if it was completed."""
        if reason is not None:
            self.run.summary["stop"] = reason
        self.run.finish(exit_code=0 if reason == "completed" else 1)
        self.state["rows"] = self._row

    def _next_row(self) -> int:
        """Returns an unused row number, after reserving a range of them on disk if needed."""
        if self._row >= self.state["rows"]:
            self.state["rows"] = self._row + _RESERVED
            self.save_state()
        self._row += 1
        return self._row - 1
