"""A traced program as a compiler runs it: written arrays and inputs.

Fused operations take no memory: elementwise operations, casts and views are traced back to their
inputs. Exceptions, each observed in XLA's TPU compiler on train steps:

- A fused value that several matmuls read is written once, unless each of them computes in a
  narrower dtype: then each recomputes it (gradients of attention scores).
- A matmul result of which only another dtype is read is written in the narrower of the two, or in
  the other if something unfusable reads it (logits, of which targets' are gathered).
- A slice padded with constants is fused, and a loop of one iteration is inlined.
- Slices of stacked weights that a matmul reads are gathered in its dtype; slices of other stacks
  are cut out before a loop's body reads them.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from jax.extend import core

from MaxText.layers.attention.attention_core import SCORES_SCOPE

# Computed where it is read, without work.
_VIEWS = frozenset(
    {
        "broadcast_in_dim",
        "convert_element_type",
        "copy",
        "expand_dims",
        "layout_constraint",
        "mesh_cast",
        "name",
        "optimization_barrier",
        "pvary",
        "reduce_precision",
        "reshape",
        "rev",
        "sharding_constraint",
        "slice",
        "squeeze",
        "transpose",
    }
)
# Results with memory of their own; everything else is fused.
_WRITTEN = frozenset(
    {
        "approx_top_k",
        "argmax",
        "argmin",
        "cholesky",
        "concatenate",
        "cond",
        "conv_general_dilated",
        "cumlogsumexp",
        "cummax",
        "cummin",
        "cumprod",
        "cumsum",
        "dot_general",
        "dynamic_update_slice",
        "eigh",
        "fft",
        "gather",
        "pallas_call",
        "qr",
        "ragged_dot",
        "ragged_dot_general",
        "random_bits",
        "reduce_and",
        "reduce_max",
        "reduce_min",
        "reduce_or",
        "reduce_prod",
        "reduce_sum",
        "scan",
        "scatter",
        "scatter-add",
        "scatter-update",
        "scatter_add",
        "scatter_max",
        "scatter_min",
        "scatter_mul",
        "sort",
        "svd",
        "threefry2x32",
        "top_k",
        "triangular_solve",
        "while",
    }
)
PRODUCTS = frozenset(["dot_general", "ragged_dot", "ragged_dot_general", "pallas_call"])
# Fused with the producer or the next consumer of the array.
REDUCTIONS = ("reduce_", "argmax", "argmin")
# Inlined calls, and the parameters that hold their bodies.
_CALLS = frozenset(
    {
        "checkpoint",
        "closed_call",
        "core_call",
        "custom_jvp_call",
        "custom_lin",
        "custom_vjp_call",
        "custom_vjp_call_jaxpr",
        "jit",
        "pjit",
        "remat",
        "remat2",
        "shard_map",
    }
)
_BODIES = ("jaxpr", "call_jaxpr", "fun_jaxpr")
SLICE = "slice of a stack"
_KEY_BYTES = 8  # of a PRNG key

SizeOf = Callable[[Sequence[int], int], float]  # (shape, bytes per element) -> bytes


def plain_size(shape: Sequence[int], width: int) -> float:
    """Returns an array's bytes, unpadded."""
    return float(math.prod(shape) * width)


def tiled_size(shape: Sequence[int], width: int) -> float:
    """Returns an array's bytes on TPU, in tiles of 8 x 128."""
    plain = plain_size(shape, width)
    if len(shape) < 2 or not plain:
        return plain

    def padded(size: int, tile: int) -> float:
        return -(-size // tile) * tile / size

    sublanes = 32 // width if width <= 4 else 8
    return plain * min(
        padded(rows, sublanes) * padded(columns, 128)
        for i, rows in enumerate(shape)
        for j, columns in enumerate(shape)
        if i != j
    )


@dataclasses.dataclass(eq=False)
class Value:
    """An array of a program on one device; two are equal only if they are the same object."""

    shape: tuple[int, ...] = ()
    size: float = 0.0  # bytes
    width: int = 0  # bytes per element
    # Share of a parameter (or a view of parameters only) that a device gathers to compute; else 0.
    weight: float = 0.0
    is_square: bool = False  # attention scores, or derived from them at their size
    # Arrays in memory that it is read from; itself if it is written.
    roots: frozenset["Value"] = frozenset()
    readers: list["Node"] = dataclasses.field(default_factory=list)

    @property
    def is_written(self) -> bool:
        """Whether it has memory of its own."""
        return self in self.roots


@dataclasses.dataclass(eq=False)
class Node:
    """An equation, except calls."""

    name: str
    inputs: list[Value]
    outputs: list[Value]
    params: dict[str, Any]
    bodies: tuple["Traced", ...] = ()  # programs of a loop or of branches
    times: int = 1  # iterations of the body
    in_attention: bool = False  # whether it computes scores, reads them, or does so for a gradient
    in_kernel: bool = False  # whether it works on the chip, without reading or writing memory

    @functools.cached_property
    def reads(self) -> frozenset[Value]:
        """Arrays in memory."""
        return frozenset().union(*(value.roots for value in self.inputs))

    @functools.cached_property
    def writes(self) -> list[Value]:
        """Arrays in memory; none if a compiler does not run it as its own kernel."""
        return [value for value in self.outputs if value.is_written]


@dataclasses.dataclass(frozen=True)
class Traced:
    """A program, or the body of a loop."""

    nodes: tuple[Node, ...]  # nodes that the results depend on, in order
    results: tuple[Value, ...]

    def drop_scores(self) -> None:
        """Removes the bytes of attention scores, as in a fused kernel.

        Their products then read no memory, which blocks of keys would do once for each block of
        queries.
        """
        for node in self.nodes:
            node.in_kernel = node.in_attention and node.name in PRODUCTS
            for value in (*node.inputs, *node.outputs):
                value.size = 0.0 if value.is_square else value.size
            for body in node.bodies:
                body.drop_scores()


def traced(
    jaxpr: core.Jaxpr,
    *,
    weights: Sequence[float] = (),
    size_of: SizeOf = plain_size,
    is_square: Sequence[bool] = (),
    first_slice: int | None = None,
) -> Traced:
    """Parses a program.

    Args:
      jaxpr: of the program, or of a loop's body.
      weights: Shares of parameters that a device gathers, the first arguments.
      size_of: Bytes of an array by its shape and bytes per element.
      is_square: Whether each argument is attention scores, for a loop's body.
      first_slice: In a loop body, index of the first argument that is a slice of a stack.
    """
    arguments = [_value(variable.aval, size_of) for variable in jaxpr.invars]
    for value, weight in zip(arguments, weights, strict=False):
        value.weight = weight
    for value, square in zip(arguments, is_square, strict=False):
        value.is_square = square
    nodes: list[Node] = []
    results = _inline_calls(jaxpr, arguments, nodes, size_of)
    nodes = _drop_dead_nodes(nodes, results)
    if first_slice is not None:
        nodes = _with_slices(
            nodes, [value for value in arguments[first_slice:] if not value.weight]
        )
    for node in nodes:
        for value in node.inputs:
            value.readers.append(node)
    for node in nodes:
        _find_roots(node)
        if node.name in ("scan", "while", "cond"):
            node.bodies, node.times = _bodies(node, size_of)
        if node.name == "scan":
            for value, result in zip(node.outputs, node.bodies[0].results, strict=True):
                value.is_square |= result.is_square
    return Traced(tuple(nodes), tuple(results))


def _value(aval: Any, size_of: SizeOf) -> Value:
    shape = getattr(aval, "shape", None)
    dtype = getattr(aval, "dtype", None)
    if shape is None or dtype is None:
        return Value()
    width = np.dtype(dtype).itemsize if isinstance(dtype, np.dtype) else _KEY_BYTES
    return Value(tuple(shape), size_of(shape, width), width)


def _inline_calls(
    jaxpr: core.Jaxpr, arguments: Sequence[Value], nodes: list[Node], size_of: SizeOf
) -> list[Value]:
    """Appends the equations of a program to `nodes`, calls inlined; returns its results."""
    values: dict[Any, Value] = dict(zip(jaxpr.invars, arguments, strict=True))
    values |= {variable: _value(variable.aval, size_of) for variable in jaxpr.constvars}

    def read(atom: Any) -> Value:
        return Value() if isinstance(atom, core.Literal) else values[atom]

    for equation in jaxpr.eqns:
        reads = [read(atom) for atom in equation.invars]
        name = equation.primitive.name
        params = equation.params
        body = next((params[key] for key in _BODIES if key in params), None)
        if name in _CALLS and body is not None:
            inner = getattr(body, "jaxpr", body)
            outputs = _inline_calls(inner, reads, nodes, size_of)
        elif name == "scan" and params["length"] == 1:
            outputs = _inline_iteration(equation, reads, nodes, size_of)
        else:
            outputs = [_value(variable.aval, size_of) for variable in equation.outvars]
            in_attention = SCORES_SCOPE in str(equation.source_info.name_stack)
            nodes.append(Node(name, reads, outputs, params, in_attention=in_attention))
        values |= dict(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _inline_iteration(
    equation: Any, reads: Sequence[Value], nodes: list[Node], size_of: SizeOf
) -> list[Value]:
    """Inlines a loop of one iteration, as XLA does: stacks become views."""

    def reshaped(values: Iterable[Value], variables: Iterable[Any]) -> list[Value]:
        views = []
        for value, variable in zip(values, variables, strict=True):
            shape = getattr(variable.aval, "shape", ())
            is_same = value.shape == tuple(shape) or not value.size
            views.append(value if is_same else _value(variable.aval, size_of))
            if not is_same:
                nodes.append(Node("reshape", [value], [views[-1]], {}))
        return views

    body = _body_of(equation)
    results = _inline_calls(body, reshaped(reads, body.invars), nodes, size_of)
    return reshaped(results, equation.outvars)


def _drop_dead_nodes(nodes: Sequence[Node], results: Iterable[Value]) -> list[Node]:
    """Returns the nodes that results depend on, in order."""
    needed = set(results)
    live_nodes = []
    for node in reversed(nodes):
        if any(value in needed for value in node.outputs):
            needed.update(node.inputs)
            live_nodes.append(node)
    return live_nodes[::-1]


def _with_slices(nodes: Sequence[Node], slices: Sequence[Value]) -> list[Node]:
    """Inserts a node that cuts each slice of a stack before its first reader."""
    uncut = set(slices)
    complete = []
    for node in nodes:
        for value in node.inputs:
            if value in uncut:
                uncut.remove(value)
                complete.append(Node(SLICE, [], [value], {}))
        complete.append(node)
    return complete


def _find_roots(node: Node) -> None:
    """Sets `roots` of a node's outputs: written to memory, or fused into their readers."""
    restacked = _restacked_results(node)
    pads_with_constants = _writes_slices(node) and not node.inputs[0].roots
    for index, value in enumerate(node.outputs):
        if index in restacked:
            argument = node.inputs[restacked[index]]
            value.roots = argument.roots
            value.weight = argument.weight
        elif node.name == SLICE:
            value.roots = frozenset([value])
        elif node.name in _WRITTEN and not pads_with_constants:
            value.roots = frozenset([value])
            value.is_square = _makes_squares(node)
            readers = list(_consumers(value))
            if node.name in PRODUCTS and [reader.name for reader in readers] == [
                "convert_element_type"
            ]:
                converted = readers[0].outputs[0]
                if converted.size < value.size or _is_read_from_memory(converted):
                    value.size = converted.size
        else:
            _fuse(node, value)


def _writes_slices(node: Node) -> bool:
    """Returns whether a node is the gradient of slices of stacked weights."""
    # Under vmap (pipeline stages) a scatter of matrices, unlike the rows of a token table.
    windows = getattr(node.params.get("dimension_numbers"), "update_window_dims", ())
    return node.name == "dynamic_update_slice" or len(windows) > 1


def _is_read_from_memory(value: Value) -> bool:
    readers = {reader.name for reader in _consumers(value)}
    return any(name in _WRITTEN - PRODUCTS and not name.startswith(REDUCTIONS) for name in readers)


def _fuse(node: Node, value: Value) -> None:
    """Sets `roots` of an output that a compiler may compute where it is read."""
    arrays = [read for read in node.inputs if read.size]
    value.is_square = any(read.is_square and read.size >= value.size / 2 for read in arrays)
    products = [reader for reader in _consumers(value) if reader.name in PRODUCTS]
    if arrays and all(read.weight for read in arrays):
        value.weight = min(read.weight for read in arrays)
        if products:
            value.size *= value.weight
            value.roots = frozenset([value])
            value.weight = 0.0
        return
    is_view = node.name in _VIEWS and all(read.is_written or not read.roots for read in arrays)
    are_narrower = all(min(read.width for read in node.inputs) < value.width for node in products)
    if len(products) > 1 and not is_view and not are_narrower:
        value.roots = frozenset([value])
    else:
        value.roots = frozenset().union(*(read.roots for read in arrays))


def _makes_squares(node: Node) -> bool:
    """Returns whether a node is queries times keys, or outputs' gradients times values."""
    is_product = node.name == "dot_general" and node.in_attention
    return is_product and not any(value.is_square for value in node.inputs)


def _consumers(value: Value) -> Iterable[Node]:
    """Yields the readers of a value, through views."""
    for node in value.readers:
        if node.name in _VIEWS and node.name != "convert_element_type":
            for view in node.outputs:
                yield from _consumers(view)
        else:
            yield node


def _body_of(loop: Any) -> Any:
    """Returns the jaxpr inside a scan; since JAX 0.12 nothing wraps it."""
    program = loop.params["jaxpr"]
    return getattr(program, "jaxpr", program)


def _first_stacked(arrays: Sequence[Value], inside: Sequence[Any]) -> int:
    """Returns the number of leading arrays sliced or stacked inside."""
    for index, (array, variable) in enumerate(zip(arrays, inside, strict=True)):
        if len(array.shape) > len(variable.aval.shape):
            return index
    return len(arrays)


def _restacked_results(node: Node) -> dict[int, int]:
    """Returns loop results restacking an argument: XLA copies nothing."""
    if node.name != "scan":
        return {}
    body = _body_of(node)
    first = _first_stacked(node.inputs, body.invars)
    num_carry = _first_stacked(node.outputs, body.outvars)
    sliced = {variable: first + i for i, variable in enumerate(body.invars[first:])}
    viewed = {
        equation.outvars[0]: equation.invars[0]
        for equation in body.eqns
        if equation.primitive.name in _VIEWS
        and math.prod(equation.outvars[0].aval.shape) == math.prod(equation.invars[0].aval.shape)
    }
    restacked = {}
    for index, variable in enumerate(body.outvars[num_carry:], num_carry):
        while not isinstance(variable, core.Literal) and variable in viewed:
            variable = viewed[variable]
        if not isinstance(variable, core.Literal) and variable in sliced:
            restacked[index] = sliced[variable]
    return restacked


def _bodies(node: Node, size_of: SizeOf) -> tuple[tuple[Traced, ...], int]:
    if node.name != "scan":
        programs = node.params["branches"] if node.name == "cond" else [node.params["body_jaxpr"]]
        return tuple(traced(body.jaxpr, size_of=size_of) for body in programs), 1
    inside = _body_of(node)
    body = traced(
        inside,
        weights=[read.weight for read in node.inputs],
        is_square=[read.is_square for read in node.inputs],
        size_of=size_of,
        first_slice=_first_stacked(node.inputs, inside.invars),
    )
    return (body,), node.params["length"]
