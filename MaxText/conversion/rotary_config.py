"""Descriptions of rotary positions in config.json, old and new.

transformers 5 writes `rope_parameters`, an object with the base (`rope_theta`), the fraction
(`partial_rotary_factor`), the type and the scaling; where layers differ, one object for each kind
of layer. Older versions write the base and the fraction as keys of their own and the scaling as
`rope_scaling`. `flattened` returns both in the newer form, with the defaults of transformers 5.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from MaxText.errors import UserError
from MaxText.value_types import JsonValue

OBJECT = "rope_parameters"
LENGTH = "max_position_embeddings"
_OLD_OBJECT = "rope_scaling"
_THETA = "rope_theta"
_FRACTION = "partial_rotary_factor"
_ORIGINAL_LENGTH = "original_max_position_embeddings"
_EXTENDED_TYPES = ("llama3", "yarn", "longrope")  # which have an original length


@dataclasses.dataclass(frozen=True)
class RotaryDefaults:
    """What a config.json means that is silent about rotary positions."""

    theta: float = 10_000.0
    fraction: float | None = None
    # the object of a config.json without any
    parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    theta_names: tuple[str, ...] = (_THETA,)  # keys of the base in older files
    fraction_names: tuple[str, ...] = (_FRACTION,)
    # The base of each kind of layer, in families whose rope_parameters have an object for each.
    thetas_by_kind: Mapping[str, float] = dataclasses.field(default_factory=dict)
    theta_names_by_kind: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # The kind that `rope_scaling` of older files is for; its other kinds are not scaled.
    scaled_kind: str = "full_attention"
    parameters_by_kind: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    type_names: Mapping[str, str] = dataclasses.field(default_factory=dict)  # other names of types
    # original_max_position_embeddings, in classes where it is a key of its own
    original_length: int | None = None
    has_alpha: bool = False  # whether `dynamic` with a fixed `alpha` is another base (Hunyuan)

    @property
    def older_names(self) -> set[str]:
        """Keys of older files, which the object takes the place of."""
        names = {*self.theta_names, *self.fraction_names, *self.theta_names_by_kind.values()}
        return {_OLD_OBJECT, _ORIGINAL_LENGTH, *names}


def flattened(
    config: Mapping[str, JsonValue], defaults: RotaryDefaults, source: str
) -> dict[str, Any]:
    """Returns rotary parameters as keys such as "rope_parameters.rope_theta".

    With kinds of layers they are "rope_parameters.full_attention.rope_theta" and so on. Nulls are
    left out, but for `factor`: a null is the ratio of both lengths.

    Args:
      config: Of config.json, with the length.
      defaults: Of the family.
      source: Where config.json is from, for messages.

    Raises:
      UserError: For what is not an object, and for kinds where the family has none.
    """
    for name in (_OLD_OBJECT, OBJECT):
        if not isinstance(config.get(name) or {}, Mapping):
            raise UserError(f"{source}: config.json: {name}={config[name]} is not a JSON object.")
    by_kind = (
        _parameters_by_kind(config, defaults, source)
        if defaults.thetas_by_kind
        else {"": _parameters(config, defaults)}
    )
    flat = {}
    for kind, parameters in by_kind.items():
        prefix = f"{OBJECT}.{kind}." if kind else f"{OBJECT}."
        for name, value in _standardized(parameters, config, defaults).items():
            if isinstance(value, Mapping):
                raise UserError(
                    f"{source}: config.json has rotary parameters that differ by layer ({name}), "
                    "which is not supported."
                )
            flat[prefix + name] = value
    return flat


def _parameters(config: Mapping[str, JsonValue], defaults: RotaryDefaults) -> dict[str, Any]:
    """Returns the object of all layers, with the older keys for what it does not say."""
    # With both, transformers uses the older name alone (PreTrainedConfig.__post_init__).
    parameters = dict(config.get(_OLD_OBJECT) or config.get(OBJECT) or defaults.parameters)
    theta = _first(config, defaults.theta_names, defaults.theta)
    parameters.setdefault(_THETA, theta)
    fraction = _first(config, defaults.fraction_names, defaults.fraction)
    if fraction is not None:
        parameters.setdefault(_FRACTION, fraction)
    return parameters


def _parameters_by_kind(
    config: Mapping[str, JsonValue], defaults: RotaryDefaults, source: str
) -> dict[str, dict[str, Any]]:
    """Returns the object of each kind of layer."""
    objects_by_kind = config.get(OBJECT) or {}
    unknown = sorted(objects_by_kind.keys() - defaults.thetas_by_kind.keys())
    if unknown:
        raise UserError(
            f"{source}: config.json: {OBJECT} has an object for each of "
            f"{' and '.join(defaults.thetas_by_kind)}, and {', '.join(unknown)} is none of them."
        )
    result = {}
    for kind, theta in defaults.thetas_by_kind.items():
        silent = {} if objects_by_kind else defaults.parameters_by_kind.get(kind, {})
        parameters = dict(objects_by_kind.get(kind) or silent)
        if kind == defaults.scaled_kind:
            parameters |= config.get(_OLD_OBJECT) or {}
        name = defaults.theta_names_by_kind.get(kind)
        parameters.setdefault(_THETA, _first(config, (name,) if name else (), theta))
        result[kind] = parameters
    return result


def _standardized(
    parameters: dict[str, Any], config: Mapping[str, JsonValue], defaults: RotaryDefaults
) -> dict[str, Any]:
    """Returns an object with the type and the original length that it means."""
    rope_type = parameters.get("rope_type") or parameters.get("type") or "default"
    rope_type = defaults.type_names.get(rope_type, rope_type)
    length = config.get(LENGTH)
    if rope_type in _EXTENDED_TYPES:
        # A key of its own counts before one in the object, except where layers differ.
        original = None
        if not defaults.thetas_by_kind:
            original = config.get(_ORIGINAL_LENGTH) or defaults.original_length
        original = original or parameters.get(_ORIGINAL_LENGTH) or length
        parameters = parameters | {_ORIGINAL_LENGTH: original}
        is_ratio = rope_type == "longrope" or "factor" in parameters
        if is_ratio and parameters.get("factor") is None and original and length:
            ratio = length / original
            # A smaller one scales nothing in longrope.
            parameters["factor"] = max(ratio, 1.0) if rope_type == "longrope" else ratio
    if defaults.has_alpha and rope_type == "dynamic" and parameters.get("alpha"):
        rope_type = "default"
        parameters = _with_stretched_base(parameters, config)
    parameters.pop("type", None)
    values = {name: value for name, value in parameters.items() if value is not None}
    return {**values, "rope_type": rope_type}


def _with_stretched_base(
    parameters: Mapping[str, Any], config: Mapping[str, JsonValue]
) -> dict[str, Any]:
    """Returns parameters with the base that a fixed `alpha` means: NTK-aware scaling."""
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    theta = parameters[_THETA] * parameters["alpha"] ** (head_dim / (head_dim - 2))
    return {_THETA: theta}


def _first(
    config: Mapping[str, JsonValue], names: tuple[str, ...], default: JsonValue
) -> JsonValue:
    """Returns the value of the first of several keys that a config.json has."""
    return next((config[name] for name in names if config.get(name) is not None), default)
