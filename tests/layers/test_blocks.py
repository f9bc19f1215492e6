"""Forms of a layer, of norms and of the head against their definitions."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.input_pipeline.batch import Batch
from MaxText.layers.connections import Inputs
from MaxText.layers.context import Context
from MaxText.layers.model import Model
from MaxText.layers.static_sgu import static_sgu
from MaxText.training.objective import loss_sums
from tests.small_models import random_batch, some_quick, tiny_config

ALL_HEADS = {"base_num_kv_heads": 4}


def built(family="gpt_neo", **keys):
    """(configuration, model, parameters that are nowhere 0 or 1)."""
    config = tiny_config(family, **(ALL_HEADS | {"base_num_decoder_layers": 2} | keys))
    model = Model(config.model)
    return config, model, with_noise(jax.jit(model.initialize)(jax.random.key(0)))


def with_noise(params):
    generator = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: x + 0.2 * generator.normal(size=x.shape).astype(np.float32), params
    )


def first_layer(model, params):
    """The first layer as a module; for use inside a trace."""
    if model.section.layers_are_alike:
        first = jax.tree.map(lambda leaf: leaf[0], params["layers"])
        return model.merge(params | {"layers": first}).layers
    return model.merge(params).layers["0"]


def hidden_states(seed=1, length=16):
    return np.random.default_rng(seed).normal(size=(2, length, 32)).astype(np.float32)


def applied(model, params, by_hand, x, kind="global"):
    """What the first layer makes of x, and what `by_hand` (layer, x, context) does."""

    @jax.jit
    def run(params, x):
        layer = first_layer(model, params)
        context = Context().for_layer(0, kind)
        return layer(Inputs.all(x), context)[0], by_hand(layer, x, context)

    return run(params, x)


def attention(layer, x, context):
    return layer.self_attention((x, x, x), context)[0]


def test_rezero_begins_as_the_identity():
    config = tiny_config("gpt_neo", **ALL_HEADS, use_rezero=True)
    model = Model(config.model)
    params = jax.jit(model.initialize)(jax.random.key(0))
    assert not any("pre_" in name for name in model.parameters)
    batch = random_batch(config, 2)

    @jax.jit
    def run(params):
        decoder = model.merge(params)
        places = jnp.arange(16)[None]
        x = decoder.token_embedder(batch.tokens_BT) + decoder.position_embedder(places)
        return decoder.hidden(batch)[0], decoder.decoder_norm(x)

    np.testing.assert_array_equal(*run(params))


def test_rezero_multiplies_each_part():
    _, model, params = built(use_rezero=True)
    x = hidden_states()

    def by_hand(layer, x, context):
        h = x + layer.attention_gate.scale[...] * attention(layer, x, context)
        return h + layer.mlp_gate.scale[...] * layer.mlp(h, context)[0]

    got, expected = applied(model, params, by_hand, x)
    np.testing.assert_allclose(got, expected, atol=1e-5)
    assert np.abs(got - x).max() > 0.1


@pytest.mark.parametrize("prenorm", [True, False])
def test_macaron_is_two_halves(prenorm):
    _, model, params = built(use_macaron=True, macaron_prenorm=prenorm)

    def by_hand(layer, x, context):
        first = layer.macaron_layer_norm(x) if prenorm else x
        h = x + 0.5 * layer.macaron_mlp(first, context)[0]
        h = h + attention(layer, layer.pre_self_attention_layer_norm(h), context)
        return h + 0.5 * layer.mlp(layer.pre_mlp_layer_norm(h), context)[0]

    got, expected = applied(model, params, by_hand, hidden_states())
    np.testing.assert_allclose(got, expected, atol=1e-5)
    assert ("layers/macaron_layer_norm/scale" in model.parameters) == prenorm


def test_parallel_parts_share_a_norm():
    _, model, params = built(block_arrangement="parallel", parallel_residual_shared_norm=True)
    assert "layers/pre_mlp_layer_norm/scale" not in model.parameters

    def by_hand(layer, x, context):
        h = layer.pre_self_attention_layer_norm(x)
        return x + attention(layer, h, context) + layer.mlp(h, context)[0]

    got, expected = applied(model, params, by_hand, hidden_states())
    np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize("doubles", [False, True])
def test_a_layer_without_attention_has_its_feed_forward_alone(doubles):
    _, model, params = built(
        attention_types=[[["none", "global"], 1]],
        none_doubles_residual=doubles,
        scan_layers=False,
    )
    assert not any(name.startswith("layers/0/self_attention") for name in model.parameters)
    assert any(name.startswith("layers/1/self_attention") for name in model.parameters)

    def by_hand(layer, x, context):
        h = 2 * x if doubles else x
        return h + layer.mlp(layer.pre_mlp_layer_norm(h), context)[0]

    got, expected = applied(model, params, by_hand, hidden_states(), "none")
    np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["scale_norm", "scale_norm_centered"])
def test_norms_of_one_scale(kind):
    _, model, params = built(normalization_type=kind)
    x = 5 * hidden_states() + 3
    g = float(params["decoder_norm"]["scale"][0])
    assert params["decoder_norm"]["scale"].shape == (1,)
    got = np.asarray(jax.jit(lambda params, x: model.merge(params).decoder_norm(x))(params, x))
    x = x.astype(np.float64)
    if kind == "scale_norm":
        np.testing.assert_allclose(np.linalg.norm(got, axis=-1), abs(g), rtol=1e-5)
        expected = g * x / np.linalg.norm(x, axis=-1, keepdims=True)
    else:
        deviation = np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        expected = g * (x - x.mean(-1, keepdims=True)) / deviation
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=1e-5)
    fresh = jax.jit(model.initialize)(jax.random.key(0))["decoder_norm"]["scale"]
    np.testing.assert_allclose(fresh, [1.0 if "centered" in kind else 32**0.5], rtol=1e-6)


@pytest.mark.parametrize("scan", some_quick([True, False], 2))
def test_one_layer_for_all(scan):
    keys = {"base_num_decoder_layers": 3, "scan_layers": scan}
    config, shared, params = built(share_parameters=True, **keys)
    model = built(**keys)[1]
    layers = [name for name in shared.parameters if name.startswith("layers/")]
    assert {shared.parameters[name].shape[0] for name in layers} == {1}
    assert 3 * sum(shared.parameters[name].size for name in layers) == sum(
        info.size for name, info in model.parameters.items() if name.startswith("layers/")
    )
    batch = random_batch(config, 2)

    def gradient(model):
        def loss(params):
            return loss_sums(model.merge(params), batch, config.model.objective).total

        return jax.jit(jax.value_and_grad(loss))

    repeated = params | {
        "layers": jax.tree.map(lambda leaf: jnp.repeat(leaf, 3, axis=0), params["layers"])
    }
    (ours, ours_gradient), (theirs, theirs_gradient) = (
        gradient(shared)(params),
        gradient(model)(repeated),
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x[0], y.sum(0), atol=1e-5 * np.abs(y).max()),
        ours_gradient["layers"],
        theirs_gradient["layers"],
    )


WIDE = {
    "base_emb_dim": 128,
    "head_dim": 32,
    "base_mlp_dim": 256,
    "vocab_size": 512,
    "max_target_length": 256,
    "num_mem_kv": 64,
}


@pytest.mark.parametrize(
    ("keys", "wi", "wo"),
    [
        ({}, 0.02, 0.02 / 2**0.5),  # the bundle scales by depth: 2 layers
        ({"init_scale_by_depth": False}, 0.02, 0.02),
        ({"init_scale_by_in": True}, 0.02 / 128**0.5, 0.02 / (2 * 256) ** 0.5),
    ],
)
def test_initial_deviations_of_gpt_neo(keys, wi, wo):
    """Of every array, within 2 %."""
    config = tiny_config("gpt_neo", **ALL_HEADS, base_num_decoder_layers=2, **WIDE, **keys)
    model = Model(config.model)
    params = jax.jit(model.initialize)(jax.random.key(0))
    deviations = {
        "token_embedder/embedding": 0.02,
        "position_embedder/embedding": 0.01,
        "self_attention/query/kernel": (128 * 32) ** -0.5,
        "self_attention/key/kernel": 128**-0.5,
        "self_attention/value/kernel": 128**-0.5,
        "self_attention/out/kernel": 128**-0.5,
        "self_attention/memory_key": 32**-0.5,
        "self_attention/memory_value": 32**-0.5,
        "mlp/wi/kernel": wi,
        "mlp/wo/kernel": wo,
    }
    seen = set()
    for name in model.parameters:
        leaf = params
        for part in name.split("/"):
            leaf = leaf[part]
        short = name.removeprefix("layers/")
        if short in deviations:
            seen.add(short)
            np.testing.assert_allclose(np.std(leaf), deviations[short], rtol=0.02, err_msg=name)
            assert abs(np.mean(leaf)) < 0.03 * deviations[short], name
        else:
            np.testing.assert_array_equal(leaf, float("norm/scale" in name), err_msg=name)
    assert seen == deviations.keys()


def logits_of(model, params, batch):
    return np.asarray(jax.jit(lambda params, batch: model.merge(params)(batch))(params, batch))


def test_head_qk_adds_nothing_at_first():
    keys = ALL_HEADS | {"base_num_decoder_layers": 1}
    plain = Model(tiny_config("gpt2", **keys).model)
    config = tiny_config("gpt2", **keys, head_qk=True, head_qk_dim=8)
    model, batch = Model(config.model), random_batch(config, 2)
    without, with_it = (
        logits_of(model, jax.jit(model.initialize)(jax.random.key(0)), batch)
        for model in (plain, model)
    )
    np.testing.assert_array_equal(with_it, without)


@pytest.mark.parametrize("documents", [False, True])
def test_head_qk_points_at_earlier_tokens(documents):
    config, model, params = built("gpt2", head_qk=True, head_qk_dim=8, vocab_size=7)
    batch = random_batch(config, 2, documents=documents)

    @jax.jit
    def run(params, batch):
        decoder = model.merge(params)
        h_BTD, _ = decoder.hidden(batch)
        plain = decoder.logits(h_BTD, decoder.pointers(jnp.zeros_like(h_BTD), batch))
        return h_BTD, decoder(batch) - plain

    h, added = (np.asarray(x, np.float64) for x in run(params, batch))
    query, key = (np.asarray(params["head_qk"][name]["kernel"]) for name in ("query", "key"))
    scores = np.einsum("bte,bse->bts", h @ query, h @ key) / 8
    seen = np.tril(np.ones((16, 16), bool))[None]
    if documents:
        segments = np.asarray(batch.segments_BT)
        seen = seen & (segments[:, :, None] == segments[:, None])
    one_hot = np.eye(7)[np.asarray(batch.tokens_BT)]
    expected = np.einsum("bts,bsv->btv", np.where(seen, scores, 0), one_hot)
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(added, expected, atol=1e-4)


@pytest.mark.parametrize(
    "keys",
    [
        {"head_qk": True, "head_qk_dim": 8},
        {"static_sgu": True, "static_sgu_kernel": 4, "parallel_residual_shared_norm": True}
        | {"block_arrangement": "parallel"},
    ],
    ids=["Head-QK", "static SGU"],
)
def test_a_token_changes_nothing_before_it_nor_in_other_documents(keys):
    config, model, params = built("gpt2", **keys)
    batch = random_batch(config, 1, documents=True)
    cut = int((np.asarray(batch.segments_BT[0]) == 1).sum())
    other = dataclasses.replace(batch, tokens_BT=batch.tokens_BT.at[0, cut - 2].add(1) % 64)
    before, after = (logits_of(model, params, x) for x in (batch, other))
    changed = np.any(before != after, axis=(0, 2))
    assert changed[cut - 2 : cut].all()
    assert not changed[: cut - 2].any()
    assert not changed[cut:].any()


@pytest.mark.parametrize(("kernel", "length"), [(3, 40), (20, 50), (128, 30), (0, 5)])
def test_static_sgu_is_a_sum_of_earlier_tokens(kernel, length):
    start = 2
    impulse = np.zeros((1, length, 2), np.float32)
    impulse[0, start] = [1.0, -2.0]
    y = static_sgu(jnp.asarray(impulse), kernel)
    distance = np.arange(length) - start
    weights = np.where((distance >= 0) & (distance <= kernel), 1 / (np.abs(distance) + 2), 0)
    np.testing.assert_allclose(y[0], weights[:, None] * [1.0, -2.0], rtol=1e-6)
    segments = jnp.asarray(np.arange(length)[None] // 4 + 1)
    within = np.where(np.arange(length) // 4 == start // 4, weights, 0)
    y = static_sgu(jnp.asarray(impulse), kernel, segments)
    np.testing.assert_allclose(y[0], within[:, None] * [1.0, -2.0], rtol=1e-6)


def test_static_sgu_has_half_the_channels_and_no_gradient():
    _, model, params = built("gpt2", static_sgu=True, static_sgu_kernel=4)
    assert model.parameters["layers/self_attention/query/kernel"].shape[1:] == (16, 4, 8)
    assert model.parameters["layers/self_attention/out/kernel"].shape[1:] == (4, 8, 16)
    x = hidden_states()

    @jax.jit
    def run(params, x):
        layer = first_layer(model, params)

        def mixed(x):
            return layer._mixed((x, x, x), Context().for_layer(0), None)[0]

        gradient = jax.grad(lambda x: jnp.sum(mixed(x) ** 2))(x)
        rest = x[..., 16:]
        return mixed(x), static_sgu(x[..., :16], 4), attention(layer, rest, Context()), gradient

    got, sums, others, gradient = map(np.asarray, run(params, x))
    np.testing.assert_allclose(got, np.concatenate([sums, others], axis=-1), atol=1e-6)
    assert not gradient[..., :16].any()
    assert gradient[..., 16:].all()


def test_alibi_depends_on_distances_alone():
    _, model, params = built("fattorib")
    tokens = np.random.default_rng(0).integers(0, 64, (1, 16)).astype(np.int32)
    alone = logits_of(model, params, Batch(*map(jnp.asarray, (tokens, tokens, np.ones((1, 16))))))
    # The same text later in the row, behind another document.
    moved = np.concatenate([tokens[:, 9:][:, ::-1], tokens[:, :9]], axis=1)
    segments = np.where(np.arange(16) < 7, 1, 2)[None].astype(np.int32)
    positions = np.arange(16)[None].astype(np.int32) + 5
    batch = Batch(*map(jnp.asarray, (moved, moved, np.ones((1, 16)), positions, segments)))
    np.testing.assert_allclose(logits_of(model, params, batch)[:, 7:], alone[:, :9], atol=1e-5)
    swapped = Batch(*map(jnp.asarray, (tokens[:, ::-1], tokens, np.ones((1, 16)))))
    assert np.abs(logits_of(model, params, swapped)[:, -1] - alone[:, -1]).max() > 1e-3
