"""Layers on stages of a pipeline: the same numbers as one device that has all of them."""

import math

import jax
import numpy as np
import pytest

from MaxText.errors import UserError
from MaxText.layers.attention import flash_attention
from MaxText.parallelism.mesh import make_sharding_plan, microbatch_size
from MaxText.training.objective import loss_sums
from tests.multi_device.same_results import (
    assert_read_as,
    assert_same,
    built,
    fresh_parameters,
    loss_and_gradients,
    planned,
    train,
)
from tests.small_models import VALUE_RESIDUAL, random_batch, tiny_config

pytestmark = pytest.mark.multi_device

FOUR = {"ici_pipeline_parallelism": 4}
TWO = {"ici_pipeline_parallelism": 2}
ALL = TWO | {"ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2}
RING = {"context_parallel_strategy": "ring"}
PLACES = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "router_z_loss_weight": 0.01,
    "routed_bias": True,
    "capacity_factor": 1.0,
    "eval_capacity_factor": 2.0,
}
FLASH = {"attention": "flash", "max_target_length": 256}
KINDS = {"attention_types": [[["local", "global"], 2]], "sliding_window_size": 5}

# name -> (family, keys of the model, keys of mesh and pipeline)
CASES = {
    "four stages, idle for half of the time": (
        "llama2",
        {},
        FOUR | {"num_pipeline_microbatches": 1, "remat_policy": "full"},
    ),
    "two repeats, all axes": (
        "llama2",
        {},
        ALL | {"num_pipeline_microbatches": 3, "remat_policy": "minimal"},
    ),
    "four stages of two layers, twice": (
        "llama2",
        {"base_num_decoder_layers": 16},
        FOUR | {"num_layers_per_pipeline_stage": 2, "ici_tensor_parallelism": 2},
    ),
    "stages across slices": (
        "llama2",
        {},
        {
            "dcn_pipeline_parallelism": 2,
            "dcn_data_parallelism": 1,
            "ici_fsdp_parallelism": 4,
        },
    ),
    "kinds of attention": ("gpt_neox", KINDS, TWO | {"ici_data_parallelism": 2}),
    "TokenFormer": ("tokenformer", {}, ALL | {"num_pipeline_repeats": 2}),
    "experts with places": (
        "llama2",
        PLACES,
        TWO
        | {
            "ici_expert_parallelism": 2,
            "dcn_fsdp_parallelism": 2,
            "dcn_data_parallelism": 1,
            "num_pipeline_repeats": 1,
        },
    ),
    "a pattern of unlike layers, two repeats": (
        "llama2",
        {
            "base_num_decoder_layers": 12,
            "layer_pattern": "LLA",
            "layer_kinds": {
                "L": {"mixer": "linear_attention"},
                "A": {"base_mlp_dim": 48, "rope_max_timescale": 9.0},
            },
        },
        TWO | {"num_pipeline_repeats": 2, "num_layers_per_pipeline_stage": 3},
    ),
    "recurrent mixers": (
        "llama2",
        {
            "base_num_decoder_layers": 6,
            "layer_pattern": "GKM",
            "layer_kinds": {
                "G": {"mixer": "gated_delta_net", "linear_num_key_heads": 2},
                "K": {"mixer": "kda"},
                "M": {"mixer": "mamba2"},
            },
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 6,
            "linear_chunk_size": 4,
            "linear_norm_epsilon": 1e-2,
            "mamba_d_head": 8,
            "mamba_d_state": 6,
            "mamba_chunk_size": 4,
        },
        TWO | {"ici_tensor_parallelism": 2, "num_pipeline_microbatches": 2},
    ),
    "positions of kinds, sandwich norms, per-layer embeddings": (
        "llama2",
        {
            "layer_pattern": "AB",
            "layer_kinds": {
                "A": {"rope_max_timescale": 9.0},
                "B": {"temperature_tuning_beta": 0.5},
            },
            "rope_type": "longrope",
            "rope_short_factors": [1.0, 1.2, 1.4, 1.6],
            "rope_long_factors": [2.0, 3.0, 4.0, 5.0],
            "original_max_position_embeddings": 6,
            "norm_placement": "sandwich",
            "hidden_size_per_layer_input": 8,
            "matmul_precision": "highest",  # the norm after a small product enlarges rounding
        },
        TWO | {"ici_tensor_parallelism": 2},
    ),
    "values and the embedding carried along": (
        "llama2",
        VALUE_RESIDUAL,
        TWO | {"ici_tensor_parallelism": 2, "ici_fsdp_parallelism": 2},
    ),
    "kernel of attention, sequences split": (
        "llama2",
        FLASH,
        TWO
        | {
            "ici_data_parallelism": 2,
            "ici_context_parallelism": 2,
        },
    ),
}


def results(family, num_devices, **keys):
    """Every loss and all gradients of a batch, the gradients on devices, the compiled program."""
    given = {"base_num_decoder_layers": 4, "ici_fsdp_parallelism": 1} | keys
    return loss_and_gradients(jax.devices()[:num_devices], family, rows=24, **given)


@pytest.mark.parametrize("name", CASES)
def test_equal_losses_and_gradients(name):
    family, keys, mesh = CASES[name]
    number = math.prod(size for key, size in mesh.items() if key.startswith(("ici_", "dcn_")))
    expected, _, _ = results(family, 1, **keys)
    found, gradients, text = results(family, number, **keys, **mesh)
    assert_same(found, expected, mesh)
    assert "collective-permute" in text
    stages = mesh.get("ici_pipeline_parallelism", 1) * mesh.get("dcn_pipeline_parallelism", 1)
    for leaf in jax.tree.leaves(gradients["layers"]):
        assert leaf.addressable_shards[0].data.shape[0] * stages == leaf.shape[0]


def test_attention_of_a_gpu_with_sequences_split(monkeypatch):
    """cuDNN's call by JAX's own attention, with a mask that vmap refuses as cuDNN's does."""
    attend = jax.nn.dot_product_attention
    alone = jax.custom_batching.custom_vmap(lambda mask: mask)
    alone.def_vmap(lambda *_: pytest.fail("vmap of a mask"))

    def stand_in(q, k, v, *, mask, implementation, **given):
        assert implementation == "cudnn"
        return attend(q, k, v, mask=alone(mask), **given)

    keys = FLASH | KINDS
    expected, _, _ = results("llama2", 1, **keys | {"attention": "dot_product"})
    monkeypatch.setattr(flash_attention, "platform", lambda: "gpu")
    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    found, _, _ = results("llama2", 4, **keys, **TWO, ici_context_parallelism=2)
    assert_same(found, expected, keys)


@pytest.mark.parametrize(
    ("num_devices", "mesh"),
    [
        (2, TWO | {"num_pipeline_repeats": 2}),
        (4, TWO | {"ici_tensor_parallelism": 2}),
        (4, {"ici_context_parallelism": 2, "ici_tensor_parallelism": 2}),
    ],
    ids=["two stages, twice", "stages and heads", "sequences and heads"],
)
def test_metrics_of_each_layer(num_devices, mesh):
    def metrics(devices, **keys):
        given = {"base_num_decoder_layers": 4, "ici_fsdp_parallelism": 1, "num_experts": 2} | keys
        config, model, sharding = built(devices, **given)
        params = fresh_parameters(model, sharding, 0.1)
        batch = jax.tree.map(np.asarray, random_batch(config, 24, documents=True))
        batch = sharding.to_global_batch(batch, 24)

        def run(params, batch):
            objective = config.model.objective
            decoder = model.merge(params)
            sums = loss_sums(decoder, batch, objective, training=True, log_layer_metrics=True)
            return {name: metric.mean for name, metric in sums.layer_metrics.items()}

        return jax.tree.map(np.asarray, sharding.jit(run)(params, batch))

    expected = metrics(jax.devices()[:1])
    found = metrics(jax.devices()[:num_devices], **mesh)
    assert found.keys() == expected.keys()
    assert expected["attention_entropy/layer"].shape == (4,)
    of_microbatches = {"attention_max_logit", "moe_max_load_ratio", "moe_min_load_ratio"}
    for name, value in expected.items():
        if mesh.keys() >= TWO.keys() and name.split("/")[0] in of_microbatches:
            assert found[name].shape == value.shape  # of fewer tokens
            assert (found[name] > 0).all()
        else:
            np.testing.assert_allclose(found[name], value, rtol=1e-3, err_msg=name)


def test_accumulation_dropout_and_another_number_of_stages(tmp_path):
    # A pipeline draws for its microbatches what accumulation draws for its own, and both cut rows
    # alike.
    keys = {"dropout_rates.residual": 0.2, "ici_fsdp_parallelism": 1, "base_num_decoder_layers": 4}
    expected, _ = train(jax.devices()[:1], num_microbatches=4, **keys)
    parts = TWO | {"num_pipeline_microbatches": 4, "num_pipeline_repeats": 2}
    numbers, state = train(jax.devices()[:2], **keys, **parts)
    np.testing.assert_allclose(numbers, expected, rtol=1e-5)
    kernel = state.params["layers"]["mlp"]["wo"]["kernel"]
    assert kernel.sharding.spec[0] == "stage"
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.shape == kernel.shape]
    assert all(x.sharding == kernel.sharding for x in moments)
    assert len(moments) >= 2
    assert_read_as(state, planned(jax.devices()[:4], **keys, **FOUR).state, tmp_path)


def test_rows_that_cannot_be_cut():
    config = tiny_config(
        base_num_decoder_layers=4,
        ici_data_parallelism=2,
        ici_fsdp_parallelism=1,
        **FOUR,
        num_pipeline_microbatches=6,
    )
    sharding = make_sharding_plan(config.mesh, jax.devices(), config.model.pipeline)
    assert sharding.batch_divisor == 2 * 12
    with pytest.raises(UserError, match=r"(?s) 16 sequences.* 24 .*stages.*size=3\."):
        microbatch_size(config.batch.model_copy(update={"per_device_batch_size": 2}), sharding)
