"""Operations and constants of a traced program, counted without compiling it.

Unlike XLA's own count, loops are multiplied out, and nothing depends on a backend. Counted are
matrix products (2 FLOPs per multiply-add), convolutions, and one operation per element of
arithmetic and reductions, so that a product written as a sum of products is not free.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.extend import core

# One operation per element of the result.
_ELEMENTWISE = frozenset(
    {
        "abs",
        "acos",
        "add",
        "add_any",
        "asin",
        "atan",
        "atan2",
        "cbrt",
        "ceil",
        "clamp",
        "cos",
        "cosh",
        "cumlogsumexp",
        "cummax",
        "cummin",
        "cumprod",
        "cumsum",
        "digamma",
        "div",
        "erf",
        "erf_inv",
        "erfc",
        "exp",
        "exp2",
        "expm1",
        "floor",
        "integer_pow",
        "lgamma",
        "log",
        "log1p",
        "logistic",
        "max",
        "min",
        "mul",
        "neg",
        "nextafter",
        "pow",
        "rem",
        "round",
        "rsqrt",
        "sign",
        "sin",
        "sinh",
        "sqrt",
        "square",
        "sub",
        "tan",
        "tanh",
    }
)
# Programs outside of XLA, whose work a jaxpr does not tell.
_OPAQUE = ("callback", "ffi_call", "custom_call", "infeed", "outfeed")
# Computations that run on the host while a step runs.
_HOST = ("callback", "infeed", "outfeed")


@dataclasses.dataclass(frozen=True)
class TracedOperations:
    """Operations of a program.

    Attributes:
      matmul_flops: FLOPs of matrix products, 2 per multiply-add.
      convolution_flops: FLOPs of convolutions, 2 per multiply-add.
      elementwise_flops: One per element of arithmetic, and per element that is reduced.
      uncounted: What hides its operations: calls out of XLA, and products in loops of unknown
        length.
    """

    matmul_flops: int = 0
    convolution_flops: int = 0
    elementwise_flops: int = 0
    uncounted: tuple[str, ...] = ()

    @property
    def flops(self) -> int:
        """All operations."""
        return self.matmul_flops + self.convolution_flops + self.elementwise_flops

    def __add__(self, other: "TracedOperations") -> "TracedOperations":
        return TracedOperations(
            self.matmul_flops + other.matmul_flops,
            self.convolution_flops + other.convolution_flops,
            self.elementwise_flops + other.elementwise_flops,
            tuple(dict.fromkeys((*self.uncounted, *other.uncounted))),
        )

    def times(self, count: int) -> "TracedOperations":
        """Returns the operations of `count` repetitions."""
        return TracedOperations(
            count * self.matmul_flops,
            count * self.convolution_flops,
            count * self.elementwise_flops,
            self.uncounted,
        )


def count_operations(jaxpr: core.Jaxpr) -> TracedOperations:
    """Returns the operations of a jaxpr, with loops multiplied out.

    Of the branches of a conditional, the most expensive one counts.

    Args:
      jaxpr: Of a traced function (`jax.jit(f).trace(...).jaxpr.jaxpr`).
    """
    total = TracedOperations()
    for equation in jaxpr.eqns:
        total += _of_equation(equation)
    return total


def _of_equation(equation: core.JaxprEqn) -> TracedOperations:
    """Returns the operations of one equation and of the programs inside of it."""
    name = equation.primitive.name
    inner = [count_operations(closed) for closed, _ in _inner_jaxprs(equation)]
    if name == "cond":
        return max(inner, key=lambda branch: branch.flops)
    body = sum(inner, start=TracedOperations())
    if name == "scan":
        return body.times(equation.params["length"])
    if name == "while" and body.matmul_flops + body.convolution_flops:
        return body + TracedOperations(uncounted=("products in a loop of unknown length",))
    if name == "pallas_call":
        return body.times(math.prod(equation.params["grid_mapping"].grid))
    if any(word in name for word in _OPAQUE):
        return body + TracedOperations(uncounted=(name,))
    return body + TracedOperations(
        matmul_flops=_matmul_flops(equation),
        convolution_flops=_convolution_flops(equation),
        elementwise_flops=_elementwise_flops(equation),
    )


def _inner_jaxprs(equation: core.JaxprEqn) -> Iterator[tuple[core.Jaxpr, tuple[Any, ...]]]:
    """Yields the programs inside of an equation, each with the constants that it holds."""
    for value in jax.tree.leaves(list(equation.params.values())):
        inner = getattr(value, "jaxpr", value)
        if hasattr(inner, "eqns"):
            yield inner, tuple(getattr(value, "consts", ()))


def _shape(value: Any) -> tuple[int, ...]:
    """Returns the shape of an input or output of an equation; () for what is no array."""
    return getattr(value.aval, "shape", ())


def _matmul_flops(equation: core.JaxprEqn) -> int:
    """Returns the FLOPs of a matrix product; 0 for another equation."""
    name = equation.primitive.name
    if name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        lhs = _shape(equation.invars[0])
        outputs = math.prod(_shape(equation.outvars[0]))
        return 2 * outputs * math.prod(lhs[dimension] for dimension in contracted)
    if name == "ragged_dot_general":
        # Each row of the left times one matrix, or rows of both sides contracted.
        rows = math.prod(_shape(equation.invars[0]))
        return 2 * rows * _shape(equation.outvars[0])[-1]
    return 0


def _convolution_flops(equation: core.JaxprEqn) -> int:
    """Returns the FLOPs of a convolution; 0 for another equation."""
    if equation.primitive.name != "conv_general_dilated":
        return 0
    kernel = _shape(equation.invars[1])
    dimensions = equation.params["dimension_numbers"]
    num_outputs = kernel[dimensions.rhs_spec[0]]
    outputs = math.prod(_shape(equation.outvars[0]))
    return 2 * outputs * math.prod(kernel) // num_outputs


def _elementwise_flops(equation: core.JaxprEqn) -> int:
    """Returns one operation per element of arithmetic or of a reduction; 0 for the rest."""
    name = equation.primitive.name
    if name in _ELEMENTWISE:
        return math.prod(_shape(equation.outvars[0]))
    if name.startswith(("reduce_", "argmax", "argmin")) and name != "reduce_precision":
        return math.prod(_shape(equation.invars[0]))
    if name.startswith("scatter"):
        return math.prod(_shape(equation.invars[-1]))  # of the updates
    return 0


def constants(closed: core.ClosedJaxpr) -> list[Any]:
    """Returns the arrays that a program holds, in all of its inner programs; each of them once.

    Args:
      closed: A traced function (`jax.jit(f).trace(...).jaxpr`).
    """
    arrays = {id(array): array for array in closed.consts}
    pending = [closed.jaxpr]
    while pending:
        jaxpr = pending.pop()
        for equation in jaxpr.eqns:
            for inner, inner_constants in _inner_jaxprs(equation):
                arrays |= {id(array): array for array in inner_constants}
                pending.append(inner)
            literals = (x.val for x in equation.invars if isinstance(x, core.Literal))
            arrays |= {id(value): value for value in literals if np.ndim(value)}
    return [array for array in arrays.values() if hasattr(array, "dtype")]


def host_computations(jaxpr: core.Jaxpr) -> list[str]:
    """Returns the names of the primitives that run Python on the host during a step.

    Args:
      jaxpr: Of a traced function, whose inner programs are searched, too.
    """
    names: dict[str, None] = {}
    pending = [jaxpr]
    while pending:
        for equation in pending.pop().eqns:
            name = equation.primitive.name
            if any(word in name for word in _HOST):
                names[name] = None
            pending += [inner for inner, _ in _inner_jaxprs(equation)]
    return list(names)
