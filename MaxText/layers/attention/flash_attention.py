"""Softmax attention by fused kernels: splash attention on TPU, cuDNN's on GPU.

Both kernels compute attention in blocks that stay on the chip (FlashAttention, Dao et al. 2022),
and are written for one device: `flash_attention` divides the work over a mesh with jax.shard_map.
`kernel_unsupported_reason` and `cudnn_failure_reason` say beforehand whether a kernel serves a
model. On CPU splash attention is interpreted, for tests.

Legend: B sequences, T query tokens, S key tokens, N query heads, K key/value heads, H head_dim.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from jax.typing import DTypeLike

from MaxText.config.model_sections import LayerConfig, ModelConfig
from MaxText.errors import first_line
from MaxText.layers.attention.attention_core import (
    AttentionSharding,
    AttentionSpec,
    SoftmaxMixer,
    kv_head_repeats,
    repeat_value_heads,
    softmax_layers,
)
from MaxText.layers.lowering.gather_length import gather_length
from MaxText.layers.lowering.pipeline_stages import unbatched_on_one_stage
from MaxText.parallelism.logical_sharding import current_num_stages, platform, split_axes

# What tells a device its rows of the mask: the position of its first query for cuDNN, a kernel made
# for the whole mask for splash attention (jax exports no type for it); None if it has all rows.
MaskPart = Any
# Splash attention blocks are multiples of TILE, and at most MaxText's default (sa_block_*): twice
# as large compiles five times longer, four times does not fit a v5p.
TILE = 128
LARGEST_BLOCK = 512
_LARGEST_HEAD = 1024  # most bytes of one head of a token with which such blocks fit a v4
# Matmuls over the width of keys, and of values; both backward kernels recompute scores.
_PRODUCTS = {"_fwd": (1, 1), "_dkv": (2, 2), "_dq": (2, 1)}
_RESIDUALS = "context"  # name of the kernel's residuals in remat policies


def kernel_unsupported_reason(
    config: ModelConfig, backend: str, num_length_parts: int = 1
) -> str | None:
    """Returns why no kernel serves a model, or None.

    Args:
      config: The model.
      backend: "gpu" or "tpu".
      num_length_parts: Devices that divide the tokens of a sequence.
    """
    layers = dict.fromkeys(softmax_layers(config))
    if not layers:
        return "no layer has softmax attention"
    reasons = hook_reasons(config)
    if all(mixer.hooks() for mixer, _ in layers):
        return reasons[0]
    for mixer, layer in layers:
        reason = None
        if not mixer.hooks():
            reason = _unsupported_reason(mixer, layer, backend, num_length_parts)
        if reason is not None:
            return reason
    return None


def hook_reasons(config: ModelConfig) -> list[str]:
    """Returns why mixers are computed in blocks while a kernel serves the other layers."""
    mixers = {layer.config.block.mixer: mixer for mixer, layer in softmax_layers(config)}
    return [
        f"no kernel applies {' and '.join(mixer.hooks())} of mixer={name}"
        for name, mixer in mixers.items()
        if mixer.hooks()
    ]


def _unsupported_reason(
    mixer: SoftmaxMixer, layer: LayerConfig, backend: str, num_length_parts: int
) -> str | None:
    """Returns why no kernel serves a layer.

    Args:
      mixer: Class of its mixer.
      layer: The layer.
      backend: "gpu" or "tpu".
      num_length_parts: Devices that divide the tokens of a sequence.
    """
    config, dimensions = layer
    attention = config.attention
    window = mixer.sliding_window(attention)
    heads = mixer.heads(config, dimensions)
    width = max(heads.key_width, heads.value_width)
    precision = config.numerics.matmul_precision
    dtype = np.dtype(config.numerics.dtype)
    is_split = num_length_parts > 1
    is_ring = is_split and attention.context_parallel_strategy == "ring"
    has_alibi = config.position.position_embedding == "alibi"
    limits: list[tuple[Any, str]] = [
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
        limits += [
            (dtype.itemsize != 2, f"cuDNN has no kernel for dtype={dtype.name}"),
            (width % 8, f"head_dim {width} is not a multiple of 8"),
            (
                attention.attention_sinks,
                "cuDNN's kernel gives no gradient of the log-sum-exp, which attention_sinks needs",
            ),
            (attention.attn_logits_soft_cap, "cuDNN has no attn_logits_soft_cap"),
            (
                window and not mixer.is_causal(attention),
                "cuDNN has no bidirectional windows",
            ),
        ]
    else:
        length = dimensions.max_target_length
        is_large = width * dtype.itemsize > _LARGEST_HEAD
        on_each_device = f" on each of {num_length_parts} devices" if is_split else ""
        limits += [
            (dtype.name == "float16", "splash attention does not support dtype=float16"),
            (is_large, f"head_dim {width} is too large for a block in VMEM"),
            (
                length % (TILE * num_length_parts),
                f"max_target_length {length} is not a multiple of {TILE}{on_each_device}",
            ),
        ]
    return next((reason for is_exceeded, reason in limits if is_exceeded), None)


def cudnn_failure_reason(
    config: ModelConfig, devices: Iterable[Any], num_length_parts: int = 1
) -> str | None:
    """Returns why cuDNN cannot compile its kernel and gradients for a model, or None.

    Tries each shape of the model's layers on one of this process's devices.

    Args:
      config: The model.
      devices: Devices of the mesh.
      num_length_parts: Devices that divide the tokens of a sequence.
    """
    local_device = next(
        (device for device in devices if device.process_index == jax.process_index()), None
    )
    if not isinstance(local_device, jax.Device):
        return "no GPU here to try cuDNN's kernel on"
    length = config.shape.max_target_length
    part_length = length // num_length_parts
    sharding = SingleDeviceSharding(local_device)

    def abstract(*shape: int, dtype: DTypeLike = config.numerics.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    first_position = abstract(1, dtype=jnp.int32) if num_length_parts > 1 else None
    segments = tuple(abstract(1, tokens, dtype=jnp.int32) for tokens in (part_length, length))
    # Other sizes, such as mlp_dim, would only compile the same kernel again.
    shapes = dict.fromkeys(
        (
            mixer.heads(layer_config, dimensions),
            AttentionSpec(
                causal=mixer.is_causal(layer_config.attention),
                window=mixer.sliding_window(layer_config.attention),
                scale=layer_config.attention.attention_scale,
            ),
        )
        for mixer, (layer_config, dimensions) in softmax_layers(config)
        if not mixer.hooks()
    )
    for heads, spec in shapes:
        queries = abstract(1, part_length, heads.num_query_heads, heads.key_width)
        keys = abstract(1, length, heads.num_key_heads, heads.key_width)
        values = abstract(1, length, heads.num_key_heads, heads.value_width)

        def total(*arrays: Any, spec: AttentionSpec = spec) -> jax.Array:
            return _cudnn(*arrays, spec=spec).sum()

        gradients = jax.jit(jax.grad(total, argnums=(2, 3, 4)))
        try:
            gradients.lower(first_position, None, queries, keys, values, *segments).compile()
        except Exception as error:  # its type depends on what cuDNN lacks
            reason = first_line(error)
            return f"cuDNN has no kernel for it: {reason}"
    return None


def supports_shape(q_BTNH: jax.Array, sharding: AttentionSharding | None) -> bool:
    """Returns whether the backend's kernel has blocks for this many tokens on a device."""
    length = q_BTNH.shape[1]
    if sharding is not None:
        length = sharding.query.shard_shape(q_BTNH.shape)[1]
    if platform() == "gpu":
        return length % 2 == 0  # JAX requires it for gradients
    return length % TILE == 0


def flash_attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSVH: jax.Array,
    spec: AttentionSpec,
    sharding: AttentionSharding | None = None,
    *,
    segments_BT: jax.Array | None = None,
) -> jax.Array:
    """Computes dot_product_attention without hooks, ALiBi, memories and dropout.

    Sinks are for splash attention alone.

    The output, and on TPU the log-sum-exp, are tagged "context" for remat policies.

    Args:
      q_BTNH: Queries; `supports_shape` holds for them.
      k_BSKH: Keys, with S = T.
      v_BSVH: Values.
      spec: Computation and masking of scores.
      sharding: How queries and keys are divided, S over the same axes as T. Each device gathers the
        keys of whole sequences. None on one device.
      segments_BT: Document of each token: attention stays within one.

    Returns:
      [B, T, N, H], in the dtype of the queries.
    """
    assert spec.slopes_N is None, spec
    assert not spec.has_hooks, spec
    assert spec.precision in (None, "default"), spec
    on_gpu = platform() == "gpu"
    sinks_N = spec.sinks_N
    spec = dataclasses.replace(spec, sinks_N=None)  # what is left is hashable
    v_BSKH = repeat_value_heads(k_BSKH, v_BSVH)
    run_kernel = functools.partial(_cudnn if on_gpu else _splash, spec=spec)
    if sharding is None:
        return run_kernel(None, sinks_N, q_BTNH, k_BSKH, v_BSKH, segments_BT, segments_BT)
    if on_gpu and current_num_stages() > 1:
        run_kernel = unbatched_on_one_stage(run_kernel)
    batch_axes, length_axes, head_axes = (split_axes(sharding.query, dim) for dim in range(3))
    repeats = kv_head_repeats(q_BTNH, k_BSKH, sharding)
    if repeats > 1:
        k_BSKH = jnp.repeat(k_BSKH, repeats, axis=2)
        v_BSKH = jnp.repeat(v_BSKH, repeats, axis=2)
    mask_part, mask_spec = _mask_of_parts(q_BTNH, k_BSKH, spec, sharding)
    by_head = PartitionSpec(batch_axes, length_axes, head_axes)
    query_segments = PartitionSpec(batch_axes, length_axes)
    key_segments = PartitionSpec(batch_axes)

    def gather_and_run(
        mask_part: MaskPart,
        sinks_N: jax.Array | None,
        q_BTNH: jax.Array,
        k_BSKH: jax.Array,
        v_BSKH: jax.Array,
        *segments: jax.Array | None,
    ) -> jax.Array:
        if length_axes:  # in here, so that gradients of keys and values are reduce-scattered
            k_BSKH = gather_length(k_BSKH, length_axes)
            v_BSKH = gather_length(v_BSKH, length_axes)
        return run_kernel(mask_part, sinks_N, q_BTNH, k_BSKH, v_BSKH, *segments)

    return jax.shard_map(
        gather_and_run,
        mesh=sharding.query.mesh,
        in_specs=(
            mask_spec,
            PartitionSpec(head_axes),
            by_head,
            by_head,
            by_head,
            query_segments,
            key_segments,
        ),
        out_specs=by_head,
        check_vma=False,
    )(mask_part, sinks_N, q_BTNH, k_BSKH, v_BSKH, segments_BT, segments_BT)


def _mask_of_parts(
    q_BTNH: jax.Array, k_BSKH: jax.Array, spec: AttentionSpec, sharding: AttentionSharding
) -> tuple[Any, Any]:
    """Returns what tells each device its rows of the mask, and the partition of that.

    For cuDNN the position of the device's first query, for splash attention a kernel made for the
    whole mask. (None, None) if all devices have the same mask.
    """
    length_axes = sharding.length_axes
    num_keys = k_BSKH.shape[1]
    hides_keys = spec.causal or (spec.window or num_keys) < num_keys
    if not length_axes or not hides_keys:
        return None, None
    mesh = sharding.query.mesh
    _, part_length, part_heads, _ = sharding.query.shard_shape(q_BTNH.shape)
    if platform() == "gpu":
        return jnp.arange(0, q_BTNH.shape[1], part_length), PartitionSpec(length_axes)
    num_parts = math.prod(mesh.shape[axis] for axis in length_axes)
    kernel = _splash_kernel(
        (part_length * num_parts, num_keys), part_heads, num_parts, spec, platform() == "cpu"
    )
    rows = NamedSharding(mesh, PartitionSpec(None, length_axes))
    return kernel, kernel.manual_sharding_spec(rows)


def block_size(length: int) -> int:
    """Returns the splash attention block size for a multiple of TILE."""
    return max(rows for rows in range(TILE, LARGEST_BLOCK + 1, TILE) if length % rows == 0)


def splash_operations(
    name: str, queries: Sequence[int], value_width: int, num_keys: float
) -> float:
    """Returns the floating-point operations of one of splash attention's kernels.

    Args:
      name: Name of the kernel, which contains its phase: _fwd, _dkv or _dq.
      queries: Shape of its queries, which are as wide as its keys.
      value_width: Width of its values.
      num_keys: Average number of keys that a query is multiplied with.
    """
    with_keys, with_values = next(number for phase, number in _PRODUCTS.items() if phase in name)
    *num_queries, key_width = queries
    widths = with_keys * key_width + with_values * value_width
    return 2.0 * widths * math.prod(num_queries) * num_keys


def average_keys_computed(length: int, *, causal: bool, window: int | None = None) -> float:
    """Returns the average keys multiplied per query by splash attention."""
    block = block_size(length)
    blocks = np.arange(length // block)
    block_distance = blocks[:, None] - blocks
    # Distance between the nearest query and key of two blocks.
    nearest = (np.abs(block_distance) - 1) * block + 1
    reach = length if window is None else window
    seen = (block_distance == 0) | (block_distance > 0) & (nearest < reach)
    if not causal:
        seen |= (block_distance < 0) & (nearest <= reach)
    return float(seen.sum() * block) / len(blocks)


@functools.lru_cache(maxsize=64)
def _splash_kernel(
    shape: tuple[int, int],
    num_heads: int,
    num_length_parts: int,
    spec: AttentionSpec,
    interpret: bool,
) -> MaskPart:
    """Returns splash attention's kernel for a whole mask. Cached, as it is slow to build.

    Args:
      shape: Query tokens and key tokens of the mask.
      num_heads: Query heads of a device.
      num_length_parts: Devices that divide the query tokens.
      spec: The mask and the soft cap.
      interpret: Whether to interpret the kernel, as on CPU.
    """
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


def _by_diagonal(kind: type[Any]) -> type[Any]:
    """Returns a class of masks, functions of i - j, with cached blocks.

    Uniform blocks have one element. Splash attention evaluates each block several times, which
    took 16 s of a CPU at 64k tokens.
    """
    blocks: dict[tuple[int, int, int], np.ndarray] = {}

    class ByDiagonal(kind):
        def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
            rows, columns = index
            offset = rows.start - columns.start
            block_key = (offset, rows.stop - rows.start, columns.stop - columns.start)
            if block_key not in blocks:
                block = super().__getitem__(index)
                is_uniform = block.all() == block.any()
                blocks[block_key] = block[:1, :1] if is_uniform else block
            return blocks[block_key]

    return ByDiagonal


def _splash(  # noqa: PLR0917
    kernel: MaskPart,
    sinks_N: jax.Array | None,
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    query_segments_BT: jax.Array | None,
    key_segments_BS: jax.Array | None,
    *,
    spec: AttentionSpec,
) -> jax.Array:
    """Runs splash attention on one device.

    Args:
      kernel: The kernel with this device's rows of the mask; None if it has all rows.
      sinks_N: Sinks of its heads.
      q_BTNH: Its queries.
      k_BSKH: Keys of whole sequences.
      v_BSKH: Their values.
      query_segments_BT: Documents of its queries.
      key_segments_BS: Documents of the keys.
      spec: Computation and masking of scores.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    _, length, num_heads, head_dim = q_BTNH.shape
    if kernel is None:
        kernel = _splash_kernel((length, k_BSKH.shape[1]), num_heads, 1, spec, platform() == "cpu")
    segments = None
    if query_segments_BT is not None and key_segments_BS is not None:
        segments = splash.SegmentIds(query_segments_BT, key_segments_BS)
    scaled = q_BTNH * spec.scale_for(head_dim)
    q_BNTH, k_BKSH, v_BKSH = (x.transpose(0, 2, 1, 3) for x in (scaled, k_BSKH, v_BSKH))
    run = functools.partial(kernel, sinks=sinks_N)
    return jax.vmap(run)(q_BNTH, k_BKSH, v_BKSH, segments).transpose(0, 2, 1, 3)


def _cudnn(  # noqa: PLR0917
    first_1: jax.Array | None,
    sinks_N: None,
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    query_segments_BT: jax.Array | None,
    key_segments_BS: jax.Array | None,
    *,
    spec: AttentionSpec,
) -> jax.Array:
    """Runs cuDNN's attention on one device.

    Masks of segments and of divided sequences take [T, S].

    Args:
      first_1: Position of the first query if sequences are divided, else None.
      sinks_N: None; JAX's binding drops the gradient of the log-sum-exp.
      q_BTNH: This device's queries.
      k_BSKH: Keys of whole sequences.
      v_BSKH: Their values.
      query_segments_BT: Documents of the queries.
      key_segments_BS: Documents of the keys.
      spec: Computation and masking of scores.
    """
    assert sinks_N is None, sinks_N
    is_causal = spec.causal
    mask_B1TS = None
    window = None if spec.window is None else (spec.window - 1, 0)
    if query_segments_BT is not None and key_segments_BS is not None:
        mask_B1TS = (query_segments_BT[:, :, None] == key_segments_BS[:, None])[:, None]
    if first_1 is not None:  # cuDNN's own masks begin at the first key
        position_T = jnp.arange(q_BTNH.shape[1])
        position_S = jnp.arange(k_BSKH.shape[1])
        seen_TS = spec.visible((first_1 + position_T)[:, None] - position_S)
        mask_B1TS = seen_TS[None, None] if mask_B1TS is None else mask_B1TS & seen_TS
        is_causal = False
        window = None
    value_width = v_BSKH.shape[-1]
    scale = spec.scale
    if value_width != q_BTNH.shape[-1]:  # JAX's binding has one width
        scale = spec.scale_for(q_BTNH.shape[-1])
        width = max(q_BTNH.shape[-1], value_width)
        q_BTNH, k_BSKH, v_BSKH = (_padded(x, width) for x in (q_BTNH, k_BSKH, v_BSKH))
    o_BTNH = jax.nn.dot_product_attention(
        q_BTNH,
        k_BSKH,
        v_BSKH,
        mask=mask_B1TS,
        scale=scale,
        is_causal=is_causal,
        local_window_size=window,
        implementation="cudnn",
    )[..., :value_width]
    return checkpoint_name(o_BTNH, _RESIDUALS)


def _padded(x_BTNH: jax.Array, width: int) -> jax.Array:
    """Returns heads with zeros behind them, [B, T, N, width]."""
    return jnp.pad(x_BTNH, ((0, 0), (0, 0), (0, 0), (0, width - x_BTNH.shape[-1])))
