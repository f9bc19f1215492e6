"""Latent attention against its definition in float64, and its cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from MaxText.layers.attention.latent_attention import LatentAttention
from MaxText.layers.context import ForwardContext
from MaxText.layers.params import Init, initializers
from MaxText.layers.rotary import Rotary
from tests.small_models import tiny_config

B, T, D, N = 2, 9, 16, 3
L, C, R, V = 6, 5, 4, 7  # the latent vector, the slices of a query, and a value
SIZES = {
    "mixer": "latent_attention",
    "base_emb_dim": D,
    "base_num_query_heads": N,
    "base_num_kv_heads": N,
    "kv_lora_rank": L,
    "qk_nope_head_dim": C,
    "qk_rope_head_dim": R,
    "v_head_dim": V,
    "attention_block_size": 4,
}
SEGMENTS = np.array([[1, 1, 1, 1, 2, 2, 2, 2, 2], [1, 1, 2, 2, 2, 2, 3, 3, 3]])
POSITIONS = np.array([[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 1, 0, 1, 2, 3, 0, 1, 2]])
YARN = {
    "rope_type": "yarn",
    "rope_factor": 40.0,
    "original_max_position_embeddings": 8,
    "rope_attention_factor": 1.0,
    "rope_pairs": "adjacent",
    "mscale": 0.7,
}
WITHOUT_POSITIONS = {
    "position_embedding": "none",
    "attention_sinks": True,
    "attention_output_gate": True,
    "qkv_bias": True,
    "proj_bias": True,
}


def built(**keys):
    """A mixer with random parameters, their values, and the positions that it reads."""
    config = tiny_config(**SIZES | keys).model
    dimensions = config.shape.dimensions
    init = Init(
        dimensions=dimensions,
        initializers=initializers(config.initialization, dimensions),
        dtype=jnp.dtype("float32"),
        weight_dtype=jnp.dtype("float32"),
        precision=None,
        zero_centered_norms=False,
    )
    part = LatentAttention(config, init, nnx.Rngs(0))
    draw = np.random.default_rng(0)
    state = jax.tree.map(
        lambda x: jnp.asarray(draw.normal(size=x.shape, scale=0.5), jnp.float32), nnx.state(part)
    )
    nnx.update(part, state)
    rotary = None
    if config.position.position_embedding == "rotary":
        position = Rotary(config, init, nnx.Rngs(0))
        rotary = position.for_mixers(jnp.asarray(POSITIONS)).get("rotary")
    return part, config, rotary


def normalized(x, norm):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * np.float64(norm.scale[...])


def turned(x_BTNR, rotary, adjacent):
    """Pairs as complex numbers, times those of the table."""
    if rotary is None:
        return x_BTNR
    sin, cos = map(np.float64, rotary)
    firsts, seconds = (slice(0, None, 2), slice(1, None, 2))
    if not adjacent:
        firsts, seconds = (slice(0, R // 2), slice(R // 2, None))
    product = (x_BTNR[..., firsts] + 1j * x_BTNR[..., seconds]) * (cos + 1j * sin)
    found = np.empty_like(x_BTNR)
    found[..., firsts] = product.real
    found[..., seconds] = product.imag
    return found


def by_definition(part, x, rotary, *, scale, adjacent):
    def linear(module, x, contracted=1):
        y = np.tensordot(x, np.float64(module.kernel[...]), contracted)
        return y if module.bias is None else y + np.float64(module.bias[...])

    q_input = x
    if part.query_down is not None:
        q_input = normalized(linear(part.query_down, x), part.query_down_norm)
    q = linear(part.query, q_input)
    latent = linear(part.latent, x)
    k_and_v = linear(part.key_value, normalized(latent[..., :L], part.latent_norm))
    k_rotary = turned(latent[:, :, None, L:], rotary, adjacent)
    scores = np.einsum("btnc,bsnc->bnts", q[..., :C], k_and_v[..., :C])
    scores += np.einsum("btnr,bsr->bnts", turned(q[..., C:], rotary, adjacent), k_rotary[:, :, 0])
    same = SEGMENTS[:, None, :, None] == SEGMENTS[:, None, None]
    exp = np.where(same & np.tri(T, dtype=bool), np.exp(scale * scores), 0)
    divisor = exp.sum(-1, keepdims=True)
    if part.sinks is not None:
        divisor = divisor + np.exp(np.float64(part.sinks[...]))[:, None, None]
    o = np.einsum("bnts,bsnv->btnv", exp / divisor, k_and_v[..., C:])
    if part.gate is not None:
        o = o / (1 + np.exp(-linear(part.gate, x)))
    return linear(part.out, o, 2)


@pytest.mark.parametrize(
    ("keys", "scale"),
    [
        ({"q_lora_rank": 8}, 1 / 3),
        (YARN, (0.07 * np.log(40) + 1) ** 2 / 3),
        (WITHOUT_POSITIONS | {"attention_scale": 0.4}, 0.4),
    ],
    ids=["ranks of queries and keys", "YaRN", "without positions"],
)
def test_it_is_attention_to_keys_and_values_of_latent_vectors(keys, scale):
    part, _, rotary = built(**keys)
    x = np.random.default_rng(1).normal(size=(B, T, D))
    context = ForwardContext(segments_BT=jnp.asarray(SEGMENTS), rotary=rotary)
    found, losses = part(jnp.asarray(x, jnp.float32), context)
    assert not losses
    adjacent = keys.get("rope_pairs") == "adjacent"
    expected = by_definition(part, x, rotary, scale=scale, adjacent=adjacent)
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())


def test_the_cache_holds_a_latent_vector_and_a_rotary_slice_per_token():
    part, config, rotary = built()
    x = jnp.asarray(np.random.default_rng(1).normal(size=(B, T, D)), jnp.float32)
    context = ForwardContext(rotary=rotary, capacity=T, lengths_B=jnp.asarray([T, T]))
    _, cache = part.prefill(x, context)
    assert [slots.shape for slots in jax.tree.leaves(cache)] == [(B, 1, T, L + R)]
    per_token, fixed = LatentAttention.state_bytes(config, config.shape.dimensions, T, 4)
    assert (per_token, fixed) == ((L + R) * 4, 0)
