"""A profiler trace of some steps, for TensorBoard, and the memory in use."""

import contextlib
import pathlib
from typing import Any

import jax
from etils import epath

from MaxText.config.training_sections import MonitoringConfig
from MaxText.value_types import PyTree

# Tag, key of a device's statistics, field of the process in KiB.
_MEMORY = (
    ("perf/memory_in_use_gib", "bytes_in_use", "VmRSS:"),
    ("perf/memory_peak_gib", "peak_bytes_in_use", "VmHWM:"),
)
_PROCESS_STATUS = pathlib.Path("/proc/self/status")


class StepProfiler:
    """Traces some steps on process 0, if `profiler` is set."""

    def __init__(self, monitoring: MonitoringConfig, folder: epath.Path, first_step: int):
        """Plans the trace of this start.

        Args:
          monitoring: Says whether to trace, how many steps, and how many to skip before.
          folder: TensorBoard's folder, which gets the trace.
          first_step: The first step of this start.
        """
        self._folder = str(folder)
        active = monitoring.profiler == "xplane" and jax.process_index() == 0
        self._start = first_step + monitoring.profiler_window.skip if active else None
        self._num_steps = monitoring.profiler_window.steps
        self._tracing = False

    def step(self, step: int) -> contextlib.AbstractContextManager[Any]:
        """Returns a context for the step call; starts the trace when due."""
        if step == self._start:
            jax.profiler.start_trace(self._folder)
            self._tracing = True
        if not self._tracing:
            return contextlib.nullcontext()
        return jax.profiler.StepTraceAnnotation("train", step_num=step)

    def finished(self, step: int, results: PyTree) -> None:
        """Ends the trace when due, once `results` are computed."""
        if self._start is not None and step + 1 == self._start + self._num_steps:
            jax.block_until_ready(results)
            self.close()

    def close(self) -> None:
        """Ends the trace if it is still going on."""
        if self._tracing:
            jax.profiler.stop_trace()
            self._tracing = False


def memory_row() -> dict[str, float]:
    """Returns GiB in use and their peak on the fullest device, or of the CPU."""
    stats_of_devices = []
    for device in jax.local_devices():
        stats = device.memory_stats()
        if stats:  # CPU devices have none
            stats_of_devices.append(stats)
    status: list[str] = []
    if not stats_of_devices and _PROCESS_STATUS.exists():
        status = _PROCESS_STATUS.read_text(encoding="utf-8", errors="replace").split()
    row = {}
    for tag, key, field in _MEMORY:
        sizes = [stats[key] for stats in stats_of_devices if key in stats]
        if field in status:
            row[tag] = int(status[status.index(field) + 1]) / 2**20
        elif sizes:
            row[tag] = max(sizes) / 2**30
    return row
