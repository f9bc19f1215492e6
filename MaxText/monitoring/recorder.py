"""Where a run writes down what happens: events.jsonl, metrics.jsonl and TensorBoard."""

import time
from collections.abc import Mapping
from typing import Any

import jax
from etils import epath

from MaxText.configuration.training_sections import Monitoring
from MaxText.monitoring.json_lines import JsonLines
from MaxText.monitoring.step_line import EvaluationReport, StepReport

EVENTS = "events.jsonl"
METRICS = "metrics.jsonl"
TENSORBOARD = "tensorboard"


class Recorder:
    """The record of a run. Only process 0 writes; on the others every method does nothing.

    A run resumed at step s continues its files: metric rows of step s and later, which stem from
    before the crash, are removed first, so that each step stands there once. For none to be
    missing, call `step` for a step before its checkpoint is saved, and `event("checkpoint", ...)`
    right before the save (it flushes).
    """

    def __init__(
        self,
        run_folder: str | epath.Path,
        monitoring: Monitoring,
        run_name: str,
        *,
        first_step: int = 0,
    ):
        """
        Args:
          run_folder: holds the files; may be gs://.
          monitoring: what to write, and how often to flush.
          run_name: stands in each metric row, as a metrics_file may be shared by runs.
          first_step: the update the run does first; 0 for a new run.
        """
        self._folder = epath.Path(run_folder)
        self._monitoring = monitoring
        self._run_name = run_name
        self._first_step = first_step
        self._flushed_step = first_step
        self._active = jax.process_index() == 0
        self._board: Any = None
        self._texts: list[tuple[str, str]] = []
        if not self._active:
            return

        def precedes(row: dict[str, Any]) -> bool:
            return row.get("run_name") != run_name or row.get("step", -1) < first_step

        metrics_path = monitoring.metrics_file or self._folder / METRICS
        self._metrics = JsonLines(epath.Path(metrics_path).expanduser(), precedes)
        self._events = JsonLines(self._folder / EVENTS, lambda row: True)

    @property
    def tensorboard_folder(self) -> epath.Path:
        """Where TensorBoard events and profiles go."""
        return self._folder / TENSORBOARD

    def event(self, phase: str, **facts: Any) -> None:
        """Notes that something happened: start, resume, compile, evaluation, checkpoint, stop.

        Args:
          phase: what happened.
          facts: JSON values, such as step=, seconds=.
        """
        if not self._active:
            return
        self._events.append({"time": round(time.time(), 3), "phase": phase, **facts})
        if phase in ("checkpoint", "stop"):
            self.flush()

    def step(self, report: StepReport) -> None:
        """Records the numbers of one update. Flushes every log_period steps."""
        if not self._active:
            return
        row = report.row()
        self._metrics.append({"step": report.step, "run_name": self._run_name, **row})
        self._scalars(row, report.step)
        if report.step + 1 - self._flushed_step >= self._monitoring.log_period:
            self._flushed_step = report.step + 1
            self.flush()

    def evaluation(self, report: EvaluationReport) -> None:
        """Records an evaluation, as an event and in TensorBoard."""
        row = report.row()
        self.event("evaluation", step=report.step, **row)
        self._scalars(row, report.step)

    def start(self, config_flat: Mapping[str, Any], num_parameters: int) -> None:
        """Records the configuration and the size of the model, as text in TensorBoard."""
        self.event(
            "resume" if self._first_step else "start",
            step=self._first_step,
            num_parameters=num_parameters,
            num_devices=jax.device_count(),
            num_processes=jax.process_count(),
            device_kind=jax.devices()[0].device_kind,
            jax=jax.__version__,
        )
        # Written with the first scalars: TensorBoard's import is not worth delaying the first step.
        self._texts.append(("num_model_parameters", f"{num_parameters:,}"))
        self._texts += [(name, str(value)) for name, value in config_flat.items()]

    def flush(self) -> None:
        """Makes everything recorded so far durable."""
        if not self._active:
            return
        self._metrics.flush()
        self._events.flush()
        if self._board is not None:
            self._board.flush()

    def close(self) -> None:
        """Flushes and closes the files. Safe to call twice."""
        if not self._active:
            return
        self._metrics.close()
        self._events.close()
        if self._texts:
            self._scalars({}, self._first_step)
        if self._board is not None:
            self._board.close()
            self._board = None

    def _scalars(self, row: Mapping[str, float], step: int) -> None:
        if not (self._active and self._monitoring.enable_tensorboard):
            return
        if self._board is None:
            from tensorboardX import SummaryWriter

            # purge_step hides points from before the crash, which are done again.
            self._board = SummaryWriter(
                str(self.tensorboard_folder), purge_step=self._first_step or None
            )
        for name, text in self._texts:
            self._board.add_text(name, text, self._first_step)
        self._texts.clear()
        for name, value in row.items():
            self._board.add_scalar(name, value, step)
