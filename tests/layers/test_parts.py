"""Norms, embeddings, the head and initial weights against their definitions."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from MaxText.config.problems import ConfigurationError
from MaxText.layers.assembly.block_variants import WithPerLayerInput
from MaxText.layers.assembly.model import Model
from MaxText.layers.context import ForwardContext
from MaxText.layers.lowering import matmul
from MaxText.layers.part import LayerInputs
from tests.small_models import noisy_params, random_batch, random_params, tiny_config


def with_parameters(**keys):
    """(decoder of one layer with random weights, those weights by name in float64)."""
    model = Model(tiny_config(base_num_decoder_layers=1, **keys).model)
    params = random_params(model)
    leaves = jax.tree_util.tree_leaves_with_path(params)
    named = {"/".join(e.key for e in path): np.asarray(x, np.float64) for path, x in leaves}
    return model.merge(params), named


def hidden_states(*shape):
    return 5 * np.random.default_rng(1).normal(size=shape).astype(np.float32) + 3


def by_definition(kind, x, epsilon):
    x = x.astype(np.float64)
    if kind in ("layer_norm", "scale_norm_centered"):
        x = x - x.mean(-1, keepdims=True)
    mean = (x**2).mean(-1, keepdims=True)
    return x / np.sqrt(x.shape[-1] * mean if kind == "scale_norm" else mean + epsilon)


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("kind", ["rms_norm", "layer_norm", "scale_norm", "scale_norm_centered"])
def test_norms(kind, zero_centered):
    keys = {"normalization_type": kind, "normalization_zero_centered": zero_centered}
    decoder, weights = with_parameters(**keys)
    scale = weights["decoder_norm/scale"]
    assert scale.shape == ((1,) if "scale" in kind else (32,))
    x = hidden_states(2, 5, 32)
    epsilon = decoder.config.block.normalization_layer_epsilon
    expected = by_definition(kind, x, epsilon) * (scale + zero_centered)
    expected = expected + weights.get("decoder_norm/bias", 0.0)
    np.testing.assert_allclose(decoder.decoder_norm(x), expected, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("zero_centered", [False, True])
def test_norms_start_with_factors_of_one_and_biases_at_zero(zero_centered):
    config = tiny_config(use_qk_norm=True, ffn_bias=True, normalization_zero_centered=zero_centered)
    model = Model(config.model)

    @jax.jit
    def drawn(key):
        leaves = jax.tree_util.tree_leaves_with_path(model.initialize(key))
        return [[x for path, x in leaves if path[-1].key == kind] for kind in ("scale", "bias")]

    scales, biases = drawn(jax.random.key(0))
    assert (len(scales), len(biases)) == (5, 3)
    assert all((scale == 1 - zero_centered).all() for scale in scales)
    assert not any(bias.any() for bias in biases)


def test_a_small_difference_from_one_survives_bfloat16():
    decoder, _ = with_parameters(
        normalization_zero_centered=True, dtype="bfloat16", weight_dtype="bfloat16"
    )
    # 1 + 2^-9 is 1 in bfloat16; 2^-9 is not 0.
    decoder.decoder_norm.scale[...] = jnp.full(32, 2.0**-9, jnp.bfloat16)
    x = jnp.tile(jnp.asarray([1.0, -1.0]), 16)
    np.testing.assert_allclose(decoder.decoder_norm(x), x * (1 + 2**-9), rtol=2e-5)


def test_multipliers_and_norms_around_the_layers():
    decoder, weights = with_parameters(
        embedding_multiplier=3.0,
        embedding_norm=True,
        final_norm_parametric=False,
        logits_scaling=5.0,
        final_logits_soft_cap=2.0,
        normalization_layer_epsilon=1e-3,
    )
    assert "decoder_norm/scale" not in weights
    tokens = np.arange(6)[None]
    embedded = 3.0 * weights["token_embedder/embedding"][tokens]
    expected = by_definition("rms_norm", embedded, 1e-3) * weights["embedding_norm/scale"]
    found = decoder._embed(jnp.asarray(tokens), jnp.asarray(tokens), ForwardContext())
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    h = hidden_states(1, 6, 32)
    np.testing.assert_allclose(
        decoder.decoder_norm(h), by_definition("rms_norm", h, 1e-3), rtol=1e-5, atol=1e-5
    )
    scores = h @ weights["logits_dense/kernel"] / 5.0
    np.testing.assert_allclose(decoder.logits(h), 2.0 * np.tanh(scores / 2.0), atol=1e-4)


def test_per_layer_embeddings():
    """Gemma 4: a table of its own and a projection of the embedding; a gated third branch."""
    keys = {"hidden_size_per_layer_input": 6, "mlp_activations": ["gelu", "linear"]}
    decoder, weights = with_parameters(**keys, share_layer_params=True, scale_embedding=True)
    tokens = jnp.arange(5)[None]
    embedded = np.sqrt(32) * weights["token_embedder/embedding"][:5]
    projected = np.einsum("td,dlp->tlp", embedded, weights["per_layer_inputs/projection/kernel"])
    projected = by_definition("rms_norm", projected / np.sqrt(32), 1e-5)
    projected = projected * weights["per_layer_inputs/norm/scale"]
    rows = np.sqrt(6) * weights["per_layer_inputs/embedding"][:5]
    expected = (rows + projected) / np.sqrt(2)
    x_BTD = jnp.asarray(embedded[None], jnp.float32)
    context = decoder._with_per_layer_inputs(ForwardContext(), tokens, x_BTD).for_layer(0)
    np.testing.assert_allclose(context.per_layer_inputs_BTLP[0], expected, rtol=1e-4, atol=1e-4)

    layer_weights = {
        name.removeprefix("layers/"): leaf[0]
        for name, leaf in weights.items()
        if name.startswith("layers/")
    }
    layer = decoder.layers
    layer = nnx.merge(nnx.graphdef(layer), jax.tree.map(lambda leaf: leaf[0], nnx.state(layer)))
    inputs = LayerInputs.all(x_BTD)
    found = layer(inputs, context)[0]
    y = super(WithPerLayerInput, layer).__call__(inputs, context)[0]
    gate = np.asarray(jax.nn.gelu(y @ layer_weights["per_layer_input_gate/kernel"]), np.float64)
    out = gate * expected[:, 0] @ layer_weights["per_layer_projection/kernel"]
    out = by_definition("rms_norm", out, 1e-5) * layer_weights["post_per_layer_input_norm/scale"]
    np.testing.assert_allclose(found, y + out, rtol=1e-3, atol=1e-3)


def norm_names(**keys):
    parameters = Model(tiny_config(scan_layers=False, **keys).model).parameters
    return {name: info.shape for name, info in parameters.items() if "norm" in name}


def test_norms_without_parameters_and_a_final_norm_of_another_kind():
    assert norm_names(block_norm_parametric=False) == {"decoder_norm/scale": (32,)}
    decoder, _ = with_parameters(
        block_norm_parametric=False, normalization_type="layer_norm", scan_layers=False
    )
    x = hidden_states(2, 5, 32)
    expected = by_definition("layer_norm", x, 1e-5)
    np.testing.assert_allclose(decoder.layers.pre_mlp_layer_norm(x), expected, atol=1e-5)
    names = norm_names(
        normalization_type="scale_norm_centered", final_normalization_type="layer_norm"
    )
    final = {"decoder_norm/scale": (32,), "decoder_norm/bias": (32,)}
    assert {name: shape for name, shape in names.items() if name in final} == final
    assert {shape[-1] for name, shape in names.items() if name not in final} == {1}


@pytest.mark.parametrize(("dtype", "width"), [("float32", 32), ("bfloat16", 3072)])
def test_scaled_embeddings(dtype, width):
    keys = {"base_emb_dim": width, "base_mlp_dim": 8, "dtype": dtype, "vocab_size": 8}
    decoder, weights = with_parameters(**keys, scale_embedding=True, num_vocab_tiling=1)
    embedder, table = decoder.token_embedder, weights["token_embedder/embedding"]
    rows = jnp.asarray(table[[[2, 5]]], dtype)
    # Rounded to the format of activations: sqrt(3072) = 55.43 is 55.5 in bfloat16.
    scale = jnp.asarray(width**0.5, dtype)
    np.testing.assert_array_equal(embedder(jnp.asarray([[2, 5]])), rows * scale)
    # The tied head is not scaled.
    x = hidden_states(1, 2, width)
    logits = embedder.attend(jnp.asarray(x), jnp.dtype("float32"))
    np.testing.assert_allclose(logits, x @ table.T, rtol=1e-4, atol=1e-3)


TIED = {"logits_via_embedding": True}


@pytest.mark.parametrize(
    ("keys", "formula"),
    [
        ({}, lambda x, w: x),
        ({"logits_bias": True}, lambda x, w: x + w["logits_dense/bias"]),
        ({"final_logits_soft_cap": 0.5}, lambda x, w: 0.5 * np.tanh(x / 0.5)),
        (TIED, lambda x, w: x / 32**0.5),
        (TIED | {"normalize_embedding_logits": False}, lambda x, w: x),
    ],
)
def test_head(keys, formula, monkeypatch):
    decoder, weights = with_parameters(**keys)
    is_tied, h_BTD = "logits_via_embedding" in keys, hidden_states(2, 5, 32)
    assert ("logits_dense/kernel" in weights) == (not is_tied)
    plain = weights["token_embedder/embedding"].T if is_tied else weights["logits_dense/kernel"]
    expected = formula(h_BTD @ plain, weights)
    for padded in (False, True):
        np.testing.assert_allclose(decoder.logits(h_BTD), expected, rtol=1e-4, atol=1e-3)
        assert ("[2,5,128]" in str(jax.make_jaxpr(decoder.logits)(h_BTD))) == padded
        monkeypatch.setattr(matmul, "platform", lambda: "gpu")


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_of_the_head(tied):
    """The product trains its weights, h^T g: a tied head the token table, besides the embedding."""
    keys = {"logits_via_embedding": tied, "normalize_embedding_logits": False}
    model = Model(tiny_config(base_num_decoder_layers=1, **keys).model)
    h_BTD = hidden_states(2, 5, 32)
    grad_logits_BTV = hidden_states(2, 5, model.config.shape.vocab_size)

    def total(params):
        return jnp.sum(model.merge(params).logits(h_BTD) * grad_logits_BTV)

    gradients = jax.grad(total)(random_params(model))
    if tied:
        grad_kernel_DV = gradients["token_embedder"]["embedding"].T
    else:
        grad_kernel_DV = gradients["logits_dense"]["kernel"]
    expected_DV = np.einsum("btd,btv->dv", h_BTD, grad_logits_BTV)
    np.testing.assert_allclose(grad_kernel_DV, expected_DV, rtol=1e-5, atol=1e-3)


WIDE = {
    "base_emb_dim": 128,
    "base_num_kv_heads": 4,
    "head_dim": 32,
    "base_mlp_dim": 256,
    "base_num_decoder_layers": 2,
    "vocab_size": 512,
    "max_target_length": 256,
}
XAVIER, SMALL = (2 / (128 + 256)) ** 0.5, (2 / (5 * 128)) ** 0.5
NEO = {
    **dict.fromkeys(("key/kernel", "value/kernel", "out/kernel"), 128**-0.5),
    **dict.fromkeys(("memory_key", "memory_value"), 32**-0.5),
    **{"query/kernel": (128 * 32) ** -0.5, "token_embedder": 0.02, "position_embedder": 0.01},
}
NEO_KEYS = {"decoder_block": "gpt_neo", "num_mem_kv": 64}
SLOTS = {"decoder_block": "tokenformer", "slot_num": 256}


@pytest.mark.parametrize(
    ("keys", "first", "last", "others"),
    [
        ({"weight_init": "gpt2"}, 0.02, 0.01, {"token_embedder": 0.02}),
        ({"weight_init": "neox"}, SMALL, 128**-0.5, {"token_embedder": SMALL}),
        ({"weight_init": "fan_in"}, 128**-0.5, 256**-0.5, {"token_embedder": 1.0}),
        ({"weight_init": "xavier"}, XAVIER, XAVIER, {"token_embedder": 1.0}),
        ({"weight_init": "xavier_uniform"}, XAVIER, XAVIER, {}),
        ({"weight_init": "normal"}, 0.02, 0.02, {}),
        (NEO_KEYS, 0.02, 0.02 / 2**0.5, NEO),  # the bundle scales by depth
        (NEO_KEYS | {"init_scale_by.depth": False}, 0.02, 0.02, {}),
        (NEO_KEYS | {"init_scale_by.fan_in": True}, 0.02 / 128**0.5, 0.02 / 512**0.5, {}),
        (SLOTS, 128**-0.5, 1024**-0.5, {"query/keys": 128**-0.5, "query/values": 256**-0.5}),
        (SLOTS | {"weight_init": "wang"}, 0.02, 128**-0.5, {"query/values": 128**-0.5}),
    ],
)
def test_initial_deviations(keys, first, last, others):
    """Of the feed-forward's first matrix, of its last one, and of others by name."""
    model = Model(tiny_config(**WIDE | keys).model)
    places = {"first": r"mlp/(wi|wi_0|keys)/kernel", "last": r"mlp/(wo|values)/kernel"}
    expected = {places["first"]: first, places["last"]: last} | others

    @jax.jit
    def drawn(key):
        leaves = jax.tree_util.tree_leaves_with_path(model.initialize(key))
        named = {"/".join(entry.key for entry in path): x for path, x in leaves}
        return {
            place: next(x for name, x in named.items() if re.search(place, name))
            for place in expected
        }

    arrays = drawn(jax.random.key(0))
    for place, deviation in expected.items():
        np.testing.assert_allclose(np.std(arrays[place]), deviation, rtol=0.02, err_msg=place)
        assert abs(np.mean(arrays[place])) < 0.05 * deviation, place
    one, other = arrays[places["first"]]
    assert not np.allclose(one, other)  # each layer draws its own
    # Normals are cut at two deviations of a wider one, but for slots of attention.
    is_cut = keys.get("weight_init") == "fan_in" or keys == SLOTS
    for place in {places["first"], *others} if is_cut else ():
        beyond = np.mean(np.abs(arrays[place]) > 2.3 * expected[place])
        assert beyond == (0 if place == places["first"] else pytest.approx(0.0214, abs=0.003))


def test_parameter_scale_multiplies_the_parameters():
    base = tiny_config(base_num_decoder_layers=2).model.shape.dimensions
    for scale in (2, 4, 8):
        config = tiny_config(base_num_decoder_layers=2, global_parameter_scale=scale)
        scaled = config.model.shape.dimensions
        width, heads, layers = (
            getattr(scaled, name) / getattr(base, name)
            for name in ("emb_dim", "num_query_heads", "num_layers")
        )
        assert width * heads * layers == scale


@pytest.mark.parametrize(
    "keys",
    [
        {"position_embedding": "none"},
        {"rope_max_timescale": 100.0, "rotary_pct": 0.5},
        {"head_dim": 16},
        {"base_num_query_heads": 2, "base_num_kv_heads": 1},
        {"dropout_rates": {"residual": 0.5}},
        {"mixer": "linear_attention", "linear_attention.chunk": 5},
        {"mixer": "linear_attention", "linear_attention": {"epsilon": 0.1}},
    ],
)
def test_a_letter_sets_what_the_model_sets(keys):
    shared = {"base_num_decoder_layers": 2, "scan_layers": True}
    pattern = {"layer_pattern": "A", "layer_kinds": {"A": keys}}
    models = [Model(tiny_config(**shared | more).model) for more in (pattern, keys, {})]
    assert models[0].abstract == models[1].abstract
    assert models[0].config.is_random == models[1].config.is_random
    params, batch = noisy_params(models[0], 0.3), random_batch(tiny_config(), 2)
    assert models[0].layer_of("layers/mlp/wo/kernel").config != models[2].config

    def hidden(model):
        key = jax.random.key(0)
        return jax.jit(
            lambda params: model.merge(params).hidden_states(batch, key, training=True)[0]
        )(params)

    np.testing.assert_array_equal(hidden(models[0]), hidden(models[1]))


def test_what_a_letter_may_not_set():
    for keys, words in (
        ({"base_num_kv_heads": 3}, r"layer_kinds: A: base_num_query_heads=4 is not a multiple"),
        ({"head_dim": 5}, r"layer_kinds: A: rotary rotates pairs"),
        ({"head_dim": 0}, "A: head_dim: 0 is not allowed"),
        ({"position_embedding": "alibi"}, "can only have rotary positions, none"),
        ({"causal": False}, "A: causal is not a key of a layer's parts"),
        ({"linear_attention.chunks": 5}, "A: linear_attention.chunks is not a key"),
        ({"linear_attention.chunk": 0}, "A: linear_attention.chunk: 0 is not >= 1"),
        ({"dropout_rates": {"embedding": 0.1}}, "A: dropout_rates.embedding is not a key"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            tiny_config(layer_pattern="A", layer_kinds={"A": keys})


def test_a_letter_chooses_rotary():
    keys = {"position_embedding": "none", "rope_max_timescale": 5e5, "layer_pattern": "A"}
    rotary = {"A": {"position_embedding": "rotary"}}
    tiny_config(**keys, layer_kinds=rotary, strict_config=True)
    with pytest.raises(ConfigurationError, match="A: rotary rotates pairs"):
        tiny_config(**keys, layer_kinds=rotary, head_dim=5)
    with pytest.raises(ConfigurationError, match="rope_max_timescale: has no effect"):
        tiny_config(**keys, layer_kinds={"A": {}}, strict_config=True)
