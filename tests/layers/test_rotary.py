"""Rotary frequencies of every rope_type against forms that are written otherwise, in double."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.config.layer_sections import PositionConfig
from MaxText.layers.lowering.tpu_rotary import apply_rotary_tpu
from MaxText.layers.rotary import apply_rotary, frequencies, rotary_table


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
    """By the first pair that is divided and the last that is kept, found by trying all of them."""
    every = plain(num_dims, section.rope_max_timescale)

    def first_pair_below(turns):
        # Where frequency * length / 2 pi passes `turns`, between pairs as well.
        places = np.arange(0, num_dims, 1e-4)
        frequency = section.rope_max_timescale ** (-2 * places / num_dims)
        below = frequency * section.original_max_position_embeddings / (2 * math.pi) <= turns
        assert below.any()
        return places[below.argmax()]

    low = math.floor(first_pair_below(section.beta_fast))
    high = math.ceil(first_pair_below(section.beta_slow))
    found = []
    for pair, frequency in enumerate(every):
        divided = min(max((pair - low) / (high - low), 0.0), 1.0)
        found.append(frequency * (1 - divided) + frequency / section.rope_factor * divided)
    return found


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


@pytest.mark.parametrize(("num_dims", "dtype"), [(16, "float32"), (8, "bfloat16"), (2, "float32")])
def test_whole_heads_turn_as_halves_do(num_dims, dtype):
    """What TPUs compile, with some of 16 dimensions turned or all; and the definition."""
    numbers = np.random.default_rng(num_dims)
    x_BTNH, grad_y_BTNH = (jnp.asarray(numbers.normal(size=(2, 5, 3, 16)), dtype) for _ in range(2))
    positions_BT = numbers.integers(0, 100, (2, 5))

    @jax.jit
    def run(x_BTNH, grad_y_BTNH):
        table = rotary_table(jnp.asarray(positions_BT), num_dims, PositionConfig())
        found = []
        for turn in (lambda x: apply_rotary(x, table), lambda x: apply_rotary_tpu(x, *table)):
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
    pairs = x[..., :half] + 1j * x[..., half:num_dims]
    rates = np.array(plain(num_dims, PositionConfig().rope_max_timescale))
    turned = pairs * np.exp(1j * positions_BT[..., None, None] * rates)
    expected = np.concatenate([turned.real, turned.imag, x[..., num_dims:]], axis=-1)
    np.testing.assert_allclose(halves[0], expected, rtol=10 * tolerance, atol=10 * tolerance)
