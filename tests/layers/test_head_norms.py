"""Norms of queries, keys and values against their definition, and their order with rotary."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.layers.assembly.model import Model
from MaxText.layers.context import ForwardContext
from tests.small_models import random_params, tiny_config

B, T, N, K, H = 2, 5, 4, 2, 8
EPSILON = 0.01
POSITIONS = np.arange(T)


def attention_of_one_layer(**keys):
    """(attention, its weights in float64, the context that layers have)."""
    config = tiny_config(
        share_layer_params=True,
        base_num_decoder_layers=2,
        normalization_layer_epsilon=EPSILON,
        rope_max_timescale=100.0,
        **keys,
    )
    model = Model(config.model)
    params = random_params(model)
    layer = jax.tree.map(lambda leaf: leaf[0], params["layers"])
    decoder = model.merge(params | {"layers": layer})
    fields = decoder._for_mixers(jnp.asarray(POSITIONS)[None])
    weights = jax.tree.map(np.float64, layer["self_attention"])
    return decoder.layers.self_attention, weights, ForwardContext(**fields).for_layer(0)


def rotated(x_BTNH):
    """Pairs (i, i + H/2) as complex numbers, turned by position * 100^(-2i/H)."""
    pairs = x_BTNH[..., : H // 2] + 1j * x_BTNH[..., H // 2 :]
    rates = 100.0 ** (-2 * np.arange(H // 2) / H)
    turned = pairs * np.exp(1j * POSITIONS[:, None, None] * rates)
    return np.concatenate([turned.real, turned.imag], axis=-1)


def normed(x_BTNH, scale, scope="head", kind="rms_norm"):
    """One token and head at a time; jointly, all heads of a token as one vector."""
    result = np.empty_like(x_BTNH)
    for index in np.ndindex(*x_BTNH.shape[:2]):
        groups = x_BTNH[index][None] if scope == "joint" else x_BTNH[index][:, None]
        for number, group in enumerate(groups):
            centered = group - group.mean() if kind == "layer_norm" else group
            y = centered / np.sqrt((centered**2).mean() + EPSILON)
            result[index][slice(None) if scope == "joint" else slice(number, number + 1)] = y
    return result if scale is None else result * scale


@pytest.mark.parametrize("after_rotary", [False, True])
@pytest.mark.parametrize(
    ("scope", "kind", "zero_centered", "with_scale"),
    [
        ("head", "rms_norm", True, True),
        ("separate", "layer_norm", False, True),
        ("joint", "rms_norm", False, True),
        ("joint", "layer_norm", True, True),
        ("head", "rms_norm", False, False),
    ],
)
def test_queries_and_keys(scope, kind, zero_centered, with_scale, after_rotary):
    attention, weights, context = attention_of_one_layer(
        use_qk_norm=True,
        qk_norm_scope=scope,
        qk_norm_type=kind,
        qk_norm_with_scale=with_scale,
        qk_norm_after_rotary=after_rotary,
        normalization_zero_centered=zero_centered,
    )
    x = np.random.default_rng(0).normal(size=(B, T, 32)) + 1
    queries_keys_values = attention.project_inputs((jnp.float32(x),) * 3, context)
    for name, found in zip(("query", "key"), queries_keys_values, strict=False):
        expected = np.einsum("btd,dnh->btnh", x, weights[name]["kernel"])
        scale = None
        if with_scale:
            scale = weights[f"{name}_norm"]["scale"] + zero_centered
            num_heads = N if name == "query" else K
            assert scale.shape == ((H,) if scope == "head" else (num_heads, H))
        if after_rotary:
            expected = normed(rotated(expected), scale, scope, kind)
        else:
            expected = rotated(normed(expected, scale, scope, kind))
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("shared", [False, True])
def test_values(shared):
    """Weightless; with share_kv_projections they are the keys before their norm and rotary."""
    attention, weights, context = attention_of_one_layer(
        use_qk_norm=True, use_v_norm=True, share_kv_projections=shared
    )
    assert ("value" in weights) != shared
    assert "value_norm" not in weights
    x = np.random.default_rng(0).normal(size=(B, T, 32))
    _, k_BTKH, v_BTKH = attention.project_inputs((jnp.float32(x),) * 3, context)
    kernel = weights["key" if shared else "value"]["kernel"]
    expected = normed(np.einsum("btd,dnh->btnh", x, kernel), None)
    np.testing.assert_allclose(v_BTKH, expected, rtol=1e-4, atol=2e-5)
    keys = np.einsum("btd,dnh->btnh", x, weights["key"]["kernel"])
    expected = rotated(normed(keys, weights["key_norm"]["scale"]))
    np.testing.assert_allclose(k_BTKH, expected, rtol=1e-4, atol=2e-5)


def test_temperature_of_queries():
    """Ministral 3: rotated queries times 1 + beta ln(1 + floor(t / original length))."""
    attention, weights, context = attention_of_one_layer(
        temperature_tuning_beta=0.5, original_max_position_embeddings=2
    )
    x = np.random.default_rng(0).normal(size=(B, T, 32))
    q_BTNH, k_BTKH, _ = attention.project_inputs((jnp.float32(x),) * 3, context)
    factors = np.array([1 + 0.5 * np.log(1 + n) for n in (0, 0, 1, 1, 2)])[:, None, None]
    query, key = (
        rotated(np.einsum("btd,dnh->btnh", x, weights[name]["kernel"])) for name in ("query", "key")
    )
    np.testing.assert_allclose(q_BTNH, query * factors, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(k_BTKH, key, rtol=1e-4, atol=1e-4)
