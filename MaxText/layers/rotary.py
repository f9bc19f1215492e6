"""Rotary position embedding (Su et al. 2021, equation 34), halves convention.

Dimension i of the turned part pairs with i + R/2, as in GPT-NeoX and Hugging Face's Llama.
Legend: B sequences, T tokens, N heads, H head_dim, R turned dimensions.
"""

import jax
import jax.numpy as jnp


def rotary_table(
    positions_BT: jax.Array, num_dims: int, max_timescale: float
) -> tuple[jax.Array, jax.Array]:
    """sin and cos of position * theta^(-2i/R), each float32 [B, T, 1, R/2]."""
    exponents = jnp.arange(0, num_dims, 2, dtype=jnp.float32) / num_dims
    frequencies = 1.0 / (max_timescale**exponents)
    angles = positions_BT[:, :, None, None].astype(jnp.float32) * frequencies
    return jnp.sin(angles), jnp.cos(angles)


def rotate(x_BTNH: jax.Array, table: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turns the first R dimensions of each head; R is twice the table's last size."""
    sin, cos = table
    half = sin.shape[-1]
    x_float = x_BTNH[..., : 2 * half].astype(jnp.float32)
    first, second = x_float[..., :half], x_float[..., half:]
    turned = jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    ).astype(x_BTNH.dtype)
    if 2 * half == x_BTNH.shape[-1]:
        return turned
    return jnp.concatenate([turned, x_BTNH[..., 2 * half :]], axis=-1)
