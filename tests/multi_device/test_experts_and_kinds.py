"""Experts, kinds of attention, Head-QK and static SGU on eight devices equal one device."""

import re

import jax
import numpy as np
import pytest

from MaxText.errors import UserError
from MaxText.parallelism.mesh import check_sharding
from tests.multi_device.same_results import ROWS, assert_same, built, loss_and_gradients

pytestmark = pytest.mark.multi_device

MESHES = {
    "data": {"ici_data_parallelism": 8, "ici_fsdp_parallelism": 1},
    "all": {
        "ici_data_parallelism": 2, "ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2
    },
}  # fmt: skip
EXPERT_MESHES = {
    "expert": {
        "ici_data_parallelism": 2, "ici_fsdp_parallelism": 1, "ici_expert_parallelism": 4
    },
    "expert, fsdp and tensor": {
        "ici_fsdp_parallelism": 2, "ici_expert_parallelism": 2, "ici_tensor_parallelism": 2
    },
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "router_z_loss_weight": 0.01}
PLACES = EXPERTS | {"capacity_factor": 1.0, "eval_capacity_factor": 2.0}
# name -> (keys, meshes)
CASES = {
    "experts with places": (PLACES, EXPERT_MESHES | MESHES),
    "experts with places for parts of a sequence": (
        PLACES | {"moe_group_size": 8}, {"expert": EXPERT_MESHES["expert"]}
    ),
    "experts": (EXPERTS, MESHES),
    "experts of an odd width": (EXPERTS | {"base_mlp_dim": 65}, {"all": MESHES["all"]}),
    "local and linear": (
        {
            "attention_types": [[["local", "linear"], 1]], "sliding_window_size": 5,
            "linear_attention_chunk": 6,
        },
        MESHES,
    ),
    "many blocks of a window": (
        {
            "attention_types": [[["local"], 2]], "sliding_window_size": 3,
            "max_target_length": 50, "base_num_kv_heads": 2,
        },
        MESHES,
    ),
    "memories, static SGU, Head-QK": (
        {
            "num_mem_kv": 3, "static_sgu": True, "static_sgu_kernel": 4, "head_qk": True,
            "head_qk_dim": 8,
        },
        MESHES,
    ),
    "rezero, macaron, scale norm": (
        {"use_rezero": True, "use_macaron": True, "share_parameters": True}, MESHES
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_equal_losses_and_gradients(name):
    keys, meshes = CASES[name]
    expected, _, _ = loss_and_gradients(jax.devices()[:1], **keys)
    for mesh_name, mesh in meshes.items():
        found, gradients, text = loss_and_gradients(jax.devices(), **keys, **mesh)

        assert_same(found, expected, mesh_name)
        on_experts = mesh.get("ici_expert_parallelism", 1)
        assert ("all-to-all" in text) == (on_experts > 1), mesh_name
        if on_experts > 1:
            # Each device holds the experts of its place on the axis, and no other.
            kernel = gradients["layers"]["mlp"]["experts"]["wi_0"]
            split = on_experts * mesh.get("ici_fsdp_parallelism", 1)
            split *= mesh.get("ici_tensor_parallelism", 1)
            assert kernel.addressable_shards[0].data.shape[1] * on_experts == kernel.shape[1]
            assert kernel.addressable_shards[0].data.size * split == kernel.size


def test_no_expert_is_full_while_text_is_generated():
    keys = PLACES | {"eval_capacity_factor": 0.25}
    tokens = np.random.default_rng(0).integers(0, 64, (ROWS, 16)).astype(np.int32)
    lengths = np.full((ROWS,), 16, np.int32)
    found = []
    for devices, mesh in ((jax.devices()[:1], {}), (jax.devices(), EXPERT_MESHES["expert"])):
        _, model, layout = built(devices, **keys, **mesh)
        abstract = layout.abstract_state(model.initialize, model.parameters)
        params = jax.device_put(
            jax.tree.map(np.asarray, jax.jit(model.initialize)(jax.random.key(0))),
            jax.tree.map(lambda x: x.sharding, abstract),
        )

        def run(params, tokens, lengths, model=model):
            decoder = model.merge(params)
            return decoder.logits(decoder.read_prompt(tokens, lengths, 16)[0])

        found.append(np.asarray(layout.jit(run)(params, tokens, lengths)))
    np.testing.assert_allclose(found[1], found[0], atol=1e-4)


def test_where_experts_lie():
    _, model, layout = built(jax.devices(), **PLACES, **EXPERT_MESHES["expert, fsdp and tensor"])
    words = layout.describe(model.parameters)
    assert words is not None
    assert words("layers/mlp/experts/wi_0") == "-,expert,fsdp,tensor"
    assert words("layers/mlp/experts/wo") == "-,expert,tensor,fsdp"
    assert words("layers/mlp/gate/kernel") == "-,fsdp,-"


def test_experts_that_no_device_shares_are_within_the_tolerance():
    mesh = EXPERT_MESHES["expert"]
    # Experts are most of the parameters; without fsdp the others lie whole on every device.
    _, model, layout = built(
        jax.devices(), **PLACES, **mesh, base_mlp_dim=4096, vocab_size=8, base_num_decoder_layers=4
    )
    share = check_sharding(model.parameters, layout, 0.02)
    experts = sum(info.size for name, info in model.parameters.items() if "/experts/" in name)
    assert share == pytest.approx(1 - experts / model.num_parameters)
    with pytest.raises(UserError) as caught:
        check_sharding(model.parameters, layout, share / 2)
    assert re.search("expert 4.*layers/", str(caught.value), re.DOTALL)


def test_meshes_that_do_not_match_name_the_axis_of_experts():
    with pytest.raises(UserError) as caught:
        built(jax.devices(), **PLACES, ici_expert_parallelism=4, ici_tensor_parallelism=4)
    message = str(caught.value)
    assert "ici_expert_parallelism=4" in message
    assert "a multiple of 16 devices, this machine has 8" in message
    advice = message.partition("What to do:")[2]
    assert "ici_expert_parallelism=4" in advice
    given = dict(re.findall(r"(ici_\w+)=(-?\d+)", advice))
    built(jax.devices(), **PLACES, **{name: int(size) for name, size in given.items()})
