"""`layer_pattern` and `layer_kinds`: letters of layers and their keys."""

import re
from collections.abc import Callable, Iterator
from typing import Any, Self

from MaxText.config import values

_PATTERN = re.compile(r"([^()\s]*)(?:\(([^()\s]+)\)([^()\s]*))?")


class LayerKinds(tuple[tuple[str, tuple[tuple[str, Any], ...]], ...]):
    """Pairs of a letter and the keys of its layers."""

    __slots__ = ()

    @classmethod
    def of(cls, value: Any) -> Self:
        """Builds it from a mapping of mappings, such as a checkpoint records."""
        pairs = value.items() if isinstance(value, dict) else value
        return cls(
            (letter, tuple((name, _hashable(one)) for name, one in dict(keys).items()))
            for letter, keys in pairs
        )

    def as_dict(self) -> dict[str, dict[str, Any]]:
        return {letter: dict(keys) for letter, keys in self}


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, list | tuple) else value


def parse(value: Any, convert: Callable[[str, Any], Any]) -> LayerKinds:
    """Parses {letter: {key: value}}; `convert` raises KeyError for others."""
    if values.is_null(value) or value in ((), []):
        return LayerKinds()
    if isinstance(value, LayerKinds):
        return value
    if not isinstance(value, dict):
        what = f"{values.format_value(value)} is not {{letter: {{key: value}}}}"
        raise values.InvalidValueError(what)
    kinds = []
    for letter, keys in value.items():
        if len(str(letter)) != 1 or str(letter) in "() ":
            raise values.InvalidValueError(f"{values.format_value(letter)} is not one letter")
        if not isinstance(keys, dict):
            what = f"{letter}: {values.format_value(keys)} is not {{key: value}}"
            raise values.InvalidValueError(what)
        typed = []
        for name, given in _with_entries(keys):
            try:
                typed.append((name, convert(name, given)))
            except KeyError:
                what = f"{letter}: {name} is not a key of a layer's parts"
                raise values.InvalidValueError(what) from None
            except values.InvalidValueError as error:
                raise values.InvalidValueError(f"{letter}: {name}: {error}") from None
        kinds.append((str(letter), tuple(typed)))
    return LayerKinds(kinds)


def _with_entries(keys: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
    for name, given in keys.items():
        if isinstance(given, dict):
            yield from ((f"{name}.{entry}", one) for entry, one in given.items())
        else:
            yield str(name), given


def letters(pattern: str, num_layers: int) -> str:
    """Returns the letter of each layer, by prefix(cycle)suffix or a cycle."""
    found = _PATTERN.fullmatch(pattern)
    if found is None:
        raise ValueError(f"layer_pattern={pattern}: letters, with one repeated part in parentheses")
    prefix, cycle, suffix = found.groups()
    if cycle is None:
        prefix, cycle, suffix = "", prefix, ""
    repeats, rest = divmod(num_layers - len(prefix) - len(suffix), len(cycle))
    if rest or repeats < 1:
        count = len(prefix) + len(suffix) + max(repeats, 1) * len(cycle)
        raise ValueError(
            f"layer_pattern={pattern}: {num_layers} layers (base_num_decoder_layers) are not "
            f"repeats of its {len(cycle)} letters\nbase_num_decoder_layers={count}"
        )
    return prefix + cycle * repeats + suffix
