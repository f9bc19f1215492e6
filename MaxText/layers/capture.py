"""Captures intermediate values by path, for `Run.forward(capture=...)`.

A path ends in the value's name: layers/3/self_attention/probabilities. Off outside `capturing`.

Parts name their values with `tag` or `record`, both exported by MaxText.layers.part. Blocks and the
decoder record the inputs and outputs of every part, so a part that names nothing is not invisible.
"""

import contextlib
import contextvars
import dataclasses
import fnmatch
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import get_opaque_trace_state


@dataclasses.dataclass
class Captured:
    """Values recorded while a model is traced.

    Attributes:
      patterns: Paths to capture, with * as in file names.
      values: Captured values by path.
      paths: All paths that the model has.
      inner_paths: Paths of values that exist only within a loop or another transformation inside
        the model, and so cannot be captured.
      trace_state: The trace in which values can be captured.
    """

    patterns: Sequence[str]
    values: dict[str, jax.Array] = dataclasses.field(default_factory=dict)
    paths: list[str] = dataclasses.field(default_factory=list)
    inner_paths: list[str] = dataclasses.field(default_factory=list)
    trace_state: Any = dataclasses.field(default_factory=get_opaque_trace_state)


_active: contextvars.ContextVar[Captured | None] = contextvars.ContextVar("capture", default=None)
_path: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar("path", default=())


@contextlib.contextmanager
def capturing(patterns: Sequence[str]) -> Iterator[Captured]:
    """Records matching values of unrolled layers traced in this context.

    Args:
      patterns: Paths to capture, with * as in file names.
    """
    token = _active.set(Captured(patterns))
    try:
        yield _active.get()  # type: ignore[misc]
    finally:
        _active.reset(token)


def is_on() -> bool:
    """Returns whether values are captured."""
    return _active.get() is not None


@contextlib.contextmanager
def scope(name: str) -> Iterator[None]:
    """Adds a name to the paths of values that are recorded in this context."""
    token = _path.set((*_path.get(), name))
    try:
        yield
    finally:
        _path.reset(token)


def record(x: jax.Array, name: str) -> None:
    """Names an intermediate value for `capturing` alone; `tag` also names it for remat policies.

    A value inside of `jax.lax.scan`, `jax.vmap`, `jax.jit` and the like cannot leave it. Return it
    from there, and record it outside.

    Args:
      x: The value.
      name: Last name of its path. Further values of the same path are called `name:1`, `name:2`.
    """
    captured = _active.get()
    if captured is None:
        return
    path = "/".join((*_path.get(), name))
    while path in captured.paths or path in captured.inner_paths:  # several products with one name
        stem, _, number = path.partition(":")
        path = f"{stem}:{int(number or 0) + 1}"
    if captured.trace_state != get_opaque_trace_state():
        captured.inner_paths.append(path)
        return
    captured.paths.append(path)
    if any(fnmatch.fnmatchcase(path, pattern) for pattern in captured.patterns):
        captured.values[path] = x


def tag(x: jax.Array, name: str) -> jax.Array:
    """Names an intermediate value for remat policies and `capturing`; returns it.

    The way to make a value visible, in built-in parts and in those of users.

    Args:
      x: The value.
      name: Last name of its path, and its name in remat policies.
    """
    record(x, name)
    return checkpoint_name(x, name)
