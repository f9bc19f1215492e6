"""Dropout (Srivastava et al. 2014) and drop path (Huang et al. 2016).

Both divide what they keep by the probability of keeping it, so that evaluation, which drops
nothing, needs no scaling.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Returns x with each element zeroed with probability `rate`.

    Args:
      x: Any array.
      rate: Probability of dropping an element.
      key: RNG key; None drops nothing.
    """
    if key is None or rate == 0.0:
        return x
    keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), 0).astype(x.dtype)


class Dropout(NamedTuple):
    """A dropout rate with its RNG key."""

    rate: float = 0.0
    key: jax.Array | None = None  # None drops nothing

    @property
    def is_active(self) -> bool:
        """Whether it drops anything."""
        return self.rate > 0 and self.key is not None

    def apply(self, x: jax.Array) -> jax.Array:
        """Returns `dropout` of x."""
        return dropout(x, self.rate, self.key)

    def fold_in(self, index: int) -> "Dropout":
        """Returns the same dropout with the key of one of several parts."""
        if self.key is None:
            return self
        return self._replace(key=jax.random.fold_in(self.key, index))


NO_DROPOUT = Dropout()


def drop_path(x_BTD: jax.Array, rate: float | jax.Array, key: jax.Array) -> jax.Array:
    """Returns x with each sequence zeroed with probability `rate` (Huang et al. 2016)."""
    keep_B11 = jax.random.bernoulli(key, 1.0 - rate, (x_BTD.shape[0], 1, 1))
    return jnp.where(keep_B11, x_BTD / (1.0 - rate), 0).astype(x_BTD.dtype)
