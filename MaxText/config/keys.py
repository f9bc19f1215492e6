"""Declaration of configuration keys: type, default, help, bounds, conditions.

A section is a frozen pydantic model whose fields are the flat keys that users type. Unit and
conditions are in the field's `json_schema_extra`, so that help, `configs/base.yml`, the
documentation and the checks derive from one declaration.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import BaseModel, ConfigDict, Field


class Unequal(NamedTuple):
    """A bound: a number that is none of the values."""

    ne: int


Count = Annotated[int, Field(ge=1)]
CountOrAuto = Annotated[int, Field(ge=-1), Unequal(0)]  # -1 stands for what the key's help says
Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(ge=0, le=1)]

# Under which values of other keys a key has an effect: {other key: value, or a list of values}, or
# the name of a switch that must be true.
Conditions = str | Mapping[str, Any]


class Section(BaseModel):
    """A group of keys that one part of the program receives. Immutable; unknown fields are refused.

    ONLY_IF is the default of `only_if` for its keys, except those it names.
    """

    ONLY_IF: ClassVar[Conditions] = {}
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


def key(
    default: Any,
    help: str,
    *,
    unit: str = "",
    only_if: Conditions | None = None,
    only_if_any: Conditions | None = None,
    **bounds: float,
) -> Any:
    """Declares one key.

    Args:
      help: One line, shown by --help and in docs/reference/configuration.md.
      unit: For example "steps", "tokens", "seconds".
      only_if: Conditions that must all hold for the key to have an effect.
      only_if_any: Conditions of which one is enough.
      bounds: pydantic's ge, gt, le, lt.
    """
    facts: dict[str, Any] = {"unit": unit, "only_if": only_if, "only_if_any": only_if_any}
    return Field(
        default,
        description=help,
        json_schema_extra=facts,
        validate_default=True,
        **bounds,  # type: ignore[arg-type]
    )


def condition_values(conditions: Conditions | None) -> dict[str, list[Any]]:
    """Returns other key -> the values under which a key has an effect."""
    if isinstance(conditions, str):
        conditions = {conditions: True}
    return {
        name: list(values) if isinstance(values, list | tuple) else [values]
        for name, values in (conditions or {}).items()
    }
