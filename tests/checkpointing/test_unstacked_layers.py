"""Checkpoints that hold each layer of a cycle by its number."""

import jax
import numpy as np

from MaxText.checkpointing.checkpoint_reader import CheckpointReader
from MaxText.config.schema import flatten
from tests.growth.growing import program, save, stored_in
from tests.small_models import tiny_config


def one_by_one(tree, plan):
    """A tree as earlier versions stored it."""

    def apart(node):
        if not (isinstance(node, dict) and "layers" in node):
            return node
        layers = dict(node["layers"])
        for run, stacked in layers.pop("cycle").items():
            for row, index in enumerate(plan.layers_of(int(run))):
                layers[str(index)] = jax.tree.map(lambda leaf: leaf[row], stacked)  # noqa: B023
        return node | {"layers": layers}

    return jax.tree.map(apart, tree, is_leaf=lambda x: isinstance(x, dict) and "layers" in x)


def test_they_load(tmp_path):
    # Twice a dense layer and two with experts, and a dense one.
    config = tiny_config(base_num_decoder_layers=7, num_experts=2, moe_layers=[1, 2, 4, 5])
    plan = config.model.layer_plan
    assert plan == (7, 0, (1, 2), 2)
    made = program(config)
    state = made.random_state(steps=3)
    run = save(tmp_path, config, one_by_one(state, plan))
    reader = CheckpointReader(stored_in(run), flatten(config), print)
    found, params = reader.restore_state(made.abstract), reader.restore_params(made.abstract.params)
    jax.tree.map(np.testing.assert_array_equal, (found, params), (state, state.params))
