"""Ring attention and attention in parts equal softmax attention over whole sequences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from MaxText.layers.attention.attention_core import (
    AttentionSharding,
    AttentionSpec,
    dot_product_attention,
)
from MaxText.layers.attention.ring_attention import (
    _Ring,
    ring_attention,
    ring_unsupported_reason,
)
from tests.layers.attention_ideas import IDEAS

pytestmark = pytest.mark.multi_device

B, T, N, H = 2, 32, 4, 8
SLOPES = jnp.asarray([0.5, 0.25, 0.1, 0.05], jnp.float32)
# name -> (key/value heads, spec, other arguments)
CASES = {
    "causal, not balanced": (2, {}, {"balanced": False}),
    "causal, documents, ALiBi, cap, blocks": (
        2,
        {"slopes_N": SLOPES, "soft_cap": 3.0},
        {"documents": True, "block_size": 2},
    ),
    "causal, memories, one key head, blocks": (1, {}, {"memories": 3, "block_size": 4}),
    "bidirectional, documents, ALiBi, memories": (
        2,
        {"slopes_N": SLOPES, "scale": 1.0},
        {"causal": False, "documents": True, "memories": 2, "block_size": 4},
    ),
    "a window of less than a part": (2, {"window": 5}, {}),
    "a window of some parts": (2, {"window": 11}, {"documents": True}),
    "a window of more than all parts": (2, {"window": 40}, {"block_size": 4}),
    "a wide window to both sides": (2, {"window": 15}, {"causal": False}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_same_outputs_and_gradients(name):
    num_kv_heads, scores, other = CASES[name]
    other = {"causal": True, "documents": False, "memories": 0, "balanced": True} | other
    generator = np.random.default_rng(0)
    drawn = lambda *shape: generator.normal(size=shape).astype(np.float32)  # noqa: E731
    q_BTNH, k_BTKH, v_BTKH = (drawn(B, T, heads, H) for heads in (N, num_kv_heads, num_kv_heads))
    spec = AttentionSpec(causal=other["causal"], **scores)
    segments_BT = kept = None
    if other["documents"]:
        segments_BT = jnp.asarray(np.sort(generator.integers(0, 4, (B, T)), axis=1))
    if count := other["memories"]:
        kept = (drawn(count, num_kv_heads, H), drawn(count, num_kv_heads, H))
    weights_BTNH = drawn(B, T, N, H)
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("context", "tensor"))
    heads = PartitionSpec(None, "context", "tensor", None)
    query_sharding = NamedSharding(mesh, heads)
    whole = PartitionSpec(None, "context", None, None)
    key_sharding = NamedSharding(mesh, heads if num_kv_heads % 2 == 0 else whole)
    sharding = AttentionSharding(query_sharding, key_sharding)
    given = {"segments_BT": segments_BT, "block_size": other.get("block_size")}

    def ring(q, k, v, kept):
        own = {"persistent_kv": kept, "balanced": other["balanced"]}
        return ring_attention(q, k, v, spec, sharding, **own, **given)

    def in_parts(q, k, v, kept):
        q = jax.lax.with_sharding_constraint(q, query_sharding)
        return dot_product_attention(q, k, v, spec, persistent_kv=kept, num_parts=4, **given)

    def whole_sequences(q, k, v, kept):
        return dot_product_attention(q, k, v, spec, persistent_kv=kept, segments_BT=segments_BT)

    def numbers(function):
        def weighted(*arrays):
            o_BTNH = function(*arrays)
            return (o_BTNH * weights_BTNH).sum(), o_BTNH

        graded = jax.jit(jax.grad(weighted, argnums=(0, 1, 2, 3), has_aux=True))
        return jax.block_until_ready(graded(q_BTNH, k_BTKH, v_BTKH, kept))

    expected = numbers(whole_sequences)
    for function in (ring, in_parts):
        found = numbers(function)
        for actual, reference in zip(
            jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
        ):
            np.testing.assert_allclose(actual, reference, atol=1e-5)


IN_A_RING = [name for name in IDEAS if name not in ("softpick", "selective")]


@pytest.mark.parametrize("name", IN_A_RING)
def test_hooks_and_sinks(name):
    """With memories, documents, fewer and wider values, and heads on two devices."""
    idea = IDEAS[name]
    generator = np.random.default_rng(0)

    def drawn(*shape):
        return generator.normal(size=shape).astype(np.float32)

    arrays = (drawn(B, T, N, H), drawn(B, T, 2, H), drawn(B, T, 1, 5))
    memories = (drawn(3, 2, H), drawn(3, 2, 5))
    segments_BT = jnp.asarray(np.sort(generator.integers(0, 3, (B, T)), axis=1))
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("context", "tensor"))
    by_head = NamedSharding(mesh, PartitionSpec(None, "context", "tensor", None))
    sharding = AttentionSharding(by_head, by_head)
    weights_BTNW = drawn(B, T, N, 5)

    def numbers(in_ring):
        def weighted(parameter, memories, q, k, v):
            spec = AttentionSpec(**idea.spec(parameter))
            assert ring_unsupported_reason(spec) is None
            given = {"segments_BT": segments_BT, "persistent_kv": memories, "block_size": 4}
            if in_ring:
                o = ring_attention(q, k, v, spec, sharding, **given)
            else:
                v = jnp.repeat(v, 2, axis=2)
                o = dot_product_attention(q, k, v, spec, **given)
            return (o * weights_BTNW).sum(), o

        graded = jax.jit(jax.grad(weighted, argnums=(0, 1, 2, 3, 4), has_aux=True))
        parameter = jnp.float32(0) if idea.parameter is None else jnp.asarray(idea.parameter)
        return jax.block_until_ready(graded(parameter, memories, *arrays))

    found = numbers(True)
    for actual, reference in zip(
        jax.tree.leaves(found), jax.tree.leaves(numbers(False)), strict=True
    ):
        np.testing.assert_allclose(actual, reference, atol=2e-5)


def test_copies_and_blocks_are_no_more_than_needed():
    for window, copies in ((None, 3), (9, 1), (10, 2)):
        ring = _Ring(AttentionSpec(window=window), ("context",), 4, 8, True, None)
        assert len(ring.steps) == copies + 1
    for length, asked, blocks in ((24, 5, 6), (24, None, 2), (24, 100, 2)):
        ring = _Ring(AttentionSpec(), ("context",), 4, length, True, asked)
        assert ring.num_blocks == blocks


def test_bfloat16_adds_up_in_float32():
    mesh = Mesh(np.array(jax.devices()), ("context",))
    split = NamedSharding(mesh, PartitionSpec(None, "context", None, None))
    sharding = AttentionSharding(split, split)
    generator = np.random.default_rng(0)
    q, k, v = (jnp.asarray(generator.normal(size=(1, 64, 2, 8)), jnp.bfloat16) for _ in range(3))
    found = jax.jit(lambda *given: ring_attention(*given, AttentionSpec(), sharding))(q, k, v)
    exact = dot_product_attention(*(x.astype(jnp.float32) for x in (q, k, v)), AttentionSpec())
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(found.astype(np.float32), exact, atol=0.02)
