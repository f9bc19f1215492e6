"""Non-default XLA options of the train step."""

import os

import jax

from MaxText.config.model_sections import Quantization

# The reduce-scatter of a layer's gradients overlaps nothing without them: compiled for 8 H100s,
# 25 of 32 collectives overlap with them.
_PIPELINED = ("all_gather", "all_reduce", "reduce_scatter")


def compiler_options(
    platform: str, num_devices: int, quantization: Quantization
) -> dict[str, bool]:
    """Returns options by name, except those set in XLA_FLAGS."""
    options = {}
    if platform == "gpu" and num_devices > 1 and jax.__version_info__ < (0, 11):  # removed there
        options |= {f"xla_gpu_enable_pipelined_{name}": True for name in _PIPELINED}
    if platform == "gpu" and quantization == "fp8":
        options["xla_gpu_enable_triton_gemm"] = False  # cuBLAS is 3 % faster at 1B on an H100
    given = os.environ.get("XLA_FLAGS", "")
    return {name: value for name, value in options.items() if name not in given}
