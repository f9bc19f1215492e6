"""Hooks for scores, masks and weights: every implementation against the definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.config.problems import ConfigurationError
from MaxText.config.registry import lookup
from MaxText.conformance.checks import CHECKS
from MaxText.conformance.subject import SIZES, Subject
from MaxText.layers.assembly.model import Model
from MaxText.layers.attention.attention_core import AttentionSpec, dot_product_attention
from MaxText.layers.batch import Batch
from MaxText.layers.context import ForwardContext
from MaxText.layers.kv_cache import KeyValueCache, SlidingWindowCache
from tests.layers.attention_ideas import IDEAS, N, by_definition
from tests.layers.test_conformance import COSTLY, DEVICES
from tests.small_models import random_params, tiny_config

B, T, K, V, H, WIDTH = 2, 37, 2, 1, 6, 5  # one value head for both key heads, of another width
SEGMENTS = np.array([[1] * 37, [1] * 2 + [2] * 16 + [3] * 19])


@pytest.fixture(scope="module")
def given():
    draw = np.random.default_rng(0).normal
    shapes = [(B, T, N, H), (B, T, K, H), (B, T, V, WIDTH)]
    return [draw(size=shape).astype(np.float32) for shape in shapes]


@pytest.mark.parametrize("block_size", [None, 5])
@pytest.mark.parametrize("name", IDEAS)
def test_outputs_and_gradients(name, block_size, given):
    idea = IDEAS[name]

    def attention(q, k, v, parameter):
        spec = AttentionSpec(**idea.spec(parameter))
        segments_BT = jnp.asarray(SEGMENTS)
        return dot_product_attention(q, k, v, spec, segments_BT=segments_BT, block_size=block_size)

    def definition(q, k, v, parameter):
        return by_definition(idea, q, k, v, parameter, SEGMENTS)

    @jax.jit
    def both(*arrays):
        grad_o = np.random.default_rng(1).normal(size=(B, T, N, WIDTH)).astype(np.float32)
        numbers = []
        for function in (attention, definition):
            o, pull_back = jax.vjp(function, *arrays)
            numbers.append((o, pull_back(grad_o)))
        return numbers

    parameter = None if idea.parameter is None else jnp.asarray(idea.parameter)
    with jax.default_matmul_precision("highest"):
        actual, expected = both(*given, parameter)
    for found, reference in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(found, reference, atol=2e-5)


PROMPTS = np.array([9, 4])
DECODED = [name for name in IDEAS if name != "selective"]


@pytest.mark.parametrize("name", DECODED)
def test_caches(name, given):
    """Steps of one, one and three tokens after prompts of different lengths."""
    idea = IDEAS[name]
    parameter = None if idea.parameter is None else jnp.asarray(idea.parameter)
    spec = AttentionSpec(**idea.spec(parameter))
    q, k, v = given
    longest = PROMPTS.max()
    padding = (np.arange(longest) >= PROMPTS[:, None])[..., None, None]
    prompts = [jnp.asarray(np.where(padding, 99.0, x[:, :longest]), jnp.float32) for x in (k, v)]
    if spec.window is None:
        cache = KeyValueCache.from_prefill(*prompts, 20)
    else:
        cache = SlidingWindowCache.from_prefill(*prompts, jnp.asarray(PROMPTS), spec.window)

    @jax.jit
    def step(cache, q, k, v, positions):
        if isinstance(cache, SlidingWindowCache):
            return cache.step(q, k, v, positions, spec)
        cache = cache.append(k, v, positions)
        return cache.attend(q, positions, spec), cache

    one_document = np.ones_like(SEGMENTS)
    expected = np.asarray(by_definition(idea, q, k, v, parameter, one_document))
    rows, lengths = np.arange(B)[:, None], PROMPTS.copy()
    for count in (1, 1, 3):
        positions = lengths[:, None] + np.arange(count)
        new = [jnp.asarray(x[rows, positions]) for x in (q, k, v)]
        actual, cache = step(cache, *new, jnp.asarray(positions))
        np.testing.assert_allclose(actual, expected[rows, positions], atol=2e-5)
        lengths += count


def test_memories_have_weights_and_no_positions(given):
    """A hook changes the scores of tokens alone, and normalizes over memories as well."""
    q, k, v = given
    v = np.repeat(v, K, axis=2)
    draw = np.random.default_rng(3).normal
    memories = (jnp.float32(draw(size=(3, K, H))), jnp.float32(draw(size=(3, K, WIDTH))))
    spec = AttentionSpec(
        score_hook=lambda scores, q_pos, k_pos, head: scores * 2 + head,
        weights_hook=lambda scores, mask: jax.nn.sigmoid(scores),
        weights_scope="score",
    )
    actual = dot_product_attention(q, k, v, spec, persistent_kv=memories, block_size=8)
    expected = np.zeros((B, T, N, WIDTH))
    for row, t, head in np.ndindex(B, T, N):
        group = head // (N // K)
        scores = k[row, : t + 1, group] @ q[row, t, head] * H**-0.5 * 2 + head
        of_memories = memories[0][:, group] @ q[row, t, head] * H**-0.5
        expected[row, t, head] = 1 / (1 + np.exp(-scores)) @ v[row, : t + 1, group]
        expected[row, t, head] += 1 / (1 + np.exp(-of_memories)) @ memories[1][:, group]
    np.testing.assert_allclose(actual, expected, atol=2e-5)


VARIANTS = {"import_modules": ["tests/layers/attention_variants.py"]}


def subject_of(mixer, **keys):
    decodes = mixer != "selective_attention"
    keys = SIZES | VARIANTS | {"mixer": mixer, "base_num_kv_heads": 2} | keys
    return Subject(lambda **more: tiny_config(**keys | more), decodes=decodes)


def conforms(subject, *left_out):
    for check in CHECKS:
        if check.name not in (*COSTLY, DEVICES, *left_out):
            assert check.problem(subject) is None, check.name


@pytest.mark.parametrize(
    "mixer",
    [
        "chunked_attention",
        pytest.param("distance_bias_attention", marks=pytest.mark.slow),
        pytest.param("softpick_attention", marks=pytest.mark.slow),
    ],
)
def test_registered_variants_conform(mixer):
    conforms(subject_of(mixer, attention="blocked"))


def test_a_variant_that_sees_other_queries_is_trained_in_one_block_and_not_decoded():
    subject = subject_of("selective_attention", attention="blocked")
    conforms(subject, "decode state")
    assert lookup("mixer", "chunked_attention").decodes()
    assert not lookup("mixer", "selective_attention").decodes()


def test_a_prefix_is_seen_in_prompts_of_any_length():
    """Prefill masks the padding of prompts, and a step the slots that hold nothing yet."""
    subject = subject_of("prefix_attention")
    model = subject.models[0]
    decoder = model.merge(jax.tree.map(jnp.asarray, subject.params))
    tokens = np.random.default_rng(0).integers(0, 32, (2, 9)).astype(np.int32)
    lengths = np.array([4, 6])

    def whole(length):
        batch = Batch(tokens[:, :length], tokens[:, :length], np.ones((2, length), np.float32))
        h_BTD, _ = decoder.hidden_states(batch)
        return np.asarray(decoder.logits(h_BTD, decoder.head_state(h_BTD, batch)))

    prompts = np.where(np.arange(7) < lengths[:, None], tokens[:, :7], 31)
    h_BTD, states = decoder.prefill(jnp.asarray(prompts), jnp.asarray(lengths), capacity=9)
    logits = np.asarray(decoder.logits(h_BTD, states[-1]))
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(
            logits[row, :length], whole(length)[row, :length], atol=2e-5, rtol=1e-4
        )
    for step in range(3):
        positions = (lengths + step)[:, None]
        new = np.take_along_axis(tokens, positions, axis=1)
        h_B1D, states = decoder.decode_step(jnp.asarray(new), jnp.asarray(positions), states)
        logits = decoder.logits(h_B1D, states[-1], jnp.asarray(positions))
        for row in range(2):
            expected = whole(lengths[row] + step + 1)[row, -1]
            np.testing.assert_allclose(logits[row, 0], expected, atol=2e-5, rtol=1e-4)


def test_sinks_and_gated_output_of_a_layer():
    """Equation 1 of arXiv 2505.06708 at position G1, and the softmax of gpt-oss."""
    keys = {"attention_sinks": True, "attention_output_gate": True, "position_embedding": "none"}
    config = tiny_config(base_num_decoder_layers=1, qkv_bias=True, **keys)
    model = Model(config.model)
    shapes = {name: spec.shape for name, spec in model.parameters.items()}
    assert shapes["layers/self_attention/sinks"] == (1, 4)
    drawn = random_params(model)
    layer = jax.tree.map(lambda x: x[0], drawn["layers"])
    mixer = model.merge({**drawn, "layers": layer}).layers.self_attention
    x = np.random.default_rng(0).normal(size=(2, 7, 32)).astype(np.float32)
    actual, _ = jax.jit(lambda x: mixer((x, x, x), ForwardContext()))(x)

    w = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), layer["self_attention"])
    q, k, v, gate = (
        np.einsum("btd,dnh->btnh", x, w[name]["kernel"]) + w[name]["bias"]
        for name in ("query", "key", "value", "gate")
    )
    expected = np.zeros(actual.shape)
    for row, t, head in np.ndindex(2, 7, 4):
        scores = k[row, : t + 1, head // 2] @ q[row, t, head] * 8**-0.5
        scores = np.append(scores, w["sinks"][head])
        weights = np.exp(scores - scores.max())
        o = weights[:-1] / weights.sum() @ v[row, : t + 1, head // 2]
        expected[row, t] += o / (1 + np.exp(-gate[row, t, head])) @ w["out"]["kernel"][head]
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"attn_logits_soft_cap": 5.0}, "attn_logits_soft_cap is for layers with mixer"),
        ({"num_mem_kv": 2}, "num_mem_kv is for layers with mixer"),
        ({"attention_sinks": True}, "attention_sinks is for layers with mixer"),
        ({"position_embedding": "alibi"}, "position_embedding=alibi lowers scores"),
        ({"dropout_rates.attention": 0.1}, "dropout_rates.attention=0.1 drops probabilities"),
        ({"attention_scale": 1.0, "attention_output_gate": True}, None),
    ],
)
def test_keys_that_an_attend_of_its_own_does_not_read(keys, named, capsys):
    tiny_config(**VARIANTS, **keys, mixer="mean_attention")
    lines = [line for line in capsys.readouterr().err.splitlines() if "mean_attention" in line]
    assert [named in line for line in lines] == ([True] if named else [])


@pytest.mark.parametrize(
    ("mixer", "is_served"),
    [("softpick_attention", False), ("distance_bias_attention", True), ("attention", True)],
)
def test_a_ring_is_refused_where_weights_need_all_scores(mixer, is_served):
    keys = VARIANTS | {"mixer": mixer, "ici_context_parallelism": 2}
    if is_served:
        tiny_config(**keys, context_parallel_strategy="ring")
        return
    with pytest.raises(ConfigurationError, match="depend on all scores of a query"):
        tiny_config(**keys, context_parallel_strategy="ring")
    tiny_config(**keys)
