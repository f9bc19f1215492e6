"""Sliding windows of config.json: `sliding_window`, of all layers or of those that `layer_types` has.

A window counts the query's own token, there and here.
"""

from collections.abc import Mapping
from typing import Any

from MaxText.conversion import family as hf
from MaxText.conversion.layer_table import LOCAL

NAME = "sliding_window"
_HINT = "It is a number of tokens, or null."


def _is_window(value: Any) -> bool:
    return type(value) is int and value >= 1


def of_local_layers(
    default: int | None, kinds: tuple[str, ...] = (LOCAL,), name: str = NAME
) -> hf.ConfigMapping:
    """Returns the setting of the window of local layers.

    Args:
      default: In transformers, if config.json omits the key.
      kinds: Of the layers with a window.
      name: The key.
    """
    return hf.ConfigMapping(
        (name,),
        ("sliding_window_size",),
        default,
        null=None,
        kinds=kinds,
        hint="It is a number of tokens.",
        read=lambda value, config: value if _is_window(value) else hf.REQUIRED,
        write=lambda values: values["sliding_window_size"],
    )


def _read_of_all(value: Any, config: Mapping[str, Any]) -> Any:
    """Returns attention types: all global if no text exceeds the window."""
    if value is None:
        return ()
    if not _is_window(value):
        return hf.REQUIRED
    length = config.get(hf.REQUESTED_LENGTH, config["max_position_embeddings"])
    # An invalid length is reported elsewhere.
    if isinstance(length, int | float) and value >= length:
        return ()
    return ((("local",), config.get("num_hidden_layers")),)


def _unused(config: Mapping[str, Any]) -> Any:
    """Returns the window if no layer is local; unused windows are refused."""
    return hf.REQUIRED if _read_of_all(config[NAME], config) else config[NAME]


def _write_of_all(values: Mapping[str, Any]) -> Any:
    """Returns the window if all layers are local, None if all are global."""
    types = values["attention_types"]
    if not types:
        return None
    is_local = all(set(pattern) == {"local"} for pattern, _ in types)
    return values["sliding_window_size"] if is_local else hf.REQUIRED


def of_all_layers(default: int | None) -> tuple[hf.ConfigMapping, ...]:
    """Returns the settings of a window that all layers have.

    Args:
      default: In transformers, if config.json omits the key.
    """
    return (
        hf.ConfigMapping(
            (NAME,),
            ("attention_types",),
            default,
            null=None,
            hint=_HINT,
            read=_read_of_all,
            write=_write_of_all,
        ),
        hf.ConfigMapping(
            (NAME,),
            ("sliding_window_size",),
            default,
            null=None,
            is_written=False,
            implied=_unused,
            read=lambda value, config: value,
        ),
    )
