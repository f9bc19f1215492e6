"""A checkpoint written on one mesh is read or grown on any other, or on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from MaxText.checkpointing.checksums import array_checksums, host_checksum
from MaxText.checkpointing.compatibility import checkpoint_metadata
from MaxText.checkpointing.manager import CheckpointManager
from MaxText.config.schema import flatten
from MaxText.config.training_sections import CheckpointingConfig
from MaxText.growth.resolve import resolve_growth
from MaxText.layers.assembly.model import Model
from MaxText.parallelism.mesh import HOST_MEMORY, make_sharding_plan
from tests.checkpointing.small_state import CONFIG, assert_bit_equal, fresh_state, on_host, update
from tests.checkpointing.small_state import start as start_run
from tests.growth.growing import by_name, config_of, grow_by, save, trained
from tests.multi_device.same_results import MIXED, assert_read_as, planned, train
from tests.small_models import made_for_training

pytestmark = pytest.mark.multi_device


def shardings(state, shape, names, spec):
    """Splits arrays of two dimensions and more by `spec`, the rest stays whole everywhere."""
    mesh = jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(shape))
    return jax.tree.map(
        lambda x: NamedSharding(
            mesh, PartitionSpec(*spec[-x.ndim :]) if x.ndim > 1 else PartitionSpec()
        ),
        state,
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
    checkpoints = CheckpointManager(folder, CheckpointingConfig())
    checkpoints.save(2, state, {"step": 3}, checkpoint_metadata(CONFIG, state.params))
    for _ in range(5):
        state = jax.block_until_ready(update(state))
    checkpoints.wait()
    return folder, wanted


@pytest.mark.parametrize("mesh", ["fsdp 4 tensor 2", "data 2", ""])
def test_full_state_on_another_mesh(saved, mesh):
    folder, wanted = saved
    target = jax.eval_shape(fresh_state)
    if mesh:
        target = placed(target, shardings(target, *MESHES[mesh]))
    start, _ = start_run(folder.parent, state=target, initialize=pytest.fail)
    assert start.first_step == 3
    for got, asked in zip(jax.tree.leaves(start.state), jax.tree.leaves(target), strict=True):
        assert got.sharding == asked.sharding if mesh else len(got.sharding.device_set) == 1
    assert_bit_equal(start.state, wanted)
    jax.block_until_ready(update(start.state))


def placed(state, sharding):
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, sharding
    )


def test_parameters_on_another_mesh(saved, tmp_path):
    folder, wanted = saved
    state = fresh_state()
    sharding = shardings(state, *MESHES["fsdp 4 tensor 2"])
    section = CheckpointingConfig(load_parameters_path=str(folder))
    start, _ = start_run(
        tmp_path,
        section,
        placed(state, sharding),
        initialize=lambda: jax.device_put(state, sharding),
    )
    table = start.state.params["token_embedder"]
    assert table.sharding == sharding.params["token_embedder"]
    np.testing.assert_array_equal(table, wanted.params["token_embedder"])
    assert int(start.state.step) == 0
    assert jnp.all(start.state.opt_state[1][0].mu["token_embedder"] == 0)


def test_moments_of_unrolled_layers_are_read_on_another_mesh(tmp_path):
    keys = {"scan_layers": False, "mlp_dim_multiple": 16, "weight_init": "fan_in"}
    _, state = train(jax.devices(), "muddformer", **keys, **MIXED)
    other = planned(jax.devices(), "muddformer", **keys, ici_fsdp_parallelism=8).state
    assert any(other.params["layers"]["1"]["mlp"]["wi_0"]["kernel"].sharding.spec)
    assert_read_as(state, other, tmp_path)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_sharded_arrays_have_the_checksum_of_the_whole(dtype):
    auto = jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(auto, auto))
    array = np.random.default_rng(0).normal(size=(4, 160, 240)).astype(dtype)
    specs = [(), ("fsdp",), (None, "fsdp", "tensor"), (None, None, ("tensor", "fsdp"))]
    placed = [
        jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec))) for spec in specs
    ] + [jax.device_put(array, jax.devices()[3])]
    # Above what is summed by NumPy at once.
    placed.append(jax.device_put(array, placed[-1].sharding.with_memory_kind(HOST_MEMORY)))
    assert set(array_checksums(placed).values()) == {host_checksum(array)}


def test_growth_gives_every_device_its_part_of_the_same_numbers(tmp_path):
    config = config_of()
    run = save(tmp_path / "small", config, trained(config))
    # 40 slots in the feed-forward: 8 devices divide these, and not the other.
    keys = {
        "load_parameters_path": str(run),
        "slot_num": 10,
        "growth.mode": "random",
        "growth.opt_state": "warmed",
    }
    resolved = resolve_growth(config_of(**keys, **MIXED), [])
    config = resolved.config
    sharding = make_sharding_plan(config.mesh, jax.devices())
    model = Model(config.model)
    *_, initialize = made_for_training(config, model)
    abstract = sharding.abstract_state(initialize, model.parameters)
    drawn = sharding.init_state(initialize, abstract, 0)
    # Drawn on another mesh they would differ in the last bit, which is not about growth.
    whole = grow_by(tmp_path / "whole", config_of(**keys), jax.device_put(drawn, jax.devices()[0]))
    folder, section = tmp_path / "sharded", config.checkpoint
    start, _ = start_run(folder, section, abstract, flatten(config), lambda: drawn, resolved)
    for got, wanted in zip(jax.tree.leaves(start.state), jax.tree.leaves(abstract), strict=True):
        assert got.sharding == wanted.sharding
    keys_of_ffn = start.state.params["layers"]["mlp"]["keys"]["kernel"]
    assert keys_of_ffn.addressable_shards[0].data.shape != keys_of_ffn.shape
    moments, others = start.state.opt_state[1], whole.start.state.opt_state[1]
    for found, expected in (
        (by_name(start.state.params), whole.params),
        (by_name(moments.mu), by_name(others.mu)),
        (by_name(moments.nu), by_name(others.nu)),
    ):
        for name, array in found.items():
            np.testing.assert_array_equal(array, expected[name], err_msg=name)
