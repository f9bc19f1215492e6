"""Weighted sums over a history of hidden states, of which a loop says how many there are.

As depth_mixing.py, for layers that a loop walks: all states are one array, and sources are places
in it. Gradients are made by calls of their own, since the loop's backward pass is.

Legend: B sequences, T tokens, D emb_dim, H states of the history, S sources at most, R rows of
gradients; C ways, M of them with a norm; E weights of a token with filling; K hidden width of what
makes these weights; N = B * T.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from MaxText.layers.depth_mixing import (
    KERNEL_WIDTHS,
    NO_NORMS,
    Axes,
    Norms,
    axes_of,
    chip_memory,
)
from MaxText.parallelism.constraints import HIDDEN, device_kind, platform, sharding_in_force

_REGISTER = 128  # numbers side by side in a TPU's register


def num_lanes(num_sources: int, num_ways: int) -> int:
    """E: a token's weights, w_cs at `s * padded(num_ways) + c`, in whole registers."""
    return -(-num_sources * padded(num_ways) // _REGISTER) * _REGISTER


def padded(num_ways: int) -> int:
    """Lanes of a source's weights: a power of two, so that no register ends within them."""
    return 1 << (num_ways - 1).bit_length()


class Sources(NamedTuple):
    """What a sum reads, as the running program knows it.

    Attributes:
      count: int32 [], how many states.
      places_S: int32, which; what stands behind `count` is not read.
      rows_S: int32, of their gradients.
    """

    count: jax.Array
    places_S: jax.Array
    rows_S: jax.Array


class Product(NamedTuple):
    """What weights are made of.

    Attributes:
      product_BTK: x W1, float32.
      inverse_rms_BT1: r, the inverse of rms(x), float32.
    """

    product_BTK: jax.Array
    inverse_rms_BT1: jax.Array


class Making(NamedTuple):
    """What a kernel makes weights with: act(r x W1) W2 + fixed, as history_weights.TokenWeights.

    Attributes:
      wi_DK: in the format of states.
      wo_KE: the same.
      fixed_E: float32.
      place: int32 [], of the state x among the sources.
    """

    wi_DK: jax.Array
    wo_KE: jax.Array
    fixed_E: jax.Array
    place: jax.Array


class Sum(NamedTuple):
    """Sums of a token's sources, one for each way.

    Attributes:
      weights: float32 [B, T, E] or, in a kernel, [N, E]; or what that makes them with.
      count: int32 [], how many sources.
      factors_MD: float32, of its norms; None without.
    """

    weights: jax.Array | Making
    count: jax.Array
    factors_MD: jax.Array | None = None


class Recipe(NamedTuple):
    """What is known of weights that a kernel makes when the program is compiled.

    Attributes:
      activation: one of history_tiles.ON_CHIP.
      epsilon: of rms(x).
      precision: of products.
    """

    activation: str
    epsilon: float
    precision: Any


class Reading(NamedTuple):
    """What is known of a sum when the program is compiled.

    Attributes:
      num_ways: C.
      mean_count: sources, over all turns of the loop; for the compiler's estimate.
      norms: that are done along with the sums, by a kernel alone.
      kernel: whether this is a Pallas kernel, where `has_kernel` says so, or a plain loop.
      recipe: of weights that the kernel makes, where `makes_weights` says that it can.
    """

    num_ways: int
    mean_count: float
    norms: Norms = NO_NORMS
    kernel: bool = False
    recipe: Recipe | None = None


class Read(NamedTuple):
    """A sum.

    Attributes:
      sums: y_BTD of each way, in the format of the history.
      product: of weights that were made along with it, if that was asked for.
    """

    sums: list[jax.Array]
    product: Product | None = None


class Found(NamedTuple):
    """Gradients of a sum.

    Attributes:
      of_weights_BTE: float32, 0 behind the sources.
      of_states_RBTD: with what was there before.
      of_last_BTD: of the last source, where that has no row; else None.
      of_factors_MD: float32; None without norms.
      before: the sum before, and what its weights are made of if the kernel made them; no sums if
        that was not asked for.
    """

    of_weights_BTE: jax.Array
    of_states_RBTD: jax.Array
    of_last_BTD: jax.Array | None
    of_factors_MD: jax.Array | None
    before: Read


def has_kernel(state_BTD: jax.Array, num_sources: int, num_ways: int) -> bool:
    """Whether such states, as each device holds them, can be summed by a kernel."""
    from MaxText.layers.history_kernel import rows_of_tile

    sharding = sharding_in_force(HIDDEN, state_BTD.shape)
    batch, length, dims = sharding.shard_shape(state_BTD.shape) if sharding else state_BTD.shape
    target = platform()
    if target not in ("cpu", "tpu") or (target == "tpu" and dims % KERNEL_WIDTHS["tpu"]):
        return False
    bytes_of_state = dims * state_BTD.dtype.itemsize
    return rows_of_tile(batch * length, num_sources, num_ways, bytes_of_state) is not None


def makes_weights(state_BTD: jax.Array, recipe: Recipe, hidden_width: int) -> bool:
    """Whether a kernel can make weights itself.

    Each device needs all dimensions of its tokens, and has room for W1 beside a tile. Mosaic has no
    products in float16, nor those of precision "high".
    """
    from MaxText.layers.history_tiles import ON_CHIP

    sharding = sharding_in_force(HIDDEN, state_BTD.shape)
    whole = sharding is None or not axes_of(sharding).dims
    dtype, lanes = state_BTD.dtype, -(-hidden_width // _REGISTER) * _REGISTER
    fits = state_BTD.shape[-1] * lanes * dtype.itemsize <= chip_memory(device_kind()).limit // 16
    has_product = dtype in (jnp.bfloat16, jnp.float32) and recipe.precision != "high"
    return whole and fits and has_product and recipe.activation in ON_CHIP


def read(
    history_HBTD: jax.Array, sources: Sources, one: Sum, reading: Reading, *, product: bool = False
) -> Read:
    """y_c = norm_c(sum_s w_cs * x_s) for each way c.

    Args:
      product: whether to return what weights are made of, where the kernel makes them.
    """
    if not reading.kernel:
        return Read(_read_plainly(history_HBTD, sources, one, reading))
    from MaxText.layers import history_kernel

    def run(axes, history, sources, one):
        del axes
        shape = history.shape[1:]
        found = history_kernel.forward(
            _flat_states(history),
            sources,
            _flat_sum(one),
            reading,
            _target(),
            product=product,
        )
        return _as_read(found, shape)

    return _on_each_device(
        run,
        history_HBTD,
        lambda specs: (
            (specs.states, PartitionSpec(), specs.of_sum(one)),
            Read(specs.state, specs.weights),
        ),
        (history_HBTD, sources, one),
    )


def differentiate(
    history_HBTD: jax.Array,
    sources: Sources,
    one: Sum,
    of_sums: list[jax.Array],
    accumulated_RBTD: jax.Array | None,
    reading: Reading,
    *,
    before: Sum | None = None,
    reading_before: Reading | None = None,
) -> Found:
    """Gradients of `read`, added in place to those that the sources have already.

    Args:
      of_sums: gradients of what `read` returned.
      accumulated_RBTD: gradients of states so far. None, for a kernel: there are none, all
        of `places_S` are read, and source s has row s of the result, the last one none.
      before: a sum over the first of these sources, for a kernel to make again from the same read.
    """
    if not reading.kernel:
        assert before is None
        assert accumulated_RBTD is not None
        return _differentiate_plainly(
            history_HBTD, sources, one, of_sums, accumulated_RBTD, reading
        )
    from MaxText.layers import history_kernel

    given: dict[str, Any] = {
        "history": history_HBTD,
        "sources": sources,
        "one": one,
        "of_sums": of_sums,
    }
    if accumulated_RBTD is not None:
        given["accumulated"] = accumulated_RBTD
    if before is not None:
        given["before"] = before

    def run(axes, given):
        shape = given["history"].shape[1:]
        before = given.get("before")
        old = given.get("accumulated")
        found = history_kernel.backward(
            _flat_states(given["history"]),
            given["sources"],
            _flat_sum(given["one"]),
            [g.reshape(-1, shape[-1]) for g in given["of_sums"]],
            None if old is None else _flat_states(old),
            reading,
            _target(),
            before=None if before is None else _flat_sum(before),
            reading_before=reading_before,
        )
        # A device that holds some of the dimensions, or some of the tokens, has that part of
        # what is summed over them.
        of_weights_NE, of_factors_MD = found.of_weights_NE, found.of_factors_MD
        of_last_ND = found.of_last_ND
        if axes.dims:
            of_weights_NE = jax.lax.psum(of_weights_NE, axes.dims)
        if of_factors_MD is not None and axes.tokens:
            of_factors_MD = jax.lax.psum(of_factors_MD, axes.tokens)
        return Found(
            of_weights_NE.reshape(*shape[:2], -1),
            found.of_states_RND.reshape(-1, *shape),
            None if of_last_ND is None else _as_state(of_last_ND, shape),
            of_factors_MD,
            _as_read(found.before, shape),
        )

    def specs_of(specs: "_Specs"):
        of_given = {
            "history": specs.states,
            "sources": PartitionSpec(),
            "one": specs.of_sum(one),
            "of_sums": specs.state,
            "accumulated": specs.states,
            "before": None if before is None else specs.of_sum(before),
        }
        state, states = specs.state, specs.states
        of_before = Read(state, specs.weights)
        found: Any = (specs.weights, states, state, PartitionSpec(), of_before)
        return ({name: of_given[name] for name in given},), Found(*found)

    return _on_each_device(run, history_HBTD, specs_of, (given,))


class _Specs(NamedTuple):
    """Of one state, of many, and of weights or what they are made of."""

    state: Any
    states: PartitionSpec
    weights: Any

    def of_sum(self, one: Sum) -> Any:
        """Of a sum's arrays."""
        weights = PartitionSpec() if isinstance(one.weights, Making) else self.weights
        return Sum(weights, PartitionSpec(), PartitionSpec(None, self.state[-1]))  # pyright: ignore


def _on_each_device(run, history_HBTD: jax.Array, specs_of, arguments) -> Any:
    """run(axes, *arguments) on each device's share: the compiler cannot divide a kernel itself.

    Args:
      specs_of: _Specs -> those of all arguments, and of the result.
    """
    sharding = sharding_in_force(HIDDEN, history_HBTD.shape[1:])
    if sharding is None:
        return run(Axes(), *arguments)
    batch, length, dims = sharding.spec
    weights = PartitionSpec(batch, length)
    states = PartitionSpec(None, batch, length, dims)
    of_arguments, of_result = specs_of(_Specs(sharding.spec, states, weights))
    return jax.shard_map(
        functools.partial(run, axes_of(sharding)),
        mesh=sharding.mesh,
        in_specs=of_arguments,
        out_specs=of_result,
        check_vma=False,
    )(*arguments)


def _target():
    return "tpu" if platform() == "tpu" else "interpret"


def _flat_states(x: jax.Array) -> jax.Array:
    """[H, B, T, D] -> [H, N, D]."""
    return x.reshape(x.shape[0], -1, x.shape[-1])


def _as_state(y_ND: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """[N, D] -> [B, T, D], of what a kernel made."""
    y_BTD = y_ND.reshape(shape)
    if platform() == "tpu":
        # Or the compiler converts to float32 before it reshapes, which it then writes to memory.
        y_BTD = jax.lax.optimization_barrier(y_BTD)
    return y_BTD


def _as_read(found: Read, shape: tuple[int, ...]) -> Read:
    product = jax.tree.map(lambda x: x.reshape(*shape[:2], -1), found.product)
    return Read([_as_state(y_ND, shape) for y_ND in found.sums], product)


def _flat_sum(one: Sum) -> Sum:
    if isinstance(one.weights, Making):
        return one
    return one._replace(weights=one.weights.reshape(-1, one.weights.shape[-1]))


def _of_source(weights_BTE: jax.Array, s: jax.Array, num_ways: int) -> jax.Array:
    """[B, T, C] weights of a source."""
    lanes = padded(num_ways)
    return jax.lax.dynamic_slice_in_dim(weights_BTE, s * lanes, lanes, axis=2)[..., :num_ways]


def _state(history_HBTD: jax.Array, place: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(history_HBTD, place, keepdims=False).astype(jnp.float32)


def _read_plainly(history_HBTD, sources, one, reading):
    def add(s, sums):
        x_BTD = _state(history_HBTD, sources.places_S[s])
        weights_BTC = _of_source(one.weights, s, reading.num_ways)
        return [y_BTD + weights_BTC[..., c, None] * x_BTD for c, y_BTD in enumerate(sums)]

    zeros = jnp.zeros(history_HBTD.shape[1:], jnp.float32)
    sums = jax.lax.fori_loop(0, one.count, add, [zeros] * reading.num_ways)
    return [y_BTD.astype(history_HBTD.dtype) for y_BTD in sums]


def _differentiate_plainly(history_HBTD, sources, one, of_sums, accumulated_RBTD, reading):
    of_sums_CBTD = jnp.stack([g.astype(jnp.float32) for g in of_sums])
    lanes = padded(reading.num_ways)
    filling = lanes - reading.num_ways

    def add(s, carry):
        of_weights_BTE, accumulated_RBTD = carry
        x_BTD = _state(history_HBTD, sources.places_S[s])
        of_source_BTC = _product("cbtd,btd->btc", of_sums_CBTD, x_BTD)
        of_source_BTC = jnp.pad(of_source_BTC, ((0, 0), (0, 0), (0, filling)))
        of_weights_BTE = jax.lax.dynamic_update_slice_in_dim(
            of_weights_BTE, of_source_BTC, s * lanes, axis=2
        )
        row = sources.rows_S[s]
        new_BTD = _product(
            "btc,cbtd->btd", _of_source(one.weights, s, reading.num_ways), of_sums_CBTD
        )
        new_BTD = (new_BTD + _state(accumulated_RBTD, row)).astype(accumulated_RBTD.dtype)
        return of_weights_BTE, jax.lax.dynamic_update_index_in_dim(
            accumulated_RBTD, new_BTD, row, 0
        )

    first = (jnp.zeros_like(one.weights), accumulated_RBTD)
    of_weights_BTE, of_states_RBTD = jax.lax.fori_loop(0, sources.count, add, first)
    return Found(of_weights_BTE, of_states_RBTD, None, None, Read([]))


# Of float32 in float32 on every device.
_product = functools.partial(jnp.einsum, precision="highest")
