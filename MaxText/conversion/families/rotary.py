"""Rotary parameters of config.json (`rope_parameters`), which most families share."""

import math
from typing import Any

from MaxText.config.values import TypedValue
from MaxText.conversion import family as hf
from MaxText.conversion.rotary_config import OBJECT

# As transformers and this program call them.
_ROPE_TYPES = {
    "default": "default",
    "llama3": "llama3.1",
    "linear": "linear",
    "yarn": "yarn",
    "longrope": "longrope",
    "proportional": "proportional",
}
ALL_TYPES = tuple(_ROPE_TYPES)


def settings(
    kind: str = "",
    types: tuple[str, ...] = ALL_TYPES,
    fraction_types: tuple[str, ...] = ("proportional",),
) -> tuple[hf.ConfigMapping, ...]:
    """Returns the settings of rotary positions, in the newer names.

    Args:
      kind: The layers that they are for, in families with an object for each kind of layer.
      types: Types of scaling that the family's class in transformers has.
      fraction_types: Types with which it can rotate a part of each head.
    """
    prefix = f"{OBJECT}.{kind}." if kind else f"{OBJECT}."
    kinds = (kind,) if kind else ()

    def mapped(name: str, key: str, **fields: Any) -> hf.ConfigMapping:
        return hf.ConfigMapping((prefix + name,), (key,), kinds=kinds, **fields)

    def rope_type_of(config: hf.HFConfig) -> hf.HFValue:
        return config.get(f"{prefix}rope_type", "default")

    def read_fraction(value: hf.HFValue, config: hf.HFConfig) -> TypedValue:
        return value if value == 1 or rope_type_of(config) in fraction_types else hf.REQUIRED

    def write_fraction(values: hf.KeyValues) -> hf.HFValue:
        fraction = values["rotary_pct"]
        if any(values["rope_type"] == _ROPE_TYPES[rope_type] for rope_type in fraction_types):
            return fraction
        return hf.OMITTED if fraction == 1 else hf.REQUIRED

    def read_factor(value: hf.HFValue, config: hf.HFConfig) -> TypedValue:
        # Proportional frequencies are not divided here.
        is_divided = rope_type_of(config) == "proportional" and value != 1
        return hf.REQUIRED if is_divided else None

    def write_truncate(values: hf.KeyValues) -> hf.HFValue:
        # transformers reads it from the outer object alone.
        if values["rope_truncate"]:
            return hf.OMITTED
        return hf.REQUIRED if kind else False

    return (
        mapped("rope_theta", "rope_max_timescale"),
        mapped(
            "rope_type",
            "rope_type",
            default="default",
            values=tuple((rope_type, _ROPE_TYPES[rope_type]) for rope_type in types),
        ),
        mapped(
            "partial_rotary_factor",
            "rotary_pct",
            default=1.0,
            hint="Whole heads are rotated with this rope_type.",
            read=read_fraction,
            write=write_fraction,
        ),
        mapped("factor", "rope_factor", write=_write_factor),
        hf.ConfigMapping(
            (f"{prefix}factor",), (), 1.0, kinds=kinds, is_written=False, read=read_factor
        ),
        mapped("original_max_position_embeddings", "original_max_position_embeddings"),
        mapped("low_freq_factor", "low_freq_factor"),
        mapped("high_freq_factor", "high_freq_factor"),
        mapped("beta_fast", "beta_fast", default=32.0),
        mapped("beta_slow", "beta_slow", default=1.0),
        mapped(
            "truncate",
            "rope_truncate",
            default=True,
            values=((True, True),) if kind else hf.BOOLEANS,
            write=write_truncate,
        ),
        mapped(
            "attention_factor",
            "rope_attention_factor",
            default=lambda config: _attention_factor(config, prefix),
            read=_read_number,
            write=lambda values: values["rope_attention_factor"] or hf.OMITTED,
        ),
        mapped("short_factor", "rope_short_factors", read=_read_numbers, write=_short_factors),
        mapped("long_factor", "rope_long_factors", read=_read_numbers, write=_long_factors),
    )


def either_order() -> hf.ConfigMapping:
    """Returns the setting of families that rotate adjacent dimensions.

    An import has halves, which are faster. Models of either kind are exported: their heads are put
    in the order of the file (WeightMapping.rotary_order).
    """
    return hf.mapped("rope_pairs", "rope_pairs", "halves", is_written=False)


def _write_factor(values: hf.KeyValues) -> hf.HFValue:
    """Returns the factor; with longrope transformers' own, if it is that."""
    ratio = values["max_target_length"] / values["original_max_position_embeddings"]
    is_ratio = values["rope_type"] == "longrope" and values["rope_factor"] == ratio
    return hf.OMITTED if is_ratio else values["rope_factor"]


def _short_factors(values: hf.KeyValues) -> list[float]:
    return list(values["rope_short_factors"])


def _long_factors(values: hf.KeyValues) -> list[float]:
    return list(values["rope_long_factors"])


def _read_number(value: hf.HFValue, config: hf.HFConfig) -> TypedValue:
    """Returns a positive number, or None."""
    return None if value is None else hf.positive_number(value)


def _read_numbers(value: hf.HFValue, config: hf.HFConfig) -> TypedValue:
    """Returns a list of numbers as a tuple."""
    if not isinstance(value, list) or not all(isinstance(x, int | float) for x in value):
        return hf.REQUIRED
    return tuple(map(float, value))


def _attention_factor(config: hf.HFConfig, prefix: str) -> float | None:
    """Returns the factor of sines and cosines that `mscale` and `mscale_all_dim` give; else None.

    A single one of the two has no effect in transformers.
    """
    factor = config[f"{prefix}factor"]
    above = config.get(f"{prefix}mscale")
    below = config.get(f"{prefix}mscale_all_dim")
    if not above or not below or factor <= 1:
        return None
    return (0.1 * above * math.log(factor) + 1.0) / (0.1 * below * math.log(factor) + 1.0)
