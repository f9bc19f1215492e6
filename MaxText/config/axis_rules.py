"""Logical axis rules: MaxText's list format, and merging by name."""

from typing import Any

from MaxText.config import values
from MaxText.config.problems import close_matches
from MaxText.config.registry import registrations
from MaxText.config.training_sections import LOGICAL_AXIS_RULES

# Outermost first: those with the most communication are between neighbors.
MESH_AXES = ("data", "stage", "fsdp", "fsdp_transpose", "context", "expert", "tensor")
# ici: inside a slice; dcn: across slices.
NETWORKS = ("ici", "dcn")
KNOWN = f"axes are {', '.join(MESH_AXES)}"

Rules = tuple[tuple[str, tuple[str, ...]], ...]


def size_key(axis: str, network: str = "ici") -> str:
    """Returns the key with the size of a mesh axis."""
    return f"{network}_{'pipeline' if axis == 'stage' else axis}_parallelism"


def parse(value: Any) -> Rules:
    """Parses MaxText's list of [name, axis], [name, [axes]], [name, null].

    Raises:
      values.InvalidValueError: Another form, an unknown logical name or mesh axis, or an axis
        twice.
    """
    if values.is_null(value):
        return ()
    if not isinstance(value, list | tuple):
        raise values.InvalidValueError(
            f"{values.format_value(value)} is not a list of [name, axes] pairs"
        )
    return tuple(_rule(item) for item in value)


def _rule(item: Any) -> tuple[str, tuple[str, ...]]:
    if not isinstance(item, list | tuple) or len(item) != 2 or not isinstance(item[0], str):
        raise values.InvalidValueError(f"{values.format_value(item)} is not a pair [name, axes]")
    name, given = str(item[0]), item[1]
    known_names = tuple(dict.fromkeys(name for name, _ in default_rules()))
    if name not in known_names:
        close = close_matches(name, known_names) or known_names
        raise values.InvalidValueError(
            f"unknown logical name {name!r}; nearest: {', '.join(close)}"
        )
    if values.is_null(given) or given == "":
        given = []
    axes = [given] if isinstance(given, str) else given
    if not isinstance(axes, list | tuple):
        raise values.InvalidValueError(
            f"{name}: {values.format_value(given)} is not a mesh axis or a list of them"
        )
    for axis in axes:
        if axis not in MESH_AXES:
            known = ", ".join(MESH_AXES)
            raise values.InvalidValueError(
                f"{name}: unknown mesh axis {values.format_value(axis)}; known: {known}"
            )
    if len(set(axes)) != len(axes):
        raise values.InvalidValueError(
            f"{name}: a mesh axis is named twice in {values.format_value(axes)}"
        )
    return name, tuple(str(axis) for axis in axes)


def default_rules() -> Rules:
    """Returns the rules of the schema and of the axes of registered parts."""
    of_parts: dict[str, tuple[str, ...]] = {}
    for part in registrations():
        if not part.is_built_in:
            of_parts |= getattr(part.target, "logical_axes", {})
    return merge(LOGICAL_AXIS_RULES, tuple(of_parts.items()))


def merge(base: Rules, given: Rules) -> Rules:
    """Returns `given`, then `base` without its names; order is priority."""
    replaced = {name for name, _ in given}
    return given + tuple(rule for rule in base if rule[0] not in replaced)
