"""Meshes and partition specs that need no second device."""

import importlib.util
import math
import re
import subprocess
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from MaxText.configuration import axis_rules
from MaxText.configuration.axis_rules import MESH_AXES
from MaxText.configuration.training_sections import LOGICAL_AXIS_RULES, Batch, Mesh
from MaxText.errors import UserError
from MaxText.layers.model import Model
from MaxText.parallelism.constraints import constrain, partition_spec
from MaxText.parallelism.device_mesh import arranged, mesh_sizes
from MaxText.parallelism.mesh import Layout, make_mesh, rows_of_batch, share_of_rows
from tests.small_models import tiny_config


def spec(names, shape, rules=LOGICAL_AXIS_RULES, **sizes):
    every = dict.fromkeys(MESH_AXES, 1) | sizes
    mesh = AbstractMesh(tuple(every.values()), MESH_AXES, (AxisType.Auto,) * len(MESH_AXES))
    return partition_spec(names, shape, rules, mesh)


def slices(number, per_slice):
    """Devices of several slices, one of each in turn."""
    return [device(index, slice_index=index % number) for index in range(number * per_slice)]


def device(index, **attributes):
    kind = "a kind without coordinates"
    return SimpleNamespace(
        **{"id": index, "process_index": 0, "platform": "gpu", "device_kind": kind} | attributes
    )


def lies(section, devices, *axes):
    """The array of devices without the axes that are not named, which have one place."""
    # A mesh takes no devices but jax's own.
    found = arranged(section, devices)
    shape = dict(zip(MESH_AXES, found.shape, strict=True))
    assert math.prod(shape[axis] for axis in axes) == found.size
    return found.reshape([shape[axis] for axis in axes])


def test_slices_lie_along_data_by_default():
    found = lies(Mesh(), slices(2, 4), "data", "fsdp")
    assert [[device.slice_index for device in row] for row in found] == [[0] * 4, [1] * 4]


def test_an_axis_inside_slices_and_across_them():
    section = Mesh(
        ici_data_parallelism=2, ici_fsdp_parallelism=2, dcn_data_parallelism=1,
        dcn_fsdp_parallelism=-1,
    )  # fmt: skip
    found = lies(section, slices(3, 4), "data", "fsdp")
    # Places inside of a slice lie together.
    assert [[device.slice_index for device in row] for row in found] == [[0, 0, 1, 1, 2, 2]] * 2
    assert len({device.id for device in found.flat}) == 12


@pytest.mark.parametrize("asked", [{"dcn_fsdp_parallelism": 3}, {"dcn_data_parallelism": 4}])
def test_sizes_across_slices_that_do_not_fit(asked):
    section = Mesh(**asked)
    with pytest.raises(UserError) as error:
        mesh_sizes(section, slices(2, 4))
    assert "there are 2" in str(error.value)
    fits = dict(re.findall(r"(dcn_\w+)=(-?\d+)", str(error.value).partition("What to do")[2]))
    sizes = mesh_sizes(Mesh(**{name: int(size) for name, size in fits.items()}), slices(2, 4))
    assert math.prod(sizes.across) == 2


def test_slices_of_different_sizes():
    with pytest.raises(UserError, match="slices have 3 and 4 devices"):
        mesh_sizes(Mesh(), slices(2, 4)[:-1])


def test_processes_stand_for_slices_where_jax_knows_of_none():
    devices = [device(index, process_index=index // 2, slice_index=0) for index in range(8)]
    found = lies(Mesh(), devices, "fsdp")
    assert [device.id for device in found] == list(range(8))  # nothing asked: one slice
    found = lies(Mesh(dcn_data_parallelism=2), devices[::-1], "data", "fsdp")
    assert [[device.process_index for device in row] for row in found] == [
        [0, 0, 1, 1], [2, 2, 3, 3]
    ]  # fmt: skip
    with pytest.raises(UserError, match=r"dcn_data_parallelism=3 needs 3 equal parts"):
        mesh_sizes(Mesh(dcn_data_parallelism=3), devices)


def test_two_axes_split_the_two_dimensions_of_an_mlp():
    both = {"fsdp": 2, "fsdp_transpose": 2, "tensor": 2}
    mlp = ("fsdp_transpose", "tensor")
    assert spec(("embed", "mlp"), (8, 8), **both) == PartitionSpec(("fsdp",), mlp)
    assert spec(("mlp", "embed"), (8, 8), **both) == PartitionSpec(mlp, ("fsdp",))
    # Where there is no MLP dimension, the second axis splits embed with the first.
    assert spec(("embed", "q_heads", "kv"), (8, 8, 8), **both) == PartitionSpec(
        ("fsdp", "fsdp_transpose"), ("tensor",), None
    )


def test_a_later_rule_serves_what_the_first_does_not_divide():
    assert spec(("embed",), (12,), fsdp=4, context=8) == PartitionSpec(("fsdp",))
    assert spec(("mlp",), (6,), fsdp_transpose=4, tensor=2) == PartitionSpec(("tensor",))
    assert spec(("mlp",), (7,), fsdp_transpose=4, tensor=2) == PartitionSpec(None)


def test_rules_of_a_user_come_before_base_rules():
    rules = axis_rules.merge(LOGICAL_AXIS_RULES, (("embed", ("fsdp_transpose",)),))
    assert spec(("embed", "mlp"), (8, 8), rules=rules, fsdp_transpose=2) == PartitionSpec(
        ("fsdp_transpose",), None
    )


def test_names_become_the_mesh_axes_of_the_rules():
    assert spec(("embed", "mlp"), (8, 8), fsdp=2, tensor=2) == PartitionSpec(("fsdp",), ("tensor",))
    assert spec(("embed", "mlp"), (8, 8), fsdp=2) == PartitionSpec(("fsdp",), None)
    assert spec(("layers", "norm"), (8, 8), fsdp=2) == PartitionSpec(None, None)
    assert spec(("activation_batch", None), (8, 8), data=2, fsdp=2) == PartitionSpec(
        ("data", "fsdp"), None
    )


def test_an_axis_is_used_once_and_later_rules_are_fallbacks():
    rules = (("a", ("fsdp",)), ("b", ("fsdp",)), ("b", ("tensor",)), ("c", ("fsdp",)))
    assert spec(("a", "b"), (8, 8), fsdp=2, tensor=2, rules=rules) == PartitionSpec(
        ("fsdp",), ("tensor",)
    )
    assert spec(("a", "c"), (8, 8), fsdp=2, tensor=2, rules=rules) == PartitionSpec(("fsdp",), None)


def test_a_size_that_does_not_divide_stays_whole():
    assert spec(("embed", "mlp"), (7, 8), fsdp=2, tensor=2) == PartitionSpec(None, ("tensor",))


def test_an_unknown_name_is_an_error():
    with pytest.raises(KeyError, match="no_such_axis"):
        spec(("no_such_axis",), (8,))


def test_every_name_of_the_models_has_a_rule():
    known = {name for name, _ in LOGICAL_AXIS_RULES}
    for family in ("llama2", "gpt2", "gpt_neox", "gpt3", "tokenformer"):
        config = tiny_config(family, base_num_kv_heads=4, use_qk_norm=True)
        for info in Model(config.model).parameters.values():
            assert set(info.logical_axes) <= known


def test_constrain_outside_a_mesh_is_the_identity():
    x = np.ones((2, 3))
    assert constrain(x, "activation_batch", None) is x


def test_a_mesh_that_does_not_match_the_devices():
    with pytest.raises(UserError) as error:
        make_mesh(Mesh(ici_fsdp_parallelism=3, ici_tensor_parallelism=5), jax.devices()[:1])
    message = str(error.value)
    assert "15" in message
    assert "has 1" in message
    assert "ici_fsdp_parallelism=-1" in message


def test_a_batch_that_does_not_divide():
    layout = Layout(make_mesh(Mesh(), jax.devices()[:1]), LOGICAL_AXIS_RULES)
    assert rows_of_batch(Batch(per_device_batch_size=4), layout) == 4
    assert rows_of_batch(Batch(per_device_batch_size=4), layout, per_device=2) == 2
    with pytest.raises(UserError, match=r"per_device_batch_size=2\.5"):
        rows_of_batch(Batch(per_device_batch_size=2.5), layout)


@pytest.mark.parametrize(
    ("held", "shares"),
    [
        # Data over two processes of two devices each.
        ([{(0, 0), (0, 1)}, {(1, 0), (1, 1)}], [(0, 2), (1, 2)]),
        # Tensor parallelism across processes: both hold all rows.
        ([{(0, 0)}, {(0, 0)}], [(0, 1), (0, 1)]),
        ([{(0,)}, {(0,)}, {(1,)}, {(1,)}], [(0, 2), (0, 2), (1, 2), (1, 2)]),
        # The order of the processes in a torus is not that of their numbers.
        ([{(2,), (3,)}, {(0,), (1,)}], [(1, 2), (0, 2)]),
        ([{(0,), (3,)}, {(1,), (2,)}], [(0, 2), (1, 2)]),
        # Neither the same nor apart: each reads all.
        ([{(0,), (1,)}, {(1,), (2,)}, {(2,), (0,)}], [(0, 1), (0, 1), (0, 1)]),
        ([{(0,), (1,)}, {(2,)}], [(0, 1), (0, 1)]),
    ],
    ids=["data", "tensor", "both", "torus", "not together", "overlapping", "uneven"],
)
def test_the_rows_that_a_process_reads(held, shares):
    processes = dict(enumerate(held))
    assert [share_of_rows(processes, process) for process in processes] == shares


def test_one_process_reads_all_rows():
    layout = Layout(make_mesh(Mesh(), jax.devices()[:1]), LOGICAL_AXIS_RULES)
    assert layout.share_of_batch() == (0, 1)


def tpu_slice(kind, *shape):
    """Devices of a TPU slice, with the coordinates that jax arranges them by."""
    return [
        device(
            index, platform="tpu", device_kind=kind, core_on_chip=0, coords=coords[::-1],
            slice_index=0,
        )
        for index, coords in enumerate(np.ndindex(*shape[::-1]))
    ]  # fmt: skip


TPU_SLICES = [
    ("TPU v5 lite", (4, 4, 1)),
    ("TPU v5 lite", (16, 16, 1)),
    ("TPU v6 lite", (8, 8, 1)),
    ("TPU v5", (4, 4, 4)),
    ("TPU v5", (8, 8, 8)),
    ("TPU v4", (4, 4, 8)),
]


@pytest.mark.parametrize(("kind", "shape"), TPU_SLICES, ids=str)
@pytest.mark.parametrize("axis", ["tensor", "context", "expert", "pipeline"])
def test_every_mesh_whose_sizes_multiply_builds(kind, shape, axis):
    devices = tpu_slice(kind, *shape)
    size = 2
    while size <= min(len(devices), 64):
        section = Mesh(**{f"ici_{axis}_parallelism": size})
        found = arranged(section, devices)
        assert sorted(each.id for each in found.flat) == list(range(len(devices)))
        size *= 2
    both = Mesh(ici_data_parallelism=2, ici_tensor_parallelism=2, ici_context_parallelism=2)
    assert arranged(both, devices).size == len(devices)


TOPOLOGIES = """
import itertools
from MaxText.compilation import targets
from MaxText.configuration.training_sections import Mesh
from MaxText.parallelism.device_mesh import arranged

targets.prepare_environment(targets.find("v5e-4"))
number = 0
for name in targets.names():
    target = targets.find(name)
    if not name.startswith("v") or not 8 <= target.num_devices <= 1024:
        continue
    for num_slices in (1, 2):
        devices = list(targets.devices(target, num_slices))
        sizes = [2**power for power in range(11) if target.num_devices % 2**power == 0]
        for one, other in itertools.product(sizes, sizes):
            if target.num_devices % (one * other):
                continue
            for axes in ("tensor", "context"), ("pipeline", "tensor"), ("expert", "data"):
                keys = (f"ici_{axis}_parallelism" for axis in axes)
                section = Mesh(**dict(zip(keys, (one, other))))
                found = arranged(section, devices)
                assert len({device.id for device in found.flat}) == len(devices), (name, section)
                number += 1
print(number)
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")
def test_every_mesh_builds_on_the_topologies_of_libtpu():
    done = subprocess.run([sys.executable, "-c", TOPOLOGIES], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 1000


def test_axes_of_the_network_are_not_split_where_the_user_says_so():
    section = Mesh(ici_tensor_parallelism=2, allow_split_physical_axes=False)
    with pytest.raises(UserError, match="allow_split_physical_axes=true"):
        arranged(section, tpu_slice("TPU v5 lite", 16, 16, 1))
