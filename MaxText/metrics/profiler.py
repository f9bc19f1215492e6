"""Profiler trace of some steps, for TensorBoard."""

import contextlib
from typing import Any

import jax

from MaxText.config.training_sections import MonitoringConfig


class StepProfiler:
    """Traces `profiler_steps` steps on process 0, if `profiler` is set."""

    def __init__(self, monitoring: MonitoringConfig, folder: Any, first_step: int):
        self._folder = str(folder)
        active = monitoring.profiler == "xplane" and jax.process_index() == 0
        self._start = first_step + monitoring.skip_first_n_steps_for_profiler if active else None
        self._num_steps = monitoring.profiler_steps
        self._tracing = False

    def step(self, step: int) -> contextlib.AbstractContextManager[Any]:
        """Returns a context for the step call; starts the trace when due."""
        if step == self._start:
            jax.profiler.start_trace(self._folder)
            self._tracing = True
        if not self._tracing:
            return contextlib.nullcontext()
        return jax.profiler.StepTraceAnnotation("train", step_num=step)

    def finished(self, step: int, results: Any) -> None:
        """Ends the trace when due, once `results` are computed."""
        if self._start is not None and step + 1 == self._start + self._num_steps:
            jax.block_until_ready(results)
            self.close()

    def close(self) -> None:
        if self._tracing:
            jax.profiler.stop_trace()
            self._tracing = False
