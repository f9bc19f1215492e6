"""Mamba-2's state space against its recurrence in float64.

Golden vectors of its families hold the mixer as a whole (tests/conversion/test_family_vectors.py).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.layers.context import ForwardContext
from MaxText.layers.recurrent.chunks import Chunks
from MaxText.layers.recurrent.mamba2 import StateSpaceInputs, state_space_dual

B, T, G, N, H, S = 2, 48, 2, 6, 4, 5
SEGMENTS = np.array([[1] * 20 + [2] * 28, [1] * 3 + [2] * 30 + [3] * 15])


@pytest.fixture(scope="module")
def inputs():
    """Decays from 1 to e^-50: no ratio of products of them may overflow."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(B, T, N, H))
    keys, queries = draw.normal(size=(2, B, T, G, S))
    dt = np.exp(draw.uniform(-7, 2, size=(B, T, N)))
    return x, keys, queries, dt, -dt * np.arange(1, N + 1)


@pytest.fixture(scope="module")
def memory():
    return np.random.default_rng(1).normal(size=(B, N, S, H))


def recurrence(inputs, memory, segments):
    """The formulas of the module, token by token, in float64."""
    x, keys, queries, dt, log_decay = inputs
    keys, queries = (np.repeat(array, N // G, axis=2) for array in (keys, queries))
    y = np.empty_like(x)
    for t in range(T):
        if t:
            memory = memory * (segments[:, t] == segments[:, t - 1])[:, None, None, None]
        written = dt[:, t, :, None, None] * keys[:, t, ..., None] * x[:, t, :, None]
        memory = np.exp(log_decay[:, t])[..., None, None] * memory + written
        y[:, t] = np.einsum("bnsh,bns->bnh", memory, queries[:, t])
    return y, memory


@pytest.mark.parametrize(("num_parts", "size"), [(1, 1), (1, 13), (1, 64), (4, 5)])
def test_chunks_and_parts_compute_the_recurrence(inputs, memory, num_parts, size):
    chunks = Chunks(T, num_parts, min(size, T // num_parts))
    context = ForwardContext(segments_BT=jnp.asarray(SEGMENTS))
    given = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), (StateSpaceInputs(*inputs), memory))
    run = jax.jit(
        lambda inputs, memory: state_space_dual(inputs, memory, chunks, context, precision=None)
    )
    found, last = run(*given)
    expected, expected_last = recurrence(inputs, memory, SEGMENTS)
    for actual, reference in ((found, expected), (last, expected_last)):
        np.testing.assert_allclose(actual, reference, atol=1e-5 * np.abs(reference).max())
