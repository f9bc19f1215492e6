"""`layer_pattern` and `layer_kinds`: a letter for each layer, and what the letters stand for."""

import re
from typing import Any, Self

from MaxText.configuration import values

_PATTERN = re.compile(r"([^()\s]*)(?:\(([^()\s]+)\)([^()\s]*))?")


class LayerKinds(tuple[tuple[str, tuple[tuple[str, Any], ...]], ...]):
    """Pairs of a letter and the keys that layers of this letter have other values of."""

    __slots__ = ()

    @classmethod
    def of(cls, value: Any) -> Self:
        """From a mapping of mappings, such as a checkpoint records."""
        pairs = value.items() if isinstance(value, dict) else value
        return cls(
            (letter, tuple((name, _hashable(one)) for name, one in dict(keys).items()))
            for letter, keys in pairs
        )

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Letter -> key -> value."""
        return {letter: dict(keys) for letter, keys in self}


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, list | tuple) else value


def parse(value: Any, annotations: Any) -> LayerKinds:
    """Kinds from {letter: {key: value}}.

    Args:
      annotations: key -> the type of its values.

    Raises:
      values.WrongValue: another form, an unknown key, or a value of another type.
    """
    if values.is_null(value) or value in ((), []):
        return LayerKinds()
    if isinstance(value, LayerKinds):
        return value
    if not isinstance(value, dict):
        raise values.WrongValue(f"{values.show(value)} is not {{letter: {{key: value}}}}")
    kinds = []
    for letter, keys in value.items():
        if len(str(letter)) != 1 or str(letter) in "() ":
            raise values.WrongValue(f"{values.show(letter)} is not one letter")
        if not isinstance(keys, dict):
            raise values.WrongValue(f"{letter}: {values.show(keys)} is not {{key: value}}")
        typed = []
        for name, given in keys.items():
            if name not in annotations:
                raise values.WrongValue(f"{letter}: {name} is no key of a layer's parts")
            try:
                typed.append((str(name), values.convert(given, annotations[name])))
            except values.WrongValue as error:
                raise values.WrongValue(f"{letter}: {name}: {error}") from None
        kinds.append((str(letter), tuple(typed)))
    return LayerKinds(kinds)


def letters(pattern: str, num_layers: int) -> str:
    """The letter of each layer.

    Args:
      pattern: prefix(cycle)suffix, where the cycle is repeated as often as layers are left, or a
        cycle alone.
    """
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
            f"layer_pattern={pattern}: {num_layers} layers (base_num_decoder_layers) are no "
            f"repeats of its {len(cycle)} letters\nbase_num_decoder_layers={count}"
        )
    return prefix + cycle * repeats + suffix
