"""Every mesh axis, and mixes of them, give the losses and gradients of one device."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from MaxText.config.layer_sections import PattentionConfig
from MaxText.config.training_sections import BatchConfig
from MaxText.layers.feed_forward.pattention import Theta
from MaxText.parallelism.mesh import assert_params_sufficiently_sharded, check_lengths, make_mesh
from tests.multi_device.same_results import (
    MIXED,
    ROWS,
    assert_same,
    built,
    fresh_parameters,
    loss_and_gradients,
)
from tests.refusals import refused
from tests.small_models import tiny_config

pytestmark = pytest.mark.multi_device

RING = {"context_parallel_strategy": "ring"}
# Sequences split in 4, for parts that move along them.
SPLIT = {"ici_data_parallelism": 2, "ici_context_parallelism": 4}
EXPERT = {"ici_data_parallelism": 2, "ici_expert_parallelism": 4}
EXPERT_MIXED = {"ici_fsdp_parallelism": 2, "ici_expert_parallelism": 2, "ici_tensor_parallelism": 2}
# Connections with large noise nearly cancel states (rounding shows).
DENSE = {
    "scan_layers": False,
    "mlp_dim_multiple": 16,
    "weight_init": "fan_in",
    "dense_aggregation_impl": "sum",
    "noise": 0.02,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "router_z_loss_weight": 0.01,
    "routed_bias": True,
}
BIASES_AND_SHARED = {"router_bias": True, "expert_bias": True, "shared_experts": 1}
PLACES = EXPERTS | {"capacity_factor": 1.0, "eval_capacity_factor": 2.0}
GROUPED = {"base_num_kv_heads": 2}
LATENT = {
    "mixer": "latent_attention",
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
}
DELTA_NET = {
    "mixer": "gated_delta_net",
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    # With 8 and 6, XLA's program for the CPU crashes when it is compiled without optimization.
    "linear_key_head_dim": 5,
    "linear_value_head_dim": 3,
    "linear_chunk_size": 3,
}
MIXED_CONTEXT = {
    "ici_fsdp_parallelism": 2,
    "ici_context_parallelism": 2,
    "ici_tensor_parallelism": 2,
}
TOKENFORMER = {"family": "tokenformer", "slot_num": 16}
MUDD = DENSE | {"family": "muddformer"}
# name -> (keys of the model, keys of the mesh)
CASES = {
    "data": (GROUPED, {"ici_data_parallelism": 4}),
    "fsdp": (MUDD, {"ici_fsdp_parallelism": 4}),
    # Shards of 4 of the width 32: the hidden width is split instead.
    "fsdp, hidden width": (GROUPED, {"ici_fsdp_parallelism": 8}),
    "fsdp_transpose": (TOKENFORMER, {"ici_fsdp_transpose_parallelism": 4}),
    "context": (MUDD, {"ici_context_parallelism": 4}),
    "context, ring": (GROUPED, {"ici_context_parallelism": 4} | RING),
    "context, kernel": (
        {"attention": "flash", "max_target_length": 512, "base_num_decoder_layers": 1},
        {"ici_context_parallelism": 4},
    ),
    "tensor": (GROUPED, {"ici_tensor_parallelism": 4}),
    "tensor, slots": (TOKENFORMER, {"ici_tensor_parallelism": 8}),
    "mixed, slices": (
        GROUPED,
        {"dcn_data_parallelism": 2, "dcn_fsdp_parallelism": 2, "ici_tensor_parallelism": 2},
    ),
    "mixed, slots": (
        {"family": "tokenformer_pytorch", "slot_num": 24, "scan_layers": False},
        MIXED,
    ),
    "mixed, norms before and after": (
        DENSE | {"family": "muddformer_prepost", "dynamic_mlp_dim": False, "remat_policy": "full"},
        {"ici_fsdp_parallelism": 2, "ici_context_parallelism": 2, "ici_tensor_parallelism": 2},
    ),
    "hidden states divided": (
        MUDD | {"family": "muddpythia"},
        {
            "ici_fsdp_parallelism": 4,
            "ici_tensor_parallelism": 2,
            "logical_axis_rules": [["activation_embed", ["tensor"]]],
        },
    ),
    "kernel of connections": (
        DENSE | {"dense_conn": True, "dense_aggregation_impl": "kernel"},
        MIXED,
    ),
    "experts": (PLACES, EXPERT),
    "experts, mixed": (PLACES | {"moe_group_size": 8}, EXPERT_MIXED),
    "experts with biases, shared experts": (EXPERTS | BIASES_AND_SHARED, MIXED),
    "experts of an odd width without places": (EXPERTS | {"base_mlp_dim": 65}, MIXED),
    "windows, linear attention, loss in chunks": (
        {
            "attention_types": [[["local", "linear"], 1]],
            "sliding_window_size": 5,
            "linear_attention.chunk": 6,
            "num_vocab_tiling": 2,
        },
        SPLIT | RING,
    ),
    "memories, static SGU, Head-QK": (
        {
            "num_mem_kv": 3,
            "static_sgu": True,
            "static_sgu_kernel": 4,
            "head_qk": True,
            "head_qk_dim": 8,
        },
        SPLIT,
    ),
    "ALiBi, remat, capped scores": (
        {
            "position_embedding": "alibi",
            "remat_policy": "full",
            "attn_logits_soft_cap": 5.0,
            "attention_block_size": 2,
        },
        SPLIT | RING,
    ),
    "both directions, learned positions": (
        {"mlm_training": True, "mlm.mask_id": 3, "position_embedding": "learned"},
        SPLIT,
    ),
    "parallel blocks": ({"family": "gpt_neox", "scan_layers": False}, SPLIT | RING),
    "rezero, macaron, shared parameters": (
        {"use_rezero": True, "use_macaron": True, "share_layer_params": True},
        MIXED,
    ),
    "sinks, gated output": (
        GROUPED
        | {"attention_sinks": True, "attention_output_gate": True, "attention_block_size": 2},
        SPLIT | RING,
    ),
    "latent attention": (LATENT | {"q_lora_rank": 16}, MIXED_CONTEXT),
    "latent attention, ring": (LATENT, MIXED_CONTEXT | RING),
    # A document begins in the second of four parts.
    "gated DeltaNet": (DELTA_NET, {"ici_context_parallelism": 4, "ici_tensor_parallelism": 2}),
    "KDA": (
        DELTA_NET | {"mixer": "kda", "kda_lora_rank": 4, "linear_num_key_heads": 16},  # unused
        {"ici_context_parallelism": 4, "ici_tensor_parallelism": 2},
    ),
    "many blocks of a window": (
        GROUPED
        | {"attention_types": [[["local"], 2]], "sliding_window_size": 3, "max_target_length": 50},
        MIXED,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_equal_losses_and_gradients(name):
    keys, mesh = CASES[name]
    number = math.prod(size for key, size in mesh.items() if key.endswith("_parallelism"))
    given = {"ici_fsdp_parallelism": 1} | keys | mesh
    found, gradients, text = loss_and_gradients(jax.devices()[:number], **given)
    assert_same(found, loss_and_gradients(jax.devices()[:1], **keys)[0], name)
    assert ("collective-permute" in text) or "context_parallel_strategy" not in mesh
    assert name != "context, kernel" or text.count(" reduce-scatter(") == 2  # of keys and values
    on_experts = mesh.get("ici_expert_parallelism", 1)
    if name.startswith("experts"):
        assert ("all-to-all" in text) == (on_experts > 1)
    split = [mesh.get(f"ici_{axis}_parallelism", 1) for axis in ("fsdp", "tensor")]
    if on_experts > 1:
        # Each device holds the experts of its place on the axis, and no other.
        kernel = gradients["layers"]["mlp"]["experts"]["wi_0"]
        held = kernel.addressable_shards[0].data
        assert held.shape[1] * on_experts == kernel.shape[1]
        assert held.size * on_experts * math.prod(split) == kernel.size
    if "slots" in name:
        of_slots = jax.tree.leaves(gradients["layers"]["mlp"])[0]
        assert of_slots.addressable_shards[0].data.size * math.prod(split) == of_slots.size


@pytest.mark.parametrize("strategy", ["all_gather", "ring"])
def test_no_hidden_state_is_whole(strategy):
    keys = {"context_parallel_strategy": strategy, "base_num_kv_heads": 2, "base_mlp_dim": 96}
    mesh = {"ici_fsdp_parallelism": 1} | SPLIT
    text = loss_and_gradients(jax.devices(), max_target_length=40, **keys, **mesh)[2]
    assert re.search(r"f32\[4,10,\d+\]", text)
    assert not re.search(r"f32\[\d+,40,\d+\]", text)
    gathered = re.search(r"f32\[[\d,]*40[\d,]*\]\S* all-gather", text)
    assert (gathered is None) == (strategy == "ring")


def test_hidden_states_between_layers_are_split_over_tensor():
    keys = {"scan_layers": True, "remat_policy": "full", "max_target_length": 40}
    mesh = {"ici_fsdp_parallelism": 1, "ici_tensor_parallelism": 4}
    text = loss_and_gradients(jax.devices()[:4], **keys, **mesh)[2]
    # Inputs of the two layers, saved for the backward pass.
    assert re.search(r"f32\[2,8,10,32\]", text)
    assert not re.search(r"f32\[2,8,40,32\]", text)


@pytest.mark.parametrize("kind", ["l2_norm_gelu", "softmax", "gelu_layer_norm"])
def test_the_norm_is_over_all_slots_wherever_they_are(kind):
    """No device gathers the scores: sums over its own slots are added up."""
    mesh = make_mesh(
        tiny_config(ici_fsdp_parallelism=1, ici_tensor_parallelism=8).mesh, jax.devices()
    )
    theta = Theta(PattentionConfig(normalize_type=kind, slot_num=64), "qkv", 8)
    scores = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 64)), jnp.float32)
    split = jax.device_put(scores, NamedSharding(mesh, PartitionSpec(None, None, "tensor")))
    compiled = jax.jit(theta, out_shardings=split.sharding).lower(split).compile()
    np.testing.assert_allclose(compiled(split), theta(scores), rtol=1e-5, atol=1e-6)
    text = compiled.as_text()
    assert "all-reduce" in text
    assert "all-gather" not in text


def test_no_expert_is_full_while_text_is_generated():
    keys = PLACES | {"eval_capacity_factor": 0.25}
    tokens = np.random.default_rng(0).integers(0, 64, (ROWS, 16)).astype(np.int32)
    lengths = np.full((ROWS,), 16, np.int32)
    found = []
    for devices, mesh in ((jax.devices()[:1], {}), (jax.devices(), EXPERT)):
        _, model, sharding = built(devices, **keys, **{"ici_fsdp_parallelism": 1}, **mesh)

        def run(params, tokens, lengths, model=model):
            decoder = model.merge(params)
            return decoder.logits(decoder.prefill(tokens, lengths, 16)[0])

        params = fresh_parameters(model, sharding)
        found.append(np.asarray(sharding.jit(run)(params, tokens, lengths)))
    np.testing.assert_allclose(found[1], found[0], atol=1e-4)


def test_lengths_that_the_mesh_does_not_divide():
    _, _, sharding = built(jax.devices(), ici_fsdp_parallelism=1, ici_context_parallelism=-1)
    stages = BatchConfig(sequence_length_stages=((0, 8), (10, 4), (20, 16)))
    check_lengths(16, BatchConfig(), sharding)
    refused(r"(?s)_stages .*of 8.*ici_context_parallelism=4", check_lengths, 16, stages, sharding)
    refused(r"(?s)=12 .*ici_context_parallelism=4", check_lengths, 12, BatchConfig(), sharding)


def test_the_expert_axis_shards_all_weights():
    # Experts by number, the others by their width; norms are replicated.
    sizes = {"base_mlp_dim": 4096, "vocab_size": 8, "base_num_decoder_layers": 4}
    _, model, sharding = built(
        jax.devices(), **PLACES, **EXPERT, **sizes, **{"ici_fsdp_parallelism": 1}
    )
    share = assert_params_sufficiently_sharded(model.parameters, sharding, 0.02)
    assert 0 < share < 1e-4
    refused(
        r"(?s)expert 4.*layers/",
        assert_params_sufficiently_sharded,
        model.parameters,
        sharding,
        share / 2,
    )
