"""Reads text and YAML nodes, converts them to typed values with pydantic, and writes YAML.

A plain (unquoted) YAML scalar stays text, `UntypedScalar`, until the type of the key is known: only
then is it clear whether `yes` is a word or a boolean, and `none` a choice or null. Quoted scalars
are always strings. `convert` decides it, with validators that stand before pydantic's own.
"""

import contextlib
import functools
import itertools
import math
import re
import types
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin

import yaml
from pydantic import (
    AllowInfNan,
    BeforeValidator,
    Field,
    Strict,
    TypeAdapter,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic.fields import FieldInfo

from MaxText.errors import shorten

_NULL = {"none", "null", "~", ""}
_TRUE = {"true", "yes", "on", "1"}
_FALSE = {"false", "no", "off", "0"}
_SIMPLE_TEXT = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
# No key needs more; bounds also end YAML aliases that refer to themselves, or to lists of aliases
# whose expansion has no end that anybody would wait for.
_MAX_DEPTH = 4
_MAX_ITEMS = 100_000
_MAX_CHARACTERS = 1_000_000
# Of a whole document. YAML's composer recurses, in C without a bound.
_MAX_DOCUMENT_DEPTH = 32
_MAX_DOCUMENT_ITEMS = 400_000
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# What the widest integer format holds. No key counts further, and arithmetic with more digits
# leaves what floats can hold.
_LARGEST_INTEGER = 2**63 - 1
# Of the wrong items of one value that a message has.
_MAX_REASONS = 3
_YAML_TAG = "tag:yaml.org,2002:"
# Tags that YAML gives to nodes without a tag; the last two are of `<<` and `=`.
_PLAIN_TAGS = {
    "str",
    "int",
    "float",
    "bool",
    "null",
    "seq",
    "map",
    "timestamp",
    "merge",
    "value",
}


# A value whose type is not known yet: UntypedScalar, str, lists and dicts of them; Python's callers
# give any value.
UntypedValue = Any
# A value in the type of its key.
TypedValue = Any
# A type as pydantic takes it: a class, a Literal, a union, Annotated.
Annotation = Any


class UntypedScalar(str):
    """Text of an unquoted scalar of undecided type."""

    __slots__ = ()


class InvalidValueError(ValueError):
    """A value unfit for its key; the message completes 'key: ...'."""

    @classmethod
    def of(cls, reasons: Iterable[str]) -> Self:
        """Returns the error of a value with which several things may be wrong, each said once."""
        distinct = list(dict.fromkeys(reasons))
        if len(distinct) > _MAX_REASONS:
            distinct[_MAX_REASONS:] = [f"and {len(distinct) - _MAX_REASONS:,} more"]
        return cls("; ".join(distinct))


def compose(text: str) -> yaml.Node | None:
    """Returns the root node of a YAML document in bounded time; None for an empty one.

    Raises:
      InvalidValueError: it is nested too deeply, or too long.
      yaml.YAMLError: it is not YAML.
    """
    depth = 0
    for items, event in enumerate(yaml.parse(text, Loader=_LOADER), start=1):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > _MAX_DOCUMENT_DEPTH:
            raise InvalidValueError(f"is nested more than {_MAX_DOCUMENT_DEPTH} levels deep")
        if items > _MAX_DOCUMENT_ITEMS:
            raise InvalidValueError(f"has more than {_MAX_DOCUMENT_ITEMS:,} items")
    return yaml.compose(text, Loader=_LOADER)


def from_node(node: yaml.Node) -> UntypedValue:
    """Returns a YAML node as UntypedScalar, str, lists and dicts of these.

    Raises:
      InvalidValueError: it has tags, a name twice, or is too large with its aliases expanded.
    """
    items = 0
    characters = 0

    def read(node: yaml.Node, depth: int) -> UntypedValue:
        """Converts a node and all below it, and counts them: an alias counts each time."""
        nonlocal items, characters
        items += 1
        if depth > _MAX_DEPTH:
            raise InvalidValueError(f"is nested more than {_MAX_DEPTH} levels deep")
        if items > _MAX_ITEMS:
            raise InvalidValueError(f"has more than {_MAX_ITEMS:,} items")
        if node.tag.removeprefix(_YAML_TAG) not in _PLAIN_TAGS:
            tag = node.tag.replace(_YAML_TAG, "!!")
            raise InvalidValueError(f"has the tag {tag}, and only plain values are read")
        if isinstance(node, yaml.ScalarNode):
            characters += len(node.value)
            if characters > _MAX_CHARACTERS:
                raise InvalidValueError(f"has more than {_MAX_CHARACTERS:,} characters")
            is_quoted = node.style in ("'", '"', "|", ">")
            return str(node.value) if is_quoted else UntypedScalar(node.value)
        if isinstance(node, yaml.SequenceNode):
            return [read(item, depth + 1) for item in node.value]
        entries: dict[str, Any] = {}
        for name_node, item in node.value:
            name = str(read(name_node, depth + 1))
            if name in entries:
                raise InvalidValueError(f"{shorten(name)} is given twice")
            entries[name] = read(item, depth + 1)
        return entries

    return read(node, 0)


def from_text(text: str) -> UntypedValue:
    """Parses the text of `key=<text>`, before its type is known.

    The empty text is the empty string, not null. Text that is not YAML (a glob, a sentence with a
    colon) or is nested deeper than any list of a key stays text.
    """
    if not text:
        return ""
    try:
        node = compose(text)
        is_flow_mapping = isinstance(node, yaml.MappingNode) and text.lstrip().startswith("{")
        if node is not None and (isinstance(node, yaml.SequenceNode) or is_flow_mapping):
            return from_node(node)
    except (yaml.YAMLError, InvalidValueError, RecursionError, UnicodeError):
        return UntypedScalar(text)
    if node is None:
        return UntypedScalar(text)
    is_quoted = isinstance(node, yaml.ScalarNode) and node.style in ("'", '"')
    return str(node.value) if is_quoted and node.tag == f"{_YAML_TAG}str" else UntypedScalar(text)


def convert(
    value: UntypedValue, annotation: Annotation, constraints: tuple[Any, ...] = ()
) -> TypedValue:
    """Returns a value in a type, converted and checked by pydantic.

    Args:
      value: What `from_node` or `from_text` returned, or a Python value.
      annotation: A type, also one with constraints: `Annotated[int, Field(ge=1)]`.
      constraints: Further ones, for example those of a pydantic field: `FieldInfo.metadata`.

    Raises:
      InvalidValueError: the value does not fit the type. Its message has all wrong items of a list.
    """
    try:
        return _adapter(annotation, constraints).validate_python(value)
    except ValidationError as error:
        reasons = map(_reason, error.errors(include_url=False))
        raise InvalidValueError.of(reasons) from None


# pydantic's type of an error -> what completes the sentence that begins with the value.
_REASONS = {
    "bool_type": "is not true or false",
    "int_type": "is not an integer",
    "float_type": "is not a finite number",
    "finite_number": "is not a finite number",
    "string_type": "is not text",
    "string_unicode": "is not UTF-8 text without NUL",
    "literal_error": "is not among the choices",
    "tuple_type": "is not a list; lists are written [a,b]",
    "missing": "has too few parts",
    "too_long": "has too many parts",
    "greater_than_equal": "is not >= {ge}",
    "greater_than": "is not > {gt}",
    "less_than_equal": "is not <= {le}",
    "less_than": "is not < {lt}",
    "value_error": "{error}",  # a ValueError of a validator, below or of a user's part
}


def _reason(error: Mapping[str, Any]) -> str:
    """Returns an error of pydantic in our words, beginning with the value.

    Args:
      error: One of `ValidationError.errors()`: its type, the input and the context.
    """
    details = {
        name: format_bound(detail) if isinstance(detail, float) else detail
        for name, detail in error.get("ctx", {}).items()
    }
    reason = _REASONS.get(error["type"], "is refused: {message}")
    return f"{format_value(error['input'])} {reason.format(**details, message=error['msg'])}"


@functools.cache
def _adapter(annotation: Annotation, constraints: tuple[Any, ...]) -> TypeAdapter[Any]:
    """Returns the validator of a type.

    One takes 0.2 ms to make. Keys of the same type share it, and a type of which no key is set has
    none.
    """
    return TypeAdapter(_readable(annotation, constraints))


def _readable(annotation: Annotation, constraints: tuple[Any, ...] = ()) -> Annotation:
    """Returns a type with validators that read YAML's untyped scalars before pydantic checks it.

    bool, int, float, str and tuple are strict: the readers alone decide which text is a number. To
    other types, which only users' parts have, pydantic's conversion of text applies.

    Args:
      annotation: As of `convert`. Types within it get readers as well.
      constraints: As of `convert`. Of a union they hold for each alternative but null.
    """
    if annotation in (Ellipsis, types.NoneType):
        return annotation
    field = FieldInfo.from_annotation(annotation)
    kind: Annotation = field.annotation
    constraints = (*field.metadata, *constraints)
    origin = get_origin(kind)
    parts = get_args(kind)
    if origin in (Union, types.UnionType):
        alternatives = tuple(_readable(part, constraints) for part in parts)
        return Annotated[Union[alternatives], *_union_readers(kind)]  # noqa: UP007
    if origin is Literal:
        readers = (BeforeValidator(functools.partial(_read_choice, choices=parts)),)
    elif origin is tuple:
        kind = tuple[tuple(map(_readable, parts))]
        readers = (Strict(), BeforeValidator(_read_list))
    else:
        readers = _READERS.get(kind, (BeforeValidator(_read_other),))
    return Annotated[kind, *constraints, *readers]


def _union_readers(union: Annotation) -> tuple[Any, ...]:
    """Returns the validators of a union: the first alternative that fits counts."""
    parts = get_args(union)
    readers: list[Any] = []
    if len([part for part in parts if part is not types.NoneType]) > 1:
        expected = type_name(union)
        readers.append(Field(union_mode="left_to_right"))
        readers.append(WrapValidator(functools.partial(_with_one_error, expected=expected)))
    if types.NoneType in parts:
        readers.append(BeforeValidator(lambda value: None if is_null(value) else value))
    return tuple(readers)


def _with_one_error(
    value: UntypedValue, validate: ValidatorFunctionWrapHandler, *, expected: str
) -> UntypedValue:
    """Validates a value of a union; an error names all alternatives, not what each lacks."""
    try:
        return validate(value)
    except ValidationError:
        raise ValueError(f"is not {expected}") from None


def _read_choice(value: UntypedValue, *, choices: tuple[Any, ...]) -> UntypedValue:
    """Returns a choice as plain text. Null is the choice that stands for nothing."""
    if is_null(value):
        return next((nothing for nothing in ("none", "") if nothing in choices), value)
    return str(value) if isinstance(value, str) else value


def _read_list(value: UntypedValue) -> UntypedValue:
    """Returns a list as a tuple. Null and the empty text are the empty list."""
    if is_null(value) or value == "":
        return ()
    return tuple(value) if isinstance(value, list) else value


def _read_bool(value: UntypedValue) -> UntypedValue:
    if isinstance(value, UntypedScalar) and value.lower() in _TRUE | _FALSE:
        return value.lower() in _TRUE
    return value


def _read_int(value: UntypedValue) -> UntypedValue:
    """Returns the integer that a text or a float is, such as 1_000, 1e3 or 3.0."""
    number = _read_float(value)
    if isinstance(value, UntypedScalar):
        with contextlib.suppress(ValueError):
            number = int(value)
    if isinstance(number, float):
        number = int(number) if number.is_integer() else value
    if isinstance(number, int) and abs(number) > _LARGEST_INTEGER:
        raise ValueError("is beyond integers of 64 bits")
    return number


def _read_float(value: UntypedValue) -> UntypedValue:
    if isinstance(value, UntypedScalar):
        with contextlib.suppress(ValueError):
            number = float(value)
            # Messages show what is not finite as it was written.
            return number if math.isfinite(number) else value
    return value


def _read_str(value: UntypedValue) -> UntypedValue:
    """Returns text. Null is the empty text."""
    if isinstance(value, str) and "\0" in value:
        raise ValueError(_REASONS["string_unicode"])
    return "" if is_null(value) else value


def _read_other(value: UntypedValue) -> UntypedValue:
    """Returns text without its mark, which would reach a key of type Any."""
    return str(value) if isinstance(value, UntypedScalar) else value


_READERS = {
    bool: (Strict(), BeforeValidator(_read_bool)),
    int: (Strict(), BeforeValidator(_read_int)),
    float: (Strict(), AllowInfNan(False), BeforeValidator(_read_float)),
    str: (Strict(), BeforeValidator(_read_str)),
}


def is_null(value: object) -> bool:
    """Returns whether a value is null, none, ~ or an empty YAML value."""
    return value is None or (isinstance(value, UntypedScalar) and value.lower() in _NULL)


def type_name(annotation: Annotation, constraints: Iterable[Any] = ()) -> str:
    """Returns a type in words, for example "an integer or null, >= 1".

    Args:
      annotation: As of `convert`.
      constraints: As of `convert`.
    """
    if get_origin(annotation) is Annotated:
        field = FieldInfo.from_annotation(annotation)
        return type_name(field.annotation, (*field.metadata, *constraints))
    origin = get_origin(annotation)
    parts = get_args(annotation)
    if origin in (Union, types.UnionType):
        # Count | None is "an integer or null, >= 1".
        fields = [FieldInfo.from_annotation(part) for part in parts]
        name = " or ".join(type_name(field.annotation) for field in fields)
        constraints = (*constraints, *itertools.chain(*(field.metadata for field in fields)))
    else:
        name = _plain_type_name(annotation, origin, parts)
    bounds = bounds_text(constraints)
    return f"{name}, {bounds}" if bounds else name


def _plain_type_name(annotation: Annotation, origin: Annotation, parts: tuple[Any, ...]) -> str:
    """Returns a type that is no union in words, without bounds."""
    if origin is Literal:
        return "one of " + ", ".join(choice or '"" (empty)' for choice in parts)
    if origin is tuple and len(parts) == 2 and parts[1] is Ellipsis:
        return f"a list [...], each: {type_name(parts[0])}"
    if origin is tuple:
        return "[" + ", ".join(type_name(part) for part in parts) + "]"
    names = {
        bool: "true or false",
        int: "an integer",
        float: "a number",
        str: "text",
        types.NoneType: "null",
    }
    return names.get(annotation) or getattr(annotation, "__name__", str(annotation))


# pydantic's name of a bound -> its sign.
_BOUND_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<", "ne": "other than"}


def bounds_of(constraints: Iterable[Any]) -> tuple[tuple[str, float], ...]:
    """Returns pairs of "ge", "gt", "le", "lt" or "ne" and a number."""
    return tuple(
        (kind, getattr(constraint, kind))
        for constraint in constraints
        for kind in _BOUND_SIGNS
        if hasattr(constraint, kind)
    )


def bounds_text(constraints: Iterable[Any]) -> str:
    """Returns bounds in words, for example ">= 0 and < 1"; empty without bounds."""
    return " and ".join(
        f"{_BOUND_SIGNS[kind]} {format_bound(bound)}" for kind, bound in bounds_of(constraints)
    )


def format_bound(bound: float) -> str:
    """Returns a number for messages: 1 for 1.0."""
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def format_value(value: object) -> str:
    """Returns a value for messages: text in quotes, all else as YAML."""
    return repr(str(value)) if isinstance(value, str) else to_yaml(value)


def to_yaml(value: TypedValue) -> str:
    """Returns flow YAML, readable by `convert`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | UntypedScalar):
        return str(value)
    if isinstance(value, float):
        # PyYAML and other YAML 1.1 readers take "3e-05" for text: they want a point.
        mantissa, exponent, power = repr(value).partition("e")
        if exponent and "." not in mantissa:
            mantissa += ".0"
        return mantissa + exponent + power
    if hasattr(value, "as_dict"):  # LayerKinds
        value = value.as_dict()
    if isinstance(value, list | tuple):
        return "[" + ", ".join(to_yaml(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{to_yaml(k)}: {to_yaml(v)}" for k, v in value.items()) + "}"
    text = str(value)
    if _SIMPLE_TEXT.fullmatch(text) and text.lower() not in _NULL | _TRUE | _FALSE:
        return text
    return yaml.safe_dump(text, default_style='"', allow_unicode=True, width=math.inf).strip()
