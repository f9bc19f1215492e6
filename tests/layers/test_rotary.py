"""Rotary frequencies of every rope_type against forms that are written otherwise, in double."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.config.layer_sections import PositionConfig
from MaxText.layers.assembly.model import Model
from MaxText.layers.lowering.tpu_rotary import apply_rotary_tpu
from MaxText.layers.rotary import apply_rotary, frequencies, rotary_table
from tests.small_models import random_params, tiny_config


def plain(num_dims, theta):
    return [theta ** (-2 * i / num_dims) for i in range(num_dims // 2)]


def llama31(num_dims, section):
    """By wavelengths, band by band, as in the program that Llama 3.1 came with."""
    found, length = [], section.original_max_position_embeddings
    for frequency in plain(num_dims, section.rope_max_timescale):
        wavelength = 2 * math.pi / frequency
        if wavelength < length / section.high_freq_factor:
            found.append(frequency)
        elif wavelength > length / section.low_freq_factor:
            found.append(frequency / section.rope_factor)
        else:
            smooth = (length / wavelength - section.low_freq_factor) / (
                section.high_freq_factor - section.low_freq_factor
            )
            found.append((1 - smooth) * frequency / section.rope_factor + smooth * frequency)
    return found


def yarn(num_dims, section):
    """By the first pair that is divided and the last that is kept, found by trying all of them.

    These two are rounded to whole pairs, unless rope_truncate=false.
    """
    every = plain(num_dims, section.rope_max_timescale)

    def first_pair_below(turns):
        # Where frequency * length / 2 pi passes `turns`, between pairs as well.
        places = np.arange(0, num_dims, 1e-4)
        frequency = section.rope_max_timescale ** (-2 * places / num_dims)
        below = frequency * section.original_max_position_embeddings / (2 * math.pi) <= turns
        assert below.any()
        return places[below.argmax()]

    low = first_pair_below(section.beta_fast)
    high = first_pair_below(section.beta_slow)
    if section.rope_truncate:
        low, high = math.floor(low), math.ceil(high)
    found = []
    for pair, frequency in enumerate(every):
        divided = min(max((pair - low) / (high - low), 0.0), 1.0)
        found.append(frequency * (1 - divided) + frequency / section.rope_factor * divided)
    return found


def test_yarn_between_pairs():
    """rope_truncate=false, as gpt-oss; the independent form finds the ends to 1e-4 pairs."""
    section = PositionConfig(
        rope_type="yarn",
        rope_truncate=False,
        rope_max_timescale=150_000.0,
        rope_factor=32.0,
        original_max_position_embeddings=4096,
    )
    found = frequencies(64, section)
    np.testing.assert_allclose(found, yarn(64, section), rtol=1e-3)
    rounded = frequencies(64, section.with_values({"rope_truncate": True}))
    assert np.abs(found / rounded - 1).max() > 0.05


def test_the_fastest_pairs_of_a_whole_head():
    """Gemma 4's proportional rotary: 2 of 8 pairs turn, by exponents of the whole head."""
    section = PositionConfig(rope_type="proportional", rotary_pct=0.25, rope_max_timescale=100.0)
    expected = [1.0, 100.0 ** (-2 / 16), 0, 0, 0, 0, 0, 0]
    np.testing.assert_allclose(frequencies(16, section), expected, rtol=2e-7)
    model = Model(tiny_config(head_dim=16, rope_type="proportional", rotary_pct=0.3).model)
    embedder = model.merge(random_params(model)).position_embedder
    sin, _ = embedder.for_mixers(jnp.arange(4)[None])["rotary"]
    assert (np.asarray(sin[0, 3, 0]) != 0).sum() == 2  # of int(0.3 * 8) pairs


def test_longrope_divides_by_the_factors_of_each_documents_length():
    """Two sequences: of one document, and of documents of 2, 4 and 3 tokens."""
    section = PositionConfig(
        rope_type="longrope",
        rope_short_factors=(1.0, 1.5),
        rope_long_factors=(3.0, 5.0),
        rope_factor=4.0,
        original_max_position_embeddings=3,
        rope_max_timescale=100.0,
    )
    positions_BT = np.array([[0, 1, 2, 3, 4, 5, 6, 7, 8], [0, 1, 0, 1, 2, 3, 0, 1, 2]])
    factors = np.empty((2, 9, 1, 2))
    factors[:] = [1.0, 1.5]
    factors[0, :] = factors[1, 2:6] = [3.0, 5.0]
    angles = positions_BT[..., None, None] * np.array([1.0, 0.1]) / factors
    attention_factor = math.sqrt(1 + math.log(4) / math.log(3))
    sin, cos = rotary_table(jnp.asarray(positions_BT), 4, section)
    np.testing.assert_allclose(sin, attention_factor * np.sin(angles), atol=1e-5)
    np.testing.assert_allclose(cos, attention_factor * np.cos(angles), atol=1e-5)
    # New tokens of a cached text go by their own positions.
    sin, _ = rotary_table(jnp.asarray([[2], [3]]), 4, section)
    expected = attention_factor * np.sin([[2.0, 0.2 / 1.5], [3 / 3, 0.3 / 5]])
    np.testing.assert_allclose(sin[:, 0, 0], expected, atol=1e-5)


@pytest.mark.parametrize("rope_type", ["yarn", "longrope"])
def test_a_given_attention_factor(rope_type):
    section = PositionConfig(
        rope_type=rope_type,
        rope_attention_factor=1.7,
        rope_short_factors=(1.0,),
        rope_long_factors=(2.0,),
    )
    sin, cos = rotary_table(jnp.arange(5)[None], 2, section)
    np.testing.assert_allclose(sin**2 + cos**2, 1.7**2, rtol=1e-5)


@pytest.mark.parametrize(
    ("rope_type", "independent", "keys"),
    [
        ("linear", lambda n, s: [f / s.rope_factor for f in plain(n, s.rope_max_timescale)], {}),
        ("llama3.1", llama31, {}),
        ("llama3.1", llama31, {"rope_factor": 32.0, "low_freq_factor": 0.5}),
        ("llama3.1", llama31, {"original_max_position_embeddings": 16, "high_freq_factor": 2.0}),
        ("yarn", yarn, {"rope_factor": 4.0, "original_max_position_embeddings": 32_768}),
        ("yarn", yarn, {"original_max_position_embeddings": 256, "beta_fast": 8.0}),
    ],
)
@pytest.mark.parametrize(("num_dims", "theta"), [(128, 500_000.0), (6, 100.0)])
def test_frequencies_equal_their_formula(rope_type, independent, keys, num_dims, theta):
    section = PositionConfig(rope_type=rope_type, rope_max_timescale=theta, **keys)
    found = frequencies(num_dims, section)
    assert isinstance(found, np.ndarray)  # a constant of the program, not computed every step
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, independent(num_dims, section), rtol=2e-7)


def test_yarn_makes_sine_and_cosine_larger():
    positions = jnp.arange(40)[None]
    section = PositionConfig(rope_type="yarn", rope_factor=4.0)
    sin, cos = rotary_table(positions, 8, section)
    np.testing.assert_allclose(sin**2 + cos**2, (0.1 * math.log(4) + 1) ** 2, rtol=1e-5)
    for rope_type in ("default", "linear", "llama3.1"):
        sin, cos = rotary_table(positions, 8, PositionConfig(rope_type=rope_type))
        np.testing.assert_allclose(sin**2 + cos**2, 1.0, rtol=1e-5)


@pytest.mark.parametrize("adjacent", [False, True])
@pytest.mark.parametrize(("num_dims", "dtype"), [(16, "float32"), (8, "bfloat16"), (2, "float32")])
def test_whole_heads_turn_as_halves_do(num_dims, dtype, adjacent):
    """What TPUs compile, with some of 16 dimensions turned or all; and the definition."""
    numbers = np.random.default_rng(num_dims)
    x_BTNH, grad_y_BTNH = (jnp.asarray(numbers.normal(size=(2, 5, 3, 16)), dtype) for _ in range(2))
    positions_BT = numbers.integers(0, 100, (2, 5))

    @jax.jit
    def run(x_BTNH, grad_y_BTNH):
        table = rotary_table(jnp.asarray(positions_BT), num_dims, PositionConfig())
        found = []
        for turn in (
            lambda x: apply_rotary(x, table, adjacent=adjacent),
            lambda x: apply_rotary_tpu(x, *table, adjacent),
        ):
            y_BTNH, vjp = jax.vjp(turn, x_BTNH)
            assert y_BTNH.dtype == x_BTNH.dtype
            found.append([y.astype(jnp.float32) for y in (y_BTNH, *vjp(grad_y_BTNH))])
        return found

    tolerance = 1e-6 if dtype == "float32" else 1e-2  # one rounding in the end
    halves, whole = run(x_BTNH, grad_y_BTNH)
    for got, wanted in zip(whole, halves, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance)
    x = np.asarray(x_BTNH, np.float64)
    half = num_dims // 2
    first, second = (x[..., :half], x[..., half:num_dims])
    if adjacent:
        first, second = (x[..., i:num_dims:2] for i in (0, 1))
    pairs = first + 1j * second
    rates = np.array(plain(num_dims, PositionConfig().rope_max_timescale))
    turned = pairs * np.exp(1j * positions_BT[..., None, None] * rates)
    both = np.stack([turned.real, turned.imag], axis=-1 if adjacent else -2)
    expected = np.concatenate([both.reshape(*both.shape[:-2], -1), x[..., num_dims:]], axis=-1)
    np.testing.assert_allclose(halves[0], expected, rtol=10 * tolerance, atol=10 * tolerance)
