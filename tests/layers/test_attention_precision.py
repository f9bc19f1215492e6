"""Attention and rotary positions in bfloat16, and far positions: what stays in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.config.layer_sections import PositionConfig
from MaxText.layers.attention.attention_core import AttentionSpec, dot_product_attention
from MaxText.layers.rotary import apply_rotary, frequencies, rotary_table


@pytest.mark.parametrize("soft_cap", [0.0, 40.0])
def test_scores_of_bfloat16_are_summed_and_compared_in_float32(soft_cap):
    """Scores up to 60, of which bfloat16 would round off 0.1: a tenth of a probability."""
    length, head_dim = 48, 16
    draw = np.random.default_rng(0).normal
    q, k, v = (
        jnp.asarray(size * draw(size=(1, length, 2, head_dim)), jnp.bfloat16) for size in (4, 4, 1)
    )
    spec = AttentionSpec(scale=0.25, soft_cap=soft_cap)
    found = jax.jit(lambda *x: dot_product_attention(*x, spec, block_size=16))(q, k, v)
    assert found.dtype == jnp.bfloat16
    scores = 0.25 * np.einsum("btnh,bsnh->bnts", np.float64(q), np.float64(k))
    assert np.abs(scores).max() > 30
    if soft_cap:
        scores = soft_cap * np.tanh(scores / soft_cap)
    scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    expected = np.einsum("bnts,bsnh->btnh", weights, np.float64(v))
    # Probabilities and the result are rounded to bfloat16, to 1 part in 256.
    np.testing.assert_allclose(np.float64(found), expected, atol=0.012)


def test_turning_bfloat16_rounds_once():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 64, 3, 16)), jnp.bfloat16)
    positions = np.arange(64)[None] + np.array([[0], [7]])
    sin, cos = (np.float64(t) for t in rotary_table(jnp.asarray(positions), 16, PositionConfig()))
    first, second = np.split(np.float64(x), 2, axis=-1)
    expected = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    found = jax.jit(lambda x: apply_rotary(x, (jnp.float32(sin), jnp.float32(cos))))(x)
    np.testing.assert_allclose(np.float64(found), expected, rtol=2**-7.99, atol=1e-5)


@pytest.mark.parametrize("rope_type", ["default", "linear", "llama3.1", "yarn"])
def test_far_positions_are_exact(rope_type):
    """Odd ones too, which bfloat16 has only up to 256."""
    config = PositionConfig(rope_type=rope_type, rope_factor=4.0)
    positions = np.array([[0, 1, 255, 257, 1001, 4095, 9999, 32_767]])
    sin, cos = jax.jit(lambda p: rotary_table(p, 32, config))(jnp.asarray(positions))
    assert sin.dtype == cos.dtype == jnp.float32
    assert sin.shape == (1, 8, 1, 16)
    angles = positions[..., None, None] * np.float64(frequencies(32, config))
    factor = 0.1 * np.log(4.0) + 1 if rope_type == "yarn" else 1.0
    # An angle of 32,767 has a last place of 0.002 in float32.
    np.testing.assert_allclose(sin, factor * np.sin(angles), atol=4e-3)
    np.testing.assert_allclose(cos, factor * np.cos(angles), atol=4e-3)


def test_a_table_in_bfloat16_is_the_rounded_one():
    """As in programs that keep it in the format of activations; also when it is compiled."""
    positions = jnp.arange(3000)[None]
    tables = [
        jax.jit(lambda p, config=config: rotary_table(p, 16, config))(positions)
        for config in (PositionConfig(), PositionConfig(rope_table_dtype="bfloat16"))
    ]
    for exact, rounded in zip(*tables, strict=True):
        assert rounded.dtype == jnp.float32
        np.testing.assert_array_equal(rounded, exact.astype(jnp.bfloat16).astype(jnp.float32))
        assert np.abs(np.asarray(rounded - exact)).max() > 1e-4
