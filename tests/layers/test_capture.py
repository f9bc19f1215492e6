"""Captured values of every part: built-in ones, those of the examples, and those of users."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.config.registry import registrations
from MaxText.layers.assembly.model import Model
from MaxText.layers.capture import capturing
from MaxText.layers.part import FeedForward, record, register, tag
from tests.small_models import VALUE_RESIDUAL, noisy_params, random_batch, tiny_config

ATTENTION = ("query_proj", "key_proj", "value_proj", "probabilities", "context", "out_proj")
NO_SOFTMAX = ("query_proj", "key_proj", "value_proj", "context", "out_proj")
EXPERTS = {"num_experts": 2, "moe_mlp_dim": 32}

# Keys of a model -> what its mixer and its feed-forward name, besides their outputs.
MODELS = {
    "attention": ({}, ATTENTION, ("mlpwi", "activations", "mlpwo")),
    "local": ({"mixer": "local_attention", "sliding_window_size": 16}, ATTENTION, ("mlpwo",)),
    "latent": ({"mixer": "latent_attention"}, ATTENTION, ("mlpwo",)),
    "linear": ({"mixer": "linear_attention"}, NO_SOFTMAX, ("mlpwo",)),
    "static SGU": ({"static_sgu": True}, (*ATTENTION, "static_sgu"), ("mlpwo",)),
    "pattention": (
        {"decoder_block": "tokenformer"},
        ("slot_scores", "context", "out_proj"),
        ("mlpwi", "mlpwo"),
    ),
    "experts": (EXPERTS, ATTENTION, ("router_probabilities", "mlpwi", "mlpwo")),
    "experts without capacity": (
        EXPERTS | {"eval_capacity_factor": -1.0},
        ATTENTION,
        ("router_probabilities", "mlpwo"),
    ),
    "dense connections": (
        {"decoder_block": "muddformer", "mlp_dim_multiple": 8},
        ATTENTION,
        ("mlpwo",),
    ),
    "value residual": (VALUE_RESIDUAL, ATTENTION, ("mlpwo",)),
    "gated DeltaNet": (
        {
            "mixer": "gated_delta_net",
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 4,
            "linear_value_head_dim": 4,
        },
        (*NO_SOFTMAX, "attention_gate", "write_strength", "state_decay"),
        ("mlpwo",),
    ),
    "KDA": (
        {
            "mixer": "kda",
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 4,
            "linear_value_head_dim": 4,
        },
        (*NO_SOFTMAX, "attention_gate", "write_strength", "state_decay"),
        ("mlpwo",),
    ),
    "Mamba-2": (
        {"mixer": "mamba2", "mamba_d_head": 4, "mamba_d_state": 4},
        (*NO_SOFTMAX, "attention_gate", "time_step", "state_decay"),
        ("mlpwo",),
    ),
    "differential attention": (
        {
            "import_modules": ["examples/differential_attention.py"],
            "mixer": "differential_attention",
        },
        ATTENTION,
        ("mlpwo",),
    ),
    "moving average": (
        {"import_modules": ["examples/moving_average.py"], "mixer": "moving_average"},
        ("value_proj", "average", "out_proj"),
        ("mlpwo",),
    ),
}


def captured_values(patterns=("*",), **keys):
    """Returns logits and the captured values of a tiny model, and the capture itself."""
    keys = {"scan_layers": False, "remat_policy": "none", "attention": "dot_product"} | keys
    config = tiny_config(**keys)
    model = Model(config.model)
    captures = []

    def run(params, batch):
        with capturing(patterns) as captured:
            logits_BTV = model.merge(params)(batch)
        captures.append(captured)
        return logits_BTV, captured.values

    batch = random_batch(config, rows=2)
    logits_BTV, values = jax.jit(run)(noisy_params(model, 0.02), batch)
    return logits_BTV, values, captures[-1]


@pytest.mark.parametrize("name", MODELS)
def test_every_part_has_captured_values(name):
    keys, in_mixer, in_feed_forward = MODELS[name]
    logits_BTV, values, _ = captured_values(**keys)
    shape = (2, 16, 32)
    for layer in range(3):
        paths = [f"layers/{layer}/self_attention/{value}" for value in ("mixer_output", *in_mixer)]
        paths += [
            f"layers/{layer}/mlp/{value}" for value in ("feed_forward_output", *in_feed_forward)
        ]
        paths += [f"layers/{layer}/connections/r", f"layers/{layer}/output"]
        assert not set(paths) - set(values), sorted(values)
        for path in (
            "self_attention/mixer_output",
            "mlp/feed_forward_output",
            "connections/r",
            "output",
        ):
            assert values[f"layers/{layer}/{path}"].shape == shape
    for part in ("token_embedder", "decoder_norm"):
        assert values[f"{part}/output"].shape == shape
    np.testing.assert_array_equal(values["head/output"], logits_BTV)
    assert all(np.isfinite(x).all() for x in values.values())


def test_every_registered_mixer_and_feed_forward_is_tested():
    keys = [keys for keys, *_ in MODELS.values()]
    mixers = {"attention", *(one["mixer"] for one in keys if "mixer" in one)}
    built_in = {part.name for part in registrations() if part.kind == "mixer" and part.is_built_in}
    assert built_in - {"none"} <= mixers


@pytest.mark.parametrize(
    ("path", "keys"),
    [
        ("position_embedder/output", {"position_embedding": "learned"}),
        ("position_embedder/output", {"position_embedding": "axial", "axial_pos_shape": [4, 4]}),
        ("head/head_qk_scores", {"head_type": "head_qk", "head_qk_dim": 8}),
        ("layers/2/macaron_mlp/feed_forward_output", {"use_macaron": True}),
        ("layers/2/macaron_mlp/mlpwo", {"use_macaron": True}),
        ("layers/1/connections/q", {"decoder_block": "muddformer", "mlp_dim_multiple": 8}),
        ("connections/output", {"decoder_block": "muddformer", "mlp_dim_multiple": 8}),
        ("layers/1/mlp/feed_forward_output", {"block_arrangement": "parallel"}),
        ("layers/1/mlp/feed_forward_output", {"mixer": "none"}),
    ],
)
def test_values_of_other_parts(path, keys):
    assert path in captured_values((path,), **keys)[1]


def test_the_output_of_a_layer_is_the_sum_of_its_parts():
    _, values, _ = captured_values()
    sums = sum(
        values[f"layers/1/{path}"]
        for path in ("self_attention/mixer_output", "mlp/feed_forward_output")
    )
    sums += values["layers/1/connections/r"]
    np.testing.assert_allclose(sums, values["layers/1/output"], atol=1e-5)
    np.testing.assert_array_equal(values["layers/1/connections/r"], values["layers/0/output"])


def test_values_inside_of_a_loop_are_named_and_do_not_leak():
    @register("feed_forward", "doubled_in_a_loop")
    class Doubled(FeedForward):
        def __call__(self, x_BTD, context):
            def body(carry, x_TD):
                return carry, tag(2 * x_TD, "inside")

            y_BTD = jax.lax.map(lambda x_TD: body(0, x_TD)[1], x_BTD)
            record(jnp.sum(y_BTD), "total")
            return tag(y_BTD, "outside"), {}

    keys = {"feed_forward_type": "doubled_in_a_loop"}
    _, values, captured = captured_values(("*/mlp/*",), **keys)
    assert captured.inner_paths[0] == "layers/0/mlp/inside"
    assert "layers/0/mlp/inside" not in values
    assert {
        "layers/0/mlp/outside",
        "layers/0/mlp/feed_forward_output",
        "layers/0/mlp/total",
    } <= set(values)
