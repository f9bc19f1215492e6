"""Declaration of configuration keys: type, default, meaning, bounds, conditions.

A section is a frozen pydantic model whose fields are the flat keys that users type. Unit and
conditions are in the field's `json_schema_extra`, so that help, `configs/base.yml`, the
documentation and the checks derive from one declaration.
"""

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import BaseModel, ConfigDict, Field


class Unequal(NamedTuple):
    """A bound: a number that is none of the values."""

    ne: int


Count = Annotated[int, Field(ge=1)]
CountOrAuto = Annotated[int, Field(ge=-1), Unequal(0)]  # -1 stands for what the key's meaning says
Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """A group of keys that one part of the program receives. Immutable; unknown fields are refused.

    ONLY_IF is the default of `only_if` for its keys, except those it names.
    """

    ONLY_IF: ClassVar[dict[str, Iterable[Any]]] = {}
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


def key(
    default: Any,
    meaning: str,
    *,
    unit: str = "",
    only_if: dict[str, Iterable[Any]] | None = None,
    only_if_any: dict[str, Iterable[Any]] | None = None,
    **bounds: float,
) -> Any:
    """Declares one key.

    Args:
      meaning: One line, shown by --help and in docs/reference/configuration.md.
      unit: For example "steps", "tokens", "seconds".
      only_if: Other keys and the values under which this one has an effect.
      only_if_any: The same for keys of which one is enough.
      bounds: pydantic's ge, gt, le, lt.
    """
    facts: dict[str, Any] = {"unit": unit, "only_if": only_if, "only_if_any": only_if_any or {}}
    return Field(
        default,
        description=meaning,
        json_schema_extra=facts,
        validate_default=True,
        **bounds,  # type: ignore[arg-type]
    )
