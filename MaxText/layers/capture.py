"""Intermediate values by path, for whoever looks into a model: `Run.forward(capture=...)`.

Paths are those of modules, with the name of the value: layers/3/self_attention/probabilities.
Nothing is recorded, and nothing computed, outside of `capturing`.
"""

import contextlib
import contextvars
import dataclasses
import fnmatch
from collections.abc import Iterator, Sequence

import jax
from jax.ad_checkpoint import checkpoint_name


@dataclasses.dataclass
class Captured:
    """What was recorded while a model was traced.

    Attributes:
      patterns: of the paths to keep, with * as in file names.
      values: path -> array.
      paths: all that there were.
    """

    patterns: Sequence[str]
    values: dict[str, jax.Array] = dataclasses.field(default_factory=dict)
    paths: list[str] = dataclasses.field(default_factory=list)


_active: contextvars.ContextVar[Captured | None] = contextvars.ContextVar("capture", default=None)
_path: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar("path", default=())


@contextlib.contextmanager
def capturing(patterns: Sequence[str]) -> Iterator[Captured]:
    """Records values of unrolled layers that are traced inside."""
    token = _active.set(Captured(patterns))
    try:
        yield _active.get()  # type: ignore[misc]
    finally:
        _active.reset(token)


def is_on() -> bool:
    """Whether values are recorded."""
    return _active.get() is not None


@contextlib.contextmanager
def scope(name: str) -> Iterator[None]:
    """Puts a name before the paths of what is recorded inside."""
    token = _path.set((*_path.get(), name))
    try:
        yield
    finally:
        _path.reset(token)


def record(x: jax.Array, name: str) -> None:
    """Records an intermediate value, if somebody asked for it."""
    captured = _active.get()
    if captured is None:
        return
    path = "/".join((*_path.get(), name))
    while path in captured.paths:  # several products with one name
        stem, _, number = path.partition(":")
        path = f"{stem}:{int(number or 0) + 1}"
    captured.paths.append(path)
    if any(fnmatch.fnmatchcase(path, pattern) for pattern in captured.patterns):
        captured.values[path] = x


def tag(x: jax.Array, name: str) -> jax.Array:
    """An intermediate value with a name that remat policies and `capturing` know."""
    record(x, name)
    return checkpoint_name(x, name)
