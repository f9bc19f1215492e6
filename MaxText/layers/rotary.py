"""Rotary position embedding (Su et al. 2021).

Dimension i of the R rotary ones pairs with i + R/2, as in GPT-NeoX and Hugging Face's Llama, or
with rope_pairs=adjacent dimension 2i with 2i + 1, as in the paper.

Legend: B sequences, T tokens, N heads, H head_dim, R rotary dimensions.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from MaxText.config.layer_sections import PositionConfig
from MaxText.config.model_sections import LayerConfig, ModelConfig
from MaxText.config.registry import lookup, register
from MaxText.layers.lowering.rounding import round_to
from MaxText.layers.lowering.tpu_rotary import apply_rotary_tpu
from MaxText.layers.part import Init, MixerPositions, Position
from MaxText.parallelism.logical_sharding import platform


@register("position", "rotary")
class Rotary(Position):
    """Rotates queries and keys by angles proportional to the position."""

    def __init__(self, config: ModelConfig, init: Init, rngs: nnx.Rngs):
        self.config = config.position
        mixer = lookup("mixer", config.block.mixer)
        width = mixer.rotary_width(LayerConfig(config, init.dimensions))
        is_whole_head = config.position.rope_type == "proportional"
        self.num_dims = width if is_whole_head else int(width * config.position.rotary_pct)

    def for_mixers(self, positions_BT: jax.Array) -> MixerPositions:
        """Returns the rotary table of the positions, and the factors of queries."""
        table = rotary_table(positions_BT, self.num_dims, self.config)
        if self.config.temperature_tuning_beta == 0:
            return {"rotary": table}
        return {"rotary": table, "query_scale": query_scale(positions_BT, self.config)}


def query_scale(positions_BT: jax.Array, config: PositionConfig) -> jax.Array:
    """Returns 1 + beta ln(1 + floor(t / original length)) of positions t, float32 [B, T, 1, 1].

    It sharpens attention in long sequences (temperature tuning of Llama 4, Ministral 3).

    Args:
      positions_BT: Positions of the tokens within their documents; B may be 1.
      config: temperature_tuning_beta, and the original length.
    """
    num_lengths = positions_BT // config.original_max_position_embeddings
    scale_BT = 1.0 + config.temperature_tuning_beta * jnp.log1p(num_lengths.astype(jnp.float32))
    return scale_BT[:, :, None, None]


def rotary_table(
    positions_BT: jax.Array, num_dims: int, config: PositionConfig
) -> tuple[jax.Array, jax.Array]:
    """Returns sin and cos of position * frequency, float32 [B, T, 1, R/2].

    yarn and longrope multiply both by `attention_factor`. longrope takes the long factors for
    documents that are longer than the original length.

    Args:
      positions_BT: Positions of the tokens within their documents; B may be 1.
      num_dims: R, the rotary dimensions of a head.
      config: Frequencies, and the dtype that the table is rounded to.
    """
    positions_BT11 = positions_BT[:, :, None, None].astype(jnp.float32)
    rates = frequencies(num_dims, config)
    if config.rope_type == "longrope":
        is_long_BT = last_positions(positions_BT) >= config.original_max_position_embeddings
        long_rates = frequencies(num_dims, config, is_long=True)
        rates = jnp.where(is_long_BT[:, :, None, None], long_rates, rates)
    angles = positions_BT11 * rates
    sin = jnp.sin(angles)
    cos = jnp.cos(angles)
    if config.rope_type in ("yarn", "longrope"):
        factor = attention_factor(config)
        sin = factor * sin
        cos = factor * cos
    if config.rope_table_dtype != "float32":
        sin, cos = round_to((sin, cos), config.rope_table_dtype)
    return sin, cos


def last_positions(positions_BT: jax.Array) -> jax.Array:
    """Returns the position of the last token of each token's document, int32 [B, T].

    Args:
      positions_BT: Positions of the tokens within their documents, consecutive in each.
    """
    length = positions_BT.shape[1]
    offsets_T = jnp.arange(length)
    has_next_BT = positions_BT[:, 1:] == positions_BT[:, :-1] + 1
    ends_BT = jnp.where(jnp.pad(has_next_BT, ((0, 0), (0, 1))), length, offsets_T)
    next_ends_BT = jax.lax.cummin(ends_BT, axis=1, reverse=True)
    return positions_BT + next_ends_BT - offsets_T


def attention_factor(config: PositionConfig) -> float:
    """Returns the factor of sines and cosines of yarn and longrope.

    rope_attention_factor if it is given; else 0.1 ln(s) + 1 of yarn (Peng et al. 2023, section 3.4)
    or sqrt(1 + ln(s) / ln(original length)) of longrope (Ding et al. 2024, equation 9), with s =
    rope_factor.
    """
    if config.rope_attention_factor is not None:
        return config.rope_attention_factor
    log_factor = math.log(config.rope_factor)
    if config.rope_type == "yarn":
        return 0.1 * log_factor + 1.0
    return math.sqrt(1.0 + log_factor / math.log(config.original_max_position_embeddings))


def frequencies(
    num_dims: int, config: PositionConfig, *, is_long: bool = False
) -> jax.Array | np.ndarray:
    """Returns radians per token of each pair of dimensions, float32 [R/2].

    default   f_i = theta^(-2i/R)
    linear    f_i / s with s = rope_factor (Chen et al. 2023)
    llama3.1  f_i for pairs that turn high_freq_factor times or more in the original length,
              f_i / s below low_freq_factor times, interpolated between (Grattafiori 2024)
    yarn      interpolated by i between pairs that turn beta_fast and beta_slow times
              (Peng et al. 2023, section 3.2)
    longrope  f_i / s_i with a factor of its own for each pair (Ding et al. 2024)
    proportional  f_i for the first p R/2 pairs with p = rotary_pct, 0 for the others

    Args:
      num_dims: R, the rotary dimensions of a head.
      config: rope_type and its constants; theta is rope_max_timescale.
      is_long: Whether longrope's factors are those of long sequences.
    """
    theta = config.rope_max_timescale
    factor = config.rope_factor
    if config.rope_type == "default":
        # By XLA: NumPy's power differs in the last bit, which would change existing runs.
        exponents = jnp.arange(0, num_dims, 2, dtype=jnp.float32) / num_dims
        return 1.0 / (theta**exponents)
    plain = theta ** -(np.arange(0, num_dims, 2) / num_dims)
    original_length = config.original_max_position_embeddings
    if config.rope_type == "proportional":
        num_turning = int(num_dims * config.rotary_pct) // 2
        return np.where(np.arange(num_dims // 2) < num_turning, plain, 0.0).astype(np.float32)
    if config.rope_type == "longrope":
        factors = config.rope_long_factors if is_long else config.rope_short_factors
        return (plain / np.array(factors)).astype(np.float32)
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

        low = pair_that_turns(config.beta_fast)
        high = pair_that_turns(config.beta_slow)
        if config.rope_truncate:
            low = math.floor(low)
            high = math.ceil(high)
        low = max(low, 0)
        high = min(high, num_dims - 1)
        # Both on one pair would divide by zero; 0.001 is the authors' choice.
        width = max(high - low, 0.001)
        share_unscaled = 1 - np.clip((np.arange(num_dims // 2) - low) / width, 0, 1)
    scaled = share_unscaled * plain + (1 - share_unscaled) * plain / factor
    return scaled.astype(np.float32)


def apply_rotary(
    x_BTNH: jax.Array, table: tuple[jax.Array, jax.Array], *, adjacent: bool = False
) -> jax.Array:
    """Returns queries or keys with the first R dimensions of each head rotated.

    Pair (i, i + R/2) turns by its angle: (a, b) becomes (a cos - b sin, b cos + a sin) (Su et al.
    2021, equation 34). Computed in float32, returned in the dtype of x.

    Args:
      x_BTNH: Queries or keys.
      table: sin and cos, float32 [B or 1, T, 1, R/2]; their size says R.
      adjacent: Whether pairs are (2i, 2i + 1) instead.
    """
    if platform() == "tpu":
        return apply_rotary_tpu(x_BTNH, *table, adjacent)
    sin, cos = table
    half = sin.shape[-1]
    x_float = x_BTNH[..., : 2 * half].astype(jnp.float32)
    if adjacent:
        first = x_float[..., 0::2]
        second = x_float[..., 1::2]
    else:
        first = x_float[..., :half]
        second = x_float[..., half:]
    pair = [first * cos - second * sin, second * cos + first * sin]
    if adjacent:
        rotated = jnp.stack(pair, axis=-1).reshape(x_float.shape)
    else:
        rotated = jnp.concatenate(pair, axis=-1)
    rotated = rotated.astype(x_BTNH.dtype)
    if 2 * half == x_BTNH.shape[-1]:
        return rotated
    return jnp.concatenate([rotated, x_BTNH[..., 2 * half :]], axis=-1)
