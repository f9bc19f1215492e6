"""Dense connections on eight devices: the same loss and gradients, and checkpoints of any mesh."""

import functools

import jax
import numpy as np
import pytest

from MaxText.checkpointing.manager import Checkpoints
from MaxText.checkpointing.matching import checkpoint_metadata
from MaxText.checkpointing.starting_point import restore_or_initialize
from MaxText.configuration.saved import flat
from MaxText.errors import UserError
from MaxText.layers.model import Model
from MaxText.parallelism.mesh import Layout, check_sharding, make_mesh
from MaxText.training.objective import loss_sums
from MaxText.training.optimizer import make_optimizer, per_parameter
from MaxText.training.schedule import learning_rate_schedule
from MaxText.training.step import make_initialize, make_train_step
from tests.multi_device.test_meshes import MESHES
from tests.small_models import random_batch, tiny_config

pytestmark = pytest.mark.multi_device

ONE = {"ici_fsdp_parallelism": 1}
SIZES = {
    "base_num_kv_heads": 4,
    "base_num_decoder_layers": 2,
    "scan_layers": False,
    "remat_policy": "full",
    "dense_mixing": "sum",
    "weight_init": "fan_in",
}
DIFFERING = {"mlp_dim_multiple": 16}  # 32 and 96
KINDS = {
    "muddformer": DIFFERING,
    "muddformer_prepost": {"dynamic_mlp_dim": False},  # stacked
    "muddpythia": DIFFERING | {"dense_mixing": "einsum"},
    "llama2": {"dense_conn": True, "dense_mixing": "kernel", "scan_layers": True},
}


def config_of(family, mesh):
    return tiny_config(family, **(SIZES | KINDS[family] | mesh))


def layout_of(config, devices=None):
    devices = jax.devices() if devices is None else devices
    return Layout(make_mesh(config.mesh, devices), config.mesh.logical_axis_rules)


@functools.cache
def numbers(family):
    """Parameters by name, with connections that have an effect.

    A larger one would make sums in which states nearly cancel. There, rounding alone (the rows of
    the batch one by one, on one device) moves gradients by more than 1e-5.
    """
    model = Model(config_of(family, ONE).model)
    fresh = jax.jit(model.initialize)(jax.random.key(0))
    generator = np.random.default_rng(0)
    names = {
        "/".join(entry.key for entry in path): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(fresh)
    }
    return {
        name: (leaf + 0.02 * generator.normal(size=leaf.shape)).astype(np.float32)
        for name, leaf in names.items()
    }


def loss_and_gradients(family, mesh, devices):
    """(loss, gradients) of one batch, on a mesh."""
    config = config_of(family, mesh)
    model, layout = Model(config.model), layout_of(config, devices)
    shardings, values = layout.parameter_shardings(model.parameters), numbers(family)
    parameters = per_parameter(
        model.parameters, lambda name: jax.device_put(values[name], shardings[name])
    )
    batch = layout.place(jax.tree.map(np.asarray, random_batch(config, 8, documents=True)), 8)

    def run(parameters, batch):
        def loss(parameters):
            total = loss_sums(model.merge(parameters), batch, config.model.objective).total
            return total / batch.weights_BT.sum()

        return jax.value_and_grad(loss)(parameters)

    return jax.tree.map(np.asarray, jax.block_until_ready(layout.jit(run)(parameters, batch)))


@pytest.fixture(scope="module", params=KINDS)
def family_and_expected(request):
    return request.param, loss_and_gradients(request.param, ONE, jax.devices()[:1])


@pytest.mark.parametrize("mesh", MESHES)
def test_equal_losses_and_gradients(family_and_expected, mesh):
    family, (loss, gradients) = family_and_expected
    ours, our_gradients = loss_and_gradients(family, MESHES[mesh], jax.devices())
    np.testing.assert_allclose(ours, loss, rtol=1e-5)
    compare_gradients(our_gradients, gradients)


def compare_gradients(our_gradients, gradients):
    def compare(path, ours, theirs):
        largest = np.abs(theirs).max()
        assert largest > 0, path
        np.testing.assert_allclose(
            ours / largest, theirs / largest, atol=1e-5, err_msg=jax.tree_util.keystr(path)
        )

    jax.tree_util.tree_map_with_path(compare, our_gradients, gradients)


def test_hidden_states_that_are_divided(family_and_expected):
    """Then no device has a whole state to make weights of."""
    family, (loss, gradients) = family_and_expected
    mesh = {
        "ici_fsdp_parallelism": 4,
        "ici_tensor_parallelism": 2,
        "logical_axis_rules": [["activation_embed", ["tensor"]]],
    }
    ours, our_gradients = loss_and_gradients(family, mesh, jax.devices())
    np.testing.assert_allclose(ours, loss, rtol=1e-5)
    compare_gradients(our_gradients, gradients)


def test_a_checkpoint_of_one_mesh_goes_on_on_another(tmp_path):
    """Moments lie under the numbers of layers, too."""
    losses, folder = {}, tmp_path / "checkpoints"
    for mesh in ("data, fsdp and tensor", "fsdp"):
        config = tiny_config("muddformer", **SIZES, **DIFFERING, **MESHES[mesh])
        model, layout = Model(config.model), layout_of(config)
        schedule = learning_rate_schedule(config.schedule)
        optimizer = make_optimizer(config.optimizer, schedule, model.parameters)
        initialize = make_initialize(model, optimizer)
        abstract = layout.abstract_state(initialize, model.parameters)
        kernel = abstract.params["layers"]["1"]["mlp"]["wi_0"]["kernel"]
        assert any(kernel.sharding.spec)
        checkpoints = Checkpoints(folder, config.checkpoint)
        state = restore_or_initialize(
            checkpoints, config.checkpoint, abstract,
            lambda layout=layout, initialize=initialize, abstract=abstract: layout.draw_state(
                initialize, abstract, 0
            ),
            flat(config), lambda line: None,
        ).state  # fmt: skip
        batches = [
            layout.place(jax.tree.map(np.asarray, random_batch(config, 8, seed)), 8)
            for seed in range(3)
        ]
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batches[0])
        step, _ = layout.compile_step(
            make_train_step(model, optimizer, schedule, num_microbatches=1, dropout_seed=0),
            abstract,
            layout.abstract_batch(shapes),
        )
        for got, asked in zip(jax.tree.leaves(state), jax.tree.leaves(abstract), strict=True):
            assert got.sharding == asked.sharding
        if not losses:
            for batch in batches[:2]:
                state, _ = jax.block_until_ready(step(state, batch))
            metadata = checkpoint_metadata(flat(config), state.params)
            checkpoints.save(1, state, {"step": 2}, metadata)
        assert int(state.step) == 2
        checkpoints.close()
        _, metrics = jax.block_until_ready(step(state, batches[2]))
        losses[mesh] = float(metrics["loss"])
    first, second = losses.values()
    np.testing.assert_allclose(first, second, rtol=1e-5)


def test_widths_that_the_mesh_does_not_divide():
    """The same words for widths that differ as for one."""
    tensor = {"ici_fsdp_parallelism": 1, "ici_tensor_parallelism": 8}

    def refused(**keys):
        sizes = {"base_num_query_heads": 8, "base_num_kv_heads": 8, "base_mlp_dim": 100}
        config = tiny_config(**sizes, scan_layers=False, **keys, **tensor)
        with pytest.raises(UserError) as error:
            check_sharding(Model(config.model).parameters, layout_of(config), 0.02)
        return str(error.value).splitlines()

    one = refused()
    assert "    layers/mlp/wi_0/kernel (3, 32, 100): mlp 100 is no multiple of tensor 8" in one
    assert "mlp_dim_multiple" not in one[-1]
    several = refused(dynamic_mlp_dim=True, mlp_dim_multiple=25)  # 50, 100 and 150
    assert "    layers/2/mlp/wi_0/kernel (32, 150): mlp 150 is no multiple of tensor 8" in several
    assert "multiples of mlp_dim_multiple" in several[-1]
