"""Building blocks of family tables for tensors and config.json keys.

Each file of `families/` has the tables of a family. Only these contain names of other programs.

A layout is two patterns, such as "(N J H) D" and "D N H" for GPT-NeoX's fused projection.
Parentheses group a fused dimension, and J counts the parameters that share the tensor. Conversions
only permute numbers, so round trips are exact.

Letters: D emb_dim, N query heads, K key/value heads, H head_dim, F mlp_dim, V vocab_size, P
positions, J parameters per tensor, E experts, U a dimension of size 1 that the parameter lacks.
Pattention slots: Q of each of query, key and value; O of the output projection; S of the
feed-forward. Dense connections: C streams, L aggregated hidden states, W hidden width of the weight
network. Latent attention: Q and L widths of the vectors that queries, and keys and values, are
projected from; W width of a value, or of a key and a value. G gates. Sizes may differ by layer.
"""

import dataclasses
import functools
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import yaml

from MaxText.config.config_files import DECODER_BLOCKS
from MaxText.config.schema import all_keys, flatten, unflatten
from MaxText.config.values import TypedValue
from MaxText.conversion.layer_table import LayerTable
from MaxText.conversion.rotary_config import RotaryDefaults
from MaxText.value_types import JsonObject, JsonValue

REQUIRED = object()
OMITTED = object()  # what a setting writes that config.json does not need

HFConfig = Mapping[str, JsonValue]  # a config.json
HFValue = JsonValue  # of a key of config.json, or REQUIRED or OMITTED
KeyValues = Mapping[str, TypedValue]  # values of our keys
# Pairs of a value of config.json and the value here.
ValuePairs = tuple[tuple[HFValue, TypedValue], ...]
# A value from those of other keys: of a config.json, or of ours.
Computed = Callable[[Mapping[str, Any]], Any]
# A default: a value, a function of a config.json, or REQUIRED.
Default = HFValue | Computed

# config.json key that carries the length requested by the user.
REQUESTED_LENGTH = "requested max_target_length"

# Placeholders for numbers in tensor names.
_NUMBER = re.compile(r"\{(layer|num_layers|expert|head)(?:\+(\d+))?\}")
_DIMENSION = re.compile(r"\([A-Z ]+\)|[A-Z]")
_UNIT = "U"


@dataclasses.dataclass(frozen=True)
class _Patterns:
    """Two patterns of the same numbers: of (a part of) a tensor, and of the parameters in it."""

    hf_axes: str  # for example "(N J H) D"
    param_axes: str  # for example "D N H"; the same letters without J
    num_params: int  # J

    @functools.cached_property
    def _groups(self) -> list[str]:
        """Letters of each dimension of the tensor, such as ["NJH", "D"]."""
        return [group.strip("()").replace(" ", "") for group in _DIMENSION.findall(self.hf_axes)]

    @functools.cached_property
    def _letters(self) -> str:
        """Letters of all dimensions of the tensor but those of size 1, such as "NJHD"."""
        return "".join(self._groups).replace(_UNIT, "")

    @functools.cached_property
    def _order(self) -> list[int]:
        """Indices of J and the parameter's letters among the letters of the tensor."""
        letters = "J" + self.param_axes.replace(" ", "")
        axes = [letter for letter in letters if letter in self._letters]
        return [self._letters.index(letter) for letter in axes]

    def _sizes(self, shape: Sequence[int]) -> dict[str, int]:
        """Returns the size of each letter for parameters of `shape`."""
        sizes = zip(self.param_axes.split(), shape, strict=True)
        return {"J": self.num_params, _UNIT: 1, **dict(sizes)}

    def hf_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the tensor for parameters of `shape`."""
        sizes = self._sizes(shape)
        return tuple(math.prod(sizes[letter] for letter in group) for group in self._groups)

    def split(self, tensor: np.ndarray, shape: Sequence[int]) -> list[np.ndarray]:
        """Splits a tensor into parameters of `shape`, as views."""
        sizes = self._sizes(shape)
        spread = tensor.reshape([sizes[letter] for letter in self._letters])
        moved = spread.transpose(self._order)
        return list(moved) if "J" in self._letters else [moved]

    def join(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Joins parameters into the tensor; the inverse of `split`."""
        moved = np.stack(arrays) if "J" in self._letters else arrays[0]
        spread = moved.transpose(np.argsort(self._order))
        return np.ascontiguousarray(spread.reshape(self.hf_shape(arrays[0].shape)))


RotaryOrder = Literal["halves", "adjacent", "reversed"]
RotaryPart = Literal["first", "last"]


@dataclasses.dataclass(frozen=True)
class WeightMapping:
    """Maps a Hugging Face tensor (per layer with `{layer}`) to parameters."""

    # tensor name; placeholders {layer} (from 0), {num_layers}, {expert}, {head}; offsets as in
    # {layer+2}
    hf_name: str
    # parameters in the tensor, in the order of J, separated by spaces. Names in layers begin with
    # `layers/`, however layers are stored; one array holds all experts or heads that have tensors
    # of their own, after the layer dimension.
    # The row applies only to models with the first parameter: a model without biases has no bias
    # rows.
    params: str
    # Patterns for one layer and one expert or head. Parameters of different shapes that the tensor
    # concatenates along its first dimension each have a pattern, separated by "|".
    hf_axes: str  # for example "(N J H) D"
    param_axes: str  # for example "D N H"; the same letters without J
    legacy_names: tuple[str, ...] = ()  # alternative names in published files
    # How the last dimension of the parameter, a head's, is rotated there. Here the first half of
    # the rotary dimensions pairs with the second. "adjacent": pairs are (0, 1), (2, 3), ...
    # "reversed": halves that turn the other way, which is a rotation of (a, -b).
    rotary_order: RotaryOrder = "halves"
    # Which dimensions of a head are rotated, if not all: the first, or the last (latent attention).
    rotary_part: RotaryPart = "first"
    # A further parameter, which the model must have, or must not have, for the row to apply.
    only_with: str = ""
    only_without: str = ""
    # Whether parameters of different shapes are concatenated for each group of heads by itself
    # (linear_num_key_heads): first all of group 0, then all of group 1.
    is_grouped: bool = False

    @property
    def param_names(self) -> tuple[str, ...]:
        """The parameters in the tensor, in the order of J."""
        return tuple(self.params.split())

    @property
    def in_layers(self) -> bool:
        """Whether there is such a tensor in each layer."""
        return "{layer" in self.hf_name

    @property
    def is_numbered(self) -> bool:
        """Whether there is such a tensor for each expert, or each head."""
        return "{expert}" in self.hf_name or "{head}" in self.hf_name

    @functools.cached_property
    def _patterns(self) -> list[_Patterns]:
        """The layout of each concatenated part: one, except for fused rows of several sizes."""
        patterns = list(zip(self.hf_axes.split("|"), self.param_axes.split("|"), strict=True))
        num_params = len(self.param_names) // len(patterns)
        return [_Patterns(hf.strip(), param.strip(), num_params) for hf, param in patterns]

    @property
    def ranks(self) -> list[int]:
        """The number of dimensions of each parameter, of one layer and one expert."""
        per_part = [len(layout.param_axes.split()) for layout in self._patterns]
        return per_part * (len(self.param_names) // len(per_part))

    def hf_shape(self, shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """Returns the shape of the tensor for parameters of `shapes`."""
        first, *others = (
            layout.hf_shape(shape) for layout, shape in zip(self._patterns, shapes, strict=False)
        )
        if not others:
            return first
        return (first[0] + sum(other[0] for other in others), *first[1:])

    def split(
        self,
        tensor: np.ndarray,
        shapes: Sequence[Sequence[int]],
        rotary_dims: int = 0,
        num_groups: int = 1,
    ) -> list[np.ndarray]:
        """Splits a Hugging Face tensor into parameters.

        Args:
          tensor: The tensor.
          shapes: Of the parameters, in their order.
          rotary_dims: R, the dimensions of a head that are rotated; only rows with a rotary_order
            of their own need it.
          num_groups: Groups of heads of a grouped row.

        Returns:
          The parameters in their order, as views where the order allows it.
        """
        parts = [tensor]
        if len(self._patterns) > 1:  # a single one may be a scalar's
            lengths = [
                layout.hf_shape(shape)[0]
                for layout, shape in zip(self._patterns, shapes, strict=False)
            ]
            grouped = tensor.reshape(num_groups, -1, *tensor.shape[1:])
            ends = np.cumsum(lengths) // num_groups
            parts = [
                part.reshape(-1, *tensor.shape[1:]) for part in np.split(grouped, ends[:-1], axis=1)
            ]
        arrays = [
            array
            for layout, part, shape in zip(self._patterns, parts, shapes, strict=False)
            for array in layout.split(part, shape)
        ]
        return [self._reordered(array, _to_halves, rotary_dims) for array in arrays]

    def join(
        self, arrays: Sequence[np.ndarray], rotary_dims: int = 0, num_groups: int = 1
    ) -> np.ndarray:
        """Joins parameters into the Hugging Face tensor; the inverse of `split`."""
        arrays = [self._reordered(array, _from_halves, rotary_dims) for array in arrays]
        if len(self._patterns) == 1:
            return self._patterns[0].join(arrays)
        joined = [
            layout.join([array]) for layout, array in zip(self._patterns, arrays, strict=True)
        ]
        in_row = joined[0].shape[1:]
        grouped = [part.reshape(num_groups, -1, *in_row) for part in joined]
        return np.concatenate(grouped, axis=1).reshape(-1, *in_row)

    def _reordered(
        self,
        array: np.ndarray,
        reorder: Callable[[np.ndarray, RotaryOrder], np.ndarray],
        rotary_dims: int,
    ) -> np.ndarray:
        """Returns an array whose rotated dimensions of each head are in another order."""
        if self.rotary_order == "halves" or rotary_dims == 0:
            return array
        start = array.shape[-1] - rotary_dims if self.rotary_part == "last" else 0
        before, rotated, after = np.split(array, [start, start + rotary_dims], axis=-1)
        return np.concatenate([before, reorder(rotated, self.rotary_order), after], axis=-1)


def _to_halves(array: np.ndarray, order: RotaryOrder) -> np.ndarray:
    """Returns rotated dimensions of which the first half pairs with the second."""
    if order == "adjacent":
        return np.concatenate([array[..., 0::2], array[..., 1::2]], axis=-1)
    first, second = np.split(array, 2, axis=-1)
    return np.concatenate([first, -second], axis=-1)


def _from_halves(array: np.ndarray, order: RotaryOrder) -> np.ndarray:
    """Returns rotated dimensions in another order; the inverse of `_to_halves`."""
    if order != "adjacent":
        return _to_halves(array, order)
    pairs = np.stack(np.split(array, 2, axis=-1), axis=-1)
    return pairs.reshape(array.shape)


row = WeightMapping


def numbered(name: str, num_layers: int, layer: int, index: int = 0) -> str:
    """Returns a name with numbers for placeholders: "h.{layer+1}" is "h.3" in layer 2.

    Args:
      name: The name.
      num_layers: Layers of the model.
      layer: Of the tensor.
      index: Number of its expert or head, if there is a tensor for each.
    """
    numbers = {"layer": layer, "num_layers": num_layers, "expert": index, "head": index}
    return _NUMBER.sub(lambda match: str(numbers[match[1]] + int(match[2] or 0)), name)


Rows = tuple[WeightMapping, ...]
_SUFFIXES = (".weight", ".bias")


def norm(hf_name: str, params: str, suffixes: Sequence[str] = _SUFFIXES) -> Rows:
    """Returns the rows of a norm: its scale, and the bias of LayerNorm."""
    return (
        row(hf_name + suffixes[0], f"{params}/scale", "D", "D"),
        row(hf_name + suffixes[1], f"{params}/bias", "D", "D"),
    )


def projection(
    hf_name: str,
    params: str,
    hf_axes: str,
    param_axes: str,
    suffixes: Sequence[str] = _SUFFIXES,
    **fields: Any,
) -> Rows:
    """Returns the rows of a projection: its kernels, and their biases.

    The axes of the bias are the outputs of the kernel: those of the tensor's dimension that holds
    the last axis of the parameter.

    Args:
      hf_name: Of the tensors, without suffix.
      params: Projections in the tensor, separated by spaces, without `/kernel`.
      hf_axes: Pattern of the kernel's tensor.
      param_axes: Pattern of the kernel.
      suffixes: Of the kernel's tensor and of the bias's.
      fields: Other fields of WeightMapping, of both rows.
    """
    last = param_axes[-1]
    outputs = next(dimension for dimension in _DIMENSION.findall(hf_axes) if last in dimension)
    letters = [letter for letter in param_axes.split() if letter in outputs]
    kernels = " ".join(f"{name}/kernel" for name in params.split())
    biases = kernels.replace("/kernel", "/bias")
    make = functools.partial(row, **fields)
    return (
        make(hf_name + suffixes[0], kernels, hf_axes, param_axes),
        make(hf_name + suffixes[1], biases, outputs, " ".join(letters)),
    )


ATTENTION = "layers/self_attention/"


def attention(prefix: str, names: str, kv: str = "N", rotary_order: RotaryOrder = "halves") -> Rows:
    """Returns the rows of a torch.nn.Linear per projection.

    Args:
      prefix: Of all tensor names.
      names: What follows it, of query, key, value and output, separated by spaces.
      kv: The letter of key and value heads: N, or K for grouped-query attention.
      rotary_order: Of queries and keys, see WeightMapping.
    """
    query, key, value, out = (prefix + name for name in names.split())
    rotated = functools.partial(projection, rotary_order=rotary_order)
    return (
        *rotated(query, ATTENTION + "query", "(N H) D", "D N H"),
        *rotated(key, ATTENTION + "key", f"({kv} H) D", f"D {kv} H"),
        *projection(value, ATTENTION + "value", f"({kv} H) D", f"D {kv} H"),
        *projection(out, ATTENTION + "out", "D (N H)", "N H D"),
    )


@dataclasses.dataclass(frozen=True)
class ConfigMapping:
    """Maps one key of config.json to keys of this program."""

    # key, then legacy names, which are only read; "a.b" is key b of object a
    hf_names: tuple[str, ...]
    # our keys, which all get the value. If empty, `values` lists the supported ones, of which the
    # first is written.
    keys: tuple[str, ...] = ()
    # value in transformers if config.json omits the key or has null, or a function of config.json;
    # REQUIRED if there is none
    default: Default = REQUIRED
    # (Hugging Face value, our value) pairs; None if they are equal. Of equivalent Hugging Face
    # values the first is written.
    values: ValuePairs | None = None
    is_written: bool = True  # whether config.json gets it
    is_computed: bool = False  # whether any value but the default contradicts other keys
    unset: HFValue = REQUIRED  # a Hugging Face value equivalent to an absent key
    hint: str = ""  # added to the message about a value that cannot be imported
    # config.json -> a value that our keys have anyway, so that an import omits them
    implied: TypedValue | Computed = REQUIRED
    # value of a null in config.json, or a function of config.json; REQUIRED if it means an absent
    # key
    null: Default = REQUIRED
    kinds: tuple[str, ...] = ()  # of the layers that it is for (Family.layers); empty: all
    # (value, config.json) -> our value or REQUIRED, if `values` cannot express it
    read: Callable[[HFValue, HFConfig], TypedValue] | None = None
    # our keys -> Hugging Face value, REQUIRED or OMITTED
    write: Computed | None = None

    @property
    def name(self) -> str:
        """The key written to config.json."""
        return self.hf_names[0]

    def to_key_value(self, value: HFValue, config: HFConfig) -> TypedValue:
        """Converts a Hugging Face value; REQUIRED if impossible."""
        if self.read is not None:
            return self.read(value, config)
        pairs = ((value, value),) if self.values is None else self.values
        return next((key for hf, key in pairs if hf == value), REQUIRED)

    def to_hf_value(self, values: KeyValues) -> HFValue:
        """Converts our keys to the Hugging Face value; REQUIRED if impossible."""
        if self.write is not None:
            return self.write(values)
        value = values[self.keys[0]] if self.keys else None
        pairs = ((value, value),) if self.values is None else self.values
        return next((hf for hf, key in pairs if key == value), REQUIRED)


def evaluate(value: Default, config: HFConfig) -> HFValue:
    """Returns a default, computed from a config.json if it is a function."""
    try:
        return value(config) if callable(value) else value
    except (KeyError, TypeError, ZeroDivisionError):
        return REQUIRED  # the other key is missing or not a size, which is reported separately


def mapped(
    hf_names: str,
    keys: str,
    default: Default = REQUIRED,
    values: ValuePairs | None = None,
    **fields: Any,
) -> ConfigMapping:
    """Returns a setting common to both sides.

    Args:
      hf_names: Separated by spaces; the first is the one written.
      keys: Our keys, separated by spaces.
      default: Like the other arguments, see ConfigMapping.
      values: Likewise.
      fields: Other fields of ConfigMapping.
    """
    return ConfigMapping(
        hf_names=tuple(hf_names.split()),
        keys=tuple(keys.split()),
        default=default,
        values=values,
        **fields,
    )


def supported(hf_name: str, *values: HFValue, hint: str = "", **fields: Any) -> ConfigMapping:
    """Returns a setting without a key here: supported values, default first."""
    pairs = tuple((value, None) for value in values)
    return ConfigMapping(
        hf_names=(hf_name,),
        default=values[0],
        values=pairs,
        is_written=False,
        hint=hint,
        **fields,
    )


def constant(
    hf_name: str, *values: HFValue, default: Default = REQUIRED, hint: str = ""
) -> ConfigMapping:
    """Returns a setting of a fixed part; its first value is written."""
    pairs = tuple((value, None) for value in values)
    return ConfigMapping(hf_names=(hf_name,), default=default, values=pairs, hint=hint)


def without_key(hf_name: str, value: Computed, **fields: Any) -> ConfigMapping:
    """Returns a setting that is written for other programs, and means nothing here."""
    return ConfigMapping(
        hf_names=(hf_name,),
        default=None,
        null=None,
        read=lambda stored, config: None,
        write=value,
        **fields,
    )


def family_default(key: str, value: Computed) -> ConfigMapping:
    """Returns a setting that config.json does not have: our key follows from others."""
    return ConfigMapping(
        hf_names=(key,), keys=(key,), default=value, is_written=False, is_computed=True
    )


def write_only(hf_name: str, key: str, value: Computed, unset: HFValue = REQUIRED) -> ConfigMapping:
    """Returns a setting derived from others but written nevertheless."""
    return ConfigMapping(
        hf_names=(hf_name,), keys=(key,), default=value, is_computed=True, unset=unset
    )


# Activations with another name here; others are kinds of tanh GELU.
_ACTIVATIONS = {
    "gelu": "gelu_erf",
    "relu": "relu",
    "relu2": "relu2",
    "xielu": "xielu",
    "silu": "silu",
    "swish": "swish",
}


def activations(names: str, *gate: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Returns `values` of an activation.

    Args:
      names: Hugging Face names, separated by spaces; of equivalent ones the first is written.
      gate: The activation of the gate, "linear", if there is one.
    """
    return tuple((name, (_ACTIVATIONS.get(name, "gelu"), *gate)) for name in names.split())


copy_of = operator.itemgetter  # a default: the value of another config.json key


def scaled_by(factor: int, name: str) -> Computed:
    """Returns a default: a multiple of another config.json key."""
    return lambda config: factor * config[name]


def divided_by(name: str, divisor: str) -> Computed:
    """Returns a default: the quotient of two other config.json keys."""
    return lambda config: config[name] // config[divisor]


# First part of the names of parameters in rows of PredictionLayers.
DEPTH = "depth"


@dataclasses.dataclass(frozen=True)
class PredictionLayers:
    """Tensors of multi-token prediction, which has a further layer for each depth.

    {layer} is the number of that layer: those of the model come before.
    """

    in_layer: str  # prefix of the tensors of its block, in place of Family.in_layer
    # Rows of what a depth has besides its block. Parameters begin with `depth/`.
    rows: Rows
    # Tensors that repeat another one, with its parameter: of a tied head, that of the token table.
    copies: Mapping[str, str] = dataclasses.field(default_factory=dict)
    most: int | None = None  # depths that the format has names for; None for any number


ConfigChange = Callable[[JsonObject], JsonObject]


def _unchanged(config: JsonObject) -> JsonObject:
    return config


@dataclasses.dataclass(frozen=True)
class Family:
    """Tables of one Hugging Face `model_type`."""

    model_type: str  # as in config.json
    architecture: str  # as in `architectures` of config.json
    decoder_block: str  # whose choices hold for all keys without a setting
    settings: tuple[ConfigMapping, ...]
    rows: Rows
    prefix: str = ""  # common to all tensor names but the head; absent in files of the bare model
    head: str = "lm_head.weight"  # optional in files of tied models
    choices: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # unlike decoder_block's
    ignored: tuple[str, ...] = ()  # suffixes of tensors that are not weights
    # Prefixes of tensors of parts that are not read; an import names them. They may have
    # {num_layers}, as in the names of rows.
    skipped: tuple[str, ...] = ()
    prediction: PredictionLayers | None = None  # None: no names for multi-token prediction
    # Scalar tensors, by name, that hold numbers of the architecture: no parameters here.
    constants: Mapping[str, float] = dataclasses.field(default_factory=dict)
    in_transformers: bool = True  # whether transformers has the class
    # config.json's auto_map, for classes in Python files next to it. A family with neither is
    # identified by `architectures`, and `model_type` is only a name used here.
    auto_map: Mapping[str, str] = dataclasses.field(default_factory=dict)
    code: str = ""  # hub repository of these files
    rotary: RotaryDefaults | None = None  # how config.json describes rotary positions
    layers: LayerTable | None = None  # how config.json describes layers that differ
    # Rewrites what config.json says in other words than the settings, before they are read, and
    # after they are written.
    read_config: ConfigChange = _unchanged
    write_config: ConfigChange = _unchanged
    # model_type of multimodal models whose text part is such a model; only read
    wrappers: tuple[str, ...] = ()
    other_model_types: tuple[str, ...] = ()  # of the same model outside transformers; only read

    @functools.cached_property
    def parts(self) -> dict[str, Any]:
        """Keys without a setting, with their values."""
        return self._choices_without(self.settings)

    def parts_of(self, kind: str | None) -> dict[str, Any]:
        """Returns keys without a setting for layers of a kind, with their values.

        Args:
          kind: Its name; None for all kinds.
        """
        if kind is None:
            return self.parts
        return self._choices_without(
            setting for setting in self.settings if not setting.kinds or kind in setting.kinds
        )

    def _choices_without(self, settings: Iterable[ConfigMapping]) -> dict[str, Any]:
        """Returns choices of the family, without keys that settings or the layers determine."""
        determined = {name for setting in settings for name in setting.keys}
        if self.layers is not None:
            determined |= self.layers.keys
        return {name: value for name, value in self.all_choices.items() if name not in determined}

    @functools.cached_property
    def all_choices(self) -> dict[str, Any]:
        """Choices of the decoder_block and of the family, with defaults."""
        return {**_choices(self.decoder_block), **self.choices}

    def constant_tensors(self, num_layers: int) -> dict[str, float]:
        """Returns `constants` by the names of tensors in a model."""
        return {
            numbered(name, num_layers, layer): value
            for name, value in self.constants.items()
            for layer in range(num_layers)
        }

    @property
    def in_layer(self) -> str:
        """Prefix of a layer's tensors, such as "model.layers.{layer}."."""
        name = next(row.hf_name for row in self.rows if row.in_layers)
        return name[: name.index("}") + 2]

    @property
    def has_model_type(self) -> bool:
        """Whether config.json identifies the family by model_type."""
        return self.in_transformers or bool(self.auto_map)


# Sections that make up a model besides its sizes, and those of their keys that only change how the
# same function is computed or that no layer of a family reads.
_SECTIONS = (
    "embedding",
    "block",
    "position",
    "attention",
    "recurrent",
    "feed_forward",
    "pattention",
    "dense_connections",
    "head",
    "mixture_of_experts",
)
_WITHOUT_EFFECT = (
    "attention",
    "attention_block_size",
    "context_parallel_load_balance",
    "context_parallel_strategy",
    "dense_saved_aggregates",
    "dense_aggregation_impl",
    "logits_dot_in_fp32",
    "gpt_neo_none_attention_bug",
    "linear_attention.chunk",
    "linear_attention.epsilon",
    "linear_chunk_size",
    "mamba_chunk_size",
    "time_step_min",
    "time_step_max",
    "qkv_slot_num",
    "sliding_window_size",
    "capacity_factor",
    "moe_group_size",
    "moe_second.policy",
    "moe_second.threshold",
    "load_balance_choices",
    "router_z_loss_weight",
    "routed_bias_update_rate",
)


@functools.cache
def _choices(decoder_block: str) -> dict[str, Any]:
    """Returns keys chosen by a decoder_block, with defaults."""
    text = (DECODER_BLOCKS / f"{decoder_block}.yml").read_text(encoding="utf-8")
    values = flatten(unflatten(yaml.safe_load(text)))
    chosen = {
        name: values[name]
        for name, key in all_keys().items()
        if not set(_SECTIONS).isdisjoint(key.section) and name not in _WITHOUT_EFFECT
    }
    # No family scales the logits of a tied head, and where there are experts a setting says so.
    return chosen | {"normalize_embedding_logits": False, "num_experts": 1}


BOOLEANS = ((True, True), (False, False))


def whole_number(value: HFValue, *, at_least: int) -> TypedValue:
    """Returns a value of config.json that is an integer of at least a bound, else REQUIRED."""
    return value if type(value) is int and value >= at_least else REQUIRED


def positive_number(value: HFValue) -> TypedValue:
    """Returns a value of config.json that is a number above 0 as a float, else REQUIRED."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and value > 0 else REQUIRED


def read_positive_number(value: HFValue, config: HFConfig) -> TypedValue:
    """Returns a number above 0, for settings that `values` cannot express."""
    return positive_number(value)


def soft_cap(name: str, key: str, default: float | None) -> ConfigMapping:
    """Returns the setting of a soft cap, which null turns off; 0 does here."""

    def read(value: HFValue, config: HFConfig) -> TypedValue:
        return 0.0 if value is None else positive_number(value)

    return ConfigMapping(
        (name,), (key,), default, null=None, read=read, write=lambda values: values[key] or None
    )


PARALLEL = ((True, "parallel"), (False, "sequential"))
