"""Weighted sums over a history of hidden states, of which a loop says how many there are.

As depth_mixing.py, for layers that a loop walks: all states are one array, and sources are places
in it. Gradients are made by calls of their own, since the loop's backward pass is.

Legend: B sequences, T tokens, D emb_dim, H states of the history, S sources at most, R rows of
gradients; C ways, M of them with a norm; E weights of a token with filling; N = B * T.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from MaxText.layers.depth_mixing import KERNEL_WIDTHS, NO_NORMS, Axes, Norms, axes_of
from MaxText.parallelism.constraints import HIDDEN, platform, sharding_in_force

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


class Sum(NamedTuple):
    """Sums of a token's sources, one for each way.

    Attributes:
      weights: float32 [B, T, E] or, in a kernel, [N, E].
      count: int32 [], how many sources.
      factors_MD: float32, of its norms; None without.
    """

    weights: jax.Array
    count: jax.Array
    factors_MD: jax.Array | None = None


class Reading(NamedTuple):
    """What is known of a sum when the program is compiled.

    Attributes:
      num_ways: C.
      mean_count: sources, over all turns of the loop; for the compiler's estimate.
      norms: that are done along with the sums, by a kernel alone.
      kernel: whether this is a Pallas kernel, where `has_kernel` says so, or a plain loop.
    """

    num_ways: int
    mean_count: float
    norms: Norms = NO_NORMS
    kernel: bool = False


class Found(NamedTuple):
    """Gradients of a sum.

    Attributes:
      of_weights_BTE: float32, 0 behind the sources.
      of_states_RBTD: with what was there before.
      of_last_BTD: of the last source, where that has no row; else None.
      of_factors_MD: float32; None without norms.
      before: y_BTD of each way of the sum before; empty if that was not asked for.
    """

    of_weights_BTE: jax.Array
    of_states_RBTD: jax.Array
    of_last_BTD: jax.Array | None
    of_factors_MD: jax.Array | None
    before: list[jax.Array]


def has_kernel(state_BTD: jax.Array, num_sources: int) -> bool:
    """Whether such states, as each device holds them, can be summed by a kernel."""
    from MaxText.layers.history_kernel import rows_of_tile

    sharding = sharding_in_force(HIDDEN, state_BTD.shape)
    batch, length, dims = sharding.shard_shape(state_BTD.shape) if sharding else state_BTD.shape
    target = platform()
    if target not in ("cpu", "tpu") or (target == "tpu" and dims % KERNEL_WIDTHS["tpu"]):
        return False
    return rows_of_tile(batch * length, num_sources, dims * state_BTD.dtype.itemsize) is not None


def read(history_HBTD: jax.Array, sources: Sources, one: Sum, reading: Reading) -> list[jax.Array]:
    """y_c = norm_c(sum_s w_cs * x_s), in the format of the history, for each way c."""
    if not reading.kernel:
        return _read_plainly(history_HBTD, sources, one, reading)
    from MaxText.layers import history_kernel

    def run(axes, history, sources, one):
        del axes
        sums = history_kernel.forward(
            _flat_states(history),
            sources,
            _flat_sum(one),
            reading.num_ways,
            reading.norms,
            _target(),
            mean_count=reading.mean_count,
        )
        return [_as_state(y_ND, history.shape[1:]) for y_ND in sums]

    return _on_each_device(
        run,
        history_HBTD,
        lambda specs: ((specs.states, PartitionSpec(), specs.of_sum), specs.state),
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
            reading.norms,
            _target(),
            mean_count=reading.mean_count,
            before=None if before is None else _flat_sum(before),
            ways_before=0 if reading_before is None else reading_before.num_ways,
            norms_before=NO_NORMS if reading_before is None else reading_before.norms,
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
            [_as_state(y_ND, shape) for y_ND in found.before],
        )

    def specs_of(specs: "_Specs"):
        of_given = {
            "history": specs.states,
            "sources": PartitionSpec(),
            "one": specs.of_sum,
            "of_sums": specs.state,
            "accumulated": specs.states,
            "before": specs.of_sum,
        }
        state, states = specs.state, specs.states
        found: Any = (specs.weights, states, state, PartitionSpec(), state)
        return ({name: of_given[name] for name in given},), Found(*found)

    return _on_each_device(run, history_HBTD, specs_of, (given,))


class _Specs(NamedTuple):
    """Of one state, of many, of weights, and of a sum's arrays."""

    state: PartitionSpec
    states: PartitionSpec
    weights: PartitionSpec
    of_sum: Any


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
    of_sum: Any = Sum(weights, PartitionSpec(), PartitionSpec(None, dims))  # pyright: ignore
    states = PartitionSpec(None, batch, length, dims)
    of_arguments, of_result = specs_of(_Specs(sharding.spec, states, weights, of_sum))
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


def _flat_sum(one: Sum) -> Sum:
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
    return Found(of_weights_BTE, of_states_RBTD, None, None, [])


# Of float32 in float32 on every device.
_product = functools.partial(jnp.einsum, precision="highest")
