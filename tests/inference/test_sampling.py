"""Distributions and draws, against hand-computed values and transformers."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats

from MaxText.errors import UserError
from MaxText.inference.sampling import SamplingParams as Params
from MaxText.inference.sampling import probabilities, sample

distribution = jax.jit(probabilities, static_argnames=("params", "num_ids"))
draw = jax.jit(sample, static_argnames=("params", "num_ids"))

# What is left of four ids.
ONE, SECOND, TWO = [1, 0, 0, 0], [0, 1, 0, 0], [0.625, 0.375, 0, 0]
FOUR = np.array([0.5, 0.3, 0.15, 0.05])
THREE = np.array([0.5, 0.3, 0.15, 0]) / 0.95
ALL_FILTERS = {"top_k": 12, "nucleus_p": 0.95, "min_p": 0.3, "typical_p": 0.85, "eta": 0.6}


def logits_of(*probabilities_V):
    return jnp.log(jnp.array([probabilities_V], jnp.float32))


def random_logits(shape, scale=2.0, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(0, scale, shape), jnp.float32)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (Params(), FOUR),
        (Params(temperature=2), np.array([0.70711, 0.54772, 0.38730, 0.22361]) / 1.86574),
        (Params(temperature=0.5), np.array([0.25, 0.09, 0.0225, 0.0025]) / 0.365),
        (Params(temperature=0), ONE),
        (Params(top_k=1), ONE), (Params(top_k=2), TWO), (Params(top_k=100), FOUR),
        (Params(nucleus_p=0.4), ONE), (Params(nucleus_p=0.5), ONE), (Params(nucleus_p=0.8), TWO),
        (Params(nucleus_p=0.81), THREE), (Params(nucleus_p=0.96), FOUR),
        (Params(min_p=0.3), THREE), (Params(min_p=0.31), TWO), (Params(min_p=1), ONE),
        # Entropy 1.142; distances of the surprisals from it 0.449, 0.062, 0.755, 1.854.
        (Params(typical_p=0.3), SECOND), (Params(typical_p=0.31), TWO),
        (Params(typical_p=0.81), THREE),
        # exp(-entropy) 0.3191, so bounds 0.04, 0.1748 and 0.3027.
        (Params(eta=0.04), FOUR), (Params(eta=0.3), TWO), (Params(eta=0.9), ONE),
        # The second filter sees what the first left; the other way round each of these differs.
        (Params(top_k=2, nucleus_p=0.6), ONE), (Params(nucleus_p=0.84, min_p=0.2), THREE),
        (Params(min_p=0.31, typical_p=0.3), ONE), (Params(typical_p=0.3, eta=0.3), SECOND),
    ],
)  # fmt: skip
def test_hand_computed(params, expected):
    np.testing.assert_allclose(distribution(logits_of(*FOUR), params)[0], expected, atol=1e-5)


@pytest.mark.parametrize(
    ("params", "num_kept"),
    [
        (Params(nucleus_p=0.38), 1), (Params(nucleus_p=0.73), 2), (Params(nucleus_p=0.94), 3),
        (Params(min_p=0.04 / 0.38), 4), (Params(min_p=0.02 / 0.38), 5),
    ],
)  # fmt: skip
def test_a_bound_that_is_missed_by_rounding_is_reached(params, num_kept):
    # Compared in float32 as they come, most of these are decided the other way.
    p_V = distribution(logits_of(0.38, 0.35, 0.21, 0.04, 0.02), params)[0]
    assert int(jnp.sum(p_V > 0)) == num_kept


def test_equally_likely_ids_are_kept_together():
    for params in (Params(top_k=1), Params(nucleus_p=0.2), Params(min_p=0.9), Params(eta=0.9)):
        p_V = distribution(logits_of(0.3, 0.3, 0.2, 0.2), params)[0]
        np.testing.assert_allclose(p_V, [0.5, 0.5, 0, 0], atol=1e-5)


def test_repetition_penalty_pushes_both_signs_down():
    logits_BV = jnp.array([[2.0, -1.0, 0.5, 0.0]])
    generated_BV = jnp.array([[True, True, False, True]])
    p_BV = distribution(logits_BV, Params(temperature=2, repetition_penalty=4), generated_BV)
    np.testing.assert_allclose(p_BV[0], scipy.special.softmax([0.25, -2, 0.25, 0]), rtol=1e-5)


def test_greedy_takes_the_lowest_of_equal_maxima_and_knows_only_the_penalty():
    greedy = Params(temperature=0, repetition_penalty=2, **ALL_FILTERS)
    logits_BV = jnp.array([[1.0, 3, 3, 2], [1, 3, 3, 2], [-jnp.inf, -5, -4, -jnp.inf]])
    generated_BV = jnp.array([[0, 0, 0, 0], [0, 1, 1, 0], [0, 0, 1, 0]], bool)
    token_B, _ = draw(logits_BV, jax.random.split(jax.random.key(0), 3), greedy, generated_BV)
    assert (token_B.tolist(), token_B.dtype) == ([1, 3, 1], jnp.int32)


@pytest.mark.parametrize(
    "params", [Params(temperature=1.3), Params(top_k=12, nucleus_p=0.95, entmax_alpha=1.3)]
)
def test_draws_have_the_frequencies_of_the_distribution(params):
    num_draws = 20_000
    logits_V = random_logits(41, scale=1.0)  # 41: the blocks of the draw have padding
    logits_BV = jnp.broadcast_to(logits_V, (num_draws, 41))
    key_B = jax.random.split(jax.random.key(7), num_draws)
    token_B, log_probability_B = draw(logits_BV, key_B, params)
    p_V = np.array(distribution(logits_V[None], params)[0], np.float64)
    found_V = np.bincount(token_B, minlength=41)
    assert not np.any(found_V[p_V == 0])
    expected_V = p_V / p_V.sum() * num_draws
    assert scipy.stats.chisquare(found_V[p_V > 0], expected_V[p_V > 0]).pvalue > 0.01
    # Whatever the params, of the model's own softmax.
    expected_B = scipy.special.log_softmax(np.array(logits_V, np.float64))[token_B]
    np.testing.assert_allclose(log_probability_B, expected_B, rtol=1e-5)


def test_a_rows_draws_do_not_depend_on_its_neighbours():
    params = Params(entmax_alpha=1.2, repetition_penalty=1.2, **ALL_FILTERS)
    logits_BV = random_logits((6, 300), scale=1.0)
    generated_BV = random_logits((6, 300), seed=1) > 2
    key_B = jax.random.split(jax.random.key(3), 6)
    together_B, _ = draw(logits_BV, key_B, params, generated_BV)
    for row in range(6):
        one_row = slice(row, row + 1)
        alone_B, _ = draw(logits_BV[one_row], key_B[one_row], params, generated_BV[one_row])
        assert alone_B.tolist() == together_B[one_row].tolist()
    again_B, _ = draw(logits_BV[::-1], key_B[::-1], params, generated_BV[::-1])
    assert again_B.tolist() == together_B[::-1].tolist()
    drawn = {int(draw(logits_BV[:1], key[None], params, generated_BV[:1])[0][0]) for key in key_B}
    assert len(drawn) > 1


def test_padding_of_the_vocabulary_is_never_chosen():
    logits_BV = jnp.array([[1.0, 2.0, 9.0, jnp.nan], [1.0, 2.0, 9.0, 9.0]])
    for params in (Params(temperature=0), Params(), Params(entmax_alpha=1.3, **ALL_FILTERS)):
        p_BV = distribution(logits_BV, params, num_ids=2)
        np.testing.assert_array_equal(p_BV[:, 2:], 0)
        np.testing.assert_allclose(p_BV.sum(axis=-1), 1, rtol=1e-6)
    key_B = jax.random.split(jax.random.key(0), 2)
    token_B, log_probability_B = draw(logits_BV, key_B, Params(temperature=0), num_ids=2)
    assert token_B.tolist() == [1, 1]
    # Of the model's softmax, which knows the padding.
    expected = 2 - scipy.special.logsumexp([1, 2, 9, 9])
    np.testing.assert_allclose(log_probability_B[1], expected, rtol=1e-6)


INF = jnp.inf
EXTREME = [[1e9, -1e9, 0, 5], [-1e9, -1e9, -1e9, -INF], [3e38, -3e38, 3e38, -INF],
           [-INF, -INF, 0.25, -INF], [0, 1e-30, -1e-30, 0]]  # fmt: skip


@pytest.mark.parametrize("temperature", [0, 1e-45, 1, 1e6])
def test_extreme_logits_give_distributions(temperature):
    logits_BV = jnp.array(EXTREME, jnp.float32)
    key_B = jax.random.split(jax.random.key(0), len(EXTREME))
    for options in (ALL_FILTERS, {"entmax_alpha": 1.3}):
        params = Params(temperature=temperature, repetition_penalty=1.5, **options)
        generated_BV = jnp.zeros(logits_BV.shape, bool).at[:, 0].set(True)
        p_BV = distribution(logits_BV, params, generated_BV)
        np.testing.assert_allclose(p_BV.sum(axis=-1), 1, rtol=1e-5)
        token_B, log_probability_B = draw(logits_BV, key_B, params, generated_BV)
        assert np.all(np.take_along_axis(np.array(p_BV), np.array(token_B)[:, None], -1) > 0)
        assert np.all(np.isfinite(log_probability_B))
        assert token_B[3] == 2


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="about what XLA compiles for a CPU")
def test_nothing_sorts_the_vocabulary():
    params = Params(entmax_alpha=1.3, **ALL_FILTERS)
    compiled = distribution.lower(jnp.zeros((2, 500)), params).compile().as_text()
    assert " sort(" not in compiled
    assert " sort(" in jax.jit(jnp.sort).lower(jnp.zeros((2, 500))).compile().as_text()


def test_settings_without_meaning_are_refused():
    for name, values in {
        "temperature": [-0.1, math.nan, math.inf],
        "top_k": [-1],
        "nucleus_p": [0.0, 1.1],
        "min_p": [-0.1, 1.5],
        "typical_p": [0.0, math.nan],
        "eta": [1.0],
        "entmax_alpha": [0.9, 2.1],
        "repetition_penalty": [0.0, math.inf],
    }.items():
        for value in values:
            with pytest.raises(UserError, match=f"{name} is {value}; it must be .*"):
                Params(**{name: value})


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 20},
        {"nucleus_p": 0.9},
        {"min_p": 0.1},
        {"typical_p": 0.7},
        {"eta": 0.02},
        {"temperature": 0.7, "repetition_penalty": 1.3},
        {"temperature": 1.4, "repetition_penalty": 0.8, **ALL_FILTERS},
    ],
)
def test_distributions_are_those_of_transformers(options):
    torch = pytest.importorskip("torch")
    processors = pytest.importorskip("transformers.generation.logits_process")
    made_by = {
        "repetition_penalty": "RepetitionPenaltyLogitsProcessor",
        "temperature": "TemperatureLogitsWarper",
        "top_k": "TopKLogitsWarper",
        "nucleus_p": "TopPLogitsWarper",
        "min_p": "MinPLogitsWarper",
        "typical_p": "TypicalLogitsWarper",
        "eta": "EtaLogitsWarper",
    }
    steps = [
        getattr(processors, made_by[name])(options[name]) for name in made_by if name in options
    ]
    logits_BV = random_logits((8, 200))
    history_BT = np.random.default_rng(1).integers(0, 200, (8, 30))
    expected_BV = torch.tensor(np.array(logits_BV))
    for step in steps:
        expected_BV = step(torch.tensor(history_BT), expected_BV)
    generated_BV = np.zeros((8, 200), bool)
    np.put_along_axis(generated_BV, history_BT, True, axis=-1)
    actual_BV = distribution(logits_BV, Params(**options), generated_BV)
    np.testing.assert_allclose(actual_BV, expected_BV.softmax(-1).numpy(), rtol=2e-5, atol=1e-9)
