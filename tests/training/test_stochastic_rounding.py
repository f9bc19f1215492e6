"""Rounding to bfloat16, unbiased where rounding to the nearest stands still."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.training.optimizer import make_optimizer
from MaxText.training.optimizers.parameter_trees import map_param_names
from MaxText.training.stochastic_rounding import add_updates_stochastically, round_stochastically
from tests.small_models import tiny_config
from tests.training.test_optimizer_rules import KEYS, SPECS

SIZE = 4096


def test_rounding_is_to_a_neighbor_and_right_on_average():
    values = np.float32([1.0 + 2**-9, -3.1, 1e-3, 0.5, 0.0])
    x = jnp.tile(jnp.asarray(values), (SIZE, 1))
    rounded = np.float64(round_stochastically(x, jax.random.key(0)))
    nearest = np.float64(jnp.asarray(values, jnp.bfloat16))
    step = np.maximum(np.abs(values) * 2.0**-7, 1e-30)  # at least one unit of the last digit
    assert np.all(np.abs(rounded - nearest) <= step)
    error = np.abs(rounded.mean(0) - values) / step
    assert error.max() < 4 * 0.5 / np.sqrt(SIZE)  # four standard errors of a coin
    assert set(rounded[:, 0]) == {1.0, 1.0 + 2**-7}
    assert set(rounded[:, 3]) == {0.5}  # what bfloat16 holds stays


def test_infinities_and_nan_stay():
    x = jnp.float32([jnp.inf, -jnp.inf, jnp.nan])
    rounded = np.float32(round_stochastically(x, jax.random.key(1)))
    np.testing.assert_array_equal(rounded, np.float32([np.inf, -np.inf, np.nan]))


def test_weights_move_by_updates_below_their_last_digit():
    params = {"w": jnp.ones(SIZE, jnp.bfloat16), "scale": jnp.ones(3, jnp.float32)}
    updates = {"w": jnp.full(SIZE, 2.0**-12), "scale": jnp.full(3, 2.0**-12)}
    assert np.all(params["w"] + updates["w"].astype(jnp.bfloat16) == 1)  # to the nearest

    @jax.jit
    def add(params, step):
        return add_updates_stochastically(params, updates, step)

    for step in range(64):
        params = add(params, jnp.int32(step))
    assert params["w"].dtype == jnp.bfloat16
    mean = np.float64(params["w"]).mean()
    assert mean == pytest.approx(1 + 64 * 2.0**-12, abs=2e-3)
    np.testing.assert_array_equal(params["scale"], np.float32(1 + 64 * 2.0**-12))


def second_moments(**keys):
    """Second moments after 64 gradients of 2, from 1, with b2 = 0.999."""
    config = tiny_config(**KEYS | {"adam_b2": 0.999} | keys)
    optimizer = make_optimizer(config.optimizer, lambda step: 0.0, SPECS)
    params = map_param_names(SPECS, lambda name: jnp.ones(SPECS[name].shape))
    gradients = jax.tree.map(lambda x: 2 * x, params)

    def of_moments(function, state):
        def apply(path, leaf):
            is_moment = ".nu" in jax.tree_util.keystr(path)
            return function(leaf) if is_moment else leaf

        return jax.tree_util.tree_map_with_path(apply, state)

    step = jax.jit(lambda state: optimizer.update(gradients, state, params)[1])
    state = of_moments(jnp.ones_like, optimizer.init(params))
    for _ in range(64):
        state = step(state)
    moments = []
    of_moments(moments.append, state)
    assert moments
    return moments


@pytest.mark.parametrize("opt_type", ["adamw", "normuon", "soap"])
def test_second_moments_in_bfloat16_grow_as_in_float32(opt_type):
    keys = {"opt_type": opt_type, "nu_dtype": "bfloat16"}
    moments = second_moments(**keys)
    assert {leaf.dtype.name for leaf in moments} == {"bfloat16"}
    if opt_type == "adamw":
        expected = 4 - 3 * 0.999**64
        values = np.concatenate([np.float64(leaf).ravel() for leaf in moments])
        assert values.mean() == pytest.approx(expected, rel=0.01)
        assert np.unique(values).size > 3
        [same] = {leaf.dtype.name for leaf in second_moments(opt_type=opt_type)}
        assert same == "float32"
