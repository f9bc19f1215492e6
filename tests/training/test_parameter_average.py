"""The average of the parameters: its values, and skipped steps."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from MaxText.config.training_sections import ParameterAverageConfig
from MaxText.layers.assembly.model import Model
from MaxText.training.parameter_average import initial_average, update_average
from MaxText.training.step import make_train_step
from tests.refusals import refused
from tests.small_models import assert_close, made_for_training, random_batch, tiny_config

STEPS = 12


def averaged(config):
    """(Values of a parameter after each step, its average after each step)."""
    values = np.random.default_rng(0).normal(size=(STEPS, 3)).astype(np.float32)
    average = initial_average(config, {"w": jnp.zeros(3, jnp.bfloat16)})
    averages = []
    for step, value in enumerate(values):
        average = update_average(config, average, {"w": jnp.asarray(value)}, jnp.int32(step))
        averages.append(np.asarray(average["w"]))
    return values, averages


def test_a_mean_is_that_of_all_steps_since_the_first():
    values, averages = averaged(ParameterAverageConfig(type="mean", start_step=4))
    for step in range(STEPS):
        expected = values[4 : step + 1].mean(0) if step >= 4 else values[step]
        np.testing.assert_allclose(averages[step], expected, rtol=1e-5, atol=1e-6)


def test_an_ema_weighs_the_newest_step_by_its_horizon():
    values, averages = averaged(ParameterAverageConfig(type="ema", start_step=2, horizon=4))
    expected = values[2:6].mean(0)  # a mean until there are as many steps
    np.testing.assert_allclose(averages[5], expected, rtol=1e-5, atol=1e-6)
    for step in range(6, STEPS):
        expected = 0.75 * expected + 0.25 * values[step]
        np.testing.assert_allclose(averages[step], expected, rtol=1e-5, atol=1e-6)


def test_nothing_is_kept_without_an_average():
    config = ParameterAverageConfig()
    assert initial_average(config, {"w": jnp.zeros(3)}) is None
    assert update_average(config, None, {"w": jnp.zeros(3)}, jnp.int32(0)) is None


def test_an_average_that_starts_after_the_run_is_refused():
    keys = {"parameter_average.type": "mean", "parameter_average.start_step": 10, "steps": 10}
    refused(r"(?s)start_step=10 is not before the end.*start_step=9", lambda: tiny_config(**keys))


def test_a_skipped_step_counts_the_parameters_that_it_left():
    config = tiny_config(
        base_num_decoder_layers=1, opt_type="muonh", **{"parameter_average.type": "mean"}
    )
    model = Model(config.model)
    schedule, optimizer, initialize = made_for_training(config, model, config.guard)
    state = jax.jit(initialize)(jax.random.key(0))
    step = make_train_step(
        model, optimizer, schedule, guard=config.guard, optimizer_config=config.optimizer
    )
    step = jax.jit(step)
    batch = random_batch(config, rows=2)
    first, _ = step(state, batch)
    jax.tree.map(np.testing.assert_array_equal, first.average, first.params)
    damaged = dataclasses.replace(batch, loss_mask_BT=batch.loss_mask_BT.at[0, 3].set(np.nan))
    after, metrics = step(first, damaged)
    assert metrics["skipped"] == 1
    jax.tree.map(np.testing.assert_array_equal, after.params, first.params)
    jax.tree.map(np.testing.assert_array_equal, after.average, first.params)
    last, _ = step(after, batch)
    expected = jax.tree.map(lambda x, y: (2 * x + y) / 3, first.params, last.params)
    assert_close(last.average, expected, 1e-6, rtol=1e-5)
