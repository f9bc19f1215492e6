"""A function that was written for float32, computed in float64.

Models cast to float32 in many places, so they cannot be called with float64 arrays. Their traced
program can: each operation of it is bound again with float64 operands. What is left of the
difference to the compiled float32 program is rounding.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

FLOAT32, FLOAT64 = np.dtype("float32"), np.dtype("float64")
# Primitives that call another program, which is a parameter of theirs.
_CALLS = ("jaxpr", "call_jaxpr")


def in_float64(function: Callable, *arguments: Any) -> Any:
    """Returns function(*arguments) with every operation in float64, as NumPy arrays."""
    return compiled_in_float64(function, *arguments)(*arguments)


def compiled_in_float64(function: Callable, *arguments: Any) -> Callable:
    """Returns `function` in float64, for arguments of these shapes in float32 or float64."""
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    structure = jax.tree.structure(shapes)
    compiled = jax.jit(lambda *leaves: _evaluate(closed.jaxpr, closed.consts, leaves))

    def call(*arguments: Any) -> Any:
        with jax.enable_x64(True):
            results = compiled(*(_widened(np.asarray(leaf)) for leaf in jax.tree.leaves(arguments)))
            return jax.tree.unflatten(structure, [np.asarray(result) for result in results])

    return call


def _widened(x: Any) -> Any:
    return x.astype(FLOAT64) if x.dtype == FLOAT32 else x


def _wide_parameter(value: Any) -> Any:
    """Returns a primitive's parameter, float64 if it is the dtype float32."""
    is_float32 = isinstance(value, np.dtype | type) and value in (FLOAT32, np.float32)
    return FLOAT64 if is_float32 else value


def _evaluate(jaxpr: Any, constants: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
    values: dict[Any, Any] = {}
    values.update(zip(jaxpr.constvars, map(_widened, constants), strict=True))
    values.update(zip(jaxpr.invars, arguments, strict=True))

    def read(variable: Any) -> Any:
        if hasattr(variable, "val"):  # a literal
            return _widened(np.asarray(variable.val))
        return values[variable]

    for equation in jaxpr.eqns:
        operands = [read(variable) for variable in equation.invars]
        results = _apply(equation.primitive, equation.params, operands)
        values.update(zip(equation.outvars, results, strict=True))
    return [read(variable) for variable in jaxpr.outvars]


def _apply(primitive: Any, parameters: dict[str, Any], operands: list[Any]) -> list[Any]:
    if primitive.name == "scan":
        return _scan(parameters, operands)
    called = next((parameters[name] for name in _CALLS if name in parameters), None)
    if called is not None:
        program = getattr(called, "jaxpr", called)
        return _evaluate(program, getattr(called, "consts", ()), operands)
    if primitive.name == "scatter-add":  # holds its sum as a program of float32
        names = ("indices_are_sorted", "unique_indices", "mode")
        options = {name: parameters[name] for name in names}
        array, indices, updates = operands
        numbers = parameters["dimension_numbers"]
        return [jax.lax.scatter_add(array, indices, updates, numbers, **options)]
    wide = {name: _wide_parameter(value) for name, value in parameters.items()}
    results = primitive.bind(*map(jnp.asarray, operands), **wide)
    return list(results) if primitive.multiple_results else [results]


def _scan(parameters: dict[str, Any], operands: list[Any]) -> list[Any]:
    num_constants, num_carried = parameters["num_consts"], parameters["num_carry"]
    constants = operands[:num_constants]
    carried = operands[num_constants : num_constants + num_carried]
    body = parameters["jaxpr"]

    def step(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        results = _evaluate(body.jaxpr, body.consts, [*constants, *carry, *xs])
        return results[:num_carried], results[num_carried:]

    carried, stacked = jax.lax.scan(
        step,
        list(carried),
        list(operands[num_constants + num_carried :]),
        length=parameters["length"],
        reverse=parameters["reverse"],
    )
    return [*carried, *stacked]
