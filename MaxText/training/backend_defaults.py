"""Resolves `auto` for the current devices; every choice is printed."""

from collections.abc import Sequence

import jax.numpy as jnp

from MaxText.config.model_sections import ModelConfig
from MaxText.layers.assembly.model import Model
from MaxText.layers.attention import flash_attention
from MaxText.layers.depth.aggregate import kernel_unsupported_reason, vmem_bytes_per_token
from MaxText.parallelism.mesh import ShardingPlan

# Measured on 2 cores of a server CPU (float32, GPT-2-like): unrolled layers are 20 % faster at
# 6 layers of width 384 and 2 times slower at 12 layers of width 768.
CPU_UNROLLED_LAYERS = 8
CPU_UNROLLED_WIDTH = 512
# Measured on one H100 in bfloat16: GPT-2 small unrolled is 39 % faster, 16 layers of width 2048
# 4 %, and both compile as fast as scanned.
GPU_UNROLLED_LAYERS = 16


def resolve_auto(  # noqa: C901
    config: ModelConfig, backend: str, sharding: ShardingPlan | None = None
) -> tuple[ModelConfig, list[str]]:
    """Returns the config with concrete values in place of `auto`, and a line for each choice.

    The choices are those measured to be fastest, or to need the least memory, on the backend. A
    line names the key, the value before and after, and the reason: "dtype: auto -> float32 (...)".
    Values that the user chose stay, except for kernels that the devices do not support.

    Args:
      config: Of the model.
      backend: "cpu", "gpu" or "tpu".
      sharding: Of the mesh; None if it is unknown. Then choices are as for several devices, and
        cuDNN's attention, which has to be tried on the devices, is not chosen.
    """
    on_cpu = backend == "cpu"
    lines = []

    def choose(key: str, value, chosen, reason: str, replaced: Sequence[str] = ("auto",)):
        """Returns `chosen` and adds a line if `value` is in `replaced`, else `value`."""
        if value == chosen or value not in replaced:
            return value
        lines.append(f"{key}: {value} -> {str(chosen).lower()} ({reason})")
        return chosen

    dtype = choose(
        "dtype",
        config.numerics.dtype,
        "float32" if on_cpu else "bfloat16",
        "bfloat16 takes twice the time on CPU" if on_cpu else f"fast on {backend}",
    )
    dimensions = config.shape.dimensions
    few = dimensions.num_layers <= CPU_UNROLLED_LAYERS and dimensions.emb_dim <= CPU_UNROLLED_WIDTH
    on_one_gpu = backend == "gpu" and sharding is not None and sharding.mesh.size == 1
    if config.scan_unsupported_reason is not None:
        scanned = False
        reason = config.scan_unsupported_reason
    elif not config.layer_plan.repeats:
        scanned = False
        reason = "no layers repeat"
    elif on_cpu and few:
        scanned = False
        reason = "few small layers run faster unrolled on CPU"
    elif on_one_gpu and dimensions.num_layers <= GPU_UNROLLED_LAYERS:
        scanned = False
        reason = "few layers run faster unrolled on one GPU"
    else:
        scanned = True
        reason = "compile time does not grow with depth"
    scan = choose("scan_layers", config.memory.scan_layers, scanned, reason)
    policy = "full"
    reason = "least memory"
    if on_cpu and scan:
        policy = "minimal"
        reason = "recomputed matmuls take longer than memory on CPU"
    elif on_cpu:
        policy = "none"
        reason = "saves no memory for unrolled layers on CPU"
    policy = choose("remat_policy", config.memory.remat_policy, policy, reason)
    config = _with(config, "numerics", dtype=dtype)
    config = _with(config, "memory", scan_layers=scan, remat_policy=policy)
    if config.dense_connections.dense_conn:
        impl = choose(
            "dense_aggregation_impl",
            config.dense_connections.dense_aggregation_impl,
            *_aggregation_impl(config, backend, dtype, sharding),
            replaced=("auto", "kernel"),
        )
        config = _with(config, "dense_connections", dense_aggregation_impl=impl)
    attention = config.attention.attention
    may_be_flash = ("autoselected", "flash")
    if attention in may_be_flash:
        problem = _flash_problem(config, backend, sharding)
        chosen, reason = ("blocked", problem) if problem else ("flash", "scores stay on the chip")
        attention = choose("attention", attention, chosen, reason, may_be_flash)
        if chosen == "flash":
            hooked = flash_attention.hook_reasons(config)
            lines.extend(f"attention: flash, in other layers blocked ({why})" for why in hooked)
    return _with(config, "attention", attention=attention), lines


def abstract_model(config: ModelConfig) -> Model:
    """Returns the model of a configuration for its parameters' names and shapes, without values.

    `auto` is resolved as on CPU: neither names nor shapes depend on the device.
    """
    resolved_config, _ = resolve_auto(config, "cpu")
    return Model(resolved_config)


def _with(config: ModelConfig, name: str, **values: object) -> ModelConfig:
    """Returns the config with new values of keys in one of its sections."""
    part = getattr(config, name).model_copy(update=values)
    return config.model_copy(update={name: part})


def _flash_problem(config: ModelConfig, backend: str, sharding: ShardingPlan | None) -> str | None:
    """Returns why flash attention is not used, or None.

    On TPU and GPU it is a fused kernel; on GPU that of cuDNN, which is tried on the devices.
    """
    if backend == "cpu":
        return "fastest on CPU"
    parts = 1 if sharding is None else sharding.num_length_parts
    problem = flash_attention.kernel_unsupported_reason(config, backend, parts)
    if problem is not None or backend == "tpu":
        return problem
    if sharding is None:
        return "cuDNN's kernel was not tried"
    return flash_attention.cudnn_failure_reason(config, sharding.mesh.devices.flat, parts)


def _aggregation_impl(
    config: ModelConfig, backend: str, dtype: str, sharding: ShardingPlan | None
) -> tuple[str, str]:
    """Returns dense_aggregation_impl, "sum" or "kernel", and the reason for it.

    Args:
      config: Of the model, with dense connections.
      backend: "cpu", "gpu" or "tpu".
      dtype: Of activations, resolved.
      sharding: Of the mesh; None if it is unknown.
    """
    dense = config.dense_connections
    dimensions = config.shape.dimensions
    if backend == "cpu":
        if dense.dense_aggregation_impl == "kernel":
            return "kernel", "asked for"
        return "sum", "fastest on CPU"
    depths = filter(dense.stands_after, range(1, dimensions.num_layers + 1))
    max_sources = max((len(dense.sources(depth)) for depth in depths), default=0)
    state_bytes = dimensions.emb_dim * jnp.dtype(dtype).itemsize
    problem = kernel_unsupported_reason(
        dimensions.emb_dim,
        backend,
        bytes_per_token=vmem_bytes_per_token(max_sources, len(dense.dense_streams), state_bytes),
        device_kind="" if sharding is None else sharding.mesh.devices.flat[0].device_kind,
    )
    return ("kernel", "least memory traffic") if problem is None else ("sum", problem)
