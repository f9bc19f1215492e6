"""Layouts and casts for the TPU's compiler in the scan over layers."""

import jax
import numpy as np
import pytest

from MaxText.config.axis_rules import MESH_AXES
from MaxText.config.training_sections import LOGICAL_AXIS_RULES, MeshConfig
from MaxText.cost.abstract_step import FakeDevice
from MaxText.layers.lowering import scanned_layers
from MaxText.layers.lowering.scanned_layers import keep_casts_in_loop, with_token_major_layout
from MaxText.parallelism.logical_sharding import axis_rules
from MaxText.parallelism.mesh import make_mesh


@pytest.mark.parametrize(
    ("sizes", "is_constrained"),
    [({"fsdp": 4}, True), ({"tensor": 4}, False), ({"stage": 4}, False)],
)
def test_layouts_are_constrained_where_xla_gathers_nothing_for_it(sizes, is_constrained):
    shape = [sizes.get(axis, 1) for axis in MESH_AXES]
    tpus = np.array([FakeDevice(number, "tpu", "TPU v5") for number in range(4)])
    mesh = jax.sharding.Mesh(tpus.reshape(shape), MESH_AXES)
    with axis_rules(mesh, LOGICAL_AXIS_RULES):
        # A lambda of its own is traced each time.
        traced = jax.make_jaxpr(lambda x: with_token_major_layout(x))(np.zeros((8, 8, 8)))
    assert ("layout_constraint" in str(traced)) == is_constrained


def test_casts_stay_in_the_loop_without_changing_a_bit(monkeypatch):
    drawn = np.random.default_rng(0).integers(0, 2**32, (64, 64), np.uint32)  # also denormals
    matrix = np.nan_to_num(drawn.view(np.float32))
    weights = {"matrix": matrix, "heads": matrix[None], "ids": drawn}
    monkeypatch.setattr(scanned_layers, "platform", lambda: "tpu")
    assert keep_casts_in_loop(weights) is weights  # exported for any platform
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    with axis_rules(mesh, LOGICAL_AXIS_RULES):
        traced = jax.jit(lambda weights: keep_casts_in_loop(weights)).trace(weights)
    assert str(traced.jaxpr).count("reduce_precision") == 1
    found = traced.lower().compile()(weights)["matrix"]
    assert np.array_equal(np.asarray(found).view(np.uint32), matrix.view(np.uint32))
