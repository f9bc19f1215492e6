"""The same training on one device and on eight, for every kind of mesh."""

import jax
import numpy as np
import pytest

from MaxText.configuration.training_sections import Batch as BatchSection
from MaxText.errors import UserError
from MaxText.layers.model import Model
from MaxText.parallelism.mesh import Layout, check_sharding, make_layout, make_mesh, rows_of_batch
from MaxText.training.optimizer import make_optimizer
from MaxText.training.schedule import learning_rate_schedule
from MaxText.training.step import make_initialize, make_train_step
from tests.small_models import random_batch, tiny_config

pytestmark = pytest.mark.multi_device

MESHES = {
    "data": {"ici_data_parallelism": 8, "ici_fsdp_parallelism": 1},
    "fsdp": {"ici_fsdp_parallelism": 8},
    "tensor": {"ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 4},
    "data, fsdp and tensor": {
        "ici_data_parallelism": 2,
        "ici_fsdp_parallelism": 2,
        "ici_tensor_parallelism": 2,
    },
}
FAMILIES = {
    "llama2": {"base_num_kv_heads": 4},
    "gpt2": {"base_num_kv_heads": 4},
    "gpt_neox": {"base_num_kv_heads": 4, "scan_layers": False},
}


def train(family, devices, num_microbatches=1, **keys):
    """Losses and gradient norms of three steps, and the parameters after them."""
    config = tiny_config(
        family, base_num_decoder_layers=2, gradient_accumulation_steps=num_microbatches,
        **FAMILIES[family], **keys,
    )  # fmt: skip
    layout = make_layout(config.mesh, devices)
    model = Model(config.model)
    schedule = learning_rate_schedule(config.schedule)
    optimizer = make_optimizer(config.optimizer, schedule, model.parameters)
    initialize = make_initialize(model, optimizer)
    abstract_state = layout.abstract_state(initialize, model.parameters)
    state = layout.draw_state(initialize, abstract_state, seed=0)
    batches = [
        layout.place(jax.tree.map(np.asarray, random_batch(config, 16, seed, documents=True)), 16)
        for seed in range(3)
    ]
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batches[0])
    step, _ = layout.compile_step(
        make_train_step(
            model,
            optimizer,
            schedule,
            num_microbatches=num_microbatches,
            dropout_seed=0,
            fetches_moments=config.mesh.optimizer_memory_host_offload,
        ),
        abstract_state,
        layout.abstract_batch(shapes),
    )
    numbers = []
    for batch in batches:
        # With many steps in flight the simulated devices may deadlock in a collective.
        state, metrics = jax.block_until_ready(step(state, batch))
        numbers.append([float(metrics[name]) for name in ("loss", "grad_norm", "param_norm")])
    return np.array(numbers), state


@pytest.fixture(scope="module", params=FAMILIES)
def family_and_expected(request):
    return request.param, train(request.param, jax.devices()[:1])[0]


@pytest.mark.parametrize("mesh", MESHES)
def test_the_same_losses_on_eight_devices(family_and_expected, mesh):
    family, expected = family_and_expected
    numbers, state = train(family, jax.devices(), **MESHES[mesh])
    np.testing.assert_allclose(numbers, expected, rtol=1e-5)
    kernel = state.params["layers"]["mlp"]["wo"]["kernel"]
    split = MESHES[mesh].get("ici_fsdp_parallelism", 1) * MESHES[mesh].get(
        "ici_tensor_parallelism", 1
    )
    assert kernel.addressable_shards[0].data.size * split == kernel.size
    moments = jax.tree.leaves(state.opt_state)
    assert sum(x.size for x in moments if x.sharding == kernel.sharding) >= 2 * kernel.size


SPLIT_SEQUENCES = {
    "ici_fsdp_parallelism": 2, "ici_fsdp_transpose_parallelism": 2, "ici_context_parallelism": 2,
    "context_parallel_strategy": "ring",
}  # fmt: skip


@pytest.mark.parametrize("mesh", [MESHES["fsdp"], MESHES["data, fsdp and tensor"], SPLIT_SEQUENCES])
def test_accumulation_on_eight_devices(mesh):
    expected, _ = train("llama2", jax.devices()[:1])
    numbers, _ = train("llama2", jax.devices(), num_microbatches=2, **mesh)
    np.testing.assert_allclose(numbers, expected, rtol=1e-5)


@pytest.mark.parametrize("opt_type", ["muon", "adafactor"])
def test_update_rules_on_eight_devices(opt_type):
    expected, _ = train("llama2", jax.devices()[:1], opt_type=opt_type)
    keys = MESHES["data, fsdp and tensor"]
    numbers, _ = train("llama2", jax.devices(), opt_type=opt_type, **keys)
    np.testing.assert_allclose(numbers, expected, rtol=2e-5)


def test_remat_and_chunked_loss_on_eight_devices():
    expected, _ = train("llama2", jax.devices()[:1])
    numbers, _ = train("llama2", jax.devices(), remat_policy="full", num_vocab_tiling=4,
                       **MESHES["data, fsdp and tensor"])  # fmt: skip
    np.testing.assert_allclose(numbers, expected, rtol=1e-5)


def layout_of(config):
    return Layout(make_mesh(config.mesh, jax.devices()), config.mesh.logical_axis_rules)


def test_initial_parameters_do_not_depend_on_the_mesh():
    one = train("llama2", jax.devices()[:1])[1]
    eight = train("llama2", jax.devices(), **MESHES["fsdp"])[1]
    np.testing.assert_allclose(
        one.params["token_embedder"]["embedding"],
        eight.params["token_embedder"]["embedding"],
        atol=1e-4,
    )


def test_a_mesh_that_leaves_much_whole_is_refused():
    config = tiny_config(base_emb_dim=36, head_dim=8)  # fsdp 8 does not divide a width of 36
    with pytest.raises(UserError) as error:
        check_sharding(Model(config.model).parameters, layout_of(config), 0.02)
    assert "sharding_tolerance=0.02" in str(error.value)
    assert "layers/mlp/" in str(error.value)
    fits = tiny_config()
    assert check_sharding(Model(fits.model).parameters, layout_of(fits), 0.02) < 0.02
    copies = tiny_config(ici_data_parallelism=8, ici_fsdp_parallelism=1, base_emb_dim=36)
    assert check_sharding(Model(copies.model).parameters, layout_of(copies), 0.0) == 0.0


def test_meshes_and_batches_that_do_not_match():
    with pytest.raises(UserError, match="3 devices, this machine has 8"):
        layout_of(tiny_config(ici_fsdp_parallelism=3))
    with pytest.raises(UserError, match="a multiple of 3 devices"):
        layout_of(tiny_config(ici_tensor_parallelism=3))
    with pytest.raises(UserError, match="set per_device_batch_size=1"):
        rows_of_batch(BatchSection(per_device_batch_size=0.5), layout_of(tiny_config()))
    tensor = layout_of(tiny_config(ici_tensor_parallelism=4))
    assert rows_of_batch(BatchSection(per_device_batch_size=0.5), tensor) == 4
