"""The example mixers against their formulas, token by token in NumPy."""

import dataclasses
import json
import re
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.config.registry import lookup
from MaxText.input_pipeline.registered_sources.opening_sources import make_reader
from MaxText.layers.assembly.model import Model
from MaxText.layers.context import ForwardContext
from MaxText.layers.rotary import rotary_table
from MaxText.run.hooks import StepInfo, user_hooks
from tests.small_models import tiny_config

B, T, N, H = 2, 11, 2, 4
# Documents begin within chunks, at their starts, and twice within one.
DOCUMENTS = np.array([[1] * 3 + [2] * 6 + [3] * 2, [1] * 4 + [2] + [3] * 6])


@pytest.fixture(scope="module")
def delta_rule():
    """The function of the example, from separate arrays."""
    tiny_config(import_modules=["examples/deltanet.py"])
    example = sys.modules[lookup("mixer", "deltanet").__module__]

    def run(q, k, v, beta, segments, memory, chunk):
        inputs = example.DeltaInputs(q, k, v, beta, segments)
        return example.delta_rule(inputs, memory, chunk)

    return run


@pytest.fixture(scope="module")
def given():
    generator = np.random.default_rng(0)
    q, k, v = generator.normal(size=(3, B, T, N, H))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    beta = generator.uniform(0, 1, (B, T, N))
    memory = generator.normal(size=(B, N, H, H))
    return [x.astype(np.float32) for x in (q, k, v, beta, memory)]


def by_token(q, k, v, beta, memory, documents):
    """S_t = S_(t-1) + b_t k_t (v_t - S_(t-1)^T k_t)^T,   o_t = S_t^T q_t"""
    o = np.zeros(v.shape)
    S = memory.astype(np.float64)
    for row, head in np.ndindex(B, N):
        for t in range(T):
            state, key = S[row, head], k[row, t, head]
            if documents[row, t] != documents[row, max(t - 1, 0)]:
                state = 0 * state
            error = v[row, t, head] - state.T @ key
            S[row, head] = state + beta[row, t, head] * np.outer(key, error)
            o[row, t, head] = S[row, head].T @ q[row, t, head]
    return o, S


@pytest.mark.parametrize("chunk", [1, 3, 4, 64])
def test_the_delta_rule_in_chunks(chunk, delta_rule, given):
    *rest, memory = given
    for documents in (DOCUMENTS, np.ones_like(DOCUMENTS)):
        found = jax.jit(delta_rule, static_argnums=6)(*rest, documents, memory, chunk)
        for actual, expected in zip(found, by_token(*given, documents), strict=True):
            np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_the_delta_rule_goes_on_from_a_state(delta_rule, given):
    *rest, memory = given
    one, run = np.ones((B, 1), int), jax.jit(delta_rule, static_argnums=6)
    outputs = []
    for t in range(T):
        o, memory = run(*(x[:, t : t + 1] for x in rest), one, memory, 64)
        outputs.append(o)
    o, S = by_token(*given, np.ones_like(DOCUMENTS))
    np.testing.assert_allclose(np.concatenate(outputs, 1), o, atol=1e-5)
    np.testing.assert_allclose(memory, S, atol=1e-5)


def rotated(x, positions):
    """Dimension i turns with i + E/2 by position * 10000^(-2i/E)."""
    half = x.shape[-1] // 2
    angle = positions * 10_000.0 ** (-np.arange(half) / half)
    first, second = x[:half], x[half:]
    return np.concatenate(
        [
            first * np.cos(angle) - second * np.sin(angle),
            second * np.cos(angle) + first * np.sin(angle),
        ]
    )


def softmax(x):
    weights = np.exp(x - x.max())
    return weights / weights.sum()


@pytest.mark.parametrize(
    "keys", [{}, {"diff_lambda_init": 0.5, "normalization_zero_centered": True}]
)
def test_differential_attention(keys):
    config = tiny_config(
        base_num_decoder_layers=1,
        mixer="differential_attention",
        import_modules=["examples/differential_attention.py"],
        **keys,
    )
    model, generator = Model(config.model), np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: generator.normal(size=leaf.shape).astype("f"), model.abstract
    )
    one = jax.tree.map(lambda leaf: leaf[0], params["layers"])
    mixer = model.merge({**params, "layers": one}).layers.self_attention
    x = generator.normal(size=(2, 9, 32)).astype("f")
    documents = np.array([[1] * 9, [1] * 4 + [2] * 5])
    positions = np.array([[*range(9)], [*range(4), *range(5)]])
    context = ForwardContext(
        segments_BT=jnp.asarray(documents),
        layer=3,
        rotary=rotary_table(jnp.asarray(positions), 8, config.model.position),
    )
    actual, scalars = jax.jit(lambda x: mixer((x, x, x), context))(x)
    assert scalars == {}

    w = jax.tree.map(lambda leaf: leaf.astype(np.float64), one["self_attention"])
    first = keys.get("diff_lambda_init", 0.8 - 0.6 * np.exp(-0.3 * 3))
    (q1, q2), (k1, k2) = w["lambdas"]
    difference = np.exp(q1 @ k1) - np.exp(q2 @ k2) + first
    scale = w["norm"]["scale"] + ("normalization_zero_centered" in keys)
    expected = np.zeros(actual.shape)
    for row, t, head in np.ndindex(2, 9, 4):
        seen = [s for s in range(t + 1) if documents[row, s] == documents[row, t]]

        def of(name, s, number, row=row):
            return x[row, s] @ w[name]["kernel"][:, number]

        def turned(name, s, number, half, row=row):
            return rotated(of(name, s, number)[4 * half : 4 * half + 4], positions[row, s])

        first_p, second_p = (
            softmax(
                np.array(
                    [
                        turned("query", t, head, half) @ turned("key", s, head // 2, half) / 2
                        for s in seen
                    ]
                )
            )
            for half in (0, 1)
        )
        o = (first_p - difference * second_p) @ [of("value", s, head // 2) for s in seen]
        o = o / np.sqrt(np.mean(o**2) + 1e-5) * scale * (1 - first)
        expected[row, t] += o @ w["out"]["kernel"][head]
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def test_sigmoid_attention():
    config = tiny_config(
        base_num_decoder_layers=1,
        mixer="sigmoid_attention",
        import_modules=["examples/sigmoid_attention.py"],
        attention_block_size=4,
    )
    model, generator = Model(config.model), np.random.default_rng(0)
    params = jax.jit(model.initialize)(jax.random.key(0))
    bias = np.asarray(params["layers"]["self_attention"]["bias"])
    np.testing.assert_allclose(bias, -np.log(16), rtol=1e-6)
    params = jax.tree.map(lambda leaf: jnp.float32(generator.normal(size=leaf.shape)), params)
    one = jax.tree.map(lambda leaf: leaf[0], params["layers"])
    mixer = model.merge({**params, "layers": one}).layers.self_attention
    x = generator.normal(size=(B, T, 32)).astype("f")
    context = ForwardContext(segments_BT=jnp.asarray(DOCUMENTS))
    actual, _ = jax.jit(lambda x: mixer((x, x, x), context))(x)

    w = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), one["self_attention"])
    q, k, v = (
        np.einsum("btd,dnh->btnh", x, w[name]["kernel"]) for name in ("query", "key", "value")
    )
    expected = np.zeros(actual.shape)
    for row, t, head in np.ndindex(B, T, 4):
        seen = [s for s in range(t + 1) if DOCUMENTS[row, s] == DOCUMENTS[row, t]]
        scores = k[row, seen, head // 2] @ q[row, t, head] * 8**-0.5 + w["bias"][head]
        o = 1 / (1 + np.exp(-scores)) @ v[row, seen, head // 2]
        expected[row, t] += o @ w["out"]["kernel"][head]
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def test_stable_rank_of_the_embedding(tmp_path, capsys):
    tiny_config(import_modules=["examples/embedding_rank.py"])
    (embedding_rank,) = user_hooks(["embedding_rank"])
    generator = np.random.default_rng(0)
    info = StepInfo(
        step=99,
        state=None,
        config=None,
        model=None,
        run_folder=tmp_path,
        device_metrics={"loss": jnp.float32(2.5)},
    )
    for shape in ((30, 8), (8, 30)):
        matrix = generator.normal(size=shape).astype("f")
        params = {"token_embedder": {"embedding": matrix}}
        embedding_rank(dataclasses.replace(info, state=types.SimpleNamespace(params=params)))
        row = json.loads((tmp_path / "embedding_rank.jsonl").read_text().splitlines()[-1])
        expected = np.linalg.norm(matrix) ** 2 / np.linalg.norm(matrix, 2) ** 2
        assert row == {"step": 99, "loss": 2.5, "stable_rank": pytest.approx(expected, rel=1e-5)}
        assert capsys.readouterr().out.endswith(f"token embedding {expected:.1f}\n")
    assert embedding_rank.every == 100


def test_moving_average():
    config = tiny_config(
        base_num_decoder_layers=1,
        mixer="moving_average",
        average_tokens=4.0,
        import_modules=["examples/moving_average.py"],
    )
    model = Model(config.model)
    params = jax.jit(model.initialize)(jax.random.key(0))
    one = jax.tree.map(lambda leaf: leaf[0], params["layers"])
    mixer = model.merge({**params, "layers": one}).layers.self_attention
    x = np.random.default_rng(0).normal(size=(B, T, 32)).astype("f")
    actual, _ = mixer(x, ForwardContext(segments_BT=jnp.asarray(DOCUMENTS)))

    w = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), one["self_attention"])
    expected, s = np.zeros(actual.shape), np.zeros((B, 32))
    for row, t in np.ndindex(B, T):
        v, g = np.einsum("d,dce->ce", x[row, t], w["into"]["kernel"])
        s[row] *= DOCUMENTS[row, t] == DOCUMENTS[row, max(t - 1, 0)]
        s[row] = 0.75 * s[row] + 0.25 * v
        expected[row, t] = (s[row] * g / (1 + np.exp(-g))) @ w["out"]["kernel"]
    np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_the_sums_of_the_data_source_are_right():
    config = tiny_config(
        import_modules=["examples/arithmetic_source.py"],
        dataset_type="arithmetic",
        max_digits=2,
        num_problems=300,
    )
    source = make_reader(config, "arithmetic", for_training=True)
    symbols = sys.modules[lookup("data_source", "arithmetic").__module__].SYMBOLS
    texts = set()
    for index in range(len(source)):
        text = "".join(symbols[token] for token in source[index].tokens)
        counted = "".join(symbols[token] for token in source[index].tokens[source[index].loss_mask])
        a, b, total = re.fullmatch(r"(\d{1,2})\+(\d{1,2})=(\d+)\n", text).groups()
        assert int(a) + int(b) == int(total)
        assert counted == f"{total}\n"
        texts.add(text)
    assert len(texts) > 150
