"""Checks checkpoint metadata against the expected train state, without reading arrays."""

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from MaxText.config import import_modules
from MaxText.config.catalog import all_keys
from MaxText.config.schema import SCHEMA_VERSION
from MaxText.config.serialization import diff_configs
from MaxText.errors import UserError

_MOST_LINES = 20
# Sections that determine the names and shapes of parameters and optimizer state.
_SHAPING_SECTIONS = ("model", "optimizer")


# Orbax's path of a leaf ("decoder/wi"): field names of named tuples, indices of tuples.
path_name = functools.partial(jax.tree_util.keystr, simple=True, separator="/")


class ConfigHint(NamedTuple):
    """Configurations that explain a mismatch; `is_own` if the run itself saved the checkpoint."""

    stored: Mapping[str, Any] | None
    current: Mapping[str, Any]
    is_own: bool = False


class Leaf(NamedTuple):
    """Shape and dtype of an array."""

    shape: tuple[int, ...]
    dtype: np.dtype

    def __str__(self) -> str:
        return f"{self.dtype.name}[{','.join(map(str, self.shape))}]"


class Cast(NamedTuple):
    """An array that is cast on load."""

    path: str
    stored: np.dtype
    wanted: np.dtype


def leaves_by_path(tree: Any) -> dict[str, Leaf]:
    """Returns the arrays of a tree by path, e.g. "opt_state/1/0/mu/decoder/wi"."""
    return {
        path_name(path): Leaf(tuple(leaf.shape), np.dtype(leaf.dtype))
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }


def check_matches(stored_tree: Any, abstract_tree: Any, config_hint: ConfigHint) -> list[Cast]:
    """Returns the float arrays to cast on load; UserError if names, shapes or kinds differ."""
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
    """Returns log lines about dtype casts on load."""
    counts: dict[tuple[str, str, str], int] = {}
    for cast in casts:
        kind = (cast.path.split("/")[0], cast.stored.name, cast.wanted.name)
        counts[kind] = counts.get(kind, 0) + 1
    return [
        f"  {count} arrays of {branch} are cast on load: {stored} -> {wanted}"
        for (branch, stored, wanted), count in counts.items()
    ]


def explain(problems: Sequence[str], hint: ConfigHint, most_lines: int | None = None) -> str:
    """Returns an error message with the problems and the configuration keys responsible."""
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
        for name, (old, new) in diff_configs(hint.stored, hint.current).items()
        if name in shaping
    ]
    if changed:
        lines.append("Keys of the model or the optimizer that differ (checkpoint -> now):")
        lines += changed
        # If a key names the weights, a new run_name would load the same ones.
        other = "start another run_name" if hint.is_own else "load other weights"
        lines.append(f"Set them back, or {other}.")
    else:
        lines.append("  No key of the model or the optimizer differs: the program itself changed.")
    return "\n".join(lines)


def parameter_hash(params: Any) -> str:
    """Returns 16 hex digits that identify the names, shapes and dtypes of parameters."""
    table = sorted(f"{path} {leaf}" for path, leaf in leaves_by_path(params).items())
    return hashlib.sha256("\n".join(table).encode()).hexdigest()[:16]


def checkpoint_metadata(config_flat: Mapping[str, Any], params: Any) -> dict[str, Any]:
    """Returns the metadata that explains a stored state without the run."""
    modules = import_modules.imported(config_flat.get(import_modules.KEY) or ())
    return {
        "schema_version": SCHEMA_VERSION,
        **({import_modules.METADATA: modules} if modules else {}),
        "config": json.loads(json.dumps(dict(config_flat), default=str)),
        "parameter_hash": parameter_hash(params),
        "num_parameters": sum(int(np.prod(x.shape)) for x in jax.tree.leaves(params)),
    }
