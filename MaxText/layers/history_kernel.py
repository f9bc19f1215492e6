"""Sums over depth inside a loop over layers, as Pallas kernels for TPU (Mosaic).

All hidden states are one array, the history, and the loop says which of them a sum reads: how many
there are is known when the program runs. A kernel copies those, and no others, of a tile of tokens
onto the chip, and the next tile's meanwhile; then each one is there for all ways, for norms, for
gradients, and for the sum of the layer before.

Legend: N tokens of all sequences, D emb_dim, H states of the history, S sources at most, R rows of
gradients; C ways, of which M have a norm; E lanes of the weights of a token, C * S and filling; K
hidden width of what makes these weights.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from MaxText.layers.depth_mixing import NO_NORMS, Norms, bytes_of_token, chip_memory
from MaxText.layers.depth_reading import (
    Making,
    Product,
    Read,
    Reading,
    Sources,
    Sum,
    padded,
)
from MaxText.layers.history_tiles import backward_tile, forward_tile
from MaxText.layers.mixing_kernel import MAX_CHUNK, TPU_ROWS
from MaxText.parallelism.constraints import device_kind

_MAX_ROWS = 128


class Gradients(NamedTuple):
    """Of a sum.

    Attributes:
      of_weights_NE: float32, 0 behind the sources.
      of_states_RND: with what was there before.
      of_last_ND: of the last source, where that has no row; else None.
      of_factors_MD: float32; None without norms.
      before: the sum before, as [N, D], if that was asked for.
    """

    of_weights_NE: jax.Array
    of_states_RND: jax.Array
    of_last_ND: jax.Array | None
    of_factors_MD: jax.Array | None
    before: Read


def rows_of_tile(
    num_tokens: int, num_sources: int, num_ways: int, bytes_of_state: int
) -> int | None:
    """Tokens whose sources, and gradients before and after, are on the chip at once.

    None where the kernels cannot work: tokens that are not in sixteens, or too many sources.

    Args:
      bytes_of_state: of one token.
    """
    of_token = bytes_of_token(num_sources, num_ways, bytes_of_state)
    memory = chip_memory(device_kind())
    if num_tokens % TPU_ROWS or TPU_ROWS * of_token > memory.most:
        return None
    rows = _MAX_ROWS
    while rows > TPU_ROWS and (num_tokens % rows or rows * of_token > memory.blocks):
        rows //= 2
    return rows


def forward(
    history_HND: jax.Array,
    sources: Sources,
    one: Sum,
    reading: Reading,
    target: Literal["tpu", "interpret"],
    *,
    product: bool = False,
) -> Read:
    """y_c = norm_c(sum_s w_cs * x_s), [N, D] in the format of the history, for each way.

    Args:
      product: whether to return what weights are made of, where the kernel makes them.
    """
    N = history_HND.shape[1]
    num_ways, mean_count = reading.num_ways, reading.mean_count
    given = {"history": history_HND} | _weights_given(one)
    if one.factors_MD is not None:
        given["factors"] = one.factors_MD
    results = _of_sum(history_HND, reading) | _of_product(N, one, product)
    found = _call(
        functools.partial(forward_tile, reading),
        _numbers(sources, one),
        given,
        results,
        num_sources=sources.places_S.shape[0],
        num_ways=num_ways,
        norms=reading.norms,
        states_moved=mean_count,
        flops_per_number=2 * num_ways * mean_count + _flops_of_making(one),
        target=target,
    )
    return _read_of(found)


def backward(
    history_HND: jax.Array,
    sources: Sources,
    one: Sum,
    of_sums: list[jax.Array],
    accumulated_RND: jax.Array | None,
    reading: Reading,
    target: Literal["tpu", "interpret"],
    *,
    before: Sum | None = None,
    reading_before: Reading | None = None,
) -> Gradients:
    """Gradients of `forward`, added in place to those that the sources have already.

        of_weights_cs = sum_D g_c * x_s      of_states_s += sum_c w_cs g_c

    g_c is the gradient of a sum before its norm; such sums are made again on the chip.

    Args:
      one: with weights that are there.
      of_sums: gradients of what `forward` returned, [N, D] each.
      accumulated_RND: gradients of states so far, whose memory is used for the result. None: there
        are none, all places are read, and source s has row s of the result, the last one none.
      before: a sum over the first of these sources, to be made again from the same read.
    """
    _, N, D = history_HND.shape
    num_ways, norms, mean_count = len(of_sums), reading.norms, reading.mean_count
    state = jax.ShapeDtypeStruct((N, D), history_HND.dtype)
    assert not isinstance(one.weights, Making)
    given: dict[str, Any] = {"history": history_HND, "weights": one.weights, "of_sums": of_sums}
    results: dict[str, Any] = {"of_weights": jax.ShapeDtypeStruct(one.weights.shape, jnp.float32)}
    fresh = accumulated_RND is None
    if fresh:
        shape = (sources.places_S.shape[0] - 1, N, D)
        results["of_last"] = state
    else:
        given["accumulated"], shape = accumulated_RND, accumulated_RND.shape
    results["accumulated"] = jax.ShapeDtypeStruct(shape, history_HND.dtype)
    if one.factors_MD is not None:
        given["factors"] = one.factors_MD
        results["of_factors"] = jax.ShapeDtypeStruct(one.factors_MD.shape, jnp.float32)
    ways_before, norms_before, flops_of_making = 0, NO_NORMS, 0.0
    if before is not None:
        assert reading_before is not None
        ways_before, norms_before = reading_before.num_ways, reading_before.norms
        flops_of_making = _flops_of_making(before)
        given |= {f"{name}_before": x for name, x in _weights_given(before).items()}
        if before.factors_MD is not None:
            given["factors_before"] = before.factors_MD
        results |= _of_sum(history_HND, reading_before) | _of_product(N, before, True)
    found = _call(
        functools.partial(backward_tile, norms, reading_before),
        jnp.concatenate([_numbers(sources, before or one), sources.rows_S]),
        given,
        results,
        num_sources=sources.places_S.shape[0],
        num_ways=max(num_ways, ways_before),
        norms=max(norms, norms_before, key=lambda norms: len(norms.ways)),
        states_moved=mean_count * (2 if fresh else 3),
        flops_per_number=2 * (2 * num_ways + len(norms.ways) + ways_before) * mean_count
        + flops_of_making,
        target=target,
    )
    of_factors_MD = None
    if "of_factors" in found:
        of_factors_MD = jnp.sum(found["of_factors"], axis=0)
    return Gradients(
        found["of_weights"],
        found["accumulated"],
        found.get("of_last"),
        of_factors_MD,
        _read_of(found),
    )


def _numbers(sources: Sources, made: Sum) -> jax.Array:
    """int32: how many states are read, and for the sum that is made; which its weights are of."""
    place = made.weights.place if isinstance(made.weights, Making) else jnp.int32(0)
    return jnp.concatenate([jnp.stack([sources.count, made.count, place]), sources.places_S])


def _weights_given(one: Sum) -> dict[str, Any]:
    """Weights, or what the kernel makes them with."""
    if not isinstance(one.weights, Making):
        return {"weights": one.weights}
    return {"wi": one.weights.wi_DK, "wo": one.weights.wo_KE, "fixed": one.weights.fixed_E[None]}


def _of_sum(history_HND: jax.Array, reading: Reading) -> dict[str, Any]:
    state = jax.ShapeDtypeStruct(history_HND.shape[1:], history_HND.dtype)
    return {"sums": [state] * reading.num_ways}


def _of_product(num_tokens: int, one: Sum, asked: bool) -> dict[str, Any]:
    if not asked or not isinstance(one.weights, Making):
        return {}
    widths = {"product": one.weights.wi_DK.shape[1], "inverse_rms": 1}
    return {
        name: jax.ShapeDtypeStruct((num_tokens, width), jnp.float32)
        for name, width in widths.items()
    }


def _read_of(found: dict[str, Any]) -> Read:
    product = Product(found["product"], found["inverse_rms"]) if "product" in found else None
    return Read(found.get("sums", []), product)


def _flops_of_making(one: Sum) -> float:
    """Of x W1 and of squares, for each number of a state."""
    return 2 * (one.weights.wi_DK.shape[1] + 1) if isinstance(one.weights, Making) else 0


_IN_PLACE = ("history", "accumulated", "of_last")  # what a kernel copies by itself
# What all tiles read.
_SHARED = ("factors", "wi", "wo", "fixed")


def _call(
    body: Callable,
    numbers: jax.Array,
    given: dict[str, Any],
    results: dict[str, Any],
    *,
    num_sources: int,
    num_ways: int,
    norms: Norms,
    states_moved: float,
    flops_per_number: float,
    target: Literal["tpu", "interpret"],
) -> dict[str, Any]:
    """Results of a kernel over tiles of tokens, each core of a chip taking its half of them.

    Args:
      numbers: those of `_numbers`, and rows of gradients if there are any.
      states_moved: reads and writes of states, besides results and gradients of sums.
    """
    history_HND = given["history"]
    _, N, D = history_HND.shape
    dtype = history_HND.dtype
    rows = rows_of_tile(N, num_sources, num_ways, D * dtype.itemsize)
    assert rows is not None, "these sums have no kernel"
    tiles = N // rows
    cores = 2 if tiles % 2 == 0 else 1
    per_core = tiles // cores
    tile_of = functools.partial(_tile_of, per_core)

    if "of_factors" in results:
        M = results["of_factors"].shape[0]
        results["of_factors"] = jax.ShapeDtypeStruct((cores, M, D), jnp.float32)

    def spec(name: str, x) -> pl.BlockSpec:
        if name in _IN_PLACE:
            return pl.BlockSpec(memory_space=pl.ANY)
        if name.removesuffix("_before") in _SHARED:
            return pl.BlockSpec(x.shape, lambda core, turn, numbers: (0, 0))
        if name == "of_factors":
            return pl.BlockSpec((1, *x.shape[1:]), lambda core, turn, numbers: (core, 0, 0))
        return pl.BlockSpec(
            (rows, x.shape[1]), lambda core, turn, numbers: (tile_of(core, turn), 0)
        )

    def specs(arrays: dict[str, Any]) -> dict[str, Any]:
        return {
            name: [spec(name, x) for x in x] if isinstance(x, list) else spec(name, x)
            for name, x in arrays.items()
        }

    tile_of_state = (2, num_sources, rows, D)
    scratch: dict[str, Any] = {
        "states": pltpu.VMEM(tile_of_state, dtype),
        "arrivals": pltpu.SemaphoreType.DMA((2,)),
        "weights": pltpu.VMEM((num_sources, rows, padded(num_ways)), jnp.float32),
    }
    made_with = given.get("wo", given.get("wo_before"))
    if made_with is not None:
        scratch["made"] = pltpu.VMEM((rows, made_with.shape[1]), jnp.float32)
        scratch["inverse_rms"] = pltpu.VMEM((rows, 1), jnp.float32)
    if norms.ways:
        scratch["normed"] = pltpu.VMEM((len(norms.ways), rows, D), jnp.float32)
    if "accumulated" in results:
        scratch["of_weights"] = pltpu.VMEM((num_sources, rows, padded(num_ways)), jnp.float32)
        scratch["new"] = pltpu.VMEM(tile_of_state, dtype)
        scratch["departures"] = pltpu.SemaphoreType.DMA((2,))
    if "accumulated" in given:
        scratch["old"] = pltpu.VMEM(tile_of_state, dtype)
    options: dict[str, Any] = {}
    if target == "tpu":
        options["compiler_params"] = pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=chip_memory(device_kind()).limit,
        )
    moved = [
        x
        for tree in (given, results)
        for name, x in tree.items()
        if name not in _IN_PLACE
    ]  # fmt: skip
    flat_given = [name for name, x in given.items() for _ in jax.tree.leaves(x)]
    names_given = sorted(flat_given)  # as a tree of names is flattened
    names_results = sorted(name for name, x in results.items() for _ in jax.tree.leaves(x))
    aliases = {}
    if "accumulated" in given:
        # Behind the numbers.
        aliases = {1 + names_given.index("accumulated"): names_results.index("accumulated")}
    return pl.pallas_call(
        functools.partial(body, min(MAX_CHUNK[target], D & -D), target, per_core),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(cores, per_core),
            in_specs=[specs(given)],
            out_specs=specs(results),
            scratch_shapes=[scratch],
        ),
        out_shape=results,
        input_output_aliases=aliases,
        cost_estimate=pl.CostEstimate(
            flops=round(flops_per_number * N * D),
            bytes_accessed=round(states_moved * N * D * dtype.itemsize)
            + sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(moved)),
            transcendentals=0,
        ),
        interpret=target == "interpret",
        **options,
    )(numbers, given)


def _tile_of(per_core: int, core, turn):
    return core * per_core + turn
