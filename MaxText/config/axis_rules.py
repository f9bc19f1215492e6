"""Logical axis rules: MaxText's list format, and merging by name.

Parameters and activations name their dimensions logically ("embed", "activation_batch"). A rule
maps such a name to the mesh axes over which the dimension is sharded. Of several rules with a name
the first applies whose mesh axes are still free.
"""

from typing import Annotated

from pydantic import AfterValidator, BeforeValidator

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


def size_key(axis: str, network: str = "ici") -> str:
    """Returns the key with the size of a mesh axis within one of NETWORKS."""
    return f"{network}_{'pipeline' if axis == 'stage' else axis}_parallelism"


def _check_logical_name(name: str) -> str:
    known_names = dict.fromkeys(known_name for known_name, _ in default_rules())
    if name not in known_names:
        nearest = close_matches(name, known_names) or known_names
        raise ValueError(f"is not a logical name; nearest: {', '.join(nearest)}")
    return name


def _check_mesh_axis(axis: str) -> str:
    if axis not in MESH_AXES:
        raise ValueError("is not a mesh axis")
    return axis


def _check_distinct(axes: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(axes)) != len(axes):
        raise ValueError("names a mesh axis twice")
    return axes


def _with_one_axis(axes: values.UntypedValue) -> values.UntypedValue:
    """Converts a mesh axis without brackets to a list of one."""
    return (axes,) if isinstance(axes, str) else axes


_LogicalName = Annotated[str, AfterValidator(_check_logical_name)]
_MeshAxis = Annotated[str, AfterValidator(_check_mesh_axis)]
_MeshAxes = Annotated[
    tuple[_MeshAxis, ...], AfterValidator(_check_distinct), BeforeValidator(_with_one_axis)
]
# The type of what users set. The key's section cannot have it: registered parts add logical names.
_CheckedRules = tuple[tuple[_LogicalName, _MeshAxes], ...]


def parse(value: values.UntypedValue) -> Rules:
    """Parses MaxText's list of [name, axis], [name, [axes]], [name, null].

    Raises:
      InvalidValueError: names or axes are unknown, an axis is repeated, or the form is another.
    """
    return values.convert(value, _CheckedRules)


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
