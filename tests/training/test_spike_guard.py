"""Which updates the guard leaves out, and that leaving one out leaves no trace."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from MaxText.configuration.training_sections import Guard
from MaxText.layers.model import Model
from MaxText.training import spike_guard
from MaxText.training import step as steps
from tests.small_models import random_batch, tiny_config

SECTION = Guard()
RATE = 1e-3


def test_a_fresh_guard_has_the_shapes_and_the_layout_of_another():
    section = Guard(skip_step_interval=24)
    start = spike_guard.initial_state(section)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    other = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), start)
    for x, y in zip(jax.tree.leaves(other.fresh()), jax.tree.leaves(start), strict=True):
        assert (x.dtype, x.sharding) == (y.dtype, sharding)
        np.testing.assert_array_equal(x, y)


@jax.jit
def _judged(values_SQ, rates_S):
    def one(state, inputs):
        step, values_Q, rate = inputs
        verdict = spike_guard.judge(
            SECTION,
            state,
            step,
            loss=values_Q[0],
            grad_norm=values_Q[1],
            update_norm=values_Q[2],
            learning_rate=rate,
        )
        return verdict.state, (verdict.is_sound, verdict.metrics)

    inputs = (jnp.arange(len(values_SQ)), values_SQ, rates_S)
    return jax.lax.scan(one, spike_guard.initial_state(SECTION), inputs)[1]


def judged(values_SQ, rates_S=None):
    """Whether each update is sound, and the metrics of each."""
    rates_S = np.full(len(values_SQ), RATE) if rates_S is None else rates_S
    sound_S, metrics = _judged(np.float32(values_SQ), np.float32(rates_S))
    return np.array(sound_S), {name: np.array(value) for name, value in metrics.items()}


def usual(num_steps=400, seed=0):
    """Loss 3, gradient norm 1, update norm by the learning rate 50, all with noise."""
    noise_SQ = np.random.default_rng(seed).normal(size=(num_steps, 3))
    return np.array([3, 1, 50 * RATE]) * (1 + np.array([0.02, 0.1, 0.02]) * noise_SQ)


def skipped(values_SQ, rates_S=None):
    return np.flatnonzero(~judged(values_SQ, rates_S)[0]).tolist()


@pytest.mark.parametrize("quantity", [0, 1, 2], ids=["loss", "gradient", "update"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_one_value_that_is_not_finite_is_one_update_left_out(quantity, value):
    values_SQ = usual()
    values_SQ[200, quantity] = value
    assert skipped(values_SQ) == [200]


@pytest.mark.parametrize("step", [0, 1, 5])
def test_also_in_the_first_steps(step):
    values_SQ = usual()
    values_SQ[step, 1] = np.nan
    assert skipped(values_SQ) == [step]


def test_a_spike_and_a_second_one_five_steps_later():
    values_SQ = usual()
    values_SQ[200, :2] = 8, 50
    values_SQ[205, :2] = 5, 20
    assert skipped(values_SQ) == [200, 205]


def test_every_quantity_is_watched():
    for quantity in range(3):
        values_SQ = usual()
        values_SQ[200, quantity] *= 8
        assert skipped(values_SQ) == [200]


def test_a_nan_does_not_blind_the_guard():
    values_SQ = usual()
    values_SQ[200, 0] = np.nan
    values_SQ[201:206:2, 1] = 30
    assert skipped(values_SQ) == [200, 201, 203, 205]


def test_hundreds_of_bad_updates_do_not_become_usual():
    values_SQ = usual(600)
    values_SQ[200:500, :2] = 8, 50
    assert skipped(values_SQ) == list(range(200, 500))


def test_noise_drift_and_the_fall_of_the_beginning_pass():
    assert skipped(usual()) == []
    values_SQ = usual()
    values_SQ[:, 0] += 0.005 * np.arange(400)  # by 2 nats
    values_SQ[:, 1] *= np.linspace(1, 5, 400)
    assert skipped(values_SQ) == []
    values_SQ = usual()
    values_SQ[:, 0] += 7 * np.exp(-np.arange(400) / 30)
    values_SQ[:, 1] *= 1 + 4 * np.exp(-((np.arange(400) - 20) ** 2) / 200)
    assert skipped(values_SQ) == []


def test_another_learning_rate_is_no_spike():
    values_SQ, rates_S = usual(), np.full(400, RATE)
    rates_S[200:] *= 20
    values_SQ[200:, 2] *= 20
    assert skipped(values_SQ, rates_S) == []
    rates_S[:100] = np.linspace(0, RATE, 100)  # a warm-up, from a rate of 0
    values_SQ[:100, 2] = 50 * rates_S[:100]
    assert skipped(values_SQ, rates_S) == []


def test_what_is_constant_may_vary_a_little():
    values_SQ = np.tile([3, 1, 50 * RATE], (400, 1))
    values_SQ[200] *= [1.1, 2, 2]
    assert skipped(values_SQ) == []


def test_a_small_loss_may_multiply():
    """Text known by heart, and now and then a row that is not."""
    values_SQ = usual(600)
    values_SQ[:400, 0], values_SQ[400:, 0] = 0.01, 0.05
    values_SQ[150::40, 0] = 0.15
    sound_S, metrics = judged(values_SQ)
    assert sound_S.all()
    assert metrics["loss_rise"].max() < SECTION.rewind_on_rise


def test_numbers_that_the_host_decides_by():
    values_SQ = usual(500)
    bad = [150, 160, 300]
    values_SQ[bad, 0] = np.nan
    _, metrics = judged(values_SQ)
    window = SECTION.skip_step_interval
    for step in (0, 149, 150, 155, 200, 277, 278, 288, 299, 300, 499):
        recent = [s for s in bad if step - window < s <= step]
        assert metrics["recent_skips"][step] == len(recent), step
        # 160 follows 150 within 128 / 16 = 8 healthy steps for each skip, 300 does not.
        began = {(): -1, (150,): 150, (150, 160): 160, (160,): 160}
        assert metrics["skips_began"][step] == began.get(tuple(recent), 300), step
        assert metrics["num_skipped"][step] == sum(s <= step for s in bad)
        assert metrics["last_skipped"][step] == max((s for s in bad if s <= step), default=-1)
        assert metrics["skipped"][step] == (step in bad)


def test_trouble_begins_at_the_dense_stretch_and_not_at_an_isolated_skip():
    values_SQ = usual(260)
    bad = [173, *range(201, 260)]
    values_SQ[bad, 0] = 1e6
    _, metrics = judged(values_SQ)
    assert metrics["recent_skips"][215] == SECTION.rewind_after_skips
    assert metrics["skips_began"][215] == 201
    # Skips spread evenly at the tolerated rate are one stretch.
    values_SQ = usual(300)
    values_SQ[160:288:8, 0] = 1e6
    assert judged(values_SQ)[1]["skips_began"][280] == 160


def test_a_rate_that_explodes_at_once_is_caught():
    values_SQ = usual(60)
    values_SQ[:, 0] = np.linspace(6, 5, 60)
    values_SQ[3:, 0] = 1290.0
    sound_S, metrics = judged(values_SQ)
    np.testing.assert_array_equal(np.flatnonzero(sound_S), [0, 1, 2])
    assert metrics["skips_began"][20] == 3
    # What batches of a few sequences do in the first steps passes.
    values_SQ[:, 0] = np.tile([0.5, 4.0, 2.0, 3.5], 15)
    assert judged(values_SQ)[0].all()


def test_counts_of_steps_are_integers():
    _, metrics = judged(usual(3))
    counts = {name for name, value in metrics.items() if value.dtype == np.int32}
    assert counts == metrics.keys() - {"loss_rise"}


def test_a_sustained_rise_and_where_it_began():
    values_SQ = usual(900)
    values_SQ[500:, 0] += np.minimum(0.006 * np.arange(400), 1.5)
    sound_S, metrics = judged(values_SQ)
    assert sound_S.all()
    assert np.abs(metrics["loss_rise"][:500]).max() < 0.03
    noticed = int(np.argmax(metrics["loss_rise"] > SECTION.rewind_on_rise))
    assert 600 < noticed < 800
    assert abs(metrics["rise_began"][noticed] - 500) <= SECTION.skip_step_interval


# --- In the train step ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small():
    config = tiny_config()
    model = Model(config.model)
    schedule = optax.linear_schedule(1e-2, 0.0, 100)
    optimizer = optax.chain(optax.scale_by_adam(), optax.scale_by_learning_rate(schedule))
    state = steps.make_initialize(model, optimizer, SECTION)(jax.random.key(0))
    step = jax.jit(
        steps.make_train_step(
            model, optimizer, schedule, num_microbatches=1, dropout_seed=0, guard=SECTION
        )
    )
    batch = random_batch(config, rows=2)
    plain = jax.jit(
        steps.make_train_step(model, optimizer, schedule, num_microbatches=1, dropout_seed=0)
    )
    return state, step, plain, batch


def test_an_update_left_out_changes_nothing_but_the_count(small):
    state, step, _, batch = small
    state, metrics = step(state, batch)
    assert metrics["skipped"] == 0
    damaged = batch.__class__(
        **(vars(batch) | {"weights_BT": batch.weights_BT.at[0, 3].set(np.nan)})
    )
    after, metrics = step(state, damaged)
    assert metrics["skipped"] == 1
    assert metrics["num_skipped"] == 1
    assert metrics["last_skipped"] == 1
    jax.tree.map(np.testing.assert_array_equal, after.params, state.params)
    adam, schedule = state.opt_state
    jax.tree.map(np.testing.assert_array_equal, after.opt_state[0], adam)
    # The step, and with it the data and the learning rate, goes on.
    assert after.step == state.step + 1 == 2
    assert after.opt_state[1].count == schedule.count + 1 == 2
    again, metrics = step(after, batch)
    assert metrics["skipped"] == 0
    assert np.isfinite(metrics["loss"])
    assert again.opt_state[0].count == 2


def test_sound_updates_are_those_of_a_run_without_the_guard(small):
    state, step, plain, batch = small
    guarded, metrics = step(state, batch)
    bare, expected = plain(state.__class__(state.step, state.params, state.opt_state), batch)
    assert bare.guard is None
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-6, err_msg=name)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-8),
        guarded.params,
        bare.params,
    )
