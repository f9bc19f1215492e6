"""Growth onto a mesh gives every device its part of the same numbers."""

import jax
import numpy as np
import pytest

from MaxText.checkpointing.growth.settling import settle
from MaxText.checkpointing.manager import Checkpoints
from MaxText.checkpointing.starting_point import restore_or_initialize
from MaxText.configuration.saved import flat
from MaxText.layers.model import Model
from MaxText.parallelism import mesh
from MaxText.training.optimizer import make_optimizer
from MaxText.training.schedule import learning_rate_schedule
from MaxText.training.step import make_initialize
from tests.checkpointing.growing import by_name, config_of, grow_by, save, trained

pytestmark = pytest.mark.multi_device


@pytest.mark.parametrize("sizes", [(1, 8, 1), (2, 2, 2), (1, 1, 8)], ids=str)
def test_sharded_targets(tmp_path, sizes):
    config = config_of()
    run = save(tmp_path / "small", config, trained(config))
    keys = {
        "load_parameters_path": str(run),
        "slot_num": 10,  # 40 in the feed-forward: 8 devices divide these, and not the other
        "growth_mode": "random",
        "growth_moments": "warmed",
    }
    names = ("ici_data_parallelism", "ici_fsdp_parallelism", "ici_tensor_parallelism")
    asked = config_of(**keys, **dict(zip(names, sizes, strict=True)))
    settled = settle(asked, [])
    config = settled.config
    layout = mesh.Layout(mesh.make_mesh(config.mesh, jax.devices()), config.mesh.logical_axis_rules)
    model = Model(config.model)
    optimizer = make_optimizer(
        config.optimizer, learning_rate_schedule(config.schedule), model.parameters
    )
    initialize = make_initialize(model, optimizer)
    abstract = layout.abstract_state(initialize, model.parameters)
    drawn = layout.draw_state(initialize, abstract, 0)
    # Drawn on another mesh they would differ in the last bit, which is not about growth.
    whole = grow_by(tmp_path / "whole", config_of(**keys), jax.device_put(drawn, jax.devices()[0]))
    start = restore_or_initialize(
        Checkpoints(tmp_path / "sharded" / "checkpoints", config.checkpoint),
        config.checkpoint,
        abstract,
        lambda: drawn,
        flat(config),
        lambda line: None,
        settled,
    )
    for got, wanted in zip(jax.tree.leaves(start.state), jax.tree.leaves(abstract), strict=True):
        assert got.sharding == wanted.sharding
    keys_of_ffn = start.state.params["layers"]["mlp"]["keys"]["kernel"]
    assert keys_of_ffn.addressable_shards[0].data.shape != keys_of_ffn.shape
    for name, array in by_name(start.state.params).items():
        np.testing.assert_array_equal(array, whole.params[name], err_msg=name)
    moments = whole.start.state.opt_state[1]
    for kind in ("mu", "nu"):
        expected = by_name(getattr(moments, kind))
        for name, array in by_name(getattr(start.state.opt_state[1], kind)).items():
            np.testing.assert_array_equal(array, expected[name], err_msg=name)
