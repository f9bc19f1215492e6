"""Depth-wise aggregation as Pallas TPU kernels, forward and backward.

Each source is an operand of its own, so nothing is stacked. A program owns a few tokens with all
their dimensions, reads each source once for all streams, and may normalize sums before writing.

Legend: N tokens of all sequences, D emb_dim, C streams, S sources, M normalized streams;
K = C * S weights of a token.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from MaxText.layers.depth.norms import NO_NORMS, Norms, chip_memory
from MaxText.parallelism.logical_sharding import target_device

TILE_ROWS = 16  # tokens of a register tile in a 16-bit format
MAX_ROWS = 128
MAX_CHUNK = 512  # dimensions in registers at once
_PARTIAL_GRAD_FACTORS = "partial_grad_factors"  # sums of each tile, [tiles, M, D]

# Arrays by name; inside a kernel references to those of its tile. Sources are a list of them.
Operands = dict[str, Any]
TileSlice = slice | pl.Slice  # tokens or dimensions of a tile
Ref = Any  # memory of a kernel, read and written by indices: pallas has no type for it


def forward(
    operands: Operands, norms: Norms = NO_NORMS, *, interpret: bool = False
) -> list[jax.Array]:
    """Returns norm_c(sum_s w_cs * scale_s * x_s) of each stream c, [N, D].

    Args:
      operands: `weights` [N, K], w_cs at c * S + s; `sources`, [N, D] each; `scales` [S, D],
        optional; `factors` [M, D] of norms. All but sources are float32.
      norms: Normalized streams; N must then be a multiple of 16.
    """
    sources = operands["sources"]
    num_weights = operands["weights"].shape[1]
    state = jax.ShapeDtypeStruct(sources[0].shape, sources[0].dtype)
    return _call(
        functools.partial(_forward_body, norms),
        operands,
        {"sums": [state] * (num_weights // len(sources))},
        norms=norms,
        flops_per_number=2 * num_weights,
        interpret=interpret,
    )["sums"]


def backward(operands: Operands, norms: Norms = NO_NORMS, *, interpret: bool = False) -> Operands:
    """Returns gradients of `forward`, accumulating those of sources.

        grad_weights_cs = sum_D g_c * scale_s * x_s      grad_sources_s += sum_c w_cs g_c

    g_c is the gradient of a sum before its norm, for which the sum is recomputed on chip.

    Args:
      operands: Arguments of `forward`; `grad_sums`, gradients of its results; optionally
        `accumulated`, gradients of the sources so far, whose memory is reused.

    Returns:
      `grad_weights` [N, K] float32; `grad_sources`, [N, D] each, of scale * x for scaled sources
      (aggregate.scale_grad_only); with norms `grad_factors` [M, D] float32.
    """
    weights = operands["weights"]
    sources = operands["sources"]
    num_streams = len(operands["grad_sums"])
    state = jax.ShapeDtypeStruct(sources[0].shape, sources[0].dtype)
    results: dict[str, Any] = {
        "grad_sources": [state] * len(sources),
        "grad_weights": jax.ShapeDtypeStruct(weights.shape, jnp.float32),
    }
    grads = _call(
        functools.partial(_backward_body, norms),
        operands,
        results,
        norms=norms,
        flops_per_number=2 * (2 * num_streams + len(norms.streams)) * len(sources),
        interpret=interpret,
    )
    if norms.streams:
        grads["grad_factors"] = jnp.sum(grads.pop(_PARTIAL_GRAD_FACTORS), axis=0)
    return grads


def _call(
    body: Callable,
    operands: Operands,
    results: dict[str, Any],
    *,
    norms: Norms,
    flops_per_number: int,
    interpret: bool,
) -> Operands:
    """Runs a kernel over tiles of tokens with shared scales and factors.

    `body` takes (chunk, inputs, results, scratch). "accumulated" donates its memory to
    "grad_sources", for which both must come first by name.
    """
    (num_tokens, emb_dim) = operands["sources"][0].shape
    num_norms = len(norms.streams)

    def num_bytes(x) -> int:
        return x.size * x.dtype.itemsize

    fixed = sum(num_bytes(operands[name]) for name in ("scales", "factors") if name in operands)
    per_token = [x for x in jax.tree.leaves((operands, results)) if x.shape[0] == num_tokens]
    bytes_per_token = sum(map(num_bytes, per_token)) // num_tokens
    tile_bytes = 2 * bytes_per_token + 4 * emb_dim * num_norms  # per token
    memory = chip_memory(target_device().device_kind)
    rows = MAX_ROWS
    while rows > TILE_ROWS and rows * tile_bytes > memory // 2:
        rows //= 2
    if num_tokens % TILE_ROWS == 0:  # otherwise the last tile is masked
        rows = math.gcd(rows, num_tokens)
    tiles = pl.cdiv(num_tokens, rows)

    if num_norms and "grad_weights" in results:
        shape = (tiles, num_norms, emb_dim)
        results = results | {_PARTIAL_GRAD_FACTORS: jax.ShapeDtypeStruct(shape, jnp.float32)}

    def spec(name: str, x) -> pl.BlockSpec:
        if name in ("scales", "factors"):
            return pl.BlockSpec(x.shape, lambda tile: (0, 0))
        if name == _PARTIAL_GRAD_FACTORS:
            return pl.BlockSpec((1, *x.shape[1:]), lambda tile: (tile, 0, 0))
        return pl.BlockSpec((rows, x.shape[1]), lambda tile: (tile, 0))

    def specs(arrays: dict[str, Any]) -> Operands:
        return {
            name: [spec(name, x) for x in x] if isinstance(x, list) else spec(name, x)
            for name, x in arrays.items()
        }

    needed = tile_bytes * rows + 2 * fixed
    return pl.pallas_call(
        functools.partial(body, math.gcd(MAX_CHUNK, emb_dim)),
        grid=(tiles,),
        in_specs=[specs(operands)],
        out_specs=specs(results),
        out_shape=results,
        input_output_aliases={i: i for i in range(len(operands.get("accumulated", ())))},
        cost_estimate=pl.CostEstimate(
            flops=flops_per_number * num_tokens * emb_dim,
            bytes_accessed=sum(map(num_bytes, jax.tree.leaves((operands, results)))),
            transcendentals=0,
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",),
            vmem_limit_bytes=min(memory, max(16 * 2**20, needed + 8 * 2**20)),
        ),
        scratch_shapes=[pltpu.VMEM((num_norms, rows, emb_dim), jnp.float32)] if num_norms else [],
        interpret=interpret,
    )(operands)


class Tile(NamedTuple):
    """A tile, processed in chunks of register size."""

    shape: tuple[int, ...]  # tokens, dimensions
    chunk: int  # dimensions at once

    @property
    def step(self) -> int:
        """Tokens at once."""
        return min(self.shape[0], TILE_ROWS)

    def for_tokens(self, do: Callable[[TileSlice], object]) -> None:
        """Calls `do` with slices of tokens, in a loop."""
        _for_each(self.shape[0], self.step, do)

    def for_columns(self, do: Callable[[TileSlice], object]) -> None:
        """Calls `do` with slices of dimensions, in a loop."""
        _for_each(self.shape[1], self.chunk, do)

    def sums(
        self, terms: Callable[[TileSlice], Sequence[jax.Array]], number: int
    ) -> list[jax.Array]:
        """Returns `number` float32 [tokens] sums of terms(columns)."""
        width = min(self.chunk, 128)

        def folded(x):
            # Down to the width of a register, so that few additions cross lanes.
            return functools.reduce(
                jnp.add, [x[:, i : i + width] for i in range(0, self.chunk, width)]
            )

        def add(d, totals):
            columns = pl.ds(d * self.chunk, self.chunk)
            return tuple(t + folded(x) for t, x in zip(totals, terms(columns), strict=True))

        zeros = (jnp.zeros((self.step, width), jnp.float32),) * number
        totals = jax.lax.fori_loop(0, self.shape[1] // self.chunk, add, zeros)
        return [jnp.sum(total, axis=1) for total in totals]

    def inverse_rms(self, squares: Sequence[jax.Array], epsilon: float) -> list[jax.Array]:
        """Returns 1 / sqrt(mean(y^2) + eps) of each token from its sum of squares, [tokens, 1]."""
        return [jax.lax.rsqrt(total[:, None] / self.shape[1] + epsilon) for total in squares]


def _for_each(length: int, step: int, do: Callable[[TileSlice], object]) -> None:
    def body(i, _):
        do(pl.ds(i * step, step))

    jax.lax.fori_loop(0, length // step, body, None)


def _source(operands: Operands, s: int, token: TileSlice, columns: TileSlice) -> jax.Array:
    """Returns a part of scale_s * x_s, float32."""
    x = operands["sources"][s][token, columns].astype(jnp.float32)
    return x * operands["scales"][pl.ds(s, 1), columns] if "scales" in operands else x


def _sums(
    operands: Operands, streams: Sequence[int], token: TileSlice, columns: TileSlice
) -> list[jax.Array]:
    """Returns a part of the weighted sums of some streams, float32."""
    num_sources = len(operands["sources"])
    totals: list[Any] = [None] * len(streams)
    for s in range(num_sources):
        x = _source(operands, s, token, columns)
        for index, c in enumerate(streams):
            product = operands["weights"][token, pl.ds(c * num_sources + s, 1)] * x
            totals[index] = product if totals[index] is None else totals[index] + product
    return totals


def _forward_body(
    norms: Norms, chunk: int, operands: Operands, results: Operands, scratch: Ref = None
) -> None:
    """Computes `forward` for one tile.

    Sums that are normalized wait in `scratch` [M, tokens, D], float32, until their mean square is
    known.
    """
    tile = Tile(operands["sources"][0].shape, chunk)
    sums = results["sums"]
    streams = range(len(sums))

    def at_tokens(token):
        def make(columns):
            normed = []
            totals = _sums(operands, streams, token, columns)
            for c, total in zip(streams, totals, strict=True):
                if c in norms.streams:
                    scratch[norms.streams.index(c), token, columns] = total
                    normed.append(total * total)
                else:
                    sums[c][token, columns] = total.astype(sums[c].dtype)
            return normed

        if not norms.streams:
            tile.for_columns(make)
            return
        inverse_rms = tile.inverse_rms(tile.sums(make, len(norms.streams)), norms.epsilon)

        def normalize(columns):
            for m, c in enumerate(norms.streams):
                factor = operands["factors"][pl.ds(m, 1), columns]
                y = scratch[m, token, columns] * inverse_rms[m] * factor
                sums[c][token, columns] = y.astype(sums[c].dtype)

        tile.for_columns(normalize)

    tile.for_tokens(at_tokens)


def _norm_vjp(tile: Tile, norms: Norms, operands, results, normed, token) -> None:  # noqa: PLR0917
    """Writes gradients before norms to `normed`; adds those of factors.

    With r = 1 / sqrt(mean(y^2) + eps), n = y r f and h = f dn: dy = r h - y r^3 mean(h y).
    """
    num_norms = len(norms.streams)
    grad_sums = operands["grad_sums"]
    factors = operands["factors"]

    def measure(columns):
        squares = []
        inner = []
        sums = _sums(operands, norms.streams, token, columns)
        for m, (c, y) in enumerate(zip(norms.streams, sums, strict=True)):
            normed[m, token, columns] = y
            h = grad_sums[c][token, columns].astype(jnp.float32)
            h = h * factors[pl.ds(m, 1), columns]
            squares.append(y * y)
            inner.append(h * y)
        return [*squares, *inner]

    totals = tile.sums(measure, 2 * num_norms)
    inverse_rms = tile.inverse_rms(totals[:num_norms], norms.epsilon)
    shares = [
        r * r * r * total[:, None] / tile.shape[1]
        for r, total in zip(inverse_rms, totals[num_norms:], strict=True)
    ]

    def differentiate(columns):
        for m, c in enumerate(norms.streams):
            y = normed[m, token, columns]
            r = inverse_rms[m]
            g = grad_sums[c][token, columns].astype(jnp.float32) * r
            results[_PARTIAL_GRAD_FACTORS][0, pl.ds(m, 1), columns] += jnp.sum(
                g * y, axis=0, keepdims=True
            )
            normed[m, token, columns] = g * factors[pl.ds(m, 1), columns] - shares[m] * y

    tile.for_columns(differentiate)


def _backward_body(
    norms: Norms, chunk: int, operands: Operands, results: Operands, scratch: Ref = None
) -> None:
    """Computes `backward` for one tile.

    `scratch` [M, tokens, D], float32, holds the gradients of sums before their norms.
    """
    tile = Tile(operands["sources"][0].shape, chunk)
    num_sources = len(operands["sources"])
    grad_sums = operands["grad_sums"]
    if norms.streams:
        part = results[_PARTIAL_GRAD_FACTORS]
        part[...] = jnp.zeros(part.shape, jnp.float32)

    def at_tokens(token):
        """Computes the gradients of the weights and sources of some tokens of the tile.

        For each source s: dx_s = sum_c w_cs g_c + accumulated, and dw_cs = sum over D of g_c x_s.
        Both are computed in one pass over g and x.
        """

        def gradient(c, columns):
            if c in norms.streams:
                return scratch[norms.streams.index(c), token, columns]
            return grad_sums[c][token, columns].astype(jnp.float32)

        if norms.streams:
            _norm_vjp(tile, norms, operands, results, scratch, token)
        for s in range(num_sources):
            indices = [c * num_sources + s for c in range(len(grad_sums))]
            weights = [operands["weights"][token, pl.ds(k, 1)] for k in indices]

            def products(columns, s=s, weights=weights):
                x = _source(operands, s, token, columns)
                grads = [gradient(c, columns) for c in range(len(grad_sums))]
                terms = [weight * g for weight, g in zip(weights, grads, strict=True)]
                if "accumulated" in operands:
                    terms.append(operands["accumulated"][s][token, columns].astype(jnp.float32))
                grad_source = results["grad_sources"][s]
                total = functools.reduce(jnp.add, terms)
                grad_source[token, columns] = total.astype(grad_source.dtype)
                return [g * x for g in grads]

            for k, total in zip(indices, tile.sums(products, len(indices)), strict=True):
                results["grad_weights"][token, pl.ds(k, 1)] = total[:, None]

    tile.for_tokens(at_tokens)
