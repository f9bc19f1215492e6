"""Norms where the epsilon, the format and the place of the factor matter, in float64."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from MaxText.layers.assembly.model import Model
from tests.small_models import random_params, tiny_config

KINDS = ("rms_norm", "layer_norm", "scale_norm", "scale_norm_centered")
D = 32


def final_norm(kind, epsilon, **keys):
    """(the norm before the head, its factor and bias in float64)."""
    given = {"normalization_type": kind, "normalization_layer_epsilon": epsilon}
    model = Model(tiny_config(base_num_decoder_layers=1, **given, **keys).model)
    norm = model.merge(random_params(model)).decoder_norm
    bias = getattr(norm, "bias", None)
    factor = np.float64(norm.scale[...]) + keys.get("normalization_zero_centered", False)
    return norm, factor, 0.0 if bias is None else np.float64(bias[...])


def by_definition(kind, x, epsilon, factor, bias):
    x = np.float64(x)
    if kind in ("layer_norm", "scale_norm_centered"):
        x = x - x.mean(-1, keepdims=True)
    y = x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon)
    return (y / np.sqrt(D) if kind == "scale_norm" else y) * factor + bias


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("size", "epsilon"), [(1.0, 0.5), (0.01, 1e-5), (0.0, 1e-3), (1e-4, 1e-8)])
def test_the_epsilon_is_added_to_the_mean_square(kind, size, epsilon):
    norm, factor, bias = final_norm(kind, epsilon)
    x = size * np.random.default_rng(0).normal(size=(4, D)).astype(np.float32)
    expected = by_definition(kind, x, epsilon, factor, bias)
    np.testing.assert_allclose(norm(jnp.asarray(x)), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_rounded_once(kind, zero_centered):
    """Statistics, factors and bias in float32, also far from zero; one rounding at the end."""
    norm, factor, bias = final_norm(
        kind, 1e-5, dtype="bfloat16", normalization_zero_centered=zero_centered
    )
    noise = np.random.default_rng(1).normal(size=(64, D))
    for offset in (0.0, 30.0):
        x = jnp.asarray(noise + offset, jnp.bfloat16)
        found = norm(x)
        assert found.dtype == jnp.bfloat16
        expected = by_definition(kind, x, 1e-5, factor, bias)
        # Half of bfloat16's last place, and what float32 loses where terms cancel.
        np.testing.assert_allclose(np.float64(found), expected, rtol=2**-7.99, atol=3e-5)


@pytest.mark.parametrize(
    ("block", "keys"),
    [
        ("llama2", {"use_qk_norm": True}),
        ("gpt_neo", {"use_macaron": True, "base_num_kv_heads": 4}),
        ("muddformer", {"mudd_prenorm": True, "mudd_postnorm": "all", "mlp_dim_multiple": 8}),
    ],
)
def test_all_norms_of_a_model_have_its_epsilon(block, keys):
    config = tiny_config(block, scan_layers=False, normalization_layer_epsilon=0.123, **keys)
    model = Model(config.model)
    decoder = model.merge(random_params(model))
    epsilons = {
        "/".join(map(str, path)): module.epsilon
        for path, module in nnx.iter_graph(decoder)
        if hasattr(module, "epsilon")
    }
    assert len(epsilons) >= 4
    assert set(epsilons.values()) == {0.123}, epsilons
