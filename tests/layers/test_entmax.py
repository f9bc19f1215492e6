"""The loss of entmax against closed forms, its definition in double precision, and its gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import approx_fprime, brentq

from MaxText.inference.sampling import SamplingParams, probabilities
from MaxText.layers.entmax import entmax_loss
from MaxText.training.objective import cross_entropy

B, T, V = 2, 3, 11
loss_of = jax.jit(entmax_loss, static_argnames="alpha")


@jax.jit
def random_case():
    logits_BTV = 2 * jax.random.normal(jax.random.key(0), (B, T, V))
    return logits_BTV, jax.random.randint(jax.random.key(1), (B, T), 0, V)


def gradient_of(logits_BTV, targets_BT, alpha, loss_mask_BT):
    def total(logits_BTV):
        return jnp.sum(entmax_loss(logits_BTV, targets_BT, alpha) * loss_mask_BT)

    return np.asarray(jax.jit(jax.grad(total))(logits_BTV))


def entmax_by_definition(z_V, alpha):
    """p = max(0, (alpha - 1) z - tau)^(1 / (alpha - 1)), tau by root finding in float64."""
    scaled_V = (alpha - 1) * np.asarray(z_V, np.float64)

    def p_of(tau):
        return np.maximum(scaled_V - tau, 0) ** (1 / (alpha - 1))

    tau = brentq(lambda tau: p_of(tau).sum() - 1, scaled_V.max() - 1, scaled_V.max(), xtol=1e-15)
    return p_of(tau)


def loss_by_definition(z_V, target, alpha):
    """max over p of p . z + H(p), less the target's logit."""
    p_V = entmax_by_definition(z_V, alpha)
    entropy = (p_V - p_V**alpha).sum() / (alpha * (alpha - 1))
    return p_V @ np.asarray(z_V, np.float64) + entropy - z_V[target]


@pytest.mark.parametrize("alpha", [1.1, 1.5, 2.0])
def test_loss_and_gradient_equal_the_definition(alpha):
    logits_BTV, targets_BT = random_case()
    logits = np.asarray(logits_BTV, np.float64).reshape(-1, V)
    targets = np.asarray(targets_BT).reshape(-1)
    expected = [loss_by_definition(z, y, alpha) for z, y in zip(logits, targets, strict=True)]
    losses = loss_of(logits_BTV, targets_BT, alpha=alpha)
    np.testing.assert_allclose(losses.reshape(-1), expected, rtol=2e-5, atol=2e-6)

    weights = np.linspace(0.5, 1.5, B * T).reshape(B, T)
    gradient = gradient_of(logits_BTV, targets_BT, alpha, weights).reshape(-1, V)
    for row, z, y, weight in zip(gradient, logits, targets, weights.reshape(-1), strict=True):
        p_V = entmax_by_definition(z, alpha)
        # The formula is the derivative of the definition, and the program computes the formula.
        formula_V = p_V - np.eye(V)[y]
        slope_V = approx_fprime(z, lambda z, y=y: loss_by_definition(z, y, alpha))
        np.testing.assert_allclose(formula_V, slope_V, atol=1e-5)
        np.testing.assert_allclose(row, weight * formula_V, atol=2e-6)


def test_alpha_near_one_is_cross_entropy():
    logits_BTV, targets_BT = random_case()
    (expected, _), back = jax.vjp(lambda z: cross_entropy(z, targets_BT), logits_BTV)
    losses = loss_of(logits_BTV, targets_BT, alpha=1.0001)
    np.testing.assert_allclose(losses, expected, atol=1e-3)
    (gradient,) = back((jnp.ones((B, T)), jnp.zeros((B, T))))
    actual = gradient_of(logits_BTV, targets_BT, 1.0001, np.ones((B, T)))
    np.testing.assert_allclose(actual, gradient, atol=1e-3)


def test_the_gradient_has_the_probabilities_that_decoding_draws_from():
    logits_BTV, targets_BT = random_case()
    gradient = gradient_of(logits_BTV, targets_BT, 1.3, np.ones((B, T)))
    drawn = probabilities(logits_BTV.reshape(-1, V), SamplingParams(entmax_alpha=1.3))
    assert (np.asarray(drawn) == 0).any()
    found = (gradient + np.eye(V)[np.asarray(targets_BT)]).reshape(-1, V)
    np.testing.assert_array_equal(found > 1e-6, drawn > 1e-6)
    np.testing.assert_allclose(found, drawn, atol=1e-6)


def test_a_target_without_probability_has_a_finite_loss_that_grows_with_its_distance():
    """-log p, which GPT-Neo's code computes there, is infinite."""
    logits = jnp.zeros((3, 4)).at[:, 0].set(jnp.array([5.0, 50.0, 5e4]))
    targets = jnp.ones(3, jnp.int32)
    losses = np.asarray(loss_of(logits, targets, alpha=1.3))
    gradient = gradient_of(logits, targets, 1.3, np.ones(3))
    np.testing.assert_allclose(losses[1:], [50.0, 5e4], rtol=1e-6)
    np.testing.assert_allclose(gradient[1:], [[1, -1, 0, 0]] * 2, atol=1e-6)
    assert 4.9 < losses[0] < 5.5
    # And none at all where the target has all of the probability.
    assert loss_of(logits, jnp.zeros(3, jnp.int32), alpha=1.3)[1] == 0
