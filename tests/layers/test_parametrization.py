"""Ratios and classes of weights, and what a parametrization makes of a model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.errors import UserError
from MaxText.layers.assembly import parametrization
from MaxText.layers.assembly.model import Model
from MaxText.layers.params import normal
from MaxText.parallelism.logical_sharding import ParamSpec
from tests.small_models import random_batch, random_params, some_quick, tiny_config

BASE = {"base_emb_dim": 32, "base_num_query_heads": 4, "base_mlp_dim": 64}
WIDE = {"base_emb_dim": 128, "base_num_query_heads": 16, "base_mlp_dim": 256}


def model_of(family="llama2", base=BASE, **keys):
    """A model four times as wide as its base, which is tests' tiny one."""
    keys = {"parametrization": "mup", "base_shape": base, **WIDE, **keys}
    return Model(tiny_config(family, **keys).model)


def facts(model, name):
    spec = model.parameters[name]
    return spec.weight_class, spec.r_in, spec.r_out


def test_classes_and_ratios_of_a_transformer():
    model = model_of("gpt2", base_num_kv_heads=2)
    assert facts(model, "token_embedder/embedding") == ("table", 1, 4)
    assert facts(model, "position_embedder/embedding") == ("table", 1, 4)
    assert facts(model, "layers/pre_mlp_layer_norm/scale") == ("vector", 1, 4)
    assert facts(model, "layers/mlp/wi/bias") == ("vector", 1, 4)
    assert facts(model, "layers/mlp/wi/kernel") == ("hidden", 4, 4)
    assert facts(model, "layers/self_attention/out/kernel") == ("hidden", 4, 4)
    # Shaped like a readout, as the number of key/value heads is fixed.
    assert facts(model, "layers/self_attention/key/kernel") == ("hidden", 4, 1)
    untied = model_of(logits_via_embedding=False)
    assert facts(untied, "logits_dense/kernel") == ("readout", 4, 1)


def test_classes_of_experts_and_their_router():
    model = model_of(num_experts=4, num_experts_per_tok=2)
    assert facts(model, "layers/mlp/experts/wi_0") == ("hidden", 4, 4)
    assert facts(model, "layers/mlp/gate/kernel") == ("readout", 4, 1)


def test_ratios_of_dense_connections():
    model = model_of("muddformer", scan_layers=False, mlp_dim_multiple=8)
    assert facts(model, "connections/after/2/wi/kernel") == ("hidden", 4, 1)
    assert facts(model, "connections/after/2/wo/kernel") == ("hidden", 1, 1)
    assert facts(model, "connections/after/2/static") == ("vector", 1, 1)
    # Widths that are rounded do not grow by the ratio of the model's widths.
    assert facts(model, "layers/0/mlp/wi_0/kernel") == ("hidden", 4, 4)
    rounded = model_of("muddformer", scan_layers=False, mlp_dim_multiple=48)
    assert facts(rounded, "layers/0/mlp/wi_0/kernel") == ("hidden", 4, 144 / 48)


@pytest.mark.parametrize("grows", [True, False])
def test_ratios_of_slots(grows):
    base = {"base_emb_dim": 32, "base_num_query_heads": 4} | ({"slot_num": 32} if grows else {})
    model = model_of("tokenformer", base=base, slot_num=64)
    ratio = 2 if grows else 1
    assert facts(model, "layers/mlp/keys/kernel") == ("hidden", 4, ratio)
    assert facts(model, "layers/mlp/values/kernel") == ("hidden", ratio, 4)


SCHEMES = ("fan_in", "gpt2", "neox", "xavier_uniform", "normal")


@pytest.mark.parametrize("scheme", some_quick(SCHEMES, 5))
def test_initial_weights_have_the_standard_deviation_of_the_rule(scheme):
    keys = {"weight_init": scheme, "base_num_decoder_layers": 2, "vocab_size": 128}
    model = model_of(**keys)
    base = Model(tiny_config(**BASE, **keys).model)
    draw = jax.jit(lambda key: (model.initialize(key), base.initialize(key)))
    wide_params, base_params = draw(jax.random.key(0))
    growth = {
        ("token_embedder", "embedding"): 1.0,
        ("logits_dense", "kernel"): 1 / 4,
        ("layers", "mlp", "wi_0", "kernel"): 1 / 2,
        ("layers", "mlp", "wo", "kernel"): 1 / 2,
        ("layers", "self_attention", "value", "kernel"): 1 / 2,
    }
    for path, expected in growth.items():
        wide, small = wide_params, base_params
        for name in path:
            wide, small = wide[name], small[name]
        np.testing.assert_allclose(jnp.std(wide) / jnp.std(small), expected, rtol=0.08)


def test_a_model_that_is_its_own_base_is_the_standard_one():
    config = tiny_config(parametrization="completep", base_shape={"base_emb_dim": 32})
    standard = tiny_config()
    same = Model(config.model), Model(standard.model)
    params = [jax.jit(model.initialize)(jax.random.key(0)) for model in same]
    jax.tree.map(np.testing.assert_array_equal, *params)
    assert config.model.with_multipliers == standard.model.with_multipliers


def test_multipliers_of_activations():
    keys = {
        "parametrization": "completep",
        "base_shape": BASE | {"head_dim": 8, "base_num_decoder_layers": 3},
        "base_num_decoder_layers": 6,
        "depth_exponent": 0.5,
    }
    wide = {"base_emb_dim": 128, "base_num_query_heads": 4, "base_mlp_dim": 256, "head_dim": 32}
    config = tiny_config(**keys, **wide).model.with_multipliers
    assert config.attention.attention_scale == pytest.approx(8**0.5 / 32)
    assert config.block.residual_multiplier == pytest.approx(2**-0.5)
    assert config.head.logits_scaling == 1  # an untied head has smaller weights
    tied = {"logits_via_embedding": True, "normalize_embedding_logits": False}
    config = tiny_config(**keys, **wide, **tied, scale_embedding=True).model.with_multipliers
    assert config.head.logits_scaling == pytest.approx(4)
    assert config.embedding.embedding_multiplier * 128**0.5 == pytest.approx(32**0.5)
    tied["normalize_embedding_logits"] = True
    config = tiny_config(**keys, **wide, **tied).model.with_multipliers
    assert config.head.logits_scaling * 128**0.5 == pytest.approx(4 * 32**0.5)


def test_scores_of_one_kind_of_layers_with_wider_heads():
    kinds = {"A": {}, "B": {"head_dim": 4}}
    keys = {"layer_pattern": "AB", "base_num_decoder_layers": 2, "head_dim": 32}
    base = BASE | {"head_dim": 8}
    config = tiny_config(
        parametrization="mup", base_shape=base, layer_kinds=kinds, **keys, base_emb_dim=64
    )
    scales = [
        layer.config.attention.attention_scale for layer in config.model.with_multipliers.layers
    ]
    assert scales == [pytest.approx(8**0.5 / 32), None]


def test_residual_branches_are_multiplied_in_the_model():
    """With weights of the same numbers, branches of twice the depth count half."""
    keys = {"base_num_decoder_layers": 2, "scan_layers": False}
    deep = Model(
        tiny_config(
            parametrization="completep", base_shape={"base_num_decoder_layers": 1}, **keys
        ).model
    )
    halved = Model(tiny_config(residual_multiplier=0.5, **keys).model)
    params = random_params(halved, scale=0.1)
    batch = random_batch(tiny_config(**keys), 1)
    logits = [jax.jit(lambda p, m=model: m.merge(p)(batch))(params) for model in (deep, halved)]
    np.testing.assert_array_equal(*logits)


def spec(shape, axes, num_input_dims=0, std=0.1):
    return ParamSpec(shape, jnp.dtype("float32"), axes, num_input_dims, init_std=std)


DEPTH = parametrization.DepthFactors()


@pytest.mark.parametrize(
    ("wide", "base", "message"),
    [
        (
            spec((64, 64), ("embed", "mlp")),
            spec((32, 32), ("embed", "mlp")),
            "weight w has no class: it grows in two dimensions",
        ),
        (
            spec((64, 8), ("embed", "mlp"), 1, None),
            spec((32, 8), ("embed", "mlp"), 1, None),
            "weight w has no class: the standard deviation of its initializer is unknown",
        ),
        (
            spec((16, 8), ("embed", "mlp"), 1),
            spec((32, 8), ("embed", "mlp"), 1),
            r"wider than the model: the weight w is \[16, 8\]",
        ),
        (
            spec((64, 8, 2), ("embed", "mlp", None), 1),
            spec((32, 8), ("embed", "mlp"), 1),
            "weight w has other dimensions",
        ),
    ],
)
def test_weights_without_a_class_are_named(wide, base, message):
    with pytest.raises(UserError, match=message):
        parametrization.with_ratios({"w": wide}, {"w": base}, DEPTH)
    with pytest.raises(UserError, match="only this model has the weight v"):
        parametrization.with_ratios({"w": wide, "v": wide}, {"w": base}, DEPTH)


def test_initializers_know_their_standard_deviation():
    draw = normal(lambda fan_in, fan_out: 1 / (fan_in * fan_out))
    drawn = draw(jax.random.key(0), (40, 50), 1, jnp.dtype("float32"))
    np.testing.assert_allclose(jnp.std(drawn), draw.std(40, 50), rtol=0.1)
