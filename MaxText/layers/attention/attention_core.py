"""Attention from projected queries, keys and values.

`dot_product_attention` attends over whole sequences. It divides queries into blocks and calls
`attend_square` for each, which computes one masked square of scores. KV caches call `attend_square`
themselves, with the positions in their slots. `AttentionSpec` says how scores are computed, which
keys a query sees, and how scores become weights; every implementation of attention reads it.

Legend: B sequences, T query tokens, S key tokens, M memories, K key heads, V value heads (K or a
divisor of it), G query heads per key head, N = K * G query heads, R = G * T query rows of a key
head, H head_dim, W window.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

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
# In the name stacks of the equations of `attend_square` and of their gradients, for plan.py.
SCORES_SCOPE = "attention_scores"

PersistentKV = tuple[jax.Array, jax.Array]  # keys and values [M, K, H]


# Arguments of the hooks are arrays that broadcast against [B, N, T, S]; see `Attention.score`,
# `Attention.mask` and `Attention.weights`.
ScoreHook = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
MaskHook = Callable[[jax.Array, jax.Array], jax.Array]
WeightsHook = Callable[[jax.Array, jax.Array], jax.Array]
# What a weight depends on: its own score, all scores of its query, or those of other queries too.
WeightsScope = Literal["score", "query", "sequence"]


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """Computation and masking of attention scores, and their normalization.

    A score is the product q k times the scale, then soft-capped, then lowered by ALiBi, then passed
    to `score_hook`. A query sees the keys that `causal`, `window` and `mask_hook` all allow, of its
    own document. Weights are the softmax of the scores, or what `weights_hook` returns.

    Attributes:
      causal: Whether a query sees only keys up to its own position.
      window: W: query i sees keys i - W + 1 to i; if not causal, up to i + W (GPT-Neo).
      scale: Factor of the products q k; None is 1 / sqrt(H).
      soft_cap: c in c * tanh(score / c); 0 disables it (Gemma 2, section 2).
      slopes_N: Slopes of ALiBi (Press et al. 2022), float32: what a head subtracts from a score per
        token of distance.
      sinks_N: Scores of the attention sinks: a key without a value that each query of the head sees
        (gpt-oss).
      precision: Precision of the products, a name of jax.lax.Precision.
      score_hook: Changes scores, as `Attention.score`.
      mask_hook: Hides keys, as `Attention.mask`.
      weights_hook: Replaces the softmax, as `Attention.weights`.
      weights_scope: What a weight of `weights_hook` depends on.
    """

    causal: bool = True
    window: int | None = None
    scale: float | None = None
    soft_cap: float = 0.0
    slopes_N: jax.Array | None = None
    sinks_N: jax.Array | None = None
    precision: str | None = None
    score_hook: ScoreHook | None = None
    mask_hook: MaskHook | None = None
    weights_hook: WeightsHook | None = None
    weights_scope: WeightsScope = "query"

    @property
    def reads_positions(self) -> bool:
        """Whether a hook is given the positions of tokens in their documents."""
        return self.score_hook is not None or self.mask_hook is not None

    @property
    def has_hooks(self) -> bool:
        """Whether there is a hook, which no fused kernel applies."""
        return self.reads_positions or self.weights_hook is not None

    def scale_for(self, head_dim: int) -> float:
        """Returns the factor of the products q k in heads of this size."""
        return head_dim**-0.5 if self.scale is None else self.scale

    def visible(self, distance: jax.Array) -> jax.Array:
        """Returns whether `causal` and `window` allow the key `distance` tokens before a query."""
        seen = distance >= 0 if self.causal else jnp.ones(distance.shape, bool)
        if self.window is None:
            return seen
        return seen & (distance < self.window) & (distance >= -self.window)

    def mask(self, q_pos_BT: jax.Array, k_pos_BS: jax.Array) -> jax.Array:
        """Returns whether queries see keys of the same document, [B, T, S]; B may be 1.

        Args:
          q_pos_BT: Positions of the queries. In the document if `reads_positions`.
          k_pos_BS: Positions of the keys, counted from the same token.
        """
        q_pos_BT1 = q_pos_BT[:, :, None]
        k_pos_B1S = k_pos_BS[:, None, :]
        mask_BTS = self.visible(q_pos_BT1 - k_pos_B1S)
        if self.mask_hook is not None:
            mask_BTS = mask_BTS & self.mask_hook(q_pos_BT1, k_pos_B1S)
        return mask_BTS

    def positional_scores(
        self,
        scores_BNTS: jax.Array,
        q_pos_BT: jax.Array,
        k_pos_BS: jax.Array,
        heads_N: jax.Array | None,
    ) -> jax.Array:
        """Returns scores after what depends on positions: ALiBi and `score_hook`.

        Args:
          scores_BNTS: Scores, scaled and soft-capped.
          q_pos_BT: Positions of the queries, as in `mask`.
          k_pos_BS: Positions of the keys.
          heads_N: Indices of the query heads in the layer; None without a score hook.
        """
        q_pos_B1T1 = q_pos_BT[:, None, :, None]
        k_pos_B11S = k_pos_BS[:, None, None, :]
        if self.slopes_N is not None:
            distance_B1TS = jnp.abs(q_pos_B1T1 - k_pos_B11S).astype(jnp.float32)
            scores_BNTS = scores_BNTS - self.slopes_N[:, None, None] * distance_B1TS
        if self.score_hook is not None:
            assert heads_N is not None, self
            scores_BNTS = self.score_hook(
                scores_BNTS, q_pos_B1T1, k_pos_B11S, heads_N[:, None, None]
            )
        return scores_BNTS

    def token_positions(self, segments_BT: jax.Array | None, length: int) -> jax.Array:
        """Returns positions for `mask` and `positional_scores`, int32 [B, T]; B may be 1.

        They are positions in the document if a hook reads them, so that a document has the same
        output wherever it is packed. Else they are positions in the sequence, which have the same
        distances within a document, and let XLA fold masks into constants.

        Args:
          segments_BT: Document of each token, contiguous; None is a single document.
          length: T.
        """
        index_1T = jnp.arange(length)[None]
        if segments_BT is None or not self.reads_positions:
            return index_1T
        starts_BT = segments_BT[:, 1:] != segments_BT[:, :-1]
        starts_BT = jnp.pad(starts_BT, ((0, 0), (1, 0)))
        return index_1T - jax.lax.cummax(jnp.where(starts_BT, index_1T, 0), axis=1)


class TokenPairs(NamedTuple):
    """Facts about the queries and keys of one square of scores."""

    mask_BTS: jax.Array  # whether a query sees a key; B may be 1. Each query sees at least one
    q_pos_BT: jax.Array  # positions, as in `AttentionSpec.mask`; B may be 1
    k_pos_BS: jax.Array
    num_memories: int = 0  # the first keys, which have no positions

    def with_memories(self, num_memories: int) -> "TokenPairs":
        """Returns the pairs with memories, which every query sees, before the keys."""
        padding = (num_memories, 0)
        return TokenPairs(
            mask_BTS=jnp.pad(self.mask_BTS, ((0, 0), (0, 0), padding), constant_values=True),
            q_pos_BT=self.q_pos_BT,
            k_pos_BS=jnp.pad(self.k_pos_BS, ((0, 0), padding)),
            num_memories=num_memories,
        )


class Heads(NamedTuple):
    """Heads of queries, keys and values between the projections, and their widths."""

    num_query_heads: int  # N
    num_key_heads: int  # K, a divisor of N
    num_value_heads: int  # V, a divisor of K
    key_width: int  # H of queries and keys
    value_width: int


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
    v_BSVH: jax.Array,
    spec: AttentionSpec,
    *,
    segments_BT: jax.Array | None = None,
    persistent_kv: PersistentKV | None = None,
    block_size: int | None = None,
    num_parts: int = 1,
    dropout: Dropout = NO_DROPOUT,
) -> jax.Array:
    """Returns weights(scores) v over whole sequences (Vaswani et al. 2017, equation 1).

    Query head n reads key head n // G, and key head j value head j V // K. Scores and their weights
    are float32. Queries are computed in blocks: if causal, a block multiplies only the keys up to
    its last row, which skips about half of the products; with a window, blocks have about W rows
    and multiply 2 W keys (3 W if not causal). Weights that depend on other queries take one block.

    Args:
      q_BTNH: Queries.
      k_BSKH: Keys, with S = T.
      v_BSVH: Values; their H may differ from that of queries and keys.
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
    if spec.weights_scope == "sequence":
        block_size = None
    elif num_parts == 1 and spec.window is not None:
        rows = window_blocks(spec.window, length, causal=spec.causal)
        if rows is not None:
            return _local_attention(
                q_BTNH,
                k_BSKH,
                v_BSVH,
                spec,
                rows=rows,
                segments_BT=segments_BT,
                persistent_kv=persistent_kv,
                dropout=dropout,
            )
        block_size = None
    k_BKSH = k_BSKH.transpose(0, 2, 1, 3)
    v_BVSH = v_BSVH.transpose(0, 2, 1, 3)
    part_length = length // num_parts
    block = part_length
    if block_size is not None and (spec.causal or num_parts > 1):
        block = min(part_length, max(block_size, -(-part_length // MAX_BLOCKS)))
    pos_BT = spec.token_positions(segments_BT, length)
    outputs = []
    # From the last block: each takes its keys from those of the next, so that their gradients are
    # added up from the smallest to the largest, not each padded to all keys.
    for start in reversed(range(0, part_length, block)):
        end = min(start + block, part_length)
        keys_end = end if spec.causal and num_parts == 1 else length
        rows_of = functools.partial(_rows_of_parts, start=start, end=end, num_parts=num_parts)
        q_pos_BT = rows_of(pos_BT)
        k_pos_BS = pos_BT[:, :keys_end]
        mask_BTS = spec.mask(q_pos_BT, k_pos_BS)
        if segments_BT is not None:
            same_BTS = rows_of(segments_BT)[:, :, None] == segments_BT[:, None, :keys_end]
            mask_BTS = mask_BTS & same_BTS
        k_BKSH = k_BKSH[:, :, :keys_end]
        v_BVSH = v_BVSH[:, :, :keys_end]
        o_BTNH = attend_square(
            rows_of(q_BTNH),
            k_BKSH,
            v_BVSH,
            spec,
            TokenPairs(mask_BTS=mask_BTS, q_pos_BT=q_pos_BT, k_pos_BS=k_pos_BS),
            persistent_kv=persistent_kv,
            dropout=dropout.fold_in(start),
        )
        outputs.insert(0, o_BTNH)
    if num_parts == 1:
        return concatenate_tokens(outputs)
    batch, _, *rest = outputs[0].shape
    parts = [o_BTNH.reshape(batch, num_parts, -1, *rest) for o_BTNH in outputs]
    return jnp.concatenate(parts, axis=2).reshape(batch, length, *rest)


def _rows_of_parts(x_BT: jax.Array, *, start: int, end: int, num_parts: int) -> jax.Array:
    """Returns tokens `start` to `end` of each of `num_parts` equal parts of x [B, T, ...]."""
    if num_parts == 1:
        return x_BT[:, start:end]
    batch, _, *rest = x_BT.shape
    parts = x_BT.reshape(batch, num_parts, -1, *rest)
    return parts[:, :, start:end].reshape(batch, -1, *rest)


def window_blocks(window: int, length: int, *, causal: bool) -> int | None:
    """Returns query rows per block of windowed attention; None for one block."""
    rows = max(window, _SMALLEST_WINDOW_BLOCK)
    return rows if length > (2 if causal else 3) * rows else None


def _local_attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSVH: jax.Array,
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
      q_BTNH: Queries; k_BSKH and v_BSVH are keys and values of the same tokens.
      rows: Queries of a block, at least W.
    """
    batch, length, num_heads, _ = q_BTNH.shape
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

    if spec.reads_positions:
        pos_BT = jnp.broadcast_to(spec.token_positions(segments_BT, length), (batch, length))
        q_pos_BT = blocks(pos_BT)
        k_pos_BS = neighborhoods(pos_BT)
    else:  # the same in all blocks, counted from the first row
        q_pos_BT = jnp.arange(rows)[None]
        k_pos_BS = jnp.arange(width)[None] - keys_before
    # Padding has segment -1, which no token has.
    segments = jnp.zeros((batch, length), jnp.int32) if segments_BT is None else segments_BT
    key_segments = neighborhoods(segments + 1) - 1
    same_document = blocks(segments)[:, :, None] == key_segments[:, None, :]
    mask = spec.mask(q_pos_BT, k_pos_BS) & same_document
    # Padding queries may see no key, for which softmax would be NaN.
    mask = mask | (jnp.arange(width) == keys_before)[None, None] & ~mask.any(-1, keepdims=True)
    o = attend_square(
        blocks(q_BTNH),
        neighborhoods(k_BSKH).transpose(0, 2, 1, 3),
        neighborhoods(v_BSVH).transpose(0, 2, 1, 3),
        spec,
        TokenPairs(mask_BTS=mask, q_pos_BT=q_pos_BT, k_pos_BS=k_pos_BS),
        persistent_kv=persistent_kv,
        dropout=dropout,
    )
    return o.reshape(batch, num_blocks * rows, num_heads, -1)[:, :length]


# `Attention` or a class derived from it, which this module cannot import.
SoftmaxMixer = Any


def softmax_layers(config: ModelConfig) -> list[tuple[SoftmaxMixer, LayerConfig]]:
    """Returns (class of the mixer, layer) of layers with softmax attention."""
    mixers = ((lookup("mixer", layer.config.block.mixer), layer) for layer in config.layers)
    return [(mixer, layer) for mixer, layer in mixers if mixer.has_softmax]


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


def repeat_value_heads(k_BSKH: jax.Array, v_BSVH: jax.Array) -> jax.Array:
    """Returns values with as many heads as the keys: head j is that of key head j."""
    repeats = k_BSKH.shape[2] // v_BSVH.shape[2]
    return v_BSVH if repeats == 1 else jnp.repeat(v_BSVH, repeats, axis=2)


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


@jax.named_scope(SCORES_SCOPE)
def attend_square(
    q_BTNH: jax.Array,
    k_BKSH: jax.Array,
    v_BVSH: jax.Array,
    spec: AttentionSpec,
    pairs: TokenPairs,
    *,
    persistent_kv: PersistentKV | None = None,
    dropout: Dropout = NO_DROPOUT,
) -> jax.Array:
    """Returns weights(scores) v for one square of scores with an explicit mask.

    Args:
      q_BTNH: Queries.
      k_BKSH: Keys, heads first; [K, S, H] for a batch of one in a KeyValueCache, a form for CPUs
        (lowering/cpu_kv_cache.py).
      v_BVSH: Values, heads first, with B if the keys have it.
      spec: Computation of scores. Its mask is not applied: that of `pairs` is the whole mask.
      pairs: The mask and the positions.
      persistent_kv: Learned keys and values that every query sees; those in a cache are among the
        keys already.
      dropout: Dropout of the weights.

    Returns:
      [B, T, N, H], in the dtype of the values.
    """
    batch, length, num_heads, _ = q_BTNH.shape
    if persistent_kv is not None:
        k_BKSH, v_BVSH = map(prepend_memories, persistent_kv, (k_BKSH, v_BVSH))
        pairs = pairs.with_memories(len(persistent_kv[0]))
    num_kv_heads = k_BKSH.shape[-3]
    group = num_heads // num_kv_heads
    scores_BKRS = masked_scores(q_BTNH, k_BKSH, spec, pairs)
    o_BVRH = _weighted_values(
        scores_BKRS.reshape(*v_BVSH.shape[:-2], -1, v_BVSH.shape[-2]),
        v_BVSH,
        spec,
        mask_BTS=pairs.mask_BTS,
        dropout=dropout,
    )
    o_BKGTH = o_BVRH.reshape(batch, num_kv_heads, group, length, -1)
    return o_BKGTH.transpose(0, 3, 1, 2, 4).reshape(batch, length, num_heads, -1)


def masked_scores(
    q_BTNH: jax.Array, k_BKSH: jax.Array, spec: AttentionSpec, pairs: TokenPairs
) -> jax.Array:
    """Returns the scores that weights are computed from, -inf where a key is masked.

    Args:
      q_BTNH: Queries.
      k_BKSH: Keys, heads first, maybe without B, as of `attend_square`; memories are among them.
      spec: Computation of scores. Its mask is not applied: that of `pairs` is the whole mask.
      pairs: The mask and the positions.

    Returns:
      float32 [B, K, R, S], without B if the keys lack it; R = G T, group by group.
    """
    batch, length, num_heads, _ = q_BTNH.shape
    group = num_heads // k_BKSH.shape[-3]
    scores_BKRS = _scores(q_BTNH, k_BKSH, spec)
    if capture.is_on():
        capture.record(scores_BKRS.reshape(batch, num_heads, length, -1), "scores")
    if spec.slopes_N is not None or spec.score_hook is not None:
        scores_BNTS = scores_BKRS.reshape(batch, num_heads, length, -1)
        positional_BNTS = spec.positional_scores(
            scores_BNTS, pairs.q_pos_BT, pairs.k_pos_BS, jnp.arange(num_heads)
        )
        if pairs.num_memories:
            is_memory_S = jnp.arange(pairs.k_pos_BS.shape[1]) < pairs.num_memories
            positional_BNTS = jnp.where(is_memory_S, scores_BNTS, positional_BNTS)
        scores_BKRS = positional_BNTS.reshape(scores_BKRS.shape)
    mask_B1RS = jnp.tile(pairs.mask_BTS, (1, group, 1))[:, None]
    if k_BKSH.ndim == 3:  # no B
        mask_B1RS = mask_B1RS[0]
    return jnp.where(mask_B1RS, scores_BKRS, -jnp.inf)


def _scores(q_BTNH: jax.Array, k_BKSH: jax.Array, spec: AttentionSpec) -> jax.Array:
    """Returns scaled and capped scores, float32 [B, K, R, S], without B if the keys lack it.

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
    return scores_BKRS


def _weighted_values(
    scores_BVRS: jax.Array,
    v_BVSH: jax.Array,
    spec: AttentionSpec,
    *,
    mask_BTS: jax.Array,
    dropout: Dropout,
) -> jax.Array:
    """Returns weights(scores) v, [B, V, R, H], without B if the values lack it.

    Args:
      scores_BVRS: Scores, -inf where a key is masked; R is of a value head here.
      v_BVSH: Values.
      spec: Normalization.
      mask_BTS: Whether a query sees a key.
      dropout: Dropout of the weights.
    """
    batch = 1 if v_BVSH.ndim == 3 else v_BVSH.shape[0]
    length, num_keys = mask_BTS.shape[1:]
    sinks_VR1 = None
    if spec.sinks_N is not None:
        sinks_NT = jnp.repeat(spec.sinks_N.astype(jnp.float32)[:, None], length, axis=1)
        sinks_VR1 = sinks_NT.reshape(v_BVSH.shape[-3], -1, 1)
    is_softmax = spec.weights_hook is None
    reads_weights = dropout.key is not None or capture.is_on()
    if is_softmax and not reads_weights and fuses_softmax_on_cpu(v_BVSH, spec.precision):
        return cpu_softmax_product(spec.precision, scores_BVRS, v_BVSH, sinks_VR1)
    if spec.weights_hook is None:
        weights_BVRS = _softmax(scores_BVRS, sinks_VR1)
    else:
        mask_B1TS = mask_BTS[:, None]
        scores_BNTS = scores_BVRS.reshape(batch, -1, length, num_keys)
        weights_BNTS = spec.weights_hook(scores_BNTS, mask_B1TS)
        weights_BVRS = jnp.where(mask_B1TS, weights_BNTS, 0).reshape(scores_BVRS.shape)
    if capture.is_on():
        capture.record(weights_BVRS.reshape(batch, -1, length, num_keys), "probabilities")
    weights_BVRS = dropout.apply(weights_BVRS).astype(v_BVSH.dtype)
    return einsum("...rs,...sh->...rh", weights_BVRS, v_BVSH, spec.precision)


def _softmax(scores_BVRS: jax.Array, sinks_VR1: jax.Array | None) -> jax.Array:
    """Returns the softmax over the keys, and the sink if there is one, without its probability."""
    if sinks_VR1 is None:
        return jax.nn.softmax(scores_BVRS, axis=-1)
    largest = jnp.maximum(scores_BVRS.max(-1, keepdims=True), sinks_VR1)
    largest = jax.lax.stop_gradient(largest)  # cancels out of the result
    exp_BVRS = jnp.exp(scores_BVRS - largest)
    return exp_BVRS / (exp_BVRS.sum(-1, keepdims=True) + jnp.exp(sinks_VR1 - largest))
