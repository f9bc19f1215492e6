"""A train step with dropout: which random numbers it takes, and which learning rate it reports."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.small_models import random_batch, tiny_config, trainer


@pytest.fixture(scope="module")
def program():
    """(state, step in two microbatches of a row each, a batch of two equal rows)."""
    config = tiny_config(
        base_num_decoder_layers=1, dropout_rate=0.3, opt_type="sgd", momentum=0.0, nesterov=False,
        adam_weight_decay=0.0, gradient_clipping_threshold=0.0, lr_schedule_type="linear",
        learning_rate=0.25, learning_rate_schedule_steps=10, learning_rate_final_fraction=0.0,
    )  # fmt: skip
    _, state, step = trainer(config, num_microbatches=2)
    batch = jax.tree.map(lambda x: jnp.tile(x[:1], (2, 1)), random_batch(config, rows=1))
    return state, step, batch


@functools.cache
def _one_row_of(row):
    return jnp.arange(2)[:, None] == row


def loss_of(program, row, step_number=0):
    """The loss of one of the two equal rows."""
    state, step, batch = program
    state = dataclasses.replace(state, step=jnp.int32(step_number))
    mask = jnp.where(_one_row_of(row), batch.loss_mask_BT, 0)
    return float(step(state, dataclasses.replace(batch, loss_mask_BT=mask))[1]["loss"])


def test_each_step_and_each_microbatch_drops_something_else(program):
    losses = {(step, row): loss_of(program, row, step) for step in range(3) for row in range(2)}
    values = sorted(losses.values())
    assert np.diff(values).min() > 1e-6, losses
    # The same step again drops the same.
    assert loss_of(program, 1, 2) == losses[2, 1]


def test_the_reported_rate_is_that_of_the_update(program):
    """0.25 (1 - step / 10), from step 0 on; plain gradient descent."""
    state, step, batch = program
    for number in range(3):
        before = state.params
        state, metrics = step(state, batch)
        rate = 0.25 * (1 - number / 10)
        assert metrics["learning_rate"] == pytest.approx(rate, rel=1e-6)
        assert metrics["update_norm"] == pytest.approx(rate * float(metrics["grad_norm"]), rel=1e-5)
        moved = jax.tree.map(
            lambda x, y: np.sum((np.float64(x) - np.float64(y)) ** 2), state.params, before
        )
        change = np.sqrt(sum(jax.tree.leaves(moved)))
        assert change == pytest.approx(float(metrics["update_norm"]), rel=1e-3)
    assert int(state.step) == 3
