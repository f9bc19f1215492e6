"""Slots grow in a model with dense connections; its depth does not."""

import numpy as np
import pytest

from MaxText.checkpointing.growth.plan import Misfits, plan
from MaxText.checkpointing.matching import Leaf
from MaxText.errors import UserError
from MaxText.layers.model import Model
from tests.checkpointing.growing import config_of, grow, logits, save, trained
from tests.small_models import tiny_config

DENSE = {"dense_conn": True, "dense_mixing": "sum", "scan_layers": False}
KINDS = {
    "stacked layers": DENSE | {"mudd_prenorm": True},
    "layers that differ": DENSE | {"dense_first_norms": "one", "block_norm_parametric": True},
}


@pytest.fixture(scope="module", params=KINDS)
def small(request, tmp_path_factory):
    """A run of 2 updates, whose sums have weights by then: (folder, keys, state)."""
    keys = KINDS[request.param]
    config = config_of(**keys)
    state = trained(config)
    assert ("0" in state.params["layers"]) == (request.param != "stacked layers")
    return save(tmp_path_factory.mktemp("small"), config, state), keys, state


def test_the_function_is_kept(small, tmp_path):
    run, keys, state = small
    grown = grow(tmp_path, run, slot_num=10, **keys)
    before = logits(config_of(**keys), state.params)
    after = logits(grown.settled.config, grown.start.state.params)
    np.testing.assert_allclose(after, before, rtol=0, atol=1e-5 * np.abs(before).max())
    growth = grown.settled.growth
    assert growth is not None
    assert growth.plan.slots
    assert all(new > old for old, new in growth.plan.slots.values())
    assert grown.start.changes["slot_num"] == ("6", "10")


@pytest.mark.parametrize("mode", ["function_preserving", "random"])
def test_depth_is_refused_in_one_line(small, tmp_path, mode):
    run, keys, _ = small
    with pytest.raises(UserError) as caught:
        grow(tmp_path, run, base_num_decoder_layers=4, growth_mode=mode, **keys)
    lines = str(caught.value).splitlines()
    assert lines[1] == (
        "  layers 2 -> 4: each layer of a model with dense connections sums another number of "
        "outputs; only slots can grow"
    )
    assert not any("missing" in line for line in lines)
    assert "  base_num_decoder_layers: 2 -> 4" in lines


def test_layers_that_differ_by_their_widths():
    def parameters(num_layers):
        keys = {"dynamic_mlp_dim": True, "mlp_dim_multiple": 8, "scan_layers": False}
        return Model(tiny_config(base_num_decoder_layers=num_layers, **keys).model).parameters

    stored = {name: Leaf(info.shape, np.dtype(info.dtype)) for name, info in parameters(2).items()}
    assert not plan(stored, parameters(2)).changes
    for depth in (3, 4):
        with pytest.raises(Misfits) as caught:
            plan(stored, parameters(depth))
        assert caught.value.problems == [
            f"layers 2 -> {depth}: no two layers have the same shapes, so none can be a copy of "
            "another"
        ]
