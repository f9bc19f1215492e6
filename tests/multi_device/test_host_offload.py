"""Moments in the host's memory change where they lie and nothing else."""

import jax
import numpy as np
import pytest

from MaxText.checkpointing.checksums import array_checksums
from MaxText.configuration.training_sections import Mesh
from MaxText.errors import UserError
from MaxText.parallelism.mesh import HOST_MEMORY, make_layout
from MaxText.training.recovery import copied, placed
from tests.checkpointing.small_state import abstract, assert_bit_equal
from tests.multi_device.same_results import assert_read_as
from tests.multi_device.test_meshes import train

pytestmark = pytest.mark.multi_device

KEYS = {
    "ici_data_parallelism": 2, "ici_pipeline_parallelism": 2, "ici_fsdp_parallelism": 2,
    "shard_optimizer_over_data": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def trained():
    """Whether moments lie in the host's memory -> numbers of three steps and the state."""
    return {
        offloads: train("llama2", jax.devices(), **KEYS, optimizer_memory_host_offload=offloads)
        for offloads in (False, True)
    }


def test_the_same_training(trained):
    (numbers, kept), (same_numbers, offloaded) = trained[False], trained[True]
    np.testing.assert_array_equal(same_numbers, numbers)
    assert_bit_equal(offloaded, jax.device_get(kept))
    for leaf, on_device in zip(
        jax.tree.leaves(offloaded.opt_state), jax.tree.leaves(kept.opt_state), strict=True
    ):
        assert leaf.sharding.spec == on_device.sharding.spec
        assert (leaf.sharding.memory_kind == HOST_MEMORY) == (leaf.ndim > 0)
    assert all(x.sharding.memory_kind == "device" for x in jax.tree.leaves(offloaded.params))


@pytest.mark.parametrize("offloads", [True, False])
def test_checkpoints_are_read_under_the_other_setting(trained, tmp_path, offloads):
    state, other = trained[offloads][1], trained[not offloads][1]
    assert array_checksums(state) == array_checksums(other)
    assert_read_as(state, other, tmp_path / "checkpoints")


def test_a_run_that_goes_back_puts_copies_where_they_were(trained):
    state = trained[True][1]
    again = placed(copied(state), abstract(state))
    assert_bit_equal(again, jax.device_get(state))
    for got, asked in zip(jax.tree.leaves(again), jax.tree.leaves(state), strict=True):
        assert got.sharding == asked.sharding


def test_large_arrays_in_the_host_have_the_checksums_of_the_device():
    # Above what is summed by NumPy.
    values = np.random.default_rng(0).normal(size=(1 << 17,)).astype(np.float32)
    on_device = jax.device_put(values, jax.devices()[0])
    in_host = jax.device_put(values, on_device.sharding.with_memory_kind(HOST_MEMORY))
    assert array_checksums({"x": in_host}) == array_checksums({"x": on_device})


def test_devices_without_such_memory():
    class Old:
        device_kind, slice_index = "cpu", 0

        def addressable_memories(self):
            return []

    with pytest.raises(UserError, match=r"(?s)pinned_host.*optimizer_memory_host_offload=false"):
        make_layout(Mesh(optimizer_memory_host_offload=True), [Old()])
