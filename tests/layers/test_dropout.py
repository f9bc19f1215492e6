"""Dropout and drop path: shares, sizes, and that no two places drop the same."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from MaxText.layers.assembly import block as block_module
from MaxText.layers.assembly.model import Model
from MaxText.layers.attention.attention_core import AttentionSpec, dot_product_attention
from MaxText.layers.context import ForwardContext
from MaxText.layers.dropout import Dropout, drop_path, dropout
from tests.small_models import random_params, tiny_config

KEY = jax.random.key(0)
BRANCHES = {"attention": block_module.MIXER_STREAM, "mlp": block_module.FEED_FORWARD_STREAM}


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_kept_elements_are_scaled_so_that_the_mean_stays(rate):
    x = jnp.full((200, 20, 5), 3.0)
    elements, rows = np.asarray(dropout(x, rate, KEY)), np.asarray(drop_path(x, rate, KEY))
    for dropped, num_draws in ((elements, x.size), (rows, len(x))):
        np.testing.assert_allclose(np.unique(dropped), [0, 3 / (1 - rate)], rtol=1e-6)
        share = (dropped == 0).mean()
        assert abs(share - rate) < 5 * np.sqrt(rate * (1 - rate) / num_draws)
    # A path is that of a whole sequence.
    assert np.all(np.ptp(rows, axis=(1, 2)) == 0)
    assert dropout(x, rate, None) is x
    assert dropout(x.astype(jnp.bfloat16), rate, KEY).dtype == jnp.bfloat16


def first_block(**keys):
    config = tiny_config(base_num_decoder_layers=4, **keys)
    model = Model(config.model)
    weights = model.blueprint.layer_weights(random_params(model)["layers"])[0]
    return nnx.merge(model.blueprint.graphdefs[0], weights)


def assert_unrelated(masks):
    """Random masks of one kind agree at half of the places; none is another's, or its inverse."""
    for (first, x), (second, y) in itertools.combinations(masks.items(), 2):
        assert 0.4 < (x == y).mean() < 0.6, (first, second)


def test_branches_layers_and_steps_drop_other_elements():
    layer, x = first_block(dropout_rate=0.5), jnp.ones((2, 32, 32))
    masks = {}
    for step, index, branch in itertools.product(range(2), range(3), BRANCHES):
        context = ForwardContext(dropout_key=jax.random.fold_in(KEY, step)).for_layer(index)
        finished = layer.finish_branch(x, context, BRANCHES[branch])
        masks[step, index, branch] = np.asarray(finished) == 0
    assert_unrelated(masks)


def test_paths_of_branches_and_layers_are_dropped_independently():
    layer = first_block(drop_path=0.5, drop_path_schedule="constant")
    x, masks = jnp.ones((1000, 1, 1)), {}
    for index, branch in itertools.product(range(3), BRANCHES):
        context = ForwardContext(dropout_key=KEY).for_layer(index)
        by_path = layer.finish_branch(x, context, BRANCHES[branch])
        by_element = dropout(x, 0.5, context.key_for(BRANCHES[branch]))
        masks["path", index, branch] = np.asarray(by_path)[:, 0, 0] == 0
        masks["element", index, branch] = np.asarray(by_element)[:, 0, 0] == 0
    assert_unrelated(masks)


def test_a_linear_schedule_drops_no_path_of_the_first_layer_and_most_of_the_last():
    layer, x = first_block(drop_path=0.6, drop_path_schedule="linear"), jnp.ones((4000, 1, 1))
    for index, rate in enumerate([0.0, 0.2, 0.4, 0.6]):
        context = ForwardContext(dropout_key=KEY).for_layer(index)
        found = np.asarray(layer.finish_branch(x, context, BRANCHES["mlp"]))
        assert (found == 0).mean() == pytest.approx(rate, abs=0.04)
        np.testing.assert_allclose(found.max(), 1 / (1 - rate), rtol=1e-5)


def test_attention_drops_probabilities_after_the_softmax_and_differently_in_each_block():
    """Values are unit vectors, so that outputs are the probabilities."""
    length, rate, size = 64, 0.5, 16
    q, k = (jax.random.normal(jax.random.key(n), (1, length, 1, length)) for n in range(2))
    v = jnp.eye(length)[None, :, None]
    options = {"spec": AttentionSpec(), "block_size": size}

    @jax.jit
    def run(dropout_key):
        drops = {"dropout": Dropout(rate, dropout_key)}
        return [dot_product_attention(q, k, v, **options, **more) for more in ({}, drops)]

    plain, found = (np.asarray(o_BTNH)[0, :, 0] for o_BTNH in run(KEY))
    kept = found != 0
    np.testing.assert_allclose(found, np.where(kept, plain / (1 - rate), 0), atol=1e-5)
    causal = np.tri(length, dtype=bool)
    assert kept[causal].mean() == pytest.approx(1 - rate, abs=0.05)
    firsts = kept[size::size, :size]  # the first row of each block but the first one
    assert all((x != y).any() for x, y in itertools.combinations(firsts, 2))
