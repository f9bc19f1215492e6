"""global_batch_size: the same batch on any number of devices."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from MaxText.config.axis_rules import MESH_AXES
from MaxText.config.loading import load_config
from MaxText.cost.abstract_step import FakeDevice
from MaxText.errors import UserError
from MaxText.input_pipeline.loader import open_batches
from MaxText.input_pipeline.sequences.batch_source import BatchShard
from MaxText.input_pipeline.sequences.plan_batches import plan_batches, resolve_global_batch
from MaxText.parallelism.device_mesh import mesh_sizes
from MaxText.parallelism.mesh import ShardingPlan, microbatch_size


def resolved(num_devices, log=lambda line: None, **keys):
    """A configuration with its batch keys resolved, and the mesh of absent devices."""
    config = load_config("quickstart.yml", dataset_type="synthetic", **keys)
    devices = [FakeDevice(i, "cpu", "cpu", i, 0) for i in range(num_devices)]
    mesh = Mesh(np.array(devices).reshape(mesh_sizes(config.mesh, devices).total), MESH_AXES)
    sharding = ShardingPlan(mesh, config.mesh.logical_axis_rules)
    return resolve_global_batch(config, sharding, log), sharding


@pytest.mark.parametrize(
    ("num_devices", "keys", "per_device", "microbatches"),
    [
        (4, {}, 3, 1),
        (3, {}, 2, 2),  # 4 would not fit
        (2, {}, 3, 2),
        (1, {}, 3, 4),
        (4, {"ici_tensor_parallelism": 2}, 3, 1),
        (4, {"per_device_batch_size": 12}, 3, 1),
    ],
)
def test_the_batch_is_the_same_on_any_number_of_devices(
    num_devices, keys, per_device, microbatches
):
    keys = {"global_batch_size": 12, "per_device_batch_size": 3} | keys
    config, sharding = resolved(num_devices, **keys)
    batch = config.batch
    assert (batch.per_device_batch_size, batch.gradient_accumulation_steps) == (
        per_device,
        microbatches,
    )
    plan = plan_batches(config, sharding)
    assert plan.batch_size(plan.at(0)) == 12


def test_the_choice_is_reported(told):
    resolved(2, told, global_batch_size=12, per_device_batch_size=3)


@pytest.mark.parametrize(
    ("num_devices", "keys"),
    [(5, {"per_device_batch_size": 4}), (4, {"per_device_batch_size": 0.5})],
    ids=["does not divide", "too small"],
)
def test_a_batch_that_does_not_fit(num_devices, keys, told):
    with pytest.raises(UserError) as error:
        resolved(num_devices, global_batch_size=12, **keys)
    told(error.value)


def test_without_the_key_nothing_changes():
    config, _ = resolved(4, per_device_batch_size=3, gradient_accumulation_steps=2)
    assert config.batch.gradient_accumulation_steps == 2
    assert config.batch.per_device_batch_size == 3


@pytest.mark.parametrize("num_devices", [4, 1])
def test_evaluations_read_as_many_sequences_on_any_number_of_devices(num_devices, monkeypatch):
    config, sharding = resolved(
        num_devices, global_batch_size=12, per_device_batch_size=3, eval_steps=2, eval_interval=1
    )
    batch_size = microbatch_size(config.batch, sharding)
    _, batches = open_batches(config, plan_batches(config, sharding), batch_size, BatchShard(0, 1))
    assert batches is not None
    assert sum(len(jax.tree.leaves(batch)[0]) for batch in batches) == 24
