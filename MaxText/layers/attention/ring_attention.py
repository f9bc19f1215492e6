"""Ring attention: queries stay on their device, keys and values rotate.

Liu, Zaharia and Abbeel 2023, "Ring Attention with Blockwise Transformers". Each device attends to
the shard of keys that it holds, accumulating with a running maximum and sum, and passes the shard
on. The backward pass rotates once more and recomputes probabilities from the log-sum-exp (Dao et
al. 2022, algorithm 4), so that at most one shard and one block of scores are in memory.

In causal attention the device of the first tokens would wait for that of the last ones. Balanced,
each has two pieces, one counted from the beginning of the sequence and one from its end, so that
all do the same work in every step, half of the full square. Pieces are exchanged before and after.

Legend: B sequences, L queries of a device, K key/value heads, G query heads per key/value head, N =
K * G, H head_dim, M memories, P blocks of R = L / P queries, Q pieces of S = L / Q keys, C devices.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from MaxText.layers.attention.attention_core import AttentionSpec, PersistentKV, kv_head_repeats
from MaxText.layers.dense import einsum_f32
from MaxText.parallelism.logical_sharding import split_axes

Axes = tuple[str, ...]

_LOWEST = -1e30  # below every score; finite, so that differences are not NaN


def ring_attention(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    spec: AttentionSpec,
    query_sharding: NamedSharding,  # T over the axes of the ring, which divide it
    key_sharding: NamedSharding,  # T over the same axes
    *,
    segments_BT: jax.Array | None = None,
    persistent_kv: PersistentKV | None = None,
    block_size: int | None = None,  # query rows whose scores are in memory at once; None is all
    balanced: bool = True,  # whether causal work without a window is divided evenly
) -> jax.Array:
    """Computes dot_product_attention without dropout, [B, T, N, H]."""
    mesh = query_sharding.mesh
    batch, ring, heads = (split_axes(query_sharding, dim) for dim in range(3))
    assert ring == split_axes(key_sharding, 1), (query_sharding, key_sharding)
    if (repeats := kv_head_repeats(q_BTNH, k_BTKH, query_sharding, key_sharding)) > 1:
        k_BTKH, v_BTKH = (jnp.repeat(x, repeats, axis=2) for x in (k_BTKH, v_BTKH))
        if persistent_kv is not None:
            persistent_kv = jax.tree.map(lambda x: jnp.repeat(x, repeats, axis=1), persistent_kv)
    num_parts = math.prod(mesh.shape[axis] for axis in ring)
    ring_of_devices = _Ring(
        spec=dataclasses.replace(spec, slopes_N=None),
        axes=ring,
        num_parts=num_parts,
        length=q_BTNH.shape[1] // num_parts,
        asks_for_balance=balanced,
        block_size=block_size,
    )
    by_head = PartitionSpec(batch, ring, heads)
    others = PartitionSpec(batch, ring), PartitionSpec(heads), PartitionSpec(None, heads)
    specs = (by_head, by_head, by_head, *others)
    return jax.shard_map(
        ring_of_devices.run, mesh=mesh, in_specs=specs, out_specs=by_head, check_vma=False
    )(q_BTNH, k_BTKH, v_BTKH, segments_BT, spec.slopes_N, persistent_kv)


class _QueryBlock(NamedTuple):
    """A block of queries, or all blocks with a leading dimension P."""

    q_BRKGH: jax.Array
    positions_R: jax.Array
    segments_BR: jax.Array | None
    residuals: Any = ()  # other inputs of the backward pass


class _KVBlock(NamedTuple):
    """A piece of keys and values, or all with a leading dimension Q."""

    k_BSKH: jax.Array
    v_BSKH: jax.Array
    positions_S: jax.Array | None  # None for memories
    segments_BS: jax.Array | None


# (a block, a piece, state of the block, state of the piece) -> the two states
_BlockFn = Callable[[_QueryBlock, _KVBlock, Any, Any], tuple[Any, Any]]


@dataclasses.dataclass(frozen=True)
class _Ring:
    spec: AttentionSpec
    axes: Axes  # mesh axes of the ring
    num_parts: int  # C
    length: int  # L
    asks_for_balance: bool
    block_size: int | None  # about R, which divides a piece; None is all of it

    @property
    def num_pieces(self) -> int:
        halves = self.spec.causal and self.spec.window is None and self.length % 2 == 0
        return 2 if self.asks_for_balance and halves else 1

    @property
    def num_blocks(self) -> int:
        piece = self.length // self.num_pieces
        longest = min(self.block_size or piece, piece)
        return self.length // max(rows for rows in range(1, longest + 1) if piece % rows == 0)

    @property
    def steps(self) -> range:
        """Offsets of the visited devices; a window limits them."""
        window = self.spec.window
        last = self.num_parts - 1
        if window is None:
            return range(self.num_parts)
        reach = min(-(-(window - self.spec.causal) // self.length), last)
        if self.spec.causal:
            return range(reach + 1)
        return range(-reach, reach + 1) if 2 * reach <= last else range(self.num_parts)

    def run(
        self,
        q_BLNH: jax.Array,
        k_BLKH: jax.Array,
        v_BLKH: jax.Array,
        segments_BL: jax.Array | None,
        slopes_N: jax.Array | None,
        persistent_kv: PersistentKV | None,
    ) -> jax.Array:
        tokens = (q_BLNH, k_BLKH, v_BLKH, segments_BL)
        if self.num_pieces > 1:
            tokens = jax.tree.map(self._zigzag, tokens)

        attend = jax.custom_vjp(lambda *operands: self._forward(*operands)[0])
        attend.defvjp(self._forward, self._backward)
        o_BLNH = attend(*tokens, slopes_N, persistent_kv)
        return self._zigzag(o_BLNH, back=True) if self.num_pieces > 1 else o_BLNH

    def _forward(self, *operands):
        """Returns o_BLNH and residuals; log sums are float32 [P, B, K, G, R]."""
        q_BLNH, k_BLKH, v_BLKH, segments_BL, slopes_N, persistent_kv = operands
        rows = self._rows(q_BLNH, segments_BL, k_BLKH.shape[2])
        num_blocks, batch, block, kv_heads, group, head_dim = rows.q_BRKGH.shape
        slopes_KG = None if slopes_N is None else slopes_N.reshape(kv_heads, group)
        shape = (num_blocks, batch, kv_heads, group, block)
        state = (
            jnp.full(shape, _LOWEST, jnp.float32),
            jnp.zeros(shape, jnp.float32),
            jnp.zeros((*shape, head_dim), jnp.float32),
        )

        def block_fn(rows: _QueryBlock, keys: _KVBlock, state, _):
            largest, sums, o_BKGRH = state
            scores, seen, _ = self._scores(rows, keys, slopes_KG)
            new_largest = jnp.maximum(largest, jnp.where(seen, scores, _LOWEST).max(-1))
            correction = jnp.exp(largest - new_largest)
            p = jnp.where(seen, jnp.exp(scores - new_largest[..., None]), 0.0)
            more = self._einsum("bkgrs,bskh->bkgrh", p.astype(keys.v_BSKH.dtype), keys.v_BSKH)
            o_BKGRH = o_BKGRH * correction[..., None] + more
            return (new_largest, sums * correction + p.sum(-1), o_BKGRH), ()

        if persistent_kv is not None:
            state, _ = self._fold(block_fn, rows, _memory_block(persistent_kv, batch), state, ())
        keys = self._pieces((k_BLKH, v_BLKH, segments_BL))
        (largest, sums, o), _, _ = self._ring_scan(block_fn, rows, keys, state, ())
        o_BLNH = (o / sums[..., None]).transpose(1, 0, 4, 2, 3, 5).reshape(q_BLNH.shape)
        o_BLNH = o_BLNH.astype(q_BLNH.dtype)
        return o_BLNH, (operands, o_BLNH, largest + jnp.log(sums))

    def _backward(self, residuals, do_BLNH):
        operands, o_BLNH, log_sums = residuals
        q_BLNH, k_BLKH, v_BLKH, segments_BL, slopes_N, persistent_kv = operands
        rows = self._rows(q_BLNH, segments_BL, k_BLKH.shape[2])
        _, batch, _, kv_heads, group, _ = rows.q_BRKGH.shape
        slopes_KG = None if slopes_N is None else slopes_N.reshape(kv_heads, group)
        # sum_s p_s dp_s, which is subtracted from the gradient of each probability.
        delta = jnp.sum(do_BLNH.astype(jnp.float32) * o_BLNH.astype(jnp.float32), axis=-1)
        by_head = (self._by_head(x, kv_heads) for x in (do_BLNH, delta))
        rows = rows._replace(residuals=(*by_head, log_sums))

        def block_fn(rows: _QueryBlock, keys: _KVBlock, dq, d_keys):
            do_BKGRH, delta, log_sums = rows.residuals
            dk, dv = d_keys
            k_BSKH = keys.k_BSKH
            v_BSKH = keys.v_BSKH
            scores, seen, slope = self._scores(rows, keys, slopes_KG)
            p = jnp.where(seen, jnp.exp(scores - log_sums[..., None]), 0.0)
            dp = self._einsum("bkgrh,bskh->bkgrs", do_BKGRH, v_BSKH)
            ds = (p * (dp - delta[..., None]) * slope).astype(k_BSKH.dtype)
            dv = dv + self._einsum("bkgrs,bkgrh->bskh", p.astype(v_BSKH.dtype), do_BKGRH)
            dk = dk + self._einsum("bkgrs,brkgh->bskh", ds, rows.q_BRKGH)
            dq = dq + self._einsum("bkgrs,bskh->brkgh", ds, k_BSKH)
            return dq, (dk, dv)

        dq = _zeros_like(rows.q_BRKGH)
        d_kv = None
        if persistent_kv is not None:
            keys = _memory_block(persistent_kv, batch)
            dq, d_keys = self._fold(block_fn, rows, keys, dq, _zeros_like(keys[:2]))
            d_kv = jax.tree.map(lambda x, m: x.sum((0, 1)).astype(m.dtype), d_keys, persistent_kv)
        keys = self._pieces((k_BLKH, v_BLKH, segments_BL))
        dq, d_keys, shift = self._ring_scan(block_fn, rows, keys, dq, _zeros_like(keys[:2]))
        dk, dv = self._rotate(d_keys, -shift)
        d_tokens = (
            jnp.moveaxis(x, 0, 1).reshape(own.shape).astype(own.dtype)
            for x, own in ((dq, q_BLNH), (dk, k_BLKH), (dv, v_BLKH))
        )
        d_slopes = None if slopes_N is None else jnp.zeros_like(slopes_N)
        return *d_tokens, None, d_slopes, d_kv

    def _ring_scan(
        self, block_fn: _BlockFn, rows: _QueryBlock, keys: Any, query_state: Any, key_state: Any
    ) -> tuple[Any, Any, int]:
        """Folds all visible shards; returns both states and the keys' shift."""
        steps = self.steps
        own = jax.lax.axis_index(self.axes)

        def attend_block(keys: Any, states: Any, step: Any) -> Any:
            k_QBSKH, v_QBSKH, segments_QBS = keys
            positions_QS = self._positions((own - step) % self.num_parts)
            part = _KVBlock(k_QBSKH, v_QBSKH, positions_QS, segments_QBS)
            return self._fold(block_fn, rows, part, *states)

        def body(carry, step):
            keys, (query_state, key_state) = carry
            keys, key_state = self._rotate((keys, key_state), 1)
            return (keys, attend_block(keys, (query_state, key_state), step)), None

        keys, key_state = self._rotate((keys, key_state), steps.start)
        states = attend_block(keys, (query_state, key_state), steps.start)
        if len(steps) > 1:
            rest = jnp.arange(steps.start + 1, steps.stop)
            (_, states), _ = jax.lax.scan(body, (keys, states), rest)
        return *states, steps[-1]

    def _fold(
        self,
        block_fn: _BlockFn,
        rows: _QueryBlock,
        keys: _KVBlock,
        query_state: Any,
        key_state: Any,
    ) -> tuple[Any, Any]:
        def one_piece(query_state: Any, xs: Any) -> tuple[Any, Any]:
            keys, key_state = xs

            def one_block(key_state: Any, xs: Any) -> tuple[Any, Any]:
                states = xs[1], key_state
                attend_block = functools.partial(block_fn, xs[0], keys)
                if (visible := self._any_visible(xs[0], keys)) is not True:
                    query_state, key_state = jax.lax.cond(
                        visible, attend_block, lambda *same: same, *states
                    )
                else:
                    query_state, key_state = attend_block(*states)
                return key_state, query_state

            key_state, query_state = jax.lax.scan(one_block, key_state, (rows, query_state))
            return query_state, key_state

        return jax.lax.scan(one_piece, query_state, (keys, key_state))

    def _any_visible(self, rows: _QueryBlock, keys: _KVBlock) -> Any:
        causal = self.spec.causal
        window = self.spec.window
        if keys.positions_S is None or (not causal and window is None):
            return True
        nearest = rows.positions_R[0] - keys.positions_S[-1]
        farthest = rows.positions_R[-1] - keys.positions_S[0]
        visible: Any = farthest >= 0 if causal else True
        if window is not None:
            visible = visible & (nearest < window) & (farthest >= -window)
        return visible

    def _scores(self, rows: _QueryBlock, keys: _KVBlock, slopes_KG: jax.Array | None):
        """Returns scores [B, K, G, R, S], their mask, and their derivative by q k."""
        spec = self.spec
        scale = self.spec.scale_for(rows.q_BRKGH.shape[-1])
        scores = scale * self._einsum("brkgh,bskh->bkgrs", rows.q_BRKGH, keys.k_BSKH)
        slope: Any = scale
        if cap := spec.soft_cap:
            tanh = jnp.tanh(scores / cap)
            scores = cap * tanh
            slope = scale * (1 - tanh * tanh)
        if keys.positions_S is None:
            return scores, jnp.ones((), bool), slope
        distance_RS = rows.positions_R[:, None] - keys.positions_S
        if slopes_KG is not None:
            abs_distance_RS = jnp.abs(distance_RS).astype(jnp.float32)
            scores = scores - slopes_KG[..., None, None] * abs_distance_RS
        seen = spec.visible(distance_RS)
        if rows.segments_BR is not None and keys.segments_BS is not None:
            same_BRS = rows.segments_BR[:, :, None] == keys.segments_BS[:, None]
            seen = seen & same_BRS[:, None, None]
        return scores, seen, slope

    def _einsum(self, subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
        return einsum_f32(subscripts, a, b, self.spec.precision)

    def _rows(self, q_BLNH: jax.Array, segments_BL: jax.Array | None, kv_heads: int) -> _QueryBlock:
        batch, length, _, head_dim = q_BLNH.shape
        positions_QS = self._positions(jax.lax.axis_index(self.axes))
        return _QueryBlock(
            _split_length(q_BLNH.reshape(batch, length, kv_heads, -1, head_dim), self.num_blocks),
            positions_QS.reshape(self.num_blocks, -1),
            None if segments_BL is None else _split_length(segments_BL, self.num_blocks),
        )

    def _pieces(self, keys_BL: Any) -> Any:
        return jax.tree.map(lambda x: _split_length(x, self.num_pieces), keys_BL)

    def _by_head(self, x: jax.Array, kv_heads: int) -> jax.Array:
        """[B, L, N, ...] -> [P, B, K, G, R, ...]."""
        x = _split_length(x.reshape(*x.shape[:2], kv_heads, -1, *x.shape[3:]), self.num_blocks)
        return jnp.moveaxis(x, 2, 4)

    def _positions(self, part: jax.Array) -> jax.Array:
        """Returns positions in the sequence of a shard's tokens, int32 [Q, S]."""
        numbers_Q = part[None]
        if self.num_pieces > 1:
            late = 2 * self.num_parts - 1 - part
            numbers_Q = jnp.where(part % 2 == 0, jnp.stack([part, late]), jnp.stack([late, part]))
        size = self.length // self.num_pieces
        return numbers_Q[:, None] * size + jnp.arange(size)

    def _rotate(self, tree: Any, by: int) -> Any:
        """Sends arrays to the device `by` positions ahead."""
        if by % self.num_parts == 0:
            return tree
        pairs = [(i, (i + by) % self.num_parts) for i in range(self.num_parts)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, self.axes, pairs), tree)

    def _zigzag(self, x_BL: jax.Array, *, back: bool = False) -> jax.Array:
        """Moves chunks 2 i and 2 i + 1 from device i to i and 2 C - 1 - i."""
        halves = []
        last = 2 * self.num_parts - 1
        for parity, half in enumerate(jnp.split(x_BL, 2, axis=1)):
            pieces = range(parity, last + 1, 2)
            pairs = [(i, min(piece, last - piece)) for i, piece in enumerate(pieces)]
            pairs = [pair[::-1] for pair in pairs] if back else pairs
            halves.append(jax.lax.ppermute(half, self.axes, pairs))
        return jnp.concatenate(halves, axis=1)


def _split_length(x_BL: jax.Array, number: int) -> jax.Array:
    """[B, L, ...] -> [number, B, L / number, ...]."""
    return jnp.moveaxis(x_BL.reshape(x_BL.shape[0], number, -1, *x_BL.shape[2:]), 1, 0)


def _memory_block(persistent_kv: PersistentKV, batch: int) -> _KVBlock:
    k_1BMKH, v_1BMKH = (jnp.broadcast_to(x, (1, batch, *x.shape)) for x in persistent_kv)
    return _KVBlock(k_1BMKH, v_1BMKH, None, None)


def _zeros_like(arrays: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), arrays)
