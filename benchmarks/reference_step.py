"""A GPT-2-like train step in plain JAX, in the fastest forms on CPU.

It is the yardstick of step_time.py: no options, no configuration, one file. Learned positions,
LayerNorm with bias, fused query-key-value, tanh GELU, tied head, AdamW with decay on everything,
clipping by global norm, causal attention in blocks of query rows.

Legend: B sequences, T tokens, D width, N heads, H head width, V vocabulary.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Size(NamedTuple):
    """Sizes of a job."""

    num_layers: int
    width: int
    num_heads: int
    vocabulary: int
    length: int
    batch: int


LEARNING_RATE, BETA1, BETA2, EPSILON, DECAY, CLIP = 3e-4, 0.9, 0.95, 1e-8, 0.1, 1.0
QUERY_BLOCK = 128


def initialize(size: Size, key: jax.Array) -> dict:
    """Parameters; layers stacked on a leading dimension."""
    L, D, V, T = size.num_layers, size.width, size.vocabulary, size.length
    keys = iter(jax.random.split(key, 6))

    def normal(*shape):
        return 0.02 * jax.random.normal(next(keys), shape)

    norm = {"scale": jnp.ones((L, D)), "bias": jnp.zeros((L, D))}
    layers = {
        "norm1": norm,
        "norm2": norm,
        "qkv": normal(L, D, 3 * D),
        "qkv_bias": jnp.zeros((L, 3 * D)),
        "out": normal(L, D, D),
        "out_bias": jnp.zeros((L, D)),
        "wi": normal(L, D, 4 * D),
        "wi_bias": jnp.zeros((L, 4 * D)),
        "wo": normal(L, 4 * D, D),
        "wo_bias": jnp.zeros((L, D)),
    }
    return {
        "tokens": normal(V, D),
        "positions": normal(T, D),
        "layers": layers,
        "norm": {"scale": jnp.ones(D), "bias": jnp.zeros(D)},
    }


def layer_norm(x, norm):
    mean = x.mean(-1, keepdims=True)
    variance = jnp.square(x - mean).mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * norm["scale"] + norm["bias"]


def attention(q_BNTH, k_BNTH, v_BNTH):
    length, head = q_BNTH.shape[2:]
    q_BNTH = q_BNTH * head**-0.5
    places = jnp.arange(length)
    outputs = []
    for start in range(0, length, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, length)
        scores = jnp.einsum("bnth,bnsh->bnts", q_BNTH[:, :, start:end], k_BNTH[:, :, :end])
        scores = jnp.where(places[start:end, None] >= places[None, :end], scores, -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1)
        outputs.append(jnp.einsum("bnts,bnsh->bnth", weights, v_BNTH[:, :, :end]))
    return jnp.concatenate(outputs, axis=2)


def block(x_BTD, layer, num_heads):
    B, T, D = x_BTD.shape
    qkv = layer_norm(x_BTD, layer["norm1"]) @ layer["qkv"] + layer["qkv_bias"]
    q, k, v = qkv.reshape(B, T, 3, num_heads, D // num_heads).transpose(2, 0, 3, 1, 4)
    mixed = attention(q, k, v).transpose(0, 2, 1, 3).reshape(B, T, D)
    x_BTD = x_BTD + mixed @ layer["out"] + layer["out_bias"]
    hidden = layer_norm(x_BTD, layer["norm2"]) @ layer["wi"] + layer["wi_bias"]
    return x_BTD + jax.nn.gelu(hidden) @ layer["wo"] + layer["wo_bias"]


def loss_function(params, tokens_BT, targets_BT, size: Size, scan: bool):
    x_BTD = params["tokens"][tokens_BT] + params["positions"]
    if scan:
        one = jax.checkpoint(lambda x, layer: block(x, layer, size.num_heads), prevent_cse=False)
        x_BTD, _ = jax.lax.scan(lambda x, layer: (one(x, layer), None), x_BTD, params["layers"])
    else:
        for layer in params["layers"]:
            x_BTD = block(x_BTD, layer, size.num_heads)
    x_BTD = layer_norm(x_BTD, params["norm"])
    logits_BTV = x_BTD @ params["tokens"].T
    target = jnp.take_along_axis(logits_BTV, targets_BT[..., None], axis=-1)[..., 0]
    return (jax.nn.logsumexp(logits_BTV, axis=-1) - target).mean()


def make_step(size: Size, *, scan: bool):
    """(params, moments, count, batch) -> the next, loss, and norm.

    With scan=False `params["layers"]` is a list of one dict per layer.
    """

    def step(params, moments, count, tokens_BT, targets_BT):
        loss, gradients = jax.value_and_grad(loss_function)(
            params, tokens_BT, targets_BT, size, scan
        )
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(gradients)))
        factor = jnp.minimum(1.0, CLIP / norm)
        count = count + 1
        correction1 = 1 - BETA1**count
        correction2 = 1 - BETA2**count

        def update(p, g, m, v):
            g = g * factor
            m = BETA1 * m + (1 - BETA1) * g
            v = BETA2 * v + (1 - BETA2) * g * g
            direction = (m / correction1) / (jnp.sqrt(v / correction2) + EPSILON)
            return p - LEARNING_RATE * (direction + DECAY * p), m, v

        out = jax.tree.map(update, params, gradients, moments[0], moments[1])
        pick = lambda i: jax.tree.map(lambda t: t[i], out, is_leaf=lambda t: isinstance(t, tuple))  # noqa: E731
        return pick(0), (pick(1), pick(2)), count, loss, norm

    return jax.jit(step, donate_argnums=(0, 1, 2))


def init_state(size: Size, *, scan: bool):
    """(params, moments, count) to start from."""
    params = jax.jit(initialize, static_argnums=0)(size, jax.random.key(0))
    if not scan:
        layers = params["layers"]
        params["layers"] = [
            jax.tree.map(lambda x: x[i], layers)  # noqa: B023
            for i in range(size.num_layers)
        ]
    zeros = lambda: jax.tree.map(jnp.zeros_like, params)  # noqa: E731
    return params, (zeros(), zeros()), jnp.zeros((), jnp.int32)


def flops(size: Size) -> float:
    """FLOPs of one training step: matmuls, causal half of attention, times 3."""
    L, D, T = size.num_layers, size.width, size.length
    tokens = size.batch * T
    matrices = L * 12 * D * D + size.vocabulary * D
    return 6.0 * tokens * matrices + 12.0 * L * tokens * T * D / 2
