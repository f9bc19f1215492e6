"""Reports metrics of train steps one step late, for busy devices.

Reading metrics blocks on the device, so they are read after the next step was dispatched. Those
in _AVERAGED are means since the last report; other metrics are of the newest step.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from MaxText import program_start
from MaxText.config.schema import Config
from MaxText.errors import TrainingDivergedError
from MaxText.metrics.profiler import memory_row
from MaxText.metrics.step_line import step_row
from MaxText.run.records import RunLogger

_AVERAGED = ("loss", "lm_loss", "entmax_loss", "z_loss")


class MetricLogger:
    """Converts the scalars of train steps to events."""

    def __init__(
        self,
        run_logger: RunLogger,
        config: Config,
        last_step: int,
        observe: Callable[[int, Mapping[str, float]], None] = lambda step, metrics: None,
    ):
        """Reports every step_log_period steps; `observe` gets step and scalars."""
        self._run_logger = run_logger
        self._guard = config.guard
        self._period = config.monitoring.step_log_period
        self._last_step = last_step
        self._observe = observe
        self._losses: list[dict[str, Any]] = []  # of the steps since, on the device
        self._newest: Mapping[str, Any] | None = None
        self.newest_step: int | None = None  # the last dispatched step
        self._waiting = False  # whether the newest step is unreported
        self._reported_step = -1
        self._has_reported = False
        self._since = 0.0
        self._data_seconds = 0.0

    def start(self, first_step: int) -> None:
        """Starts the clock before the first step or after a rollback."""
        if self._has_reported:
            self._run_logger.trend.roll_back()
        self._losses = []
        self._newest, self.newest_step, self._waiting = None, None, False
        self._reported_step = first_step - 1
        self._since = time.perf_counter()

    def add(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Records the scalars of a step; reports the previous one if pending."""
        self.flush()
        names = (*_AVERAGED, "skipped")
        self._losses.append({name: metrics[name] for name in names if name in metrics})
        self._newest, self.newest_step = metrics, step
        self._waiting = step % self._period == 0 or step == self._last_step

    @property
    def idle_seconds(self) -> float:
        """Wall time since the last report, without pauses."""
        return time.perf_counter() - self._since

    def flush(self) -> None:
        """Reports a pending step; raises TrainingDivergedError on a bad loss."""
        step = self.newest_step
        if not self._waiting or step is None:
            return
        self._waiting = False
        metrics = {
            name: np.asarray(value).item() for name, value in jax.device_get(self._newest).items()
        }
        shown = metrics | self._mean_losses()
        now = time.perf_counter()
        elapsed, updates = now - self._since, step - self._reported_step
        self._since, self._reported_step = now, step
        stats = self._run_logger.stats
        tokens, tflops = stats.tokens_per_device(step), stats.tflops_per_device(step)
        row = step_row(shown, elapsed / updates, tokens, tflops, stats.peak.tflops)
        data_seconds, self._data_seconds = min(self._data_seconds, elapsed), 0.0
        fields: dict[str, Any] = {}
        if not self._has_reported:
            self._has_reported = True
            fields["seconds_since_launch"] = round(time.time() - program_start.launch_time(), 3)
        self._run_logger.events.emit(
            "step",
            step=step,
            seconds=elapsed,
            updates=updates,
            data_seconds=round(data_seconds, 6),
            **row,
            **memory_row(),
            **self._run_logger.lineage.progress(step),
            **fields,
        )
        if not metrics.get("skipped"):
            self._run_logger.trend.add(row["learning/lm_loss"])
            if not math.isfinite(shown["loss"]) and self._guard.abort_on_nan_loss:
                raise TrainingDivergedError(
                    f"the loss of step {step} is {shown['loss']}: stopped without saving. Rerun "
                    "the command to resume from the last checkpoint, or set "
                    "abort_on_nan_loss=false to continue training."
                )
        self._observe(step, metrics)

    def _mean_losses(self) -> dict[str, float]:
        """Blocks for the means since the last report, and resets.

        Empty if those are of the last step. Skipped steps count only if all were skipped.
        """
        steps, self._losses = self._losses, []
        if len(steps) < 2:
            return {}
        steps = [losses for losses in jax.device_get(steps) if not losses.pop("skipped", 0)]
        return {
            name: float(sum((losses[name] for losses in steps), np.float32(0))) / len(steps)
            for name in (steps[0] if steps else ())
        }

    def complete(self) -> None:
        """Blocks on the newest step and reports it. Raises like `flush`.

        Called before a checkpoint, so that no broken state is saved and the rows cover every step
        that a restart does not repeat, and at the end of the run.
        """
        self._waiting = self.newest_step != self._reported_step
        self.flush()

    @contextlib.contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Counts the time inside as data wait if the devices are idle after it."""
        began = time.perf_counter()
        yield
        if self._newest is None or self._newest["loss"].is_ready():
            self._data_seconds += time.perf_counter() - began

    @contextlib.contextmanager
    def exclude_time(self, *, complete: bool = False) -> Iterator[None]:
        """Reports a pending step, then excludes the time inside.

        Waits for the newest step first, or its computation would count as part of the pause.
        """
        if complete:
            self.complete()
        self.flush()
        jax.block_until_ready(self._newest)
        began = time.perf_counter()
        try:
            yield
        finally:
            self._since += time.perf_counter() - began
