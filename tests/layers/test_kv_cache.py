"""Caches against attention over all tokens of each sequence, in float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.layers.attention.attention_core import AttentionSpec
from MaxText.layers.kv_cache import KeyValueCache, SlidingWindowCache, capacity_of, resize

N, K, H = 4, 2, 3  # query heads, key/value heads, dimensions of a head
SLOPES = np.array([0.5, 0.3, 0.2, 0.1])
SPARE = 1e3  # what padding holds: a query that sees it is far off


def by_definition(q_TNH, positions_T, keys_SKH, values_SKH, memory_MKH, window, slopes_N):
    """One sequence. Memories precede its tokens, are seen by all, and have distance 0."""
    found = np.empty(q_TNH.shape)
    num_memories = len(memory_MKH[0])
    for row, position in enumerate(positions_T):
        tokens = np.arange(len(keys_SKH))
        seen = (tokens <= position) & (tokens > position - window)
        distance = np.concatenate([np.zeros(num_memories), (position - tokens)[seen]])
        for head in range(N):
            group = head // (N // K)
            keys, values = (
                np.concatenate([memory[:, group], x[seen, group]])
                for memory, x in zip(memory_MKH, (keys_SKH, values_SKH), strict=True)
            )
            scores = keys @ q_TNH[row, head] * H**-0.5 - slopes_N[head] * distance
            weights = np.exp(scores - scores.max())
            found[row, head] = weights @ values / weights.sum()
    return found


class Sequences:
    """Queries, keys and values of a batch of sequences of any length."""

    def __init__(self, lengths, total=40, num_memories=0):
        draw = np.random.default_rng(0).normal
        self.lengths = list(lengths)
        self.q, self.k, self.v = (draw(size=(len(lengths), total, heads, H)) for heads in (N, K, K))
        self.memories = draw(size=(2, num_memories, K, H))

    def prompts(self):
        """Keys and values of the prompts, with padding behind the shorter ones."""
        padded = max(self.lengths)
        is_padding = np.arange(padded) >= np.array(self.lengths)[:, None]
        return [
            jnp.float32(np.where(is_padding[..., None, None], SPARE, x[:, :padded]))
            for x in (self.k, self.v)
        ]

    def next_tokens(self, count):
        """(q, k, v, positions) of the next tokens of each sequence."""
        positions = np.array(self.lengths)[:, None] + np.arange(count)
        self.lengths = [length + count for length in self.lengths]
        rows = np.arange(len(positions))[:, None]
        return [jnp.float32(x[rows, positions]) for x in (self.q, self.k, self.v)] + [
            jnp.asarray(positions)
        ]

    def expected(self, positions_BT, window=10**6, slopes_N=(0.0,) * N):
        return np.stack(
            [
                by_definition(
                    self.q[row, positions],
                    positions,
                    self.k[row],
                    self.v[row],
                    self.memories,
                    window,
                    slopes_N,
                )
                for row, positions in enumerate(np.asarray(positions_BT))
            ]
        )


@functools.partial(jax.jit, static_argnames="spec")
def decoded(cache, q, k, v, positions, slopes_N, *, spec):
    """(attention of new tokens, the cache with them)."""
    spec = dataclasses.replace(spec, slopes_N=slopes_N)
    if isinstance(cache, SlidingWindowCache):
        return cache.step(q, k, v, positions, spec)
    cache = cache.append(k, v, positions)
    return cache.attend(q, positions, spec), cache


@pytest.mark.parametrize(
    ("lengths", "num_memories", "slopes"),
    [([5, 1, 8], 2, SLOPES), ([5, 1, 8], 0, None), ([3], 1, None)],
    ids=["memories and ALiBi", "plain", "one sequence"],
)
def test_a_cache_is_attention_over_all_earlier_tokens(lengths, num_memories, slopes):
    sequences = Sequences(lengths, num_memories=num_memories)
    memories = tuple(jnp.float32(sequences.memories)) if num_memories else None
    cache = KeyValueCache.from_prefill(*sequences.prompts(), 12, memories)
    assert cache.capacity == 12
    slopes_N = None if slopes is None else jnp.float32(slopes)
    # Several tokens at a time as well, and after the cache has grown.
    for count, capacity in ((1, 12), (1, 12), (3, 20)):
        cache = resize({"layer": cache, "other": jnp.ones(3)}, capacity)["layer"]
        assert capacity_of([cache, jnp.ones(3)]) == capacity
        new = sequences.next_tokens(count)
        found, cache = decoded(cache, *new, slopes_N, spec=AttentionSpec())
        expected = sequences.expected(new[-1], slopes_N=[0.0] * N if slopes is None else slopes)
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_without_a_causal_mask_a_token_sees_all_that_is_written():
    sequences = Sequences([5, 1])
    cache = KeyValueCache.from_prefill(*sequences.prompts(), 12)
    new = sequences.next_tokens(1)
    found, _ = decoded(cache, *new, None, spec=AttentionSpec(causal=False))
    np.testing.assert_allclose(found, sequences.expected(new[-1]), atol=1e-5)


@pytest.mark.parametrize(("lengths", "window"), [([6, 1, 9], 4), ([6, 1, 9], 30), ([2], 4)])
def test_a_ring_is_attention_over_the_newest_tokens(lengths, window):
    sequences = Sequences(lengths)
    ring = SlidingWindowCache.from_prefill(*sequences.prompts(), jnp.array(lengths), window)
    assert ring.keys_BKWH.shape == (len(lengths), K, window, H)
    for count in (1, 1, 3, 1, 7, 1):
        new = sequences.next_tokens(count)
        found, ring = decoded(ring, *new, jnp.float32(SLOPES), spec=AttentionSpec(window=window))
        expected = sequences.expected(new[-1], window, SLOPES)
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_the_smallest_cache_decides_when_all_must_grow():
    caches = [KeyValueCache.from_prefill(*Sequences([3]).prompts(), size) for size in (9, 5, 7)]
    assert capacity_of(caches) == 5
    assert capacity_of(["no", jnp.ones(3)]) is None


def test_a_cache_keeps_the_format_it_has():
    """That of the prompt: a step must not make another program by changing it."""
    k, v = Sequences([4, 2]).prompts()
    cache = KeyValueCache.from_prefill(k.astype(jnp.bfloat16), v.astype(jnp.bfloat16), 8)
    ring = SlidingWindowCache.from_prefill(
        k.astype(jnp.bfloat16), v.astype(jnp.bfloat16), jnp.array([4, 2]), 3
    )
    q, k, v, positions = Sequences([4, 2]).next_tokens(1)
    _, grown = jax.eval_shape(
        functools.partial(decoded, spec=AttentionSpec()), cache, q, k, v, positions, None
    )
    _, stepped = jax.eval_shape(
        functools.partial(decoded, spec=AttentionSpec(window=3)), ring, q, k, v, positions, None
    )
    assert {grown.keys.dtype, grown.values.dtype} == {jnp.dtype("bfloat16")}
    assert {stepped.keys_BKWH.dtype, stepped.values_BKWH.dtype} == {jnp.dtype("bfloat16")}
