"""Gated DeltaNet against its recurrence in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.layers.context import ForwardContext
from MaxText.layers.recurrent.chunks import Chunks
from MaxText.layers.recurrent.gated_delta_net import DeltaInputs, delta_rule

B, T, M, N, K, V = 2, 48, 2, 4, 8, 6
SEGMENTS = np.array([[1] * 20 + [2] * 28, [1] * 3 + [2] * 30 + [3] * 15])


@pytest.fixture(scope="module")
def inputs():
    """Keys that repeat, values of b up to 2, decays from 1 to e^-20."""
    draw = np.random.default_rng(0)
    q, k = draw.normal(size=(2, B, T, M, K))
    k[:, 1::3] = k[:, ::3]
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    log_a = -np.exp(draw.uniform(-7, 3, size=(B, T, N)))
    v = draw.normal(size=(B, T, N, V))
    beta = 2 * draw.random(size=(B, T, N))
    return q, k, v, beta, log_a


@pytest.fixture(scope="module")
def memory():
    return np.random.default_rng(1).normal(size=(B, N, K, V))


def recurrence(inputs, memory, segments):
    """The formulas of the module, token by token, in float64."""
    q, k, v, beta, log_a = inputs
    q, k = (np.repeat(x, N // M, axis=2) for x in (q, k))
    o = np.empty_like(v)
    for t in range(T):
        if t:
            memory = memory * (segments[:, t] == segments[:, t - 1])[:, None, None, None]
        memory = np.exp(log_a[:, t])[..., None, None] * memory
        answer = np.einsum("bnkv,bnk->bnv", memory, k[:, t])
        change = beta[:, t][..., None] * (v[:, t] - answer)
        memory = memory + k[:, t, :, :, None] * change[:, :, None]
        o[:, t] = np.einsum("bnkv,bnk->bnv", memory, q[:, t])
    return o, memory


@pytest.mark.parametrize(("num_parts", "size"), [(1, 1), (1, 13), (1, 64), (3, 8), (4, 5)])
def test_chunks_and_parts_compute_the_recurrence(inputs, memory, num_parts, size):
    chunks = Chunks(T, num_parts, min(size, T // num_parts))
    context = ForwardContext(segments_BT=jnp.asarray(SEGMENTS))
    given = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), (DeltaInputs(*inputs), memory))
    run = jax.jit(lambda inputs, memory: delta_rule(inputs, memory, context, chunks, None))
    found, last = run(*given)
    expected, expected_last = recurrence(inputs, memory, SEGMENTS)
    for actual, reference in ((found, expected), (last, expected_last)):
        np.testing.assert_allclose(actual, reference, atol=1e-5 * np.abs(reference).max())
