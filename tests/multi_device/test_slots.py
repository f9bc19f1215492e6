"""TokenFormer on eight devices: slots over the tensor axis, with the norm over all of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from MaxText.configuration.layer_sections import Pattention
from MaxText.layers.model import Model
from MaxText.layers.pattention import theta
from MaxText.parallelism.mesh import Layout, make_mesh
from MaxText.training.objective import loss_sums
from MaxText.training.optimizer import make_optimizer
from MaxText.training.schedule import learning_rate_schedule
from MaxText.training.step import make_initialize, make_train_step
from tests.small_models import random_batch, tiny_config

pytestmark = pytest.mark.multi_device

MESHES = {
    "tensor": {"ici_fsdp_parallelism": 1, "ici_tensor_parallelism": 8},
    "data, fsdp and tensor": {
        "ici_data_parallelism": 2,
        "ici_fsdp_parallelism": 2,
        "ici_tensor_parallelism": 2,
    },
}
# 8 divides the slots of every part, but not the 4 heads.
SIZES = {"base_num_kv_heads": 4, "base_num_decoder_layers": 2, "slot_num": 24}
KINDS = {
    "tokenformer": {"drop_path": 0.5, "drop_path_schedule": "linear", "proj_bias": True},
    "tokenformer_pytorch": {"normalize_type": "gelu_l2_norm", "scan_layers": False},
}


def gradients_and_steps(family, devices, **keys):
    """Loss, gradients, and what two train steps report; parameters are the same everywhere."""
    config = tiny_config(family, **SIZES, **KINDS[family], **keys)
    model = Model(config.model)
    layout = Layout(make_mesh(config.mesh, devices), config.mesh.logical_axis_rules)
    schedule = learning_rate_schedule(config.schedule)
    optimizer = make_optimizer(config.optimizer, schedule, model.parameters)
    initialize = make_initialize(model, optimizer)
    abstract_state = layout.abstract_state(initialize, model.parameters)
    state = layout.draw_state(initialize, abstract_state, seed=0)
    batch = layout.place(jax.tree.map(np.asarray, random_batch(config, 8, documents=True)), 8)

    def loss_and_gradients(state, batch):
        def loss(params):
            return loss_sums(model.merge(params), batch, config.model.objective).total

        total, gradients = jax.value_and_grad(loss)(state.params)
        return state, {"loss": total, "gradients": gradients}

    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    train_step = make_train_step(model, optimizer, schedule, num_microbatches=1, dropout_seed=0)
    numbers = {}
    for name, function in (("gradients", loss_and_gradients), ("step", train_step)):
        compiled, _ = layout.compile_step(function, abstract_state, layout.abstract_batch(shapes))
        state, numbers[name] = jax.block_until_ready(compiled(state, batch))
    return jax.tree.map(np.asarray, numbers), state


@pytest.mark.parametrize("family", KINDS)
def test_equal_losses_and_gradients(family):
    expected, _ = gradients_and_steps(family, jax.devices()[:1])
    for keys in MESHES.values():
        numbers, state = gradients_and_steps(family, jax.devices(), **keys)

        def compare(path, ours, theirs):
            largest = np.abs(theirs).max() or 1.0
            np.testing.assert_allclose(
                ours / largest, theirs / largest, atol=2e-5, err_msg=jax.tree_util.keystr(path)
            )

        jax.tree_util.tree_map_with_path(compare, numbers, expected)
        split = keys["ici_tensor_parallelism"] * keys["ici_fsdp_parallelism"]
        for part in (state.params["layers"]["self_attention"]["query"],
                     state.params["layers"]["mlp"]):  # fmt: skip
            for side in ("keys", "values"):
                kernel = part[side]["kernel"]
                assert kernel.addressable_shards[0].data.size * split == kernel.size


@pytest.mark.parametrize("kind", ["l2_norm_gelu", "softmax", "gelu_layer_norm"])
def test_the_norm_is_over_all_slots_wherever_they_are(kind):
    """No device gathers the scores: sums over its own slots are added up."""
    mesh = make_mesh(tiny_config(**MESHES["tensor"]).mesh, jax.devices())
    ours = theta(Pattention(normalize_type=kind, slot_num=64), "qkv", 8)
    scores = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 64)), jnp.float32)
    split = jax.device_put(
        scores, jax.sharding.NamedSharding(mesh, PartitionSpec(None, None, "tensor"))
    )
    compiled = jax.jit(ours, out_shardings=split.sharding).lower(split).compile()
    np.testing.assert_allclose(compiled(split), ours(scores), rtol=1e-5, atol=1e-6)
    text = compiled.as_text()
    assert "all-reduce" in text
    assert "all-gather" not in text
