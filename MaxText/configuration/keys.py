"""How a configuration key is declared: type, default, meaning, bounds, and when it matters.

A section is a frozen pydantic model whose fields are the flat keys that users type. The extra
facts (unit, what must hold for the key to have an effect) travel in the field's
`json_schema_extra`, so that help, `configs/base.yml`, the documentation and the checks are all
derived from one declaration.
"""

from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """A group of keys that one part of the program receives. Immutable; unknown fields refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


def key(
    default: Any,
    meaning: str,
    *,
    unit: str = "",
    only_if: dict[str, Iterable[Any]] | None = None,
    only_if_any: dict[str, Iterable[Any]] | None = None,
    ne: float | None = None,
    **bounds: float,
) -> Any:
    """Declares one key.

    Args:
      default: value when nobody sets it.
      meaning: one line, shown by --help and in docs/configuration.md.
      unit: for example "steps", "tokens", "seconds".
      only_if: other keys and the values under which this one has an effect. A user who sets the
        key to a non-default value while one of them has another value gets an error.
      only_if_any: the same for keys of which one is enough.
      ne: a number that is none of its values: where -1 has a meaning and 1 upwards are counts.
      bounds: pydantic's ge, gt, le, lt.
    """
    facts: dict[str, Any] = {"unit": unit, "ne": ne}
    for name, given in (("only_if", only_if), ("only_if_any", only_if_any)):
        facts[name] = {other: list(values) for other, values in (given or {}).items()}
    return Field(
        default,
        description=meaning,
        json_schema_extra=facts,
        validate_default=True,
        **bounds,  # type: ignore[arg-type]
    )
