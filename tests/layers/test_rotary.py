"""Rotary frequencies of every rope_type against forms that are written otherwise, in double."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.configuration.layer_sections import Position
from MaxText.layers.rotary import frequencies, rotary_table, rotate, rotate_whole
from tests.layers.test_parts import logits_of
from tests.small_models import random_batch, tiny_config


def small(**keys):
    return tiny_config(base_num_decoder_layers=1, **keys)


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
@pytest.mark.parametrize(("num_dims", "theta"), [(128, 500_000.0), (64, 10_000.0), (6, 100.0)])
def test_frequencies_equal_their_formula(rope_type, independent, keys, num_dims, theta):
    section = Position(rope_type=rope_type, rope_max_timescale=theta, **keys)
    found = frequencies(num_dims, section)
    assert isinstance(found, np.ndarray)  # a constant of the program, not computed every step
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, independent(num_dims, section), rtol=2e-7)


def test_the_bands_of_llama31():
    section = Position(rope_type="llama3.1", rope_max_timescale=500_000.0)
    ratio = frequencies(128, section) / np.array(plain(128, 500_000.0))
    kept, divided = ratio > 1 - 1e-6, ratio < 1 / 8 + 1e-6
    # Wavelengths below 2048 tokens are kept, above 8192 divided by 8: of 64 pairs, 29 and 29.
    assert (kept.sum(), divided.sum()) == (29, 29)
    assert (np.diff(ratio[~kept]) < 1e-7).all()


def test_yarn_makes_sine_and_cosine_larger():
    positions = jnp.arange(40)[None]
    section = Position(rope_type="yarn", rope_factor=4.0)
    sin, cos = rotary_table(positions, 8, section)
    np.testing.assert_allclose(sin**2 + cos**2, (0.1 * math.log(4) + 1) ** 2, rtol=1e-5)
    for rope_type in ("default", "linear", "llama3.1"):
        sin, cos = rotary_table(positions, 8, Position(rope_type=rope_type))
        np.testing.assert_allclose(sin**2 + cos**2, 1.0, rtol=1e-5)


@pytest.mark.parametrize("rope_type", ["linear", "llama3.1", "yarn"])
def test_a_factor_of_one_changes_nothing(rope_type):
    config = small(rope_type=rope_type, rope_factor=1.0, rotary_pct=0.5, head_dim=16)
    batch = random_batch(config, rows=2)
    default = small(rotary_pct=0.5, head_dim=16)
    np.testing.assert_allclose(logits_of(config, batch), logits_of(default, batch), atol=2e-5)


def test_linear_is_the_default_at_positions_in_between():
    linear = small(rope_type="linear", rope_factor=4.0)
    batch = random_batch(linear, rows=2)
    positions = 4 * jnp.arange(batch.tokens_BT.shape[1])[None]
    spread = dataclasses.replace(batch, positions_BT=positions)
    found = logits_of(linear, spread)
    np.testing.assert_allclose(found, logits_of(small(), batch), atol=2e-5)
    assert np.abs(found - logits_of(linear, batch)).max() > 0.01


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_dims", [16, 8, 2])
def test_whole_heads_turn_as_halves_do(num_dims, dtype):
    """What TPUs compile, with some of 16 dimensions turned or all."""
    numbers = np.random.default_rng(num_dims)
    x_BTNH, of_y_BTNH = (jnp.asarray(numbers.normal(size=(2, 5, 3, 16)), dtype) for _ in range(2))
    positions_BT = jnp.asarray(numbers.integers(0, 100, (2, 5)))
    table = rotary_table(positions_BT, num_dims, small().model.position)
    y_BTNH, vjp = jax.vjp(lambda x_BTNH: rotate(x_BTNH, table), x_BTNH)
    whole_BTNH, whole_vjp = jax.vjp(lambda x_BTNH: rotate_whole(x_BTNH, *table), x_BTNH)
    assert whole_BTNH.dtype == x_BTNH.dtype
    tolerance = 1e-6 if dtype == "float32" else 1e-2  # one rounding in the end
    for got, wanted in ((whole_BTNH, y_BTNH), (whole_vjp(of_y_BTNH)[0], vjp(of_y_BTNH)[0])):
        np.testing.assert_allclose(
            got.astype(jnp.float32), wanted.astype(jnp.float32), rtol=tolerance, atol=tolerance
        )
