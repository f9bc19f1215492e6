"""Local and linear attention, ALiBi and memories against their definitions in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.layers import alibi
from MaxText.layers.attention_core import Scoring, softmax_attention
from MaxText.layers.linear_attention import (
    bidirectional_linear_attention,
    causal_linear_attention,
)
from tests.small_models import some_quick

B, N, K, H = 2, 4, 2, 6


def projected(length, seed=0):
    """q, k, v and documents of uneven length."""
    generator = np.random.default_rng(seed)
    q, k, v = (generator.normal(size=(B, length, heads, H)) for heads in (N, K, K))
    cuts = generator.integers(1, max(length, 2), (B, 2))
    segments = 1 + (np.arange(length)[None, None] >= cuts[:, :, None]).sum(1)
    return q, k, v, segments.astype(np.int32)


def dense(q, k, v, mask_BTS, bias_NTS=0.0, scale=H**-0.5):
    """Softmax attention with a mask, float64."""
    k, v = (np.repeat(x, N // K, axis=2) for x in (k, v))
    scores = np.einsum("btnh,bsnh->bnts", q, k) * scale + bias_NTS
    scores = np.where(mask_BTS[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bnts,bsnh->btnh", weights / weights.sum(-1, keepdims=True), v)


def distances(length):
    return np.arange(length)[:, None] - np.arange(length)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("window", "length"), some_quick([(1, 9), (5, 24), (16, 50), (20, 100), (40, 33)], 2)
)
def test_a_window_is_a_mask(window, length, causal):
    q, k, v, segments = projected(length)
    gaps = distances(length)
    # (i - w, i] or (i - w, i + w], as GPT-Neo's mesh-tensorflow program has it.
    mask = (gaps < window) & (gaps >= (0 if causal else -window))
    mask = mask[None] & (segments[:, :, None] == segments[:, None])
    slopes = alibi.slopes(N)
    scoring = Scoring(causal=causal, window=window, slopes_N=jnp.asarray(slopes), scale=0.3)
    with jax.default_matmul_precision("highest"):
        ours = softmax_attention(*map(jnp.float32, (q, k, v)), scoring, segments_BT=segments)
    bias = -slopes[:, None, None] * np.abs(gaps)
    np.testing.assert_allclose(ours, dense(q, k, v, mask, bias, 0.3), atol=2e-6)


def test_products_of_a_window_do_not_grow_with_the_square():
    def flops(length):
        q, k, v, _ = projected(length)
        run = jax.jit(lambda *x: softmax_attention(*x, Scoring(window=16)))
        return run.lower(*map(jnp.float32, (q, k, v))).compile().cost_analysis()["flops"]

    assert flops(2048) / flops(512) < 4.2


def test_what_a_window_hides_has_no_gradient():
    q, k, v, _ = map(jnp.float32, projected(50))

    def at_40(v):
        return softmax_attention(q, k, v, Scoring(window=16))[:, 40].sum()

    gradient = jax.grad(at_40)(v)
    places = np.flatnonzero(np.abs(gradient).sum((0, 2, 3)))
    assert places.tolist() == list(range(25, 41))


def test_memories_are_keys_that_all_see():
    length, num = 40, 3
    q, k, v, segments = projected(length)
    kept = np.random.default_rng(9).normal(size=(2, num, K, H))
    gaps = distances(length)
    mask = (gaps >= 0)[None] & (segments[:, :, None] == segments[:, None])
    mask = np.concatenate([np.ones((B, length, num), bool), mask], axis=2)
    whole = [
        np.concatenate([np.broadcast_to(m, (B, *m.shape)), x], 1)
        for m, x in zip(kept, (k, v), strict=True)
    ]
    with jax.default_matmul_precision("highest"):
        ours = softmax_attention(
            *map(jnp.float32, (q, k, v)),
            Scoring(),
            segments_BT=segments,
            memory=tuple(map(jnp.float32, kept)),
            block_size=8,
        )
    np.testing.assert_allclose(ours, dense(q, *whole, mask), atol=2e-6)


def linear_by_definition(q, k, v, segments, epsilon):
    """sum_s phi_t . exp(k_s) v_s / (sum_s phi_t . exp(k_s) + epsilon), float64."""
    k, v = (np.repeat(x, N // K, axis=2) for x in (k, v))
    phi = np.exp(q - q.max(-1, keepdims=True))
    phi /= phi.sum(-1, keepdims=True)
    scores = np.einsum("btnh,bsnh->bnts", phi, np.exp(k))
    mask = (distances(q.shape[1]) >= 0)[None] & (segments[:, :, None] == segments[:, None])
    scores = np.where(mask[:, None], scores, 0.0)
    above = np.einsum("bnts,bsnh->btnh", scores, v)
    return above / (scores.sum(-1).transpose(0, 2, 1)[..., None] + epsilon)


@pytest.mark.parametrize(("length", "chunk"), some_quick([(1, 4), (23, 5), (24, 8), (7, 64)], 2))
def test_linear_attention(length, chunk):
    q, k, v, segments = projected(length)
    with jax.default_matmul_precision("highest"):
        ours, _ = causal_linear_attention(
            *map(jnp.float32, (q, k, v)), chunk=chunk, epsilon=0.1, segments_BT=segments
        )
    np.testing.assert_allclose(ours, linear_by_definition(q, k, v, segments, 0.1), atol=2e-6)


def test_linear_attention_goes_on_from_its_state():
    q, k, v, segments = projected(30)
    q, k, v = map(jnp.float32, (q, k, v))
    one = jnp.ones_like(segments)
    keys = {"chunk": 4, "epsilon": 1e-3}
    with jax.default_matmul_precision("highest"):
        whole, _ = causal_linear_attention(q, k, v, segments_BT=one, **keys)
        lengths = jnp.array([3, 11])
        _, state = causal_linear_attention(
            q[:, :14], k[:, :14], v[:, :14], lengths_B=lengths, segments_BT=one[:, :14], **keys
        )
        for step in range(5):
            at = (lengths + step)[:, None, None, None]
            new = [jnp.take_along_axis(x, at, axis=1) for x in (q, k, v)]
            out, state = causal_linear_attention(*new, state=state, segments_BT=one[:, :1], **keys)
            np.testing.assert_allclose(out, jnp.take_along_axis(whole, at, axis=1), atol=2e-6)


def test_linear_attention_holds_large_keys():
    q, k, v, segments = projected(40)
    q, k, v = map(jnp.float32, (q, k, v))
    keys = {"chunk": 8, "epsilon": 0.0, "segments_BT": segments}
    near, _ = causal_linear_attention(q, k, v, **keys)
    far, _ = causal_linear_attention(q, k + 100, v, **keys)
    np.testing.assert_allclose(far, near, atol=1e-4)
    half, _ = causal_linear_attention(*(x.astype(jnp.bfloat16) for x in (q, k, v)), **keys)
    assert half.dtype == jnp.bfloat16
    np.testing.assert_allclose(half.astype(jnp.float32), near, atol=0.1)


@pytest.mark.parametrize("causal", some_quick([True, False], 2))
def test_large_keys_of_one_document_do_not_touch_another(causal):
    q, k, v, _ = projected(24)
    q, k, v = map(jnp.float32, (q, k, v))
    segments = jnp.where(jnp.arange(24) < 11, 1, 2)[None].repeat(B, 0)
    far = k.at[:, 3].add(100.0)

    def run(q, k, v):
        if not causal:
            return bidirectional_linear_attention(q, k, v, segments_BT=segments)
        return causal_linear_attention(q, k, v, chunk=5, epsilon=1e-6, segments_BT=segments)[0]

    np.testing.assert_allclose(run(q, far, v)[:, 11:], run(q, k, v)[:, 11:], atol=2e-6)
    gradients = jax.jit(jax.grad(lambda *x: (run(*x) ** 2).sum(), (0, 1, 2)))(q, far, v)
    assert all(np.isfinite(gradient).all() for gradient in gradients)


def test_gradient_of_linear_attention():
    q, k, v, segments = projected(12)
    arrays = tuple(map(jnp.float32, (q, k, v)))

    def ours(q, k, v):
        out, _ = causal_linear_attention(q, k, v, chunk=5, epsilon=0.1, segments_BT=segments)
        return (out**2).sum()

    def quadratic(q, k, v):
        k, v = (jnp.repeat(x, N // K, axis=2) for x in (k, v))
        scores = jnp.einsum("btnh,bsnh->bnts", jax.nn.softmax(q), jnp.exp(k))
        mask = (distances(12) >= 0)[None] & (segments[:, :, None] == segments[:, None])
        scores = jnp.where(mask[:, None], scores, 0.0)
        below = scores.sum(-1).transpose(0, 2, 1)[..., None] + 0.1
        return ((jnp.einsum("bnts,bsnh->btnh", scores, v) / below) ** 2).sum()

    with jax.default_matmul_precision("highest"):
        for a, b in zip(
            jax.jit(jax.grad(ours, (0, 1, 2)))(*arrays),
            jax.jit(jax.grad(quadratic, (0, 1, 2)))(*arrays),
            strict=True,
        ):
            np.testing.assert_allclose(a, b, atol=1e-4 * np.abs(b).max())


@pytest.mark.parametrize("packed", [True, False])
def test_bidirectional_linear_attention(packed):
    q, k, v, segments = projected(20)
    with jax.default_matmul_precision("highest"):
        ours = bidirectional_linear_attention(
            *map(jnp.float32, (q, k, v)), segments_BT=segments if packed else None
        )
    same = segments[:, :, None] == segments[:, None] if packed else np.ones((B, 20, 20), bool)
    k, v = (np.repeat(x, N // K, axis=2) for x in (k, v))
    phi = np.exp(q) / np.exp(q).sum(-1, keepdims=True)
    weights = same[:, :, :, None, None] * np.exp(k)[:, None]
    weights = weights / weights.sum(2, keepdims=True)  # over the tokens that t sees
    theirs = np.einsum("btnh,btsnh,bsni->btni", phi, weights, v)
    np.testing.assert_allclose(ours, theirs, atol=2e-6)


def test_slopes():
    assert alibi.slopes(4).tolist() == [0.25, 0.0625, 0.015625, 0.00390625]
    assert alibi.slopes(6).tolist() == [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]
    twelve = [2.0**-i for i in range(1, 9)] + [2.0**-e for e in (0.5, 1.5, 2.5, 3.5)]
    np.testing.assert_allclose(alibi.slopes(12), twelve, rtol=1e-6)
