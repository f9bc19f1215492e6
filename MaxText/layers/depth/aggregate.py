"""Depth-wise aggregation of dense connections, with its gradients.

The cost is the memory traffic of the sources. Each aggregation passes its sources on, so that their
gradients come back through the same chain: those of an aggregation are added to those of later
ones, one read and one write for all streams.

There are two forms with the same result: sums of arrays, which XLA fuses, and a kernel (kernel.py).

Legend: B sequences, T tokens, D emb_dim, C streams, S sources, N = B * T tokens, K = C * S weights
of a token, M streams with a norm.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from MaxText.layers.depth.norms import NO_NORMS, Norms, chip_memory
from MaxText.layers.lowering.fusion import compute_once
from MaxText.layers.lowering.gradient_barriers import Gradient, is_zero
from MaxText.parallelism.logical_sharding import HIDDEN, current_sharding, platform, split_axes
from MaxText.value_types import PyTree

# Arrays by the name of an operand or a gradient; those of the sources are a list.
ArraysByName = dict[str, Any]
Result = TypeVar("Result")  # of a kernel: a tree of arrays
_Gradients = list[Gradient]

KERNEL_TOKENS = 16  # with fewer (as in decoding) a kernel's tile is not full
KERNEL_WIDTH = 128  # must divide emb_dim


def vmem_bytes_per_token(num_sources: int, num_streams: int, bytes_of_state: int) -> int:
    """Returns the largest VMEM per token of a kernel's tile, in bytes.

    Args:
      num_sources: S.
      num_streams: C.
      bytes_of_state: Size of one token's hidden state.
    """
    # Sources and gradients in and out, double-buffered; as much per stream; and weights.
    return 6 * (num_sources + num_streams) * bytes_of_state + 1120 * num_sources


def kernel_unsupported_reason(
    emb_dim: int, backend: str, *, bytes_per_token: int = 0, device_kind: str = ""
) -> str | None:
    """Returns why the kernel cannot be used, or None.

    Args:
      emb_dim: D.
      backend: "cpu", "gpu" or "tpu".
      bytes_per_token: From `vmem_bytes_per_token`.
      device_kind: Of a TPU, as JAX names it.
    """
    if backend != "tpu":
        return "the kernel is for TPU only"
    if emb_dim % KERNEL_WIDTH:
        return f"emb_dim {emb_dim} is not a multiple of {KERNEL_WIDTH}"
    # An eighth is for buffers that do not grow with tokens, and for the compiler's own.
    needed = KERNEL_TOKENS * bytes_per_token
    limit = chip_memory(device_kind) * 7 // 8
    if needed > limit:
        return f"{KERNEL_TOKENS} tokens take {needed >> 20} of {limit >> 20} MiB of VMEM"
    return None


def supports_fused_norms(form: str, state_BTD: jax.Array) -> bool:
    """Returns whether `aggregate` can fuse norms, which saves XLA passes over the sums.

    Only the kernel does. A device has to hold whole hidden states, and full tiles of tokens, as
    gradients of norms are sums over tokens.
    """
    shard_shape = state_BTD.shape
    sharding = current_sharding(HIDDEN, state_BTD.shape)
    if sharding is not None:
        shard_shape = sharding.shard_shape(state_BTD.shape)
    batch, length, emb_dim = shard_shape
    is_full = batch * length % KERNEL_TOKENS == 0
    return form == "kernel" and is_full and emb_dim == state_BTD.shape[2]


class _Operands(NamedTuple):
    """What sums are computed from."""

    weights_BTCS: jax.Array  # float32
    sources: list[jax.Array]  # x_BTD each
    scales_SD: jax.Array | None
    factors_MD: jax.Array | None  # of fused norms

    def by_name(self) -> ArraysByName:
        """Returns the operands of a kernel, without those that are None."""
        arrays = {
            "weights": self.weights_BTCS,
            "sources": self.sources,
            "scales": self.scales_SD,
            "factors": self.factors_MD,
        }
        return {name: array for name, array in arrays.items() if array is not None}


def aggregate(
    weights_BTCS: jax.Array,
    sources: Sequence[jax.Array],
    form: str,
    *,
    scales_SD: jax.Array | None = None,
    norms: Norms = NO_NORMS,
    factors_MD: jax.Array | None = None,
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Computes y_c = sum_s weights[..., c, s] * scale_s * source_s.

    Args:
      weights_BTCS: Float32. B and T are 1 for static weights.
      sources: x_BTD each.
      form: "sum" (or "auto"), or "kernel" (Pallas, interpreted on CPU).
      scales_SD: Learned scales of the sources. They get gradients through `scale_grad_only`, not
        through this function.
      norms: To fuse with the sums, if `supports_fused_norms` allows it.
      factors_MD: Learned factors of the norms.

    Returns:
      y_BTD of each stream in the dtype of the sources, and the sources for later layers.
    """
    batch, length = sources[0].shape[:2]
    weights_BTCS = jnp.broadcast_to(weights_BTCS, (batch, length, *weights_BTCS.shape[2:]))
    if form != "kernel" or batch * length < KERNEL_TOKENS:
        form = "sum"
    operands = _Operands(weights_BTCS, list(sources), scales_SD, factors_MD)
    return _aggregate(form, norms, operands)  # pyright: ignore[reportReturnType]


@jax.custom_gradient
def scale_grad_only(x_BTD: jax.Array, scale_D: jax.Array) -> Any:
    """Returns x, and takes gradients with respect to scale * x from here on.

    All aggregations share the scale, so both gradients are computed once, from the accumulated one.
    """

    def backward(gradient_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the gradients with respect to x and scale, from that to scale * x."""
        gradient_BTD = gradient_BTD.astype(jnp.float32)
        grad_scale_D = jnp.sum(gradient_BTD * x_BTD.astype(jnp.float32), axis=(0, 1))
        return (scale_D * gradient_BTD).astype(x_BTD.dtype), grad_scale_D

    return x_BTD, backward


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _aggregate(
    form: str, norms: Norms, operands: _Operands
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Returns the sums, and the sources as they are."""
    if form == "kernel":
        return _kernel(norms, operands), operands.sources
    assert not norms.streams
    sums = _sum(operands.weights_BTCS, operands.sources, operands.scales_SD)
    return compute_once(sums), operands.sources


def _aggregate_forward(
    form: str, norms: Norms, perturbed: _Operands
) -> tuple[tuple[list[jax.Array], list[jax.Array]], _Operands]:
    """Returns the results of `_aggregate`, and the operands as residuals."""
    # With symbolic zeros, leaves are pairs (value, perturbed).
    operands = jax.tree.map(lambda x: x.value, perturbed)
    return _aggregate(form, norms, operands), operands


def _aggregate_backward(
    form: str, norms: Norms, operands: _Operands, gradients: tuple[_Gradients, _Gradients]
) -> tuple[_Operands]:
    """Returns the gradients of the operands.

    Args:
      form: "sum" or "kernel".
      norms: Fused with the sums.
      operands: Residuals from the forward pass.
      gradients: Those of the sums, y_BTD of each stream, and those of the sources that were passed
        on, accumulated by later layers. Either may be symbolic zeros.

    Returns:
      A 1-tuple, as custom_vjp asks for. The gradients of sources are the accumulated ones plus
      those of the sums; scales have none, since `scale_grad_only` gives them theirs.
    """
    grad_sums, accumulated = gradients
    grad_sums = [_array(gradient) for gradient in grad_sums]
    if all(map(is_zero, accumulated)):
        accumulated = None  # the last aggregation that reads these sources
    else:
        accumulated = [_array(gradient) for gradient in accumulated]
    if form == "kernel":
        kernel_operands = operands.by_name() | {"grad_sums": grad_sums}
        if accumulated is not None:
            kernel_operands["accumulated"] = accumulated
        grads = _kernel_gradients(norms, kernel_operands)
        grad_weights_BTCS = grads["grad_weights"]
        grad_sources = grads["grad_sources"]
        grad_factors_MD = grads.get("grad_factors")
    else:
        differentiate = _product_gradients if platform() == "cpu" else _sum_gradients
        grad_weights_BTCS, grad_sources = differentiate(
            operands.weights_BTCS,
            operands.sources,
            operands.scales_SD,
            compute_once(grad_sums),
            accumulated,
        )
        grad_factors_MD = None
    # None stands for no gradient.
    return (_Operands(grad_weights_BTCS, grad_sources, None, grad_factors_MD),)


_aggregate.defvjp(_aggregate_forward, _aggregate_backward, symbolic_zeros=True)


def _array(gradient: Gradient) -> jax.Array:
    """Returns a gradient as an array, also if it is a symbolic zero."""
    if is_zero(gradient):
        return jnp.zeros(gradient.aval.shape, gradient.aval.dtype)
    return gradient


def _to_f32(arrays: Sequence[jax.Array], scales_SD: jax.Array | None = None) -> Sequence[jax.Array]:
    """Returns arrays in float32, each multiplied by its scale if there are scales."""
    floats = [x.astype(jnp.float32) for x in arrays]
    if scales_SD is None:
        return floats
    return [scale_D * x for scale_D, x in zip(scales_SD, floats, strict=True)]


def _sum(
    weights_BTCS: jax.Array, sources: Sequence[jax.Array], scales_SD: jax.Array | None
) -> list[jax.Array]:
    """Returns y_BTD of each stream."""
    floats = _to_f32(sources, scales_SD)
    sums = []
    for c in range(weights_BTCS.shape[2]):
        terms = (weights_BTCS[:, :, c, s, None] * x_BTD for s, x_BTD in enumerate(floats))
        sums.append(functools.reduce(jnp.add, terms).astype(sources[0].dtype))
    return sums


def _sum_gradients(
    weights_BTCS: jax.Array,
    sources: Sequence[jax.Array],
    scales_SD: jax.Array | None,
    grad_sums: Sequence[jax.Array],
    accumulated: Sequence[jax.Array] | None,
) -> tuple[jax.Array, list[jax.Array]]:
    """Returns gradients of `_sum`.

    Args:
      weights_BTCS: Of `_sum`.
      sources: Of `_sum`.
      scales_SD: Of `_sum`.
      grad_sums: Gradients of the sums, [B, T, D] of each stream.
      accumulated: Gradients of each source so far, to which those of this sum are added.

    Returns:
      Those of weights [B, T, C, S]; and those of each source, with respect to scale * x.
    """
    floats = _to_f32(sources, scales_SD)
    grad_floats = _to_f32(grad_sums)
    grad_weights_BTCS = jnp.stack(
        [
            jnp.stack([jnp.sum(grad_BTD * x_BTD, axis=-1) for x_BTD in floats], axis=-1)
            for grad_BTD in grad_floats
        ],
        axis=-2,
    )
    grad_sources = []
    for s, source in enumerate(sources):
        terms = (weights_BTCS[:, :, c, s, None] * grad for c, grad in enumerate(grad_floats))
        grad_source = functools.reduce(jnp.add, terms)
        grad_sources.append(_accumulate(grad_source, accumulated, s, source.dtype))
    return grad_weights_BTCS, grad_sources


def _product_gradients(
    weights_BTCS: jax.Array,
    sources: Sequence[jax.Array],
    scales_SD: jax.Array | None,
    grad_sums: Sequence[jax.Array],
    accumulated: Sequence[jax.Array] | None,
) -> tuple[jax.Array, list[jax.Array]]:
    """Computes `_sum_gradients` by matmuls, in 0.6 of the time on CPU."""
    grad_sums_BTCD = jnp.stack(_to_f32(grad_sums), axis=2)
    grad_weights = []
    grad_sources = []
    for s, x_BTD in enumerate(_to_f32(sources, scales_SD)):
        grad_weights.append(_product("btcd,btd->btc", grad_sums_BTCD, x_BTD))
        grad_source = _product("btc,btcd->btd", weights_BTCS[..., s], grad_sums_BTCD)
        grad_sources.append(_accumulate(grad_source, accumulated, s, sources[s].dtype))
    return jnp.stack(grad_weights, axis=-1), grad_sources


_product = functools.partial(jnp.einsum, precision="highest")  # float32 on every device


def _accumulate(
    gradient_BTD: jax.Array, accumulated: Sequence[jax.Array] | None, source: int, dtype: DTypeLike
) -> jax.Array:
    """Adds the gradient of a source to that so far, and rounds the result to `dtype`."""
    if accumulated is not None:
        gradient_BTD = gradient_BTD + accumulated[source].astype(jnp.float32)
    return gradient_BTD.astype(dtype)


def _kernel(norms: Norms, operands: _Operands) -> list[jax.Array]:
    """Returns y_BTD of each stream by the kernel."""
    from MaxText.layers.depth import kernel  # here, as Pallas takes a second to import

    def run(arrays: ArraysByName, **_: Sequence[str]) -> list[jax.Array]:
        sums = kernel.forward(_flat(arrays), norms, interpret=platform() != "tpu")
        return [y_ND.reshape(arrays["sources"][0].shape) for y_ND in sums]

    return _shard_map(run, lambda state, _: state, operands.by_name())


def _kernel_gradients(norms: Norms, operands: ArraysByName) -> ArraysByName:
    """Returns gradients by the kernel, as kernel.backward names them, of unflattened shapes."""
    from MaxText.layers.depth import kernel

    def run(
        arrays: ArraysByName, token_axes: Sequence[str] = (), dim_axes: Sequence[str] = ()
    ) -> ArraysByName:
        grads = kernel.backward(_flat(arrays), norms, interpret=platform() != "tpu")
        # Sums over sharded dimensions or tokens are partial on each device.
        if dim_axes:
            grads["grad_weights"] = jax.lax.psum(grads["grad_weights"], dim_axes)
        if norms.streams and token_axes:
            grads["grad_factors"] = jax.lax.psum(grads["grad_factors"], token_axes)
        grads["grad_weights"] = grads["grad_weights"].reshape(arrays["weights"].shape)
        shape = arrays["sources"][0].shape
        return grads | {"grad_sources": [x_ND.reshape(shape) for x_ND in grads["grad_sources"]]}

    def specs(state: PartitionSpec, weights: PartitionSpec) -> dict[str, PartitionSpec]:
        """Returns the shardings of the results, from those of a source and of weights."""
        specs = {"grad_weights": weights, "grad_sources": state}
        if norms.streams:
            specs["grad_factors"] = PartitionSpec()
        return specs

    return _shard_map(run, specs, operands)


def _flat(arrays: ArraysByName) -> ArraysByName:
    """Joins B and T to N, and C and S to K."""
    return jax.tree.map(
        lambda x: x if x.ndim == 2 else x.reshape(x.shape[0] * x.shape[1], -1), arrays
    )


def _shard_map(
    run: Callable[..., Result],
    result_specs: Callable[[PartitionSpec, PartitionSpec], PyTree],
    operands: ArraysByName,
) -> Result:
    """Runs a kernel on each device's shards, since XLA cannot partition it.

    Args:
      run: (operands) -> results; also gets the mesh axes of tokens and of D as `token_axes` and
        `dim_axes` where arrays are sharded.
      result_specs: (spec of a source, spec of weights) -> specs of the results.
      operands: By name; all others than weights, scales and factors are sharded as sources.
    """
    sharding = current_sharding(HIDDEN, operands["sources"][0].shape)
    if sharding is None:
        return run(operands)
    state = sharding.spec
    batch, length, dims = state
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
