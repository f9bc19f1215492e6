"""Building blocks of family tables: rows of tensors and settings.

Each file of `families/` has the tables of a family. Only these contain names of other programs.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

from MaxText.conversion.layouts import Layout

REQUIRED = object()

# config.json key that carries the length requested by the user.
TEXTS = "length of the user's texts"

# Placeholders for numbers in tensor names.
_NUMBER = re.compile(r"\{(layer|num_layers|expert)(?:\+(\d+))?\}")
_DIMENSION = re.compile(r"\([A-Z ]+\)|[A-Z]")


@dataclasses.dataclass(frozen=True)
class Row:
    """Maps a Hugging Face tensor (per layer with `{layer}`) to parameters."""

    # tensor name; placeholders {layer} (from 0), {num_layers}, {expert}; offsets as in {layer+2}
    theirs: str
    # parameters in the tensor, in the order of J. Names in layers begin with `layers/`, however
    # layers are stored; one array holds all experts, after the layer dimension. The row applies
    # only to models with the first parameter: a model without biases has no bias rows.
    ours: tuple[str, ...]
    layout: Layout  # for one layer and one expert
    older: tuple[str, ...] = ()  # alternative names in published files

    @property
    def in_layers(self) -> bool:
        return any(match[1] == "layer" for match in _NUMBER.finditer(self.theirs))

    @property
    def in_experts(self) -> bool:
        return "{expert}" in self.theirs


def numbered(name: str, num_layers: int, layer: int, expert: int = 0) -> str:
    """Returns a row's name for one layer and expert."""
    numbers = {"layer": layer, "num_layers": num_layers, "expert": expert}
    return _NUMBER.sub(lambda match: str(numbers[match[1]] + int(match[2] or 0)), name)


def row(
    theirs: str, ours: str, theirs_axes: str, ours_axes: str, older: tuple[str, ...] = ()
) -> Row:
    """Returns a row; `ours` are space-separated names."""
    return Row(theirs, tuple(ours.split()), Layout(theirs_axes, ours_axes), older)


def norm(theirs: str, ours: str, ends: tuple[str, str] = (".weight", ".bias")) -> tuple[Row, Row]:
    """Returns the rows of a norm: its scale, and the bias of LayerNorm."""
    return (
        row(theirs + ends[0], f"{ours}/scale", "D", "D"),
        row(theirs + ends[1], f"{ours}/bias", "D", "D"),
    )


def projection(
    theirs: str,
    ours: str,
    theirs_axes: str,
    ours_axes: str,
    ends: tuple[str, str] = (".weight", ".bias"),
) -> tuple[Row, Row]:
    """Returns the rows of projections that share a tensor, and of their biases."""
    last = ours_axes[-1]
    outputs = next(found for found in _DIMENSION.findall(theirs_axes) if last in found)
    letters = [letter for letter in ours_axes.split() if letter in outputs]
    kernels = " ".join(f"{name}/kernel" for name in ours.split())
    return (
        row(theirs + ends[0], kernels, theirs_axes, ours_axes),
        row(theirs + ends[1], kernels.replace("/kernel", "/bias"), outputs, " ".join(letters)),
    )


@dataclasses.dataclass(frozen=True)
class Setting:
    """Maps one key of config.json to keys of this program."""

    theirs: tuple[str, ...]  # key, then older names that are only read; "a.b" is key b of object a
    # our keys, which all take the value. If empty, `values` lists the supported ones, of which the
    # first is written.
    ours: tuple[str, ...] = ()
    # value in transformers if config.json omits the key or has null, or a function of config.json;
    # REQUIRED if there is none
    default: Any = REQUIRED
    # (Hugging Face value, our value) pairs; None if they are equal. Of equivalent Hugging Face
    # values the first is written.
    values: tuple[tuple[Any, Any], ...] | None = None
    is_written: bool = True  # whether config.json gets it
    is_computed: bool = False  # whether any value but the default contradicts other keys
    unset: Any = None  # a Hugging Face value equivalent to an absent key
    remedy: str = ""  # added to the message about a value that cannot be imported
    # config.json -> a value that our keys have anyway, so that an import omits them
    implied: Callable[[Mapping[str, Any]], Any] | None = None
    # (value, config.json) -> our value or REQUIRED, if `values` cannot express it
    read: Callable[[Any, Mapping[str, Any]], Any] | None = None
    # our keys -> Hugging Face value or REQUIRED
    write: Callable[[Mapping[str, Any]], Any] | None = None

    @property
    def name(self) -> str:
        """The key written to config.json."""
        return self.theirs[0]

    def given(self, config: Mapping[str, Any]) -> list[Any]:
        """Returns its values in a config.json, under all of its names."""
        found = [config[name] for name in self.theirs if name in config]
        return [value for value in found if self.unset is None or value != self.unset]

    def value_of_silence(self, config: Mapping[str, Any]) -> Any:
        """Returns the value of an absent key; REQUIRED if there is none."""
        return _computed(self.default, config) if callable(self.default) else self.default

    def is_implied(self, value: Any, config: Mapping[str, Any]) -> bool:
        """Returns whether our keys have the value without being set."""
        return self.implied is not None and _computed(self.implied, config) == value

    def ours_of(self, value: Any, config: Mapping[str, Any]) -> Any:
        """Converts a Hugging Face value; REQUIRED if impossible."""
        if self.read is not None:
            return self.read(value, config)
        pairs = ((value, value),) if self.values is None else self.values
        return next((ours for theirs, ours in pairs if theirs == value), REQUIRED)

    def theirs_of(self, values: Mapping[str, Any]) -> Any:
        """Converts our keys to the Hugging Face value; REQUIRED if impossible."""
        if self.write is not None:
            return self.write(values)
        value = values[self.ours[0]] if self.ours else None
        pairs = ((value, value),) if self.values is None else self.values
        return next((theirs for theirs, ours in pairs if ours == value), REQUIRED)


def _computed(value: Callable[[Mapping[str, Any]], Any], config: Mapping[str, Any]) -> Any:
    try:
        return value(config)
    except (KeyError, TypeError, ZeroDivisionError):
        return REQUIRED  # the other key is missing or no size, which is reported separately


def same(
    theirs: str, ours: str, default: Any = REQUIRED, values: Any = None, implied: Any = None
) -> Setting:
    """Returns a setting that both sides have.

    Names are separated by spaces; the first Hugging Face name is the one written.
    """
    return Setting(tuple(theirs.split()), tuple(ours.split()), default, values, implied=implied)


def only(theirs: str, *values: Any, remedy: str = "") -> Setting:
    """Returns a setting without a key here: supported values, default first."""
    pairs = tuple((value, None) for value in values)
    return Setting((theirs,), (), values[0], pairs, is_written=False, remedy=remedy)


def stated(theirs: str, *values: Any, default: Any = REQUIRED, remedy: str = "") -> Setting:
    """Returns a setting of a fixed part; its first value is written."""
    pairs = tuple((value, None) for value in values)
    return Setting((theirs,), (), default, pairs, remedy=remedy)


def computed(ours: str, value: Callable[[Mapping[str, Any]], Any]) -> Setting:
    """Returns a key of ours that the family derives, absent in config.json."""
    return Setting((ours,), (ours,), value, is_written=False, is_computed=True)


def derived(
    theirs: str, ours: str, value: Callable[[Mapping[str, Any]], Any], unset: Any = None
) -> Setting:
    """Returns a setting that follows from others but is written nevertheless."""
    return Setting((theirs,), (ours,), value, is_computed=True, unset=unset)


def _size(config: Mapping[str, Any], name: str) -> Any:
    """Returns a number; rejects text and lists, which also multiply."""
    if isinstance(config[name], str | list | tuple):
        raise TypeError(f"{name} is no number")
    return config[name]


def like(name: str) -> Callable[[Mapping[str, Any]], Any]:
    """Default: the value of another config.json key."""
    return lambda config: config[name]


def multiple(factor: int, name: str) -> Callable[[Mapping[str, Any]], Any]:
    """Default: a multiple of another key."""
    return lambda config: factor * _size(config, name)


def ratio(name: str, divisor: str) -> Callable[[Mapping[str, Any]], Any]:
    """Default: one key divided by another."""
    return lambda config: _size(config, name) // _size(config, divisor)


@dataclasses.dataclass(frozen=True)
class Family:
    """Tables of one Hugging Face `model_type`."""

    model_type: str  # as in config.json
    architecture: str  # as in `architectures` of config.json
    decoder_block: str  # nearest preset
    own: Mapping[str, Any]  # our keys with fixed values, besides SHARED_PARTS
    settings: tuple[Setting, ...]
    rows: tuple[Row, ...]
    prefix: str  # common to all tensor names but the head; absent in files of the bare model
    head: str = "lm_head.weight"  # optional in files of tied models
    ignored: tuple[str, ...] = ()  # suffixes of tensors that are not weights
    window: str = ""  # key of the sliding window, if all layers share one
    in_transformers: bool = True  # whether transformers has the class
    # config.json's auto_map, for classes in Python files next to it. A family with neither is
    # identified by `architectures`, and `model_type` is only a name used here.
    auto_map: Mapping[str, str] = dataclasses.field(default_factory=dict)
    code: str = ""  # hub repository of these files
    # our key -> why the family fixes it, or how to get that value, for messages
    reasons: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def parts(self) -> dict[str, Any]:
        """Our keys that no setting determines, with their values."""
        decided = {name for setting in self.settings for name in setting.ours}
        every = {**SHARED_PARTS, **self.own}
        return {name: value for name, value in every.items() if name not in decided}

    @property
    def in_layer(self) -> str:
        """Prefix of a layer's tensors, such as "model.layers.{layer}."."""
        name = next(row.theirs for row in self.rows if row.in_layers)
        return name[: name.index("}") + 2]

    @property
    def has_model_type(self) -> bool:
        """Whether config.json identifies the family by model_type."""
        return self.in_transformers or bool(self.auto_map)


# Parts that no family varies. Excludes keys that only change how the same function is computed
# (attention, attention_block_size, dense_kept_sums, dense_mixing, logits_dot_in_fp32).
SHARED_PARTS: Mapping[str, Any] = {
    "mixer": "attention",
    "connection_type": "auto",
    "layer_pattern": "",
    "layer_kinds": {},
    "causal": True,
    "dense_conn": False,
    "dynamic_mlp_dim": False,
    "rope_table_dtype": "float32",
    "attn_logits_soft_cap": 0.0,
    "final_logits_soft_cap": 0.0,
    "normalize_embedding_logits": False,
    "normalization_zero_centered": False,
    "scale_embedding": False,
    "block_norm_parametric": True,
    "parallel_residual_shared_norm": False,
    "use_rezero": False,
    "use_macaron": False,
    "share_parameters": False,
    "attention_scale": None,
    "attention_types": (),
    "num_mem_kv": 0,
    "static_sgu": False,
    "num_experts": 1,
    "final_norm": True,
    "final_normalization_type": "auto",
    "logits_bias": False,
    "logits_embedding_dtype": "auto",
    "head_qk": False,
    "head_type": "auto",
    "attention_projections": "dense",
    "feed_forward_type": "mlp",
}

BOOLEANS = ((True, True), (False, False))
PARALLEL = ((True, "parallel"), (False, "sequential"))
