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
_PAIRS = tuple[tuple[str, str | tuple[str, ...] | None], ...]


def size_key(axis: str, network: str = "ici") -> str:
    return f"{network}_{'pipeline' if axis == 'stage' else axis}_parallelism"


def parse(value: Any) -> Rules:
    """Parses MaxText's list of [name, axis], [name, [axes]], [name, null]."""
    known_names = tuple(dict.fromkeys(name for name, _ in default_rules()))
    rules = []
    for name, given in values.convert(value, _PAIRS):
        axes = (given,) if isinstance(given, str) and given else tuple(given or ())
        if name not in known_names:
            close = ", ".join(close_matches(name, known_names) or known_names)
            raise values.InvalidValueError(f"unknown logical name {name!r}; nearest: {close}")
        if unknown := [axis for axis in axes if axis not in MESH_AXES]:
            what = f"{name}: unknown mesh axis {unknown[0]!r}; known: {', '.join(MESH_AXES)}"
            raise values.InvalidValueError(what)
        if len(set(axes)) != len(axes):
            raise values.InvalidValueError(f"{name}: a mesh axis is named twice in {list(axes)}")
        rules.append((name, axes))
    return tuple(rules)


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
