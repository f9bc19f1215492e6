"""XLA options of the programs of a run, and what makes them compile faster.

Options in XLA_FLAGS or LIBTPU_INIT_ARGS keep the user's values.
"""

import contextlib
import gc
import os
from collections.abc import Iterator

import jax

CompilerOptions = dict[str, bool | int | str]

_PIPELINED = ("all_gather", "all_reduce", "reduce_scatter")


def train_step_options(platform: str, num_devices: int) -> CompilerOptions:
    """Returns the XLA options of the train step.

    Args:
      platform: "cpu", "gpu" or "tpu".
      num_devices: Size of the mesh.
    """
    options: CompilerOptions = {}
    if platform == "tpu" and num_devices > 1:
        options |= _no_windowed_matmuls()
    if platform == "gpu" and num_devices > 1:
        options |= _pipelined_collectives()
    if platform == "gpu":
        options |= _matmuls_by_cublas()
    user_flags = os.environ.get("XLA_FLAGS", "") + os.environ.get("LIBTPU_INIT_ARGS", "")
    return {name: value for name, value in options.items() if name not in user_flags}


def _no_windowed_matmuls() -> CompilerOptions:
    """Keeps XLA for TPU from splitting matmuls with gathered weights.

    It splits such a matmul into one per device, to overlap communication. With weights sharded over
    32 devices, each adds a product over 128 rows to an array in HBM: twice the time of the matmuls
    for 3 % of communication (7B on v5p, benchmarks/compiled.py).
    """
    # A threshold that no matmul reaches.
    return {"xla_jf_spmd_threshold_for_windowed_einsum_mib": 1_000_000}


def _pipelined_collectives() -> CompilerOptions:
    """Lets XLA for GPU move collectives across iterations of the loop over layers.

    Without these options, the reduce-scatter of a layer's gradients overlaps nothing, and a quarter
    of the all-gathers: compiled for 8 H100s, a 1.4B model hides 0 of 25 and 144 of 194 behind
    matmuls, with them 23 of 24 and 188 of 193. Combining up to 128 MiB (MaxText) hides none.
    """
    if jax.__version_info__ < (0, 11, 1):
        return {f"xla_gpu_enable_pipelined_{name}": True for name in _PIPELINED}
    mode = "COLLECTIVE_PIPELINING_MODE_ON"
    return {f"xla_gpu_pipeline_{name}": mode for name in _PIPELINED}


def _matmuls_by_cublas() -> CompilerOptions:
    """Leaves matmuls on GPU to cuBLAS instead of Triton.

    GPT-2 small is 0.5 % faster, 1B 1.4 % (H200), and 1B in fp8 3 % (H100).
    """
    return {"xla_gpu_enable_triton_gemm": False}


def initialization_options(platform: str) -> CompilerOptions | None:
    """Returns the XLA options of the program that draws initial weights.

    On CPU, random draws compile 3 times faster with few optimizations and run as fast, with the
    same bits.
    """
    return {"xla_backend_optimization_level": 1} if platform == "cpu" else None


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Turns Python's garbage collector off while a program is traced.

    The collector takes a quarter of the time of tracing, which leaves little garbage.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
