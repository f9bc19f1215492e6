"""KV caches of attention.

A cache is a decode state of `Attention`: the keys and values of the tokens so far. KeyValueCache
has a slot for each position, SlidingWindowCache a ring of the newest tokens. States that grow, of
attention and of other parts, have `capacity` and `resize`; `capacity_of` and `resize` below apply
these to all states of a model.

Legend: B sequences, T new tokens, S slots, M memories, N query heads, K key/value heads, H
head_dim, W window.
"""

import dataclasses
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from MaxText.layers.attention.attention_core import (
    AttentionSpec,
    PersistentKV,
    TokenPairs,
    attend_square,
    prepend_memories,
)
from MaxText.layers.lowering.cpu_kv_cache import drop_batch_of_one
from MaxText.parallelism.logical_sharding import with_logical_constraint

States = TypeVar("States")  # a tree of decode states

_AXES = ("activation_batch", "activation_kv_heads", None, "activation_kv")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KeyValueCache:
    """A cache with position s of the sequence in slot s.

    Slots beyond a sequence's length hold anything: a query sees only slots up to its own position.
    Memories, which every query sees, precede the slots. A batch of one has no dimension B
    (`drop_batch_of_one`).

    Attributes:
      keys: [B, K, M + S, H] or [K, M + S, H], after norms and rotary.
      values: Of the same shape, or with another H; None if they are the first numbers of the keys.
      num_memories: M.
      value_width: How many numbers of the keys they are.
    """

    keys: jax.Array
    values: jax.Array | None
    num_memories: int = dataclasses.field(default=0, metadata={"static": True})
    value_width: int | None = dataclasses.field(default=None, metadata={"static": True})

    @classmethod
    def from_prefill(
        cls,
        k_BTKH: jax.Array,
        v_BTKH: jax.Array,
        capacity: int,
        persistent_kv: PersistentKV | None = None,
    ) -> "KeyValueCache":
        """Returns a cache with the keys and values of prompts in its first T slots.

        Args:
          k_BTKH: Keys of the prompts, their padding included.
          v_BTKH: Values of the prompts.
          capacity: S, at least T.
          persistent_kv: Learned keys and values that every query sees.
        """
        keys, values = persistent_kv or (None, None)
        num_memories = 0 if keys is None else keys.shape[0]
        return cls(_slots(k_BTKH, capacity, keys), _slots(v_BTKH, capacity, values), num_memories)

    @classmethod
    def of_keys(cls, k_BTKH: jax.Array, capacity: int, *, value_width: int) -> "KeyValueCache":
        """Returns a cache of prompts whose values are the first numbers of their keys.

        Args:
          k_BTKH: Keys of the prompts, their padding included.
          capacity: S, at least T.
          value_width: Numbers of a value.
        """
        return cls(_slots(k_BTKH, capacity, None), None, value_width=value_width)

    def append(
        self, k_BTKH: jax.Array, v_BTKH: jax.Array | None, positions_BT: jax.Array
    ) -> "KeyValueCache":
        """Returns the cache with T tokens more in each sequence.

        Args:
          k_BTKH: Keys of the new tokens.
          v_BTKH: Their values; None if the cache has none.
          positions_BT: Their positions, consecutive from positions_BT[:, 0].
        """
        first_B = positions_BT[:, 0]

        def write(slots_KSH: jax.Array, x_KTH: jax.Array, first: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice(slots_KSH, x_KTH, (0, self.num_memories + first, 0))

        def written(slots: jax.Array, x_BTKH: jax.Array) -> jax.Array:
            x_BKTH = x_BTKH.transpose(0, 2, 1, 3).astype(slots.dtype)
            if slots.ndim == 3:
                return _constrained(write(slots, x_BKTH[0], first_B[0]))
            return _constrained(jax.vmap(write)(slots, x_BKTH, first_B))

        values = self.values
        if values is not None:
            assert v_BTKH is not None
            values = written(values, v_BTKH)
        return dataclasses.replace(self, keys=written(self.keys, k_BTKH), values=values)

    def attend(self, q_BTNH: jax.Array, positions_BT: jax.Array, spec: AttentionSpec) -> jax.Array:
        """Returns attention to the cached tokens and memories, [B, T, N, H].

        Args:
          q_BTNH: Queries of the new tokens, whose keys are in the cache.
          positions_BT: Their positions.
          spec: Computation and masking of scores.
        """
        slots_1S = jnp.arange(self.keys.shape[-2])[None] - self.num_memories
        mask_BTS = spec.mask(positions_BT, slots_1S)
        if not spec.causal:  # slots beyond the new tokens hold anything
            mask_BTS = mask_BTS & (slots_1S <= positions_BT[:, -1:])[:, None]
        if self.num_memories:
            mask_BTS = mask_BTS | (slots_1S < 0)
        values = self.keys[..., : self.value_width] if self.values is None else self.values
        return attend_square(
            q_BTNH,
            self.keys,
            values,
            spec,
            TokenPairs(
                mask_BTS=mask_BTS,
                q_pos_BT=positions_BT,
                k_pos_BS=slots_1S,
                num_memories=self.num_memories,
            ),
        )

    @property
    def capacity(self) -> int:
        """S, the tokens that it has room for."""
        return self.keys.shape[-2] - self.num_memories

    def resize(self, capacity: int) -> "KeyValueCache":
        """Returns the cache with room for `capacity` tokens, at least as many as now."""
        spare = capacity - self.capacity

        def padded(slots: jax.Array) -> jax.Array:
            widths = [(0, 0)] * slots.ndim
            widths[-2] = (0, spare)
            return _constrained(jnp.pad(slots, widths))

        return jax.tree.map(padded, self)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlidingWindowCache:
    """The newest W tokens of each sequence in a ring buffer: position p is in slot p mod W.

    It does not grow. Keys are those after norms and rotary.
    """

    keys_BKWH: jax.Array
    values_BKWH: jax.Array

    @classmethod
    def from_prefill(
        cls, k_BTKH: jax.Array, v_BTKH: jax.Array, lengths_B: jax.Array, window: int
    ) -> "SlidingWindowCache":
        """Returns a cache with the last W tokens of prompts.

        Args:
          k_BTKH: Keys of the prompts, their padding included.
          v_BTKH: Values of the prompts.
          lengths_B: Tokens of each prompt.
          window: W.
        """
        positions_BW = _ring_positions(lengths_B, window)

        def ring(x_BTKH: jax.Array) -> jax.Array:
            newest_BWKH = jnp.take_along_axis(
                x_BTKH, jnp.maximum(positions_BW, 0)[:, :, None, None], axis=1
            )
            return _constrained(newest_BWKH.transpose(0, 2, 1, 3))

        return cls(ring(k_BTKH), ring(v_BTKH))

    def step(
        self,
        q_BTNH: jax.Array,
        k_BTKH: jax.Array,
        v_BTKH: jax.Array,
        positions_BT: jax.Array,
        spec: AttentionSpec,
    ) -> tuple[jax.Array, "SlidingWindowCache"]:
        """Attends from T new tokens, and appends them.

        Args:
          q_BTNH: Queries of the new tokens.
          k_BTKH: Their keys.
          v_BTKH: Their values.
          positions_BT: Their positions, consecutive.
          spec: Computation and masking of scores.

        Returns:
          The outputs [B, T, N, H], and the cache with the new tokens.
        """
        window = self.keys_BKWH.shape[2]
        length = positions_BT.shape[1]
        old_BW = _ring_positions(positions_BT[:, 0], window)
        positions_BS = jnp.concatenate([old_BW, positions_BT], axis=1)
        keys_BKSH = _concatenate_tokens(self.keys_BKWH, k_BTKH)
        values_BKSH = _concatenate_tokens(self.values_BKWH, v_BTKH)
        mask_BTS = spec.mask(positions_BT, positions_BS) & (positions_BS >= 0)[:, None]
        o_BTNH = attend_square(
            q_BTNH,
            keys_BKSH,
            values_BKSH,
            spec,
            TokenPairs(mask_BTS=mask_BTS, q_pos_BT=positions_BT, k_pos_BS=positions_BS),
        )
        new_BW = _ring_positions(positions_BT[:, -1] + 1, window)
        # New tokens stand behind the ring and overwrite their slots.
        first_B1 = positions_BT[:, :1]
        source_BW = jnp.where(
            new_BW >= first_B1, window + new_BW - first_B1, jnp.arange(window)[None]
        )
        index = jnp.minimum(source_BW, window + length - 1)[:, None, :, None]
        new_cache = SlidingWindowCache(
            keys_BKWH=_constrained(jnp.take_along_axis(keys_BKSH, index, axis=2)),
            values_BKWH=_constrained(jnp.take_along_axis(values_BKSH, index, axis=2)),
        )
        return o_BTNH, new_cache


def _slots(x_BTKH: jax.Array, capacity: int, memory_MKH: jax.Array | None) -> jax.Array:
    """Returns keys or values of prompts in slots, with room for `capacity` tokens."""
    x_BKTH = x_BTKH.transpose(0, 2, 1, 3)
    spare = capacity - x_BKTH.shape[2]
    x_BKSH = jnp.pad(x_BKTH, ((0, 0), (0, 0), (0, spare), (0, 0)))
    if memory_MKH is not None:
        x_BKSH = prepend_memories(memory_MKH, x_BKSH)
    return _constrained(drop_batch_of_one(x_BKSH))


def _concatenate_tokens(ring_BKWH: jax.Array, x_BTKH: jax.Array) -> jax.Array:
    """Returns a ring's tokens followed by new ones, [B, K, W + T, H]."""
    return jnp.concatenate(
        [ring_BKWH, x_BTKH.transpose(0, 2, 1, 3).astype(ring_BKWH.dtype)], axis=2
    )


def _ring_positions(lengths_B: jax.Array, window: int) -> jax.Array:
    """Returns each slot's position [B, W], negative if the slot is empty."""
    newest_B1 = lengths_B[:, None] - 1
    return newest_B1 - (newest_B1 - jnp.arange(window)[None]) % window


def _constrained(slots: jax.Array) -> jax.Array:
    return with_logical_constraint(slots, *_AXES[-slots.ndim :])


def capacity_of(states: object) -> int | None:
    """Returns the smallest `capacity` in a tree of decode states; None if none of them grows."""
    nodes = jax.tree.leaves(states, is_leaf=_can_grow)
    return min((node.capacity for node in nodes if _can_grow(node)), default=None)


def resize(states: States, capacity: int) -> States:
    """Returns decode states that grow with room for `capacity` tokens, the others as they are."""

    def resize_node(node: Any) -> Any:  # an array, or a state with `capacity`
        return node.resize(capacity) if _can_grow(node) else node

    return jax.tree.map(resize_node, states, is_leaf=_can_grow)


def _can_grow(node: object) -> bool:
    return hasattr(node, "capacity")  # NumPy's arrays have `resize`, too
