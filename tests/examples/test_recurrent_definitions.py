"""The example mixers with a state against their formulas, token by token in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.layers.assembly.model import Model
from MaxText.layers.context import ForwardContext
from tests.small_models import tiny_config

B, T, D, N, H = 2, 22, 32, 4, 8
# Documents begin within chunks, at their starts, and twice within one.
DOCUMENTS = np.array([[1] * 3 + [2] * 13 + [3] * 6, [1] * 4 + [2] + [3] * 17])


def mixer_and_weights(**keys):
    """A mixer with random weights, these in float64, and an input."""
    config = tiny_config(base_num_decoder_layers=1, feed_forward_type="none", **keys)
    model, generator = Model(config.model), np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: jnp.float32(generator.normal(size=leaf.shape, scale=0.6)), model.abstract
    )
    one = jax.tree.map(lambda leaf: leaf[0], params["layers"])
    mixer = model.merge({**params, "layers": one}).layers.self_attention
    weights = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), one["self_attention"])
    return mixer, weights, generator.normal(size=(B, T, D)).astype("f")


def linear(x, weights, name):
    num_contracted = 2 if name == "out" else 1
    return np.tensordot(x, weights[name]["kernel"], num_contracted) + weights[name].get("bias", 0)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def previous(x):
    """The token before, of the same document."""
    before = np.zeros_like(x)
    same = DOCUMENTS[:, 1:] == DOCUMENTS[:, :-1]
    before[:, 1:] = x[:, :-1] * same[..., None]
    return before


def states(update, shape):
    """Yields t and the state of each sequence after t, from that before, empty in new documents."""
    state = np.zeros(shape)
    for t in range(T):
        if t:
            state = state * (DOCUMENTS[:, t] == DOCUMENTS[:, t - 1])[:, None, None, None]
        state = update(t, state)
        yield t, state


def agree(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("chunk", [5, 64])
def test_gated_linear_attention(chunk):
    keys = {"import_modules": ["examples/gla.py"], "mixer": "gla", "gla_chunk": chunk}
    mixer, w, x = mixer_and_weights(**keys, gla_rank=3, gla_temperature=4.0)
    context = ForwardContext(segments_BT=jnp.asarray(DOCUMENTS))
    actual, _ = jax.jit(lambda x: mixer(x, context))(x)

    q, k, v, z = (linear(x, w, name) for name in ("query", "key", "value", "gate"))
    a = sigmoid(linear(linear(x, w, "decay_down"), w, "decay")) ** (1 / 4)

    def update(t, S):
        return a[:, t, :, :, None] * S + k[:, t, :, :, None] * v[:, t, :, None]

    o = np.zeros(v.shape)
    for t, S in states(update, (B, N, H, H)):
        o[:, t] = np.einsum("bnkv,bnk->bnv", S, q[:, t]) / np.sqrt(H)
    o = o / np.sqrt(np.mean(o**2, -1, keepdims=True) + 1e-5) * w["norm"]["scale"]
    agree(actual, linear(o * z * sigmoid(z), w, "out"))


@pytest.mark.parametrize(("chunk", "layer"), [(5, 0), (64, 1)])
def test_rwkv7(chunk, layer):
    mixer, w, x = mixer_and_weights(
        import_modules=["examples/rwkv7.py"],
        connection_type="first_values",
        mixer="rwkv7",
        rwkv_chunk=chunk,
        rwkv_decay_rank=3,
        rwkv_rate_rank=4,
        rwkv_value_rank=5,
        rwkv_gate_rank=6,
    )
    first = np.random.default_rng(1).normal(size=(B, T, N, H)).astype("f")

    def run(x):
        shared = {"first_values": jnp.asarray(first)}
        context = ForwardContext(segments_BT=jnp.asarray(DOCUMENTS), layer=layer, shared=shared)
        y, _ = mixer(x, context)
        return y, shared["first_values"]

    actual, first_after = jax.jit(run)(x)

    shifted = [x + (previous(x) - x) * mu for mu in w["shifts"]]
    xr, xw, xk, xv, xa, xg = shifted
    r, k, v = linear(xr, w, "receptance"), linear(xk, w, "key"), linear(xv, w, "value")
    agree(first_after, v if layer == 0 else first)
    share = sigmoid(w["value_bias"] + linear(linear(xv, w, "value_down"), w, "value_share"))
    v = v + (np.where(layer == 0, v, first) - v) * share
    decay = w["decay_bias"] + linear(np.tanh(linear(xw, w, "decay_down")), w, "decay")
    decay = np.exp(-np.exp(-0.5) * sigmoid(decay))
    a = sigmoid(w["rate_bias"] + linear(linear(xa, w, "rate_down"), w, "rate"))
    gate = linear(sigmoid(linear(xg, w, "gate_down")), w, "gate")
    n = k * w["removed_key"]
    n = n / np.sqrt(np.sum(n**2, -1, keepdims=True) + 1e-6)
    k = k * (1 + (a - 1) * w["added_key"])

    def update(t, S):
        answer = np.einsum("bnkv,bnk->bnv", S, n[:, t])
        removed = (a * n)[:, t, :, :, None] * answer[:, :, None]
        return decay[:, t, :, :, None] * S - removed + k[:, t, :, :, None] * v[:, t, :, None]

    o = np.zeros(v.shape)
    for t, S in states(update, (B, N, H, H)):
        o[:, t] = np.einsum("bnkv,bnk->bnv", S, r[:, t])
    o = o - o.mean(-1, keepdims=True)
    o = o / np.sqrt(np.mean(o**2, -1, keepdims=True) + 1e-5 * H)
    o = o * w["norm_scale"] + w["norm_bias"]
    o = o + np.sum(r * k * w["bonus"], -1, keepdims=True) * v
    agree(actual, linear(o * gate, w, "out"))


def test_channel_mix_of_rwkv7():
    mixer, w, x = mixer_and_weights(import_modules=["examples/rwkv7.py"], mixer="rwkv7_channel_mix")
    context = ForwardContext(segments_BT=jnp.asarray(DOCUMENTS))
    actual, _ = mixer(x, context)
    shifted = x + (previous(x) - x) * w["shift"]
    agree(actual, np.maximum(shifted @ w["into"]["kernel"], 0) ** 2 @ w["out"]["kernel"])
