"""Checks checkpoint metadata against the expected train state."""

import collections
import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from MaxText.config import import_modules
from MaxText.config.schema import SCHEMA_VERSION, all_keys
from MaxText.config.serialization import diff_configs
from MaxText.config.sources import IMPORTED
from MaxText.errors import UserError
from MaxText.value_types import JsonObject, PyTree

_MAX_LINES = 20
# Sections that determine the names and shapes of parameters and optimizer state.
_SHAPING_SECTIONS = ("model", "optimizer")


# Orbax's path of a leaf ("decoder/wi"): field names of named tuples, indices of tuples.
leaf_path = functools.partial(jax.tree_util.keystr, simple=True, separator="/")


class ConfigDiff(NamedTuple):
    """Configurations by key, to explain a mismatch."""

    stored: Mapping[str, Any] | None  # of the checkpoint, if it has one
    current: Mapping[str, Any]
    is_same_run: bool = False  # whether the run itself saved the checkpoint


class ArraySpec(NamedTuple):
    """Shape and dtype of an array; as text "float32[3,16,8]"."""

    shape: tuple[int, ...]
    dtype: np.dtype

    def __str__(self) -> str:
        return f"{self.dtype.name}[{','.join(map(str, self.shape))}]"

    @property
    def is_floating(self) -> bool:
        """Whether the dtype is a floating-point one, bfloat16 included."""
        return bool(jax.numpy.issubdtype(self.dtype, jax.numpy.floating))


# Stored and wanted format of each array to cast on load, by path.
Casts = Mapping[str, tuple[np.dtype, np.dtype]]


def array_specs(tree: PyTree) -> dict[str, ArraySpec]:
    """Returns the arrays of a tree by path: "opt_state/1/0/mu/decoder/wi"."""
    return {
        leaf_path(path): ArraySpec(tuple(leaf.shape), np.dtype(leaf.dtype))
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }


def check_compatible(stored_tree: PyTree, abstract_tree: PyTree, config_diff: ConfigDiff) -> Casts:
    """Returns the float arrays to cast on load.

    Args:
      stored_tree: What the checkpoint has: leaves with shape and dtype.
      abstract_tree: What the run expects.
      config_diff: To explain a mismatch.

    Raises:
      UserError: For a mismatch.
    """
    _check_parametrization(config_diff)
    stored = array_specs(stored_tree)
    expected = array_specs(abstract_tree)
    if problems := mismatches(stored, expected):
        raise UserError(format_mismatches(problems, config_diff, _MAX_LINES))
    return {
        path: (stored[path].dtype, spec.dtype)
        for path, spec in expected.items()
        if stored[path].dtype != spec.dtype
    }


def _check_parametrization(config_diff: ConfigDiff) -> None:
    """Refuses weights of another parametrization: they have the same shapes, and other factors."""
    if config_diff.stored is None:
        return
    keys = [key for key in all_keys().values() if key.section == ("model", "parametrization")]
    # Checkpoints from before these keys are in standard form, which the defaults say.
    stored = {key.name: config_diff.stored.get(key.name, key.default) for key in keys}
    current = {key.name: config_diff.current.get(key.name, key.default) for key in keys}
    if stored["parametrization"] == current["parametrization"] == "standard":
        return
    if differences := diff_configs(stored, current):
        changed = ", ".join(f"{name} {old} -> {new}" for name, (old, new) in differences.items())
        raise UserError(
            f"the checkpoint was trained under another parametrization ({changed}): its weights "
            "and moments do not fit these multipliers\n"
            "  What to do: set these keys as they were, or start another run_name from scratch"
        )


def mismatches(
    stored: Mapping[str, Any],
    expected: Mapping[str, ArraySpec],
    explain_shape: Callable[[str], str | None] = lambda path: "",
) -> list[str]:
    """Describes different names, shapes and kinds; floats are one kind.

    Args:
      stored: Arrays of the checkpoint by path: ArraySpec, or a type with its attributes.
      expected: Arrays of the model by path.
      explain_shape: Gets the path of an array with another shape; returns a note for the message,
        or None if the shape may differ.
    """
    problems = [
        f"missing     {path}: the checkpoint has none, wanted {spec}"
        for path, spec in expected.items()
        if path not in stored
    ]
    problems += [
        f"extra       {path}: stored {spec}, unknown to this model"
        for path, spec in stored.items()
        if path not in expected
    ]
    for path, spec in expected.items():
        stored_spec = stored.get(path, spec)
        if stored_spec.shape != spec.shape and (note := explain_shape(path)) is not None:
            problems.append(f"other shape {path}: stored {stored_spec}, wanted {spec}{note}")
        elif stored_spec.dtype != spec.dtype and not (stored_spec.is_floating and spec.is_floating):
            problems.append(f"other kind  {path}: stored {stored_spec}, wanted {spec}")
    return problems


def log_casts(casts: Casts, log: Callable[[str], None]) -> None:
    """Logs how many arrays of each branch of the tree are cast, and how."""
    counts = collections.Counter((path.split("/")[0], *casts[path]) for path in casts)
    for (branch, stored_dtype, dtype), count in counts.items():
        log(f"  {count} arrays of {branch} are cast on load: {stored_dtype.name} -> {dtype.name}")


def format_mismatches(
    problems: Sequence[str], config_diff: ConfigDiff, max_lines: int | None = None
) -> str:
    """Returns an error message with the problems and the keys responsible.

    Args:
      problems: Of `mismatches`.
      max_lines: How many of them to list; None for all.
    """
    shown_problems = problems[:max_lines]
    lines = ["the checkpoint does not fit this configuration (nothing was changed on disk):"]
    lines += [f"  {problem}" for problem in shown_problems]
    if len(problems) > len(shown_problems):
        lines.append(f"  ... and {len(problems) - len(shown_problems)} more")
    if config_diff.stored is None:
        lines.append("  The checkpoint does not record its configuration.")
        return "\n".join(lines)
    shaping = {name for name, key in all_keys().items() if key.section[0] in _SHAPING_SECTIONS}
    differences = diff_configs(config_diff.stored, config_diff.current)
    changed = [
        f"  {name}: {stored_value} -> {value}"
        for name, (stored_value, value) in differences.items()
        if name in shaping
    ]
    if not changed:
        changed = ["  No key of the model or the optimizer differs, so the program itself changed."]
        return "\n".join(lines + changed)
    lines.append("Keys of the model or the optimizer that differ (checkpoint -> now):")
    # If a key names the weights, a new run_name would load the same ones.
    alternative = "start another run_name" if config_diff.is_same_run else "load other weights"
    return "\n".join([*lines, *changed, f"Set them back, or {alternative}."])


def checkpoint_metadata(config_flat: Mapping[str, Any], params: PyTree) -> JsonObject:
    """Returns metadata to explain a stored state without the run.

    Args:
      config_flat: The configuration by key.
      params: The parameters, arrays or specs.
    """
    modules = import_modules.imported(config_flat.get(import_modules.KEY) or ())
    table = sorted(f"{path} {leaf}" for path, leaf in array_specs(params).items())
    return {
        "schema_version": SCHEMA_VERSION,
        **({IMPORTED: modules} if modules else {}),
        "config": json.loads(json.dumps(dict(config_flat), default=str)),
        "parameter_hash": hashlib.sha256("\n".join(table).encode()).hexdigest()[:16],
        "num_parameters": sum(int(np.prod(x.shape)) for x in jax.tree.leaves(params)),
    }
