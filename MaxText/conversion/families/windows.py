"""Sliding windows of config.json: `sliding_window`, of all layers or of some.

A window counts the query's own token, there and here.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from MaxText.conversion import family as hf
from MaxText.conversion.layer_table import (
    GLOBAL,
    GLOBAL_KIND,
    LOCAL,
    LOCAL_KIND,
    Layers,
    LayerTable,
    LayerTableError,
    read_layer_types,
    write_layer_types,
)

NAME = "sliding_window"
USED = "use_sliding_window"


def of_local_layers(default: int | None, kinds: tuple[str, ...] = (LOCAL,)) -> hf.ConfigMapping:
    """Returns the setting of the window of layers that have one.

    Args:
      default: In transformers, if config.json omits the key.
      kinds: Of these layers.
    """

    def read(value: Any, config: Mapping[str, Any]) -> Any:
        return hf.whole_number(value, at_least=1)

    return hf.ConfigMapping(
        (NAME,),
        ("sliding_window_size",),
        default,
        null=None,
        kinds=kinds,
        hint="It is a number of tokens.",
        read=read,
        write=lambda values: values["sliding_window_size"],
    )


def of_all_layers(default: int | None) -> LayerTable:
    """Returns the table of families in which all layers have a window, or none does.

    A window that no sequence exceeds is none.

    Args:
      default: The window of a config.json without the key.
    """

    def read(layers: Layers) -> Sequence[str]:
        config = layers.config
        window = config.get(NAME, default)
        length = config.get(hf.REQUESTED_LENGTH, config.get("max_position_embeddings"))
        is_number = isinstance(window, int) and isinstance(length, int | float)
        has_window = window is not None and not (is_number and window >= length)
        return [LOCAL if has_window else GLOBAL] * layers.count

    def write(names: Sequence[str]) -> dict[str, Any]:
        if len(set(names)) > 1:
            raise LayerTableError("some layers have a window and others have none")
        return {} if LOCAL in names else {NAME: None}

    return LayerTable((LOCAL_KIND, GLOBAL_KIND), read, write)


def is_used(layers: Layers) -> bool:
    """Returns whether `use_sliding_window` is on and there is a window."""
    config = layers.config
    return bool(config.get(USED, False)) and config.get(NAME, 4096) is not None


def _read_later(layers: Layers) -> list[str]:
    has_window = is_used(layers)
    first = layers.config.get("max_window_layers", 28) if has_window else layers.count
    types = (LOCAL if index >= first else GLOBAL for index in range(layers.count))
    names = read_layer_types(layers, types)
    check_window(layers, names, has_window=has_window)
    return names


def check_window(layers: Layers, names: Sequence[str], *, has_window: bool) -> None:
    """Raises LayerTableError for layers with a window that config.json turns off."""
    if LOCAL in names and not has_window:
        used = layers.config.get(USED, False)
        raise LayerTableError(
            f"layer_types has {LOCAL}, but {USED}={used} and {NAME}={layers.config.get(NAME)}"
        )


def write_used(names: Sequence[str]) -> dict[str, Any]:
    """Returns `layer_types` and `use_sliding_window`."""
    return {**write_layer_types(names), USED: LOCAL in names}


# The table of Qwen: with `use_sliding_window` the layers from `max_window_layers` on have a window.
OF_LATER_LAYERS = LayerTable((LOCAL_KIND, GLOBAL_KIND), _read_later, write_used)
