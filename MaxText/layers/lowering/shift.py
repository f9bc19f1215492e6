"""A shift along tokens that a mesh may split."""

import jax


def earlier_tokens(x_BT: jax.Array, distance: int) -> jax.Array:
    """Returns what is `distance` tokens earlier, [B, T, ...], and zeros before the first token.

    One pad with a negative end: where sequences are split over devices, XLA exchanges `distance`
    tokens between neighbors for it. For a slice and a concatenation it gathers the sequence.

    Args:
      x_BT: [B, T, ...].
      distance: Tokens.
    """
    distance = min(distance, x_BT.shape[1])
    widths = [(0, 0, 0), (distance, -distance, 0), *[(0, 0, 0)] * (x_BT.ndim - 2)]
    return jax.lax.pad(x_BT, x_BT.dtype.type(0), widths)
