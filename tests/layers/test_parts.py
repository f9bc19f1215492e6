"""Properties of the parts that hold for every family."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.configuration.loading import configure
from MaxText.input_pipeline.batch import Batch
from MaxText.layers.activations import ACTIVATIONS, LEARNED, OVER_FEATURES
from MaxText.layers.attention_core import Scoring, softmax_attention
from MaxText.layers.model import Model
from tests.small_models import random_batch, some_quick, tiny_config

FAMILIES = ["llama2", "gpt2", "gpt_neox", "gemma"]


def family_config(family, **keys):
    return tiny_config(family, base_num_kv_heads=2 if family == "llama2" else 4, **keys)


def logits_of(config, batch, seed=0):
    model = Model(config.model)

    @jax.jit
    def run(params, batch):
        decoder = model.merge(params)
        return decoder.logits(decoder.hidden(batch)[0])

    return run(jax.jit(model.initialize)(jax.random.key(seed)), batch)


@pytest.mark.parametrize("family", some_quick(FAMILIES, 2))
def test_packed_documents_equal_separate_ones(family):
    config = family_config(family)
    packed = random_batch(config, rows=2, documents=True)
    cut = int((np.asarray(packed.segments_BT[0]) == 1).sum())
    together = logits_of(config, packed)
    for part in (slice(0, cut), slice(cut, None)):
        alone = Batch(*(x[:, part] for x in (packed.tokens_BT, packed.targets_BT,
                                             packed.weights_BT)))  # fmt: skip
        np.testing.assert_allclose(together[:, part], logits_of(config, alone), atol=2e-5)


@pytest.mark.parametrize("family", some_quick(FAMILIES, 2))
def test_a_document_never_sees_another_or_its_future(family):
    config = family_config(family)
    batch = random_batch(config, rows=1, documents=True)
    cut = int((np.asarray(batch.segments_BT[0]) == 1).sum())
    before = np.asarray(logits_of(config, batch))

    def changed(place):
        tokens = batch.tokens_BT.at[0, place].add(1) % config.model.shape.vocab_size
        other = Batch(tokens, *(getattr(batch, name) for name in (
            "targets_BT", "weights_BT", "positions_BT", "segments_BT")))  # fmt: skip
        return np.any(np.asarray(logits_of(config, other)) != before, axis=(0, 2))

    first = changed(cut - 1)
    assert first[cut - 1]
    assert not first[: cut - 1].any()
    assert not first[cut:].any()
    assert changed(cut)[cut:].all()


@pytest.mark.parametrize(
    "options",
    some_quick([{}, {"soft_cap": 5.0}, {"kv_heads": 1}, {"segments": True},
     {"causal": False}, {"causal": False, "segments": True}], 3),
)  # fmt: skip
def test_blocks_of_queries_equal_the_full_square(options):
    keys = jax.random.split(jax.random.key(0), 3)
    kv_heads = options.get("kv_heads", 4)
    q = jax.random.normal(keys[0], (2, 13, 4, 8))
    k, v = (jax.random.normal(key, (2, 13, kv_heads, 8)) for key in keys[1:])
    segments = None
    if options.get("segments"):
        segments = jnp.asarray(np.repeat([[1, 2, 3]], 2, 0).repeat([4, 4, 5], 1))

    def run(block_size):
        scoring = Scoring(causal=options.get("causal", True), soft_cap=options.get("soft_cap", 0.0))
        return softmax_attention(q, k, v, scoring, segments_BT=segments, block_size=block_size)

    scores = (
        np.einsum("btngh,bsnh->bngts", np.asarray(q).reshape(2, 13, kv_heads, -1, 8), k) / 8**0.5
    )
    if options.get("soft_cap"):
        scores = 5.0 * np.tanh(scores / 5.0)
    mask = np.ones((1, 13, 13), bool)
    if options.get("causal", True):
        mask = np.tril(mask)
    if segments is not None:
        mask = mask & (np.asarray(segments)[:, :, None] == np.asarray(segments)[:, None, :])
    scores = np.where(mask[:, None, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    expected = np.einsum("bngts,bsnh->btngh", weights, v).reshape(2, 13, 4, 8)
    for block_size in (None, 4, 5, 13, 64):
        np.testing.assert_allclose(run(block_size), expected, atol=1e-5)


def test_many_blocks_grow_instead_of_multiplying():
    x = jnp.ones((1, 64, 1, 4))
    text = str(jax.make_jaxpr(lambda x: softmax_attention(x, x, x, Scoring(), block_size=1))(x))
    assert text.count("dot_general") == 2 * 16


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        ({"use_qk_norm": True}, {"layers/self_attention/query_norm/scale"}),
        ({"position_embedding": "learned"}, {"position_embedder/embedding"}),
        ({"qkv_bias": True}, {f"layers/self_attention/{n}/bias" for n in ("query", "key")}),
        ({"proj_bias": True}, {"layers/self_attention/out/bias"}),
        ({"ffn_bias": True}, {f"layers/mlp/{n}/bias" for n in ("wi_0", "wi_1", "wo")}),
        ({"mlp_activations": ["relu2"]}, {"layers/mlp/wi/kernel"}),
        ({"normalization_type": "layer_norm"}, {"decoder_norm/bias"}),
    ],
)  # fmt: skip
def test_options_add_the_parameters_they_name(keys, names):
    assert names <= set(Model(tiny_config(**keys).model).parameters)
    assert not names & set(Model(tiny_config().model).parameters)


def test_tied_head_has_no_matrix_of_its_own_and_is_scaled():
    batch = random_batch(tiny_config(), rows=1)
    plain = tiny_config(logits_via_embedding=True, normalize_embedding_logits=False)
    scaled = tiny_config(logits_via_embedding=True)
    assert "logits_dense/kernel" not in Model(plain.model).parameters
    np.testing.assert_allclose(
        logits_of(plain, batch), logits_of(scaled, batch) * 32**0.5, rtol=1e-5, atol=1e-5
    )


def test_soft_cap_bounds_logits():
    batch = random_batch(tiny_config(), rows=1)
    capped = logits_of(tiny_config(final_logits_soft_cap=0.5), batch)
    assert np.abs(capped).max() < 0.5
    plain = np.asarray(logits_of(tiny_config(), batch))
    np.testing.assert_allclose(capped, 0.5 * np.tanh(plain / 0.5), atol=1e-5)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_finite_with_finite_gradients(name):
    x = jnp.linspace(-30, 30, 61)
    value, gradient = jax.vmap(jax.value_and_grad(ACTIVATIONS[name]))(x)
    assert np.isfinite(value).all()
    assert np.isfinite(gradient).all()


def test_every_activation_of_the_schema_exists():
    from typing import get_args

    from MaxText.configuration.layer_sections import Activation, NotElementwise

    assert set(get_args(Activation)) == set(ACTIVATIONS)
    assert set(get_args(NotElementwise)) == {*OVER_FEATURES, *LEARNED, "rrelu"}


@pytest.mark.parametrize(
    ("weight_init", "kernel", "output", "table"),
    [
        ("gpt2", 0.02, 0.02 / (2 * 3) ** 0.5, 0.02),
        ("neox", (2 / (5 * 128)) ** 0.5, 2 / (3 * 128**0.5), (2 / (5 * 128)) ** 0.5),
        ("fan_in", 128**-0.5, 256**-0.5, 1.0),
        ("xavier", (2 / (128 + 256)) ** 0.5, (2 / (128 + 256)) ** 0.5, 1.0),
        ("xavier_uniform", (2 / (128 + 256)) ** 0.5, (2 / (128 + 256)) ** 0.5, 1.0),
        ("normal", 0.02, 0.02, 0.02),
    ],
)
def test_initial_weights_have_the_named_deviation(weight_init, kernel, output, table):
    config = tiny_config(
        weight_init=weight_init, base_emb_dim=128, base_mlp_dim=256, vocab_size=256, head_dim=32
    )
    params = jax.jit(Model(config.model).initialize)(jax.random.key(0))
    measured = {
        "kernel": params["layers"]["mlp"]["wi_0"]["kernel"],
        "output": params["layers"]["mlp"]["wo"]["kernel"],
        "table": params["token_embedder"]["embedding"],
    }
    for name, expected in (("kernel", kernel), ("output", output), ("table", table)):
        np.testing.assert_allclose(np.std(measured[name]), expected, rtol=0.02, err_msg=name)
        assert abs(np.mean(measured[name])) < 0.05 * expected
    layers = measured["kernel"]
    assert not np.allclose(layers[0], layers[1])  # each layer draws its own


PARAMETERS = {
    "bert-base-like": 108_890_112,
    "roberta-base-like": 124_052_736,
    "gpt2-124m": 124_439_808,
    "gpt2-355m": 354_823_168,
    "gpt2-774m": 774_030_080,
    "gpt2-1.5b": 1_557_611_200,
    "llama2-7b": 6_738_415_616,
    "llama3-8b": 8_030_261_248,
    "llama3.1-8b": 8_030_261_248,
    "llama3.2-1b": 1_235_814_400,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "pythia-70m": 70_426_624,
    "pythia-160m": 162_322_944,
    "pythia-410m": 405_334_016,
    "pythia-1b": 1_011_781_632,
    "pythia-1.4b": 1_414_647_808,
    "pythia-2.8b": 2_775_208_960,
    "transformer_pp-405m": 411_616_256,
    "tokenformer-124m": 123_569_664,
    "tokenformer-354m": 354_190_848,
    "tokenformer-150m": 151_881_216,
    "tokenformer-757m": 757_040_640,
    "tokenformer-1.4b": 1_399_948_800,
    "tokenformer-450m": 454_166_528,
    "tokenformer-900m": 903_252_480,
    "tokenformer-1.5b": 1_587_219_456,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_presets_have_the_published_number_of_parameters(name):
    config = configure(model_name=name, dtype="float32", scan_layers=True, remat_policy="full")
    assert Model(config.model).num_parameters == PARAMETERS[name]


def test_parameter_scale_multiplies_the_parameters():
    base = tiny_config(base_num_decoder_layers=2)
    for scale in (2, 4, 8):
        scaled = tiny_config(base_num_decoder_layers=2, global_parameter_scale=scale)
        d, e = base.model.shape.dimensions, scaled.model.shape.dimensions
        width, heads = e.emb_dim / d.emb_dim, e.num_query_heads / d.num_query_heads
        assert width * heads * (e.num_layers / d.num_layers) == scale
