"""Conversion of text and YAML nodes to typed values, and back to YAML.

A plain (unquoted) YAML scalar stays text, `UntypedScalar`, until the type of the key is known: only
then is it clear whether `yes` is a word or a boolean, and `none` a choice or null. Quoted scalars
are always strings.
"""

import contextlib
import math
import re
import types
from typing import Any, Literal, Union, get_args, get_origin

import yaml

from MaxText.errors import shorten

_NULL = {"none", "null", "~", ""}
_TRUE = {"true", "yes", "on", "1"}
_FALSE = {"false", "no", "off", "0"}
_SIMPLE_TEXT = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
_HALF_PAIR = re.compile("[\ud800-\udfff]")
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


class UntypedScalar(str):
    """Text of an unquoted scalar of undecided type."""

    __slots__ = ()


class InvalidValueError(ValueError):
    """A value unfit for its key; the message completes 'key: ...'."""


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


def from_node(node: yaml.Node) -> Any:
    """Returns a YAML node as UntypedScalar, str, lists and dicts of these.

    Raises:
      InvalidValueError: it has tags, a name twice, or is too large with its aliases expanded.
    """
    items = 0
    characters = 0

    def read(node: yaml.Node, depth: int) -> Any:
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


def from_text(text: str) -> Any:
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


def convert(value: Any, annotation: Any) -> Any:
    """Returns a value in a type.

    Args:
      value: What `from_node` or `from_text` returned, or a Python value.
      annotation: bool, int, float, str, or a union, Literal or tuple of these.

    Raises:
      InvalidValueError: the value does not fit the type.
    """
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        return _convert_union(value, get_args(annotation))
    if origin is Literal:
        return _convert_choice(value, get_args(annotation))
    if origin is tuple:
        return _convert_list(value, get_args(annotation))
    return _SCALARS[annotation](value)


def _convert_union(value: Any, parts: tuple[Any, ...]) -> Any:
    if type(None) in parts and is_null(value):
        return None
    for part in parts:
        if part is not type(None):
            with contextlib.suppress(InvalidValueError):
                return convert(value, part)
    raise InvalidValueError(f"{format_value(value)} is not {type_name(Union[parts])}")  # noqa: UP007


def _convert_choice(value: Any, choices: tuple[Any, ...]) -> Any:
    if is_null(value):
        value = next((nothing for nothing in ("none", "") if nothing in choices), value)
    if isinstance(value, str) and value in choices:
        return str(value)
    raise InvalidValueError(f"{format_value(value)} is not among the choices")


def _convert_list(value: Any, parts: tuple[Any, ...]) -> Any:
    if is_null(value) or (isinstance(value, str) and not value):
        value = []
    if not isinstance(value, list | tuple):
        raise InvalidValueError(f"{format_value(value)} is not a list; lists are written [a,b]")
    if len(parts) == 2 and parts[1] is Ellipsis:
        return tuple(convert(item, parts[0]) for item in value)
    if len(value) != len(parts):
        raise InvalidValueError(f"{format_value(value)} has {len(value)} parts, not {len(parts)}")
    return tuple(convert(item, part) for item, part in zip(value, parts, strict=True))


def _to_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, UntypedScalar) and value.lower() in _TRUE | _FALSE:
        return value.lower() in _TRUE
    raise InvalidValueError(f"{format_value(value)} is not true or false")


def _number(value: Any) -> float | int | None:
    if isinstance(value, UntypedScalar):
        for read in (int, float):
            with contextlib.suppress(ValueError):
                return read(value)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _to_int(value: Any) -> int:
    number = _number(value)
    # isfinite() fails for an int of a thousand digits.
    is_integer = isinstance(number, int) or (number is not None and number.is_integer())
    if number is None or not is_integer:
        raise InvalidValueError(f"{format_value(value)} is not an integer")
    if abs(number) > _LARGEST_INTEGER:
        raise InvalidValueError(f"{format_value(value)} is beyond integers of 64 bits")
    return int(number)


def _to_float(value: Any) -> float:
    number = _number(value)
    with contextlib.suppress(OverflowError):
        if number is not None and math.isfinite(number):
            return float(number)
    raise InvalidValueError(f"{format_value(value)} is not a finite number")


def _to_str(value: Any) -> str:
    if is_null(value):
        return ""
    if not isinstance(value, str):
        raise InvalidValueError(f"{format_value(value)} is not text")
    # Half of a surrogate pair stands for a byte that is not UTF-8; it can be neither printed nor
    # stored. No system has a NUL in a name.
    if "\0" in value or _HALF_PAIR.search(value):
        raise InvalidValueError(f"{value!a} is not UTF-8 text without NUL")
    return str(value)


_SCALARS = {bool: _to_bool, int: _to_int, float: _to_float, str: _to_str}


def is_null(value: Any) -> bool:
    """Returns whether a value is null, none, ~ or an empty YAML value."""
    return value is None or (isinstance(value, UntypedScalar) and value.lower() in _NULL)


def type_name(annotation: Any) -> str:
    """Returns a type in words, for example "an integer or null"."""
    origin = get_origin(annotation)
    parts = get_args(annotation)
    if origin in (Union, types.UnionType):
        return " or ".join(type_name(part) for part in parts)
    if origin is Literal:
        return "one of " + ", ".join(choice or '"" (empty)' for choice in parts)
    if origin is tuple and len(parts) == 2 and parts[1] is Ellipsis:
        return f"a list [...], each: {type_name(parts[0])}"
    if origin is tuple:
        return "[" + ", ".join(type_name(part) for part in parts) + "]"
    names = {bool: "true or false", int: "an integer", float: "a number", str: "text"}
    return names.get(annotation, "null")


def format_value(value: Any) -> str:
    """Returns a value for messages: text in quotes, all else as YAML."""
    return repr(str(value)) if isinstance(value, str) else to_yaml(value)


def to_yaml(value: Any) -> str:
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
