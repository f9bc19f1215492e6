"""Logical axis rules: MaxText's list format, and merging by name.

Parameters and activations name their dimensions logically ("embed", "activation_batch"). A rule
maps such a name to the mesh axes over which the dimension is sharded. Of several rules with a name
the first applies whose mesh axes are still free.
"""

from typing import Any

from MaxText.config import values
from MaxText.config.problems import close_matches
from MaxText.config.registry import registrations
from MaxText.config.training_sections import LOGICAL_AXIS_RULES

# Outermost first: those with the most communication are between neighbors.
MESH_AXES = ("data", "stage", "fsdp", "fsdp_transpose", "context", "expert", "tensor")
# ici: inside a slice; dcn: across slices.
NETWORKS = ("ici", "dcn")
# For messages about the key's form.
KNOWN_AXES = f"axes are {', '.join(MESH_AXES)}"

# Pairs (logical name, mesh axes), the first with the highest priority.
Rules = tuple[tuple[str, tuple[str, ...]], ...]
# The same as users may type it.
_TYPED_RULES = tuple[tuple[str, str | tuple[str, ...] | None], ...]


def size_key(axis: str, network: str = "ici") -> str:
    """Returns the key with the size of a mesh axis within one of NETWORKS."""
    return f"{network}_{'pipeline' if axis == 'stage' else axis}_parallelism"


def parse(value: Any) -> Rules:
    """Parses MaxText's list of [name, axis], [name, [axes]], [name, null].

    Raises:
      InvalidValueError: a name or axis is unknown, an axis is repeated, or the form is another.
    """
    known_names = tuple(dict.fromkeys(name for name, _ in default_rules()))
    rules = []
    for name, typed_axes in values.convert(value, _TYPED_RULES):
        is_one_axis = isinstance(typed_axes, str) and typed_axes
        axes = (typed_axes,) if is_one_axis else tuple(typed_axes or ())
        if name not in known_names:
            close = ", ".join(close_matches(name, known_names) or known_names)
            raise values.InvalidValueError(f"unknown logical name {name!r}; nearest: {close}")
        if unknown := [axis for axis in axes if axis not in MESH_AXES]:
            raise values.InvalidValueError(
                f"{name}: unknown mesh axis {unknown[0]!r}; known: {', '.join(MESH_AXES)}"
            )
        if len(set(axes)) != len(axes):
            raise values.InvalidValueError(f"{name}: a mesh axis is named twice in {list(axes)}")
        rules.append((name, axes))
    return tuple(rules)


def default_rules() -> Rules:
    """Returns the rules of the schema and of the axes of registered parts."""
    axes_of_parts: dict[str, tuple[str, ...]] = {}
    for part in registrations():
        if not part.is_built_in:
            axes_of_parts |= getattr(part.target, "logical_axes", {})
    return merge(LOGICAL_AXIS_RULES, tuple(axes_of_parts.items()))


def merge(base: Rules, overriding: Rules) -> Rules:
    """Returns the overriding rules, then those of `base` for all other names.

    Order is priority, so that the overriding rules take their mesh axes first.
    """
    overridden = {name for name, _ in overriding}
    return overriding + tuple(rule for rule in base if rule[0] not in overridden)
