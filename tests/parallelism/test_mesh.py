"""Meshes and partition specs that need no second device."""

import math
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from MaxText.config import axis_rules
from MaxText.config.axis_rules import MESH_AXES
from MaxText.config.training_sections import LOGICAL_AXIS_RULES, BatchConfig, MeshConfig
from MaxText.errors import UserError
from MaxText.parallelism.device_mesh import create_device_mesh, mesh_sizes
from MaxText.parallelism.logical_sharding import logical_to_mesh_axes
from MaxText.parallelism.mesh import ShardingPlan, make_mesh, microbatch_size, process_batch_slice
from tests.refusals import refused


def abstract_mesh(**sizes):
    every = dict.fromkeys(MESH_AXES, 1) | sizes
    return AbstractMesh(tuple(every.values()), MESH_AXES, (AxisType.Auto,) * len(MESH_AXES))


def slices(number, per_slice):
    """Devices of several slices, one of each in turn."""
    return [device(index, slice_index=index % number) for index in range(number * per_slice)]


def device(index, **attributes):
    facts = {"process_index": 0, "platform": "gpu", "device_kind": "a kind without coordinates"}
    return SimpleNamespace(id=index, **facts | attributes)


def lies(section, devices, *axes):
    """The array of devices without the axes that are not named, which have one place."""
    # A mesh takes no devices but jax's own.
    found = create_device_mesh(section, devices)
    shape = dict(zip(MESH_AXES, found.shape, strict=True))
    assert math.prod(shape[axis] for axis in axes) == found.size
    return found.reshape([shape[axis] for axis in axes])


def test_axes_inside_slices_and_across_them():
    found = lies(MeshConfig(), slices(2, 4), "data", "fsdp")
    assert [[device.slice_index for device in row] for row in found] == [[0] * 4, [1] * 4]
    section = MeshConfig(
        ici_data_parallelism=2,
        ici_fsdp_parallelism=2,
        dcn_data_parallelism=1,
        dcn_fsdp_parallelism=-1,
    )
    found = lies(section, slices(3, 4), "data", "fsdp")
    # Places inside of a slice lie together.
    assert [[device.slice_index for device in row] for row in found] == [[0, 0, 1, 1, 2, 2]] * 2
    assert len({device.id for device in found.flat}) == 12
    refused("3 and 4", mesh_sizes, MeshConfig(), slices(2, 4)[:-1])


@pytest.mark.parametrize(
    ("asked", "number", "found"),
    [
        ({"dcn_data_parallelism": 4}, 2, "4"),
        ({"ici_fsdp_parallelism": 3, "ici_tensor_parallelism": 5}, 1, "15 .* there are 8"),
        ({"ici_expert_parallelism": 4, "ici_tensor_parallelism": 4}, 1, "a multiple of 16 devices"),
    ],
)
def test_sizes_that_do_not_fit(asked, number, found):
    devices = slices(number, 8 // number)
    refused(found, mesh_sizes, MeshConfig(**asked), devices)


def test_processes_stand_for_slices_where_jax_knows_of_none():
    devices = [device(index, process_index=index // 2, slice_index=0) for index in range(8)]
    found = lies(MeshConfig(), devices, "fsdp")
    assert [device.id for device in found] == list(range(8))  # nothing asked: one slice
    found = lies(MeshConfig(dcn_data_parallelism=2), devices[::-1], "data", "fsdp")
    assert [[device.process_index for device in row] for row in found] == [
        [0, 0, 1, 1], [2, 2, 3, 3]
    ]  # fmt: skip
    refused("dcn_data_parallelism=3", mesh_sizes, MeshConfig(dcn_data_parallelism=3), devices)


# Rules of a user before those of the base, and rules of which later ones are fallbacks.
OWN = axis_rules.merge(LOGICAL_AXIS_RULES, (("embed", ("fsdp_transpose",)),))
FALLBACKS = (("a", ("fsdp",)), ("b", ("fsdp",)), ("b", ("tensor",)), ("c", ("fsdp",)))
ALL = {"fsdp": 2, "fsdp_transpose": 2, "tensor": 2}
LARGE = {"fsdp": 256}


@pytest.mark.parametrize(
    ("names", "shape", "sizes", "rules", "expected"),
    [
        (("embed", "mlp"), (8, 8), {"fsdp": 2, "tensor": 2}, None, ("fsdp", "tensor")),
        (("embed", "mlp"), (8, 8), {"fsdp": 2}, None, ("fsdp", "")),
        (("layers", "norm"), (8, 8), {"fsdp": 2}, None, ("", "")),
        (("activation_batch", None), (8, 8), {"data": 2, "fsdp": 2}, None, ("data fsdp", "")),
        # Two axes split the two dimensions of an MLP; without one the second joins the first.
        (("embed", "mlp"), (8, 8), ALL, None, ("fsdp", "fsdp_transpose tensor")),
        (("mlp", "embed"), (8, 16), ALL, None, ("fsdp_transpose tensor", "fsdp")),
        (("embed", "q_heads", "kv"), (8,) * 3, ALL, None, ("fsdp fsdp_transpose", "tensor", "")),
        # A later rule serves what the first does not divide.
        (("embed",), (12,), {"fsdp": 4, "context": 8}, None, ("fsdp",)),
        (("mlp",), (6,), {"fsdp_transpose": 4, "tensor": 2}, None, ("tensor",)),
        (("embed", "mlp"), (7, 8), {"fsdp": 2, "tensor": 2}, None, ("", "tensor")),
        (("embed", "mlp"), (8, 8), {"fsdp_transpose": 2}, OWN, ("fsdp_transpose", "")),
        # Shards of 20 or 54 rows do not fill tiles: the hidden width serves, if it fits better.
        (("embed", "mlp"), (5120, 20480), LARGE, None, ("", "fsdp")),
        (("layers", "mlp", "embed"), (40, 20480, 5120), LARGE, None, ("", "fsdp", "")),
        (("mlp", "embed"), (13824, 5120), LARGE, None, ("fsdp", "")),
        (("mlp", "embed"), (11008, 4096), LARGE, None, ("", "fsdp")),
        (("mlp", "embed"), (20480, 5120), LARGE | {"tensor": 2}, None, ("tensor fsdp", "")),
        (("q_heads", "kv", "embed"), (40, 128, 5120), LARGE, None, ("", "", "fsdp")),
        # An axis is used once.
        (("a", "b"), (8, 8), {"fsdp": 2, "tensor": 2}, FALLBACKS, ("fsdp", "tensor")),
        (("a", "c"), (8, 8), {"fsdp": 2, "tensor": 2}, FALLBACKS, ("fsdp", "")),
    ],
)
def test_names_become_the_mesh_axes_of_the_rules(names, shape, sizes, rules, expected):
    wanted = (tuple(axes.split()) or None for axes in expected)
    rules, mesh = rules or LOGICAL_AXIS_RULES, abstract_mesh(**sizes)
    assert logical_to_mesh_axes(names, shape, rules, mesh) == PartitionSpec(*wanted)
    with pytest.raises(UserError, match="no_such_axis"):
        logical_to_mesh_axes(("no_such_axis",), (8,), rules, mesh)


def test_a_batch_that_does_not_divide():
    sharding = ShardingPlan(make_mesh(MeshConfig(), jax.devices()[:1]), LOGICAL_AXIS_RULES)
    assert sharding.batch_slice() == (0, 1)
    assert microbatch_size(BatchConfig(per_device_batch_size=4), sharding) == 4
    assert microbatch_size(BatchConfig(per_device_batch_size=4), sharding, per_device=2) == 2
    uneven = BatchConfig(per_device_batch_size=2.5)
    refused(r"per_device_batch_size=2\.5", microbatch_size, uneven, sharding)


@pytest.mark.parametrize(
    ("held", "shares"),
    [
        ([{0, 1}, {2, 3}], [(0, 2), (1, 2)]),
        ([{0}, {0}], [(0, 1), (0, 1)]),
        ([{0}, {0}, {1}, {1}], [(0, 2), (0, 2), (1, 2), (1, 2)]),
        ([{2, 3}, {0, 1}], [(1, 2), (0, 2)]),
        ([{0, 3}, {1, 2}], [(0, 2), (1, 2)]),
        ([{0, 1}, {1, 2}, {2, 0}], [(0, 1), (0, 1), (0, 1)]),
        ([{0, 1}, {2}], [(0, 1), (0, 1)]),
    ],
    ids=["data", "tensor", "both", "order of a torus", "apart", "overlapping", "uneven"],
)
def test_the_rows_that_a_process_reads(held, shares):
    processes = dict(enumerate(held))
    assert [process_batch_slice(processes, process) for process in processes] == shares


def tpu_slice(kind, *shape):
    """Devices of a TPU slice, with the coordinates that jax arranges them by."""
    facts = {"platform": "tpu", "device_kind": kind, "core_on_chip": 0, "slice_index": 0}
    places = enumerate(np.ndindex(*shape[::-1]))
    return [device(index, coords=coords[::-1], **facts) for index, coords in places]


TPU_SLICES = [
    ("TPU v5 lite", (4, 4, 1)), ("TPU v5 lite", (16, 16, 1)), ("TPU v6 lite", (8, 8, 1)),
    ("TPU v5", (4, 4, 4)), ("TPU v5", (8, 8, 8)), ("TPU v4", (4, 4, 8)),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "shape"), TPU_SLICES, ids=str)
@pytest.mark.parametrize("axis", ["tensor", "context", "expert", "pipeline"])
def test_every_mesh_whose_sizes_multiply_builds(kind, shape, axis):
    devices = tpu_slice(kind, *shape)
    for power in range(1, int(math.log2(min(len(devices), 64))) + 1):
        found = create_device_mesh(MeshConfig(**{f"ici_{axis}_parallelism": 2**power}), devices)
        assert sorted(each.id for each in found.flat) == list(range(len(devices)))
    both = MeshConfig(ici_data_parallelism=2, ici_tensor_parallelism=2, ici_context_parallelism=2)
    assert create_device_mesh(both, devices).size == len(devices)


def test_axes_of_the_network_are_not_split_where_the_user_says_so():
    section = MeshConfig(ici_tensor_parallelism=2, allow_split_physical_axes=False)
    with pytest.raises(UserError, match="allow_split_physical_axes=true"):
        create_device_mesh(section, tpu_slice("TPU v5 lite", 16, 16, 1))
