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

    Attributes:
      keys_BKSH: after norms and rotary.
      values_BKSH: as projected.
    """

    keys_BKSH: jax.Array
    values_BKSH: jax.Array

    @classmethod
    def of_prompt(cls, k_BTKH: jax.Array, v_BTKH: jax.Array, capacity: int) -> "KeyValueCache":
        """A cache of `capacity` slots whose first T hold these."""

        def slots(x_BTKH: jax.Array) -> jax.Array:
            x_BKTH = x_BTKH.transpose(0, 2, 1, 3)
            spare = capacity - x_BKTH.shape[2]
            return constrain(jnp.pad(x_BKTH, ((0, 0), (0, 0), (0, spare), (0, 0))), *_AXES)

        return cls(slots(k_BTKH), slots(v_BTKH))

    def append(
        self, k_BTKH: jax.Array, v_BTKH: jax.Array, positions_BT: jax.Array
    ) -> "KeyValueCache":
        """With T more tokens of each row, which follow each other from positions_BT[:, 0]."""

        def write(slots_KSH, x_KTH, first):
            return jax.lax.dynamic_update_slice(slots_KSH, x_KTH, (0, first, 0))

        def written(slots_BKSH: jax.Array, x_BTKH: jax.Array) -> jax.Array:
            x_BKTH = x_BTKH.transpose(0, 2, 1, 3).astype(slots_BKSH.dtype)
            return constrain(jax.vmap(write)(slots_BKSH, x_BKTH, positions_BT[:, 0]), *_AXES)

        return KeyValueCache(written(self.keys_BKSH, k_BTKH), written(self.values_BKSH, v_BTKH))

    @property
    def capacity(self) -> int:
        """Slots of a row."""
        return self.keys_BKSH.shape[2]

    def with_capacity(self, capacity: int) -> "KeyValueCache":
        """With more slots."""
        spare = capacity - self.capacity
        return jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, spare), (0, 0))), self)
