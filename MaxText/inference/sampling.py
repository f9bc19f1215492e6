"""Sampling of the next token: greedy, or from a filtered distribution.

Applied in this order; disabled steps are not compiled: repetition penalty, temperature, softmax or
entmax, top_k, nucleus, min_p, typical, eta. Each filter sees the distribution renormalized after
the previous ones, as in transformers, with two differences: ids tied with the last kept one are
kept, so that vocabulary order does not matter, and thresholds have a relative tolerance of 1e-6,
because 0.38 + 0.35 can be less than 0.73 in float32. Mass filters bisect the float32 range 31 times
for their exact threshold, in a twentieth of the time of a sort on CPU.

B sequences, V vocab_size.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from MaxText.errors import UserError
from MaxText.layers.entmax import entmax

_SLACK = 1e-6  # relative tolerance for float32 sums of probabilities
_BITS_OF_INFINITY = 0x7F800000


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Sampling settings. The defaults sample from the model's softmax."""

    temperature: float = 1.0  # divides the logits; 0 is argmax, with the lowest id among ties
    top_k: int = 0  # 0 is off
    # Smallest set of most likely ids with this probability (Holtzman et al. 2020, "top-p").
    nucleus_p: float = 1.0
    # Ids with at least this fraction of the largest probability (Nguyen et al. 2024).
    min_p: float = 0.0
    # Smallest set with this probability, of the ids whose surprisal -log p is nearest to the
    # entropy (Meister et al. 2023).
    typical_p: float = 1.0
    # Ids with p >= min(eta, sqrt(eta) exp(-entropy)), and the argmax (Hewitt et al. 2022).
    eta: float = 0.0
    entmax_alpha: float = 1.0  # 1 is softmax, 2 sparsemax (Peters et al. 2019); GPT-Neo has 1.3
    # Divides positive logits of ids in the sequence, multiplies negative ones (Keskar et al. 2019).
    repetition_penalty: float = 1.0

    def __post_init__(self):
        """Raises UserError for values out of range, including NaN."""
        for name, valid, bounds in (
            ("temperature", 0 <= self.temperature <= 1e6, "from 0 (greedy) to 1e6"),
            ("top_k", self.top_k >= 0, "0 (off) or a number of ids"),
            ("nucleus_p", 0 < self.nucleus_p <= 1, "above 0, up to 1 (off)"),
            ("min_p", 0 <= self.min_p <= 1, "from 0 (off) to 1"),
            ("typical_p", 0 < self.typical_p <= 1, "above 0, up to 1 (off)"),
            ("eta", 0 <= self.eta < 1, "from 0 (off), below 1"),
            ("entmax_alpha", 1 <= self.entmax_alpha <= 2, "from 1 (softmax) to 2 (sparsemax)"),
            ("repetition_penalty", 0 < self.repetition_penalty <= 1e6, "above 0, up to 1e6"),
        ):
            if not valid:
                raise UserError(f"{name} is {getattr(self, name)}; it must be {bounds}.")


def sample(
    logits_BV: jax.Array,
    key_B: jax.Array,
    params: SamplingParams,
    generated_BV: jax.Array | None = None,
    *,
    num_ids: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Samples one id per sequence.

    Args:
      logits_BV: Of any floating dtype.
      key_B: One key per sequence, so that a draw does not depend on its batch.
      params: Temperature, penalty and filters.
      generated_BV: bool, ids already in a sequence, for the repetition penalty.
      num_ids: Ids from here on are vocabulary padding and never sampled.

    Returns:
      token_B, int32, and log_probability_B, float32, in nats under the softmax of the unmodified
      logits. It is NaN if logits are NaN, +inf or all -inf; the id is then meaningless.
    """
    if params.temperature == 0:
        token_B = _argmax(_adjusted_logits(logits_BV, params, generated_BV, num_ids))
    else:
        p_BV = probabilities(logits_BV, params, generated_BV, num_ids=num_ids)
        token_B = jax.vmap(_draw)(key_B, p_BV)
    logits_BV = logits_BV.astype(jnp.float32)
    chosen_B = jnp.take_along_axis(logits_BV, token_B[:, None], axis=-1)[:, 0]
    return token_B.astype(jnp.int32), chosen_B - jax.nn.logsumexp(logits_BV, axis=-1)


def probabilities(
    logits_BV: jax.Array,
    params: SamplingParams,
    generated_BV: jax.Array | None = None,
    *,
    num_ids: int | None = None,
) -> jax.Array:
    """Returns the distribution of `sample`, float32 [B, V]."""
    logits_BV = _adjusted_logits(logits_BV, params, generated_BV, num_ids)
    if params.temperature == 0:
        return jax.nn.one_hot(_argmax(logits_BV), logits_BV.shape[-1])
    # With a maximum of 0 the division cannot overflow upward, however small the temperature.
    logits_BV = logits_BV - jnp.max(logits_BV, axis=-1, keepdims=True)
    logits_BV = logits_BV / max(params.temperature, float(jnp.finfo(jnp.float32).tiny))
    if params.entmax_alpha == 1:
        p_BV = jax.nn.softmax(logits_BV, axis=-1)
    else:
        p_BV = entmax(logits_BV, params.entmax_alpha)
    filters: list[tuple[bool, Callable[..., jax.Array], float]] = [
        (params.top_k > 0, _top_k, params.top_k),
        (params.nucleus_p < 1, _top_mass_mask, params.nucleus_p),
        (params.min_p > 0, _min_p, params.min_p),
        (params.typical_p < 1, _typical, params.typical_p),
        (params.eta > 0, _eta, params.eta),
    ]
    for is_enabled, keep_mask, threshold in filters:
        if is_enabled:
            p_BV = jnp.where(keep_mask(p_BV, threshold), p_BV, 0.0)
            p_BV = p_BV / jnp.sum(p_BV, axis=-1, keepdims=True)
    return p_BV


def _adjusted_logits(
    logits_BV: jax.Array,
    params: SamplingParams,
    generated_BV: jax.Array | None,
    num_ids: int | None,
) -> jax.Array:
    """Returns float32 logits with the repetition penalty, -inf from `num_ids` on."""
    logits_BV = logits_BV.astype(jnp.float32)
    if params.repetition_penalty != 1:
        penalty = params.repetition_penalty
        penalized_BV = jnp.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)
        assert generated_BV is not None, "the repetition penalty needs the generated ids"
        logits_BV = jnp.where(generated_BV, penalized_BV, logits_BV)
    if num_ids is not None and num_ids < logits_BV.shape[-1]:
        logits_BV = jnp.where(jnp.arange(logits_BV.shape[-1]) < num_ids, logits_BV, -jnp.inf)
    return logits_BV


def _argmax(logits_BV: jax.Array) -> jax.Array:
    """Returns jnp.argmax along V, in a third of its time for 8 rows on a CPU."""
    ids_BV = jax.lax.broadcasted_iota(jnp.int32, logits_BV.shape, 1)
    is_smaller_BV = logits_BV < jnp.max(logits_BV, axis=-1, keepdims=True)
    return jnp.min(jnp.where(is_smaller_BV, logits_BV.shape[-1], ids_BV), axis=-1)


def _draw(key: jax.Array, p_V: jax.Array) -> jax.Array:
    """Samples a block of about sqrt(V) ids, then an id within the block.

    Needs 2 sqrt(V) random numbers; a draw over V = 50,000 takes longer on CPU than all else here.
    """
    block_size = math.isqrt(p_V.shape[-1] - 1) + 1
    num_blocks = -(-p_V.shape[-1] // block_size)
    num_padding = num_blocks * block_size - p_V.shape[-1]
    blocks = jnp.pad(p_V, (0, num_padding)).reshape(num_blocks, block_size)
    block_key, inner_key = jax.random.split(key)
    block = jax.random.categorical(block_key, jnp.log(jnp.sum(blocks, axis=-1)))
    return block * block_size + jax.random.categorical(inner_key, jnp.log(blocks[block]))


# Filters. Each takes a distribution and its setting, and returns a mask of the ids to keep.


def _top_k(p_BV: jax.Array, k: int) -> jax.Array:
    # min instead of the last column: XLA fuses a slice into top_k and then sorts everything.
    kth_B1 = jnp.min(jax.lax.top_k(p_BV, min(k, p_BV.shape[-1]))[0], axis=-1, keepdims=True)
    return p_BV >= kth_B1


def _min_p(p_BV: jax.Array, fraction: float) -> jax.Array:
    return p_BV >= fraction * (1 - _SLACK) * jnp.max(p_BV, axis=-1, keepdims=True)


def _typical(p_BV: jax.Array, mass: float) -> jax.Array:
    distance_BV = jnp.abs(-jnp.log(p_BV) - _entropy(p_BV))
    return _top_mass_mask(p_BV, mass, 1 / distance_BV)


def _eta(p_BV: jax.Array, eta: float) -> jax.Array:
    bound_B1 = jnp.minimum(eta, math.sqrt(eta) * jnp.exp(-_entropy(p_BV))) * (1 - _SLACK)
    return p_BV >= jnp.minimum(bound_B1, jnp.max(p_BV, axis=-1, keepdims=True))


def _entropy(p_BV: jax.Array) -> jax.Array:
    """Returns the entropy in nats, [B, 1]."""
    return jnp.sum(jax.scipy.special.entr(p_BV), axis=-1, keepdims=True)


def _top_mass_mask(p_BV: jax.Array, mass: float, score_BV: jax.Array | None = None) -> jax.Array:
    """Keeps ids by descending score until their probability reaches `mass`.

    Bisects the score threshold over the bit patterns of float32, see the module's docstring.

    Args:
      p_BV: The distribution.
      mass: The probability to reach.
      score_BV: float32 from 0 to inf, by default the probability. Equal scores are kept or dropped
        together.
    """
    score_BV = p_BV if score_BV is None else score_BV

    def as_float(bits_B1: jax.Array) -> jax.Array:
        # Bit patterns of non-negative floats order like integers.
        return jax.lax.bitcast_convert_type(bits_B1, jnp.float32)

    def halve(_, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        # The threshold, the largest one that reaches the mass, is in [low, high].
        low_B1, high_B1 = bounds
        middle_B1 = low_B1 + (high_B1 - low_B1 + 1) // 2
        kept_p_BV = jnp.where(score_BV >= as_float(middle_B1), p_BV, 0.0)
        reaches_mass_B1 = jnp.sum(kept_p_BV, axis=-1, keepdims=True) >= mass * (1 - _SLACK)
        low_B1 = jnp.where(reaches_mass_B1, middle_B1, low_B1)
        return low_B1, jnp.where(reaches_mass_B1, high_B1, middle_B1 - 1)

    low_B1 = jnp.zeros((p_BV.shape[0], 1), jnp.int32)
    bounds = (low_B1, jnp.full_like(low_B1, _BITS_OF_INFINITY))
    threshold_B1, _ = jax.lax.fori_loop(0, _BITS_OF_INFINITY.bit_length(), halve, bounds)
    return score_BV >= as_float(threshold_B1)
