"""Every mesh axis alone, and mixes of them, give the losses and gradients of one device."""

import functools
import re

import jax
import numpy as np
import pytest

from MaxText.configuration.axis_rules import MESH_AXES, size_key
from MaxText.configuration.training_sections import Batch
from MaxText.errors import UserError
from MaxText.parallelism.mesh import check_lengths
from tests.multi_device.same_results import assert_same, built, loss_and_gradients
from tests.small_models import some_quick

pytestmark = pytest.mark.multi_device

RING = {"context_parallel_strategy": "ring"}
# What a family needs besides; connections with large noise nearly cancel states (rounding shows).
FAMILIES = {
    "llama": {"base_num_kv_heads": 2},
    "tokenformer": {"family": "tokenformer", "slot_num": 16},
    "muddformer": {
        "family": "muddformer", "scan_layers": False, "mlp_dim_multiple": 16,
        "weight_init": "fan_in", "dense_mixing": "sum", "noise": 0.02,
    },
    "experts": {"num_experts": 4, "num_experts_per_tok": 2, "capacity_factor": 1.0,
                "eval_capacity_factor": 2.0},
}  # fmt: skip
# Stages need layers that are alike, and one or more each.
ALIKE = {"muddformer": {"dynamic_mlp_dim": False, "dense_first_norms": "each"}}
ALONE = {axis: {size_key(axis): 4} for axis in MESH_AXES} | {
    "context, ring": {size_key("context"): 4} | RING
}


def mixes(family, number):
    """Sizes that multiply to 8, each of three halvings over any axis inside slices or across."""
    generator = np.random.default_rng(list(FAMILIES).index(family))
    axes = [axis for axis in MESH_AXES if axis != "expert" or family == "experts"]
    found = []
    for _ in range(number):
        sizes = dict.fromkeys(["dcn_data_parallelism"], 1)
        for axis in generator.choice(axes, 3):
            key = size_key(axis, generator.choice(["ici", "ici", "dcn"]))
            sizes[key] = 2 * sizes.get(key, 1)
        found.append(sizes | (RING if generator.random() < 0.5 else {}))
    return found


CASES = [
    (family, name, mesh)
    for family in FAMILIES
    for name, mesh in ALONE.items()
    if name != "expert" or family == "experts"
]
MIXES = [(family, "mix", mesh) for family in FAMILIES for mesh in mixes(family, 4)]


def model_of(family, stages):
    """Keys of a model that can be cut into so many stages; it has two layers or more."""
    if stages == 1:
        return FAMILIES[family]
    given = FAMILIES[family] | ALIKE.get(family, {}) | {"base_num_decoder_layers": stages}
    return {name: value for name, value in given.items() if name != "mlp_dim_multiple"}


@functools.cache
def expected(family, stages):
    return loss_and_gradients(jax.devices()[:1], **model_of(family, stages))[0]


def check(family, mesh):
    number = stages = 1
    for name, size in mesh.items():
        number *= size if name.endswith("_parallelism") else 1
        stages *= size if name.endswith("_pipeline_parallelism") else 1
    keys = {"ici_fsdp_parallelism": 1} | model_of(family, stages) | mesh
    found, _, text = loss_and_gradients(jax.devices()[:number], **keys)
    assert_same(found, expected(family, stages), str(mesh))
    return text


@pytest.mark.parametrize(("family", "name", "mesh"), CASES)
def test_one_axis(family, name, mesh):
    text = check(family, mesh)
    assert ("collective-permute" in text) or name != "context, ring"


@pytest.mark.parametrize(("family", "name", "mesh"), some_quick(MIXES, 4))
def test_mixes(family, name, mesh):
    check(family, mesh)


# Parts that move along the sequence, which is split in 4.
SPLIT = {"ici_fsdp_parallelism": 1, "ici_data_parallelism": 2, "ici_context_parallelism": 4}
PARTS = {
    "windows, linear attention, loss in chunks": {
        "attention_types": [[["local", "linear"], 1]], "sliding_window_size": 5,
        "linear_attention_chunk": 6, "num_vocab_tiling": 2,
    },
    "memories, static SGU, Head-QK": {
        "num_mem_kv": 3, "static_sgu": True, "static_sgu_kernel": 4, "head_qk": True,
        "head_qk_dim": 8,
    },
    "ALiBi, everything computed again, capped scores": {
        "position_embedding": "alibi", "remat_policy": "full", "attn_logits_soft_cap": 5.0,
        "attention_block_size": 2,
    },
    "both directions, learned positions": {
        "mlm_training": True, "mlm_mask_id": 3, "position_embedding": "learned",
    },
    "parallel blocks of another family": {"family": "gpt_neox", "scan_layers": False},
    "experts without places": {"num_experts": 4, "num_experts_per_tok": 2},
    "experts for parts of a sequence": {
        "num_experts": 4, "capacity_factor": 1.0, "eval_capacity_factor": 2.0, "moe_group_size": 8,
    },
}  # fmt: skip
_STRATEGIES = [
    (name, strategy)
    for name in PARTS
    for strategy in ("all_gather", "ring")
    if strategy != "ring" or "experts" not in name  # which do not attend
]


@functools.cache
def expected_of_parts(name):
    return loss_and_gradients(jax.devices()[:1], **PARTS[name])[0]


@pytest.mark.parametrize(("name", "strategy"), _STRATEGIES)
def test_parts_that_move_along_the_sequence(name, strategy):
    keys = PARTS[name] | SPLIT | {"context_parallel_strategy": strategy}
    found = loss_and_gradients(jax.devices(), **keys)[0]
    assert_same(found, expected_of_parts(name), name)


@pytest.mark.parametrize("strategy", ["all_gather", "ring"])
def test_no_hidden_state_is_whole(strategy):
    keys = {"context_parallel_strategy": strategy, "base_num_kv_heads": 2, "base_mlp_dim": 96}
    text = loss_and_gradients(jax.devices(), max_target_length=40, **keys, **SPLIT)[2]
    assert re.search(r"f32\[4,10,\d+\]", text)
    assert not re.search(r"f32\[\d+,40,\d+\]", text)
    gathered = re.search(r"f32\[[\d,]*40[\d,]*\]\S* all-gather", text)
    assert (gathered is None) == (strategy == "ring")


def test_lengths_that_the_mesh_does_not_divide():
    mesh = {"ici_fsdp_parallelism": 1, "ici_context_parallelism": -1}
    _, _, layout = built(jax.devices(), **mesh)
    stages = Batch(sequence_length_stages=((0, 8), (10, 4), (20, 16)))
    check_lengths(16, Batch(), layout)
    with pytest.raises(UserError, match=r"(?s)a stage of 4 in .*ici_context_parallelism=4"):
        check_lengths(16, stages, layout)
    with pytest.raises(UserError, match=r"(?s)12 is no multiple of 8.*ici_context_parallelism=4"):
        check_lengths(12, Batch(), layout)


def test_where_weights_lie():
    mesh = {"ici_fsdp_parallelism": 2, "ici_fsdp_transpose_parallelism": 2,
            "ici_context_parallelism": 2}  # fmt: skip
    _, model, layout = built(jax.devices(), **mesh)
    words = layout.describe(model.parameters)
    assert words is not None
    assert words("layers/mlp/wi_0/kernel") == "-,fsdp+context,fsdp_transpose"
    assert words("layers/mlp/wo/kernel") == "-,fsdp_transpose,fsdp+context"
    assert words("layers/self_attention/query/kernel") == "-,fsdp+fsdp_transpose+context,-,-"
