"""Static SGU: a sum over earlier tokens with fixed weights, in place of attention.

fattorib/transformer's form of the spatial gating unit (Liu et al. 2021):

    y_t = sum_d x_(t-d) / (d+2), for distances d from 0 to `kernel`

It has no parameters, and no gradient goes through its input.

Legend: B sequences, T tokens, E channels, P places before the tokens.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NewestInputs:
    """What the sum keeps of earlier tokens: the `kernel` newest ones, in their order.

    Attributes:
      x_BPE: zeros stand for tokens that there are not.
    """

    x_BPE: jax.Array

    @classmethod
    def of_prompt(cls, x_BTE: jax.Array, lengths_B: jax.Array, kernel: int) -> "NewestInputs":
        """Of the first `lengths_B` tokens of each row."""
        places_BP = lengths_B[:, None] - kernel + jnp.arange(kernel)[None]
        found = jnp.take_along_axis(x_BTE, jnp.maximum(places_BP, 0)[..., None], axis=1)
        return cls(jnp.where((places_BP >= 0)[..., None], found, 0))

    def step(
        self, x_BTE: jax.Array, kernel: int, precision: str | None = None
    ) -> tuple[jax.Array, "NewestInputs"]:
        """The sums of T new tokens, and what is kept after them."""
        x_BSE = jnp.concatenate([self.x_BPE, x_BTE], axis=1)
        weights = _band(x_BTE.shape[1], x_BSE.shape[1], kernel, kernel)
        y_BTE = _product(jnp.asarray(weights), x_BSE, precision).astype(x_BTE.dtype)
        return y_BTE, NewestInputs(x_BSE[:, x_BSE.shape[1] - kernel :])


def static_sgu(
    x_BTE: jax.Array,
    kernel: int,
    segments_BT: jax.Array | None = None,
    precision: str | None = None,
) -> jax.Array:
    """sum_d x_(t-d) / (d + 2) within segments, d from 0 to `kernel`: [B, T, E].

    Blocks of tokens are multiplied with a band matrix, O(T kernel).
    """
    batch, length, channels = x_BTE.shape
    rows, num_blocks = sgu_blocks(kernel, length)
    spare = num_blocks * rows - length

    def with_places_before(x: jax.Array) -> jax.Array:
        """[B, blocks, kernel + rows, ...]."""
        x = jnp.pad(x, ((0, 0), (kernel, spare), *((0, 0),) * (x.ndim - 2)))
        starts = np.arange(num_blocks)[:, None] * rows + np.arange(kernel + rows)[None]
        return x[:, starts]

    weights = jnp.asarray(_band(rows, kernel + rows, kernel, kernel))
    if segments_BT is not None:
        of_inputs = with_places_before(segments_BT)
        same = of_inputs[:, :, kernel:, None] == of_inputs[:, :, None, :]
        weights = jnp.where(same, weights, 0.0)
    y = _product(weights, with_places_before(x_BTE), precision)
    return y.reshape(batch, num_blocks * rows, channels)[:, :length].astype(x_BTE.dtype)


def sgu_blocks(kernel: int, length: int) -> tuple[int, int]:
    """Tokens of a block, and number of blocks."""
    rows = min(max(kernel, 16), length)
    return rows, -(-length // rows)


def _product(weights: jax.Array, x: jax.Array, precision: str | None) -> jax.Array:
    return jnp.einsum(
        "...ts,...se->...te", weights.astype(x.dtype), x,
        preferred_element_type=jnp.float32, precision=precision,
    )  # fmt: skip


def _band(rows: int, columns: int, behind: int, kernel: int) -> np.ndarray:
    """Float32 [rows, columns]: row t sums the columns up to its own, t + behind."""
    distance = np.arange(rows)[:, None] + behind - np.arange(columns)[None]
    inside = (distance >= 0) & (distance <= kernel)
    return np.where(inside, 1.0 / (np.maximum(distance, 0) + 2.0), 0.0).astype(np.float32)
