"""Declares configuration keys: type, default, help, bounds, conditions.

A section is a frozen pydantic model whose fields are the keys that users type:

    class ScheduleConfig(Section):
        'Learning rate schedule.'

        learning_rate: NonNegative = key(3e-5)
        'Peak learning rate.'
        warmup_steps: int = key(-1, "Warm-up steps.", unit="steps", ge=-1)

A field can also be a section of its own. Keys of a NamedSection are typed with the field's name and
a dot before them, `adafactor.momentum=0.9`; those of other sections are typed as they are:

    class AdafactorConfig(NamedSection):
        'Settings of Adafactor (Shazeer and Stern 2018).'

        momentum: Fraction = key(0.0, "Decay rate of momentum; 0 keeps none.")

    class OptimizerConfig(Section):
        'Optimizer.'

        adafactor: AdafactorConfig = AdafactorConfig()

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

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> Any:
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

    Unknown fields are refused. ONLY_IF has conditions of all its keys, those of sections inside
    included, in addition to the conditions of the section around it. An empty one drops the latter.
    """

    ONLY_IF: ClassVar[Conditions | None] = None
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _from_keys(cls, values: object) -> object:
        """Accepts dotted keys of named sections."""
        return nested(values) if isinstance(values, dict) else values

    def values_by_key(self) -> dict[str, Any]:
        """Returns the values of all keys in this section and those inside, by key.

        The section's own keys come first.
        """
        values = {name: value for name, value in self if not isinstance(value, Section)}
        for section_name, section in self:
            if isinstance(section, Section):
                prefix = f"{section_name}." if isinstance(section, NamedSection) else ""
                values |= {prefix + name: item for name, item in section.values_by_key().items()}
        return values

    def with_values(self, values: Mapping[str, Any]) -> Self:
        """Returns this section with other values of some keys, those of sections inside included.

        Args:
          values: By key, already checked. Keys of other sections are ignored.
        """
        update: dict[str, Any] = {}
        for field_name, value in self:
            if isinstance(value, Section):
                inner_values = values
                if isinstance(value, NamedSection):
                    prefix = f"{field_name}."
                    inner_values = {
                        name.removeprefix(prefix): item
                        for name, item in values.items()
                        if name.startswith(prefix)
                    }
                changed = value.with_values(inner_values) if inner_values else value
                if changed is not value:
                    update[field_name] = changed
            elif field_name in values:
                update[field_name] = values[field_name]
        return self.model_copy(update=update) if update else self


class NamedSection(Section):
    """A section whose name is a part of the names of its keys: `adafactor.momentum`.

    Its name is that of the field that holds it. Wherever settings are read, a mapping under that
    name stands for the keys: `adafactor: {momentum: 0.9}`.
    """


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Groups dotted keys by what is before their first dot.

    For example, {"adafactor.momentum": 0.9} becomes {"adafactor": {"momentum": 0.9}}.
    """
    groups: dict[str, Any] = {}
    for name, value in values.items():
        section, _, inner_name = name.partition(".")
        if inner_name:
            groups[section] = {**groups.get(section, {}), inner_name: value}
        else:
            groups[name] = value
    return groups


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
      only_if: Conditions that must all hold for the key to have an effect, in addition to those of
        the section (Section.ONLY_IF). Empty drops the others.
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
        if not issubclass(base, Section):
            continue
        # Code without a file has no source, and odd indentation cannot be parsed alone.
        with contextlib.suppress(OSError, TypeError, SyntaxError):
            [tree] = ast.parse(textwrap.dedent(inspect.getsource(base))).body
            assert isinstance(tree, ast.ClassDef)
            for field, docstring in itertools.pairwise(tree.body):
                match field, docstring:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(ast.Constant(str(text))):
                        docstrings.setdefault(name, " ".join(text.split()))
    return docstrings


def condition_values(conditions: Conditions | None) -> dict[str, Any]:
    """Returns conditions in one form: {other key: the values that enable this one}."""
    if isinstance(conditions, str):
        conditions = {conditions: True}
    return {
        name: values if isinstance(values, list | OtherThan) else [values]
        for name, values in (conditions or {}).items()
    }
