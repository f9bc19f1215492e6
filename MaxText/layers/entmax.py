"""Alpha-entmax, sparse probabilities, and its loss (Peters et al. 2019).

Alpha-entmax lies between softmax (alpha = 1) and sparsemax (alpha = 2):

    p_j = max(0, (alpha - 1) z_j - tau) ** (1 / (alpha - 1)), with tau such that p sums to 1

Legend: V vocabulary, 1 a dimension of size 1 that remains of it; leading dimensions are arbitrary.
"""

import functools

import jax
import jax.numpy as jnp

_SLACK = 1e-6  # tolerance for a sum of float32 probabilities to be 1


def entmax(logits_V: jax.Array, alpha: float) -> jax.Array:
    """Returns alpha-entmax of logits [..., V], 1 < alpha <= 2."""
    return _probabilities(logits_V, _shift(logits_V, alpha), alpha)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def entmax_loss(logits_V: jax.Array, targets: jax.Array, alpha: float) -> jax.Array:
    """Returns the Fenchel-Young loss of alpha-entmax, 1 < alpha <= 2.

    (p - onehot(target)) . logits + H(p), H the Tsallis entropy sum_j (p_j - p_j^alpha) / (alpha
    (alpha - 1)) (Peters et al. 2019, equation 9). Convex, nonnegative, finite even if p is 0 at the
    target; the gradient is p - onehot(target). Approaches cross entropy as alpha approaches 1.

    Args:
      logits_V: Float32 logits [..., V].
      targets: Ids [...].
      alpha: Between 1 and 2.

    Returns:
      Losses [...].
    """
    return _loss_forward(logits_V, targets, alpha)[0]


_LossResiduals = tuple[jax.Array, jax.Array, jax.Array]  # logits, targets, shift


def _loss_forward(
    logits_V: jax.Array, targets: jax.Array, alpha: float
) -> tuple[jax.Array, _LossResiduals]:
    shift_1 = _shift(logits_V, alpha)
    p_V = _probabilities(logits_V, shift_1, alpha)
    # Centered, as large logits would cost precision in a loss near 0.
    centered_V = logits_V - jnp.max(logits_V, axis=-1, keepdims=True)
    target_logits = jnp.take_along_axis(centered_V, targets[..., None], axis=-1)[..., 0]
    inside_V = p_V > 0
    log_p_V = jnp.log(jnp.where(inside_V, p_V, 1.0))
    entropy = jnp.sum(-p_V * jnp.expm1((alpha - 1) * log_p_V), axis=-1) / (alpha * (alpha - 1))
    # Logits may be -inf where p is 0: 0 * -inf would be NaN.
    expected = jnp.sum(jnp.where(inside_V, p_V * centered_V, 0.0), axis=-1)
    # As in cross entropy, only the logits themselves are saved at [..., V].
    return expected - target_logits + entropy, (logits_V, targets, shift_1)


def _loss_backward(
    alpha: float, residuals: _LossResiduals, gradient: jax.Array
) -> tuple[jax.Array, None]:
    logits_V, targets, shift_1 = residuals
    p_V = _probabilities(logits_V, shift_1, alpha)
    is_target_V = jnp.arange(logits_V.shape[-1]) == targets[..., None]
    return (p_V - is_target_V) * gradient[..., None], None


entmax_loss.defvjp(_loss_forward, _loss_backward)


def _scaled(logits_V: jax.Array, alpha: float) -> jax.Array:
    """Returns (alpha - 1) (z - max z)."""
    return (alpha - 1) * (logits_V - jnp.max(logits_V, axis=-1, keepdims=True))


def _powers(scaled_V: jax.Array, shift_1: jax.Array, power: float) -> jax.Array:
    """Returns max(0, scaled + 1 - shift) ** power."""
    # Brackets are kept as their difference from 1, which is small for alpha near 1.
    bracket_V = scaled_V - shift_1
    inside_V = bracket_V > -1
    log_V = jnp.log1p(jnp.where(inside_V, bracket_V, 0.0))
    return jnp.where(inside_V, jnp.exp(power * log_V), 0.0)


def _probabilities(logits_V: jax.Array, shift_1: jax.Array, alpha: float) -> jax.Array:
    """Returns the probabilities for the shift of `_shift`, divided by their sum."""
    p_V = _powers(_scaled(logits_V, alpha), shift_1, 1 / (alpha - 1))
    return p_V / jnp.sum(p_V, axis=-1, keepdims=True)


def _shift(logits_V: jax.Array, alpha: float) -> jax.Array:
    """Returns the shift [..., 1] for sum 1, by about 5 Newton steps.

    p = max(0, (alpha - 1) (z - max z) + 1 - shift) ** q, q = 1 / (alpha - 1). The q-norm of these
    brackets is convex and decreases with the shift, so steps from 0 never overshoot.
    """
    q = 1 / (alpha - 1)
    scaled_V = _scaled(logits_V, alpha)

    def newton_step(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        shift_1, moved_1 = carry
        sum_1 = jnp.sum(_powers(scaled_V, shift_1, q), axis=-1, keepdims=True)
        slope_1 = jnp.sum(_powers(scaled_V, shift_1, q - 1), axis=-1, keepdims=True)
        step_1 = -sum_1 * jnp.expm1((1 - alpha) * jnp.log(sum_1)) / slope_1
        # A converged row stays, so that it does not depend on the rest of the batch.
        next_1 = jnp.where(moved_1 & (sum_1 > 1 + _SLACK), shift_1 + step_1, shift_1)
        return next_1, next_1 > shift_1

    start_1 = jnp.zeros_like(scaled_V[..., :1])
    start = (start_1, jnp.ones_like(start_1, bool))
    shift_1, _ = jax.lax.while_loop(lambda carry: jnp.any(carry[1]), newton_step, start)
    return shift_1
