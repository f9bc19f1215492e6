"""Conversion between config.json and keys, by the tables of `families/`."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, get_args

from MaxText.config import values as typed_values
from MaxText.config.keys import Count
from MaxText.config.layer_sections import SlotPlace
from MaxText.config.maxtext_keys import ALIASES
from MaxText.config.model_sections import LayerConfig
from MaxText.config.registry import KINDS, Registration, registration
from MaxText.config.schema import Config, Key, all_keys, dotted, flatten
from MaxText.config.values import TypedValue
from MaxText.conversion import layer_table, rotary_config
from MaxText.conversion.families import FAMILIES
from MaxText.conversion.family import (
    OMITTED,
    REQUESTED_LENGTH,
    REQUIRED,
    ConfigMapping,
    Family,
    HFConfig,
    HFValue,
    KeyValues,
    evaluate,
)
from MaxText.conversion.layer_table import Layers, LayerTable, LayerTableError
from MaxText.errors import UserError

_TEXT_CONFIG = "text_config"
_NUM_LAYERS = "num_hidden_layers"
_MAXTEXT_OBJECT = "maxtext"  # config.json object for keys of registered parts, which no family has
_SIZES = {  # sizes after global_parameter_scale, which config.json cannot express
    "base_emb_dim": "emb_dim",
    "base_num_query_heads": "num_query_heads",
    "base_num_kv_heads": "num_kv_heads",
    "base_mlp_dim": "mlp_dim",
    "base_num_decoder_layers": "num_layers",
    "head_dim": "head_dim",
}


def text_model(config: HFConfig) -> Mapping[str, Any]:
    """Returns the config.json of the text model in that of a multimodal one; others as they are."""
    family = _wrapped_family(config)
    if family is None:
        return config
    outer_names = ("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype")
    return {
        **{name: config[name] for name in outer_names if config.get(name) is not None},
        **(config.get(_TEXT_CONFIG) or {}),
        "model_type": family.model_type,
        "architectures": [family.architecture],
        # The head is the multimodal model's.
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", True)),
    }


def _wrapped_family(config: HFConfig) -> Family | None:
    """Returns the family of the text model in a multimodal model; None for other models."""
    wrapper = config.get("model_type")
    families = [family for family in FAMILIES.values() if wrapper in family.wrappers]
    text_config = config.get(_TEXT_CONFIG) or {}
    text_type = text_config.get("model_type") if isinstance(text_config, Mapping) else None
    # Without a type of its own the text model is the first, as in transformers.
    wrapped = [family for family in families if text_type in (None, family.model_type)]
    return next(iter(wrapped), None)


def lookup_family(config: HFConfig) -> Family | None:
    """Returns the family named in a config.json; None if unknown."""
    config = text_model(config)
    model_type = config.get("model_type")
    architectures = config.get("architectures")
    if isinstance(model_type, str) and model_type in FAMILIES:
        return FAMILIES[model_type]
    for family in FAMILIES.values():
        if model_type in family.other_model_types:
            return family
    # Classes outside transformers may have any model_type, or none.
    own_classes = (family for family in FAMILIES.values() if not family.in_transformers)
    return next((family for family in own_classes if architectures == [family.architecture]), None)


def resolve_family(config: HFConfig, source: str) -> Family:
    """Returns the family named in a config.json.

    Args:
      source: Where config.json is from, for messages.

    Raises:
      UserError: If it is unknown.
    """
    if family := lookup_family(config):
        return family
    own_architectures = " or ".join(
        f'["{family.architecture}"]' for family in FAMILIES.values() if not family.in_transformers
    )
    raise UserError(
        f"{source}: config.json has model_type={config.get('model_type')}. Known here: "
        f'{", ".join(FAMILIES)}. Only with "architectures": {own_architectures} it needs none.'
    )


def config_from_hf(
    family: Family, config: HFConfig, source: str, user_keys: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns our keys for the model of a config.json.

    Args:
      source: Where config.json is from, for messages.
      user_keys: Keys set by the user; they may shorten the length below a window.

    Raises:
      UserError: With all values that cannot be imported.
    """
    config = text_model(config)
    stored = config
    config = family.read_config(_flattened(config, family, source))
    requested_length = str(user_keys.get("max_target_length", ""))
    if requested_length.isdecimal():
        config[REQUESTED_LENGTH] = int(requested_length)
    problems: list[str] = []
    keys = {
        "decoder_block": family.decoder_block,
        **family.parts,
        **_registered_part_keys(config, source),
    }
    kinds = _kinds_of_layers(family, config, problems)
    keys_by_kind = {name: dict(kinds_keys) for name, kinds_keys in kinds.keys_by_name.items()}
    for setting in family.settings:
        targets = [keys]
        if setting.kinds:
            targets = [keys_by_kind[name] for name in setting.kinds if name in keys_by_kind]
        if any(_is_relevant(setting, keys | target) for target in targets):
            problem, is_computed = _read_setting(setting, config, targets)
            # Omits defaults computed from a value already reported as wrong.
            if problem and not (problems and is_computed):
                problems.append(_in_names_of(stored, setting.name, problem))
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise UserError(f"{source}: config.json ({family.model_type}) cannot be imported:\n{lines}")
    if family.layers is not None and kinds.names:
        keys |= layer_table.keys_of_layers(
            kinds.names, keys_by_kind, family.layers, family.all_choices
        )
    keys |= user_keys
    return drop_unused_keys(keys, keys)


class _Kinds(NamedTuple):
    """The kind of each layer of a config.json, and the keys of each kind that a layer has."""

    names: Sequence[str]
    keys_by_name: Mapping[str, Mapping[str, Any]]


def _kinds_of_layers(family: Family, config: dict[str, Any], problems: list[str]) -> _Kinds:
    """Returns the kinds of layers; appends to the problems if they cannot be read."""
    if family.layers is None:
        return _Kinds((), {})
    setting = next(setting for setting in family.settings if setting.name == _NUM_LAYERS)
    count, _ = _value_of(setting, config)
    try:
        all_keys()["base_num_decoder_layers"].convert(count)
    except typed_values.InvalidValueError:
        return _Kinds((), {})  # it is reported with the other settings
    try:
        names = family.layers.read(Layers(config, count))
    except LayerTableError as error:
        problems.append(str(error))
        return _Kinds((), {})
    keys = {kind.name: kind.keys for kind in family.layers.kinds if kind.name in names}
    return _Kinds(names, keys)


def _read_setting(
    setting: ConfigMapping, config: dict[str, Any], targets: Sequence[dict[str, Any]]
) -> tuple[str, bool]:
    """Reads a setting from a config.json into keys.

    Args:
      setting: The setting.
      config: Of config.json; gets the default of an absent key, which others may depend on.
      targets: The keys to add to: those of the model, or of kinds of layers.

    Returns:
      Why the value cannot be imported, empty if it can; and whether it is a computed default.
    """
    value, is_default = _value_of(setting, config)
    converted = REQUIRED if value is REQUIRED else setting.to_key_value(value, config)
    problem = _problem(setting, value, converted, config)
    if converted is not REQUIRED:
        config.setdefault(setting.name, value)
        if evaluate(setting.implied, config) != value:
            for target in targets:
                target |= dict.fromkeys(setting.keys, converted)
    return problem, callable(setting.default) and is_default


def _value_of(setting: ConfigMapping, config: HFConfig) -> tuple[Any, bool]:
    """Returns the value of a setting in a config.json, and whether that is its default."""
    hf_values = [config[name] for name in setting.hf_names if name in config]
    hf_values = [value for value in hf_values if value != setting.unset]
    if not hf_values:
        return evaluate(setting.default, config), True
    if hf_values[-1] is None and setting.null is not REQUIRED:
        return evaluate(setting.null, config), False
    return hf_values[-1], False


def _in_names_of(config: HFConfig, name: str, problem: str) -> str:
    """Returns a problem with a rotary parameter, by the name that it has in an older config.json.

    Args:
      config: As it was stored.
      name: Of the setting.
      problem: Begins with that name.
    """
    rotary_object, _, parameter = name.rpartition(".")
    if rotary_object != rotary_config.OBJECT or config.get(rotary_config.OBJECT):
        return problem
    shown = parameter if parameter in config else f"rope_scaling.{parameter}"
    return problem.replace(name, shown)


def _registered_part_keys(config: HFConfig, source: str) -> Mapping[str, Any]:
    """Returns keys of the model and of parts stored in a config.json.

    Refuses others: `import_modules`, for example, would run code that the user did not name.
    """
    part_keys = config.get(_MAXTEXT_OBJECT, {})
    if not isinstance(part_keys, Mapping):
        raise UserError(
            f"{source}: config.json: {_MAXTEXT_OBJECT}={part_keys} is not a JSON object."
        )
    part_keys = dotted(part_keys)
    for name in part_keys:
        if name in ALIASES or (name in all_keys() and all_keys()[name].section[0] != "model"):
            raise UserError(
                f"{source}: config.json: {_MAXTEXT_OBJECT}.{name} is not a key of a registered "
                "part."
            )
    return part_keys


def _problem(
    setting: ConfigMapping, value: HFValue, converted: TypedValue, config: HFConfig
) -> str:
    """Returns why a value of a config.json cannot be imported; empty if it can.

    Args:
      value: The value in config.json, or its default.
      converted: The value of our keys; REQUIRED if there is none.
    """
    name = setting.name
    if value is REQUIRED:
        return f"{name} is missing"
    if converted is REQUIRED:
        supported_values = [
            "null" if hf_value is None else str(hf_value) for hf_value, _ in setting.values or ()
        ]
        only = " cannot be"
        if supported_values:
            only = f": only {' or '.join(supported_values)} can be"
        shown = "null" if value is None else value
        return f"{name}={shown}{only} imported. {setting.hint}".rstrip()
    is_converted = setting.values is not None or setting.read is not None
    for key in () if is_converted else [all_keys()[key_name] for key_name in setting.keys]:
        try:
            if key.annotation is int:  # -1 means "computed" for some of our keys only
                typed_values.convert(value, Count)
            key.convert(value)
        except typed_values.InvalidValueError as error:
            return f"{name}: {error}"
    computed_value = evaluate(setting.default, config) if setting.is_computed else REQUIRED
    if computed_value not in (value, REQUIRED):
        return f"{name}={value} contradicts the other keys, which give {computed_value}"
    return ""


def _flattened(config: HFConfig, family: Family, source: str) -> dict[str, Any]:
    """Returns a config.json without nulls, with rotary parameters as keys.

    Nulls that do not mean an absent key stay (`ConfigMapping.null`).
    """
    settings = family.settings
    with_null = {
        name for setting in settings if setting.null is not REQUIRED for name in setting.hf_names
    }
    plain = {
        name: value for name, value in config.items() if value is not None or name in with_null
    }
    if family.rotary is not None:
        length = next(setting for setting in settings if setting.name == rotary_config.LENGTH)
        with_length = {rotary_config.LENGTH: length.default, **config}
        plain |= rotary_config.flattened(with_length, family.rotary, source)
    return plain


def _is_relevant(setting: ConfigMapping, values: KeyValues) -> bool:
    """Returns whether any key of a setting has an effect in a configuration."""
    schema = all_keys()
    return not setting.keys or any(_has_effect(schema[name], values) for name in setting.keys)


def drop_unused_keys(values: KeyValues, names: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `names` without keys that other keys disable: a configuration refuses those.

    Args:
      values: All known keys of the configuration; absent ones have their default.
      names: The keys to look at, with their values.
    """
    schema = all_keys()
    return {
        name: value
        for name, value in names.items()
        # a configuration refuses unknown ones
        if name not in schema or _has_effect(schema[name], values)
    }


def model_keys(values: KeyValues, chosen: Collection[str] | None = None) -> dict[str, Any]:
    """Returns the keys of the section `model` that have an effect.

    Args:
      values: All keys of a configuration.
      chosen: Names to return; None for all.
    """
    model_key_names = [key.name for key in all_keys().values() if key.section[0] == "model"]
    names = [name for name in model_key_names if chosen is None or name in chosen]
    return drop_unused_keys(values, {name: values[name] for name in names})


def _has_effect(key: Key, values: KeyValues) -> bool:
    """Returns whether all conditions of a key hold in a configuration."""
    schema = all_keys()

    def holds(condition: Mapping[str, Collection[Any]]) -> bool:
        return any(
            values.get(name, schema[name].default) in effective_values
            for name, effective_values in condition.items()
        )

    return all(holds(condition) for condition in key.conditions)


def find_family(config: Config, requested: str, imported_as: Family | None = None) -> Family:
    """Returns the family to export a model as.

    Args:
      requested: The `model_type` that the user asks for; empty for the first that fits.
      imported_as: The family that the model was imported as, preferred if it fits.

    Raises:
      UserError: If no family fits, with the differences from the nearest one.
    """
    if requested and requested not in FAMILIES:
        raise UserError(f"family={requested} has no table. Known here: {', '.join(FAMILIES)}.")
    by_preference = sorted(FAMILIES.values(), key=lambda family: family is not imported_as)
    candidates = [FAMILIES[requested]] if requested else by_preference
    model = _model_values(config)
    mismatches: dict[str, list[str]] = {}
    for family in candidates:
        mismatches[family.model_type] = _mismatches(family, model)
        if not mismatches[family.model_type]:
            return family
    block = config.model.shape.decoder_block
    nearest = min(
        mismatches,
        key=lambda name: (len(mismatches[name]), FAMILIES[name].decoder_block != block),
    )
    lines = mismatches[nearest]
    first_line = f"no family matches this model. The nearest is {nearest}, but for:"
    if requested:
        first_line = f"family={requested} differs from this model:"
        if any(line.startswith("zoom_dims.") for line in lines):
            lines.append("No weights make up for its zoom: export the model before it grew.")
    raise UserError("\n  ".join([first_line, *lines]))


def _chosen_parts(config: Config) -> list[Registration]:
    """Returns the mixers and feed-forward parts of the layers."""
    layer_configs = [layer.config for layer in config.model.layers]
    chosen = {("mixer", layer_config.block.mixer) for layer_config in layer_configs}
    chosen |= {
        ("feed_forward", layer_config.feed_forward.feed_forward_type)
        for layer_config in layer_configs
    }
    return [registration(kind, name) for kind, name in sorted(chosen)]


def _names_tensors(part: Registration) -> bool:
    return not part.is_built_in or bool(part.load().hugging_face_names)


def part_keys(family: Family, config: Config) -> dict[str, Any]:
    """Returns keys for parts with own tensor names: choices and part keys.

    Empty if other layers use parts that the family does not have.
    """
    parts = _chosen_parts(config)
    block = config.model.block
    naming_parts = [part for part in parts if _names_tensors(part)]
    other_parts = [part for part in parts if part not in naming_parts]
    if any(part.name != family.parts.get(KINDS[part.kind], part.name) for part in other_parts):
        return {}
    names = {KINDS[part.kind] for part in naming_parts}
    names.update(*(part.keys().values_by_key() for part in naming_parts if part.keys))
    of_letters = {name for _, keys in block.layer_kinds for name, _ in keys}
    if names and names >= of_letters:
        names |= {"layer_pattern", "layer_kinds"} if block.layer_pattern else set()
    return {name: value for name, value in flatten(config).items() if name in names}


def absent_in_transformers(family: Family, config: Config) -> str:
    """Returns the parts or the class that transformers does not have; empty if it has all."""
    naming_parts = [part.name for part in _chosen_parts(config) if _names_tensors(part)]
    if naming_parts:
        return " and ".join(naming_parts)
    return "" if family.in_transformers else family.architecture


class _ModelValues(NamedTuple):
    """A model's keys in normalized form, computed once for all families.

    Attributes:
      config: The configuration.
      values: Keys of the model as a whole.
      layers: Its layers.
      values_by_layer: Keys of each layer that differs from others.
    """

    config: Config
    values: dict[str, Any]
    layers: tuple[LayerConfig, ...]
    values_by_layer: dict[LayerConfig, dict[str, Any]]


def _model_values(config: Config) -> _ModelValues:
    layers = config.model.layers
    return _ModelValues(
        config=config,
        values=model_config_values(config),
        layers=layers,
        values_by_layer={
            layer: model_config_values(config, layer) for layer in dict.fromkeys(layers)
        },
    )


def _mismatches(family: Family, model: _ModelValues) -> list[str]:
    """Describes keys of a model with values that the family does not have."""
    views = _views(family, model)
    written = _written(family, views)
    own_keys = part_keys(family, model.config)
    differences = [line for view in views for line in _part_differences(family, view, own_keys)]
    differences += [line for view in views for line in _setting_differences(family, view, written)]
    if family.layers is not None and all(view.kind is not None for view in views):
        try:
            family.layers.write(_kind_names(family.layers, model))
        except LayerTableError as error:
            differences.append(str(error))
    return list(dict.fromkeys(differences))


class _View(NamedTuple):
    """Layers of one kind, as a family sees them.

    Attributes:
      kind: The name of the kind; empty in families without kinds, None for layers of no kind.
      values: All keys with the values that these layers have.
    """

    kind: str | None
    values: dict[str, Any]


def _views(family: Family, model: _ModelValues) -> list[_View]:
    """Returns the layers of a model: one view for all layers with the same keys."""
    if family.layers is None:
        return [_View("", model.values)]
    kinds = [(family.layers.kind_of(values), values) for values in model.values_by_layer.values()]
    return [_View(kind and kind.name, values) for kind, values in kinds]


def _kind_names(table: LayerTable, model: _ModelValues) -> list[str]:
    """Returns the kind of each layer of a model that fits the family."""
    kinds = {layer: table.kind_of(values) for layer, values in model.values_by_layer.items()}
    return [kind.name for layer in model.layers if (kind := kinds[layer])]


def _part_differences(family: Family, view: _View, own_keys: Mapping[str, Any]) -> list[str]:
    """Describes parts of layers that the family does not have.

    Args:
      own_keys: Keys of parts that name their own tensors.
    """
    values = view.values
    parts = family.parts_of(view.kind)
    read_there = drop_unused_keys(values | parts, parts)
    differences = [
        f"{name}={_shown(values[name])}, not {_shown(family_value)}"
        for name, family_value in drop_unused_keys(values, read_there).items()
        if values[name] != family_value and name not in own_keys
    ]
    if view.kind is None and family.layers is not None:
        keys = sorted({name for kind in family.layers.kinds for name in kind.keys})
        differences += [f"{name}={_shown(values[name])}" for name in keys if name not in own_keys]
    return differences


def _setting_differences(family: Family, view: _View, written: Mapping[str, Any]) -> list[str]:
    """Describes values of layers that config.json cannot have."""
    values = view.values
    differences = []
    for setting in family.settings:
        if not setting.keys or not _is_of_view(setting, view):
            continue
        name = setting.keys[0]
        value = values[setting.keys[0]]
        computed_value = evaluate(setting.default, written) if setting.is_computed else REQUIRED
        if any(values[key] != value for key in setting.keys):
            differences.append(" and ".join(f"{key}={values[key]}" for key in setting.keys))
        # REQUIRED if a size it depends on does not fit, which is already reported.
        elif computed_value not in (value, REQUIRED):
            differences.append(f"{name}={value}, not {computed_value}")
        elif setting.is_written and setting.to_hf_value(values) is REQUIRED:
            differences.append(f"{name}={_shown(value)}")
        elif setting.is_written and setting.to_hf_value(values) != written[setting.name]:
            differences.append(f"{name}={_shown(value)} in some layers")
    return differences


def _is_of_view(setting: ConfigMapping, view: _View) -> bool:
    """Returns whether a setting says something about layers."""
    is_of_kind = not setting.kinds or view.kind in setting.kinds
    return is_of_kind and _is_relevant(setting, view.values)


def _written(family: Family, views: Sequence[_View]) -> dict[str, Any]:
    """Returns config.json values by setting, REQUIRED where it has no value.

    Of layers that differ, the first of a kind says what is written.
    """
    result = {}
    for setting in family.settings:
        for view in views:
            if setting.is_written and _is_of_view(setting, view):
                result.setdefault(setting.name, setting.to_hf_value(view.values))
    return result


def _shown(value: HFValue) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)


def model_config_values(config: Config, layer: LayerConfig | None = None) -> dict[str, Any]:
    """Returns the model keys in normalized form, with sizes after scaling.

    Args:
      config: The configuration.
      layer: One of its layers, whose values of keys by layer count; None for those of the model.
    """
    if layer is not None:
        config = config.model_copy(update={"model": layer.config})
    values = flatten(config)
    model = config.model
    dimensions = model.shape.dimensions if layer is None else layer.dimensions
    pattention = model.pattention
    values |= {key: getattr(dimensions, size) for key, size in _SIZES.items()}
    # A position table determines the length; a rotary model has no table.
    if values["trainable_position_size"] == -1:
        values["trainable_position_size"] = values["max_target_length"]
    if values["position_embedding"] == "learned":
        values["max_target_length"] = values["trainable_position_size"]
    # Slot numbers without -1, and zooms if different, else -1.
    values["zoom_dim"] = 0.0
    for slots_place in get_args(SlotPlace):
        num_slots = pattention.num_slots(slots_place, dimensions.emb_dim)
        zoom = pattention.zoom(slots_place, dimensions.emb_dim)
        values[f"{slots_place}_slot_num"] = num_slots
        values[f"zoom_dims.{slots_place}"] = -1.0 if zoom == num_slots else zoom
    # slot_num is the query/key/value count, which other places default to.
    values |= {"slot_num": values["qkv_slot_num"], "qkv_slot_num": -1}
    experts = model.mixture_of_experts
    mlp_activations = model.feed_forward.mlp_activations
    has_experts = all(layer.config.mixture_of_experts.num_experts > 1 for layer in model.layers)
    if model.feed_forward.feed_forward_type == "none":
        values["num_experts"] = 1
    if "mamba2" in model.all_mixers:
        values["mamba_n_heads"] = model.recurrent.mamba2.num_heads(dimensions.emb_dim)
    values["norm_topk_prob"] = experts.normalizes_gates
    equivalent = (  # key, default, whether its value means the same
        # dense_conn distinguishes the two.
        ("connection_type", "auto", model.block.connection_type in ("residual", "dense")),
        ("attention_types", (), set(model.mixers) <= {"attention"}),
        ("attention_scale", None, model.attention.attention_scale == dimensions.head_dim**-0.5),
        ("moe_layers", None, has_experts),
        ("moe_mlp_dim", -1, experts.moe_mlp_dim == dimensions.mlp_dim),
        ("moe_activations", None, experts.moe_activations == mlp_activations),
        (
            "shared_expert_mlp_dim",
            -1,
            experts.shared_expert_mlp_dim == experts.width(dimensions.mlp_dim),
        ),
        ("n_routing_groups", -1, experts.n_routing_groups == 1),
    )
    return values | {name: default for name, default, is_default in equivalent if is_default}


def to_config_json(family: Family, config: Config) -> dict[str, Any]:
    """Returns the config.json of a model that fits the family (`find_family`)."""
    model = _model_values(config)
    views = _views(family, model)
    result: dict[str, Any] = {"architectures": [family.architecture]}
    if family.has_model_type:
        result["model_type"] = family.model_type
    if family.auto_map:
        result["auto_map"] = dict(family.auto_map)
    if family.layers is not None:
        result |= family.layers.write(_kind_names(family.layers, model))
    for setting, value in _written(family, views).items():
        if value is OMITTED:
            continue
        *objects, name = setting.split(".")
        target_object = result
        for object_name in objects:
            target_object = target_object.setdefault(object_name, {})
        target_object[name] = value
    result = family.write_config(result)
    own_keys = part_keys(family, config)
    if own_keys:
        result[_MAXTEXT_OBJECT] = own_keys
    return result


def table_names(family: Family) -> set[str]:
    """Returns config.json keys determined by the model, with older names."""
    of_model = [setting for setting in family.settings if setting.keys or setting.write]
    names = {name.partition(".")[0] for setting in of_model for name in setting.hf_names}
    if family.layers is not None:
        names |= family.layers.write(()).keys()
    if family.rotary is not None:
        names |= {rotary_config.OBJECT, *family.rotary.older_names}
    return names | {
        _MAXTEXT_OBJECT,
        "architectures",
        *(("model_type",) if family.has_model_type else ()),
    }
