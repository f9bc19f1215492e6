"""Which steps the guard skips, and that a skipped step leaves no trace."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from MaxText.config.training_sections import GuardConfig
from MaxText.layers.assembly.model import Model
from MaxText.training import spike_guard
from MaxText.training import step as steps
from tests.small_models import assert_close, random_batch, tiny_config

SECTION = GuardConfig()
RATE = 1e-3
STEPS = 900
NAN, INF = np.nan, np.inf


@jax.jit
def _judged(values_SQ, rates_S):
    def one(state, inputs):
        step, values_Q, rate = inputs
        values = dict(zip(("loss", "grad_norm", "update_norm"), values_Q, strict=True))
        accept, state, found = spike_guard.decide(
            SECTION, state, step, **values, learning_rate=rate
        )
        return state, (accept, found)

    inputs = (jnp.arange(len(values_SQ)), values_SQ, rates_S)
    return jax.lax.scan(one, spike_guard.initial_state(SECTION), inputs)[1]


def judged(values_SQ, rates_S=None):
    """Whether each step is sound, and the metrics of each."""
    rates_S = np.full(len(values_SQ), RATE) if rates_S is None else rates_S
    sound_S, metrics = _judged(np.float32(values_SQ), np.float32(rates_S))
    return np.array(sound_S), {name: np.array(value) for name, value in metrics.items()}


def usual(seed=0):
    """Loss 3, gradient norm 1, update norm by the learning rate 50, all with noise."""
    noise_SQ = np.random.default_rng(seed).normal(size=(STEPS, 3))
    return np.array([3, 1, 50 * RATE]) * (1 + np.array([0.02, 0.1, 0.02]) * noise_SQ)


def skipped(values_SQ, rates_S=None):
    return np.flatnonzero(~judged(values_SQ, rates_S)[0]).tolist()


LOSS, GRADIENT, UPDATE = range(3)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([], []),
        *(([(200, column, value)], [200]) for column, value in
          ((LOSS, NAN), (GRADIENT, INF), (UPDATE, -INF), (LOSS, 24), (GRADIENT, 8), (UPDATE, 0.4))),
        *(([(step, GRADIENT, NAN)], [step]) for step in (0, 1, 5)),
        # A second spike, and one after a NaN, are seen as well.
        ([(200, LOSS, 8), (205, GRADIENT, 20)], [200, 205]),
        ([(200, LOSS, NAN), (slice(201, 206, 2), GRADIENT, 30)], [200, 201, 203, 205]),
        # Hundreds of bad steps do not become usual.
        ([(slice(200, 500), LOSS, 8)], list(range(200, 500))),
        # Far below the median is not a spike.
        ([(200, LOSS, 0.5), (300, GRADIENT, 0.01), (400, UPDATE, 0.0)], []),
        # A loss that explodes at once.
        ([(slice(3, 60), LOSS, 1290)], list(range(3, 60))),
    ],
)  # fmt: skip
def test_skipped_steps(changes, expected):
    values_SQ = usual()
    for where, column, value in changes:
        values_SQ[where, column] = value
    assert skipped(values_SQ) == expected


def test_drift_and_the_fall_of_the_beginning_pass():
    values_SQ = usual()
    values_SQ[:, LOSS] += 0.005 * np.arange(STEPS)  # by 4.5 nats
    values_SQ[:, GRADIENT] *= np.linspace(1, 11, STEPS)
    assert skipped(values_SQ) == []
    values_SQ = usual()
    values_SQ[:, LOSS] += 7 * np.exp(-np.arange(STEPS) / 30)
    values_SQ[:, GRADIENT] *= 1 + 4 * np.exp(-((np.arange(STEPS) - 20) ** 2) / 200)
    assert skipped(values_SQ) == []
    # Batches of a few sequences in the first steps.
    values_SQ[:20, LOSS] = np.tile([0.5, 4.0, 2.0, 3.5], 5)
    assert skipped(values_SQ[:20]) == []


def test_another_learning_rate_is_no_spike():
    values_SQ, rates_S = usual(), np.full(STEPS, RATE)
    rates_S[200:] *= 20
    values_SQ[200:, UPDATE] *= 20
    rates_S[:100] = np.linspace(0, RATE, 100)  # a warm-up, from a rate of 0
    values_SQ[:100, UPDATE] = 50 * rates_S[:100]
    assert skipped(values_SQ, rates_S) == []


def test_constant_and_small_values_may_vary():
    values_SQ = np.tile([3, 1, 50 * RATE], (STEPS, 1))
    values_SQ[200] *= [1.1, 2, 2]
    assert skipped(values_SQ) == []
    # Text known by heart, and sometimes a row that is not.
    values_SQ = usual()
    values_SQ[:400, LOSS], values_SQ[400:, LOSS] = 0.01, 0.05
    values_SQ[150::40, LOSS] = 0.15
    sound_S, metrics = judged(values_SQ)
    assert sound_S.all()
    assert metrics["loss_rise"].max() < SECTION.rollback.on_rise


def test_numbers_that_the_host_decides_by():
    values_SQ = usual()
    bad = [150, 158, 270]
    values_SQ[bad, LOSS] = NAN
    _, metrics = judged(values_SQ)
    window = SECTION.skip_step_interval
    for step in (0, 149, 150, 155, 200, 277, 278, 288, 269, 270, 499):
        recent = [s for s in bad if step - window < s <= step]
        assert metrics["recent_skips"][step] == len(recent), step
        # 158 follows 150 within 128 / 16 = 8 steps for each skip, 270 does not.
        began = {(): -1, (150,): 150, (150, 158): 150, (158,): 158}
        assert metrics["skips_began"][step] == began.get(tuple(recent), 270), step
        assert metrics["num_skipped"][step] == sum(s <= step for s in bad)
        assert metrics["last_skipped"][step] == max((s for s in bad if s <= step), default=-1)
        assert metrics["skipped"][step] == (step in bad)
    counts = {name for name, value in metrics.items() if value.dtype == np.int32}
    assert counts == metrics.keys() - {"loss_rise"}  # exact beyond 2**24 steps


def test_a_sustained_rise_and_where_it_began():
    values_SQ = usual()
    values_SQ[500:, LOSS] += np.minimum(0.006 * np.arange(400), 1.5)
    sound_S, metrics = judged(values_SQ)
    assert sound_S.all()
    assert np.abs(metrics["loss_rise"][:500]).max() < 0.03
    noticed = int(np.argmax(metrics["loss_rise"] > SECTION.rollback.on_rise))
    assert 600 < noticed < 800
    assert abs(metrics["rise_began"][noticed] - 500) <= SECTION.skip_step_interval


# --- In the train step ------------------------------------------------------------------------


def test_a_skipped_step_changes_nothing_but_the_count():
    config = tiny_config(base_num_decoder_layers=1)
    model, batch = Model(config.model), random_batch(config, rows=2)
    schedule = optax.linear_schedule(1e-2, 0.0, 100)
    optimizer = optax.chain(optax.scale_by_adam(), optax.scale_by_learning_rate(schedule))
    state = jax.jit(steps.make_initialize(model, optimizer, SECTION))(jax.random.key(0))
    step = jax.jit(steps.make_train_step(model, optimizer, schedule, guard=SECTION))
    plain = jax.jit(steps.make_train_step(model, optimizer, schedule))

    # An accepted update is that of a run without the guard.
    bare, expected = plain(dataclasses.replace(state, guard=None), batch)
    state, metrics = step(state, batch)
    assert bare.guard is None
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-6, err_msg=name)
    assert_close(state.params, bare.params, 1e-8, rtol=1e-5)
    assert metrics["skipped"] == 0

    damaged = dataclasses.replace(batch, loss_mask_BT=batch.loss_mask_BT.at[0, 3].set(NAN))
    after, metrics = step(state, damaged)
    assert [metrics[name] for name in ("skipped", "num_skipped", "last_skipped")] == [1, 1, 1]
    jax.tree.map(np.testing.assert_array_equal, after.params, state.params)
    adam, counter = state.opt_state
    jax.tree.map(np.testing.assert_array_equal, after.opt_state[0], adam)
    # The step, and with it the data and the learning rate, goes on.
    assert after.step == state.step + 1 == 2
    assert after.opt_state[1].count == counter.count + 1 == 2
    again, metrics = step(after, batch)
    assert metrics["skipped"] == 0
    assert np.isfinite(metrics["loss"])
    assert again.opt_state[0].count == 2
