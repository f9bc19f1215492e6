"""Softmax attention by fused kernels: splash attention or cuDNN.

Both kernels are written for one device; this module partitions the work.

Legend: B sequences, T query tokens, S key tokens, N query heads, K key/value heads, H head_dim.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from MaxText.config.model_sections import LayerConfig, ModelConfig
from MaxText.errors import first_line
from MaxText.layers.attention.attention_core import AttentionSpec, kv_head_repeats, softmax_layers
from MaxText.parallelism.logical_sharding import current_num_stages, platform, split_axes

# Splash attention blocks are multiples of TILE, and at most MaxText's default (sa_block_*): twice
# as large compiles five times longer, four times does not fit a v5p.
TILE = 128
LARGEST_BLOCK = 512
_LARGEST_HEAD = 1024  # most bytes of one head of a token with which such blocks fit a v4
_PRODUCTS = {"_fwd": 2, "_dkv": 4, "_dq": 3}  # matmuls; both backward kernels recompute scores
_RESIDUALS = "context"  # name of the kernel's residuals in remat policies


def kernel_unsupported_reason(
    config: ModelConfig, backend: str, num_length_parts: int = 1
) -> str | None:
    """Returns why no kernel serves a model on "gpu" or "tpu", or None."""
    layers = dict.fromkeys(softmax_layers(config))
    reasons = (_unsupported_reason(*one, backend, num_length_parts) for one in layers)
    return next(filter(None, reasons), None if layers else "no layer has softmax attention")


def _unsupported_reason(
    window: int | None, layer: LayerConfig, backend: str, num_length_parts: int
) -> str | None:
    config, d = layer
    attention = config.attention
    precision = config.numerics.matmul_precision
    dtype = np.dtype(config.numerics.dtype)
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
        ]
    else:
        length = d.max_target_length
        is_large = d.head_dim * dtype.itemsize > _LARGEST_HEAD
        refused += [
            (dtype.name == "float16", "splash attention does not support dtype=float16"),
            (is_large, f"head_dim {d.head_dim} is too large for a block in VMEM"),
            (
                length % (TILE * num_length_parts),
                f"max_target_length {length} is not a multiple of {TILE}{each}",
            ),
        ]
    return next((reason for holds, reason in refused if holds), None)


def cudnn_failure_reason(
    config: ModelConfig, devices: Iterable[Any], num_length_parts: int = 1
) -> str | None:
    device = next((x for x in devices if x.process_index == jax.process_index()), None)
    if not isinstance(device, jax.Device):
        return "no GPU here to try cuDNN's kernel on"
    length = config.shape.max_target_length
    on_device = SingleDeviceSharding(device)
    own_length = length // num_length_parts

    def abstract(*shape: int, dtype: Any = config.numerics.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=on_device)

    first = abstract(1, dtype=jnp.int32) if num_length_parts > 1 else None
    segments = tuple(abstract(1, n, dtype=jnp.int32) for n in (own_length, length))
    # Other sizes, such as mlp_dim, would only compile the same kernel again.
    kinds = dict.fromkeys(
        (window, own.attention.attention_scale, d.num_query_heads, d.num_kv_heads, d.head_dim)
        for window, (own, d) in softmax_layers(config)
    )
    for window, scale, num_heads, num_kv_heads, head_dim in kinds:
        queries = abstract(1, own_length, num_heads, head_dim)
        keys = abstract(1, length, num_kv_heads, head_dim)
        spec = AttentionSpec(config.attention.causal, window, scale)

        def total(*arrays, spec=spec):
            return _cudnn(*arrays, spec=spec).sum()

        gradients = jax.jit(jax.grad(total, argnums=(1, 2, 3)))
        try:
            gradients.lower(first, queries, keys, keys, *segments).compile()
        except Exception as error:  # its type depends on what cuDNN lacks
            reason = first_line(error)
            return f"cuDNN has no kernel for it: {reason}"
    return None


def supports_shape(q_BTNH: jax.Array, query_sharding: NamedSharding | None) -> bool:
    length = q_BTNH.shape[1]
    own = length if query_sharding is None else query_sharding.shard_shape(q_BTNH.shape)[1]
    if platform() == "gpu":
        return own % 2 == 0  # JAX requires it for gradients
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
    on_gpu = platform() == "gpu"
    run = functools.partial(_cudnn if on_gpu else _splash, spec=spec)
    if query_sharding is None or key_sharding is None:
        return run(None, q_BTNH, k_BSKH, v_BSKH, segments_BT, segments_BT)
    if on_gpu and current_num_stages() > 1:
        run = _on_one_stage(run)
    mesh = query_sharding.mesh
    batch, length, heads = (split_axes(query_sharding, dim) for dim in range(3))
    if (repeats := kv_head_repeats(q_BTNH, k_BSKH, query_sharding, key_sharding)) > 1:
        k_BSKH, v_BSKH = (jnp.repeat(x, repeats, axis=2) for x in (k_BSKH, v_BSKH))
    queries = keys = PartitionSpec(batch, length, heads)
    mask = mask_spec = None
    if length and (spec.causal or (spec.window or k_BSKH.shape[1]) < k_BSKH.shape[1]):
        _, own_length, own_heads, _ = query_sharding.shard_shape(q_BTNH.shape)
        if on_gpu:
            mask = jnp.arange(0, q_BTNH.shape[1], own_length)
            mask_spec = PartitionSpec(length)
        else:
            parts = math.prod(mesh.shape[axis] for axis in length)
            shape = own_length * parts, k_BSKH.shape[1]
            mask = _splash_kernel(shape, own_heads, parts, spec, platform() == "cpu")
            mask_spec = mask.manual_sharding_spec(NamedSharding(mesh, PartitionSpec(None, length)))
    segment_specs = PartitionSpec(batch, length), PartitionSpec(batch)

    def gather_and_run(mask, q_BTNH, k_BSKH, v_BSKH, *segments):
        if length:  # in here, so that gradients of keys and values are reduce-scattered
            k_BSKH, v_BSKH = (_gather_length(x, length) for x in (k_BSKH, v_BSKH))
        return run(mask, q_BTNH, k_BSKH, v_BSKH, *segments)

    return jax.shard_map(
        gather_and_run,
        mesh=mesh,
        in_specs=(mask_spec, queries, keys, keys, *segment_specs),
        out_specs=queries,
        check_vma=False,
    )(mask, q_BTNH, k_BSKH, v_BSKH, segments_BT, segments_BT)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gather_length(x_BSKH: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return jax.lax.all_gather(x_BSKH, axes, axis=1, tiled=True)


def _scatter_length(axes: tuple[str, ...], _: None, dx_BSKH: jax.Array) -> tuple[jax.Array]:
    """Reduce-scatters the gradients of the gathered keys or values.

    By a leading dimension: of any other, XLA for TPU makes an all-reduce and a slice.
    """
    batch, length, heads, head_dim = dx_BSKH.shape
    parts = jax.lax.axis_size(axes)
    own_length = length // parts
    dx_PBKSH = dx_BSKH.reshape(batch, parts, own_length, heads, head_dim).transpose(1, 0, 3, 2, 4)
    own = jax.lax.psum_scatter(dx_PBKSH.reshape(parts, -1, head_dim), axes)
    return (own.reshape(batch, heads, own_length, head_dim).swapaxes(1, 2),)


_gather_length.defvjp(lambda x_BSKH, axes: (_gather_length(x_BSKH, axes), None), _scatter_length)


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

    causal = spec.causal
    window = spec.window
    if window is not None and window < shape[1]:
        sides = (window - 1, 0 if causal else window)
        mask = _by_diagonal(masks.LocalMask)(shape, sides, 0)
    else:  # splash attention cannot partition a window that hides nothing
        mask = _by_diagonal(masks.CausalMask if causal else masks.FullMask)(shape)
    block = block_size(shape[0] // num_length_parts)
    sizes = splash.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
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
    first_1, q_BTNH, k_BSKH, v_BSKH, query_segments_BT, key_segments_BS, *, spec: AttentionSpec
):
    """Runs cuDNN's attention on one device.

    `first_1` is the position of the first query if sequences are split. Masks of segments and of
    split sequences take [T, S].
    """
    is_causal = spec.causal
    mask_B1TS = None
    window = None if spec.window is None else (spec.window - 1, 0)
    if query_segments_BT is not None:
        mask_B1TS = (query_segments_BT[:, :, None] == key_segments_BS[:, None])[:, None]
    if first_1 is not None:  # cuDNN's own masks begin at the first key
        position_T, position_S = (jnp.arange(x.shape[1]) for x in (q_BTNH, k_BSKH))
        seen_TS = spec.visible((first_1 + position_T)[:, None] - position_S)
        mask_B1TS = seen_TS[None, None] if mask_B1TS is None else mask_B1TS & seen_TS
        is_causal = False
        window = None
    o_BTNH = jax.nn.dot_product_attention(
        q_BTNH,
        k_BSKH,
        v_BSKH,
        mask=mask_B1TS,
        scale=spec.scale,
        is_causal=is_causal,
        local_window_size=window,
        implementation="cudnn",
    )
    return checkpoint_name(o_BTNH, _RESIDUALS)


def _on_one_stage(run: Callable) -> Callable:
    """Returns `run` for vmap over pipeline stages.

    JAX cannot batch cuDNN's masks, but each device has one stage. Gradients work only outside of
    the vmap, as in layers/assembly/pipeline.py.
    """
    on_stage = jax.custom_batching.custom_vmap(run)

    @on_stage.def_vmap
    def _(num_stages, is_batched, *arrays):
        assert num_stages == 1, num_stages
        own = jax.tree.map(lambda x, batched: x[0] if batched else x, arrays, tuple(is_batched))
        return run(*own)[None], True

    return on_stage
