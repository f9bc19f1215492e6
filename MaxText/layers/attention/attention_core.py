"""Softmax attention from projected queries, keys and values.

`dot_product_attention` attends over whole sequences. It divides queries into blocks and calls
`softmax_attention` for each, which computes one masked square of scores. KV caches call
`softmax_attention` themselves, with the positions in their slots. `AttentionSpec` says how scores
are computed and which keys a query sees; every implementation of attention reads it.

Legend: B sequences, T query tokens, S key tokens, M memories, K key/value heads, G query heads per
key/value head, N = K * G query heads, R = G * T query rows of a key/value head, H head_dim, W
window.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from MaxText.config.model_sections import LayerConfig, ModelConfig
from MaxText.config.registry import lookup
from MaxText.layers import capture
from MaxText.layers.dense import einsum, einsum_f32
from MaxText.layers.dropout import NO_DROPOUT, Dropout
from MaxText.layers.lowering.concatenation import concatenate_tokens
from MaxText.layers.lowering.cpu_softmax import cpu_softmax_product, fuses_softmax_on_cpu
from MaxText.parallelism.logical_sharding import split_axes

MAX_BLOCKS = 16  # unrolled query blocks cost compile time: beyond this many they grow instead
_SMALLEST_WINDOW_BLOCK = 16  # rows; smaller blocks cost more in overhead than they save

PersistentKV = tuple[jax.Array, jax.Array]  # keys and values [M, K, H]


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """Computation and masking of attention scores.

    Attributes:
      causal: Whether a query sees only keys up to its own position.
      window: W: query i sees keys i - W + 1 to i; if not causal, up to i + W (GPT-Neo).
      scale: Factor of the products q k; None is 1 / sqrt(H).
      soft_cap: c in c * tanh(score / c); 0 disables it (Gemma 2, section 2).
      slopes_N: Slopes of ALiBi (Press et al. 2022), float32: what a head subtracts from a score per
        token of distance.
      precision: Precision of the products, a name of jax.lax.Precision.
    """

    causal: bool = True
    window: int | None = None
    scale: float | None = None
    soft_cap: float = 0.0
    slopes_N: jax.Array | None = None
    precision: str | None = None

    def scale_for(self, head_dim: int) -> float:
        """Returns the factor of the products q k in heads of this size."""
        return head_dim**-0.5 if self.scale is None else self.scale

    def visible(self, distance: jax.Array) -> jax.Array:
        """Returns whether a query sees the key `distance` tokens before it."""
        seen = distance >= 0 if self.causal else jnp.ones(distance.shape, bool)
        if self.window is None:
            return seen
        return seen & (distance < self.window) & (distance >= -self.window)


class AttentionSharding(NamedTuple):
    """Shardings of the inputs of attention over several devices."""

    query: NamedSharding  # of q_BTNH
    key: NamedSharding  # of k_BSKH and v_BSKH

    @property
    def length_axes(self) -> tuple[str, ...]:
        """Mesh axes that divide the query tokens of a sequence."""
        return split_axes(self.query, 1)


def dot_product_attention(  # noqa: PLR0913
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    spec: AttentionSpec,
    *,
    segments_BT: jax.Array | None = None,
    persistent_kv: PersistentKV | None = None,
    block_size: int | None = None,
    num_parts: int = 1,
    dropout: Dropout = NO_DROPOUT,
) -> jax.Array:
    """Returns softmax(scores) v over whole sequences (Vaswani et al. 2017, equation 1).

    Query head n reads key/value head n // G. Scores and their softmax are float32. Queries are
    computed in blocks: if causal, a block multiplies only the keys up to its last row, which skips
    about half of the products; with a window, blocks have about W rows and multiply 2 W keys (3 W
    if not causal).

    Args:
      q_BTNH: Queries.
      k_BSKH: Keys, with S = T.
      v_BSKH: Values.
      spec: Computation and masking of scores.
      segments_BT: Document of each token: attention stays within one. None is a single document.
      persistent_kv: Learned keys and values that every query sees besides those of tokens.
      block_size: Query rows of a block; larger if that would make more than MAX_BLOCKS. None is one
        block, and so is a bidirectional mask unless sequences are divided.
      num_parts: Parts of T on different devices, while keys and values are whole on each. A block
        then has rows of every part, and multiplies all keys.
      dropout: Dropout of the probabilities.

    Returns:
      [B, T, N, H], in the dtype of the values.
    """
    length = q_BTNH.shape[1]
    if num_parts == 1 and spec.window is not None:
        rows = window_blocks(spec.window, length, causal=spec.causal)
        if rows is not None:
            return _local_attention(
                q_BTNH,
                k_BSKH,
                v_BSKH,
                spec,
                rows=rows,
                segments_BT=segments_BT,
                persistent_kv=persistent_kv,
                dropout=dropout,
            )
        block_size = None
    k_BKSH = k_BSKH.transpose(0, 2, 1, 3)
    v_BKSH = v_BSKH.transpose(0, 2, 1, 3)
    part_length = length // num_parts
    block = part_length
    if block_size is not None and (spec.causal or num_parts > 1):
        block = min(part_length, max(block_size, -(-part_length // MAX_BLOCKS)))
    positions = jnp.arange(length)
    outputs = []
    # From the last block: each takes its keys from those of the next, so that their gradients are
    # added up from the smallest to the largest, not each padded to all keys.
    for start in reversed(range(0, part_length, block)):
        end = min(start + block, part_length)
        keys_end = end if spec.causal and num_parts == 1 else length
        rows_of = functools.partial(_rows_of_parts, start=start, end=end, num_parts=num_parts)
        distance_1TS = (rows_of(positions, axis=0)[:, None] - positions[:keys_end])[None]
        mask_BTS = spec.visible(distance_1TS)
        if segments_BT is not None:
            query_segments_BT = rows_of(segments_BT, axis=1)
            same_BTS = query_segments_BT[:, :, None] == segments_BT[:, None, :keys_end]
            mask_BTS = mask_BTS & same_BTS
        k_BKSH = k_BKSH[:, :, :keys_end]
        v_BKSH = v_BKSH[:, :, :keys_end]
        o_BTNH = softmax_attention(
            rows_of(q_BTNH, axis=1),
            k_BKSH,
            v_BKSH,
            spec,
            mask_BTS=mask_BTS,
            distance_BTS=distance_1TS,
            persistent_kv=persistent_kv,
            dropout=dropout.fold_in(start),
        )
        outputs.insert(0, o_BTNH)
    if num_parts == 1:
        return concatenate_tokens(outputs)
    shape = (q_BTNH.shape[0], num_parts, -1, *q_BTNH.shape[2:])
    return jnp.concatenate([o.reshape(shape) for o in outputs], axis=2).reshape(q_BTNH.shape)


def _rows_of_parts(x: jax.Array, *, axis: int, start: int, end: int, num_parts: int) -> jax.Array:
    """Returns rows `start` to `end` of each of `num_parts` equal parts of a dimension."""
    if num_parts == 1:
        return x[:, start:end] if axis == 1 else x[start:end]
    x = x.reshape(*x.shape[:axis], num_parts, -1, *x.shape[axis + 1 :])
    x = jax.lax.slice_in_dim(x, start, end, axis=axis + 1)
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


def window_blocks(window: int, length: int, *, causal: bool) -> int | None:
    """Returns query rows per block of windowed attention; None for one block."""
    rows = max(window, _SMALLEST_WINDOW_BLOCK)
    return rows if length > (2 if causal else 3) * rows else None


def _local_attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    spec: AttentionSpec,
    *,
    rows: int,
    segments_BT: jax.Array | None,
    persistent_kv: PersistentKV | None,
    dropout: Dropout,
) -> jax.Array:
    """Attends within a window in blocks of queries, all in one batch.

    A block sees itself, the block before it, and if not causal the one after it. So scores take
    O(T W) memory for any T.

    Args:
      q_BTNH: Queries; k_BSKH and v_BSKH are keys and values of the same tokens.
      rows: Queries of a block, at least W.
    """
    batch, length, num_heads, head_dim = q_BTNH.shape
    num_blocks = -(-length // rows)
    num_padding = num_blocks * rows - length
    keys_before = rows
    keys_after = 0 if spec.causal else rows
    width = keys_before + rows + keys_after

    def blocks(x: jax.Array) -> jax.Array:
        """Returns [B * blocks, rows, ...]."""
        x = jnp.pad(x, ((0, 0), (0, num_padding), *((0, 0),) * (x.ndim - 2)))
        return x.reshape(batch * num_blocks, rows, *x.shape[2:])

    def neighborhoods(x: jax.Array) -> jax.Array:
        """Returns [B * blocks, width, ...]: each block with its neighbors."""
        x = jnp.pad(x, ((0, 0), (keys_before, num_padding + keys_after), *((0, 0),) * (x.ndim - 2)))
        neighbors = [
            x[:, start : start + num_blocks * rows].reshape(batch, num_blocks, rows, *x.shape[2:])
            for start in range(0, width, rows)
        ]
        return jnp.concatenate(neighbors, axis=2).reshape(batch * num_blocks, width, *x.shape[2:])

    distance_1TS = (jnp.arange(rows)[:, None] - (jnp.arange(width) - keys_before)[None, :])[None]
    # Padding has segment -1, which no token has.
    segments = jnp.zeros((batch, length), jnp.int32) if segments_BT is None else segments_BT
    key_segments = neighborhoods(segments + 1) - 1
    mask = spec.visible(distance_1TS) & (blocks(segments)[:, :, None] == key_segments[:, None, :])
    # Padding queries may see no key, for which softmax would be NaN.
    mask = mask | (jnp.arange(width) == keys_before)[None, None] & ~mask.any(-1, keepdims=True)
    o = softmax_attention(
        blocks(q_BTNH),
        neighborhoods(k_BSKH).transpose(0, 2, 1, 3),
        neighborhoods(v_BSKH).transpose(0, 2, 1, 3),
        spec,
        mask_BTS=mask,
        distance_BTS=distance_1TS,
        persistent_kv=persistent_kv,
        dropout=dropout,
    )
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
    """Returns keys or values with memories before them.

    Args:
      memory_MKH: Learned keys or values.
      x_BKSH: Keys or values, maybe without the dimension B.

    Returns:
      [B, K, M + S, H], or [K, M + S, H].
    """
    memory_KMH = memory_MKH.transpose(1, 0, 2).astype(x_BKSH.dtype)
    memories = jnp.broadcast_to(memory_KMH, (*x_BKSH.shape[:-3], *memory_KMH.shape))
    return jnp.concatenate([memories, x_BKSH], axis=-2)


def kv_head_repeats(q_BTNH: jax.Array, k_BSKH: jax.Array, sharding: AttentionSharding) -> int:
    """Returns how often each key/value head is repeated to be divided like query heads.

    It is the smallest divisor of G with which the devices that divide the query heads divide the
    key/value heads, too. 1 if both are already divided alike.
    """
    head_axes = split_axes(sharding.query, 2)
    if split_axes(sharding.key, 2) == head_axes:
        return 1
    num_kv_heads = k_BSKH.shape[2]
    num_parts = math.prod(sharding.query.mesh.shape[axis] for axis in head_axes)
    group = q_BTNH.shape[2] // num_kv_heads
    return next(
        repeats
        for repeats in range(1, group + 1)
        if group % repeats == 0 and num_kv_heads * repeats % num_parts == 0
    )


def softmax_attention(
    q_BTNH: jax.Array,
    k_BKSH: jax.Array,
    v_BKSH: jax.Array,
    spec: AttentionSpec,
    *,
    mask_BTS: jax.Array,
    distance_BTS: jax.Array,
    persistent_kv: PersistentKV | None = None,
    dropout: Dropout = NO_DROPOUT,
) -> jax.Array:
    """Returns softmax(scores) v for one square of scores with an explicit mask.

    Args:
      q_BTNH: Queries.
      k_BKSH: Keys, heads first; [K, S, H] for a batch of one in a KeyValueCache, a form for CPUs
        (lowering/cpu_kv_cache.py).
      v_BKSH: Values, of the same shape.
      spec: Computation of scores. Its mask is not applied: `mask_BTS` is the whole mask.
      mask_BTS: Whether a query sees a key; B may be 1. Each query sees at least one.
      distance_BTS: Position of the query minus that of the key, for ALiBi; B may be 1.
      persistent_kv: Learned keys and values that every query sees, at distance 0.
      dropout: Dropout of the probabilities.

    Returns:
      [B, T, N, H], in the dtype of the values.
    """
    batch, length, num_heads, head_dim = q_BTNH.shape
    num_kv_heads = k_BKSH.shape[-3]
    group = num_heads // num_kv_heads
    if persistent_kv is not None:
        k_BKSH, v_BKSH = map(prepend_memories, persistent_kv, (k_BKSH, v_BKSH))
        padding = ((0, 0), (0, 0), (len(persistent_kv[0]), 0))
        mask_BTS = jnp.pad(mask_BTS, padding, constant_values=True)
        distance_BTS = jnp.pad(distance_BTS, padding)
    scores_BKRS = _scores(q_BTNH, k_BKSH, spec, distance_BTS)
    mask_B1RS = jnp.tile(mask_BTS, (1, group, 1))[:, None]
    if k_BKSH.ndim == 3:  # no B
        mask_B1RS = mask_B1RS[0]
    scores_BKRS = jnp.where(mask_B1RS, scores_BKRS, -jnp.inf)
    reads_probabilities = dropout.key is not None or capture.is_on()
    if not reads_probabilities and fuses_softmax_on_cpu(v_BKSH, spec.precision):
        o_BKRH: jax.Array = cpu_softmax_product(spec.precision, scores_BKRS, v_BKSH)
    else:
        probabilities = jax.nn.softmax(scores_BKRS, axis=-1)
        if capture.is_on():
            capture.record(probabilities.reshape(batch, num_heads, length, -1), "probabilities")
        probabilities = dropout.apply(probabilities).astype(v_BKSH.dtype)
        o_BKRH = einsum("...rs,...sh->...rh", probabilities, v_BKSH, spec.precision)
    o_BKGTH = o_BKRH.reshape(batch, num_kv_heads, group, length, head_dim)
    return o_BKGTH.transpose(0, 3, 1, 2, 4).reshape(batch, length, num_heads, head_dim)


def _scores(
    q_BTNH: jax.Array, k_BKSH: jax.Array, spec: AttentionSpec, distance_BTS: jax.Array
) -> jax.Array:
    """Returns unmasked scores, float32 [B, K, R, S], without B if the keys lack it.

    One matrix per group of query heads: plain matmuls are fast on CPU.
    """
    batch, length, num_heads, head_dim = q_BTNH.shape
    num_kv_heads = k_BKSH.shape[-3]
    group = num_heads // num_kv_heads
    scale = spec.scale_for(head_dim)
    q_BKRH = (
        (q_BTNH * scale if scale != 1 else q_BTNH)
        .reshape(batch, length, num_kv_heads, group, head_dim)
        .transpose(0, 2, 3, 1, 4)
        .reshape(*k_BKSH.shape[:-2], group * length, head_dim)
    )
    scores_BKRS = einsum_f32("...rh,...sh->...rs", q_BKRH, k_BKSH, spec.precision)
    if spec.soft_cap:
        scores_BKRS = spec.soft_cap * jnp.tanh(scores_BKRS / spec.soft_cap)
    if spec.slopes_N is not None:
        slopes_KG11 = spec.slopes_N.reshape(num_kv_heads, group, 1, 1)
        abs_distance_B11TS = jnp.abs(distance_BTS)[:, None, None].astype(jnp.float32)
        bias_BKRS = (slopes_KG11 * abs_distance_B11TS).reshape(
            abs_distance_B11TS.shape[0], num_kv_heads, group * length, abs_distance_B11TS.shape[-1]
        )
        scores_BKRS = scores_BKRS - (bias_BKRS[0] if k_BKSH.ndim == 3 else bias_BKRS)
    return scores_BKRS
