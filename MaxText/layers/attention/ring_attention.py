"""Ring attention: queries stay on their device, keys and values rotate.

Liu, Zaharia and Abbeel 2023, "Ring Attention with Blockwise Transformers". Each device attends to
the shard of keys that it holds, accumulating with a running maximum and sum, and passes the shard
on. The backward pass rotates once more and recomputes probabilities from the log-sum-exp (Dao et
al. 2022, algorithm 4), so that at most one shard and one block of scores are in memory.

In causal attention the device of the first tokens would wait for that of the last ones. Balanced,
each has two pieces, one counted from the beginning of the sequence and one from its end, so that
all do the same work in every step, half of the full square. Pieces are exchanged before and after.

Weights of a part's own (`AttentionSpec.weights_hook`) that depend on their own score alone have no
maximum and no sum: the outputs of all shards of keys add up.

Legend: B sequences, L queries of a device, K key/value heads, G query heads per key/value head, N =
K * G, H head_dim, M memories, P blocks of R = L / P queries, Q pieces of S = L / Q keys, C devices.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from MaxText.layers.attention.attention_core import (
    AttentionSharding,
    AttentionSpec,
    PersistentKV,
    kv_head_repeats,
    repeat_value_heads,
)
from MaxText.layers.dense import einsum_f32
from MaxText.parallelism.logical_sharding import split_axes
from MaxText.value_types import PyTree, Tree

Axes = tuple[str, ...]

_LOWEST = -1e30  # below every score; finite, so that differences are not NaN


def ring_unsupported_reason(spec: AttentionSpec) -> str | None:
    """Returns why a ring cannot compute the weights, or None."""
    if spec.weights_hook is None or spec.weights_scope == "score":
        return None
    return f"weights depend on all scores of a {spec.weights_scope}, and a ring sees a part of them"


def ring_attention(  # noqa: PLR0913
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTVH: jax.Array,
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
      v_BTVH: Values.
      spec: Computation and masking of scores; `ring_unsupported_reason` is None for it.
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
    v_BTKH = repeat_value_heads(k_BTKH, v_BTVH)
    repeats = kv_head_repeats(q_BTNH, k_BTKH, sharding)
    if repeats > 1:
        k_BTKH = jnp.repeat(k_BTKH, repeats, axis=2)
        v_BTKH = jnp.repeat(v_BTKH, repeats, axis=2)
        if persistent_kv is not None:
            persistent_kv = jax.tree.map(lambda x: jnp.repeat(x, repeats, axis=1), persistent_kv)
    num_parts = math.prod(mesh.shape[axis] for axis in ring_axes)
    ring = _Ring(
        spec=dataclasses.replace(
            spec, slopes_N=None, sinks_N=None, score_hook=None, mask_hook=None, weights_hook=None
        ),
        axes=ring_axes,
        num_parts=num_parts,
        length=q_BTNH.shape[1] // num_parts,
        asks_for_balance=balanced,
        block_size=block_size,
    )
    num_memories = 0 if persistent_kv is None else persistent_kv[0].shape[0]
    local_shape = sharding.query.shard_shape(q_BTNH.shape)
    pos_BT = None
    if spec.reads_positions:
        batch, length = q_BTNH.shape[:2]
        pos_BT = jnp.broadcast_to(spec.token_positions(segments_BT, length), (batch, length))
    by_head = PartitionSpec(batch_axes, ring_axes, head_axes)
    by_token = PartitionSpec(batch_axes, ring_axes)
    inputs = _RingInputs(
        q_BLNH=q_BTNH,
        k_BLKH=k_BTKH,
        v_BLKH=v_BTKH,
        segments_BL=segments_BT,
        pos_BL=pos_BT,
        heads_N=jnp.arange(q_BTNH.shape[2]) if spec.score_hook is not None else None,
        slopes_N=spec.slopes_N,
        sinks_N=spec.sinks_N,
        persistent_kv=persistent_kv,
        hooks=_hoist_hooks(spec, ring, local_shape, num_memories),
    )
    specs = _RingInputs(
        q_BLNH=by_head,
        k_BLKH=by_head,
        v_BLKH=by_head,
        segments_BL=by_token,
        pos_BL=by_token,
        heads_N=PartitionSpec(head_axes),
        slopes_N=PartitionSpec(head_axes),
        sinks_N=PartitionSpec(head_axes),
        persistent_kv=PartitionSpec(None, head_axes),
        hooks=PartitionSpec(),
    )
    return jax.shard_map(
        ring.run, mesh=mesh, in_specs=(specs,), out_specs=by_head, check_vma=False
    )(inputs)


# A hook that is a tree of the arrays that it reads.
_HoistedHook = jax.tree_util.Partial


class _Hooks(NamedTuple):
    """Hooks of a part, with the parameters that they read as leaves.

    A custom gradient and jax.shard_map have to be given all arrays, also those of closures. They
    are made for blocks of one shape.
    """

    score: _HoistedHook | None = None
    mask: _HoistedHook | None = None
    weights: _HoistedHook | None = None
    memory_weights: _HoistedHook | None = None  # `weights` for the scores of memories


def _hoist_hooks(
    spec: AttentionSpec, ring: "_Ring", query_shape: tuple[int, ...], num_memories: int
) -> _Hooks:
    """Returns the hooks of a spec, made for the blocks of a device.

    Args:
      spec: The spec.
      ring: The blocks of queries and pieces of keys.
      query_shape: Shape of a device's queries.
      num_memories: Memories, which are a piece of keys of their own.
    """
    batch, _, num_heads, _ = query_shape
    rows = ring.length // ring.num_blocks
    keys = ring.length // ring.num_pieces

    def positions(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    def square(num_keys: int, dtype: DTypeLike = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch, num_heads, rows, num_keys), dtype)

    q_pos = positions(batch, 1, rows, 1)
    k_pos = positions(batch, 1, 1, keys)
    memory_weights = None
    if num_memories:
        seen = square(num_memories, jnp.bool_)
        memory_weights = _hoist(spec.weights_hook, square(num_memories), seen)
    return _Hooks(
        score=_hoist(spec.score_hook, square(keys), q_pos, k_pos, positions(num_heads, 1, 1)),
        mask=_hoist(spec.mask_hook, positions(batch, rows, 1), positions(batch, 1, keys)),
        weights=_hoist(spec.weights_hook, square(keys), square(keys, jnp.bool_)),
        memory_weights=memory_weights,
    )


def _hoist(
    hook: Callable[..., jax.Array] | None, *arguments: jax.ShapeDtypeStruct
) -> _HoistedHook | None:
    """Returns a hook for arguments of these shapes, its arrays from outside as leaves."""
    if hook is None:
        return None
    closed = jax.make_jaxpr(hook)(*arguments)

    def evaluate(arrays: list[jax.Array], *arguments: jax.Array) -> jax.Array:
        [output] = jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, arrays))(*arguments)
        return output

    return jax.tree_util.Partial(evaluate, list(closed.consts))


# An array, a tree of arrays, or what stands for its arrays: their PartitionSpec or gradients.
RingInput = PyTree


class _RingInputs(NamedTuple):
    """Inputs of attention; inside jax.shard_map those of one device."""

    q_BLNH: RingInput
    k_BLKH: RingInput
    v_BLKH: RingInput
    segments_BL: RingInput = None
    pos_BL: RingInput = None  # positions in documents, for hooks
    heads_N: RingInput = None  # indices of the query heads, for hooks
    slopes_N: RingInput = None
    sinks_N: RingInput = None
    persistent_kv: RingInput = None  # a pair of arrays
    hooks: RingInput = _Hooks()


class _QueryBlock(NamedTuple):
    """A block of queries, or all blocks with a leading dimension P."""

    q_BRKGH: jax.Array
    positions_R: jax.Array  # in the sequence
    segments_BR: jax.Array | None
    pos_BR: jax.Array | None  # in the document, for hooks
    residuals: tuple[jax.Array, ...] = ()  # other inputs of the backward pass


class _KVBlock(NamedTuple):
    """A piece of keys and values, or all with a leading dimension Q."""

    k_BSKH: jax.Array
    v_BSKH: jax.Array
    positions_S: jax.Array | None  # None for memories
    segments_BS: jax.Array | None
    pos_BS: jax.Array | None = None


class _OnlineSoftmax(NamedTuple):
    """Softmax over the keys so far, float32, with a leading dimension P for all blocks."""

    largest_BKGR: jax.Array  # largest score
    sums_BKGR: jax.Array  # sum of exp(score - largest)
    o_BKGRH: jax.Array  # sum of exp(score - largest) v


class _CappedScores(NamedTuple):
    """Scores of a block of queries and a piece of keys, before what depends on positions."""

    scores_BKGRS: jax.Array
    slope: jax.Array | float  # derivative of the scores by q k


class _PerHead(NamedTuple):
    """What scores read besides queries and keys."""

    heads_N: jax.Array | None
    slopes_N: jax.Array | None
    hooks: _Hooks


class _KeyPieces(NamedTuple):
    """Keys and values of a device in Q pieces."""

    k_QBSKH: jax.Array
    v_QBSKH: jax.Array
    segments_QBS: jax.Array | None
    pos_QBS: jax.Array | None


# What a pass over all keys adds up for a block of queries or a piece of keys: an online softmax or
# gradients, float32; () or None for nothing.
FoldState = PyTree


class _RingResult(NamedTuple):
    """States after a turn of the ring."""

    query_state: FoldState
    key_state: FoldState  # of the keys that this device has last
    shift: int  # how many devices ahead of its own the keys of a device are


# (a block, a piece, state of the block, state of the piece) -> the two states
_BlockFn = Callable[[_QueryBlock, _KVBlock, FoldState, FoldState], tuple[FoldState, FoldState]]


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
                pos_BL=jax.tree.map(self._zigzag, inputs.pos_BL),
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
        num_blocks, batch, block, kv_heads, group, _ = queries.q_BRKGH.shape
        per_head = _per_head(inputs)
        shape = (num_blocks, batch, kv_heads, group, block)
        largest = jnp.full(shape, _LOWEST, jnp.float32)
        sums = jnp.zeros(shape, jnp.float32)
        if inputs.sinks_N is not None:  # the first key, with the value 0
            sinks_KG1 = inputs.sinks_N.reshape(kv_heads, group, 1).astype(jnp.float32)
            largest = jnp.broadcast_to(sinks_KG1, shape)
            sums = jnp.ones(shape, jnp.float32)
        state = _OnlineSoftmax(
            largest_BKGR=largest,
            sums_BKGR=sums,
            o_BKGRH=jnp.zeros((*shape, inputs.v_BLKH.shape[-1]), jnp.float32),
        )

        def add_keys(
            queries: _QueryBlock, keys: _KVBlock, state: _OnlineSoftmax, _: tuple[()]
        ) -> tuple[_OnlineSoftmax, tuple[()]]:
            """Returns the softmax of a block of queries over a further piece of keys."""
            scores = self._capped_scores(queries, keys).scores_BKGRS
            scores = self._positional_scores(scores, queries, keys, per_head)
            seen = self._seen(queries, keys, per_head)
            if inputs.hooks.weights is not None:
                p = self._weights(scores, seen, keys, per_head)
                added_BKGRH = self._einsum(
                    "bkgrs,bskh->bkgrh", p.astype(keys.v_BSKH.dtype), keys.v_BSKH
                )
                return state._replace(o_BKGRH=state.o_BKGRH + added_BKGRH), ()
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
        o = state.o_BKGRH
        log_sums = sums
        if inputs.hooks.weights is None:
            o = o / state.sums_BKGR[..., None]
            log_sums = state.largest_BKGR + jnp.log(state.sums_BKGR)
        o_BLNH = o.transpose(1, 0, 4, 2, 3, 5).reshape(*inputs.q_BLNH.shape[:3], -1)
        o_BLNH = o_BLNH.astype(inputs.q_BLNH.dtype)
        return o_BLNH, (inputs, o_BLNH, log_sums)

    def _backward(
        self, residuals: tuple[_RingInputs, jax.Array, jax.Array], grad_o_BLNH: jax.Array
    ) -> tuple[_RingInputs]:
        """Returns the gradients of the inputs (Dao et al. 2022, algorithm 4).

        P = exp(S - logsumexp), dV = P^T dO, dP = dO V^T, dS = P * (dP - rowsum(dO * O)), dQ = dS K
        and dK = dS^T Q. The gradients of keys and values travel around the ring with them. JAX
        differentiates the hooks. A sink has dP = 0.
        """
        inputs, o_BLNH, log_sums = residuals
        queries = self._query_blocks(inputs)
        num_blocks, batch, _, kv_heads, group, _ = queries.q_BRKGH.shape
        per_head = _per_head(inputs)
        floats, restore = _split_floats(inputs.hooks)
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
            query_gradients: tuple[jax.Array, list[jax.Array]],
            key_gradients: tuple[jax.Array, jax.Array],
        ) -> tuple[tuple[jax.Array, list[jax.Array]], tuple[jax.Array, jax.Array]]:
            """Returns the gradients of a block of queries and a piece of keys, added up."""
            do_BKGRH, delta, log_sums = queries.residuals
            dq, d_floats = query_gradients
            dk, dv = key_gradients
            k_BSKH = keys.k_BSKH
            v_BSKH = keys.v_BSKH
            capped, slope = self._capped_scores(queries, keys)
            seen = self._seen(queries, keys, per_head)
            dp = self._einsum("bkgrh,bskh->bkgrs", do_BKGRH, v_BSKH)

            def scores_of(capped: jax.Array, floats: list[jax.Array]) -> jax.Array:
                with_floats = per_head._replace(hooks=restore(floats))
                scores = self._positional_scores(capped, queries, keys, with_floats)
                if inputs.hooks.weights is None:
                    return scores
                return self._weights(scores, seen, keys, with_floats)

            scores, pull_back = jax.vjp(scores_of, capped, floats)
            if inputs.hooks.weights is None:
                p = jnp.where(seen, jnp.exp(scores - log_sums[..., None]), 0.0)
                d_capped, added = pull_back(p * (dp - delta[..., None]))
            else:
                p = scores
                d_capped, added = pull_back(dp)
            ds = (d_capped * slope).astype(k_BSKH.dtype)
            dv = dv + self._einsum("bkgrs,bkgrh->bskh", p.astype(v_BSKH.dtype), do_BKGRH)
            dk = dk + self._einsum("bkgrs,brkgh->bskh", ds, queries.q_BRKGH)
            dq = dq + self._einsum("bkgrs,bskh->brkgh", ds, k_BSKH)
            return (dq, jax.tree.map(jnp.add, d_floats, added)), (dk, dv)

        by_block = [jnp.zeros((num_blocks, *x.shape), x.dtype) for x in floats]
        query_gradients = (_zeros_like(queries.q_BRKGH), by_block)
        memory_gradients = None
        if inputs.persistent_kv is not None:
            memories = _memory_block(inputs.persistent_kv, batch)
            query_gradients, by_sequence = self._fold(
                add_gradients, queries, memories, query_gradients, _zeros_like(memories[:2])
            )
            memory_gradients = jax.tree.map(
                lambda gradient, memory: gradient.sum((0, 1)).astype(memory.dtype),
                by_sequence,
                inputs.persistent_kv,
            )
        pieces = self._key_pieces(inputs)
        (dq, by_block), key_gradients, shift = self._ring_scan(
            add_gradients, queries, pieces, query_gradients, _zeros_like(pieces[:2])
        )
        dk, dv = self._rotate(key_gradients, -shift)
        slopes_N = inputs.slopes_N
        sink_gradients = None
        if inputs.sinks_N is not None:
            _, delta, _ = queries.residuals
            sinks_KG1 = inputs.sinks_N.reshape(kv_heads, group, 1)
            terms = jnp.exp(sinks_KG1 - log_sums) * delta
            by_head = -terms.sum((0, 1, 4)).reshape(-1)
            sink_gradients = by_head.astype(inputs.sinks_N.dtype)
        gradients = _RingInputs(
            q_BLNH=_merge_length(dq, inputs.q_BLNH),
            k_BLKH=_merge_length(dk, inputs.k_BLKH),
            v_BLKH=_merge_length(dv, inputs.v_BLKH),
            slopes_N=None if slopes_N is None else jnp.zeros_like(slopes_N),
            sinks_N=sink_gradients,
            persistent_kv=memory_gradients,
            hooks=restore([x.sum(0) for x in by_block], others=None),
        )
        return (gradients,)

    def _ring_scan(
        self,
        block_fn: _BlockFn,
        queries: _QueryBlock,
        keys: _KeyPieces,
        query_state: FoldState,
        key_state: FoldState,
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

        def attend_device(
            keys: _KeyPieces, states: tuple[FoldState, FoldState], step: jax.Array | int
        ) -> tuple[FoldState, FoldState]:
            pieces = _KVBlock(
                k_BSKH=keys.k_QBSKH,
                v_BSKH=keys.v_QBSKH,
                positions_S=self._positions((device - step) % self.num_parts),
                segments_BS=keys.segments_QBS,
                pos_BS=keys.pos_QBS,
            )
            query_state, key_state = states
            return self._fold(block_fn, queries, pieces, query_state, key_state)

        def rotate_and_attend(
            carry: tuple[_KeyPieces, tuple[FoldState, FoldState]], step: jax.Array
        ) -> tuple[tuple[_KeyPieces, tuple[FoldState, FoldState]], None]:
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
        query_state: FoldState,
        key_state: FoldState,
    ) -> tuple[FoldState, FoldState]:
        """Returns both states after all blocks of queries met all pieces of a device's keys.

        Pairs of a block and a piece of which no query sees a key are skipped at run time.
        """

        def fold_piece(
            query_state: FoldState, piece: tuple[_KVBlock, FoldState]
        ) -> tuple[FoldState, FoldState]:
            keys, key_state = piece

            def fold_block(
                key_state: FoldState, block: tuple[_QueryBlock, FoldState]
            ) -> tuple[FoldState, FoldState]:
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

    def _any_visible(self, queries: _QueryBlock, keys: _KVBlock) -> jax.Array | bool:
        """Returns whether any query of a block may see any key; True if that is always so."""
        causal = self.spec.causal
        window = self.spec.window
        if keys.positions_S is None or (not causal and window is None):
            return True
        nearest = queries.positions_R[0] - keys.positions_S[-1]
        farthest = queries.positions_R[-1] - keys.positions_S[0]
        visible = farthest >= 0 if causal else True
        if window is not None:
            visible = visible & (nearest < window) & (farthest >= -window)
        return visible

    def _capped_scores(self, queries: _QueryBlock, keys: _KVBlock) -> _CappedScores:
        """Returns the scores of a block and a piece, scaled and soft-capped."""
        scale = self.spec.scale_for(queries.q_BRKGH.shape[-1])
        scores = scale * self._einsum("brkgh,bskh->bkgrs", queries.q_BRKGH, keys.k_BSKH)
        cap = self.spec.soft_cap
        if not cap:
            return _CappedScores(scores, scale)
        tanh = jnp.tanh(scores / cap)
        return _CappedScores(cap * tanh, scale * (1 - tanh * tanh))

    def _positional_scores(
        self,
        scores_BKGRS: jax.Array,
        queries: _QueryBlock,
        keys: _KVBlock,
        per_head: _PerHead,
    ) -> jax.Array:
        """Returns the scores after ALiBi and the score hook, neither of which memories have."""
        hook = per_head.hooks.score
        is_unchanged = per_head.slopes_N is None and hook is None
        if keys.positions_S is None or is_unchanged:
            return scores_BKGRS
        spec = dataclasses.replace(self.spec, slopes_N=per_head.slopes_N, score_hook=hook)
        batch, kv_heads, group, rows, num_keys = scores_BKGRS.shape
        scores_BNRS = spec.positional_scores(
            scores_BKGRS.reshape(batch, kv_heads * group, rows, num_keys),
            *self._token_positions(queries, keys),
            per_head.heads_N,
        )
        return scores_BNRS.reshape(scores_BKGRS.shape)

    def _seen(self, queries: _QueryBlock, keys: _KVBlock, per_head: _PerHead) -> jax.Array:
        """Returns whether a query sees a key; broadcasts to [B, K, G, R, S]."""
        if keys.positions_S is None:
            return jnp.ones((), bool)
        spec = dataclasses.replace(self.spec, mask_hook=per_head.hooks.mask)
        seen = spec.mask(*self._token_positions(queries, keys))[:, None, None]
        if queries.segments_BR is not None and keys.segments_BS is not None:
            same_BRS = queries.segments_BR[:, :, None] == keys.segments_BS[:, None]
            seen = seen & same_BRS[:, None, None]
        return seen

    def _token_positions(self, queries: _QueryBlock, keys: _KVBlock) -> tuple[jax.Array, jax.Array]:
        """Returns positions of queries and keys, [B, R] and [B, S]; B may be 1."""
        assert keys.positions_S is not None, keys
        if queries.pos_BR is None or keys.pos_BS is None:
            return queries.positions_R[None], keys.positions_S[None]
        return queries.pos_BR, keys.pos_BS

    def _weights(
        self, scores_BKGRS: jax.Array, seen: jax.Array, keys: _KVBlock, per_head: _PerHead
    ) -> jax.Array:
        """Returns the weights of the weights hook, 0 where a key is not seen."""
        is_memory = keys.positions_S is None
        hook = per_head.hooks.memory_weights if is_memory else per_head.hooks.weights
        assert hook is not None, per_head.hooks
        batch, kv_heads, group, rows, num_keys = scores_BKGRS.shape
        shape = (batch, kv_heads * group, rows, num_keys)
        seen = jnp.broadcast_to(seen, scores_BKGRS.shape)
        masked_BNRS = jnp.where(seen, scores_BKGRS, -jnp.inf).reshape(shape)
        weights_BNRS = hook(masked_BNRS, seen.reshape(shape))
        return jnp.where(seen, weights_BNRS.reshape(scores_BKGRS.shape), 0.0)

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
            pos_BR=jax.tree.map(split, inputs.pos_BL),
        )

    def _key_pieces(self, inputs: _RingInputs) -> _KeyPieces:
        """Returns this device's keys and values in Q pieces."""
        split = functools.partial(_split_length, number=self.num_pieces)
        return _KeyPieces(
            k_QBSKH=split(inputs.k_BLKH),
            v_QBSKH=split(inputs.v_BLKH),
            segments_QBS=jax.tree.map(split, inputs.segments_BL),
            pos_QBS=jax.tree.map(split, inputs.pos_BL),
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

    def _rotate(self, tree: Tree, by: int) -> Tree:
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


def _per_head(inputs: _RingInputs) -> _PerHead:
    """Returns what scores read besides queries and keys."""
    return _PerHead(heads_N=inputs.heads_N, slopes_N=inputs.slopes_N, hooks=inputs.hooks)


def _split_floats(tree: Tree) -> tuple[list[jax.Array], Callable[..., Tree]]:
    """Returns the differentiable arrays of a tree, and a function that puts others in their place.

    Its argument `others` is what the remaining arrays become; without it they stay.
    """
    leaves, structure = jax.tree.flatten(tree)
    is_float = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves]

    def restore(floats: list[jax.Array], **others: jax.Array | None) -> Tree:
        iterator = iter(floats)
        restored = [
            next(iterator) if differentiable else others.get("others", leaf)
            for leaf, differentiable in zip(leaves, is_float, strict=True)
        ]
        return jax.tree.unflatten(structure, restored)

    floats = [leaf for leaf, differentiable in zip(leaves, is_float, strict=True) if differentiable]
    return floats, restore


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


def _zeros_like(arrays: Tree) -> Tree:
    """Returns float32 zeros of the same shapes."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), arrays)
