"""ZeRO stage 1: moments in parts on the copies of a model change memory and nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.configuration.training_sections import Mesh
from MaxText.layers.weights import ParameterInfo
from MaxText.parallelism.mesh import make_layout
from MaxText.training.state import TrainState
from tests.multi_device.same_results import assert_read_as
from tests.multi_device.test_meshes import MESHES, train

pytestmark = pytest.mark.multi_device

# Copies alone, and beside other ways to split.
KINDS = {"data": 8, "data, fsdp and tensor": 2}


def moments(state):
    """Every array of the optimizer's state with more than one dimension."""
    return [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim > 1]


def bytes_per_device(leaves):
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)


def test_where_arrays_are_split():
    keys = {"ici_data_parallelism": 2, "ici_fsdp_parallelism": 4, "shard_optimizer_over_data": True}
    layout = make_layout(Mesh(**keys), jax.devices())
    info = ParameterInfo((6, 16), jnp.dtype("float32"), (None, "embed"), 1)
    odd = ParameterInfo((5, 8), jnp.dtype("float32"), (None, "embed"), 1)
    bias = ParameterInfo((8,), jnp.dtype("float32"), ("embed",), 0)
    small = ParameterInfo((3,), jnp.dtype("float32"), ("norm",), 0)
    parameters = {"kernel": info, "odd": odd, "bias": bias, "small": small}
    arrays = {name: jax.ShapeDtypeStruct(of.shape, of.dtype) for name, of in parameters.items()}
    found = layout.state_shardings(TrainState(arrays["small"], arrays, arrays), parameters)
    assert {name: tuple(of.spec) for name, of in found.opt_state.items()} == {
        "kernel": ("data", "fsdp"),  # along what was whole, not along the longest
        "odd": (None, ("fsdp", "data")),  # 5 has no halves, and 8 has eighths
        "bias": (("fsdp", "data"),),
        "small": (None,),
    }
    assert found.params == layout.parameter_shardings(parameters)


@pytest.fixture(scope="module")
def trained():
    """Mesh and whether moments are split -> numbers of three steps and the state after them."""
    return {
        (mesh, split): train(
            "llama2", jax.devices(), shard_optimizer_over_data=split, **MESHES[mesh]
        )
        for mesh in KINDS
        for split in (False, True)
    }


@pytest.mark.parametrize("mesh", KINDS)
def test_the_same_training_with_a_part_of_the_bytes(trained, mesh):
    (whole_numbers, whole), (numbers, parts) = (trained[mesh, split] for split in (False, True))
    np.testing.assert_allclose(numbers, whole_numbers, rtol=1e-6)
    # Sums in another order, and Adam divides by the root of squares that may be tiny.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=2e-5),
        jax.device_get(parts.params),
        jax.device_get(whole.params),
    )
    assert len(moments(parts)) > 10
    assert bytes_per_device(moments(parts)) * KINDS[mesh] == bytes_per_device(moments(whole))
    # Parameters lie as before, for the forward pass.
    layouts = (jax.tree.map(lambda x: x.sharding, state.params) for state in (parts, whole))
    assert next(layouts) == next(layouts)


def test_other_rules_with_whole_and_factored_moments():
    for keys in (
        {"opt_type": "adafactor", "adafactor_min_dim_size_to_factor": 8},
        {"opt_type": "muon"},
    ):
        whole, _ = train("llama2", jax.devices(), **MESHES["data"], **keys)
        numbers, state = train(
            "llama2", jax.devices(), shard_optimizer_over_data=True, **MESHES["data"], **keys
        )
        np.testing.assert_allclose(numbers, whole, rtol=1e-5)
        split = [leaf for leaf in moments(state) if not leaf.sharding.is_fully_replicated]
        assert len(split) > len(moments(state)) / 2


@pytest.mark.parametrize("split", [True, False])
def test_checkpoints_are_read_under_the_other_setting(trained, tmp_path, split):
    state, other = trained["data", split][1], trained["data", not split][1]
    assert_read_as(state, other, tmp_path / "checkpoints")
