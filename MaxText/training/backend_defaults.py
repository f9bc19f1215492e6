"""Resolves `auto` for the current devices; every choice is printed."""

import jax.numpy as jnp

from MaxText.config.model_sections import ModelConfig
from MaxText.layers import flash_attention
from MaxText.layers.depth_aggregate import kernel_unsupported_reason, vmem_bytes_per_token
from MaxText.parallelism.mesh import ShardingPlan

# Measured on 2 cores of a server CPU (float32, GPT-2-like): unrolled layers are 20 % faster at
# 6 layers of width 384 and 2 times slower at 12 layers of width 768.
CPU_UNROLLED_LAYERS = 8
CPU_UNROLLED_WIDTH = 512
# Measured on one H100 in bfloat16: GPT-2 small unrolled is 39 % faster, 16 layers of width 2048
# 4 %, and both compile as fast as scanned.
GPU_UNROLLED_LAYERS = 16
# The same job with 50304 in place of 50257.
_VOCABULARY = "a multiple of 128 is faster (GPT-2 small on an H100: 23 %)"


def resolve_auto(
    section: ModelConfig, backend: str, layout: ShardingPlan | None = None
) -> tuple[ModelConfig, list[str]]:
    """Returns the section without `auto`, and a line per choice."""
    on_cpu = backend == "cpu"
    lines = []

    def choose(key: str, value, chosen, reason: str):
        if value != "auto":
            return value
        lines.append(f"{key}: auto -> {str(chosen).lower()} ({reason})")
        return chosen

    dtype = choose(
        "dtype",
        section.numerics.dtype,
        "float32" if on_cpu else "bfloat16",
        "bfloat16 takes twice the time on CPU" if on_cpu else f"fast on {backend}",
    )
    dimensions = section.shape.dimensions
    few = dimensions.num_layers <= CPU_UNROLLED_LAYERS and dimensions.emb_dim <= CPU_UNROLLED_WIDTH
    on_one_gpu = backend == "gpu" and layout is not None and layout.mesh.size == 1
    mixing, why = _mixing(section, backend, dtype, layout)
    if section.scan_unsupported_reason is not None:
        scanned, reason = False, section.scan_unsupported_reason
    elif not section.layer_plan.repeats:
        scanned, reason = False, "no layers repeat"
    elif on_cpu and few:
        scanned, reason = False, "few small layers run faster unrolled on CPU"
    elif on_one_gpu and dimensions.num_layers <= GPU_UNROLLED_LAYERS:
        scanned, reason = False, "few layers run faster unrolled on one GPU"
    else:
        scanned, reason = True, "compile time does not grow with depth"
    scan = choose("scan_layers", section.memory.scan_layers, scanned, reason)
    if backend == "gpu" and dimensions.vocab_size % 128:
        lines.append(f"vocab_size={dimensions.vocab_size}: {_VOCABULARY}")
    unrolled_cpu = on_cpu and not scan
    policy = choose(
        "remat_policy",
        section.memory.remat_policy,
        "none" if unrolled_cpu else "full",
        "saves no memory for unrolled layers on CPU" if unrolled_cpu else "least memory",
    )
    section = _with(section, "numerics", dtype=dtype)
    section = _with(section, "memory", scan_layers=scan, remat_policy=policy)
    if section.dense_connections.dense_conn:
        asked = section.dense_connections.dense_aggregation_impl
        if asked != mixing:
            lines.append(f"dense_aggregation_impl: {asked} -> {mixing} ({why})")
        if mixing == "kernel" and on_cpu:
            lines.append(
                "dense_aggregation_impl=kernel is interpreted on CPU: for tests, not for training"
            )
        section = _with(section, "dense_connections", dense_aggregation_impl=mixing)
    asked = section.attention.attention
    if asked in ("autoselected", "flash"):
        refused = _flash_refused(section, backend, layout)
        chosen = "flash" if refused is None else "blocked"
        if asked != chosen:
            reason = refused or "scores stay on the chip"
            lines.append(f"attention: {asked} -> {chosen} ({reason})")
        section = _with(section, "attention", attention=chosen)
    return section, lines


def _with(section: ModelConfig, name: str, **values: object) -> ModelConfig:
    """Returns the section with new values of keys in one of its sections."""
    part = getattr(section, name).model_copy(update=values)
    return section.model_copy(update={name: part})


def _flash_refused(section: ModelConfig, backend: str, layout: ShardingPlan | None) -> str | None:
    if backend == "cpu":
        return "fastest on CPU"
    parts, stages = 1, 1
    if layout is not None:
        parts, stages = layout.num_length_parts, layout.mesh.shape["stage"]
    refused = flash_attention.kernel_unsupported_reason(section, backend, parts, stages)
    if refused is not None or backend == "tpu":
        return refused
    if layout is None:
        return "cuDNN's kernel was not tried"
    return flash_attention.cudnn_failure_reason(section, layout.mesh.devices.flat)


def _mixing(
    section: ModelConfig, backend: str, dtype: str, layout: ShardingPlan | None
) -> tuple[str, str]:
    """Returns the form of depth-wise aggregation, and the reason."""
    dense = section.dense_connections
    asked, on_cpu = dense.dense_aggregation_impl, backend == "cpu"
    if not dense.dense_conn or asked not in ("auto", "kernel") or (asked == "kernel" and on_cpu):
        return asked, "asked for"
    if on_cpu:
        return "sum", "fastest on CPU"
    dimensions = section.shape.dimensions
    depths = range(1, dimensions.num_layers + 1)
    max_sources = max(
        (len(dense.sources(depth)) for depth in depths if dense.stands_after(depth)), default=0
    )
    of_state = dimensions.emb_dim * jnp.dtype(dtype).itemsize
    refused = kernel_unsupported_reason(
        dimensions.emb_dim,
        backend,
        bytes_per_token=vmem_bytes_per_token(max_sources, len(dense.dense_streams), of_state),
        device_kind="" if layout is None else layout.mesh.devices.flat[0].device_kind,
    )
    return ("kernel", "least memory traffic") if refused is None else ("sum", refused)
