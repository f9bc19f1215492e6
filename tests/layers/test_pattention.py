"""Pattention and drop path, which comes with it."""

from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.config.layer_sections import PattentionConfig, ZoomDimsConfig
from MaxText.layers.assembly.model import Model
from MaxText.layers.context import ForwardContext
from MaxText.layers.dropout import drop_path
from MaxText.layers.feed_forward.pattention import Theta
from MaxText.layers.part import LayerInputs
from tests.small_models import random_params, tiny_config

KINDS = get_args(PattentionConfig.model_fields["normalize_type"].annotation)
L2_KINDS = ("l2_norm_gelu", "gelu_l2_norm", "l2_norm")
SIZES = {"base_num_kv_heads": 4, "slot_num": 12}


def theta_of(kind, n=8, **keys):
    return Theta(PattentionConfig(normalize_type=kind, slot_num=n, **keys), "qkv", 8)


@pytest.mark.parametrize("kind", KINDS)
def test_scores_of_any_size_have_finite_values_and_gradients(kind):
    sizes = jnp.asarray([0.0, 1e-30, 1e-18, 1e15])[:, None]
    scores = sizes * jnp.asarray([1.0, -2.0, 0.5, 0.0, 3.0, -1.0, 0.1, -0.2])

    @jax.jit
    def run(scores):
        found = []
        for epsilon in (None, 0.0):
            actual = theta_of(kind, score_norm_epsilon=epsilon)
            for dtype in (jnp.float32, jnp.bfloat16):
                value, back = jax.vjp(actual, scores.astype(dtype))
                gradient = back(jnp.broadcast_to(jnp.arange(1, 9, dtype=dtype), value.shape))
                found.append((value, *gradient))
        return found

    for value, gradient in run(scores):
        assert np.isfinite(value.astype(jnp.float32)).all()
        assert np.isfinite(gradient.astype(jnp.float32)).all()
        assert kind == "softmax" or not value[0].any()


@pytest.mark.parametrize(
    ("kind", "given", "epsilon"),
    [
        ("l2_norm_gelu", None, 1e-5),
        ("gelu_l2_norm", None, 1e-8),
        ("l2_norm", None, 1e-8),
        *((kind, 3e-6, 3e-6) for kind in L2_KINDS),
        ("l2_norm", 0.0, 0.0),
    ],
)
def test_epsilon_stands_outside_the_root(kind, given, epsilon):
    # So small that epsilon is a share of the norm, for the second row nearly all of it.
    scores = np.random.default_rng(0).normal(size=8) * [[2e-5], [1e-9]]

    def gelu(x):
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    def normalized(x):
        return 8**0.5 * x / (np.linalg.norm(x, axis=-1, keepdims=True) + epsilon)

    expected = {
        "l2_norm_gelu": lambda x: gelu(normalized(x)),
        "gelu_l2_norm": lambda x: normalized(gelu(x)),
        "l2_norm": normalized,
    }[kind](scores)
    actual = theta_of(kind, score_norm_epsilon=given)(jnp.asarray(scores, jnp.float32))
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_sums_over_slots_are_float32(kind):
    n = 4096
    scores = jnp.asarray(np.random.default_rng(0).normal(size=(3, n)), jnp.bfloat16)
    exact = theta_of(kind, n)(scores.astype(jnp.float32))
    actual = theta_of(kind, n)(scores)
    assert actual.dtype == jnp.bfloat16
    # One rounding of the result, half a unit in the last of 8 bits.
    np.testing.assert_allclose(actual.astype(jnp.float32), exact, rtol=2**-8, atol=1e-6)


def test_numbers_of_slots_and_zooms_that_are_derived():
    assert [PattentionConfig().num_slots(place, 32) for place in ("qkv", "proj", "ffn")] == [
        32,
        32,
        128,
    ]
    some = PattentionConfig(slot_num=10, proj_slot_num=7)
    assert [some.num_slots(place, 32) for place in ("qkv", "proj", "ffn")] == [10, 7, 40]
    assert [some.zoom(place, 32) for place in ("qkv", "proj", "ffn")] == [10, 7, 40]
    fixed = PattentionConfig(slot_num=10, zoom_dim=6, zoom_dims=ZoomDimsConfig(ffn=9))
    assert [fixed.zoom(place, 32) for place in ("qkv", "proj", "ffn")] == [6, 6, 9]
    assert fixed.model_copy(update={"zoom_dims": ZoomDimsConfig()}).zoom("ffn", 32) == 24
    assert fixed.model_copy(update={"zoom_dims": ZoomDimsConfig(ffn=0)}).zoom("ffn", 32) == 40


def test_drop_path_takes_or_leaves_whole_sequences():
    x_BTD = jnp.ones((1000, 2, 3))
    dropped = np.asarray(drop_path(x_BTD, 0.25, jax.random.key(0)))
    assert set(np.unique(dropped)) == {0.0, np.float32(1 / 0.75)}
    assert (dropped == dropped[:, :1, :1]).all()
    assert abs((dropped[:, 0, 0] > 0).mean() - 0.75) < 0.05


@pytest.mark.parametrize(
    ("schedule", "rates"), [("constant", [0.6, 0.6, 0.6]), ("linear", [0.0, 0.3, 0.6])]
)
def test_drop_path_over_depth(schedule, rates):
    config = tiny_config("tokenformer", drop_path=0.6, drop_path_schedule=schedule, **SIZES)
    model = Model(config.model)
    params = random_params(model)
    first = jax.tree.map(lambda leaf: leaf[0], params["layers"])
    x_BTD = jax.random.normal(jax.random.key(1), (600, 1, 32))

    @jax.jit
    def run(x_BTD):
        layer, inputs = model.merge({**params, "layers": first}).layers, LayerInputs.all(x_BTD)
        dropped = ForwardContext(dropout_key=jax.random.key(2))
        contexts = [dropped.for_layer(index) for index in range(3)]
        contexts += [ForwardContext(), ForwardContext().for_layer(1)]
        return [layer(inputs, context)[0] for context in contexts]

    *outputs, plain, other = run(x_BTD)
    for y_BTD, rate in zip(outputs, rates, strict=True):
        # A sequence whose branches both fall away is what it was.
        unchanged = float(np.all(np.asarray(y_BTD) == np.asarray(x_BTD), axis=(1, 2)).mean())
        assert abs(unchanged - rate**2) < 0.06
    np.testing.assert_array_equal(plain, other)
