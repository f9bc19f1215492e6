"""Depth-wise aggregation of dense connections, with its gradients.

The cost is the memory traffic of the sources. Each aggregation passes its sources on, so that their
gradients come back through the same chain: those of an aggregation are added to those of later
ones, one read and one write for all streams.

Legend: C streams, S sources, N = B * T tokens, K = C * S weights, M streams with a norm.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from MaxText.layers.lowering.fusion import compute_once
from MaxText.layers.lowering.gradient_barriers import is_zero
from MaxText.parallelism.logical_sharding import HIDDEN, current_sharding, platform, split_axes

KERNEL_TOKENS = 16  # with fewer (as in decoding) a kernel's tile is not full
KERNEL_WIDTH = 128  # must divide emb_dim


def chip_memory(device_kind: str) -> int:
    """Returns the bytes of VMEM per TPU core available to a kernel."""
    # 64 MiB or more from v5 on (TpuInfo.vmem_capacity_bytes of Pallas).
    return (16 if device_kind.startswith(("TPU v2", "TPU v3", "TPU v4")) else 64) * 2**20


def vmem_bytes_per_token(num_sources: int, num_streams: int, bytes_of_state: int) -> int:
    """Returns the largest VMEM per token of a kernel's tile, in bytes."""
    # Sources and gradients in and out, double-buffered; as much per stream; and weights.
    return 6 * (num_sources + num_streams) * bytes_of_state + 1120 * num_sources


def kernel_unsupported_reason(
    emb_dim: int, backend: str, *, bytes_per_token: int = 0, device_kind: str = ""
) -> str | None:
    if backend != "tpu":
        return "the kernel is for TPU only"
    if emb_dim % KERNEL_WIDTH:
        return f"emb_dim {emb_dim} is not a multiple of {KERNEL_WIDTH}"
    # The rest is for buffers that do not grow with tokens, and for the compiler's own.
    needed = KERNEL_TOKENS * bytes_per_token
    limit = chip_memory(device_kind) * 7 // 8
    if needed > limit:
        return f"{KERNEL_TOKENS} tokens take {needed >> 20} of {limit >> 20} MiB of VMEM"
    return None


class Norms(NamedTuple):
    """RMS norms to fuse: y / sqrt(mean(y^2) + eps) * factor."""

    streams: tuple[int, ...] = ()  # indices of the normalized streams
    epsilon: float = 0.0


NO_NORMS = Norms()


def supports_fused_norms(form: str, state_BTD: jax.Array) -> bool:
    """Returns whether `aggregate` can fuse norms and save XLA passes."""
    sharding = current_sharding(HIDDEN, state_BTD.shape)
    batch, length, dims = sharding.shard_shape(state_BTD.shape) if sharding else state_BTD.shape
    whole = dims == state_BTD.shape[2]
    # Tiles must be full, as gradients of norms are sums over tokens.
    return form == "kernel" and batch * length % KERNEL_TOKENS == 0 and whole


def aggregate(
    weights_BTCS: jax.Array,  # float32; B and T are 1 for static weights
    sources: Sequence[jax.Array],  # x_BTD each; scales get gradients through `scale_grad_only`
    form: str,  # "sum" (or "auto"), or "kernel" (Pallas, interpreted on CPU); same result
    *,
    scales_SD: jax.Array | None = None,
    norms: Norms = NO_NORMS,  # to fuse with the sums, if `supports_fused_norms` allows it
    factors_MD: jax.Array | None = None,
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Computes y_c = sum_s weights[..., c, s] * scale_s * source_s.

    Returns y_BTD of each stream in the dtype of the sources, and the sources for later layers.
    """
    batch, length = sources[0].shape[:2]
    weights_BTCS = jnp.broadcast_to(weights_BTCS, (batch, length, *weights_BTCS.shape[2:]))
    if form != "kernel" or batch * length < KERNEL_TOKENS:
        form = "sum"
    return _aggregate(form, norms, weights_BTCS, list(sources), scales_SD, factors_MD)  # pyright: ignore


@jax.custom_gradient
def scale_grad_only(x_BTD: jax.Array, scale_D: jax.Array) -> Any:
    """Returns x, and takes gradients with respect to scale * x from here on.

    All aggregations share the scale, so both gradients are computed once, from the accumulated one.
    """

    def backward(gradient_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        gradient_BTD = gradient_BTD.astype(jnp.float32)
        grad_scale_D = jnp.sum(gradient_BTD * x_BTD.astype(jnp.float32), axis=(0, 1))
        return (scale_D * gradient_BTD).astype(x_BTD.dtype), grad_scale_D

    return x_BTD, backward


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _aggregate(form, norms, weights_BTCS, sources, scales_SD, factors_MD):
    if form == "kernel":
        return _kernel(norms, weights_BTCS, sources, scales_SD, factors_MD), sources
    assert not norms.streams
    return compute_once(_sum(weights_BTCS, sources, scales_SD)), sources


def _aggregate_forward(form, norms, *arguments):
    arguments = jax.tree.map(lambda x: x.value, arguments)  # pairs (value, perturbed)
    return _aggregate(form, norms, *arguments), arguments


def _aggregate_backward(form, norms, residuals, gradients):
    weights_BTCS, sources, scales_SD, factors_MD = residuals
    grad_sums, accumulated = gradients
    grad_sums = [_array(g) for g in grad_sums]
    added = None if all(map(is_zero, accumulated)) else [*map(_array, accumulated)]
    if form != "kernel":
        differentiate = _product_gradients if platform() == "cpu" else _sum_gradients
        grads = differentiate(weights_BTCS, sources, scales_SD, compute_once(grad_sums), added)
        return *grads, None, None
    operands = _operands(weights_BTCS, sources, scales_SD, factors_MD) | {"grad_sums": grad_sums}
    if added is not None:
        operands["accumulated"] = added
    grads = _kernel_gradients(norms, operands)
    return grads["grad_weights"], grads["grad_sources"], None, grads.get("grad_factors")


_aggregate.defvjp(_aggregate_forward, _aggregate_backward, symbolic_zeros=True)


def _array(gradient: Any) -> jax.Array:
    if is_zero(gradient):
        return jnp.zeros(gradient.aval.shape, gradient.aval.dtype)
    return gradient


def _to_f32(arrays, scales_SD=None):
    floats = [x.astype(jnp.float32) for x in arrays]
    if scales_SD is None:
        return floats
    return [scale * x for scale, x in zip(scales_SD, floats, strict=True)]


def _sum(weights_BTCS, sources, scales_SD):
    floats = _to_f32(sources, scales_SD)
    sums = []
    for c in range(weights_BTCS.shape[2]):
        terms = (weights_BTCS[:, :, c, s, None] * x for s, x in enumerate(floats))
        sums.append(functools.reduce(jnp.add, terms).astype(sources[0].dtype))
    return sums


def _sum_gradients(weights_BTCS, sources, scales_SD, grad_sums, accumulated):
    floats = _to_f32(sources, scales_SD)
    grad_sums = _to_f32(grad_sums)
    grad_weights_BTCS = jnp.stack(
        [jnp.stack([jnp.sum(g * x, axis=-1) for x in floats], axis=-1) for g in grad_sums], axis=-2
    )
    new = []
    for s in range(len(sources)):
        terms = (weights_BTCS[:, :, c, s, None] * g for c, g in enumerate(grad_sums))
        new.append(_accumulated(functools.reduce(jnp.add, terms), accumulated, sources, s))
    return grad_weights_BTCS, new


def _product_gradients(weights_BTCS, sources, scales_SD, grad_sums, accumulated):
    """Computes `_sum_gradients` by matmuls, in 0.6 of the time on CPU."""
    grad_sums_BTCD = jnp.stack(_to_f32(grad_sums), axis=2)
    grad_weights = []
    new = []
    for s, x_BTD in enumerate(_to_f32(sources, scales_SD)):
        grad_weights.append(_product("btcd,btd->btc", grad_sums_BTCD, x_BTD))
        total = _product("btc,btcd->btd", weights_BTCS[..., s], grad_sums_BTCD)
        new.append(_accumulated(total, accumulated, sources, s))
    return jnp.stack(grad_weights, axis=-1), new


_product = functools.partial(jnp.einsum, precision="highest")  # float32 on every device


def _accumulated(total, accumulated, sources, s):
    if accumulated is not None:
        total = total + accumulated[s].astype(jnp.float32)
    return total.astype(sources[s].dtype)


def _operands(weights, sources, scales, factors) -> dict[str, Any]:
    operands = {"weights": weights, "sources": sources, "scales": scales, "factors": factors}
    return {name: x for name, x in operands.items() if x is not None}


def _kernel(norms, weights_BTCS, sources, scales_SD, factors_MD):
    from MaxText.layers.depth import (
        depth_aggregate_kernel,  # here, as Pallas takes a second to import
    )

    def run(operands, **_):
        sums = depth_aggregate_kernel.forward(_flat(operands), norms, interpret=platform() != "tpu")
        return [y_ND.reshape(operands["sources"][0].shape) for y_ND in sums]

    operands = _operands(weights_BTCS, sources, scales_SD, factors_MD)
    return _shard_map(run, lambda state, _: state, operands)


def _kernel_gradients(norms, operands):
    from MaxText.layers.depth import depth_aggregate_kernel

    def run(operands, token_axes=(), dim_axes=()):
        grads = depth_aggregate_kernel.backward(
            _flat(operands), norms, interpret=platform() != "tpu"
        )
        # Sums over sharded dimensions or tokens are partial on each device.
        if dim_axes:
            grads["grad_weights"] = jax.lax.psum(grads["grad_weights"], dim_axes)
        if norms.streams and token_axes:
            grads["grad_factors"] = jax.lax.psum(grads["grad_factors"], token_axes)
        grads["grad_weights"] = grads["grad_weights"].reshape(operands["weights"].shape)
        shape = operands["sources"][0].shape
        return grads | {"grad_sources": [x.reshape(shape) for x in grads["grad_sources"]]}

    def specs(state, weights):
        specs = {"grad_weights": weights, "grad_sources": state}
        return specs | ({"grad_factors": PartitionSpec()} if norms.streams else {})

    return _shard_map(run, specs, operands)


def _flat(operands: dict[str, Any]) -> dict[str, Any]:
    return jax.tree.map(
        lambda x: x if x.ndim == 2 else x.reshape(x.shape[0] * x.shape[1], -1), operands
    )


def _shard_map(run, result_specs, operands: dict[str, Any]) -> Any:
    """Runs a kernel on each device's shards, since XLA cannot partition it."""
    sharding = current_sharding(HIDDEN, operands["sources"][0].shape)
    if sharding is None:
        return run(operands)
    batch, length, dims = state = sharding.spec
    token_axes = (*split_axes(sharding, 0), *split_axes(sharding, 1))
    weights = PartitionSpec(batch, length)
    rows = PartitionSpec(None, dims)
    specs = {"weights": weights, "scales": rows, "factors": rows}
    return jax.shard_map(
        functools.partial(run, token_axes=token_axes, dim_axes=split_axes(sharding, 2)),
        mesh=sharding.mesh,
        in_specs=({name: specs.get(name, state) for name in operands},),
        out_specs=result_specs(state, weights),
        check_vma=False,
    )(operands)
