"""Sums over depth inside a loop over layers, as Pallas kernels for TPU (Mosaic).

All hidden states are one array, the history, and the loop says which of them a sum reads: how many
there are is known when the program runs. A kernel copies those, and no others, of a tile of tokens
onto the chip, and the next tile's meanwhile; then each one is there for all ways, for norms, for
gradients, and for the sum of the layer before.

Legend: N tokens of all sequences, D emb_dim, H states of the history, S sources at most, R rows of
gradients; C ways, of which M have a norm; E lanes of the weights of a token, C * S and filling.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from MaxText.layers.depth_mixing import NO_NORMS, Norms
from MaxText.layers.depth_reading import Sources, Sum, padded
from MaxText.layers.mixing_kernel import MAX_CHUNK, TPU_BLOCKS, TPU_LIMIT, TPU_ROWS, Tile

_MAX_ROWS = 128


class Gradients(NamedTuple):
    """Of a sum.

    Attributes:
      of_weights_NE: float32, 0 behind the sources.
      of_states_RND: with what was there before.
      of_last_ND: of the last source, where that has no row; else None.
      of_factors_MD: float32; None without norms.
      before: y_ND of each way of the sum before, if that was asked for.
    """

    of_weights_NE: jax.Array
    of_states_RND: jax.Array
    of_last_ND: jax.Array | None
    of_factors_MD: jax.Array | None
    before: list[jax.Array]


def rows_of_tile(num_tokens: int, num_sources: int, bytes_of_state: int) -> int | None:
    """Tokens whose sources, and gradients before and after, are on the chip at once.

    None where the kernels cannot work: tokens that are not in sixteens, or too many sources.

    Args:
      bytes_of_state: of one token.
    """
    of_token = 6 * num_sources * bytes_of_state  # three arrays, two buffers each
    if num_tokens % TPU_ROWS or TPU_ROWS * of_token > TPU_LIMIT - TPU_BLOCKS // 2:
        return None
    rows = _MAX_ROWS
    while rows > TPU_ROWS and (num_tokens % rows or rows * of_token > TPU_BLOCKS):
        rows //= 2
    return rows


def forward(
    history_HND: jax.Array,
    sources: Sources,
    one: Sum,
    num_ways: int,
    norms: Norms,
    target: Literal["tpu", "interpret"],
    *,
    mean_count: float,
) -> list[jax.Array]:
    """y_c = norm_c(sum_s w_cs * x_s), in the format of the history, for each way.

    Args:
      mean_count: sources of such a sum over all turns of the loop, for the compiler's estimate.
    """
    _, N, D = history_HND.shape
    state = jax.ShapeDtypeStruct((N, D), history_HND.dtype)
    given = {"history": history_HND, "weights": one.weights}
    if one.factors_MD is not None:
        given["factors"] = one.factors_MD
    numbers = jnp.concatenate([sources.count[None], one.count[None], sources.places_S])
    found = _call(
        functools.partial(_forward_body, norms, num_ways),
        numbers,
        given,
        {"sums": [state] * num_ways},
        num_sources=sources.places_S.shape[0],
        num_ways=num_ways,
        norms=norms,
        states_moved=mean_count,
        flops_per_number=2 * num_ways * mean_count,
        target=target,
    )
    return found["sums"]


def backward(
    history_HND: jax.Array,
    sources: Sources,
    one: Sum,
    of_sums: list[jax.Array],
    accumulated_RND: jax.Array | None,
    norms: Norms,
    target: Literal["tpu", "interpret"],
    *,
    mean_count: float,
    before: Sum | None = None,
    ways_before: int = 0,
    norms_before: Norms = NO_NORMS,
) -> Gradients:
    """Gradients of `forward`, added in place to those that the sources have already.

        of_weights_cs = sum_D g_c * x_s      of_states_s += sum_c w_cs g_c

    g_c is the gradient of a sum before its norm; such sums are made again on the chip.

    Args:
      of_sums: gradients of what `forward` returned, [N, D] each.
      accumulated_RND: gradients of states so far, whose memory is used for the result. None: there
        are none, all places are read, and source s has row s of the result, the last one none.
      before: a sum over the first of these sources, to be made again from the same read.
    """
    _, N, D = history_HND.shape
    num_ways = len(of_sums)
    state = jax.ShapeDtypeStruct((N, D), history_HND.dtype)
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
    count_before = one.count
    if before is not None:
        given["weights_before"], count_before = before.weights, before.count
        if before.factors_MD is not None:
            given["factors_before"] = before.factors_MD
        results["sums"] = [state] * ways_before
    numbers = jnp.concatenate(
        [sources.count[None], count_before[None], sources.places_S, sources.rows_S]
    )
    found = _call(
        functools.partial(_backward_body, norms, norms_before),
        numbers,
        given,
        results,
        num_sources=sources.places_S.shape[0],
        num_ways=max(num_ways, ways_before),
        norms=max(norms, norms_before, key=lambda norms: len(norms.ways)),
        states_moved=mean_count * (2 if fresh else 3),
        flops_per_number=2 * (2 * num_ways + len(norms.ways) + ways_before) * mean_count,
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
        found.get("sums", []),
    )


_IN_PLACE = ("history", "accumulated", "of_last")  # what a kernel copies by itself


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
      numbers: int32: sources, those of the sum before or once more, their places, their rows.
      states_moved: reads and writes of states, besides results and gradients of sums.
    """
    history_HND = given["history"]
    _, N, D = history_HND.shape
    dtype = history_HND.dtype
    rows = rows_of_tile(N, num_sources, D * dtype.itemsize)
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
        if name in ("factors", "factors_before"):
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
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=TPU_LIMIT
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


class _Turn:
    """A tile of tokens among those of one core, and the states that are copied for it."""

    def __init__(self, per_core: int, numbers, scratch: dict[str, Any]):
        self.per_core, self.numbers, self.scratch = per_core, numbers, scratch
        self.turn = pl.program_id(1)
        self.first = pl.program_id(0) * per_core
        self.slot = self.turn % 2
        self.num_sources, self.rows = scratch["states"].shape[1:3]
        self.count, self.count_before = numbers[0], numbers[1]

    def _tokens(self, turn):
        return pl.ds((self.first + turn) * self.rows, self.rows)

    def _state(self, s):
        return self.numbers[2 + s]

    def _row(self, s):
        return self.numbers[2 + self.num_sources + s]

    def _arrive(self, turn, given, do: Callable) -> None:
        slot, semaphore = turn % 2, self.scratch["arrivals"].at[turn % 2]

        def copies(s):
            here = self.scratch["states"].at[slot, s]
            there = given["history"].at[self._state(s), self._tokens(turn)]
            do(pltpu.make_async_copy(there, here, semaphore))
            if "accumulated" in given:
                here = self.scratch["old"].at[slot, s]
                there = given["accumulated"].at[self._row(s), self._tokens(turn)]
                do(pltpu.make_async_copy(there, here, semaphore))

        _for_each(self.count, copies)

    def _depart(self, turn, results, do: Callable) -> None:
        slot, semaphore = turn % 2, self.scratch["departures"].at[turn % 2]

        def copy(s, there):
            do(pltpu.make_async_copy(self.scratch["new"].at[slot, s], there, semaphore))

        num_rows = self.count
        if "of_last" in results:
            num_rows = self.count - 1
            copy(num_rows, results["of_last"].at[self._tokens(turn)])
        _for_each(
            num_rows,
            lambda s: copy(s, results["accumulated"].at[self._row(s), self._tokens(turn)]),
        )

    def open(self, given) -> None:
        """Waits for this tile's states, after it has sent for the next tile's."""

        @pl.when(self.turn == 0)
        def _():
            self._arrive(self.turn, given, lambda copy: copy.start())

        @pl.when(self.turn + 1 < self.per_core)
        def _():
            self._arrive(self.turn + 1, given, lambda copy: copy.start())

        self._arrive(self.turn, given, lambda copy: copy.wait())

    def before_writing(self, results) -> None:
        """Waits until the memory of this tile's gradients is free again."""

        @pl.when(self.turn >= 2)
        def _():
            self._depart(self.turn - 2, results, lambda copy: copy.wait())

    def close(self, results) -> None:
        """Sends this tile's gradients; the last tile waits for all that is on its way."""
        self._depart(self.turn, results, lambda copy: copy.start())

        @pl.when(self.turn == self.per_core - 1)
        def _():
            if self.per_core > 1:
                self._depart(self.turn - 1, results, lambda copy: copy.wait())
            self._depart(self.turn, results, lambda copy: copy.wait())


def _for_each(number, do: Callable[[Any], Any]) -> None:
    def body(index, carry):
        do(index)
        return carry

    jax.lax.fori_loop(0, number, body, 0)


def _spread(weights, num_ways: int, scratch) -> None:
    """A token's weights, one source after another in lanes, as [S, N, C]."""
    lanes = padded(num_ways)
    for s in range(min(scratch.shape[0], weights.shape[1] // lanes)):
        scratch[s, :, pl.ds(0, lanes)] = weights[:, pl.ds(s * lanes, lanes)]


def _sums(tile: Tile, turn: _Turn, count, ways, token, columns) -> list[jax.Array]:
    """Of some ways, float32, with the weights in scratch."""
    states, weights = turn.scratch["states"], turn.scratch["weights"]

    def add(s, totals):
        x = states[turn.slot, s, token, columns].astype(jnp.float32)
        return tuple(
            total + weights[s, token, pl.ds(c, 1)] * x
            for c, total in zip(ways, totals, strict=True)
        )

    shape = (tile.step, tile.chunk)
    zeros = tuple(jnp.zeros(shape, jnp.float32) for _ in ways)
    return list(jax.lax.fori_loop(0, count, add, zeros))


def _make(tile: Tile, turn: _Turn, norms: Norms, count, factors, sums, token) -> None:
    """Sums of some tokens, with their norms, into the refs `sums`."""
    ways, normed = range(len(sums)), turn.scratch.get("normed")

    def make(columns):
        squares = []
        for c, total in zip(ways, _sums(tile, turn, count, ways, token, columns), strict=True):
            if c in norms.ways:
                assert normed is not None
                normed[norms.ways.index(c), token, columns] = total
                squares.append(total * total)
            else:
                sums[c][token, columns] = total.astype(sums[c].dtype)
        return squares

    if not norms.ways:
        tile.for_columns(make)
        return
    inverse_rms = tile.inverse_rms(tile.sums(make, len(norms.ways)), norms.epsilon)

    def normalize(columns):
        assert normed is not None
        for m, c in enumerate(norms.ways):
            y = normed[m, token, columns] * inverse_rms[m] * factors[pl.ds(m, 1), columns]
            sums[c][token, columns] = y.astype(sums[c].dtype)

    tile.for_columns(normalize)


def _forward_body(norms, num_ways, chunk, target, per_core, numbers, given, results, scratch):
    turn = _Turn(per_core, numbers, scratch)
    tile = Tile(results["sums"][0].shape, chunk, target)
    turn.open(given)
    _spread(given["weights"], num_ways, scratch["weights"])
    tile.for_tokens(
        lambda token: _make(
            tile, turn, norms, turn.count, given.get("factors"), results["sums"], token
        )
    )


def _backward_body(norms, norms_before, chunk, target, per_core, numbers, given, results, scratch):
    turn = _Turn(per_core, numbers, scratch)
    of_sums = given["of_sums"]
    tile = Tile(of_sums[0].shape, chunk, target)
    turn.open(given)
    turn.before_writing(results)
    _spread(given["weights"], len(of_sums), scratch["weights"])
    if norms.ways:

        @pl.when(turn.turn == 0)
        def _():
            results["of_factors"][...] = jnp.zeros(results["of_factors"].shape, jnp.float32)

    tile.for_tokens(lambda token: _differentiate(tile, turn, norms, given, results, token))
    turn.close(results)
    lanes = padded(len(of_sums))
    of_weights = results["of_weights"]
    of_weights[...] = jnp.zeros(of_weights.shape, jnp.float32)
    for s in range(turn.num_sources):

        @pl.when(s < turn.count)
        def _(s=s):
            of_weights[:, pl.ds(s * lanes, lanes)] = scratch["of_weights"][s, :, pl.ds(0, lanes)]

    if "sums" in results:
        _spread(given["weights_before"], len(results["sums"]), scratch["weights"])
        tile.for_tokens(
            lambda token: _make(
                tile,
                turn,
                norms_before,
                turn.count_before,
                given.get("factors_before"),
                results["sums"],
                token,
            )
        )


def _differentiate(tile: Tile, turn: _Turn, norms: Norms, given, results, token) -> None:
    scratch, of_sums = turn.scratch, given["of_sums"]

    def gradient(c, columns):
        """Of a sum before its norm."""
        if c in norms.ways:
            return scratch["normed"][norms.ways.index(c), token, columns]
        return of_sums[c][token, columns].astype(jnp.float32)

    if norms.ways:

        def make_again(columns):
            return _sums(tile, turn, turn.count, norms.ways, token, columns)

        tile.through_norms(
            norms,
            make_again,
            of_sums,
            given["factors"],
            results["of_factors"],
            scratch["normed"],
            token,
        )

    ways = range(len(of_sums))

    def of_source(s):
        weights = [scratch["weights"][s, token, pl.ds(c, 1)] for c in ways]

        def products(columns):
            x = scratch["states"][turn.slot, s, token, columns].astype(jnp.float32)
            gradients = [gradient(c, columns) for c in ways]
            terms = [weight * g for weight, g in zip(weights, gradients, strict=True)]
            if "old" in scratch:
                terms.append(scratch["old"][turn.slot, s, token, columns].astype(jnp.float32))
            new = functools.reduce(jnp.add, terms)
            scratch["new"][turn.slot, s, token, columns] = new.astype(scratch["new"].dtype)
            return [g * x for g in gradients]

        for c, total in zip(ways, tile.sums(products, len(ways)), strict=True):
            scratch["of_weights"][s, token, pl.ds(c, 1)] = total[:, None]

    _for_each(turn.count, of_source)
