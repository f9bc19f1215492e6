"""Rotary position embedding (Su et al. 2021), halves convention.

Dimension i of the R rotary ones pairs with i + R/2, as in GPT-NeoX and Hugging Face's Llama.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from MaxText.config.layer_sections import PositionConfig
from MaxText.config.model_sections import ModelConfig
from MaxText.config.registry import register
from MaxText.layers.part import Init, Position
from MaxText.parallelism.logical_sharding import platform


@register("position", "rotary")
class Rotary(Position):
    """Rotates queries and keys by angles proportional to the position."""

    def __init__(self, config: ModelConfig, init: Init, rngs: nnx.Rngs):
        self.config = config.position
        self.num_dims = int(init.dimensions.head_dim * config.position.rotary_pct)

    def for_mixers(self, positions_BT: jax.Array) -> dict[str, Any]:
        return {"rotary": rotary_table(positions_BT, self.num_dims, self.config)}


def rotary_table(
    positions_BT: jax.Array, num_dims: int, config: PositionConfig
) -> tuple[jax.Array, jax.Array]:
    """Returns sin and cos of position * frequency, float32 [B, T, 1, R/2].

    rope_type=yarn multiplies both by 0.1 ln(rope_factor) + 1 (Peng et al. 2023, section 3.4).
    """
    angles = positions_BT[:, :, None, None].astype(jnp.float32) * frequencies(num_dims, config)
    sin = jnp.sin(angles)
    cos = jnp.cos(angles)
    if config.rope_type == "yarn":
        factor = 0.1 * math.log(config.rope_factor) + 1.0
        sin = factor * sin
        cos = factor * cos
    if config.rope_table_dtype != "float32":
        # Without the barrier XLA may drop the rounding, as the cast back undoes it at once.
        rounded = jax.lax.optimization_barrier(
            (sin.astype(config.rope_table_dtype), cos.astype(config.rope_table_dtype))
        )
        sin, cos = (table.astype(jnp.float32) for table in rounded)
    return sin, cos


def frequencies(num_dims: int, config: PositionConfig) -> jax.Array | np.ndarray:
    """Returns radians per token of each pair of dimensions, float32 [R/2].

    default   f_i = theta^(-2i/R)
    linear    f_i / s with s = rope_factor (Chen et al. 2023)
    llama3.1  f_i for pairs that turn high_freq_factor times or more in the original length,
              f_i / s below low_freq_factor times, interpolated between (Grattafiori 2024)
    yarn      interpolated by i between pairs that turn beta_fast and beta_slow times
              (Peng et al. 2023, section 3.2)
    """
    theta = config.rope_max_timescale
    factor = config.rope_factor
    if config.rope_type == "default":
        # By XLA: NumPy's power differs in the last bit, which would change existing runs.
        exponents = jnp.arange(0, num_dims, 2, dtype=jnp.float32) / num_dims
        return 1.0 / (theta**exponents)
    plain = theta ** -(np.arange(0, num_dims, 2) / num_dims)
    first_length = config.original_max_position_embeddings
    if config.rope_type == "linear":
        kept = np.zeros_like(plain)
    elif config.rope_type == "llama3.1":
        turns = first_length * plain / (2 * math.pi)
        low = config.low_freq_factor
        high = config.high_freq_factor
        kept = np.clip((turns - low) / (high - low), 0, 1)
    else:

        def pair_that_turns(times: float) -> float:
            return num_dims * math.log(first_length / (times * 2 * math.pi)) / (2 * math.log(theta))

        low = max(math.floor(pair_that_turns(config.beta_fast)), 0)
        high = min(math.ceil(pair_that_turns(config.beta_slow)), num_dims - 1)
        # Both on one pair would divide by zero; 0.001 is the authors' choice.
        width = max(high - low, 0.001)
        kept = 1 - np.clip((np.arange(num_dims // 2) - low) / width, 0, 1)
    return (kept * plain + (1 - kept) * plain / factor).astype(np.float32)


def apply_rotary(x_BTNH: jax.Array, table: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates the first R dimensions of each head (R/2 is the table's size)."""
    if platform() == "tpu":
        return apply_rotary_tpu(x_BTNH, *table)
    sin, cos = table
    half = sin.shape[-1]
    x_float = x_BTNH[..., : 2 * half].astype(jnp.float32)
    first = x_float[..., :half]
    second = x_float[..., half:]
    turned = jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    ).astype(x_BTNH.dtype)
    if 2 * half == x_BTNH.shape[-1]:
        return turned
    return jnp.concatenate([turned, x_BTNH[..., 2 * half :]], axis=-1)


@jax.custom_vjp
def apply_rotary_tpu(x_BTNH: jax.Array, sin: jax.Array, cos: jax.Array) -> jax.Array:
    """Rotates on TPU: y = x cos + swapped(x) sin.

    TPUs pad 64 lanes to 128, and XLA would write halves to memory, in the backward pass in float32.
    The table gets no gradient.
    """
    rest = x_BTNH.shape[-1] - 2 * sin.shape[-1]
    whole_cos = _join_halves([cos, cos], rest, 1.0)
    whole_sin = _join_halves([-sin, sin], rest, 0.0)
    swapped_BTNH = _swap_halves(x_BTNH, sin.shape[-1])
    y_BTNH = x_BTNH.astype(jnp.float32) * whole_cos + swapped_BTNH.astype(jnp.float32) * whole_sin
    return y_BTNH.astype(x_BTNH.dtype)


def _rotate_backward(table, grad_y_BTNH):
    sin, cos = table
    return apply_rotary_tpu(grad_y_BTNH, -sin, cos), None, None


apply_rotary_tpu.defvjp(lambda x, *table: (apply_rotary_tpu(x, *table), table), _rotate_backward)


def _join_halves(halves: list[jax.Array], rest: int, fill: float) -> jax.Array:
    shape = (*halves[0].shape[:-1], rest)
    return jnp.concatenate([*halves, jnp.full(shape, fill, halves[0].dtype)], axis=-1)


def _swap_halves(x_BTNH: jax.Array, half: int) -> jax.Array:
    if x_BTNH.dtype != jnp.bfloat16:
        halves = [x_BTNH[..., half : 2 * half], x_BTNH[..., :half], x_BTNH[..., 2 * half :]]
        return jnp.concatenate(halves, axis=-1)
    # Swaps both halves by a matmul, which is exact in bfloat16 and fused with its neighbors.
    H = x_BTNH.shape[-1]
    # From iota: a constant would be saved for the backward pass as an array.
    row_HH, column_HH = (jax.lax.broadcasted_iota(jnp.int32, (H, H), axis) for axis in (0, 1))
    other_HH = jnp.where(row_HH < half, row_HH + half, row_HH - half)
    permutation_HH = (row_HH < 2 * half) & (column_HH == other_HH)
    return jnp.einsum("btnh,hk->btnk", x_BTNH, permutation_HH.astype(x_BTNH.dtype))
