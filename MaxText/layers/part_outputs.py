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
    """Names a part, its class or function, with its registered place."""
    target = part if hasattr(part, "__name__") else type(part)
    found = registration_of(target)
    if found is None or found.is_built_in:
        return target.__name__
    return f"{found.kind} {found.name} ({found.location})"


def check(holds: bool, part: Any, method: str, returned: Any, wanted: str) -> None:
    if not holds:
        who = f"{describe(part)}: {method}" if method else describe(part)
        raise UserError(f"{who} returned {text_of(returned)}, and has to return {wanted}")


def check_output(part: Part, method: str, output: Any, x_BTD: jax.Array) -> Any:
    """Returns the output of a mixer or feed-forward, (like x_BTD, anything)."""
    is_call = method == "__call__"
    holds = is_pair(output) and _shape(output[0]) == x_BTD.shape
    if holds and is_call:
        scalars = output[1]
        holds = isinstance(scalars, dict) and all(_shape(x) == () for x in scalars.values())
    second = "{name: scalar}" if is_call else "state"
    check(holds, part, method, output, f"({text_of(x_BTD)}, {second})")
    return output


def check_like(part: Any, method: str, output: Any, like: Any, *, any_dtype: bool = True) -> Any:
    holds = _shape(output) == like.shape and (any_dtype or output.dtype == like.dtype)
    check(holds, part, method, output, text_of(like))
    return output


def check_embedding(part: Position, added: Any, x_BTD: jax.Array) -> Any:
    B, T, D = x_BTD.shape
    holds = added is None or _shape(added) in ((B, T, D), (1, T, D))
    check(holds, part, "embed", added, f"None or [{B} or 1, {T}, {D}]")
    return added


def check_for_mixers(part: Position, fields: Any, positions_BT: jax.Array) -> Any:
    T = positions_BT.shape[1]
    holds = isinstance(fields, Mapping) and set(fields) <= {"rotary", "slopes_N"}
    if holds and (table := fields.get("rotary")) is not None:
        shapes = {_shape(x) for x in table} if is_pair(table) else {()}
        first = next(iter(shapes))
        holds = len(shapes) == 1 and len(first) == 4 and first[1:3] == (T, 1)
    if holds and (slopes_N := fields.get("slopes_N")) is not None:
        holds = len(_shape(slopes_N)) == 1
    wanted = f"a dictionary of rotary: (sin, cos), [B or 1, {T}, 1, R/2] each, or slopes_N: [N]"
    check(holds, part, "for_mixers", fields, wanted)
    return fields


def check_read(part: Connection, output: Any, carry: Any, emb_dim: int) -> Any:
    wanted = (*(n for x in jax.tree.leaves(carry)[:1] for n in _shape(x)[:2]), emb_dim)
    inputs = output[0] if is_pair(output) else None
    holds = isinstance(inputs, LayerInputs) and len(jax.tree.leaves(inputs)) == len(inputs)
    holds = holds and all(_shape(x) == wanted for x in jax.tree.leaves(inputs))
    check(holds, part, "read", output, f"(LayerInputs of {list(wanted)} each, state)")
    return output


def check_write(part: Connection, before: Any, after: Any) -> Any:
    """Returns `after`, a state with the shapes of `before` if it keeps them."""
    old, new = (str(jax.tree.map(text_of, carry)) for carry in (before, after))
    wanted = f"what begin made, {old}, or have keeps_shapes = False"
    check(old == new or not part.keeps_shapes, part, "write", new, wanted)
    return after


def check_norm(function: Any, norm: Any, emb_dim: int, dtype: jnp.dtype) -> None:
    check(isinstance(norm, nnx.Module), function, "", norm, "an nnx.Module")
    x = jax.ShapeDtypeStruct((1, 2, emb_dim), dtype)
    graphdef, state = nnx.split(norm)
    found = jax.eval_shape(lambda state, x: nnx.merge(graphdef, state)(x), state, x)
    check_like(function, "its module", found, x)


def is_pair(output: Any) -> bool:
    return isinstance(output, tuple) and len(output) == 2


def _shape(x: Any) -> tuple[int | None, ...]:
    # Objects other than arrays have a shape that fits none.
    return () if isinstance(x, int | float) else getattr(x, "shape", (None, None))


def text_of(returned: Any) -> str:
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
