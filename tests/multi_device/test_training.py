"""The same training on one device and on eight, with the optimizer's state anywhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.config.training_sections import MeshConfig
from MaxText.errors import UserError
from MaxText.layers.assembly.model import Model
from MaxText.parallelism.logical_sharding import ParamSpec
from MaxText.parallelism.mesh import (
    HOST_MEMORY,
    assert_params_sufficiently_sharded,
    make_sharding_plan,
)
from MaxText.run.rollback import copy_to_devices, copy_to_host
from MaxText.training.state import TrainState
from tests.checkpointing.small_state import abstract, assert_bit_equal
from tests.multi_device.same_results import MIXED, assert_read_as, train
from tests.refusals import refused
from tests.small_models import assert_close, tiny_config

pytestmark = pytest.mark.multi_device

DATA = {"ici_data_parallelism": 8, "ici_fsdp_parallelism": 1}
RING = {
    "ici_fsdp_parallelism": 2,
    "ici_fsdp_transpose_parallelism": 2,
    "ici_context_parallelism": 2,
    "context_parallel_strategy": "ring",
}
# (keys of the model, keys that may change no numbers, tolerance)
CASES = {
    "llama2, data": ({}, DATA, 1e-5),
    "llama2, accumulation": ({}, MIXED | {"num_microbatches": 2}, 1e-5),
    "llama2, ring, accumulation": ({}, RING | {"num_microbatches": 2}, 1e-5),
    "gpt2, tensor": (
        {"family": "gpt2"},
        {"ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 4},
        1e-5,
    ),
    "gpt_neox, fsdp": ({"family": "gpt_neox", "scan_layers": False}, {}, 1e-5),
    "multi-token prediction": (
        {"mtp_num_layers": 2, "num_vocab_tiling": 2},
        {"ici_fsdp_parallelism": 2, "ici_context_parallelism": 2, "ici_pipeline_parallelism": 2},
        1e-5,
    ),
    "muon": ({"opt_type": "muon"}, MIXED, 2e-5),
    "adafactor": ({"opt_type": "adafactor"}, MIXED, 2e-5),
    "factored, split over data": (
        {"opt_type": "adafactor", "adafactor.min_dim_size_to_factor": 8},
        DATA | {"shard_optimizer_over_data": True},
        1e-5,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_same_losses_on_eight_devices(name):
    keys, mesh, tolerance = CASES[name]
    expected, one = train(jax.devices()[:1], **keys)
    numbers, state = train(jax.devices(), **keys, **mesh)
    np.testing.assert_allclose(numbers, expected, rtol=tolerance)
    initial, other = (each.params["token_embedder"]["embedding"] for each in (one, state))
    np.testing.assert_allclose(initial, other, atol=1e-4)
    if name.startswith("llama2"):
        kernel = state.params["layers"]["mlp"]["wo"]["kernel"]
        split = {"llama2, data": 1, "llama2, accumulation": 4, "llama2, ring, accumulation": 8}
        assert kernel.addressable_shards[0].data.size * split[name] == kernel.size
        moments = jax.tree.leaves(state.opt_state)
        assert sum(x.size for x in moments if x.sharding == kernel.sharding) >= 2 * kernel.size
    if "shard_optimizer_over_data" in mesh:
        split = [leaf for leaf in moments_of(state) if not leaf.sharding.is_fully_replicated]
        assert len(split) > len(moments_of(state)) / 2


def moments_of(state):
    """Every array of the optimizer's state with more than one dimension."""
    return [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim > 1]


@pytest.fixture(scope="module")
def trained():
    """Moments as parameters, in parts on copies of the model (ZeRO stage 1), or in the host."""
    mesh = {"ici_data_parallelism": 2, "ici_pipeline_parallelism": 2, "ici_fsdp_parallelism": 2}
    split = mesh | {"shard_optimizer_over_data": True}
    return {
        "whole": train(jax.devices(), **mesh),
        "split": train(jax.devices(), **split),
        "host": train(jax.devices(), **split, optimizer_memory_host_offload=True),
    }


def test_moments_split_over_copies_change_memory_alone(trained):
    (whole_numbers, whole), (numbers, split) = trained["whole"], trained["split"]
    np.testing.assert_allclose(numbers, whole_numbers, rtol=1e-6)
    # Sums in another order, and Adam divides by the root of squares that may be tiny.
    assert_close(*map(jax.device_get, (split.params, whole.params)), 2e-5)
    assert len(moments_of(split)) > 10
    sizes = [
        sum(leaf.addressable_shards[0].data.nbytes for leaf in moments_of(state))
        for state in (split, whole)
    ]
    assert sizes[0] * 2 == sizes[1]
    # Parameters lie as before, for the forward pass.
    shardings = [jax.tree.map(lambda x: x.sharding, state.params) for state in (split, whole)]
    assert shardings[0] == shardings[1]


def test_moments_in_the_host_change_nothing(trained):
    (numbers, kept), (same_numbers, offloaded) = trained["split"], trained["host"]
    np.testing.assert_array_equal(same_numbers, numbers)
    assert_bit_equal(offloaded, jax.device_get(kept))
    for leaf, on_device in zip(
        jax.tree.leaves(offloaded.opt_state), jax.tree.leaves(kept.opt_state), strict=True
    ):
        assert leaf.sharding.spec == on_device.sharding.spec
        assert (leaf.sharding.memory_kind == HOST_MEMORY) == (leaf.ndim > 0)
    assert all(x.sharding.memory_kind == "device" for x in jax.tree.leaves(offloaded.params))
    again = copy_to_devices(copy_to_host(offloaded), abstract(offloaded))
    assert_bit_equal(again, jax.device_get(offloaded))
    for got, asked in zip(jax.tree.leaves(again), jax.tree.leaves(offloaded), strict=True):
        assert got.sharding == asked.sharding


@pytest.mark.parametrize(("saved", "read"), [("host", "whole"), ("whole", "host")])
def test_checkpoints_are_read_under_the_other_setting(trained, tmp_path, saved, read):
    assert_read_as(trained[saved][1], trained[read][1], tmp_path)


def test_where_moments_are_split():
    keys = {"ici_data_parallelism": 2, "ici_fsdp_parallelism": 4, "shard_optimizer_over_data": True}
    sharding = make_sharding_plan(MeshConfig(**keys), jax.devices())
    parameters = {
        name: ParamSpec(shape, jnp.dtype("float32"), axes, len(shape) - 1)
        for name, shape, axes in [
            ("kernel", (6, 16), (None, "embed")),
            ("odd", (5, 8), (None, "embed")),
            ("bias", (8,), ("embed",)),
            ("small", (3,), ("norm",)),
        ]
    }
    arrays = {name: jax.ShapeDtypeStruct(of.shape, of.dtype) for name, of in parameters.items()}
    found = sharding.state_shardings(TrainState(arrays["small"], arrays, arrays), parameters)
    assert {name: tuple(of.spec) for name, of in found.opt_state.items()} == {
        "kernel": ("data", "fsdp"),  # along what was whole, not along the longest
        "odd": (None, ("fsdp", "data")),  # 5 has no halves, and 8 has eighths
        "bias": (("fsdp", "data"),),
        "small": (None,),
    }
    assert found.params == sharding.parameter_shardings(parameters)


def share_of_whole(tolerance, **keys):
    config = tiny_config(**keys)
    sharding = make_sharding_plan(config.mesh, jax.devices())
    return assert_params_sufficiently_sharded(Model(config.model).parameters, sharding, tolerance)


def test_a_mesh_that_leaves_much_whole_is_refused():
    with pytest.raises(UserError, match=r"(?s)sharding_tolerance=0.02.*layers/mlp/"):
        share_of_whole(0.02, base_emb_dim=36, head_dim=8)  # fsdp 8 does not divide a width of 36
    assert share_of_whole(0.02) < 0.02
    assert share_of_whole(0.0, base_emb_dim=36, **DATA) == 0.0
    heads = {"base_num_query_heads": 8, "base_num_kv_heads": 8, "base_mlp_dim": 100}
    tensor = {"ici_fsdp_parallelism": 1, "ici_tensor_parallelism": 8}
    found = r"(?s)tensor 8.*wi_0/kernel \(3, 32, 100\)"
    refused(found, share_of_whole, 0.02, **heads, **tensor)
