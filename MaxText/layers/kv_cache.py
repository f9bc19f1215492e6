"""KV caches of attention; S slots, K key/value heads, W window."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from MaxText.layers.attention.attention_core import (
    AttentionSpec,
    PersistentKV,
    attend,
    prepend_memories,
)
from MaxText.parallelism.logical_sharding import with_logical_constraint

_AXES = ("activation_batch", "activation_kv_heads", None, "activation_kv")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KeyValueCache:
    """A cache with position s of the sequence in slot s.

    Slots beyond a sequence's length hold anything: a query sees only slots up to its own position.
    Memories, which every query sees, precede the slots. A batch of one has no dimension B: with it,
    XLA on CPU copies all slots twice per step, a third of the time of reading a small model.
    """

    keys: jax.Array  # [B, K, M + S, H] or [K, M + S, H], after norms and rotary
    values: jax.Array
    num_memories: int = dataclasses.field(default=0, metadata={"static": True})  # M

    @classmethod
    def from_prefill(
        cls,
        k_BTKH: jax.Array,
        v_BTKH: jax.Array,
        capacity: int,
        persistent_kv: PersistentKV | None = None,
    ) -> "KeyValueCache":
        """Returns a cache of `capacity` slots with the first T in use."""

        def slots(x_BTKH: jax.Array, memory_MKH: jax.Array | None) -> jax.Array:
            x_BKTH = x_BTKH.transpose(0, 2, 1, 3)
            spare = capacity - x_BKTH.shape[2]
            x_BKSH = jnp.pad(x_BKTH, ((0, 0), (0, 0), (0, spare), (0, 0)))
            if memory_MKH is not None:
                x_BKSH = prepend_memories(memory_MKH, x_BKSH)
            return _constrained(x_BKSH[0] if len(x_BKSH) == 1 else x_BKSH)

        keys, values = persistent_kv or (None, None)
        num_memories = 0 if keys is None else keys.shape[0]
        return cls(slots(k_BTKH, keys), slots(v_BTKH, values), num_memories)

    def append(
        self, k_BTKH: jax.Array, v_BTKH: jax.Array, positions_BT: jax.Array
    ) -> "KeyValueCache":
        """Appends T tokens to each sequence, consecutive from positions_BT[:, 0]."""
        first_B = positions_BT[:, 0]

        def write(slots_KSH, x_KTH, first):
            return jax.lax.dynamic_update_slice(slots_KSH, x_KTH, (0, self.num_memories + first, 0))

        def written(slots: jax.Array, x_BTKH: jax.Array) -> jax.Array:
            x_BKTH = x_BTKH.transpose(0, 2, 1, 3).astype(slots.dtype)
            if slots.ndim == 3:
                return _constrained(write(slots, x_BKTH[0], first_B[0]))
            return _constrained(jax.vmap(write)(slots, x_BKTH, first_B))

        return dataclasses.replace(
            self, keys=written(self.keys, k_BTKH), values=written(self.values, v_BTKH)
        )

    def attend(self, q_BTNH: jax.Array, positions_BT: jax.Array, spec: AttentionSpec) -> jax.Array:
        slots = jnp.arange(self.keys.shape[-2]) - self.num_memories
        distance_BTS = positions_BT[:, :, None] - slots
        mask_BTS = spec.visible(distance_BTS)
        if self.num_memories:
            mask_BTS = mask_BTS | (slots < 0)
            distance_BTS = jnp.where(slots < 0, 0, distance_BTS)
        return attend(q_BTNH, self.keys, self.values, mask_BTS, distance_BTS, spec)

    @property
    def capacity(self) -> int:
        return self.keys.shape[-2] - self.num_memories

    def resize(self, capacity: int) -> "KeyValueCache":
        spare = capacity - self.capacity

        def padded(slots: jax.Array) -> jax.Array:
            widths = [(0, 0)] * slots.ndim
            widths[-2] = (0, spare)
            return _constrained(jnp.pad(slots, widths))

        return jax.tree.map(padded, self)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlidingWindowCache:
    """The newest W tokens in a ring buffer: position p is in slot p mod W."""

    keys_BKWH: jax.Array
    values_BKWH: jax.Array

    @classmethod
    def from_prefill(
        cls, k_BTKH: jax.Array, v_BTKH: jax.Array, lengths_B: jax.Array, window: int
    ) -> "SlidingWindowCache":
        positions_BW = _ring_positions(lengths_B, window)

        def ring(x_BTKH: jax.Array) -> jax.Array:
            found = jnp.take_along_axis(
                x_BTKH, jnp.maximum(positions_BW, 0)[:, :, None, None], axis=1
            )
            return _constrained(found.transpose(0, 2, 1, 3))

        return cls(ring(k_BTKH), ring(v_BTKH))

    def step(
        self,
        q_BTNH: jax.Array,
        k_BTKH: jax.Array,
        v_BTKH: jax.Array,
        positions_BT: jax.Array,
        spec: AttentionSpec,
    ) -> tuple[jax.Array, "SlidingWindowCache"]:
        """Attends from T new tokens, and returns the cache with them."""
        window = self.keys_BKWH.shape[2]
        length = positions_BT.shape[1]
        old_BW = _ring_positions(positions_BT[:, 0], window)
        positions_BS = jnp.concatenate([old_BW, positions_BT], axis=1)
        keys, values = (
            jnp.concatenate([ring, x.transpose(0, 2, 1, 3).astype(ring.dtype)], axis=2)
            for ring, x in ((self.keys_BKWH, k_BTKH), (self.values_BKWH, v_BTKH))
        )
        distance_BTS = positions_BT[:, :, None] - positions_BS[:, None, :]
        mask_BTS = spec.visible(distance_BTS) & (positions_BS >= 0)[:, None]
        o_BTNH = attend(q_BTNH, keys, values, mask_BTS, distance_BTS, spec)
        new_BW = _ring_positions(positions_BT[:, -1] + 1, window)
        # New tokens stand behind the ring and overwrite their slots.
        first_B1 = positions_BT[:, :1]
        source_BW = jnp.where(
            new_BW >= first_B1, window + new_BW - first_B1, jnp.arange(window)[None]
        )
        index = jnp.minimum(source_BW, window + length - 1)[:, None, :, None]
        rings = (_constrained(jnp.take_along_axis(x, index, axis=2)) for x in (keys, values))
        return o_BTNH, SlidingWindowCache(*rings)


def _ring_positions(lengths_B: jax.Array, window: int) -> jax.Array:
    """Returns each slot's position [B, W], negative if the slot is empty."""
    newest_B1 = lengths_B[:, None] - 1
    return newest_B1 - (newest_B1 - jnp.arange(window)[None]) % window


def _constrained(slots: jax.Array) -> jax.Array:
    return with_logical_constraint(slots, *_AXES[-slots.ndim :])


def capacity_of(states: Any) -> int | None:
    """Returns the smallest `capacity` in a decode state; None if it has none."""
    nodes = jax.tree.leaves(states, is_leaf=_can_grow)
    return min((node.capacity for node in nodes if _can_grow(node)), default=None)


def resize(states: Any, capacity: int) -> Any:
    def grown(node: Any) -> Any:
        return node.resize(capacity) if _can_grow(node) else node

    return jax.tree.map(grown, states, is_leaf=_can_grow)


def _can_grow(node: Any) -> bool:
    return hasattr(node, "capacity")  # NumPy's arrays have `resize`, too
