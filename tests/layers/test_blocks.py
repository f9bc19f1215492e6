"""Forms of a layer, of norms and of the head against their definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from MaxText.layers.assembly.model import Model
from MaxText.layers.attention.static_sgu import BesideStaticSGU, static_sgu
from MaxText.layers.context import ForwardContext
from MaxText.layers.part import LayerInputs
from tests.small_models import noisy_params, random_batch, tiny_config

ALL_HEADS = {"base_num_kv_heads": 4}


def built(family="gpt_neo", **keys):
    """(configuration, model, parameters that are nowhere 0 or 1)."""
    config = tiny_config(family, **(ALL_HEADS | {"base_num_decoder_layers": 2} | keys))
    model = Model(config.model)
    return config, model, noisy_params(model, 0.2)


def first_layer(model, params):
    """The first layer as a module; for use inside a trace."""
    weights = model.blueprint.layer_weights(params["layers"])[0]
    return nnx.merge(model.blueprint.graphdefs[0], weights)


def hidden_states():
    return np.random.default_rng(1).normal(size=(2, 16, 32)).astype(np.float32)


def check_first_layer(model, params, by_hand):
    """It makes of x what `by_hand` (layer, x, context) does, which is not x."""

    @jax.jit
    def run(params, x):
        layer, context = first_layer(model, params), ForwardContext().for_layer(0)
        return layer(LayerInputs.all(x), context)[0], by_hand(layer, x, context)

    x = hidden_states()
    got, expected = run(params, x)
    np.testing.assert_allclose(got, expected, atol=1e-5)
    assert np.abs(got - x).max() > 0.1


def attention(layer, x, context):
    return layer.self_attention((x, x, x), context)[0]


def test_rezero_multiplies_each_part():
    _, model, params = built(use_rezero=True)

    def by_hand(layer, x, context):
        h = x + layer.attention_gate.scale[...] * attention(layer, x, context)
        return h + layer.mlp_gate.scale[...] * layer.mlp(h, context)[0]

    check_first_layer(model, params, by_hand)


@pytest.mark.parametrize("prenorm", [True, False])
def test_macaron_is_two_halves(prenorm):
    _, model, params = built(use_macaron=True, macaron_prenorm=prenorm)

    def by_hand(layer, x, context):
        first = layer.macaron_layer_norm(x) if prenorm else x
        h = x + 0.5 * layer.macaron_mlp(first, context)[0]
        h = h + attention(layer, layer.pre_self_attention_layer_norm(h), context)
        return h + 0.5 * layer.mlp(layer.pre_mlp_layer_norm(h), context)[0]

    check_first_layer(model, params, by_hand)
    assert ("layers/macaron_layer_norm/scale" in model.parameters) == prenorm


@pytest.mark.parametrize("shared", [True, False])
def test_parallel_parts_read_the_same_stream(shared):
    _, model, params = built(block_arrangement="parallel", parallel_residual_shared_norm=shared)
    assert ("layers/pre_mlp_layer_norm/scale" in model.parameters) == (not shared)

    def by_hand(layer, x, context):
        h = layer.pre_self_attention_layer_norm(x)
        of_mlp = h if shared else layer.pre_mlp_layer_norm(x)
        return x + attention(layer, h, context) + layer.mlp(of_mlp, context)[0]

    check_first_layer(model, params, by_hand)


@pytest.mark.parametrize("arrangement", ["sequential", "parallel"])
@pytest.mark.parametrize("placement", ["post", "sandwich"])
def test_norms_of_outputs(placement, arrangement):
    _, model, params = built(
        norm_placement=placement,
        block_arrangement=arrangement,
        residual_multiplier=0.3,
        use_layer_scalar=True,
    )

    def by_hand(layer, x, context):
        def normed_input(norm, x):
            return x if placement == "post" else getattr(layer, f"pre_{norm}_layer_norm")(x)

        mixed = attention(layer, normed_input("self_attention", x), context)
        h = x + 0.3 * layer.post_self_attention_layer_norm(mixed)
        of_mlp = x if arrangement == "parallel" else h
        fed = layer.mlp(normed_input("mlp", of_mlp), context)[0]
        return (h + 0.3 * layer.post_mlp_layer_norm(fed)) * layer.layer_scalar.scale[...]

    check_first_layer(model, params, by_hand)
    norms = {name.split("/")[1] for name in model.parameters if "layer_norm" in name}
    sides = ("post",) if placement == "post" else ("post", "pre")
    assert norms == {
        f"{side}_{part}_layer_norm" for side in sides for part in ("self_attention", "mlp")
    }


def test_layers_of_different_kinds_have_their_norms():
    """A hybrid of OLMo: attention with post-norm, other layers with pre-norm."""
    _, model, _ = built(
        "llama2",
        layer_pattern="PQ",
        layer_kinds={"P": {"norm_placement": "post"}, "Q": {"norm_placement": "sandwich"}},
        mlp_activations=["relu2"],
    )
    norms = sorted(name for name in model.parameters if "layer_norm" in name)
    assert norms == [
        "layers/0/post_mlp_layer_norm/scale",
        "layers/0/post_self_attention_layer_norm/scale",
        "layers/1/post_mlp_layer_norm/scale",
        "layers/1/post_self_attention_layer_norm/scale",
        "layers/1/pre_mlp_layer_norm/scale",
        "layers/1/pre_self_attention_layer_norm/scale",
    ]


@pytest.mark.parametrize("doubles", [False, True])
def test_a_layer_without_attention_has_its_feed_forward_alone(doubles):
    _, model, params = built(
        attention_types=[[["none", "global"], 1]],
        gpt_neo_none_attention_bug=doubles,
        scan_layers=False,
    )
    assert not any(name.startswith("layers/0/self_attention") for name in model.parameters)
    assert any(name.startswith("layers/1/self_attention") for name in model.parameters)

    def by_hand(layer, x, context):
        h = 2 * x if doubles else x
        return h + layer.mlp(layer.pre_mlp_layer_norm(h), context)[0]

    check_first_layer(model, params, by_hand)


def test_shared_layers_are_layers_with_the_same_weights():
    config, shared, params = built(share_layer_params=True)
    model, batch = built()[1], random_batch(config, 2)
    repeated = params | {
        "layers": jax.tree.map(lambda leaf: jnp.repeat(leaf, 2, axis=0), params["layers"])
    }
    assert {leaf.shape[0] for leaf in jax.tree.leaves(params["layers"])} == {1}

    @jax.jit
    def logits(params, repeated):
        return shared.merge(params)(batch), model.merge(repeated)(batch)

    actual, reference = logits(params, repeated)
    np.testing.assert_allclose(actual, reference, atol=1e-5)


@pytest.mark.parametrize(
    ("keys", "places"),
    [
        ({"use_rezero": True}, ("attention_gate", "mlp_gate")),
        ({"head_qk": True, "head_qk_dim": 8}, ("head_qk/query",)),
    ],
    ids=["rezero", "Head-QK"],
)
def test_gates_and_pointers_start_at_zero(keys, places):
    model = Model(tiny_config("gpt_neo", **ALL_HEADS | keys).model)

    @jax.jit
    def drawn(key):
        leaves = jax.tree_util.tree_leaves_with_path(model.initialize(key))
        named = {"/".join(entry.key for entry in path): leaf for path, leaf in leaves}
        return [x for name, x in named.items() if any(place in name for place in places)]

    found = drawn(jax.random.key(0))
    assert len(found) == len(places)
    assert not any(x.any() for x in found)
    if "use_rezero" in keys:
        assert not any("pre_" in name for name in model.parameters)


def test_head_qk_points_at_earlier_tokens_of_the_document():
    config, model, params = built("gpt2", head_qk=True, head_qk_dim=8, vocab_size=7)
    batch = random_batch(config, 2, documents=True)

    @jax.jit
    def run(params, batch):
        decoder = model.merge(params)
        h_BTD, _ = decoder.hidden_states(batch)
        plain = decoder.logits(h_BTD, decoder.head_state(jnp.zeros_like(h_BTD), batch))
        return h_BTD, decoder(batch) - plain

    h, added = (np.asarray(x, np.float64) for x in run(params, batch))
    query, key = (np.asarray(params["head_qk"][name]["kernel"]) for name in ("query", "key"))
    scores = np.einsum("bte,bse->bts", h @ query, h @ key) / 8
    seen = np.tril(np.ones((16, 16), bool))[None]
    segments = np.asarray(batch.segments_BT)
    seen = seen & (segments[:, :, None] == segments[:, None])
    one_hot = np.eye(7)[np.asarray(batch.tokens_BT)]
    expected = np.einsum("bts,bsv->btv", np.where(seen, scores, 0), one_hot)
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(added, expected, atol=1e-4)


@pytest.mark.parametrize(("kernel", "length"), [(3, 40), (20, 50), (0, 5)])
def test_static_sgu_is_a_sum_of_earlier_tokens(kernel, length):
    start = 2
    summed = jax.jit(lambda x, segments=None: static_sgu(x, kernel, segments))
    impulse = np.zeros((1, length, 2), np.float32)
    impulse[0, start] = [1.0, -2.0]
    y = summed(impulse)
    distance = np.arange(length) - start
    weights = np.where((distance >= 0) & (distance <= kernel), 1 / (np.abs(distance) + 2), 0)
    np.testing.assert_allclose(y[0], weights[:, None] * [1.0, -2.0], rtol=1e-6)
    segments = jnp.asarray(np.arange(length)[None] // 4 + 1)
    within = np.where(np.arange(length) // 4 == start // 4, weights, 0)
    y = summed(impulse, segments)
    np.testing.assert_allclose(y[0], within[:, None] * [1.0, -2.0], rtol=1e-6)


def test_static_sgu_has_half_the_channels_and_no_gradient():
    _, model, params = built("gpt2", static_sgu=True, static_sgu_kernel=4)
    assert model.parameters["layers/self_attention/query/kernel"].shape[1:] == (16, 4, 8)
    assert model.parameters["layers/self_attention/out/kernel"].shape[1:] == (4, 8, 16)
    x = hidden_states()

    @jax.jit
    def run(params, x):
        mixer, rest = first_layer(model, params).self_attention, x[..., 16:]

        def mixed(x):
            return mixer((x, x, x), ForwardContext())[0]

        gradient = jax.grad(lambda x: jnp.sum(mixed(x) ** 2))(x)
        alone = super(BesideStaticSGU, mixer).__call__((rest, rest, rest), ForwardContext())[0]
        return mixed(x), static_sgu(x[..., :16], 4), alone, gradient

    got, sums, others, gradient = map(np.asarray, run(params, x))
    np.testing.assert_allclose(got, np.concatenate([sums, others], axis=-1), atol=1e-6)
    assert not gradient[..., :16].any()
    assert gradient[..., 16:].all()
