"""Rotary position embedding (Su et al. 2021), halves convention.

Dimension i of the R rotary ones pairs with i + R/2, as in GPT-NeoX and Hugging Face's Llama.

Legend: B sequences, T tokens, N heads, H head_dim, R rotary dimensions.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from MaxText.config.layer_sections import PositionConfig
from MaxText.config.model_sections import ModelConfig
from MaxText.config.registry import register
from MaxText.layers.lowering.rounding import round_to
from MaxText.layers.lowering.tpu_rotary import apply_rotary_tpu
from MaxText.layers.part import Init, MixerPositions, Position
from MaxText.parallelism.logical_sharding import platform


@register("position", "rotary")
class Rotary(Position):
    """Rotates queries and keys by angles proportional to the position."""

    def __init__(self, config: ModelConfig, init: Init, rngs: nnx.Rngs):
        self.config = config.position
        self.num_dims = int(init.dimensions.head_dim * config.position.rotary_pct)

    def for_mixers(self, positions_BT: jax.Array) -> MixerPositions:
        """Returns the rotary table of the positions."""
        return {"rotary": rotary_table(positions_BT, self.num_dims, self.config)}


def rotary_table(
    positions_BT: jax.Array, num_dims: int, config: PositionConfig
) -> tuple[jax.Array, jax.Array]:
    """Returns sin and cos of position * frequency, float32 [B, T, 1, R/2].

    rope_type=yarn multiplies both by 0.1 ln(rope_factor) + 1 (Peng et al. 2023, section 3.4).

    Args:
      positions_BT: Positions of the tokens within their documents; B may be 1.
      num_dims: R, the rotary dimensions of a head.
      config: Frequencies, and the dtype that the table is rounded to.
    """
    angles = positions_BT[:, :, None, None].astype(jnp.float32) * frequencies(num_dims, config)
    sin = jnp.sin(angles)
    cos = jnp.cos(angles)
    if config.rope_type == "yarn":
        factor = 0.1 * math.log(config.rope_factor) + 1.0
        sin = factor * sin
        cos = factor * cos
    if config.rope_table_dtype != "float32":
        sin, cos = round_to((sin, cos), config.rope_table_dtype)
    return sin, cos


def frequencies(num_dims: int, config: PositionConfig) -> jax.Array | np.ndarray:
    """Returns radians per token of each pair of dimensions, float32 [R/2].

    default   f_i = theta^(-2i/R)
    linear    f_i / s with s = rope_factor (Chen et al. 2023)
    llama3.1  f_i for pairs that turn high_freq_factor times or more in the original length,
              f_i / s below low_freq_factor times, interpolated between (Grattafiori 2024)
    yarn      interpolated by i between pairs that turn beta_fast and beta_slow times
              (Peng et al. 2023, section 3.2)

    Args:
      num_dims: R, the rotary dimensions of a head.
      config: rope_type and its constants; theta is rope_max_timescale.
    """
    theta = config.rope_max_timescale
    factor = config.rope_factor
    if config.rope_type == "default":
        # By XLA: NumPy's power differs in the last bit, which would change existing runs.
        exponents = jnp.arange(0, num_dims, 2, dtype=jnp.float32) / num_dims
        return 1.0 / (theta**exponents)
    plain = theta ** -(np.arange(0, num_dims, 2) / num_dims)
    original_length = config.original_max_position_embeddings
    if config.rope_type == "linear":
        share_unscaled = np.zeros_like(plain)
    elif config.rope_type == "llama3.1":
        turns = original_length * plain / (2 * math.pi)
        low = config.low_freq_factor
        high = config.high_freq_factor
        share_unscaled = np.clip((turns - low) / (high - low), 0, 1)
    else:

        def pair_that_turns(times: float) -> float:
            """Returns which pair turns this often in the original length."""
            return (
                num_dims * math.log(original_length / (times * 2 * math.pi)) / (2 * math.log(theta))
            )

        low = max(math.floor(pair_that_turns(config.beta_fast)), 0)
        high = min(math.ceil(pair_that_turns(config.beta_slow)), num_dims - 1)
        # Both on one pair would divide by zero; 0.001 is the authors' choice.
        width = max(high - low, 0.001)
        share_unscaled = 1 - np.clip((np.arange(num_dims // 2) - low) / width, 0, 1)
    scaled = share_unscaled * plain + (1 - share_unscaled) * plain / factor
    return scaled.astype(np.float32)


def apply_rotary(x_BTNH: jax.Array, table: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Returns queries or keys with the first R dimensions of each head rotated.

    Pair (i, i + R/2) turns by its angle: (a, b) becomes (a cos - b sin, b cos + a sin) (Su et al.
    2021, equation 34). Computed in float32, returned in the dtype of x.

    Args:
      x_BTNH: Queries or keys.
      table: sin and cos, float32 [B or 1, T, 1, R/2]; their size says R.
    """
    if platform() == "tpu":
        return apply_rotary_tpu(x_BTNH, *table)
    sin, cos = table
    half = sin.shape[-1]
    x_float = x_BTNH[..., : 2 * half].astype(jnp.float32)
    first = x_float[..., :half]
    second = x_float[..., half:]
    rotated = jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    ).astype(x_BTNH.dtype)
    if 2 * half == x_BTNH.shape[-1]:
        return rotated
    return jnp.concatenate([rotated, x_BTNH[..., 2 * half :]], axis=-1)
