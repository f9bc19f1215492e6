"""How a configuration key is declared: type, default, meaning, bounds, and when it matters.

A section is a frozen pydantic model whose fields are the flat keys that users type. The extra
facts (unit, what must hold for the key to have an effect) travel in the field's
`json_schema_extra`, so that help, `configs/base.yml`, the documentation and the checks are all
derived from one declaration.
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
    """A group of keys that one part of the program receives. Immutable; unknown fields refused.

    ONLY_IF holds, as `only_if` of a key, for those that say nothing else, besides those in it.
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
      meaning: one line, shown by --help and in docs/configuration.md.
      unit: for example "steps", "tokens", "seconds".
      only_if: other keys and the values under which this one has an effect. A user who sets the
        key to a non-default value while one of them has another value gets an error.
      only_if_any: the same for keys of which one is enough.
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
