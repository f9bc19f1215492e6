"""Hooks for scores, masks and weights: every implementation against the definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.layers.attention.attention_core import AttentionSpec, dot_product_attention
from MaxText.layers.kv_cache import KeyValueCache, SlidingWindowCache
from tests.layers.attention_ideas import IDEAS, N, by_definition

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
