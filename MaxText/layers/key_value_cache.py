"""Keys and values of earlier tokens: what attention keeps of them while text is generated.

Legend: B sequences, T new tokens, S slots, K key/value heads, H head_dim.
"""

import dataclasses

import jax
import jax.numpy as jnp

from MaxText.parallelism.constraints import constrain

_AXES = ("activation_batch", "activation_kv_heads", None, "activation_kv")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KeyValueCache:
    """Slot s of a row holds the token at position s of that row.

    Rows need not be equally long: a slot at or beyond a row's length holds anything, which no query
    sees, because a query sees only slots up to its own position.

    A batch of one row has no dimension B: with it, the compiler for CPUs copies the slots twice in
    every step, a third of the time that reading the weights of a small model takes.

    Attributes:
      keys: [B, K, S, H] or [K, S, H], after norms and rotary.
      values: as projected.
    """

    keys: jax.Array
    values: jax.Array

    @classmethod
    def of_prompt(cls, k_BTKH: jax.Array, v_BTKH: jax.Array, capacity: int) -> "KeyValueCache":
        """A cache of `capacity` slots whose first T hold these."""

        def slots(x_BTKH: jax.Array) -> jax.Array:
            x_BKTH = x_BTKH.transpose(0, 2, 1, 3)
            spare = capacity - x_BKTH.shape[2]
            x_BKSH = jnp.pad(x_BKTH, ((0, 0), (0, 0), (0, spare), (0, 0)))
            return _constrained(x_BKSH[0] if len(x_BKSH) == 1 else x_BKSH)

        return cls(slots(k_BTKH), slots(v_BTKH))

    def append(
        self, k_BTKH: jax.Array, v_BTKH: jax.Array, positions_BT: jax.Array
    ) -> "KeyValueCache":
        """With T more tokens of each row, which follow each other from positions_BT[:, 0]."""
        first_B = positions_BT[:, 0]

        def write(slots_KSH, x_KTH, first):
            return jax.lax.dynamic_update_slice(slots_KSH, x_KTH, (0, first, 0))

        def written(slots: jax.Array, x_BTKH: jax.Array) -> jax.Array:
            x_BKTH = x_BTKH.transpose(0, 2, 1, 3).astype(slots.dtype)
            if slots.ndim == 3:
                return _constrained(write(slots, x_BKTH[0], first_B[0]))
            return _constrained(jax.vmap(write)(slots, x_BKTH, first_B))

        return KeyValueCache(written(self.keys, k_BTKH), written(self.values, v_BTKH))

    @property
    def capacity(self) -> int:
        """Slots of a row."""
        return self.keys.shape[-2]

    def with_capacity(self, capacity: int) -> "KeyValueCache":
        """With more slots."""
        spare = capacity - self.capacity

        def padded(slots: jax.Array) -> jax.Array:
            widths = [(0, 0)] * slots.ndim
            widths[-2] = (0, spare)
            return _constrained(jnp.pad(slots, widths))

        return jax.tree.map(padded, self)


def _constrained(slots: jax.Array) -> jax.Array:
    return constrain(slots, *_AXES[-slots.ndim :])
