"""What a kernel of sums over depth does with one tile of tokens: the program of history_kernel.py.

Legend: N tokens of the tile, D emb_dim, S sources at most, C ways, M norms; E lanes of the weights
of a token; K hidden width of what makes these weights.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from MaxText.layers.activations import ACTIVATIONS
from MaxText.layers.depth_mixing import Norms
from MaxText.layers.depth_reading import Reading, Recipe, padded
from MaxText.layers.mixing_kernel import Tile


def _gelu_erf(x):
    # jax.nn.gelu is exact for large negative numbers, too, by a function that Mosaic lacks.
    return 0.5 * x * (1 + jax.lax.erf(x * math.sqrt(0.5)))


# Activations that a kernel has: those of the published models, and the plainest of the others.
_PLAIN = ("gelu", "silu", "swish", "relu", "relu2", "tanh", "sigmoid", "linear", "id")
ON_CHIP = {name: ACTIVATIONS[name] for name in _PLAIN} | {"gelu_erf": _gelu_erf}


class _Turn:
    """A tile of tokens among those of one core, and the states that are copied for it."""

    def __init__(self, per_core: int, numbers, scratch: dict[str, Any]):
        self.per_core, self.numbers, self.scratch = per_core, numbers, scratch
        self.turn = pl.program_id(1)
        self.first = pl.program_id(0) * per_core
        self.slot = self.turn % 2
        self.num_sources, self.rows = scratch["states"].shape[1:3]
        self.count, self.count_made, self.place = numbers[0], numbers[1], numbers[2]

    def _tokens(self, turn):
        return pl.ds((self.first + turn) * self.rows, self.rows)

    def _state(self, s):
        return self.numbers[3 + s]

    def _row(self, s):
        return self.numbers[3 + self.num_sources + s]

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


def _make(tile: Tile, turn: _Turn, reading: Reading, given, results) -> None:
    """A tile's sums, with their norms, into results, from weights or what makes them."""
    sums = results["sums"]
    weights = _weigh(tile, turn, reading.recipe, given, results)
    _spread(weights, len(sums), turn.scratch["weights"])
    factors = given.get("factors")
    tile.for_tokens(lambda token: _sum_up(tile, turn, reading.norms, factors, sums, token))


def _sum_up(tile: Tile, turn: _Turn, norms: Norms, factors, sums, token) -> None:
    """Sums of some tokens, with their norms, into the refs `sums`."""
    ways, normed, count = range(len(sums)), turn.scratch.get("normed"), turn.count_made

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


def _weigh(tile: Tile, turn: _Turn, recipe: Recipe | None, given, results) -> Any:
    """Weights of the tile's tokens for the sum that is made: a ref."""
    if "weights" in given:
        return given["weights"]
    assert recipe is not None
    scratch, wi, wo = turn.scratch, given["wi"], given["wo"]
    states, made, inverse_rms = scratch["states"], scratch["made"], scratch["inverse_rms"]

    def measure(token):
        def square(columns):
            x = states[turn.slot, turn.place, token, columns].astype(jnp.float32)
            return [x * x]

        (inverse_rms[token, :],) = tile.inverse_rms(tile.sums(square, 1), recipe.epsilon)

    tile.for_tokens(measure)
    product_of = functools.partial(
        jnp.dot, precision=recipe.precision, preferred_element_type=jnp.float32
    )
    x = states[turn.slot, turn.place]
    product = product_of(x, wi[...])
    # Rounded where TokenWeights rounds, but for what lies inside of the activation.
    y = (inverse_rms[...] * product).astype(x.dtype).astype(jnp.float32)
    hidden = ON_CHIP[recipe.activation](y).astype(x.dtype)
    made[...] = given["fixed"][...] + product_of(hidden, wo[...]).astype(x.dtype).astype(
        jnp.float32
    )
    if "product" in results:
        results["product"][...] = product
        results["inverse_rms"][...] = inverse_rms[...]
    return made


def forward_tile(reading, chunk, target, per_core, numbers, given, results, scratch):
    turn = _Turn(per_core, numbers, scratch)
    tile = Tile(results["sums"][0].shape, chunk, target)
    turn.open(given)
    _make(tile, turn, reading, given, results)


def backward_tile(norms, reading_before, chunk, target, per_core, numbers, given, results, scratch):
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

    if reading_before is not None:
        end = "_before"
        before = {name.removesuffix(end): x for name, x in given.items() if name.endswith(end)}
        _make(tile, turn, reading_before, before, results)


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
