"""Softmax attention with several options at once: outputs and gradients by definition."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.layers.attention.attention_core import AttentionSpec, dot_product_attention

B, N, K, H = 2, 6, 2, 5  # three query heads read each key and value head
SLOPES = np.array([0.6, 0.5, 0.4, 0.3, 0.2, 0.1], np.float32)


def by_definition(q, k, v, memory_key, memory_value, spec, segments):
    """One query head at a time, with all keys; memories come first, at distance 0."""
    length, num_memories = q.shape[1], len(memory_key)
    distance = jnp.arange(length)[:, None] - jnp.arange(length)
    mask = segments[:, :, None] == segments[:, None, :]
    if spec.causal:
        mask &= distance >= 0
    if spec.window is not None:
        mask &= (distance < spec.window) & (distance >= -spec.window)
    mask = jnp.pad(mask, ((0, 0), (0, 0), (num_memories, 0)), constant_values=True)
    distance = jnp.pad(jnp.abs(distance), ((0, 0), (num_memories, 0)))
    heads = []
    for head in range(N):
        group = head // (N // K)
        keys, values = (
            jnp.concatenate([jnp.tile(memory[None, :, group], (B, 1, 1)), x[:, :, group]], axis=1)
            for memory, x in ((memory_key, k), (memory_value, v))
        )
        scores = jnp.einsum("bth,bsh->bts", q[:, :, head], keys)
        scores *= H**-0.5 if spec.scale is None else spec.scale
        if spec.soft_cap:
            scores = spec.soft_cap * jnp.tanh(scores / spec.soft_cap)
        if spec.slopes_N is not None:
            scores -= spec.slopes_N[head] * distance
        weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)
        heads.append(jnp.einsum("bts,bsh->bth", weights, values))
    return jnp.stack(heads, axis=2)


@pytest.mark.parametrize(
    ("length", "block_size", "num_memories", "packed", "spec"),
    [
        (21, 8, 2, True, {"slopes_N": SLOPES}),
        (21, None, 2, False, {"slopes_N": SLOPES, "causal": False, "soft_cap": 2.0}),
        (40, 8, 0, True, {"window": 3, "scale": 0.7, "soft_cap": 2.0}),  # in blocks of 16
        (60, None, 3, True, {"window": 16, "slopes_N": SLOPES}),
        (60, None, 1, False, {"window": 7, "causal": False, "scale": 1.0}),
        (21, 8, 0, False, {"window": 30, "scale": 0.2, "slopes_N": SLOPES, "soft_cap": 1.0}),
    ],
)
def test_outputs_and_gradients(length, block_size, num_memories, packed, spec):
    draw = np.random.default_rng(0).normal
    shapes = [(B, length, heads, H) for heads in (N, K, K)] + [(num_memories, K, H)] * 2
    arrays = [jnp.float32(draw(size=shape)) for shape in shapes]
    cuts = np.array([[length // 3, length // 2], [1, length - 2]])
    segments = 1 + (np.arange(length) >= cuts[:, :, None]).sum(1)
    spec = AttentionSpec(**spec)

    def attention(q, k, v, *memories):
        return dot_product_attention(
            q,
            k,
            v,
            spec,
            segments_BT=jnp.asarray(segments) if packed else None,
            persistent_kv=memories if num_memories else None,
            block_size=block_size,
        )

    expected_segments = segments if packed else np.ones_like(segments)
    definition = functools.partial(by_definition, spec=spec, segments=expected_segments)

    @jax.jit
    def both(arrays):
        grad_o = jnp.float32(draw(size=arrays[0].shape))
        found = []
        for function in (attention, definition):
            o, vjp = jax.vjp(function, *arrays)
            found.append((o, *vjp(grad_o)))
        return found

    with jax.default_matmul_precision("highest"):
        found, expected = both(arrays)
    for got, wanted in itertools.zip_longest(found, expected):
        np.testing.assert_allclose(got, wanted, atol=2e-5 * max(np.abs(wanted).max(initial=0), 1))
