"""Softmax attention by fused kernels: splash attention or cuDNN.

Both kernels are written for one device; this module partitions the work.

Legend: B sequences, T query tokens, S key tokens, N query heads, K key/value heads, H head_dim.
"""

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from MaxText.config.model_sections import LayerConfig, ModelConfig
from MaxText.errors import first_line
from MaxText.layers.attention_core import AttentionSpec, kv_head_repeats, softmax_layers
from MaxText.parallelism.logical_sharding import platform, split_axes

# Splash attention blocks are multiples of TILE, and at most MaxText's default (sa_block_*): twice
# as large compiles five times longer, four times does not fit a v5p.
TILE = 128
LARGEST_BLOCK = 512
_LARGEST_HEAD = 1024  # most bytes of one head of a token with which such blocks fit a v4
_PRODUCTS = {"_fwd": 2, "_dkv": 4, "_dq": 3}  # matmuls; both backward kernels recompute scores
_RESIDUALS = "context"  # name of the kernel's residuals in remat policies


def kernel_unsupported_reason(
    config: ModelConfig, backend: str, num_length_parts: int = 1, num_stages: int = 1
) -> str | None:
    """Returns why no kernel serves a model on "gpu" or "tpu", or None."""
    layers = dict.fromkeys(softmax_layers(config))
    reasons = (_unsupported_reason(*one, backend, num_length_parts, num_stages) for one in layers)
    return next(filter(None, reasons), None if layers else "no layer has softmax attention")


def _unsupported_reason(
    window: int | None, layer: LayerConfig, backend: str, num_length_parts: int, num_stages: int
) -> str | None:
    config, d = layer
    attention = config.attention
    precision, dtype = config.numerics.matmul_precision, np.dtype(config.numerics.dtype)
    is_split = num_length_parts > 1
    is_ring = is_split and attention.context_parallel_strategy == "ring"
    has_alibi = config.position.position_embedding == "alibi"
    each = f" on each of {num_length_parts} devices" if is_split else ""
    refused: list[tuple[Any, str]] = [
        (has_alibi, "position_embedding=alibi adds to scores"),
        (attention.num_mem_kv, "num_mem_kv adds learned keys"),
        (
            config.dropout.rate("attention"),
            "attention dropout, as probabilities are never written to memory",
        ),
        (precision != "default", f"matmul_precision={precision}: kernels only support default"),
        (is_ring, "context_parallel_strategy=ring has its own implementation"),
    ]
    if backend == "gpu":
        refused += [
            (dtype.itemsize != 2, f"cuDNN has no kernel for dtype={dtype.name}"),
            (d.head_dim % 8, f"head_dim {d.head_dim} is not a multiple of 8"),
            (attention.attn_logits_soft_cap, "cuDNN has no attn_logits_soft_cap"),
            (window and not attention.causal, "cuDNN has no bidirectional windows"),
            (is_split, "sequences are split over devices"),
            (num_stages > 1, "pipeline stages: JAX cannot batch cuDNN's document masks"),
        ]
    else:
        length, is_large = d.max_target_length, d.head_dim * dtype.itemsize > _LARGEST_HEAD
        refused += [
            (dtype.name == "float16", "splash attention does not support dtype=float16"),
            (is_large, f"head_dim {d.head_dim} is too large for a block in VMEM"),
            (
                length % (TILE * num_length_parts),
                f"max_target_length {length} is not a multiple of {TILE}{each}",
            ),
        ]
    return next((reason for holds, reason in refused if holds), None)


def cudnn_failure_reason(config: ModelConfig, devices: Iterable[Any]) -> str | None:
    device = next((x for x in devices if x.process_index == jax.process_index()), None)
    if not isinstance(device, jax.Device):
        return "no GPU here to try cuDNN's kernel on"
    length, on_device = config.shape.max_target_length, SingleDeviceSharding(device)

    def heads_shape(heads: int, head_dim: int) -> jax.ShapeDtypeStruct:
        shape = (1, length, heads, head_dim)
        return jax.ShapeDtypeStruct(shape, config.numerics.dtype, sharding=on_device)

    segments_BT = jax.ShapeDtypeStruct((1, length), jnp.int32, sharding=on_device)
    # Other sizes, such as mlp_dim, would only compile the same kernel again.
    kinds = dict.fromkeys(
        (window, own.attention.attention_scale, d.num_query_heads, d.num_kv_heads, d.head_dim)
        for window, (own, d) in softmax_layers(config)
    )
    for window, scale, num_heads, num_kv_heads, head_dim in kinds:
        queries, keys = (heads_shape(n, head_dim) for n in (num_heads, num_kv_heads))
        spec = AttentionSpec(config.attention.causal, window, scale)

        def total(q, k, v, segments, spec=spec):
            return _cudnn(None, q, k, v, segments, segments, spec=spec).sum()

        gradients = jax.jit(jax.grad(total, argnums=(0, 1, 2)))
        try:
            gradients.lower(queries, keys, keys, segments_BT).compile()
        except Exception as error:  # its type depends on what cuDNN lacks
            reason = first_line(error)
            return f"cuDNN has no kernel for it: {reason}"
    return None


def supports_shape(q_BTNH: jax.Array, query_sharding: NamedSharding | None) -> bool:
    length = q_BTNH.shape[1]
    own = length if query_sharding is None else query_sharding.shard_shape(q_BTNH.shape)[1]
    if platform() == "gpu":
        return own == length and length % 2 == 0  # JAX requires it for gradients
    return own % TILE == 0


def flash_attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    spec: AttentionSpec,
    query_sharding: NamedSharding | None,  # T over axes of `supports_shape`; None on one device
    key_sharding: NamedSharding | None,  # S over the same axes as T
    *,
    segments_BT: jax.Array | None = None,
) -> jax.Array:
    """Computes dot_product_attention without ALiBi, memories and dropout.

    The output, and on TPU the log-sum-exp, are tagged "context" for remat policies.
    """
    assert spec.slopes_N is None, spec
    assert spec.precision in (None, "default"), spec
    run = _cudnn if platform() == "gpu" else _splash
    if query_sharding is None or key_sharding is None:
        return run(None, q_BTNH, k_BSKH, v_BSKH, segments_BT, segments_BT, spec=spec)
    mesh = query_sharding.mesh
    batch, length, heads = (split_axes(query_sharding, dim) for dim in range(3))
    if (repeats := kv_head_repeats(q_BTNH, k_BSKH, query_sharding, key_sharding)) > 1:
        k_BSKH, v_BSKH = (jnp.repeat(x, repeats, axis=2) for x in (k_BSKH, v_BSKH))
    queries = keys = PartitionSpec(batch, length, heads)
    mask = mask_spec = None
    if length and (spec.causal or (spec.window or k_BSKH.shape[1]) < k_BSKH.shape[1]):
        parts = math.prod(mesh.shape[axis] for axis in length)
        shard = query_sharding.shard_shape(q_BTNH.shape)
        mask = _splash_kernel(
            (shard[1] * parts, k_BSKH.shape[1]), shard[2], parts, spec, platform() == "cpu"
        )
        mask_spec = mask.manual_sharding_spec(NamedSharding(mesh, PartitionSpec(None, length)))
    segment_specs = PartitionSpec(batch, length), PartitionSpec(batch)

    def gather_and_run(mask, q_BTNH, k_BSKH, v_BSKH, *segments):
        if length:  # in here, so that gradients of keys and values are reduce-scattered
            k_BSKH, v_BSKH = (
                jax.lax.all_gather(x, length, axis=1, tiled=True) for x in (k_BSKH, v_BSKH)
            )
        return run(mask, q_BTNH, k_BSKH, v_BSKH, *segments, spec=spec)

    return jax.shard_map(
        gather_and_run,
        mesh=mesh,
        in_specs=(mask_spec, queries, keys, keys, *segment_specs),
        out_specs=queries,
        check_vma=False,
    )(mask, q_BTNH, k_BSKH, v_BSKH, segments_BT, segments_BT)


def block_size(length: int) -> int:
    """Returns the splash attention block size for a multiple of TILE."""
    return max(rows for rows in range(TILE, LARGEST_BLOCK + 1, TILE) if length % rows == 0)


def splash_operations(name: str, queries: Sequence[int], num_keys: float) -> float:
    products = next(number for phase, number in _PRODUCTS.items() if phase in name)
    return 2.0 * products * math.prod(queries) * num_keys


def average_keys_computed(length: int, *, causal: bool, window: int | None = None) -> float:
    """Returns the average keys multiplied per query by splash attention."""
    block = block_size(length)
    blocks = np.arange(length // block)
    behind = blocks[:, None] - blocks
    # Distance between the nearest query and key of two blocks.
    nearest = (np.abs(behind) - 1) * block + 1
    reach = length if window is None else window
    seen = (behind == 0) | (behind > 0) & (nearest < reach)
    if not causal:
        seen |= (behind < 0) & (nearest <= reach)
    return float(seen.sum() * block) / len(blocks)


@functools.lru_cache(maxsize=64)
def _splash_kernel(
    shape: tuple[int, int],
    num_heads: int,
    num_length_parts: int,
    spec: AttentionSpec,
    interpret: bool,
) -> Any:
    """Returns the kernel of a whole mask. Cached: slow to build."""
    # Pallas takes a second to import.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    causal, window = spec.causal, spec.window
    if window is not None and window < shape[1]:
        sides = (window - 1, 0 if causal else window)
        mask = _by_diagonal(masks.LocalMask)(shape, sides, 0)
    else:  # splash attention cannot partition a window that hides nothing
        mask = _by_diagonal(masks.CausalMask if causal else masks.FullMask)(shape)
    block = block_size(shape[0] // num_length_parts)
    sizes = splash.BlockSizes(
        block_q=block, block_kv=block, block_kv_compute=block,
        block_q_dkv=block, block_kv_dkv=block, block_kv_dkv_compute=block,
        block_q_dq=block, block_kv_dq=block,
    )  # fmt: skip
    with jax.ensure_compile_time_eval():
        kernel = splash.make_splash_mha(
            masks.MultiHeadMask([mask] * num_heads),
            block_sizes=sizes,
            head_shards=1,
            q_seq_shards=num_length_parts,
            attn_logits_soft_cap=spec.soft_cap or None,
            residual_checkpoint_name=_RESIDUALS,
            interpret=interpret,
        )
        return jax.tree.map(np.asarray, kernel)


def _by_diagonal(kind: type) -> Any:
    """Returns a class of masks, functions of i - j, with cached blocks.

    Uniform blocks have one element. Splash attention evaluates each block several times, which
    took 16 s of a CPU at 64k tokens.
    """
    blocks: dict[tuple[int, int, int], np.ndarray] = {}

    class ByDiagonal(kind):
        def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
            rows, columns = index
            place = rows.start - columns.start, rows.stop - rows.start, columns.stop - columns.start
            if place not in blocks:
                block = super().__getitem__(index)
                blocks[place] = block[:1, :1] if block.all() == block.any() else block
            return blocks[place]

    return ByDiagonal


def _splash(
    kernel, q_BTNH, k_BSKH, v_BSKH, query_segments_BT, key_segments_BS, *, spec: AttentionSpec
):
    """Runs splash attention on one device, with its rows of the mask."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    _, length, num_heads, head_dim = q_BTNH.shape
    if kernel is None:
        kernel = _splash_kernel((length, k_BSKH.shape[1]), num_heads, 1, spec, platform() == "cpu")
    segments = None
    if query_segments_BT is not None:
        segments = splash.SegmentIds(query_segments_BT, key_segments_BS)
    scaled = q_BTNH * spec.scale_for(head_dim)
    q_BNTH, k_BKSH, v_BKSH = (x.transpose(0, 2, 1, 3) for x in (scaled, k_BSKH, v_BSKH))
    return jax.vmap(kernel)(q_BNTH, k_BKSH, v_BKSH, segments).transpose(0, 2, 1, 3)


def _cudnn(
    kernel, q_BTNH, k_BSKH, v_BSKH, query_segments_BT, key_segments_BS, *, spec: AttentionSpec
):
    """Runs cuDNN's attention on one device; segment masks take [T, S]."""
    del kernel
    mask_B1TS = None
    if query_segments_BT is not None:
        mask_B1TS = (query_segments_BT[:, :, None] == key_segments_BS[:, None])[:, None]
    window = None if spec.window is None else (spec.window - 1, 0)
    o_BTNH = jax.nn.dot_product_attention(
        q_BTNH, k_BSKH, v_BSKH,
        mask=mask_B1TS, scale=spec.scale, is_causal=spec.causal, local_window_size=window,
        implementation="cudnn",
    )  # fmt: skip
    return checkpoint_name(o_BTNH, _RESIDUALS)
