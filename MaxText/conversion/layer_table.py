"""Kinds of layers in config.json: which have a window, no rotary positions, or experts.

transformers lists the kind of every layer (`layer_types`); older files have rules instead, such as
`sliding_window_pattern`. A `LayerTable` reads either, and writes the list.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from MaxText.config.schema import all_keys

GLOBAL = "full_attention"
LOCAL = "sliding_attention"
LINEAR = "linear_attention"
_LAYER_TYPES = "layer_types"
# Keys of ours: sizes that can differ by kind, and one that global layers do not read.
_SIZES = ("base_num_kv_heads", "head_dim")
_WINDOW = "sliding_window_size"
NUM_EXPERTS = "num_experts"
# Keys that say which layers are of a kind.
_BY_LAYER = {
    "layer_pattern",
    "layer_kinds",
    "attention_types",
    "moe_layers",
    "first_num_dense_layers",
    "interleave_moe_layer_step",
}
_MAX_PREFIX = 64  # layers before a cycle, and of it
_UNSET = object()


class LayerKind(NamedTuple):
    """A kind of layers.

    Attributes:
      name: Its name in tables; that of `layer_types` where one list says all.
      letter: Its letter in layer_pattern.
      keys: What distinguishes its layers.
    """

    name: str
    letter: str
    keys: Mapping[str, Any]


class LayerTableError(ValueError):
    """A list of config.json cannot be read; the text begins with its key."""


class Layers(NamedTuple):
    """The layers of a config.json, as the rules that a LayerTable calls see them.

    Attributes:
      config: Of config.json.
      count: num_hidden_layers.
    """

    config: Mapping[str, Any]
    count: int


@dataclasses.dataclass(frozen=True)
class LayerTable:
    """Kinds of layers of a family.

    Attributes:
      kinds: All kinds. The first whose keys a layer has is its kind.
      read: The name of each layer's kind, by config.json. Raises LayerTableError.
      write: Keys of config.json, from the name of each layer's kind.
    """

    kinds: tuple[LayerKind, ...]
    read: Callable[[Layers], Sequence[str]]
    write: Callable[[Sequence[str]], dict[str, Any]]

    @property
    def keys(self) -> set[str]:
        """Keys of ours that the table determines."""
        return _BY_LAYER.union(*(kind.keys for kind in self.kinds))

    def kind_of(self, values: Mapping[str, Any]) -> LayerKind | None:
        """Returns the kind of a layer with these values of our keys; None if it has none."""
        fitting = (
            kind
            for kind in self.kinds
            if all(values[name] == value for name, value in kind.keys.items())
        )
        return next(fitting, None)


def keys_of_layers(
    names: Sequence[str],
    keys_by_kind: Mapping[str, Mapping[str, Any]],
    table: LayerTable,
    base: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns keys that give each layer those of its kind.

    Keys with the same value in all kinds become the model's, and so do the keys of experts, which
    dense layers do not read. A letter has the others, if they distinguish its kind, or differ from
    the model's own value.

    Args:
      names: The kind of each layer.
      keys_by_kind: The keys of each kind.
      table: Has the letters.
      base: Values of the model's keys where nothing sets them.
    """
    used = [kind for kind in table.kinds if kind.name in names]
    keys_of_used = [keys_by_kind[kind.name] for kind in used]
    first = keys_of_used[0]
    all_keys = {name: value for keys in keys_of_used for name, value in keys.items()}
    shared = {name: value for name, value in all_keys.items() if _is_shared(name, keys_of_used)}
    if len(used) == 1:
        return shared
    # Sizes of the model itself have to fit, too.
    sizes = {name: value for name, value in first.items() if name in _SIZES}
    of_model = {**base, **sizes, **_expert_keys(keys_of_used), **shared}
    kinds = {
        kind.letter: {
            name: value
            for name, value in keys.items()
            if name not in shared and (name in kind.keys or of_model.get(name, _UNSET) != value)
        }
        for kind, keys in zip(used, keys_of_used, strict=True)
    }
    letter_of = {kind.name: kind.letter for kind in used}
    pattern = shortest_pattern("".join(letter_of[name] for name in names))
    of_all = {**sizes, **_expert_keys(keys_of_used), **shared}
    return {**of_all, "layer_pattern": pattern, "layer_kinds": kinds}


def _expert_keys(keys_of_kinds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the keys of experts of the first kind that has experts."""
    kinds = [keys for keys in keys_of_kinds if keys.get(NUM_EXPERTS, 1) != 1]
    names = {key.name for key in all_keys().values() if "mixture_of_experts" in key.section}
    return {name: value for name, value in kinds[0].items() if name in names} if kinds else {}


def _is_shared(name: str, keys_of_kinds: Sequence[Mapping[str, Any]]) -> bool:
    """Returns whether a key has one value in all kinds that read it."""
    values = [keys[name] for keys in keys_of_kinds if name in keys]
    is_read_by_all = len(values) == len(keys_of_kinds) or name == _WINDOW
    return is_read_by_all and all(value == values[0] for value in values)


def shortest_pattern(letters: str) -> str:
    """Returns a layer_pattern for the letters of all layers: a prefix, a cycle, and letters left.

    "LLGLLGLL" becomes "(LLG)LL", "DDDEEEEE" "DDD(E)".
    """
    shortest = _cycled(letters, range(1, len(letters) + 1))
    for num_first in range(1, min(_MAX_PREFIX, len(letters))):
        prefix, remaining = letters[:num_first], letters[num_first:]
        cycled = _cycled(remaining, range(1, _MAX_PREFIX))
        pattern = prefix + (cycled if "(" in cycled else f"({cycled})")
        if cycled and _num_letters(pattern) < _num_letters(shortest):
            shortest = pattern
    return shortest


def _num_letters(pattern: str) -> int:
    return len(pattern) - 2 * pattern.count("(")


def _cycled(letters: str, lengths: Iterable[int]) -> str:
    """Returns the pattern of letters that repeat a cycle and may end within it; "" if none fits.

    Args:
      lengths: Of cycles to try.
    """
    for length in lengths:
        cycle = letters[:length]
        repeats, num_left_over = divmod(len(letters), length)
        if cycle * repeats + cycle[:num_left_over] == letters:
            return f"({cycle}){cycle[:num_left_over]}" if num_left_over else cycle
    return ""


def read_list(layers: Layers, key: str, default: Iterable[Any] | None) -> list[Any]:
    """Returns a list of config.json with an element for each layer.

    Raises:
      LayerTableError: It is no list, or has another length.
    """
    listed = layers.config.get(key)
    if listed is None and default is not None:
        return list(default)
    if not isinstance(listed, list) or len(listed) != layers.count:
        raise LayerTableError(f"{key}={listed} is not a list for {layers.count} layers")
    return listed


def read_layer_types(layers: Layers, default: Iterable[str], others: str = LOCAL) -> list[str]:
    """Returns `layer_types`, or the default of the family.

    Args:
      layers: Of config.json.
      default: The type of each layer of a config.json without the list.
      others: The type of layers that are not global.

    Raises:
      LayerTableError: It has other types than these two.
    """
    types = read_list(layers, _LAYER_TYPES, default)
    unknown = sorted({str(kind) for kind in types} - {GLOBAL, others})
    if unknown:
        raise LayerTableError(
            f"{_LAYER_TYPES}: only {GLOBAL} and {others} can be imported, not {', '.join(unknown)}"
        )
    return types


def every_nth_global(key: str, default: int, others: str = LOCAL) -> Callable[[Layers], list[str]]:
    """Returns a reader for families whose older files have the distance between global layers.

    Args:
      key: The key with that distance.
      default: Its default.
      others: The type of the other layers.
    """

    def read(layers: Layers) -> list[str]:
        distance = layers.config.get(key)
        distance = default if distance is None else distance
        if layers.config.get(_LAYER_TYPES) is None and (type(distance) is not int or distance < 1):
            raise LayerTableError(f"{key}={distance} is not a number of layers")
        alternating = (
            GLOBAL if (index + 1) % distance == 0 else others for index in range(layers.count)
        )
        return read_layer_types(layers, alternating, others)

    return read


def write_layer_types(names: Sequence[str]) -> dict[str, Any]:
    """Returns `layer_types`."""
    return {_LAYER_TYPES: list(names)}


LOCAL_KIND = LayerKind(LOCAL, "L", {"mixer": "local_attention"})
GLOBAL_KIND = LayerKind(GLOBAL, "G", {"mixer": "attention"})
