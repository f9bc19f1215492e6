"""A window of all layers, as Mistral and Mixtral have it: ours are layers of kind local."""

from collections.abc import Mapping
from typing import Any

from MaxText.conversion.family import REQUIRED, TEXTS, Setting

NAME = "sliding_window"


def _read_kinds(value: Any, config: Mapping[str, Any]) -> Any:
    """Kinds of attention: all global where no text is longer than the window."""
    if value is None:
        return ()
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        return REQUIRED
    length = config.get(TEXTS, config["max_position_embeddings"])
    # A length that is no number is named as such elsewhere.
    if isinstance(length, int | float) and value >= length:
        return ()
    return ((("local",), config.get("num_hidden_layers")),)


def _unused(config: Mapping[str, Any]) -> Any:
    """The window where no layer has one, which our keys do not take."""
    return REQUIRED if _read_kinds(config[NAME], config) else config[NAME]


def _write(values: Mapping[str, Any]) -> Any:
    types = values["attention_types"]
    if not types:
        return None
    is_local = all(set(pattern) == {"local"} for pattern, _ in types)
    return values["sliding_window_size"] if is_local else REQUIRED


def window(default: int | None) -> tuple[Setting, ...]:
    """The two settings; they stand after those of the length and the number of layers.

    Args:
      default: tokens that a token sees, itself included, where config.json is silent.
    """
    return (
        Setting(
            (NAME,), ("attention_types",), default,
            remedy="It is a number of tokens, or null.", read=_read_kinds, write=_write,
        ),
        Setting(
            (NAME,), ("sliding_window_size",), default, is_written=False, implied=_unused,
            read=lambda value, config: value,
        ),
    )  # fmt: skip
