"""Optimizers of whole matrices on eight devices."""

import jax
import numpy as np
import pytest

from MaxText.layers.assembly.model import Model
from MaxText.parallelism.logical_sharding import axis_rules
from MaxText.training.optimizers.matrices import on_whole_matrices
from tests.multi_device.same_results import assert_read_as, built, train

pytestmark = pytest.mark.multi_device

MESH = {"ici_data_parallelism": 2, "ici_fsdp_parallelism": 4}
AVERAGED = {"parameter_average.type": "mean", "base_num_decoder_layers": 4}
# (keys, tolerance)
CASES = {
    "normuon": ({"opt_type": "normuon", "nu_dtype": "bfloat16"}, 2e-5),
    "muonh": ({"opt_type": "muonh"}, 2e-5),
    # Eigenvectors of statistics of few tokens depend on rounding.
    "soap": ({"opt_type": "soap", "soap.frequency": 1}, 1e-3),
}


@pytest.mark.parametrize(
    "name", ["normuon", *(pytest.param(x, marks=pytest.mark.slow) for x in ("muonh", "soap"))]
)
def test_updates_and_averages_are_those_of_one_device(name, tmp_path):
    keys, tolerance = CASES[name]
    keys = keys | AVERAGED
    expected, one = train(jax.devices()[:1], **keys)
    numbers, state = train(jax.devices(), **keys, **MESH)
    np.testing.assert_allclose(numbers, expected, rtol=tolerance)
    query, average = (
        [np.asarray(tree["layers"]["self_attention"]["query"]["kernel"]) for tree in trees]
        for trees in ((one.params, state.params), (one.average, state.average))
    )
    if name != "soap":
        np.testing.assert_allclose(*query, atol=1e-4)
        np.testing.assert_allclose(*average, atol=1e-4)
    # Statistics that are not like the parameters are split, too.
    large = [x for x in jax.tree.leaves(state.opt_state) if x.ndim > 2 and x.size > 4 * 64]
    assert len(large) >= 7  # the matrices of a layer
    assert all(not x.sharding.is_fully_replicated for x in large)
    assert_read_as(state, one, tmp_path)


@pytest.mark.parametrize(("layers", "is_moved"), [(4, True), (3, False)])
def test_whole_matrices_are_exchanged_between_devices(layers, is_moved):
    """By an all-to-all, where the mesh divides the layers."""
    _, model, sharding = built(jax.devices(), base_num_decoder_layers=layers, **MESH)
    name = "layers/mlp/wi_0/kernel"
    spec = model.parameters[name]
    abstract = jax.ShapeDtypeStruct(
        spec.shape, spec.dtype, sharding=sharding.parameter_shardings(model.parameters)[name]
    )
    shapes = []

    def function(x_NIO):
        shapes.append(x_NIO.shape)
        return 2 * x_NIO

    def run(x):
        with axis_rules(sharding.mesh, sharding.rules):
            return on_whole_matrices(function, x, spec)

    assert isinstance(model, Model)
    compiled = jax.jit(run).lower(abstract).compile()
    assert ("all-to-all" in compiled.as_text()) == is_moved
    assert compiled.output_shardings.is_equivalent_to(abstract.sharding, len(spec.shape))
    assert shapes == [(layers, 32, 64)]
