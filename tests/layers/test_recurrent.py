"""What recurrent mixers share: inverses, convolutions, states passed between chunks and parts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from MaxText.layers.context import ForwardContext
from MaxText.layers.params import Init, initializers
from MaxText.layers.recurrent.chunks import Chunks, DocumentMasks
from MaxText.layers.recurrent.short_convolution import ShortConvolution
from MaxText.layers.recurrent.state_passing import pass_decayed_states
from MaxText.layers.recurrent.triangular_inverse import num_products, unit_lower_inverse
from tests.small_models import tiny_config

B, T = 2, 12
SEGMENTS = np.array([[1] * 4 + [2] * 8, [1] * 2 + [2] * 5 + [3] * 5])


@pytest.mark.parametrize(("size", "products"), [(1, 0), (5, 4), (64, 10)])
def test_inverses_of_unit_triangular_matrices(size, products):
    """Also where keys repeat: elements of 2, as allow_neg_eigval makes them."""
    below = np.tril(np.random.default_rng(0).normal(size=(3, size, size)) / max(size, 2) ** 0.5, -1)
    below[0] = np.tril(np.full((size, size), 2.0), -1)
    given = jnp.asarray(below, jnp.float32)
    expected = np.linalg.inv(np.eye(size) + below)
    found, pull_back = jax.vjp(lambda x: unit_lower_inverse(x, None), given)
    np.testing.assert_allclose(found, expected, atol=2e-6 * np.abs(expected).max())
    cotangent = np.random.default_rng(1).normal(size=below.shape)
    [gradient] = pull_back(jnp.asarray(cotangent, jnp.float32))
    transposed = expected.swapaxes(-1, -2)
    expected_gradient = -np.tril(transposed @ cotangent @ transposed, -1)
    largest = np.abs(expected_gradient).max(initial=1)
    np.testing.assert_allclose(gradient, expected_gradient, atol=5e-6 * largest)
    assert num_products(size) == products


def test_convolutions_see_the_newest_tokens_of_a_document():
    width, channels = 4, (3, 2)
    config = tiny_config().model
    dimensions = config.shape.dimensions
    float32 = jnp.dtype("float32")
    init = Init(
        dimensions, initializers(config.initialization, dimensions), float32, float32, None, False
    )
    part = ShortConvolution(channels, (None, None), init, nnx.Rngs(0), width=width, use_bias=True)
    draw = np.random.default_rng(0)
    assert part.bias is not None
    part.bias[...] = jnp.asarray(draw.normal(size=channels), jnp.float32)
    kernel, bias = np.asarray(part.kernel[...]), np.asarray(part.bias[...])
    assert np.abs(kernel).max() <= 0.5
    x = draw.normal(size=(B, T, *channels)).astype(np.float32)

    def by_definition(x, segments):
        y = np.tile(bias, (*x.shape[:2], 1, 1))
        for row, t, earlier in np.ndindex(*x.shape[:2], width):
            s = t - earlier
            if s >= 0 and segments[row, s] == segments[row, t]:
                y[row, t] += kernel[width - 1 - earlier] * x[row, s]
        return y

    documents = ForwardContext(segments_BT=jnp.asarray(SEGMENTS))
    found, _ = part(jnp.asarray(x), documents)
    np.testing.assert_allclose(found, by_definition(x, SEGMENTS), atol=1e-6)
    # Prompts of 6 and 2 tokens with padding, then the next tokens in two steps.
    lengths = np.array([6, 2])
    padded = np.where(np.arange(6)[:, None, None] < lengths[:, None, None, None], x[:, :6], 9.0)
    context = ForwardContext(lengths_B=jnp.asarray(lengths), capacity=T)
    prompt, state = part(jnp.asarray(padded), context)
    expected = by_definition(x, np.ones((B, T)))
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(prompt[row, :length], expected[row, :length], atol=1e-6)
    for start, end in ((0, 1), (1, 4)):
        following = np.stack([x[row, n + start : n + end] for row, n in enumerate(lengths)])
        found, state = part(jnp.asarray(following), ForwardContext(), state)
        for row, length in enumerate(lengths):
            rows = slice(length + start, length + end)
            np.testing.assert_allclose(found[row], expected[row, rows], atol=1e-6)


@pytest.mark.parametrize(("num_parts", "size"), [(1, 5), (3, 3), (4, 8)])
def test_decayed_states_pass_between_chunks_and_parts(num_parts, size):
    """Linear attention in chunks is its recurrence, with documents that reset the state."""
    N, K, V = 2, 3, 4
    draw = np.random.default_rng(0)
    k, q = draw.normal(size=(2, B, T, N, K))
    v = draw.normal(size=(B, T, N, V))
    log_decay = -draw.random(size=(B, T, N))
    initial = draw.normal(size=(B, N, K, V))
    chunks = Chunks(T, num_parts, min(size, T // num_parts))
    masks = DocumentMasks.of(ForwardContext(segments_BT=jnp.asarray(SEGMENTS)), chunks)
    q_, k_, v_, g = (chunks.split(jnp.asarray(x, jnp.float32)) for x in (q, k, v, log_decay))
    sums = jnp.cumsum(g, -1)
    since = jnp.exp(sums) * masks.continues_JPBC[:, :, :, None]
    to_end = jnp.exp(sums[..., -1:] - sums) * masks.remains_JPBC[:, :, :, None]
    addends = jnp.einsum("jpbnck,jpbnc,jpbncv->jpbnkv", k_, to_end, v_)
    decay = since[..., -1:, None]
    before, last = pass_decayed_states(decay, addends, jnp.asarray(initial, jnp.float32))
    pairs = jnp.exp(sums[..., :, None] - sums[..., None, :]) * masks.visible_JPBCC[:, :, :, None]
    o = jnp.einsum("jpbnck,jpbnkv->jpbncv", q_, before) * since[..., None]
    o += jnp.einsum("jpbnck,jpbndk,jpbncd,jpbndv->jpbncv", q_, k_, pairs, v_)
    state = initial.copy()
    for t in range(T):
        continues = SEGMENTS[:, t] == SEGMENTS[:, max(t - 1, 0)]
        keeps = continues[:, None] * np.exp(log_decay[:, t])
        state = keeps[..., None, None] * state + k[:, t, :, :, None] * v[:, t, :, None]
        expected = np.einsum("bnk,bnkv->bnv", q[:, t], state)
        np.testing.assert_allclose(chunks.merge(o)[:, t], expected, atol=1e-5)
    np.testing.assert_allclose(last, state, atol=1e-5)
