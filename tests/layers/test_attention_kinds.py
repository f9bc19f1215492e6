"""Softmax, local and linear attention, ALiBi and memories against definitions in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.cost.jaxpr_operations import count_operations
from MaxText.layers.attention.attention_core import AttentionSpec, dot_product_attention
from MaxText.layers.attention.linear_attention import (
    bidirectional_linear_attention,
    causal_linear_attention,
)
from MaxText.layers.positions import alibi_slopes

B, N, K, H = 2, 4, 2, 6


def projected(length, seed=0):
    """q, k, v and documents of uneven length."""
    generator = np.random.default_rng(seed)
    q, k, v = (generator.normal(size=(B, length, heads, H)) for heads in (N, K, K))
    cuts = generator.integers(1, max(length, 2), (B, 2))
    segments = 1 + (np.arange(length)[None, None] >= cuts[:, :, None]).sum(1)
    return q, k, v, segments.astype(np.int32)


def dense(q, k, v, mask_BTS, bias_NTS=0.0, scale=H**-0.5, soft_cap=0.0, xp=np):
    """Softmax attention with a mask, in numpy float64."""
    k, v = (xp.repeat(x, N // K, axis=2) for x in (k, v))
    scores = xp.einsum("btnh,bsnh->bnts", q, k) * scale + bias_NTS
    if soft_cap:
        scores = soft_cap * xp.tanh(scores / soft_cap)
    scores = xp.where(mask_BTS[:, None], scores, -np.inf)
    weights = xp.exp(scores - scores.max(-1, keepdims=True))
    return xp.einsum("bnts,bsnh->btnh", weights / weights.sum(-1, keepdims=True), v)


def distances(length):
    return np.arange(length)[:, None] - np.arange(length)


def softmax(q, k, v, spec, **options):
    run = jax.jit(functools.partial(dot_product_attention, spec=spec, **options))
    with jax.default_matmul_precision("highest"):
        return run(*map(jnp.float32, (q, k, v)))


@pytest.mark.parametrize(
    ("scores", "packed"),
    [({}, True), ({"soft_cap": 5.0}, False), ({"causal": False}, True)],
    ids=["causal", "soft cap", "both directions"],
)
def test_blocks_of_queries_equal_the_full_square(scores, packed):
    q, k, v, segments = projected(13)
    mask = np.broadcast_to((distances(13) >= 0) | (not scores.get("causal", True)), (B, 13, 13))
    if packed:
        mask = mask & (segments[:, :, None] == segments[:, None])
    expected = dense(q, k, v, mask, soft_cap=scores.get("soft_cap", 0.0))
    for size in (None, 5, 64):
        spec = AttentionSpec(**scores)
        found = softmax(q, k, v, spec, segments_BT=segments if packed else None, block_size=size)
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_many_blocks_grow_instead_of_multiplying():
    x = jnp.ones((1, 64, 1, 4))
    run = functools.partial(dot_product_attention, spec=AttentionSpec(), block_size=1)
    assert str(jax.make_jaxpr(run)(x, x, x)).count("dot_general") == 2 * 16


@pytest.mark.parametrize(
    ("window", "length", "causal"), [(1, 9, True), (16, 50, True), (5, 24, False), (40, 33, False)]
)
def test_a_window_is_a_mask(window, length, causal):
    q, k, v, segments = projected(length)
    gaps = distances(length)
    # (i - w, i] or (i - w, i + w], as GPT-Neo's mesh-tensorflow program has it.
    mask = (gaps < window) & (gaps >= (0 if causal else -window))
    mask = mask[None] & (segments[:, :, None] == segments[:, None])
    slopes = alibi_slopes(N)
    spec = AttentionSpec(causal=causal, window=window, slopes_N=jnp.asarray(slopes), scale=0.3)
    found = softmax(q, k, v, spec, segments_BT=segments)
    bias = -slopes[:, None, None] * np.abs(gaps)
    np.testing.assert_allclose(found, dense(q, k, v, mask, bias, 0.3), atol=2e-6)


def test_products_of_a_window_grow_with_the_length_and_not_its_square():
    def flops(length):
        x = jax.ShapeDtypeStruct((1, length, 1, 4), jnp.float32)
        run = functools.partial(dot_product_attention, spec=AttentionSpec(window=16))
        return count_operations(jax.make_jaxpr(run)(x, x, x).jaxpr).matmul_flops

    assert flops(2048) / flops(512) < 4.2


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
    own = {"persistent_kv": tuple(map(jnp.float32, kept)), "block_size": 8}
    actual = softmax(q, k, v, AttentionSpec(), segments_BT=segments, **own)
    np.testing.assert_allclose(actual, dense(q, *whole, mask), atol=2e-6)


def linear_by_definition(q, k, v, segments, epsilon, xp=np):
    """sum_s phi_t . exp(k_s) v_s / (sum_s phi_t . exp(k_s) + epsilon), in numpy float64."""
    k, v = (xp.repeat(x, N // K, axis=2) for x in (k, v))
    phi = xp.exp(q - q.max(-1, keepdims=True))
    phi /= phi.sum(-1, keepdims=True)
    scores = xp.einsum("btnh,bsnh->bnts", phi, xp.exp(k))
    mask = (distances(q.shape[1]) >= 0)[None] & (segments[:, :, None] == segments[:, None])
    scores = xp.where(mask[:, None], scores, 0.0)
    above = xp.einsum("bnts,bsnh->btnh", scores, v)
    return above / (scores.sum(-1).transpose(0, 2, 1)[..., None] + epsilon)


@functools.partial(jax.jit, static_argnames=("chunk", "epsilon"))
def linear(q, k, v, segments, *, chunk, epsilon=0.1):
    options = {"chunk": chunk, "epsilon": epsilon, "segments_BT": segments}
    with jax.default_matmul_precision("highest"):
        return causal_linear_attention(q, k, v, **options)[0]


@pytest.mark.parametrize(("length", "chunk"), [(1, 4), (23, 5), (24, 8)])
def test_linear_attention(length, chunk):
    q, k, v, segments = projected(length)
    actual = linear(*map(jnp.float32, (q, k, v)), segments, chunk=chunk)
    np.testing.assert_allclose(actual, linear_by_definition(q, k, v, segments, 0.1), atol=2e-6)


@pytest.mark.parametrize("causal", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_large_keys_of_one_document_do_not_touch_another(causal):
    q, k, v, _ = projected(24)
    q, k, v = map(jnp.float32, (q, k, v))
    segments = jnp.where(jnp.arange(24) < 11, 1, 2)[None].repeat(B, 0)
    far = k.at[:, 3].add(100.0)

    @jax.jit
    def run(q, k, v):
        def outputs(q, k, v):
            if not causal:
                return bidirectional_linear_attention(q, k, v, segments_BT=segments)
            return linear(q, k, v, segments, chunk=5, epsilon=1e-6)

        return jax.vjp(lambda *x: (outputs(*x) ** 2).sum(), q, k, v)[1](1.0), outputs(q, k, v)

    gradients, found = run(q, far, v)
    np.testing.assert_allclose(found[:, 11:], run(q, k, v)[1][:, 11:], atol=2e-6)
    assert all(np.isfinite(gradient).all() for gradient in gradients)


def test_gradients():
    *arrays, segments = projected(12)
    linears = (
        lambda *x: linear(*x, segments, chunk=5),
        lambda *x: linear_by_definition(*x, segments, 0.1, jnp),
    )
    softmaxes = (
        lambda *x: softmax(*x, AttentionSpec(soft_cap=5.0), block_size=5),
        lambda *x: dense(*x, distances(12)[None] >= 0, soft_cap=5.0, xp=jnp),
    )

    def gradients(outputs):
        gradient = jax.grad(lambda *x: (outputs(*x) ** 2).sum(), (0, 1, 2))
        return jax.jit(gradient)(*map(jnp.float32, arrays))

    for pair in (linears, softmaxes):
        with jax.default_matmul_precision("highest"):
            both = [gradients(outputs) for outputs in pair]
        for found, expected in zip(*both, strict=True):
            np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())


def test_bidirectional_linear_attention():
    q, k, v, segments = projected(20)
    run = jax.jit(functools.partial(bidirectional_linear_attention, segments_BT=segments))
    with jax.default_matmul_precision("highest"):
        actual = run(*map(jnp.float32, (q, k, v)))
    k, v = (np.repeat(x, N // K, axis=2) for x in (k, v))
    phi = np.exp(q) / np.exp(q).sum(-1, keepdims=True)
    same = segments[:, :, None] == segments[:, None]
    weights = same[:, :, :, None, None] * np.exp(k)[:, None]
    weights = weights / weights.sum(2, keepdims=True)  # over the tokens that t sees
    reference = np.einsum("btnh,btsnh,bsni->btni", phi, weights, v)
    np.testing.assert_allclose(actual, reference, atol=2e-6)


def test_slopes():
    assert alibi_slopes(4).tolist() == [0.25, 0.0625, 0.015625, 0.00390625]
    assert alibi_slopes(6).tolist() == [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]
    twelve = [2.0**-i for i in range(1, 9)] + [2.0**-e for e in (0.5, 1.5, 2.5, 3.5)]
    np.testing.assert_allclose(alibi_slopes(12), twelve, rtol=1e-6)
