"""Elements of a family's tables: rows of tensors and of settings.

Each file of `families/` has the tables of a family. No other module knows names of other programs.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

from MaxText.conversion.layouts import Layout

REQUIRED = object()

# Under this name a config.json has the length that the user asks for, where that is another.
TEXTS = "length of the user's texts"

# What stands in the name of a tensor for a number.
_NUMBER = re.compile(r"\{(layer|num_layers|expert)(?:\+(\d+))?\}")
_DIMENSION = re.compile(r"\([A-Z ]+\)|[A-Z]")


@dataclasses.dataclass(frozen=True)
class Row:
    """Maps one Hugging Face tensor (per layer if its name has `{layer}`) to parameters."""

    # its name. `{layer}` stands for the number of the layer from 0, `{num_layers}` for how many
    # there are; `{layer+2}` is 2 more. `{expert}` stands for the number of an expert.
    theirs: str
    # the arrays of ours that it holds, in the order of J. Those of a layer begin with `layers/`,
    # however layers are stored. One array holds all experts, after the layers. The row applies
    # where the model has the first of them: a model without biases has no row of biases.
    ours: tuple[str, ...]
    layout: Layout  # how numbers are ordered, of one layer and one expert
    older: tuple[str, ...] = ()  # other names for it in files that are about

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
    """Returns a row; `ours` are names separated by blanks, relative to `layers/`."""
    return Row(theirs, tuple(ours.split()), Layout(theirs_axes, ours_axes), older)


def norm(theirs: str, ours: str, ends: tuple[str, str] = (".weight", ".bias")) -> tuple[Row, Row]:
    """Returns rows of a norm: its scale, and the bias of LayerNorm."""
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
    """Returns rows of one or more projections that share a tensor, and of their biases."""
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
    """Maps one key of config.json to keys of ours."""

    # its name, and older names of it that are read but not written. "a.b" is key b of the object a.
    theirs: tuple[str, ...]
    # our keys, which all take the value. None where we have no choice: `values` then holds what can
    # be imported, the first of which is written.
    ours: tuple[str, ...] = ()
    # what transformers takes where config.json is silent or says null, or a function of config.json
    # that gives it; REQUIRED if it takes nothing
    default: Any = REQUIRED
    # pairs of their value and ours; None for equal values. Where several of theirs mean the same,
    # the first is written.
    values: tuple[tuple[Any, Any], ...] | None = None
    is_written: bool = True  # whether config.json gets it
    # whether the default is the only value: another, there or in our keys, contradicts the keys
    # that it is computed from
    is_computed: bool = False
    unset: Any = None  # a value of theirs that means silence
    remedy: str = ""  # added to the message about a value that cannot be imported
    # the value, by config.json, that our keys have anyway: an import leaves them out
    implied: Callable[[Mapping[str, Any]], Any] | None = None
    # their value and config.json -> our value, or REQUIRED if we have none; where pairs of values
    # cannot say it
    read: Callable[[Any, Mapping[str, Any]], Any] | None = None
    # all our keys -> their value, or REQUIRED if they have none
    write: Callable[[Mapping[str, Any]], Any] | None = None

    @property
    def name(self) -> str:
        """The key of config.json as it is written."""
        return self.theirs[0]

    def given(self, config: Mapping[str, Any]) -> list[Any]:
        """Returns its values in a config.json, under all of its names."""
        found = [config[name] for name in self.theirs if name in config]
        return [value for value in found if self.unset is None or value != self.unset]

    def value_of_silence(self, config: Mapping[str, Any]) -> Any:
        """Returns the default; REQUIRED if there is none."""
        return _computed(self.default, config) if callable(self.default) else self.default

    def is_implied(self, value: Any, config: Mapping[str, Any]) -> bool:
        """Returns whether our keys have the value without being set."""
        return self.implied is not None and _computed(self.implied, config) == value

    def ours_of(self, value: Any, config: Mapping[str, Any]) -> Any:
        """Returns our value of one of theirs; REQUIRED if there is none."""
        if self.read is not None:
            return self.read(value, config)
        pairs = ((value, value),) if self.values is None else self.values
        return next((ours for theirs, ours in pairs if theirs == value), REQUIRED)

    def theirs_of(self, values: Mapping[str, Any]) -> Any:
        """Returns their value of ours; REQUIRED if there is none."""
        if self.write is not None:
            return self.write(values)
        value = values[self.ours[0]] if self.ours else None
        pairs = ((value, value),) if self.values is None else self.values
        return next((theirs for theirs, ours in pairs if ours == value), REQUIRED)


def _computed(value: Callable[[Mapping[str, Any]], Any], config: Mapping[str, Any]) -> Any:
    try:
        return value(config)
    except (KeyError, TypeError, ZeroDivisionError):
        return REQUIRED  # the other key is missing or no size, which is said as well


def same(
    theirs: str, ours: str, default: Any = REQUIRED, values: Any = None, implied: Any = None
) -> Setting:
    """A setting of both sides; names are separated by blanks, the first of theirs is written."""
    return Setting(tuple(theirs.split()), tuple(ours.split()), default, values, implied=implied)


def only(theirs: str, *values: Any, remedy: str = "") -> Setting:
    """A setting without a key of ours: values that mean what our model does, first the default."""
    pairs = tuple((value, None) for value in values)
    return Setting((theirs,), (), values[0], pairs, is_written=False, remedy=remedy)


def stated(theirs: str, *values: Any, default: Any = REQUIRED, remedy: str = "") -> Setting:
    """A setting that states what the family's parts are; its first value is written."""
    pairs = tuple((value, None) for value in values)
    return Setting((theirs,), (), default, pairs, remedy=remedy)


def computed(ours: str, value: Callable[[Mapping[str, Any]], Any]) -> Setting:
    """A key of ours that the family computes and config.json does not have."""
    return Setting((ours,), (ours,), value, is_written=False, is_computed=True)


def derived(
    theirs: str, ours: str, value: Callable[[Mapping[str, Any]], Any], unset: Any = None
) -> Setting:
    """A setting that follows from others and is written all the same."""
    return Setting((theirs,), (ours,), value, is_computed=True, unset=unset)


def _size(config: Mapping[str, Any], name: str) -> Any:
    """Returns a number of config.json (text and lists could be multiplied, too)."""
    if isinstance(config[name], str | list | tuple):
        raise TypeError(f"{name} is no number")
    return config[name]


def like(name: str) -> Callable[[Mapping[str, Any]], Any]:
    """Returns a default: the value of another key of config.json."""
    return lambda config: config[name]


def multiple(factor: int, name: str) -> Callable[[Mapping[str, Any]], Any]:
    """Returns a default: a multiple of another key."""
    return lambda config: factor * _size(config, name)


def ratio(name: str, divisor: str) -> Callable[[Mapping[str, Any]], Any]:
    """Returns a default: one key divided by another."""
    return lambda config: _size(config, name) // _size(config, divisor)


@dataclasses.dataclass(frozen=True)
class Family:
    """The tables of one Hugging Face `model_type`."""

    model_type: str  # as in config.json
    architecture: str  # the class that `architectures` of config.json names
    decoder_block: str  # our bundle of part choices that comes nearest
    # our keys with the values that every model of the family has, besides SHARED_PARTS
    own: Mapping[str, Any]
    settings: tuple[Setting, ...]  # config.json and our keys
    rows: tuple[Row, ...]  # tensors
    # of the names of all tensors but the head; files of the bare model leave it out. "" if they
    # have none in common.
    prefix: str
    # name of the head's tensor, which a model that ties it to the token table need not have
    head: str = "lm_head.weight"
    ignored: tuple[str, ...] = ()  # ends of names of tensors that are no weights
    # key of the number of tokens that a token sees at most, where all layers have one
    window: str = ""
    in_transformers: bool = True  # whether transformers has the class
    # of config.json, for classes that lie beside it as Python files: what transformers asks for and
    # "module.class". A family with neither has no model_type in config.json and is known by
    # `architectures`; `model_type` is then only what it is called here.
    auto_map: Mapping[str, str] = dataclasses.field(default_factory=dict)
    code: str = ""  # where these files are published
    # key of ours -> why the family has it as it is, or what makes it so, for messages
    reasons: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def parts(self) -> dict[str, Any]:
        """Our keys that no setting decides, with their values."""
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
        """Whether config.json names the family by model_type."""
        return self.in_transformers or bool(self.auto_map)


# What no family of the tables varies. Keys that only say how the same numbers are computed
# (attention, attention_block_size, dense_kept_sums, dense_mixing, logits_dot_in_fp32) belong to no
# family.
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
