"""Machines to compile for, by the names of plan.py.

Google's names count differently by generation (https://cloud.google.com/tpu/docs): v5e-16 and
v6e-16 have 16 chips, v4-16 and v5p-16 have 16 TensorCores, two on each of 8 chips. A chip is one
device.
"""

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from MaxText.errors import UserError, first_line
from MaxText.hardware.chips import CHIPS, CPU, Hardware, find_hardware

# Chips -> topology.
_FLAT = {
    1: "1x1",
    4: "2x2",
    8: "2x4",
    16: "4x4",
    32: "4x8",
    64: "8x8",
    128: "8x16",
    256: "16x16",
}
_CUBES = {
    4: "2x2x1",
    8: "2x2x2",
    16: "2x2x4",
    32: "2x4x4",
    64: "4x4x4",
    128: "4x4x8",
    256: "4x8x8",
    512: "8x8x8",
    1024: "8x8x16",
    2048: "8x16x16",
}
_LONGER_CUBES = {
    192: "4x4x12",
    384: "4x8x12",
    768: "8x8x12",
    3072: "12x16x16",
    4096: "16x16x16",
    6144: "16x16x24",
}


_TOPOLOGIES = {"v4": _CUBES, "v5e": _FLAT, "v5p": _CUBES | _LONGER_CUBES, "v6e": _FLAT}
_GPUS_PER_HOST = 8

# Fields of the compiler's GpuTargetConfigProto for absent GPUs, from NVIDIA's data sheets and CUDA
# programming guide (limits by compute capability), as the driver reports them.
_AMPERE = {
    "core_count": 108,
    "fpus_per_core": 64,
    "clock_rate_ghz": 1.41,
    "l2_cache_size": 41_943_040,
    "shared_memory_per_core": 167_936,
    "shared_memory_per_block_optin": 166_912,
}
_HOPPER = {
    "core_count": 132,
    "fpus_per_core": 128,
    "clock_rate_ghz": 1.98,
    "l2_cache_size": 52_428_800,
    "shared_memory_per_core": 233_472,
    "shared_memory_per_block_optin": 232_448,
}
_LIMITS = {
    "shared_memory_per_block": 49152,
    "registers_per_core_limit": 65536,
    "registers_per_block_limit": 65536,
    "threads_per_warp": 32,
    "threads_per_block_limit": 1024,
    "threads_per_core_limit": 2048,
    "thread_dim_limit_x": 1024,
    "thread_dim_limit_y": 1024,
    "thread_dim_limit_z": 64,
    "block_dim_limit_x": 2147483647,
    "block_dim_limit_y": 65535,
    "block_dim_limit_z": 65535,
}


class _Gpu(NamedTuple):
    driver_name: str
    compute_capability: int  # the major version
    fields: dict[str, Any]  # of GpuTargetConfigProto
    memory: int  # bytes
    bandwidth: int  # bytes per second


_GPUS = {
    "a100": _Gpu(
        driver_name="NVIDIA A100-SXM4-80GB",
        compute_capability=8,
        fields=_AMPERE,
        memory=85_100_068_864,
        bandwidth=2_039_040_000_000,
    ),
    "h100": _Gpu(
        driver_name="NVIDIA H100 80GB HBM3",
        compute_capability=9,
        fields=_HOPPER,
        memory=84_942_979_072,
        bandwidth=3_352_320_000_000,
    ),
    "h200": _Gpu(
        driver_name="NVIDIA H200",
        compute_capability=9,
        fields=_HOPPER,
        memory=151_397_597_184,
        bandwidth=4_800_000_000_000,
    ),
}


def gpu_description(kind: str) -> str:
    """Returns the GpuTargetConfigProto, as text, of a GPU named a100, h100 or h200."""
    gpu = _GPUS[kind]
    fields = gpu.fields | _LIMITS
    fields |= {"device_memory_size": gpu.memory, "memory_bandwidth": gpu.bandwidth}
    lines = "\n".join(f"  {field}: {value}" for field, value in fields.items())
    # CUDA library versions that the plug-in of JAX 0.10 is built for. Without a runtime version XLA
    # assumes that cuBLAS has no fp8.
    return f"""
gpu_device_info {{
  cuda_compute_capability {{ major: {gpu.compute_capability} minor: 0 }}
{lines}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
runtime_version {{ major: 12 minor: 9 patch: 0 }}
device_description_str: "{gpu.driver_name}"
"""


class CompileTarget(NamedTuple):
    """A machine to compile for."""

    name: str
    platform: str  # JAX's name: cpu, gpu or tpu
    topology: str  # of one slice, as the plug-in names it; "" for CPU
    num_devices: int  # of one slice
    memory: int  # bytes per device; 0 if unknown
    options: dict[str, Any]  # of jax.experimental.topologies.get_topology_desc
    num_slices: int = 1


def find_target(name: str, num_slices: int = 1) -> CompileTarget:
    """Returns the machine named e.g. v5e-16, 2xv5p-8, h100-8, 8xH100 or cpu-4.

    Args:
        name: as plan.py takes it.
        num_slices: compile_topology_num_slices; a name with several slices sets them itself.

    Raises:
        UserError: the machine is unknown, or its slices contradict each other.
    """
    try:
        machine = find_hardware(name)
    except UserError as error:
        raise _unknown(name) from error
    chip = machine.chip
    number = machine.num_chips
    kind = chip.name.lower()
    platform = chip.platform
    if kind in _TOPOLOGIES:
        return _tpu_target(name, machine, num_slices)
    if chip is not CPU and kind not in _GPUS:
        raise _unknown(name)
    if num_slices > 1:
        raise UserError(
            f"compile_topology_num_slices={num_slices}: only TPUs have slices. Give the total "
            f"number of devices: compile_topology={kind}-{num_slices * number}"
        )
    if chip is CPU:
        return CompileTarget(
            name=f"cpu-{number}",
            platform=platform,
            topology="",
            num_devices=number,
            memory=0,
            options={},
        )
    per_host = min(number, _GPUS_PER_HOST)
    if number % per_host:
        raise _unknown(name)
    topology = f"1x{number // per_host}x{per_host}"
    return CompileTarget(
        name=f"{kind}-{number}",
        platform=platform,
        topology=topology,
        num_devices=number,
        memory=_GPUS[kind].memory,
        options={},
    )


def _tpu_target(name: str, machine: Hardware, num_slices: int) -> CompileTarget:
    """Returns the TPU slices that `name` stands for."""
    chip = machine.chip
    kind = chip.name.lower()
    if num_slices > 1 and machine.num_slices not in (1, num_slices):
        raise UserError(
            f"compile_topology={name} and compile_topology_num_slices={num_slices} name "
            "different numbers of slices: set only one."
        )
    chips = machine.num_chips // machine.num_slices
    if chips not in _TOPOLOGIES[kind]:
        raise _unknown(name)
    # One device for a v4 chip's two cores.
    options: dict[str, Any] = {"chip_config_name": "megacore"} if kind == "v4" else {}
    if chips == 1:
        options["chips_per_host_bounds"] = (1, 1, 1)
    wrap = _wraparound([int(side) for side in _TOPOLOGIES[kind][chips].split("x")])
    if any(wrap):
        options["wrap"] = wrap
    return CompileTarget(
        name=f"{kind}-{chips * chip.cores}",
        platform=chip.platform,
        topology=f"{kind}:{_TOPOLOGIES[kind][chips]}",
        num_devices=chips,
        memory=int(chip.memory),
        options=options,
        num_slices=max(machine.num_slices, num_slices),
    )


def tpu_names() -> list[str]:
    """Returns the names of all TPU slices that can be compiled for."""
    return [
        f"{kind}-{chips * CHIPS[kind].cores}"
        for kind, shapes in _TOPOLOGIES.items()
        for chips in sorted(shapes)
    ]


def prepare_environment(target: CompileTarget) -> None:
    """Sets the plug-in's start variables; call it before importing JAX."""
    # The devices compiled for are not those of this process.
    os.environ["JAX_PLATFORMS"] = "cpu"
    if target.platform == "tpu":
        # Otherwise libtpu asks the network for the machine type and demands exclusive access.
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
        os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    flags = {
        # Without a GPU, autotuning has nothing to time.
        "gpu": "--xla_gpu_autotune_level=0",
        "cpu": f"--xla_force_host_platform_device_count={target.num_devices}",
    }
    if flag := flags.get(target.platform):
        present = os.environ.get("XLA_FLAGS", "")
        if flag.partition("=")[0] not in present:
            os.environ["XLA_FLAGS"] = f"{present} {flag}".strip()


def devices(target: CompileTarget) -> Sequence[Any]:
    """Returns devices to compile for, possibly absent ones.

    Raises UserError if the plug-in is missing or does not know the machine.
    """
    import jax
    from jax.experimental import topologies

    if target.platform == "cpu":
        present = jax.devices("cpu")
        if len(present) < target.num_devices:
            raise UserError(
                f"compile_topology={target.name}: jax simulates {len(present)} devices here, "
                "because XLA_FLAGS sets another --xla_force_host_platform_device_count. Remove it."
            )
        return present[: target.num_devices]
    try:
        if target.platform == "gpu":
            # "cuda" names the plug-in, "gpu" its devices.
            topology = topologies.get_topology_desc(
                target.name,
                "cuda",
                target_config=gpu_description(target.name.split("-")[0]),
                topology=target.topology,
            )
        else:
            options = dict(target.options)
            if target.num_slices > 1:
                options["num_slices"] = target.num_slices
            topology = topologies.get_topology_desc(target.topology, "tpu", **options)
    except Exception as error:  # depends on the plug-in and on which part of it is missing
        extra, package = ("tpu", "libtpu") if target.platform == "tpu" else ("gpu", "CUDA plug-in")
        reason = first_line(error)
        raise UserError(
            f"compile_topology={target.name}: cannot compile for it here ({reason}).\n"
            f"  What to do: install the {package} for jax {jax.__version__}: "
            f"pip install -c constraints.txt -e '.[{extra}]'. The device itself is not needed."
        ) from error
    return topology.devices


def _wraparound(sides: Sequence[int]) -> tuple[bool, bool, bool]:
    """Returns, for each dimension, True if its ends are linked.

    All are in whole 4 x 4 x 4 cubes (v4, v5p), and sides of 16 in two dimensions (v5e, v6e).
    """
    if len(sides) == 2:
        return sides[0] == 16, sides[1] == 16, False
    is_torus = all(side % 4 == 0 for side in sides)
    return is_torus, is_torus, is_torus


def _unknown(name: str) -> UserError:
    gpus = ", ".join(f"{kind}-8" for kind in _GPUS)
    return UserError(
        f"compile_topology={name}: unknown machine\n"
        f"  TPUs: {', '.join(tpu_names())}\n"
        f"  GPUs, any number up to {_GPUS_PER_HOST} or a multiple of it: {gpus}\n"
        "  CPU: cpu-1, cpu-8"
    )
