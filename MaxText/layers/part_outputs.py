"""Checks of what parts return, made while a program is traced.

A message names the part, its module and line, what it returned, and what it has to return.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from MaxText.config.registry import registration_of
from MaxText.errors import UserError
from MaxText.layers.part import Connection, LayerInputs, Part, Position


def describe(part: Any) -> str:
    """Names a part, its class or function, with the place where it was registered."""
    target = part if hasattr(part, "__name__") else type(part)
    registration = registration_of(target)
    if registration is None or registration.is_built_in:
        return target.__name__
    return f"{registration.kind} {registration.name} ({registration.location})"


def check(holds: bool, part: Any, method: str, returned: Any, expected: str) -> None:
    """Raises a UserError about what a part returned, unless a condition holds.

    Args:
      holds: The condition.
      part: The part, its class or function.
      method: Name of its method; empty for a function.
      returned: What it returned.
      expected: What it has to return, in words.
    """
    if not holds:
        caller = f"{describe(part)}: {method}" if method else describe(part)
        raise UserError(f"{caller} returned {text_of(returned)}, and has to return {expected}")


def check_output(part: Part, method: str, output: Any, x_BTD: jax.Array) -> Any:
    """Returns the output of a mixer or feed-forward.

    Args:
      part: The part.
      method: "__call__", whose output is (y_BTD, scalars), or another whose output is (y_BTD,
        decode state).
      output: What it returned.
      x_BTD: Its input, whose shape y_BTD has.
    """
    is_call = method == "__call__"
    holds = is_pair(output) and _shape(output[0]) == x_BTD.shape
    if holds and is_call:
        scalars = output[1]
        holds = isinstance(scalars, dict) and all(_shape(x) == () for x in jax.tree.leaves(scalars))
    second = "{name: scalar}" if is_call else "state"
    check(holds, part, method, output, f"({text_of(x_BTD)}, {second})")
    return output


def check_like(
    part: Any, method: str, output: Any, reference: Any, *, any_dtype: bool = True
) -> Any:
    """Returns an array with the shape of another, and with its dtype unless `any_dtype`."""
    holds = _shape(output) == reference.shape and (any_dtype or output.dtype == reference.dtype)
    check(holds, part, method, output, text_of(reference))
    return output


def check_embedding(part: Position, added: Any, x_BTD: jax.Array) -> Any:
    """Returns what a position encoding adds to the embedding x_BTD."""
    B, T, D = x_BTD.shape
    holds = added is None or _shape(added) in ((B, T, D), (1, T, D))
    check(holds, part, "embed", added, f"None or [{B} or 1, {T}, {D}]")
    return added


def check_for_mixers(part: Position, fields: Any, positions_BT: jax.Array) -> Any:
    """Returns the fields of ForwardContext that a position encoding sets."""
    T = positions_BT.shape[1]
    holds = isinstance(fields, Mapping) and set(fields) <= {"rotary", "slopes_N", "query_scale"}
    if holds:
        table = fields.get("rotary")
        slopes_N = fields.get("slopes_N")
        holds = table is None or _is_rotary_table(table, T)
        holds = holds and (slopes_N is None or len(_shape(slopes_N)) == 1)
        query_scale = fields.get("query_scale")
        holds = holds and (query_scale is None or _shape(query_scale)[1:] == (T, 1, 1))
    expected = (
        f"a dictionary of rotary: (sin, cos), [B or 1, {T}, 1, R/2] each, slopes_N: [N], or "
        f"query_scale: [B or 1, {T}, 1, 1]"
    )
    check(holds, part, "for_mixers", fields, expected)
    return fields


def _is_rotary_table(table: Any, length: int) -> bool:
    """Returns whether it is (sin, cos), both [any, length, 1, any]."""
    if not is_pair(table):
        return False
    shape = _shape(table[0])
    return _shape(table[1]) == shape and len(shape) == 4 and shape[1:3] == (length, 1)


def check_read(part: Connection, output: Any, carry: Any, emb_dim: int) -> Any:
    """Returns (LayerInputs, carry) of `Connection.read`.

    Args:
      part: The connection.
      output: What it returned.
      carry: The state that it read.
      emb_dim: D.
    """
    batch_shape = [size for x in jax.tree.leaves(carry)[:1] for size in _shape(x)[:2]]
    shape = (*batch_shape, emb_dim)
    inputs = output[0] if is_pair(output) else None
    holds = isinstance(inputs, LayerInputs) and len(jax.tree.leaves(inputs)) == len(inputs)
    holds = holds and all(_shape(x) == shape for x in jax.tree.leaves(inputs))
    check(holds, part, "read", output, f"(LayerInputs of {list(shape)} each, state)")
    return output


def check_write(part: Connection, carry: Any, new_carry: Any) -> Any:
    """Returns the state that `Connection.write` returned.

    Args:
      part: The connection.
      carry: The state before; the new one has its shapes if the part keeps them.
      new_carry: The new state.
    """
    shapes = str(jax.tree.map(text_of, carry))
    new_shapes = str(jax.tree.map(text_of, new_carry))
    holds = shapes == new_shapes or not part.keeps_shapes
    expected = f"what begin made, {shapes}, or have keeps_shapes = False"
    check(holds, part, "write", new_shapes, expected)
    return new_carry


def check_norm(function: Any, norm: Any, emb_dim: int, dtype: jnp.dtype) -> None:
    """Checks that a registered norm is a module that keeps shape and dtype.

    Args:
      function: The registered function.
      norm: What it returned.
      emb_dim: D.
      dtype: dtype of activations.
    """
    check(isinstance(norm, nnx.Module), function, "", norm, "an nnx.Module")
    x = jax.ShapeDtypeStruct((1, 2, emb_dim), dtype)
    graphdef, state = nnx.split(norm)
    output = jax.eval_shape(lambda state, x: nnx.merge(graphdef, state)(x), state, x)
    check_like(function, "its module", output, x)


def is_pair(output: Any) -> bool:
    """Returns whether it is a tuple of two."""
    return isinstance(output, tuple) and len(output) == 2


def _shape(x: Any) -> tuple[int | None, ...]:
    """Returns the shape of an array or number."""
    # Objects other than arrays have a shape that fits none.
    return () if isinstance(x, int | float) else getattr(x, "shape", (None, None))


def text_of(returned: Any) -> str:
    """Describes a returned value for a message: arrays by dtype and shape, others by type."""
    if isinstance(returned, str):
        return returned
    if hasattr(returned, "shape"):
        dtype = getattr(returned, "dtype", None)
        return f"{dtype.name if dtype else ''}[{', '.join(map(str, returned.shape))}]"
    if isinstance(returned, Mapping):
        return "{" + ", ".join(f"{name}: {text_of(x)}" for name, x in returned.items()) + "}"
    if isinstance(returned, tuple):
        name = type(returned).__name__ if hasattr(returned, "_fields") else ""
        return f"{name}({', '.join(map(text_of, returned))})"
    return str(returned) if returned is None else type(returned).__name__
