"""Descriptions of absent GPUs for the compiler: GpuTargetConfigProto.

Numbers are from NVIDIA's data sheets and CUDA programming guide (limits by compute capability), as
the driver reports them.
"""

from typing import NamedTuple

# CUDA library versions that the plug-in of JAX 0.10 is built for.
_CUDNN = "major: 9 minor: 10 patch: 0"
_CUDA = "major: 12 minor: 9 patch: 0"  # without a version XLA assumes that cuBLAS has no fp8


class _GpuSpec(NamedTuple):
    """Properties of a GPU in bytes, bytes per second, SMs and GHz.

    Per SM: `shared` memory and float32 `units`; `shared_of_block` is the opt-in limit per block.
    """

    name: str
    capability: tuple[int, int]
    cores: int
    clock: float
    memory: int
    bandwidth: int
    cache: int
    shared: int
    shared_of_block: int
    units: int


_KINDS = {
    "a100": _GpuSpec(
        "NVIDIA A100-SXM4-80GB", (8, 0), 108, 1.41, 85_100_068_864, 2_039_040_000_000,
        41_943_040, 167_936, 166_912, 64,
    ),
    "h100": _GpuSpec(
        "NVIDIA H100 80GB HBM3", (9, 0), 132, 1.98, 84_942_979_072, 3_352_320_000_000,
        52_428_800, 233_472, 232_448, 128,
    ),
    "h200": _GpuSpec(
        "NVIDIA H200", (9, 0), 132, 1.98, 151_397_597_184, 4_800_000_000_000,
        52_428_800, 233_472, 232_448, 128,
    ),
}  # fmt: skip


def _described(gpu: _GpuSpec) -> str:
    major, minor = gpu.capability
    return f"""
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  core_count: {gpu.cores}
  fpus_per_core: {gpu.units}
  clock_rate_ghz: {gpu.clock}
  device_memory_size: {gpu.memory}
  memory_bandwidth: {gpu.bandwidth}
  l2_cache_size: {gpu.cache}
  shared_memory_per_core: {gpu.shared}
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {gpu.shared_of_block}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}}
platform_name: "CUDA"
dnn_version_info {{ {_CUDNN} }}
runtime_version {{ {_CUDA} }}
device_description_str: "{gpu.name}"
"""


DESCRIPTIONS = {kind: _described(gpu) for kind, gpu in _KINDS.items()}
MEMORY = {kind: gpu.memory for kind, gpu in _KINDS.items()}
