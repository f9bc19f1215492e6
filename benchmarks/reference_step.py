"""A GPT-2-like train step in plain JAX, in the fastest forms on CPU.

It is the yardstick of step_time.py: no options, no configuration, one file. Learned positions,
LayerNorm with bias, fused query-key-value, tanh GELU, tied head, AdamW with decay on everything,
clipping by global norm, causal attention in blocks of query rows.

Legend: B sequences, T tokens, D width, N heads, H head width, V vocabulary.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax


class Size(NamedTuple):
    """Sizes of a job."""

    num_layers: int
    width: int
    num_heads: int
    vocabulary: int
    length: int
    batch: int


OPTIMIZER = optax.chain(
    optax.clip_by_global_norm(1.0), optax.adamw(3e-4, 0.9, 0.95, 1e-8, weight_decay=0.1)
)
QUERY_BLOCK = 128


def initialize(size: Size, key: jax.Array) -> dict:
    """Parameters; layers stacked on a leading dimension."""
    L = size.num_layers
    D = size.width
    V = size.vocabulary
    T = size.length
    keys = iter(jax.random.split(key, 6))

    def normal(*shape):
        return 0.02 * jax.random.normal(next(keys), shape)

    norm = {"scale": jnp.ones((L, D)), "bias": jnp.zeros((L, D))}
    shapes = {"qkv": (D, 3 * D), "out": (D, D), "wi": (D, 4 * D), "wo": (4 * D, D)}
    layers = {name: normal(L, *shape) for name, shape in shapes.items()}
    layers |= {f"{name}_bias": jnp.zeros((L, shape[1])) for name, shape in shapes.items()}
    return {
        "tokens": normal(V, D),
        "positions": normal(T, D),
        "layers": {"norm1": norm, "norm2": norm, **layers},
        "norm": {"scale": jnp.ones(D), "bias": jnp.zeros(D)},
    }


def layer_norm(x, norm):
    mean = x.mean(-1, keepdims=True)
    variance = jnp.square(x - mean).mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * norm["scale"] + norm["bias"]


matmul = jax.custom_vjp(lambda x_BTI, kernel_IO: x_BTI @ kernel_IO)


def _gradients(operands, grad_BTO):
    x_BTI, kernel_IO = operands
    if kernel_IO.shape[0] <= kernel_IO.shape[1]:  # the narrower first: XLA transposes it in memory
        return grad_BTO @ kernel_IO.T, jnp.einsum("bti,bto->io", x_BTI, grad_BTO)
    return grad_BTO @ kernel_IO.T, jnp.einsum("bto,bti->oi", grad_BTO, x_BTI).T


matmul.defvjp(lambda x, kernel: (matmul(x, kernel), (x, kernel)), _gradients)


def _softmax_product(scores_BNTS, v_BNSH):
    exp_BNTS = jnp.exp(scores_BNTS - scores_BNTS.max(-1, keepdims=True))
    sum_BNT1 = exp_BNTS.sum(-1, keepdims=True)
    o_BNTH = exp_BNTS @ v_BNSH / sum_BNT1
    return o_BNTH, (exp_BNTS, sum_BNT1, o_BNTH, v_BNSH)


def _softmax_gradients(saved, grad_BNTH):  # rowsum(dO * O), not rowsum(P * dP), as FlashAttention
    exp_BNTS, sum_BNT1, o_BNTH, v_BNSH = saved
    grad_BNTH = grad_BNTH / sum_BNT1
    grad_BNTS = grad_BNTH @ v_BNSH.mT - (grad_BNTH * o_BNTH).sum(-1, keepdims=True)
    return exp_BNTS * grad_BNTS, exp_BNTS.mT @ grad_BNTH


softmax_product = jax.custom_vjp(lambda scores, v: _softmax_product(scores, v)[0])
softmax_product.defvjp(_softmax_product, _softmax_gradients)


def attention(q_BNTH, k_BNTH, v_BNTH):
    length, head = q_BNTH.shape[2:]
    q_BNTH = q_BNTH * head**-0.5
    places = jnp.arange(length)
    outputs = []
    for start in range(0, length, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, length)
        scores = jnp.einsum("bnth,bnsh->bnts", q_BNTH[:, :, start:end], k_BNTH[:, :, :end])
        scores = jnp.where(places[start:end, None] >= places[None, :end], scores, -jnp.inf)
        outputs.append(softmax_product(scores, v_BNTH[:, :, :end]))
    return jnp.concatenate(outputs, axis=2)


def block(x_BTD, layer, num_heads):
    B, T, D = x_BTD.shape
    qkv = matmul(layer_norm(x_BTD, layer["norm1"]), layer["qkv"]) + layer["qkv_bias"]
    q, k, v = qkv.reshape(B, T, 3, num_heads, D // num_heads).transpose(2, 0, 3, 1, 4)
    mixed = attention(q, k, v).transpose(0, 2, 1, 3).reshape(B, T, D)
    x_BTD = x_BTD + matmul(mixed, layer["out"]) + layer["out_bias"]
    hidden = matmul(layer_norm(x_BTD, layer["norm2"]), layer["wi"]) + layer["wi_bias"]
    return x_BTD + matmul(jax.nn.gelu(hidden), layer["wo"]) + layer["wo_bias"]


def _cross_entropy(logits_BTV, targets_BT):
    log_z_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
    target_BT = jnp.take_along_axis(logits_BTV, targets_BT[..., None], axis=-1)[..., 0]
    return log_z_BT - target_BT, (logits_BTV, targets_BT, log_z_BT)


def _logits_gradient(operands, grad_BT):  # without a scatter into [B, T, V]
    logits_BTV, targets_BT, log_z_BT = operands
    is_target_BTV = jnp.arange(logits_BTV.shape[-1]) == targets_BT[..., None]
    return (jnp.exp(logits_BTV - log_z_BT[..., None]) - is_target_BTV) * grad_BT[..., None], None


cross_entropy = jax.custom_vjp(lambda logits, targets: _cross_entropy(logits, targets)[0])
cross_entropy.defvjp(_cross_entropy, _logits_gradient)


def loss_function(params, tokens_BT, targets_BT, size: Size, scan: bool):
    x_BTD = params["tokens"][tokens_BT] + params["positions"]
    if scan:
        keep = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        remat_block = functools.partial(block, num_heads=size.num_heads)
        remat_block = jax.checkpoint(remat_block, prevent_cse=False, policy=keep)
        x_BTD, _ = jax.lax.scan(
            lambda x, layer: (remat_block(x, layer), None), x_BTD, params["layers"]
        )
    else:
        for layer in params["layers"]:
            x_BTD = block(x_BTD, layer, size.num_heads)
    logits_BTV = matmul(layer_norm(x_BTD, params["norm"]), params["tokens"].T)
    return cross_entropy(logits_BTV, targets_BT).mean()


def make_step(size: Size, *, scan: bool):
    """(params, moments, batch) -> the next, loss, and norm."""

    def step(params, moments, tokens_BT, targets_BT):
        loss, gradients = jax.value_and_grad(loss_function)(
            params, tokens_BT, targets_BT, size, scan
        )
        updates, moments = OPTIMIZER.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments, loss, optax.tree.norm(gradients)

    return jax.jit(step, donate_argnums=(0, 1))


def init_state(size: Size, *, scan: bool):
    """(params, moments); without scan, layers are a list of dicts."""
    params = jax.jit(initialize, static_argnums=0)(size, jax.random.key(0))
    if not scan:
        leaves, treedef = jax.tree.flatten(params["layers"])
        params["layers"] = [treedef.unflatten(layer) for layer in zip(*leaves, strict=True)]
    return params, OPTIMIZER.init(params)


def flops(size: Size) -> float:
    """FLOPs of one training step: matmuls, causal half of attention, times 3."""
    L = size.num_layers
    D = size.width
    T = size.length
    matrices = L * 12 * D * D + size.vocabulary * D
    return 6.0 * size.batch * T * (matrices + L * T * D)
