"""Comparison of a stored state with the one of a configuration; reads no arrays."""

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from MaxText.config import import_modules
from MaxText.config.catalogue import all_keys
from MaxText.config.saved import differences
from MaxText.config.schema import SCHEMA_VERSION
from MaxText.errors import UserError

_MOST_LINES = 20
# Sections whose keys decide the names and shapes of parameters and optimizer state.
_SHAPING_SECTIONS = ("model", "optimizer")


# The path of a leaf, as jax.tree_util gives it, in words: "decoder/wi". As Orbax stores them, named
# tuples go by their field names and tuples by their indices.
path_name = functools.partial(jax.tree_util.keystr, simple=True, separator="/")


class ConfigHint(NamedTuple):
    """Configurations that explain a difference.

    Attributes:
      stored: Flat configuration in the checkpoint, None if unknown.
      is_own: Whether it is a checkpoint of the run itself, not one that a key names.
    """

    stored: Mapping[str, Any] | None
    current: Mapping[str, Any]
    is_own: bool = False


class Leaf(NamedTuple):
    """Shape and format of an array."""

    shape: tuple[int, ...]
    dtype: np.dtype

    def __str__(self) -> str:
        return f"{self.dtype.name}[{','.join(map(str, self.shape))}]"


class Cast(NamedTuple):
    """An array whose format changes while it is loaded."""

    path: str
    stored: np.dtype
    wanted: np.dtype


def leaves_by_path(tree: Any) -> dict[str, Leaf]:
    """Returns arrays of a tree by path, such as "opt_state/1/0/mu/decoder/wi"."""
    return {
        path_name(path): Leaf(tuple(leaf.shape), np.dtype(leaf.dtype))
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }


def check_matches(stored_tree: Any, abstract_tree: Any, config_hint: ConfigHint) -> list[Cast]:
    """Compares names, shapes and formats.

    Args:
      stored_tree: The checkpoint's description; leaves have .shape and .dtype.
      abstract_tree: What is wanted, such as a dict of jax.ShapeDtypeStruct.
      config_hint: To name the keys responsible.

    Returns:
      The floating point arrays whose format differs; they are cast on load.

    Raises:
      UserError: Arrays are missing, extra, or of another shape or kind of number.
    """
    stored, wanted = leaves_by_path(stored_tree), leaves_by_path(abstract_tree)
    problems = [
        f"missing     {path}: the checkpoint has none, wanted {leaf}"
        for path, leaf in wanted.items()
        if path not in stored
    ]
    problems += [
        f"extra       {path}: stored {leaf}, unknown to this model"
        for path, leaf in stored.items()
        if path not in wanted
    ]
    casts = []
    for path, leaf in wanted.items():
        found = stored.get(path, leaf)
        if found.shape != leaf.shape:
            problems.append(f"other shape {path}: stored {found}, wanted {leaf}")
        elif found.dtype != leaf.dtype:
            if jax.numpy.issubdtype(found.dtype, jax.numpy.floating) and jax.numpy.issubdtype(
                leaf.dtype, jax.numpy.floating
            ):
                casts.append(Cast(path, found.dtype, leaf.dtype))
            else:
                problems.append(f"other kind  {path}: stored {found}, wanted {leaf}")
    if problems:
        raise UserError(explain(problems, config_hint, _MOST_LINES))
    return casts


def describe_casts(casts: Sequence[Cast]) -> list[str]:
    """Returns lines about the formats that change on load."""
    counts: dict[tuple[str, str, str], int] = {}
    for cast in casts:
        kind = (cast.path.split("/")[0], cast.stored.name, cast.wanted.name)
        counts[kind] = counts.get(kind, 0) + 1
    return [
        f"  {count} arrays of {branch} are cast on load: {stored} -> {wanted}"
        for (branch, stored, wanted), count in counts.items()
    ]


def explain(problems: Sequence[str], hint: ConfigHint, most_lines: int | None = None) -> str:
    """Returns a message with the problems and the keys that are responsible.

    Args:
      problems: One line each.
      most_lines: Problems to list; None lists all.
    """
    shown = problems[:most_lines]
    lines = ["the checkpoint does not fit this configuration (nothing was changed on disk):"]
    lines += [f"  {problem}" for problem in shown]
    if len(problems) > len(shown):
        lines.append(f"  ... and {len(problems) - len(shown)} more")
    if hint.stored is None:
        lines.append("  The checkpoint does not say which configuration it was made with.")
        return "\n".join(lines)
    shaping = {name for name, key in all_keys().items() if key.section[0] in _SHAPING_SECTIONS}
    changed = [
        f"  {name}: {old} -> {new}"
        for name, (old, new) in differences(hint.stored, hint.current).items()
        if name in shaping
    ]
    if changed:
        lines.append("Keys of the model or the optimizer that differ (checkpoint -> now):")
        lines += changed
        # Another run_name would meet the same weights where a key names them.
        other = "start another run_name" if hint.is_own else "load other weights"
        lines.append(f"Set them back, or {other}.")
    else:
        lines.append("  No key of the model or the optimizer differs: the program itself changed.")
    return "\n".join(lines)


def parameter_hash(params: Any) -> str:
    """Returns 16 hex digits of the names, shapes and formats of parameters."""
    table = sorted(f"{path} {leaf}" for path, leaf in leaves_by_path(params).items())
    return hashlib.sha256("\n".join(table).encode()).hexdigest()[:16]


def checkpoint_metadata(config_flat: Mapping[str, Any], params: Any) -> dict[str, Any]:
    """Returns what is stored next to the state to explain it without the run.

    Args:
      config_flat: The resolved configuration by key.
      params: Parameters or their shapes.
    """
    modules = import_modules.imported(config_flat.get(import_modules.KEY) or ())
    return {
        "schema_version": SCHEMA_VERSION,
        **({import_modules.METADATA: modules} if modules else {}),
        "config": json.loads(json.dumps(dict(config_flat), default=str)),
        "parameter_hash": parameter_hash(params),
        "num_parameters": sum(int(np.prod(x.shape)) for x in jax.tree.leaves(params)),
    }
