"""The limit above which the spike guard skips an update, to one part in ten thousand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.config.training_sections import GuardConfig
from MaxText.training import spike_guard

SECTION = GuardConfig()
WINDOW, FACTOR = SECTION.skip_step_interval, SECTION.skip_step_scaling_factor
STEPS = 3 * WINDOW
QUANTITIES = ("loss", "grad_norm", "update_norm")
NAN_STEPS = (0, 7, 40, 41, 150)


def decide(state, step, values_Q, rate):
    values = dict(zip(QUANTITIES, values_Q, strict=True))
    return spike_guard.decide(SECTION, state, step, **values, learning_rate=rate)[:2]


@jax.jit
def _states(values_SQ, rates_S):
    """(whether each step was accepted, the state after each)."""

    def one(state, inputs):
        accepted, state = decide(state, *inputs)
        return state, (accepted, state)

    inputs = jnp.arange(STEPS), values_SQ, rates_S
    return jax.lax.scan(one, spike_guard.initial_state(SECTION), inputs)[1]


_accepted = jax.jit(jax.vmap(lambda *x: decide(*x)[0], in_axes=(None, None, 0, None)))


def limits(accepted_NQ):
    """Hampel 1974: medians, and deviations from them, of the last accepted updates."""
    newest_NQ = accepted_NQ[-WINDOW:]
    median_Q = np.median(newest_NQ, axis=0)
    if len(newest_NQ) < WINDOW // 4:
        return np.array([median_Q[0] + max(abs(median_Q[0]), 4.0), np.inf, np.inf])
    deviation_Q = 1.4826 * np.median(np.abs(newest_NQ - median_Q), axis=0)
    floor_Q = np.array([0.03, 0.5, 0.5]) * np.maximum(np.abs(median_Q), [1.0, 0.0, 0.0])
    return median_Q + FACTOR * np.maximum(deviation_Q, floor_Q)


@pytest.mark.parametrize("spread", [0.0, 0.2, 1.0])
def test_the_limit_follows_from_the_last_accepted_updates(spread):
    draw = np.random.default_rng(0).uniform(-1, 1, (STEPS, 3))
    values_SQ = np.array([3.0, 1.0, 50.0]) * (1 + np.array([0.4, 0.9, 0.9]) * spread * draw)
    rates_S = np.linspace(1e-3, 5e-3, STEPS)
    given_SQ = values_SQ * np.stack([np.ones(STEPS), np.ones(STEPS), rates_S], axis=1)
    given_SQ[list(NAN_STEPS), 1] = np.nan
    accepted_S, states = _states(jnp.float32(given_SQ), jnp.float32(rates_S))
    assert np.flatnonzero(~np.asarray(accepted_S)).tolist() == list(NAN_STEPS)
    quarter = WINDOW // 4
    # Even and odd numbers of accepted updates, part of a window, a whole one, and more.
    for count in (
        1,
        2,
        6,
        quarter - 1,
        quarter,
        quarter + 1,
        77,
        WINDOW,
        WINDOW + 1,
        2 * WINDOW + 9,
    ):
        step = int(np.flatnonzero(np.cumsum(accepted_S) == count)[0])
        state = jax.tree.map(lambda x, step=step: x[step], states)
        history_NQ = values_SQ[: step + 1][np.asarray(accepted_S)[: step + 1]]
        assert len(history_NQ) == count
        rate, median_Q = 2e-3, np.median(history_NQ[-WINDOW:], axis=0)
        tried, expected = [median_Q, 1e-3 * median_Q], [True, True]
        for quantity, limit in enumerate(limits(history_NQ)):
            for factor in (1 - 1e-4, 1 + 1e-4):
                values_Q = median_Q.copy()
                values_Q[quantity] = limit * factor if np.isfinite(limit) else 1e6
                tried.append(values_Q)
                expected.append(factor < 1 or not np.isfinite(limit))
        given_NQ = np.array(tried) * [1, 1, rate]
        found = _accepted(state, jnp.int32(step + 1), jnp.float32(given_NQ), jnp.float32(rate))
        assert np.asarray(found).tolist() == expected, count


@jax.jit
def _metrics(losses_S):
    def one(state, inputs):
        step, loss = inputs
        _, state, metrics = spike_guard.decide(
            SECTION, state, step, loss=loss, grad_norm=1.0, update_norm=1e-3, learning_rate=1e-3
        )
        return state, metrics

    inputs = jnp.arange(len(losses_S)), losses_S
    return jax.lax.scan(one, spike_guard.initial_state(SECTION), inputs)[1]


@pytest.mark.parametrize("level", [3.0, 0.2])
def test_the_rise_is_that_of_the_median_above_the_lowest_one_of_a_whole_window(level):
    """A few low losses at the start are no level that a later loss has risen from."""
    steps = np.arange(5 * WINDOW)
    drift = np.interp(steps, [0, 2 * WINDOW, 5 * WINDOW], [1.2, 1.0, 2.0])
    losses = level * drift + 0.01 * np.random.default_rng(1).normal(size=len(steps))
    losses[:9] = 0.3 * level
    metrics = jax.tree.map(np.asarray, _metrics(jnp.float32(losses)))
    assert metrics["num_skipped"][-1] == 0
    lowest, stable, rises, began = np.inf, 0, [], []
    for step in steps:
        newest = losses[max(0, step + 1 - WINDOW) : step + 1]
        if len(newest) == WINDOW:
            lowest = min(lowest, np.median(newest))
        rise = 0.0
        if np.isfinite(lowest):
            rise = (np.median(newest) - lowest) / max(abs(lowest), 1.0)
        if rise <= SECTION.rollback.on_rise / 4:
            stable = step
        rises.append(rise)
        began.append(max(stable - WINDOW, 0))
    np.testing.assert_allclose(metrics["loss_rise"], rises, atol=1e-5)
    # At a step where the rise is at this limit, rounding decides.
    assert np.abs(metrics["rise_began"] - began).max() <= 1
    assert max(rises) > 0.1
