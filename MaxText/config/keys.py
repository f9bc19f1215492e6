"""Declares configuration keys: type, default, help, bounds, conditions.

A section is a frozen pydantic model whose fields are the flat keys that users type:

    class ScheduleConfig(Section):
        'Learning rate schedule.'

        learning_rate: NonNegative = key(3e-5)
        'Peak learning rate.'
        warmup_steps: int = key(-1, "Warm-up steps.", unit="steps", ge=-1)

Unit and conditions are in the field's `json_schema_extra`, so that help, `configs/base.yml`, the
documentation and the checks derive from one declaration.
"""

import ast
import contextlib
import dataclasses
import functools
import inspect
import itertools
import textwrap
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    model_validator,
)


@dataclasses.dataclass(frozen=True)
class Unequal:
    """A bound: a number other than one.

    In `Annotated` it is a validator, as pydantic's own bounds are.
    """

    ne: int

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        """Adds this check to those of the annotated type; called by pydantic."""
        return AfterValidator(self._check).__get_pydantic_core_schema__(source, handler)

    def _check(self, number: float) -> float:
        if number == self.ne:
            raise ValueError("is not allowed")
        return number


class OtherThan(tuple[Any, ...]):
    """A condition met by every value except these."""

    __slots__ = ()

    def __contains__(self, value: object) -> bool:
        return not super().__contains__(value)


Count = Annotated[int, Field(ge=1)]
CountOrAuto = Annotated[int, Field(ge=-1), Unequal(0)]  # -1 stands for what the key's help says
Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(ge=0, le=1)]

# Under which values of other keys a key has an effect: {other key: value, a list of values, or
# OtherThan((value,))}, or the name of a switch that must be true.
Conditions = str | Mapping[str, Any]


class Section(BaseModel):
    """An immutable group of keys for one part of the program.

    Unknown fields are refused. ONLY_IF is the default of `only_if` for its keys, except those it
    names.
    """

    ONLY_IF: ClassVar[Conditions] = {}
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _with_entries(cls, values: Any) -> Any:
        """Converts {"key.entry": value} to {"key": {"entry": value}}."""
        if not isinstance(values, dict):
            return values
        nested = dict(values)
        for name in values:
            key, _, entry = name.partition(".")
            if entry:
                nested[key] = {**nested.get(key, {}), entry: nested.pop(name)}
        return nested

    def with_values(self, values: Mapping[str, Any]) -> Self:
        """Returns this section with other, already checked values of some keys."""
        return self.model_copy(update=dict(values))


class Options(BaseModel):
    """The value of a key with entries: {entry: value}, or key.entry=value."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    def as_dict(self) -> dict[str, Any]:
        """Returns the value of every entry by name."""
        return {name: getattr(self, name) for name in type(self).model_fields}

    def updated(self, changes: Self) -> Self:
        """Returns these entries, with those that were set in `changes` in their place."""
        return self.model_copy(
            update={name: getattr(changes, name) for name in changes.model_fields_set}
        )


def key(
    default: Any,
    help: str = "",
    *,
    unit: str = "",
    only_if: Conditions | None = None,
    only_if_any: Conditions | None = None,
    **bounds: float,
) -> Any:
    """Declares one key; the value of a field of a Section.

    Args:
      default: Value unless a layer of settings sets it.
      help: A line for --help and docs/reference/configuration.md; empty takes the string literal
        below the field.
      unit: For example "steps", "tokens", "seconds".
      only_if: Conditions that must all hold for the key to have an effect.
        Empty drops those of the section (Section.ONLY_IF).
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


@functools.cache
def field_docstrings(section: type[BaseModel]) -> dict[str, str]:
    """Returns the string literals below the fields of a section, by field, on one line each.

    They are read from the source when help is asked for. pydantic's use_attribute_docstrings reads
    them at each import, for a tenth of a second.
    """
    docstrings: dict[str, str] = {}
    for base in section.__mro__:
        if not issubclass(base, Section | Options):
            continue
        # Code without a file has no source, and odd indentation cannot be parsed alone.
        with contextlib.suppress(OSError, TypeError, SyntaxError):
            tree: Any = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
            for field, docstring in itertools.pairwise(tree.body):
                match field, docstring:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(ast.Constant(str(text))):
                        docstrings.setdefault(name, " ".join(text.split()))
    return docstrings


def options(kind: type[Options], *, only_if: Conditions | None = None) -> Any:
    """Declares a key with entries, described by their class."""
    return key(kind(), kind.__doc__ or "", only_if=only_if)


def condition_values(conditions: Conditions | None) -> dict[str, Any]:
    """Returns conditions in one form: {other key: the values that enable this one}."""
    if isinstance(conditions, str):
        conditions = {conditions: True}
    return {
        name: values if isinstance(values, list | OtherThan) else [values]
        for name, values in (conditions or {}).items()
    }
