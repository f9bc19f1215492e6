"""Hardware to plan for, by vendors' names.

Figures are per chip or GPU, from Google's Cloud TPU pages (v2 to Ironwood) and NVIDIA's data
sheets. Prices vary by region and contract: there are none.
"""

import dataclasses
import math
import os
import re

from MaxText.config.problems import close_matches
from MaxText.errors import UserError

GB = 1e9


@dataclasses.dataclass(frozen=True)
class Chip:
    """A kind of accelerator, or this machine's CPU."""

    name: str  # e.g. "v5p", "H100"
    device_kind: str  # of a JAX device
    platform: str  # JAX's name
    memory: float  # usable bytes
    bandwidth: float  # HBM bytes per second
    links: float  # bytes per second that a chip sends to its neighbors over all links together
    # dimensions of the torus; 0 for a switch, which gives all of `links` to any peer
    torus: int
    num_linked: int  # chips within reach of `links`; beyond them `network` counts
    network: float  # bytes per second of a chip to more distant chips
    cores: int = 1  # TensorCores per chip if accelerator types count these, else 1
    devices: int = 1  # JAX devices per chip
    # share of the peak that matmuls reach in whole train steps, least and most
    efficiency: tuple[float, float] = (0.4, 0.7)
    efficiency_source: str = "assumed: no published row"
    speed_of_8_bits: float = 2.0  # of int8 or fp8 matmuls, relative to bfloat16


_ROWS = "benchmarks/plan.py, published runs"
_TPUS = (
    Chip(
        "v2", "TPU v2", "tpu", 16 * GB, 700 * GB, 62 * GB, 2, 512, 3 * GB, 2, 2, speed_of_8_bits=1
    ),
    Chip(
        "v3", "TPU v3", "tpu", 32 * GB, 900 * GB, 82 * GB, 2, 2048, 3 * GB, 2, 2, speed_of_8_bits=1
    ),
    Chip(
        "v4",
        "TPU v4",
        "tpu",
        32 * GB,
        1228 * GB,
        300 * GB,
        3,
        4096,
        6 * GB,
        2,
        1,
        (0.65, 0.80),
        _ROWS,
        1,
    ),
    Chip(
        "v5e",
        "TPU v5 lite",
        "tpu",
        15.75 * 2**30,
        819 * GB,
        200 * GB,
        2,
        256,
        6 * GB,
        1,
        1,
        (0.80, 1.00),
        _ROWS,
    ),
    Chip(
        "v5p",
        "TPU v5",
        "tpu",
        95.74 * 2**30,
        2765 * GB,
        600 * GB,
        3,
        8960,
        6 * GB,
        2,
        1,
        (0.80, 0.92),
        _ROWS,
    ),
    Chip(
        "v6e",
        "TPU v6 lite",
        "tpu",
        31.25 * 2**30,
        1638 * GB,
        448 * GB,
        2,
        256,
        12 * GB,
        1,
        1,
        (0.55, 0.75),
        _ROWS,
    ),
    Chip("tpu7x", "TPU7x", "tpu", 192 * GB, 7380 * GB, 1200 * GB, 3, 9216, 12 * GB, 2, 2),
)
# Servers of 8 GPUs with NVLink and a 400 Gbit/s network card per GPU (A100: 200). PCIe cards have
# no NVLink.
_GPUS = (
    Chip("A100", "NVIDIA A100-SXM4-80GB", "gpu", 80 * GB, 2039 * GB, 300 * GB, 0, 8, 25 * GB),
    Chip("A100-40", "NVIDIA A100-SXM4-40GB", "gpu", 40 * GB, 1555 * GB, 300 * GB, 0, 8, 25 * GB),
    Chip(
        "H100",
        "NVIDIA H100 80GB HBM3",
        "gpu",
        80 * GB,
        3350 * GB,
        450 * GB,
        0,
        8,
        50 * GB,
        1,
        1,
        (0.42, 0.68),
        _ROWS,
    ),
    Chip(
        "H200",
        "NVIDIA H200",
        "gpu",
        141 * GB,
        4800 * GB,
        450 * GB,
        0,
        8,
        50 * GB,
        1,
        1,
        (0.65, 0.90),
        "benchmarks/gpu.py, one GPU",
    ),
    Chip("B200", "NVIDIA B200", "gpu", 180 * GB, 8000 * GB, 900 * GB, 0, 8, 50 * GB),
    Chip("L4", "NVIDIA L4", "gpu", 24 * GB, 300 * GB, 32 * GB, 0, 8, 12 * GB),
    Chip("L40S", "NVIDIA L40S", "gpu", 48 * GB, 864 * GB, 32 * GB, 0, 8, 25 * GB),
    Chip(
        "V100",
        "NVIDIA V100-SXM2-16GB",
        "gpu",
        16 * GB,
        900 * GB,
        150 * GB,
        0,
        8,
        12 * GB,
        speed_of_8_bits=1,
    ),
)
CHIPS = {chip.name: chip for chip in (*_TPUS, *_GPUS)}
# No data sheet: a server's memory bandwidth, and the share of its measured peak that steps of small
# models reached on two cores.
CPU = Chip(
    "cpu",
    "cpu",
    "cpu",
    float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
    30 * GB,
    math.inf,
    0,
    1,
    math.inf,
    1,
    1,
    (0.3, 0.8),
    "measured: small models on two cores",
)
_BY_NAME = {chip.name.lower(): chip for chip in (*_TPUS, *_GPUS, CPU)}
# Dense bfloat16 TFLOP/s per JAX device, from data sheets, without sparsity; float16 for V100 and
# T4. Patterns match jax.Device.device_kind in order. TPU v2, v3 and 7x chips are two devices each.
PEAK_TFLOPS: tuple[tuple[str, float], ...] = (
    (r"^TPU v2", 46 / 2),
    (r"^TPU v3", 123 / 2),
    (r"^TPU v4 lite", 138),
    (r"^TPU v4", 275),
    (r"^TPU v5( ?lite|e)", 197),
    (r"^TPU v5", 459),
    (r"^TPU v6", 918),
    (r"^TPU ?v?7", 2307 / 2),
    (r"\bGB200\b", 2500),
    (r"\bB200\b", 2250),
    (r"\bGH200\b", 990),
    (r"\bH200\b", 989),
    (r"\bH100\b.*PCIe", 756),
    (r"\bH100\b.*NVL", 835),
    (r"\bH100\b", 989),
    (r"\bA100\b", 312),
    (r"\bL40S\b", 362),
    (r"\bL4\b", 121),
    (r"\bV100\b", 125),
    (r"\bT4\b", 65),
)

ALIASES = {
    "v5litepod": "v5e",
    "v5lite": "v5e",
    "v6lite": "v6e",
    "v6": "v6e",
    "v7x": "tpu7x",
    "7x": "tpu7x",
}
_NAME = re.compile(r"(?:(\d+)x)?(7x|[a-z][a-z0-9]*)(?:-(\d+))?")


@dataclasses.dataclass(frozen=True)
class Hardware:
    name: str  # as the user wrote it
    chip: Chip
    num_chips: int  # over all slices or servers; of a CPU, simulated devices
    num_slices: int = 1  # groups connected only by a slow network

    @property
    def num_devices(self) -> int:
        return self.num_chips * self.chip.devices

    @property
    def memory(self) -> float:
        """Bytes of a device; devices of a CPU share the machine's."""
        return self.chip.memory / (self.num_chips if self.chip is CPU else self.chip.devices)

    def describe(self) -> str:
        if self.chip is CPU:
            devices = "one device" if self.num_chips == 1 else f"{self.num_chips} devices"
            return f"this machine's CPU as {devices}"
        counted = f" ({self.num_devices} jax devices)" if self.chip.devices > 1 else ""
        slices = f" in {self.num_slices} slices" if self.num_slices > 1 else ""
        return f"{self.num_chips} x {self.chip.name}{counted}{slices}"


def find_hardware(name: str) -> Hardware:
    """Returns the hardware of a name.

    TPUs use accelerator types, which count TensorCores (two per chip) for v2, v3, v4, v5p and
    tpu7x, and chips for v5e (v5litepod) and v6e. "2xv5p-128" is two slices. "8xH100" and "h100-8"
    are 8 GPUs, "cpu" is this machine, "cpu-4" this machine as 4 devices.
    """
    match = _NAME.fullmatch(name.strip().lower())
    count, kind, number = match.groups() if match else (None, "", None)
    if count and f"{kind}-{number}" in _BY_NAME:  # 8xA100-40, of 40 GB each
        kind = f"{kind}-{number}"
        number = None
    chip = _BY_NAME.get(ALIASES.get(kind, kind))
    if chip is None:
        words = [*CHIPS, *ALIASES]
        close = close_matches(re.sub(r"^\d+x|-\d+$", "", name), words)
        meant = f" Nearest: {', '.join(close)}." if close else ""
        raise UserError(
            f"hardware={name}: unknown.{meant}\n"
            "  What to do: write an accelerator type (v5p-128, v5e-16, v6e-256, 2xv5p-128), a "
            f"number of GPUs (8xH100, h100-8) or cpu. Known: {', '.join(CHIPS)}."
        )
    times = int(count or 1)
    number = None if number is None else int(number)
    if 0 in (times, number):
        raise UserError(f"hardware={name}: numbers start at 1.")
    if chip.platform == "tpu":
        if number is None or number % chip.cores:
            counted = "TensorCores, two per chip" if chip.cores == 2 else "chips"
            raise UserError(
                f"hardware={name}: the name ends in the number of {counted}, for example "
                f"{chip.name}-{8 * chip.cores}."
            )
        return Hardware(name, chip, times * number // chip.cores, times)
    if chip is not CPU and count is None and number is None:
        raise UserError(
            f"hardware={name}: the number of GPUs is missing. Write 8x{chip.name} or {kind}-8."
        )
    times *= number or 1
    return Hardware(name, chip, times, 1 if chip is CPU else -(-times // chip.num_linked))
