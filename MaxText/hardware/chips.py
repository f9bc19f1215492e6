"""Accelerators by their vendors' names: memory, bandwidths, interconnect, peak FLOP/s.

`find_hardware` parses what users type in hardware= and compile_topology= (v5p-128, 8xH100, cpu)
into a `Hardware`: a kind of chip and how many of them. plan.py estimates memory and step time from
these figures, and MFU is relative to PEAK_TFLOPS.

Figures are per chip or GPU, from Google's Cloud TPU pages (v2 to Ironwood) and NVIDIA's data
sheets. Prices vary by region and contract, so there are none here.
"""

import dataclasses
import math
import os
import re

from MaxText.config.problems import close_matches
from MaxText.errors import UserError

GB = 1e9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """A kind of accelerator, or this machine's CPU.

    Attributes:
      name: The vendor's name, as users write it: "v5p", "H100".
      device_kind: `device_kind` of its JAX devices.
      platform: JAX's name of the platform: "tpu", "gpu" or "cpu".
      memory: Usable bytes per chip.
      bandwidth: Bytes per second between the chip and its memory (HBM).
      links: Bytes per second that a chip sends over all of its links (ICI, NVLink) together.
      torus: Dimensions of the torus that the links form. 0 for a switch, which gives all of
        `links` to any peer.
      num_linked: Chips within reach of `links`. Traffic beyond them goes over `network`.
      network: Bytes per second that a chip sends to chips beyond `num_linked` (DCN, InfiniBand).
      cores: TensorCores per chip if accelerator types count TensorCores, else 1.
      devices: JAX devices per chip.
      efficiency: Lowest and highest share of the peak FLOP/s that matmuls reach in whole train
        steps.
      efficiency_source: Where `efficiency` comes from.
      speed_of_8_bits: Speed of int8 or fp8 matmuls relative to bfloat16.
    """

    name: str
    device_kind: str
    platform: str
    memory: float
    bandwidth: float
    links: float
    torus: int
    num_linked: int
    network: float
    cores: int = 1
    devices: int = 1
    efficiency: tuple[float, float] = (0.4, 0.7)
    efficiency_source: str = "assumed: no published row"
    speed_of_8_bits: float = 2.0


_PUBLISHED_RUNS = "benchmarks/plan.py, published runs"
_TPUS = (
    Chip(
        name="v2",
        device_kind="TPU v2",
        platform="tpu",
        memory=16 * GB,
        bandwidth=700 * GB,
        links=62 * GB,
        torus=2,
        num_linked=512,
        network=3 * GB,
        cores=2,
        devices=2,
        speed_of_8_bits=1,
    ),
    Chip(
        name="v3",
        device_kind="TPU v3",
        platform="tpu",
        memory=32 * GB,
        bandwidth=900 * GB,
        links=82 * GB,
        torus=2,
        num_linked=2048,
        network=3 * GB,
        cores=2,
        devices=2,
        speed_of_8_bits=1,
    ),
    Chip(
        name="v4",
        device_kind="TPU v4",
        platform="tpu",
        memory=32 * GB,
        bandwidth=1228 * GB,
        links=300 * GB,
        torus=3,
        num_linked=4096,
        network=6 * GB,
        cores=2,
        efficiency=(0.65, 0.80),
        efficiency_source=_PUBLISHED_RUNS,
        speed_of_8_bits=1,
    ),
    Chip(
        name="v5e",
        device_kind="TPU v5 lite",
        platform="tpu",
        memory=15.75 * 2**30,
        bandwidth=819 * GB,
        links=200 * GB,
        torus=2,
        num_linked=256,
        network=6 * GB,
        efficiency=(0.80, 1.00),
        efficiency_source=_PUBLISHED_RUNS,
    ),
    Chip(
        name="v5p",
        device_kind="TPU v5",
        platform="tpu",
        memory=95.74 * 2**30,
        bandwidth=2765 * GB,
        links=600 * GB,
        torus=3,
        num_linked=8960,
        network=6 * GB,
        cores=2,
        efficiency=(0.80, 0.92),
        efficiency_source=_PUBLISHED_RUNS,
    ),
    Chip(
        name="v6e",
        device_kind="TPU v6 lite",
        platform="tpu",
        memory=31.25 * 2**30,
        bandwidth=1638 * GB,
        links=448 * GB,
        torus=2,
        num_linked=256,
        network=12 * GB,
        efficiency=(0.55, 0.75),
        efficiency_source=_PUBLISHED_RUNS,
    ),
    Chip(
        name="tpu7x",
        device_kind="TPU7x",
        platform="tpu",
        memory=192 * GB,
        bandwidth=7380 * GB,
        links=1200 * GB,
        torus=3,
        num_linked=9216,
        network=12 * GB,
        cores=2,
        devices=2,
    ),
)
# Servers of 8 GPUs with NVLink and a 400 Gbit/s network card per GPU (A100: 200). PCIe cards have
# no NVLink.
_GPUS = (
    Chip(
        name="A100",
        device_kind="NVIDIA A100-SXM4-80GB",
        platform="gpu",
        memory=80 * GB,
        bandwidth=2039 * GB,
        links=300 * GB,
        torus=0,
        num_linked=8,
        network=25 * GB,
    ),
    Chip(
        name="A100-40",
        device_kind="NVIDIA A100-SXM4-40GB",
        platform="gpu",
        memory=40 * GB,
        bandwidth=1555 * GB,
        links=300 * GB,
        torus=0,
        num_linked=8,
        network=25 * GB,
    ),
    Chip(
        name="H100",
        device_kind="NVIDIA H100 80GB HBM3",
        platform="gpu",
        memory=80 * GB,
        bandwidth=3350 * GB,
        links=450 * GB,
        torus=0,
        num_linked=8,
        network=50 * GB,
        efficiency=(0.42, 0.68),
        efficiency_source=_PUBLISHED_RUNS,
    ),
    Chip(
        name="H200",
        device_kind="NVIDIA H200",
        platform="gpu",
        memory=141 * GB,
        bandwidth=4800 * GB,
        links=450 * GB,
        torus=0,
        num_linked=8,
        network=50 * GB,
        efficiency=(0.65, 0.90),
        efficiency_source="benchmarks/gpu.py, one GPU",
    ),
    Chip(
        name="B200",
        device_kind="NVIDIA B200",
        platform="gpu",
        memory=180 * GB,
        bandwidth=8000 * GB,
        links=900 * GB,
        torus=0,
        num_linked=8,
        network=50 * GB,
    ),
    Chip(
        name="L4",
        device_kind="NVIDIA L4",
        platform="gpu",
        memory=24 * GB,
        bandwidth=300 * GB,
        links=32 * GB,
        torus=0,
        num_linked=8,
        network=12 * GB,
    ),
    Chip(
        name="L40S",
        device_kind="NVIDIA L40S",
        platform="gpu",
        memory=48 * GB,
        bandwidth=864 * GB,
        links=32 * GB,
        torus=0,
        num_linked=8,
        network=25 * GB,
    ),
    Chip(
        name="V100",
        device_kind="NVIDIA V100-SXM2-16GB",
        platform="gpu",
        memory=16 * GB,
        bandwidth=900 * GB,
        links=150 * GB,
        torus=0,
        num_linked=8,
        network=12 * GB,
        speed_of_8_bits=1,
    ),
)
CHIPS = {chip.name: chip for chip in (*_TPUS, *_GPUS)}
# This machine's CPU has no data sheet: a server's memory bandwidth, and the share of its measured
# peak that steps of small models reached on two cores.
CPU = Chip(
    name="cpu",
    device_kind="cpu",
    platform="cpu",
    memory=float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
    bandwidth=30 * GB,
    links=math.inf,
    torus=0,
    num_linked=1,
    network=math.inf,
    efficiency=(0.3, 0.8),
    efficiency_source="measured: small models on two cores",
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
    """Machines of one kind of chip that train one run.

    Attributes:
      name: The name as the user wrote it, for messages.
      chip: Kind of accelerator.
      num_chips: Chips over all slices or servers; of a CPU, the number of simulated devices.
      num_slices: Groups of chips that are connected to each other by `chip.network` only: TPU
        slices, or GPU servers.
    """

    name: str
    chip: Chip
    num_chips: int
    num_slices: int = 1

    @property
    def num_devices(self) -> int:
        """JAX devices over all chips."""
        return self.num_chips * self.chip.devices

    @property
    def memory(self) -> float:
        """Bytes per device; simulated devices of a CPU share the machine's memory."""
        num_sharing = self.num_chips if self.chip is CPU else self.chip.devices
        return self.chip.memory / num_sharing

    def describe(self) -> str:
        """Returns for example "128 x v5p in 2 slices", or "this machine's CPU as one device"."""
        if self.chip is CPU:
            devices = "one device" if self.num_chips == 1 else f"{self.num_chips} devices"
            return f"this machine's CPU as {devices}"
        devices = f" ({self.num_devices} jax devices)" if self.chip.devices > 1 else ""
        slices = f" in {self.num_slices} slices" if self.num_slices > 1 else ""
        return f"{self.num_chips} x {self.chip.name}{devices}{slices}"


def find_hardware(name: str) -> Hardware:
    """Returns the hardware that a name stands for.

    Args:
      name: For TPUs an accelerator type. It counts TensorCores (two per chip) for v2, v3, v4, v5p
        and tpu7x, and chips for v5e (v5litepod) and v6e; "2xv5p-128" is two slices. "8xH100" and
        "h100-8" are 8 GPUs, "cpu" is this machine, "cpu-4" this machine as 4 simulated devices.

    Raises:
      UserError: The name is unknown, or lacks the number of chips.
    """
    match = _NAME.fullmatch(name.strip().lower())
    prefix, kind, suffix = match.groups() if match else (None, "", None)
    if prefix and f"{kind}-{suffix}" in _BY_NAME:  # 8xA100-40, of 40 GB each
        kind = f"{kind}-{suffix}"
        suffix = None
    chip = _BY_NAME.get(ALIASES.get(kind, kind))
    if chip is None:
        raise _unknown_hardware(name)
    multiplier = 1 if prefix is None else int(prefix)
    size = None if suffix is None else int(suffix)
    if 0 in (multiplier, size):
        raise UserError(f"hardware={name}: numbers start at 1.")
    if chip.platform == "tpu":
        if size is None or size % chip.cores:
            unit = "TensorCores, two per chip" if chip.cores == 2 else "chips"
            raise UserError(
                f"hardware={name}: the name ends in the number of {unit}, for example "
                f"{chip.name}-{8 * chip.cores}."
            )
        num_chips = multiplier * size // chip.cores
        return Hardware(name, chip, num_chips, num_slices=multiplier)
    if chip is not CPU and prefix is None and size is None:
        raise UserError(
            f"hardware={name}: the number of GPUs is missing. Write 8x{chip.name} or {kind}-8."
        )
    num_chips = multiplier * (size or 1)
    num_servers = 1 if chip is CPU else math.ceil(num_chips / chip.num_linked)
    return Hardware(name, chip, num_chips, num_slices=num_servers)


def _unknown_hardware(name: str) -> UserError:
    close = close_matches(re.sub(r"^\d+x|-\d+$", "", name), [*CHIPS, *ALIASES])
    nearest = f" Nearest: {', '.join(close)}." if close else ""
    return UserError(
        f"hardware={name}: unknown.{nearest}\n"
        "  What to do: write an accelerator type (v5p-128, v5e-16, v6e-256, 2xv5p-128), a "
        f"number of GPUs (8xH100, h100-8) or cpu. Known: {', '.join(CHIPS)}."
    )
