"""Softmax attention from projected queries, keys and values.

Legend: B sequences, T query tokens, S key tokens, M memories, K key/value heads, G query heads per
key/value head, N = K * G query heads, H head_dim, W window.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from MaxText.config.model_sections import LayerConfig, ModelConfig
from MaxText.config.registry import lookup
from MaxText.layers import capture
from MaxText.layers.dense import einsum, einsum_f32, is_exact_on_cpu
from MaxText.layers.dropout import dropout
from MaxText.parallelism.logical_sharding import platform, split_axes

MAX_BLOCKS = 16  # unrolled query blocks cost compile time: beyond this many they grow instead
_SMALLEST_WINDOW_BLOCK = 16  # rows; smaller blocks cost more in overhead than they save

PersistentKV = tuple[jax.Array, jax.Array]  # keys and values [M, K, H]


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """Computation and masking of attention scores."""

    causal: bool = True
    window: int | None = None  # W: query i sees keys i - W + 1 to i; non-causal to i + W (GPT-Neo)
    scale: float | None = None  # factor of q k; None is 1 / sqrt(H)
    soft_cap: float = 0.0  # c in c * tanh(score / c); 0 disables
    slopes_N: jax.Array | None = None  # ALiBi slopes, float32
    precision: str | None = None

    def scale_for(self, head_dim: int) -> float:
        return head_dim**-0.5 if self.scale is None else self.scale

    def visible(self, distance: jax.Array) -> jax.Array:
        """Returns whether a query sees the key `distance` tokens before it."""
        seen = distance >= 0 if self.causal else jnp.ones(distance.shape, bool)
        if self.window is None:
            return seen
        return seen & (distance < self.window) & (distance >= -self.window)


def dot_product_attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    spec: AttentionSpec,
    *,
    segments_BT: jax.Array | None = None,  # attention stays within a segment; None is one
    persistent_kv: PersistentKV | None = None,  # additional keys and values that every query sees
    block_size: int | None = None,  # one block if None, or not causal without parts
    parts: int = 1,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
) -> jax.Array:
    """Returns softmax(scores) v, [B, T, N, H]; computes in float32.

    Query head n reads key/value head n // G. Rows are computed in blocks of `block_size`, if causal
    with keys up to the last row, which skips about half of the products. With a window, blocks have
    about W rows: 2 W products per token (3 W if not causal). If T is split into `parts` on several
    devices, while keys and values are unsharded, a block has rows of each and multiplies all keys.
    """
    length = q_BTNH.shape[1]
    causal = spec.causal
    window = spec.window
    run = functools.partial(
        attend, spec=spec, persistent_kv=persistent_kv, dropout_rate=dropout_rate
    )
    if parts == 1 and window is not None:
        rows = window_blocks(window, length, causal=causal)
        if rows is not None:
            run = functools.partial(run, dropout_key=dropout_key)
            return _local_attention(q_BTNH, k_BSKH, v_BSKH, spec, rows, segments_BT, run)
        block_size = None
    k_BKSH = k_BSKH.transpose(0, 2, 1, 3)
    v_BKSH = v_BSKH.transpose(0, 2, 1, 3)
    own = block = length // parts
    if block_size is not None and (causal or parts > 1):
        block = min(own, max(block_size, -(-own // MAX_BLOCKS)))
    positions = jnp.arange(length)
    outputs = []
    # From the last block: each takes its keys from those of the next, so that their gradients are
    # added up from the smallest to the largest, not each padded to all keys.
    for start in reversed(range(0, own, block)):
        end = min(start + block, own)
        keys_end = end if causal and parts == 1 else length

        def block_rows(x: jax.Array, axis: int, start: int = start, end: int = end) -> jax.Array:
            if parts == 1:
                return x[:, start:end] if axis else x[start:end]
            x = x.reshape(*x.shape[:axis], parts, own, *x.shape[axis + 1 :])
            x = jax.lax.slice_in_dim(x, start, end, axis=axis + 1)
            return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])

        distance_1TS = (block_rows(positions, 0)[:, None] - positions[:keys_end])[None]
        mask_BTS = spec.visible(distance_1TS)
        if segments_BT is not None:
            same_BTS = block_rows(segments_BT, 1)[:, :, None] == segments_BT[:, None, :keys_end]
            mask_BTS = mask_BTS & same_BTS
        k_BKSH = k_BKSH[:, :, :keys_end]
        v_BKSH = v_BKSH[:, :, :keys_end]
        o_BTNH = run(
            block_rows(q_BTNH, 1),
            k_BKSH,
            v_BKSH,
            mask_BTS,
            distance_1TS,
            dropout_key=None if dropout_key is None else jax.random.fold_in(dropout_key, start),
        )
        outputs.insert(0, o_BTNH)
    if parts == 1:
        if len(outputs) == 1:
            return outputs[0]
        # XLA takes long to compile a concatenation of transposed blocks for CPU.
        return jnp.concatenate([o.swapaxes(1, 2) for o in outputs], axis=2).swapaxes(1, 2)
    shape = (q_BTNH.shape[0], parts, -1, *q_BTNH.shape[2:])
    return jnp.concatenate([o.reshape(shape) for o in outputs], axis=2).reshape(q_BTNH.shape)


def window_blocks(window: int, length: int, *, causal: bool) -> int | None:
    """Returns query rows per block of windowed attention; None for one block."""
    rows = max(window, _SMALLEST_WINDOW_BLOCK)
    return rows if length > (2 if causal else 3) * rows else None


def _local_attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    spec: AttentionSpec,
    rows: int,
    segments_BT: jax.Array | None,
    run: Callable[..., jax.Array],
) -> jax.Array:
    """Attends in batched blocks of `rows` >= W queries; small for any T."""
    batch, length, num_heads, head_dim = q_BTNH.shape
    num_blocks = -(-length // rows)
    behind = rows
    before = 0 if spec.causal else rows
    width = behind + rows + before

    def blocks(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, ((0, 0), (0, num_blocks * rows - length), *((0, 0),) * (x.ndim - 2)))
        return x.reshape(batch * num_blocks, rows, *x.shape[2:])

    def neighborhoods(x: jax.Array) -> jax.Array:
        """Returns [B * blocks, width, ...]: each block with its neighbors."""
        spare = num_blocks * rows - length
        x = jnp.pad(x, ((0, 0), (behind, spare + before), *((0, 0),) * (x.ndim - 2)))
        parts = [
            x[:, start : start + num_blocks * rows].reshape(batch, num_blocks, rows, *x.shape[2:])
            for start in range(0, width, rows)
        ]
        return jnp.concatenate(parts, axis=2).reshape(batch * num_blocks, width, *x.shape[2:])

    distance_1TS = (jnp.arange(rows)[:, None] - (jnp.arange(width) - behind)[None, :])[None]
    # Padding has segment -1, which no token has.
    segments = jnp.zeros((batch, length), jnp.int32) if segments_BT is None else segments_BT
    key_segments = neighborhoods(segments + 1) - 1
    mask = spec.visible(distance_1TS) & (blocks(segments)[:, :, None] == key_segments[:, None, :])
    # Padding queries may see no key, for which softmax would be NaN.
    mask = mask | (jnp.arange(width) == behind)[None, None] & ~mask.any(-1, keepdims=True)
    k_BKSH, v_BKSH = (neighborhoods(x).transpose(0, 2, 1, 3) for x in (k_BSKH, v_BSKH))
    o = run(blocks(q_BTNH), k_BKSH, v_BKSH, mask, distance_1TS)
    return o.reshape(batch, num_blocks * rows, num_heads, head_dim)[:, :length]


def softmax_layers(config: ModelConfig) -> list[tuple[int | None, LayerConfig]]:
    """Returns (W or None, layer) of layers with softmax attention."""
    mixers = ((lookup("mixer", layer.config.block.mixer), layer) for layer in config.layers)
    return [
        (mixer.sliding_window(layer.config.attention), layer)
        for mixer, layer in mixers
        if mixer.has_softmax
    ]


def prepend_memories(memory_MKH: jax.Array, x_BKSH: jax.Array) -> jax.Array:
    """Prepends memories to keys or values, [B, K, M + S, H]."""
    memory_KMH = memory_MKH.transpose(1, 0, 2).astype(x_BKSH.dtype)
    memories = jnp.broadcast_to(memory_KMH, (*x_BKSH.shape[:-3], *memory_KMH.shape))
    return jnp.concatenate([memories, x_BKSH], axis=-2)


def kv_head_repeats(
    q_BTNH: jax.Array, k_BSKH: jax.Array, query_sharding: NamedSharding, key_sharding: NamedSharding
) -> int:
    axes = split_axes(query_sharding, 2)
    num_kv_heads = k_BSKH.shape[2]
    if split_axes(key_sharding, 2) == axes:
        return 1
    parts = math.prod(query_sharding.mesh.shape[axis] for axis in axes)
    group = q_BTNH.shape[2] // num_kv_heads
    return next(n for n in range(1, group + 1) if group % n == 0 and num_kv_heads * n % parts == 0)


def attend(
    q_BTNH: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    mask_BTS: jax.Array,  # visible keys; B may be 1
    distance_BTS: jax.Array,  # query position minus key position; B may be 1
    spec: AttentionSpec,
    *,
    persistent_kv: PersistentKV | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
) -> jax.Array:
    """Returns masked attention, [B, T, N, H]. Inside, R = G * T.

    `keys` and `values` are [B, K, S, H], or [K, S, H] for a batch of one (KeyValueCache).
    """
    batch, length, num_heads, head_dim = q_BTNH.shape
    num_kv_heads = keys.shape[-3]
    group = num_heads // num_kv_heads
    if persistent_kv is not None:
        # Memories precede the tokens, at distance 0.
        keys, values = map(prepend_memories, persistent_kv, (keys, values))
        padding = ((0, 0), (0, 0), (len(persistent_kv[0]), 0))
        mask_BTS = jnp.pad(mask_BTS, padding, constant_values=True)
        distance_BTS = jnp.pad(distance_BTS, padding)
    # One matrix per group: plain matmuls are fast on CPU.
    scale = spec.scale_for(head_dim)
    q_BKRH = (
        (q_BTNH * scale if scale != 1 else q_BTNH)
        .reshape(batch, length, num_kv_heads, group, head_dim)
        .transpose(0, 2, 3, 1, 4)
        .reshape(*keys.shape[:-2], group * length, head_dim)
    )
    scores_BKRS = einsum_f32("...rh,...sh->...rs", q_BKRH, keys, spec.precision)
    if spec.soft_cap:
        scores_BKRS = spec.soft_cap * jnp.tanh(scores_BKRS / spec.soft_cap)
    if spec.slopes_N is not None:
        slopes_KG11 = spec.slopes_N.reshape(num_kv_heads, group, 1, 1)
        abs_distance_B11TS = jnp.abs(distance_BTS)[:, None, None].astype(jnp.float32)
        bias = (slopes_KG11 * abs_distance_B11TS).reshape(
            abs_distance_B11TS.shape[0], num_kv_heads, group * length, abs_distance_B11TS.shape[-1]
        )
        scores_BKRS = scores_BKRS - (bias[0] if keys.ndim == 3 else bias)
    mask_BKRS = jnp.tile(mask_BTS, (1, group, 1))[:, None]
    if keys.ndim == 3:
        mask_BKRS = mask_BKRS[0]
    scores_BKRS = jnp.where(mask_BKRS, scores_BKRS, -jnp.inf)
    is_plain = dropout_key is not None or capture.is_on() or is_exact_on_cpu(spec.precision, values)
    if platform() == "cpu" and not is_plain:
        o_BKRH: jax.Array = _cpu_softmax_product(spec.precision, scores_BKRS, values)
    else:
        probabilities = jax.nn.softmax(scores_BKRS, axis=-1)
        if capture.is_on():
            capture.record(probabilities.reshape(batch, num_heads, length, -1), "probabilities")
        probabilities = dropout(probabilities, dropout_rate, dropout_key).astype(values.dtype)
        o_BKRH = einsum("...rs,...sh->...rh", probabilities, values, spec.precision)
    o_BKGTH = o_BKRH.reshape(batch, num_kv_heads, group, length, head_dim)
    return o_BKGTH.transpose(0, 3, 1, 2, 4).reshape(batch, length, num_heads, head_dim)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cpu_softmax_product(
    precision: str | None, scores_BKRS: jax.Array, values_BKSH: jax.Array
) -> jax.Array:
    """Returns softmax(scores) values in fewer passes over [R, S].

    As in FlashAttention (Dao et al. 2022), the product is divided by the softmax's sums, and
    rowsum(dO * O) replaces rowsum(P * dP) in the gradient: 3 to 7 % of a small GPT's step. Where a
    query sees almost only one key, the gradient of its scores is a difference of nearly equal
    numbers, which this form computes in two ways, and so loses the digits that they share. On 18
    random models neither form was more exact on average; matmul_precision=highest takes the plain
    one.
    """
    return _softmax_product_forward(precision, scores_BKRS, values_BKSH)[0]


def _softmax_product_forward(
    precision: str | None, scores_BKRS: jax.Array, values_BKSH: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    exp_BKRS = jnp.exp(scores_BKRS - scores_BKRS.max(-1, keepdims=True))
    sum_BKR1 = exp_BKRS.sum(-1, keepdims=True)
    exp_BKRS = exp_BKRS.astype(values_BKSH.dtype)
    o_BKRH = einsum_f32("...rs,...sh->...rh", exp_BKRS, values_BKSH, precision) / sum_BKR1
    return o_BKRH.astype(values_BKSH.dtype), (exp_BKRS, sum_BKR1, o_BKRH, values_BKSH)


def _softmax_product_backward(
    precision: str | None, saved: tuple[jax.Array, ...], g_BKRH: jax.Array
) -> tuple[jax.Array, jax.Array]:
    exp_BKRS, sum_BKR1, o_BKRH, values_BKSH = saved
    g_BKRH = g_BKRH / sum_BKR1
    mean_BKR1 = (g_BKRH * o_BKRH).sum(-1, keepdims=True)
    g_BKRH = g_BKRH.astype(values_BKSH.dtype)
    grad_values = jnp.einsum("...rs,...rh->...sh", exp_BKRS, g_BKRH, precision=precision)
    grad_BKRS = einsum_f32("...rh,...sh->...rs", g_BKRH, values_BKSH, precision)
    return exp_BKRS * (grad_BKRS - mean_BKR1), grad_values


_cpu_softmax_product.defvjp(_softmax_product_forward, _softmax_product_backward)
