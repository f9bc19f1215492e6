"""Kimi Delta Attention against its recurrence in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.layers.context import ForwardContext
from MaxText.layers.recurrent.chunks import Chunks
from MaxText.layers.recurrent.gated_delta_net import DeltaInputs
from MaxText.layers.recurrent.kda import channelwise_delta_rule

B, T, N, K, V = 2, 72, 2, 8, 6
SEGMENTS = np.array([[1] * 20 + [2] * 52, [1] * 3 + [2] * 30 + [3] * 39])


@pytest.fixture(scope="module")
def inputs():
    """Keys that repeat, b up to 2, and channels that forget at once beside ones that never do."""
    draw = np.random.default_rng(0)
    q, k = draw.normal(size=(2, B, T, N, K))
    k[:, 1::3] = k[:, ::3]
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    log_a = -np.exp(draw.uniform(-7, 7, size=(B, T, N, K)))
    log_a[..., 0] = 0
    v = draw.normal(size=(B, T, N, V))
    beta = 2 * draw.random(size=(B, T, N))
    return q, k, v, beta, log_a


@pytest.fixture(scope="module")
def memory():
    return np.random.default_rng(1).normal(size=(B, N, K, V))


def recurrence(inputs, memory):
    """The formulas of the module, token by token, in the dtype of the inputs."""
    q, k, v, beta, log_a = inputs
    outputs = []
    for t in range(T):
        is_same = SEGMENTS[:, t] == SEGMENTS[:, max(t - 1, 0)]
        memory = memory * is_same[:, None, None, None]
        memory = np.exp(log_a[:, t])[..., None] * memory
        answer = np.einsum("bnkv,bnk->bnv", memory, k[:, t])
        change = beta[:, t][..., None] * (v[:, t] - answer)
        memory = memory + k[:, t, :, :, None] * change[:, :, None]
        outputs.append(np.einsum("bnkv,bnk->bnv", memory, q[:, t]))
    return np.stack(outputs, axis=1), memory


def in_float32(inputs, memory):
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), (DeltaInputs(*inputs), memory))


@pytest.mark.parametrize(("num_parts", "size"), [(1, 1), (1, 13), (1, 64), (3, 8), (4, 18)])
def test_chunks_and_parts_compute_the_recurrence(inputs, memory, num_parts, size):
    chunks = Chunks(T, num_parts, size)
    context = ForwardContext(segments_BT=jnp.asarray(SEGMENTS))
    run = jax.jit(
        lambda inputs, memory: channelwise_delta_rule(inputs, memory, context, chunks, None)
    )
    found = run(*in_float32(inputs, memory))
    for actual, reference in zip(found, recurrence(inputs, memory), strict=True):
        np.testing.assert_allclose(actual, reference, atol=1e-5 * np.abs(reference).max())


def test_gradients_are_those_of_single_tokens(inputs, memory):
    """Through blocks of every kind, documents and strong decays."""
    context = ForwardContext(segments_BT=jnp.asarray(SEGMENTS))
    weights = np.random.default_rng(2).normal(size=(B, T, N, V)).astype(np.float32)

    def gradients(size):
        def loss(inputs, memory):
            chunks = Chunks(T, 1, size)
            o, last = channelwise_delta_rule(inputs, memory, context, chunks, None)
            return jnp.sum(o * weights) + jnp.sum(last)

        return jax.tree.leaves(jax.jit(jax.grad(loss, (0, 1)))(*in_float32(inputs, memory)))

    for chunked, by_token in zip(gradients(64), gradients(1), strict=True):
        assert np.isfinite(chunked).all()
        np.testing.assert_allclose(chunked, by_token, atol=1e-5 * np.abs(by_token).max())
