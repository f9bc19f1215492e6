"""A checkpoint written on one mesh is read on any other, or on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from MaxText.checkpointing.manager import Checkpoints
from MaxText.checkpointing.matching import checkpoint_metadata
from MaxText.checkpointing.starting_point import restore_or_initialize
from MaxText.configuration.training_sections import Checkpoint
from tests.checkpointing.small_state import CONFIG, assert_bit_equal, fresh_state, on_host, update

pytestmark = pytest.mark.multi_device


def shardings(state, shape, names, spec):
    """Splits arrays of two dimensions and more by `spec`, the rest stays whole everywhere."""
    mesh = jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(shape))
    return jax.tree.map(
        lambda x: NamedSharding(mesh, PartitionSpec(*spec[-x.ndim :]) if x.ndim > 1 else
                                PartitionSpec()),
        state,
    )  # fmt: skip


def abstract_on(state, sharding):
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, sharding
    )


MESHES = {
    "fsdp 8": ((8,), ("fsdp",), (None, "fsdp", None)),
    "fsdp 4 tensor 2": ((4, 2), ("fsdp", "tensor"), (None, "fsdp", "tensor")),
    "data 2": ((2,), ("data",), (None, None, None)),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run on fsdp 8, saved in the background while donating steps go on."""
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    state = fresh_state()
    state = jax.device_put(state, shardings(state, *MESHES["fsdp 8"]))
    for _ in range(3):
        state = jax.block_until_ready(update(state))
    wanted = on_host(state)
    checkpoints = Checkpoints(folder, Checkpoint())
    checkpoints.save(2, state, {"step": 3}, checkpoint_metadata(CONFIG, state.params))
    for _ in range(5):
        state = jax.block_until_ready(update(state))
    checkpoints.close()
    return folder, wanted


@pytest.mark.parametrize("mesh", MESHES)
def test_full_state_on_another_mesh(saved, mesh):
    folder, wanted = saved
    state = fresh_state()
    target = abstract_on(state, shardings(state, *MESHES[mesh]))
    start = restore_or_initialize(
        Checkpoints(folder, Checkpoint()), Checkpoint(), target, pytest.fail, CONFIG, lambda x: None
    )
    assert start.first_step == 3
    for got, asked in zip(jax.tree.leaves(start.state), jax.tree.leaves(target), strict=True):
        assert got.sharding == asked.sharding
    assert_bit_equal(start.state, wanted)
    jax.block_until_ready(update(start.state))


def test_parameters_on_another_mesh(saved, tmp_path):
    folder, wanted = saved
    state = fresh_state()
    sharding = shardings(state, *MESHES["fsdp 4 tensor 2"])
    section = Checkpoint(load_parameters_path=str(folder))
    start = restore_or_initialize(
        Checkpoints(tmp_path / "checkpoints", Checkpoint()),
        section,
        abstract_on(state, sharding),
        lambda: jax.device_put(state, sharding),
        CONFIG,
        lambda line: None,
    )
    table = start.state.params["token_embedder"]
    assert table.sharding == sharding.params["token_embedder"]
    np.testing.assert_array_equal(table, wanted.params["token_embedder"])
    assert int(start.state.step) == 0
    assert jnp.all(start.state.opt_state[1][0].mu["token_embedder"] == 0)


def test_one_device_when_no_sharding_is_asked_for(saved):
    folder, wanted = saved
    target = jax.eval_shape(fresh_state)
    start = restore_or_initialize(
        Checkpoints(folder, Checkpoint()), Checkpoint(), target, pytest.fail, CONFIG, lambda x: None
    )
    assert_bit_equal(start.state, wanted)
    assert all(len(x.sharding.device_set) == 1 for x in jax.tree.leaves(start.state))
