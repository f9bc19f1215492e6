"""Peak FLOP/s of a device: the denominator of MFU (model FLOPs utilization).

Accelerators have the figure of their data sheet. Other devices, such as CPUs, are measured with a
large matmul, and the result is cached so that all runs of a machine report MFU against one peak.
"""

import contextlib
import functools
import json
import platform
import re
import time
from typing import NamedTuple

import jax
import numpy as np
from etils import epath

from MaxText.hardware.chips import PEAK_TFLOPS, Hardware
from MaxText.runtime.cores import num_cores
from MaxText.value_types import Device

_MEASURED_SIZE = 2048
_MEASURED_RUNS = 2  # after one that warms up; 4 took a second of a start on two cores
_MEASURED_FILE = "peak_flops.json"
_MEASURED = "measured here"


class PeakFlops(NamedTuple):
    """Peak TFLOP/s of one device, and its `source` to print with each MFU."""

    tflops: float
    source: str

    @property
    def is_measured(self) -> bool:
        """Whether `measure_peak` made it, so that it may be too low."""
        return self.source.startswith(_MEASURED)


def peak_flops(
    device: Device = None,
    *,
    cache_folder: str | None = None,
    beaten_by: float | None = None,
) -> PeakFlops:
    """Returns the peak of a device: from its data sheet, from the cache, or measured (0.3 s).

    Call it while the machine is idle, because later runs use the measured number.

    Args:
      device: A JAX device; by default the first of this process.
      cache_folder: Folder, local or gs://, of the measured peaks by processor model and number of
        devices that share it. None measures each time.
      beaten_by: TFLOP/s that the device has reached. A cached peak that is not above was measured
        while the machine was busy, so it is measured again, and the larger one is cached.
    """
    if device is None:
        device = jax.local_devices()[0]
    datasheet = datasheet_peak(device.device_kind)
    if datasheet is not None:
        return datasheet
    if not cache_folder:
        return measure_peak(device)
    file = epath.Path(cache_folder) / _MEASURED_FILE
    name = _name_of(device)
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
        peaks = {key: PeakFlops(**peak) for key, peak in stored.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        peaks = {}  # missing or damaged
    cached = peaks.get(name)
    if cached is not None and (beaten_by is None or cached.tflops > beaten_by):
        return cached
    measured = measure_peak(device)
    if cached is not None and cached.tflops > measured.tflops:
        return cached
    peaks[name] = measured
    if jax.process_index() == 0:
        with contextlib.suppress(OSError):  # measured again at the next start
            content = {key: peak._asdict() for key, peak in peaks.items()}
            file.write_text(json.dumps(content, indent=1), encoding="utf-8")
    return measured


def _name_of(device: Device) -> str:
    if device.platform != "cpu":
        return device.device_kind
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:  # Linux
        named = (line.partition(":")[2].strip() for line in file if line.startswith("model name"))
        model = next(named, model)
    return f"{model}, {num_cores()} cores, {jax.local_device_count()} devices"


def datasheet_peak(device_kind: str) -> PeakFlops | None:
    """Returns the data sheet's peak; None for an unknown device.

    Args:
      device_kind: As JAX reports it, such as "NVIDIA H100 80GB HBM3".
    """
    for pattern, tflops in PEAK_TFLOPS:
        if re.search(pattern, device_kind, re.IGNORECASE):
            return PeakFlops(tflops, f"data sheet of {device_kind}, dense bfloat16")
    return None


@functools.cache
def peak_of(hardware: Hardware) -> PeakFlops:
    """Returns the peak of one device of `hardware`: by data sheet, or measured on this CPU."""
    datasheet = datasheet_peak(hardware.chip.device_kind)
    if datasheet is not None:
        return datasheet
    measured = measure_peak(jax.devices("cpu")[0])
    return measured._replace(tflops=measured.tflops / hardware.num_chips)


def measure_peak(device: Device) -> PeakFlops:
    """Measures a float32 matmul; devices that a CPU simulates share the result equally."""
    n = _MEASURED_SIZE
    x = jax.device_put(np.ones((n, n), np.float32), device)
    product = jax.jit(lambda x: x @ x)
    jax.block_until_ready(product(x))
    seconds = []
    for _ in range(_MEASURED_RUNS):
        start_time = time.perf_counter()
        jax.block_until_ready(product(x))
        seconds.append(time.perf_counter() - start_time)
    num_sharing_devices = jax.local_device_count() if device.platform == "cpu" else 1
    tflops = 2 * n**3 / min(seconds) / 1e12 / num_sharing_devices
    source = f"{_MEASURED}: float32 product of {n} x {n}, best of {_MEASURED_RUNS}"
    if num_sharing_devices > 1:
        source += f", shared by {num_sharing_devices} devices"
    return PeakFlops(tflops, source)
