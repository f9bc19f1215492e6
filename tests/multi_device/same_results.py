"""What a tiny model gives on any devices, and the comparison with other devices."""

import jax
import numpy as np
import pytest

from MaxText.checkpointing.manager import Checkpoints
from MaxText.checkpointing.matching import checkpoint_metadata
from MaxText.checkpointing.starting_point import restore_or_initialize
from MaxText.configuration.training_sections import Checkpoint
from MaxText.layers.model import Model
from MaxText.parallelism.mesh import make_layout
from MaxText.training.objective import loss_sums, num_tokens
from tests.checkpointing.small_state import CONFIG, assert_bit_equal
from tests.small_models import random_batch, tiny_config

ROWS = 8


def built(devices, family="llama2", **keys):
    """(configuration, model, layout) of two layers."""
    given = {"base_num_kv_heads": 4, "base_num_decoder_layers": 2} | keys
    config = tiny_config(family, **given)
    return config, Model(config.model), make_layout(config.mesh, devices, config.model.pipeline)


def loss_and_gradients(devices, family="llama2", rows=ROWS, noise=0.1, **keys):
    """Every loss, the gradients, and the text of the compiled program.

    Args:
      rows: of the batch.
      noise: standard deviation of what is added to fresh parameters, so that all have an effect.
    """
    config, model, layout = built(devices, family, **keys)
    params = jax.jit(model.initialize)(jax.random.key(0))
    generator = np.random.default_rng(0)
    params = jax.tree.map(lambda x: x + noise * generator.normal(size=x.shape).astype("f"), params)
    abstract = layout.abstract_state(model.initialize, model.parameters)
    shardings = jax.tree.map(lambda x: x.sharding, abstract)
    params = jax.device_put(jax.tree.map(np.asarray, params), shardings)
    batch = random_batch(config, rows, documents=True)
    batch = layout.place(jax.tree.map(np.asarray, batch), rows)

    def run(params, batch):
        def loss(params):
            sums = loss_sums(model.merge(params), batch, config.model.objective, training=True)
            means = sums.means(batch.weights_BT.sum(), num_tokens(batch))
            return sum(means.values()), means

        return jax.grad(loss, has_aux=True)(params)

    compiled = layout.jit(run, out_shardings=(shardings, None)).lower(params, batch).compile()
    gradients, losses = jax.block_until_ready(compiled(params, batch))
    return jax.tree.map(np.asarray, (losses, gradients)), gradients, compiled.as_text()


def assert_same(found, expected, where):
    """Losses and gradients equal to 1e-5 of the largest number of an array."""

    def compare(path, ours, theirs):
        place = f"{where} {jax.tree_util.keystr(path)}"
        largest = np.abs(theirs).max() or 1.0
        np.testing.assert_allclose(ours / largest, theirs / largest, atol=1e-5, err_msg=place)

    jax.tree_util.tree_map_with_path(compare, found, expected)


def assert_read_as(state, other, folder):
    """A checkpoint of one state, read into the layout of another, has the same bits."""
    checkpoints = Checkpoints(folder, Checkpoint())
    checkpoints.save(2, state, {"step": 3}, checkpoint_metadata(CONFIG, state.params))
    checkpoints.close()
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), other
    )
    start = restore_or_initialize(
        Checkpoints(folder, Checkpoint()), Checkpoint(), target, pytest.fail, CONFIG, lambda x: None
    )
    assert_bit_equal(start.state, jax.device_get(state))
    for got, asked in zip(jax.tree.leaves(start.state), jax.tree.leaves(target), strict=True):
        assert got.sharding == asked.sharding
