"""Meshes and partition specs that need no second device."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from MaxText.configuration.training_sections import LOGICAL_AXIS_RULES, Batch, Mesh
from MaxText.errors import UserError
from MaxText.layers.model import Model
from MaxText.parallelism import mesh as mesh_module
from MaxText.parallelism.constraints import constrain, partition_spec
from MaxText.parallelism.mesh import Layout, make_mesh, rows_of_batch, share_of_rows
from tests.small_models import tiny_config


def spec(names, shape, data=1, fsdp=1, tensor=1, rules=LOGICAL_AXIS_RULES):
    sizes = {"data": data, "fsdp": fsdp, "expert": 1, "tensor": tensor}
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * 4)
    return partition_spec(names, shape, rules, mesh)


def slices(number, per_slice):
    """Devices of several slices, one of each in turn."""
    return [
        SimpleNamespace(
            id=index, slice_index=index % number, process_index=0, platform="gpu",
            device_kind="a kind without coordinates",
        )
        for index in range(number * per_slice)
    ]  # fmt: skip


def test_slices_are_divided_along_the_first_axis_that_they_divide():
    # A mesh takes no devices but jax's own.
    arranged = mesh_module._arranged([2, 4, 1, 1], slices(2, 4))
    of = [[device.slice_index for device in row] for row in arranged[:, :, 0, 0]]
    assert of == [[0] * 4, [1] * 4]
    arranged = mesh_module._arranged([1, 6, 1, 1], slices(2, 3))
    assert [device.slice_index for device in arranged.flat] == [0, 0, 0, 1, 1, 1]


def test_slices_that_divide_no_axis():
    section = Mesh(ici_data_parallelism=2, ici_fsdp_parallelism=2, ici_tensor_parallelism=2)
    with pytest.raises(UserError, match=r"(?s)4 slices divide none.*ici_data_parallelism=4"):
        make_mesh(section, slices(4, 2))


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
