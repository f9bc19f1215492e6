"""Properties of Pattention and of what comes with it: plain norms, drop path, initial slots."""

from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.configuration.layer_sections import Pattention
from MaxText.layers.connections import Inputs
from MaxText.layers.context import Context
from MaxText.layers.dropout import drop_path
from MaxText.layers.model import Model
from MaxText.layers.pattention import theta
from MaxText.training.objective import loss_sums
from tests.small_models import random_batch, tiny_config, trainer

KINDS = get_args(Pattention.model_fields["normalize_type"].annotation)
L2_KINDS = ("l2_norm_gelu", "gelu_l2_norm", "l2_norm")
SIZES = {"base_num_kv_heads": 4, "slot_num": 12}


def theta_of(kind, n=8, **keys):
    return theta(Pattention(normalize_type=kind, slot_num=n, **keys), "qkv", 8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("epsilon", [None, 0.0])
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-18, 1e15])
def test_rows_of_any_size_have_finite_values_and_gradients(kind, epsilon, size):
    ours = theta_of(kind, score_norm_epsilon=epsilon)
    scores = size * jnp.asarray([1.0, -2.0, 0.5, 0.0, 3.0, -1.0, 0.1, -0.2])
    weights = jnp.arange(1.0, 9.0)
    for dtype in (jnp.float32, jnp.bfloat16):
        value, gradient = jax.value_and_grad(lambda a: jnp.sum(weights * ours(a)))(
            scores.astype(dtype)
        )
        assert np.isfinite(value)
        assert np.isfinite(gradient.astype(jnp.float32)).all()
    if size == 0.0 and kind != "softmax":
        assert not np.asarray(ours(scores)).any()


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

    def normalised(x):
        return 8**0.5 * x / (np.linalg.norm(x, axis=-1, keepdims=True) + epsilon)

    expected = {
        "l2_norm_gelu": lambda x: gelu(normalised(x)),
        "gelu_l2_norm": lambda x: normalised(gelu(x)),
        "l2_norm": normalised,
    }[kind](scores)
    ours = theta_of(kind, score_norm_epsilon=given)(jnp.asarray(scores, jnp.float32))
    np.testing.assert_allclose(ours, expected, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_sums_over_slots_are_float32(kind):
    n = 4096
    scores = jnp.asarray(np.random.default_rng(0).normal(size=(3, n)), jnp.bfloat16)
    exact = theta_of(kind, n)(scores.astype(jnp.float32))
    ours = theta_of(kind, n)(scores)
    assert ours.dtype == jnp.bfloat16
    # One rounding of the result, half a unit in the last of 8 bits.
    np.testing.assert_allclose(ours.astype(jnp.float32), exact, rtol=2**-8, atol=1e-6)


def test_numbers_of_slots_and_zooms_that_are_derived():
    assert [Pattention().num_slots(place, 32) for place in ("qkv", "proj", "ffn")] == [32, 32, 128]
    some = Pattention(slot_num=10, proj_slot_num=7)
    assert [some.num_slots(place, 32) for place in ("qkv", "proj", "ffn")] == [10, 7, 40]
    assert [some.zoom(place, 32) for place in ("qkv", "proj", "ffn")] == [10, 7, 40]
    fixed = Pattention(slot_num=10, zoom_dim=6, ffn_zoom_dim=9)
    assert [fixed.zoom(place, 32) for place in ("qkv", "proj", "ffn")] == [6, 6, 9]
    assert fixed.model_copy(update={"ffn_zoom_dim": -1.0}).zoom("ffn", 32) == 24
    assert fixed.model_copy(update={"ffn_zoom_dim": 0.0}).zoom("ffn", 32) == 40


def test_names_and_shapes_of_the_parameters():
    config = tiny_config("tokenformer", base_num_kv_heads=2, slot_num=12, ffn_slot_num=20)
    shapes = {name: info.shape for name, info in Model(config.model).parameters.items()}
    attention = {
        f"layers/self_attention/{part}/{side}/kernel": shape
        for part, keys, values in (
            ("query", (3, 32, 12), (3, 12, 32)),
            ("key", (3, 32, 12), (3, 12, 16)),
            ("value", (3, 32, 12), (3, 12, 16)),
            ("out", (3, 32, 12), (3, 12, 32)),
        )
        for side, shape in (("keys", keys), ("values", values))
    }
    assert shapes == attention | {
        "layers/mlp/keys/kernel": (3, 32, 20),
        "layers/mlp/values/kernel": (3, 20, 32),
        "decoder_norm/scale": (32,),
        "decoder_norm/bias": (32,),
        "token_embedder/embedding": (64, 32),
        "logits_dense/kernel": (32, 64),
    }
    biased = tiny_config("tokenformer", qkv_bias=True, proj_bias=True, ffn_bias=True, **SIZES)
    added = Model(biased.model).parameters.keys() - shapes.keys()
    assert len(added) == 10
    assert all(name.endswith(("keys/bias", "values/bias")) for name in added)


@pytest.mark.parametrize("kind", L2_KINDS)
def test_slots_with_zero_keys_change_nothing_where_the_zoom_is_fixed(kind):
    keys = SIZES | {"normalize_type": kind, "zoom_dim": 12, "base_num_decoder_layers": 1}
    small = Model(tiny_config("tokenformer", **keys).model)
    large = Model(tiny_config("tokenformer", **keys | {"slot_num": 20}).model)
    batch = random_batch(tiny_config(), rows=2)
    params, fresh = (jax.jit(m.initialize)(jax.random.key(0)) for m in (small, large))

    def grown(path, old, new):
        if old.shape == new.shape:
            return old
        is_key = path[-2].key == "keys"
        added = jnp.zeros_like(new) if is_key else new
        return added.at[tuple(slice(0, size) for size in old.shape)].set(old)

    def logits(model, params):
        def run(params):
            decoder = model.merge(params)
            return decoder.logits(decoder.hidden(batch)[0])

        return jax.jit(run)(params)

    more = jax.tree_util.tree_map_with_path(grown, params, fresh)
    np.testing.assert_allclose(logits(small, params), logits(large, more), atol=1e-5)
    assert not np.allclose(logits(small, params), logits(large, fresh), atol=1e-2)


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
    params = jax.jit(model.initialize)(jax.random.key(0))
    weights = jax.tree.map(lambda leaf: leaf[0], params["layers"])
    layer = model.merge({**params, "layers": weights}).layers
    x_BTD = jax.random.normal(jax.random.key(1), (600, 1, 32))
    for index, rate in enumerate(rates):
        context = Context(dropout_key=jax.random.key(2)).for_layer(index)
        y_BTD = jax.jit(lambda x_BTD: layer(Inputs.all(x_BTD), context)[0])(x_BTD)  # noqa: B023
        # A sequence whose branches both fall away is what it was.
        unchanged = float(np.all(np.asarray(y_BTD) == np.asarray(x_BTD), axis=(1, 2)).mean())
        assert abs(unchanged - rate**2) < 0.06, (index, unchanged)
    inputs = Inputs.all(x_BTD)
    assert np.array_equal(layer(inputs, Context())[0], layer(inputs, Context().for_layer(1))[0])


def test_drop_path_alone_makes_the_train_step_random():
    batch = random_batch(tiny_config(), rows=2)
    losses = []
    for on in (True, False):
        config = tiny_config(
            "tokenformer", base_num_decoder_layers=1, drop_path=0.5, enable_dropout=on, **SIZES
        )
        model, state, step = trainer(config)
        losses.append(float(step(state, batch)[1]["loss"]))
    whole = loss_sums(model.merge(state.params), batch, config.model.objective).total
    whole /= batch.weights_BT.sum()
    np.testing.assert_allclose(losses[1], whole, rtol=1e-5)
    assert abs(losses[0] - whole) > 1e-3


@pytest.mark.parametrize(
    ("weight_init", "deviations"),
    [
        # query keys, query values, feed-forward keys, feed-forward values, table
        ("tokenformer", [128**-0.5, 256**-0.5, 128**-0.5, 1024**-0.5, 1.0]),
        ("wang", [0.02, 2 / (3 * 128**0.5), 0.02, 2 / (3 * 128**0.5), 0.02]),
    ],
)
def test_initial_slots(weight_init, deviations):
    config = tiny_config(
        "tokenformer", weight_init=weight_init, base_emb_dim=128, head_dim=32, vocab_size=512,
        base_num_kv_heads=4, slot_num=256,
    )  # fmt: skip
    params = jax.jit(Model(config.model).initialize)(jax.random.key(0))
    query, mlp = params["layers"]["self_attention"]["query"], params["layers"]["mlp"]
    arrays = [part[side]["kernel"] for part in (query, mlp) for side in ("keys", "values")]
    arrays.append(params["token_embedder"]["embedding"])
    for array, deviation in zip(arrays, deviations, strict=True):
        np.testing.assert_allclose(np.std(array), deviation, rtol=0.02)
    # Cut at two deviations of a wider normal: nothing lies beyond 2.28 of the result's.
    beyond = [float(np.mean(np.abs(a) > 2.3 * d)) for a, d in zip(arrays, deviations, strict=True)]
    normal, cut = pytest.approx(0.0214, abs=0.003), 0
    in_feed_forward = cut if weight_init == "tokenformer" else normal
    assert beyond == [normal, normal, in_feed_forward, in_feed_forward, normal]


def test_norms_without_parameters():
    config = tiny_config(block_norm_parametric=False)
    names = Model(config.model).parameters.keys()
    assert [name for name in names if "norm" in name] == ["decoder_norm/scale"]
    model = Model(tiny_config("tokenformer", **SIZES).model)
    decoder = model.merge(jax.jit(model.initialize)(jax.random.key(0)))
    x = np.random.default_rng(0).normal(3.0, 2.0, (2, 5, 32)).astype(np.float32)
    expected = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(decoder.layers.pre_mlp_layer_norm(x), expected, atol=1e-5)
