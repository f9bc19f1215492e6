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
from jax.sharding import PartitionSpec

from MaxText.layers.attention.attention_core import (
    AttentionSharding,
    AttentionSpec,
    PersistentKV,
    kv_head_repeats,
)
from MaxText.layers.dense import einsum_f32
from MaxText.parallelism.logical_sharding import split_axes

Axes = tuple[str, ...]

_LOWEST = -1e30  # below every score; finite, so that differences are not NaN


def ring_attention(  # noqa: PLR0913
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    spec: AttentionSpec,
    sharding: AttentionSharding,
    *,
    segments_BT: jax.Array | None = None,
    persistent_kv: PersistentKV | None = None,
    block_size: int | None = None,
    balanced: bool = True,
) -> jax.Array:
    """Computes dot_product_attention without dropout, [B, T, N, H].

    Args:
      q_BTNH: Queries.
      k_BTKH: Keys of the same tokens.
      v_BTKH: Values.
      spec: Computation and masking of scores.
      sharding: How the inputs are divided. The axes of T are those of the ring; they divide it, and
        are the same for queries and keys.
      segments_BT: Document of each token: attention stays within one.
      persistent_kv: Learned keys and values that every query sees.
      block_size: Query rows whose scores are in memory at once; None is all.
      balanced: Whether causal work without a window is divided evenly.
    """
    mesh = sharding.query.mesh
    batch_axes, ring_axes, head_axes = (split_axes(sharding.query, dim) for dim in range(3))
    assert ring_axes == split_axes(sharding.key, 1), sharding
    repeats = kv_head_repeats(q_BTNH, k_BTKH, sharding)
    if repeats > 1:
        k_BTKH = jnp.repeat(k_BTKH, repeats, axis=2)
        v_BTKH = jnp.repeat(v_BTKH, repeats, axis=2)
        if persistent_kv is not None:
            persistent_kv = jax.tree.map(lambda x: jnp.repeat(x, repeats, axis=1), persistent_kv)
    num_parts = math.prod(mesh.shape[axis] for axis in ring_axes)
    ring = _Ring(
        spec=dataclasses.replace(spec, slopes_N=None),
        axes=ring_axes,
        num_parts=num_parts,
        length=q_BTNH.shape[1] // num_parts,
        asks_for_balance=balanced,
        block_size=block_size,
    )
    by_head = PartitionSpec(batch_axes, ring_axes, head_axes)
    inputs = _RingInputs(
        q_BLNH=q_BTNH,
        k_BLKH=k_BTKH,
        v_BLKH=v_BTKH,
        segments_BL=segments_BT,
        slopes_N=spec.slopes_N,
        persistent_kv=persistent_kv,
    )
    specs: Any = _RingInputs(
        q_BLNH=by_head,
        k_BLKH=by_head,
        v_BLKH=by_head,
        segments_BL=PartitionSpec(batch_axes, ring_axes),
        slopes_N=PartitionSpec(head_axes),
        persistent_kv=PartitionSpec(None, head_axes),
    )
    return jax.shard_map(
        ring.run, mesh=mesh, in_specs=(specs,), out_specs=by_head, check_vma=False
    )(inputs)


class _RingInputs(NamedTuple):
    """Inputs of attention; inside jax.shard_map those of one device.

    Fields may also hold the sharding or the gradient of an input.
    """

    q_BLNH: Any
    k_BLKH: Any
    v_BLKH: Any
    segments_BL: Any = None
    slopes_N: Any = None
    persistent_kv: Any = None


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


class _OnlineSoftmax(NamedTuple):
    """Softmax over the keys so far, float32, with a leading dimension P for all blocks."""

    largest_BKGR: jax.Array  # largest score
    sums_BKGR: jax.Array  # sum of exp(score - largest)
    o_BKGRH: jax.Array  # sum of exp(score - largest) v


class _MaskedScores(NamedTuple):
    """Scores of a block of queries and a piece of keys."""

    scores_BKGRS: jax.Array
    seen: jax.Array  # whether a query sees a key; broadcasts to the scores
    slope: Any  # derivative of the scores by q k


class _KeyPieces(NamedTuple):
    """Keys and values of a device in Q pieces."""

    k_QBSKH: jax.Array
    v_QBSKH: jax.Array
    segments_QBS: jax.Array | None


class _RingResult(NamedTuple):
    """States after a turn of the ring."""

    query_state: Any
    key_state: Any  # of the keys that this device has last
    shift: int  # how many devices ahead of its own the keys of a device are


# (a block, a piece, state of the block, state of the piece) -> the two states
_BlockFn = Callable[[_QueryBlock, _KVBlock, Any, Any], tuple[Any, Any]]


@dataclasses.dataclass(frozen=True)
class _Ring:
    """The computation of one device in a ring of C devices, and its schedule."""

    spec: AttentionSpec
    axes: Axes  # mesh axes of the ring
    num_parts: int  # C
    length: int  # L
    asks_for_balance: bool
    block_size: int | None  # about R, which divides a piece; None is all of it

    @property
    def num_pieces(self) -> int:
        """Q: 2 if causal work is balanced, else 1."""
        halves = self.spec.causal and self.spec.window is None and self.length % 2 == 0
        return 2 if self.asks_for_balance and halves else 1

    @property
    def num_blocks(self) -> int:
        """P: blocks of equal size that do not cross pieces."""
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

    def run(self, inputs: _RingInputs) -> jax.Array:
        """Returns the outputs of this device's queries, [B, L, N, H]."""
        if self.num_pieces > 1:
            inputs = inputs._replace(
                q_BLNH=self._zigzag(inputs.q_BLNH),
                k_BLKH=self._zigzag(inputs.k_BLKH),
                v_BLKH=self._zigzag(inputs.v_BLKH),
                segments_BL=jax.tree.map(self._zigzag, inputs.segments_BL),
            )
        attend = jax.custom_vjp(lambda inputs: self._forward(inputs)[0])
        attend.defvjp(self._forward, self._backward)
        o_BLNH = attend(inputs)
        return self._zigzag(o_BLNH, back=True) if self.num_pieces > 1 else o_BLNH

    def _forward(
        self, inputs: _RingInputs
    ) -> tuple[jax.Array, tuple[_RingInputs, jax.Array, jax.Array]]:
        """Returns the outputs, and residuals.

        Each piece of keys updates the running maximum and sum of every block of queries (Dao et al.
        2022, algorithm 1).

        Returns:
          The outputs [B, L, N, H], and (inputs, outputs, log-sum-exp float32 [P, B, K, G, R]).
        """
        queries = self._query_blocks(inputs)
        num_blocks, batch, block, kv_heads, group, head_dim = queries.q_BRKGH.shape
        slopes_KG = None
        if inputs.slopes_N is not None:
            slopes_KG = inputs.slopes_N.reshape(kv_heads, group)
        shape = (num_blocks, batch, kv_heads, group, block)
        state = _OnlineSoftmax(
            largest_BKGR=jnp.full(shape, _LOWEST, jnp.float32),
            sums_BKGR=jnp.zeros(shape, jnp.float32),
            o_BKGRH=jnp.zeros((*shape, head_dim), jnp.float32),
        )

        def add_keys(
            queries: _QueryBlock, keys: _KVBlock, state: _OnlineSoftmax, _: tuple[()]
        ) -> tuple[_OnlineSoftmax, tuple[()]]:
            """Returns the softmax of a block of queries over a further piece of keys."""
            scores, seen, _ = self._scores(queries, keys, slopes_KG)
            largest = jnp.maximum(state.largest_BKGR, jnp.where(seen, scores, _LOWEST).max(-1))
            correction = jnp.exp(state.largest_BKGR - largest)
            p = jnp.where(seen, jnp.exp(scores - largest[..., None]), 0.0)
            added_BKGRH = self._einsum(
                "bkgrs,bskh->bkgrh", p.astype(keys.v_BSKH.dtype), keys.v_BSKH
            )
            return (
                _OnlineSoftmax(
                    largest_BKGR=largest,
                    sums_BKGR=state.sums_BKGR * correction + p.sum(-1),
                    o_BKGRH=state.o_BKGRH * correction[..., None] + added_BKGRH,
                ),
                (),
            )

        if inputs.persistent_kv is not None:
            memories = _memory_block(inputs.persistent_kv, batch)
            state, _ = self._fold(add_keys, queries, memories, state, ())
        state, _, _ = self._ring_scan(add_keys, queries, self._key_pieces(inputs), state, ())
        o = state.o_BKGRH / state.sums_BKGR[..., None]
        o_BLNH = o.transpose(1, 0, 4, 2, 3, 5).reshape(inputs.q_BLNH.shape)
        o_BLNH = o_BLNH.astype(inputs.q_BLNH.dtype)
        return o_BLNH, (inputs, o_BLNH, state.largest_BKGR + jnp.log(state.sums_BKGR))

    def _backward(
        self, residuals: tuple[_RingInputs, jax.Array, jax.Array], grad_o_BLNH: jax.Array
    ) -> tuple[_RingInputs]:
        """Returns the gradients of the inputs (Dao et al. 2022, algorithm 4).

        P = exp(S - logsumexp), dV = P^T dO, dP = dO V^T, dS = P * (dP - rowsum(dO * O)), dQ = dS K
        and dK = dS^T Q. The gradients of keys and values travel around the ring with them.
        """
        inputs, o_BLNH, log_sums = residuals
        queries = self._query_blocks(inputs)
        _, batch, _, kv_heads, group, _ = queries.q_BRKGH.shape
        slopes_KG = None
        if inputs.slopes_N is not None:
            slopes_KG = inputs.slopes_N.reshape(kv_heads, group)
        # sum_s p_s dp_s, which is subtracted from the gradient of each probability.
        delta_BLN = jnp.sum(grad_o_BLNH.astype(jnp.float32) * o_BLNH.astype(jnp.float32), axis=-1)
        queries = queries._replace(
            residuals=(
                self._by_head(grad_o_BLNH, kv_heads),
                self._by_head(delta_BLN, kv_heads),
                log_sums,
            )
        )

        def add_gradients(
            queries: _QueryBlock,
            keys: _KVBlock,
            dq: jax.Array,
            key_gradients: tuple[jax.Array, jax.Array],
        ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            """Returns the gradients of a block of queries and a piece of keys, added up."""
            do_BKGRH, delta, log_sums = queries.residuals
            dk, dv = key_gradients
            k_BSKH = keys.k_BSKH
            v_BSKH = keys.v_BSKH
            scores, seen, slope = self._scores(queries, keys, slopes_KG)
            p = jnp.where(seen, jnp.exp(scores - log_sums[..., None]), 0.0)
            dp = self._einsum("bkgrh,bskh->bkgrs", do_BKGRH, v_BSKH)
            ds = (p * (dp - delta[..., None]) * slope).astype(k_BSKH.dtype)
            dv = dv + self._einsum("bkgrs,bkgrh->bskh", p.astype(v_BSKH.dtype), do_BKGRH)
            dk = dk + self._einsum("bkgrs,brkgh->bskh", ds, queries.q_BRKGH)
            dq = dq + self._einsum("bkgrs,bskh->brkgh", ds, k_BSKH)
            return dq, (dk, dv)

        dq = _zeros_like(queries.q_BRKGH)
        memory_gradients = None
        if inputs.persistent_kv is not None:
            memories = _memory_block(inputs.persistent_kv, batch)
            dq, by_sequence = self._fold(
                add_gradients, queries, memories, dq, _zeros_like(memories[:2])
            )
            memory_gradients = jax.tree.map(
                lambda gradient, memory: gradient.sum((0, 1)).astype(memory.dtype),
                by_sequence,
                inputs.persistent_kv,
            )
        pieces = self._key_pieces(inputs)
        dq, key_gradients, shift = self._ring_scan(
            add_gradients, queries, pieces, dq, _zeros_like(pieces[:2])
        )
        dk, dv = self._rotate(key_gradients, -shift)
        slopes_N = inputs.slopes_N
        gradients = _RingInputs(
            q_BLNH=_merge_length(dq, inputs.q_BLNH),
            k_BLKH=_merge_length(dk, inputs.k_BLKH),
            v_BLKH=_merge_length(dv, inputs.v_BLKH),
            slopes_N=None if slopes_N is None else jnp.zeros_like(slopes_N),
            persistent_kv=memory_gradients,
        )
        return (gradients,)

    def _ring_scan(
        self,
        block_fn: _BlockFn,
        queries: _QueryBlock,
        keys: _KeyPieces,
        query_state: Any,
        key_state: Any,
    ) -> _RingResult:
        """Folds the keys of all visible devices, which arrive one after another.

        Args:
          block_fn: Computes a block of queries with a piece of keys.
          queries: All blocks of this device's queries.
          keys: This device's keys.
          query_state: State of the queries, by block.
          key_state: State of the keys, which travels with them.
        """
        steps = self.steps
        device = jax.lax.axis_index(self.axes)

        def attend_device(keys: _KeyPieces, states: tuple[Any, Any], step: Any) -> tuple[Any, Any]:
            pieces = _KVBlock(
                k_BSKH=keys.k_QBSKH,
                v_BSKH=keys.v_QBSKH,
                positions_S=self._positions((device - step) % self.num_parts),
                segments_BS=keys.segments_QBS,
            )
            query_state, key_state = states
            return self._fold(block_fn, queries, pieces, query_state, key_state)

        def rotate_and_attend(carry: Any, step: jax.Array) -> tuple[Any, None]:
            keys, (query_state, key_state) = carry
            keys, key_state = self._rotate((keys, key_state), 1)
            return (keys, attend_device(keys, (query_state, key_state), step)), None

        keys, key_state = self._rotate((keys, key_state), steps.start)
        states = attend_device(keys, (query_state, key_state), steps.start)
        if len(steps) > 1:
            later_steps = jnp.arange(steps.start + 1, steps.stop)
            (_, states), _ = jax.lax.scan(rotate_and_attend, (keys, states), later_steps)
        query_state, key_state = states
        return _RingResult(query_state, key_state, shift=steps[-1])

    def _fold(
        self,
        block_fn: _BlockFn,
        queries: _QueryBlock,
        keys: _KVBlock,
        query_state: Any,
        key_state: Any,
    ) -> tuple[Any, Any]:
        """Returns both states after all blocks of queries met all pieces of a device's keys.

        Pairs of a block and a piece of which no query sees a key are skipped at run time.
        """

        def fold_piece(query_state: Any, piece: tuple[_KVBlock, Any]) -> tuple[Any, Any]:
            keys, key_state = piece

            def fold_block(key_state: Any, block: tuple[_QueryBlock, Any]) -> tuple[Any, Any]:
                queries, query_state = block
                attend_block = functools.partial(block_fn, queries, keys)
                visible = self._any_visible(queries, keys)
                if visible is True:
                    query_state, key_state = attend_block(query_state, key_state)
                else:
                    query_state, key_state = jax.lax.cond(
                        visible, attend_block, lambda *states: states, query_state, key_state
                    )
                return key_state, query_state

            key_state, query_state = jax.lax.scan(fold_block, key_state, (queries, query_state))
            return query_state, key_state

        return jax.lax.scan(fold_piece, query_state, (keys, key_state))

    def _any_visible(self, queries: _QueryBlock, keys: _KVBlock) -> Any:
        """Returns whether any query of a block may see any key; True if that is always so."""
        causal = self.spec.causal
        window = self.spec.window
        if keys.positions_S is None or (not causal and window is None):
            return True
        nearest = queries.positions_R[0] - keys.positions_S[-1]
        farthest = queries.positions_R[-1] - keys.positions_S[0]
        visible: Any = farthest >= 0 if causal else True
        if window is not None:
            visible = visible & (nearest < window) & (farthest >= -window)
        return visible

    def _scores(
        self, queries: _QueryBlock, keys: _KVBlock, slopes_KG: jax.Array | None
    ) -> _MaskedScores:
        """Returns the scores of a block and a piece, as `AttentionSpec` says."""
        spec = self.spec
        scale = self.spec.scale_for(queries.q_BRKGH.shape[-1])
        scores = scale * self._einsum("brkgh,bskh->bkgrs", queries.q_BRKGH, keys.k_BSKH)
        slope: Any = scale
        cap = spec.soft_cap
        if cap:
            tanh = jnp.tanh(scores / cap)
            scores = cap * tanh
            slope = scale * (1 - tanh * tanh)
        if keys.positions_S is None:
            return _MaskedScores(scores, jnp.ones((), bool), slope)
        distance_RS = queries.positions_R[:, None] - keys.positions_S
        if slopes_KG is not None:
            abs_distance_RS = jnp.abs(distance_RS).astype(jnp.float32)
            scores = scores - slopes_KG[..., None, None] * abs_distance_RS
        seen = spec.visible(distance_RS)
        if queries.segments_BR is not None and keys.segments_BS is not None:
            same_BRS = queries.segments_BR[:, :, None] == keys.segments_BS[:, None]
            seen = seen & same_BRS[:, None, None]
        return _MaskedScores(scores, seen, slope)

    def _einsum(self, subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
        return einsum_f32(subscripts, a, b, self.spec.precision)

    def _query_blocks(self, inputs: _RingInputs) -> _QueryBlock:
        """Returns this device's queries in P blocks."""
        batch, length, _, head_dim = inputs.q_BLNH.shape
        kv_heads = inputs.k_BLKH.shape[2]
        positions_QS = self._positions(jax.lax.axis_index(self.axes))
        q_BLKGH = inputs.q_BLNH.reshape(batch, length, kv_heads, -1, head_dim)
        split = functools.partial(_split_length, number=self.num_blocks)
        return _QueryBlock(
            q_BRKGH=split(q_BLKGH),
            positions_R=positions_QS.reshape(self.num_blocks, -1),
            segments_BR=jax.tree.map(split, inputs.segments_BL),
        )

    def _key_pieces(self, inputs: _RingInputs) -> _KeyPieces:
        """Returns this device's keys and values in Q pieces."""
        split = functools.partial(_split_length, number=self.num_pieces)
        return _KeyPieces(
            k_QBSKH=split(inputs.k_BLKH),
            v_QBSKH=split(inputs.v_BLKH),
            segments_QBS=jax.tree.map(split, inputs.segments_BL),
        )

    def _by_head(self, x: jax.Array, kv_heads: int) -> jax.Array:
        """Returns x [B, L, N, ...] in blocks of queries, [P, B, K, G, R, ...]."""
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
        """Exchanges halves of the devices' tokens, so that causal work is balanced.

        The sequence has 2 C chunks. Before, device i has chunks 2 i and 2 i + 1; after, it has
        chunks i and 2 C - 1 - i.

        Args:
          x_BL: Tokens of this device, [B, L, ...].
          back: Whether to undo the exchange.
        """
        halves = []
        last = 2 * self.num_parts - 1
        for parity, half in enumerate(jnp.split(x_BL, 2, axis=1)):
            pieces = range(parity, last + 1, 2)
            pairs = [(i, min(piece, last - piece)) for i, piece in enumerate(pieces)]
            if back:
                pairs = [(target, source) for source, target in pairs]
            halves.append(jax.lax.ppermute(half, self.axes, pairs))
        return jnp.concatenate(halves, axis=1)


def _split_length(x_BL: jax.Array, number: int) -> jax.Array:
    """Returns x [B, L, ...] in equal parts, [number, B, L / number, ...]."""
    return jnp.moveaxis(x_BL.reshape(x_BL.shape[0], number, -1, *x_BL.shape[2:]), 1, 0)


def _merge_length(parts: jax.Array, reference: jax.Array) -> jax.Array:
    """Returns parts [number, B, ...] with the shape and dtype of `reference` [B, L, ...]."""
    return jnp.moveaxis(parts, 0, 1).reshape(reference.shape).astype(reference.dtype)


def _memory_block(persistent_kv: PersistentKV, batch: int) -> _KVBlock:
    """Returns memories as a single piece of keys that every query of every sequence sees."""
    k_1BMKH, v_1BMKH = (jnp.broadcast_to(x, (1, batch, *x.shape)) for x in persistent_kv)
    return _KVBlock(k_BSKH=k_1BMKH, v_BSKH=v_1BMKH, positions_S=None, segments_BS=None)


def _zeros_like(arrays: Any) -> Any:
    """Returns float32 zeros of the same shapes."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), arrays)
