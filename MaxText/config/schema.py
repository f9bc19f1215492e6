"""The whole configuration, a tree of sections, and the table of its keys.

Two views of the same values: `Config` is the tree that code reads, `config.schedule.learning_rate`;
a flat dictionary by key is what users type, and what files and checkpoints hold. `flatten` and
`unflatten` convert between them. `all_keys` describes each key: type, default, bounds, help, and
the conditions under which it has an effect.

Keys of named sections have a dot, `adafactor.momentum`. Users may nest them instead, as YAML
allows; `dotted` brings nested settings into the flat form.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from MaxText.config import data_sections, model_sections, training_sections, values
from MaxText.config.base_shape import BaseShape
from MaxText.config.keys import (
    Conditions,
    NamedSection,
    OtherThan,
    Section,
    condition_values,
    field_docstrings,
)
from MaxText.config.layer_plan import LayerKinds
from MaxText.config.maxtext_keys import other_meaning
from MaxText.config.part_sections import Parts
from MaxText.config.registry import (
    Name,
    Registration,
    RegistrationError,
    on_change,
    registrations,
    remove,
)

SCHEMA_VERSION = 1


class Config(Section):
    """A resolved configuration. Each key is owned by exactly one section."""

    run: training_sections.RunConfig = training_sections.RunConfig()
    model: model_sections.ModelConfig = model_sections.ModelConfig()
    batch: training_sections.BatchConfig = training_sections.BatchConfig()
    data: data_sections.DataConfig = data_sections.DataConfig()
    masking: data_sections.MaskingConfig = data_sections.MaskingConfig()
    preparation: data_sections.PreparationConfig = data_sections.PreparationConfig()
    optimizer: training_sections.OptimizerConfig = training_sections.OptimizerConfig()
    schedule: training_sections.ScheduleConfig = training_sections.ScheduleConfig()
    mesh: training_sections.MeshConfig = training_sections.MeshConfig()
    checkpoint: training_sections.CheckpointingConfig = training_sections.CheckpointingConfig()
    evaluation: training_sections.EvaluationConfig = training_sections.EvaluationConfig()
    scoring: training_sections.ScoringConfig = training_sections.ScoringConfig()
    decoding: training_sections.DecodingConfig = training_sections.DecodingConfig()
    monitoring: training_sections.MonitoringConfig = training_sections.MonitoringConfig()
    guard: training_sections.GuardConfig = training_sections.GuardConfig()

    @property
    def counts_correct(self) -> bool:
        """Whether evaluation counts targets that are the argmax: masked tokens, probes."""
        return self.masking.mlm_training or self.data.dataset_type == "probe"


@dataclasses.dataclass(frozen=True)
class Key:
    """What is declared about one key.

    Attributes:
      name: What users type, for example "steps", or "adafactor.momentum" in a named section.
      section: Path of the section that owns it, for example ("model", "attention").
      title: First line of the section's docstring.
      annotation: Python type of the value. Of a key that names parts, a Literal of those that are
        registered now.
      default: Value unless a layer of settings sets it.
      owner: Class that declares it.
      short_help: Its help, or empty if that is the string literal below the field.
      unit: For example "steps", or empty.
      constraints: pydantic's constraints and validators of the value, such as Ge(ge=1).
      conditions: Groups of other keys with the values under which this one has an effect. One key
        of each group must have one of its values.
    """

    name: str
    section: tuple[str, ...]
    title: str
    annotation: values.Annotation
    default: values.TypedValue
    owner: type[Section]
    short_help: str
    unit: str
    constraints: tuple[Any, ...]
    conditions: tuple[dict[str, Any], ...]

    @property
    def field_name(self) -> str:
        """Its name within its section."""
        return self.name.rpartition(".")[2]

    @property
    def help(self) -> str:
        """What the key does, in one line."""
        return self.short_help or field_docstrings(self.owner).get(self.field_name, "")

    @functools.cached_property
    def default_text(self) -> str:
        """The default as YAML."""
        return values.to_yaml(self.default)

    def convert(self, value: values.UntypedValue) -> values.TypedValue:
        """Returns a value in the key's type and within its bounds.

        Raises:
          values.InvalidValueError: the value does not fit.
        """
        return values.convert(value, self.annotation, self.constraints)

    @property
    def bounds(self) -> tuple[tuple[str, float], ...]:
        """Pairs of "ge", "gt", "le", "lt" or "ne" and a number."""
        return values.bounds_of(self.constraints)

    @staticmethod
    def condition_text(group: dict[str, Any]) -> str:
        """Formats a group of conditions, e.g. "opt_type=sgd or muon"."""
        conditions = []
        for other_key, values_with_effect in group.items():
            excludes = isinstance(values_with_effect, OtherThan)
            alternatives = " or ".join(values.to_yaml(value) for value in values_with_effect)
            conditions.append(f"{other_key}{' other than ' if excludes else '='}{alternatives}")
        return ", or ".join(conditions)

    @property
    def choices(self) -> tuple[Any, ...]:
        """Values of a Literal key, or of the elements of a list of Literals."""
        return _choices(self.annotation)


def _choices(annotation: values.Annotation) -> tuple[Any, ...]:
    type_arguments = get_args(annotation)
    if get_origin(annotation) is Literal:
        return type_arguments
    return tuple(choice for inner in type_arguments for choice in _choices(inner))


def _key(
    name: str,
    field: FieldInfo,
    path: tuple[str, ...],
    section: type[Section],
    section_conditions: Mapping[str, Any],
) -> Key:
    """Builds the description of a key from the field that declares it.

    Args:
      name: What users type.
      field: The field, made by keys.key().
      path: Of the section in the tree.
      section: The class with the field.
      section_conditions: Those of the section and of the sections around it.

    Raises:
      RegistrationError: the field is not made by keys.key().
    """
    facts: Any = field.json_schema_extra
    if not isinstance(facts, dict) or "unit" not in facts:
        raise RegistrationError(f"key {name!r} is not declared with key(...)")
    part_name = next((mark for mark in field.metadata if isinstance(mark, Name)), None)
    annotation: values.Annotation = (
        field.annotation if part_name is None else Literal[part_name.choices]
    )
    # The switch of a section has an effect on its own.
    inherited = {} if name in section_conditions else section_conditions
    only_if = _with_conditions(inherited, facts["only_if"])
    groups = [{other_key: allowed} for other_key, allowed in only_if.items()]
    groups.append(condition_values(facts["only_if_any"]))
    return Key(
        name=name,
        section=path,
        title=(section.__doc__ or "").strip().splitlines()[0],
        annotation=annotation,
        default=field.default,
        owner=section,
        short_help=field.description or "",
        unit=str(facts["unit"]),
        constraints=tuple(mark for mark in field.metadata if mark is not part_name),
        conditions=tuple(group for group in groups if group),
    )


def _with_conditions(inherited: Mapping[str, Any], added: Conditions | None) -> Mapping[str, Any]:
    """Returns inherited conditions and further ones; explicitly empty ones drop the inherited."""
    if added is None:
        return inherited
    return {**inherited, **condition_values(added)} if added else {}


def _walk(
    section: type[Section],
    path: tuple[str, ...] = (),
    prefix: str = "",
    conditions: Mapping[str, Any] = {},
    without: Sequence[Registration] = (),
) -> Iterator[Key]:
    """Yields the keys of a section in order, then those of the sections inside.

    Args:
      section: The class of the section.
      path: Of the section in the tree.
      prefix: What the names of keys begin with, such as "adafactor.".
      conditions: Of the sections around it.
      without: Parts whose keys are left out.
    """
    conditions = _with_conditions(conditions, section.ONLY_IF)
    if issubclass(section, Parts):
        for part in section.with_keys():
            if part.keys is not None and part not in without:
                yield from _walk(part.keys, (*path, part.section), prefix, conditions, without)
        return
    inner_sections = {
        name: field.annotation
        for name, field in section.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
    }
    for name, field in section.model_fields.items():
        if name not in inner_sections:
            yield _key(prefix + name, field, path, section, conditions)
    for name, inner in inner_sections.items():
        inner_prefix = f"{prefix}{name}." if issubclass(inner, NamedSection) else prefix
        yield from _walk(inner, (*path, name), inner_prefix, conditions, without)


@functools.cache
def all_keys() -> dict[str, Key]:
    """Returns every key by name, in the order of the schema.

    Raises:
      RegistrationError: a user's part has keys that cannot be added. The part is then no longer
        registered, so that a corrected one can take its name.
    """
    _check_users_keys()
    keys: dict[str, Key] = {}
    for key in _walk(Config):
        assert key.name not in keys, f"two sections own {key.name}"
        keys[key.name] = key
    return keys


@functools.cache
def named_sections() -> dict[str, list[Key]]:
    """Returns the keys of each named section, by its name: {"adafactor": [...]}."""
    sections: dict[str, list[Key]] = {}
    for key in all_keys().values():
        for name in _section_names(key):
            sections.setdefault(name, []).append(key)
    return sections


def _section_names(key: Key) -> list[str]:
    """Returns the names of the named sections that a key is in, the outermost first."""
    *section_names, _ = key.name.split(".")
    return list(itertools.accumulate(section_names, "{}.{}".format))


def settable_names() -> list[str]:
    """Returns all that users can set: keys, and named sections, to mappings of their keys."""
    return [*all_keys(), *named_sections()]


on_change += [all_keys.cache_clear, named_sections.cache_clear]


def _check_users_keys() -> None:
    """Checks the keys that users' parts add against all others."""
    parts = [part for part in registrations() if not part.is_built_in and part.keys is not None]
    for index, part in enumerate(parts):
        earlier_keys = _walk(Config, without=parts[index:])
        try:
            _check_keys_of(part, _meanings(earlier_keys))
        except RegistrationError:
            remove(part)
            raise


def _meanings(keys: Iterable[Key]) -> dict[str, str]:
    """Returns what each name stands for: the names of keys, and of the sections they are in."""
    meanings: dict[str, str] = {}
    for key in keys:
        path = ".".join(key.section)
        meanings[key.name] = f"a key {key.name!r} in {path}"
        for name in _section_names(key):
            meanings[name] = f"a section {name!r} at {path}"
    return meanings


def _check_keys_of(part: Registration, taken_names: Mapping[str, str]) -> None:
    """Raises RegistrationError if a part's keys are no keys, or have names that are taken.

    Args:
      part: A part with keys of its own.
      taken_names: What each name already stands for.
    """
    prefix = f"{part.location}: {part.kind} {part.name!r}"
    keys = part.keys
    if not (isinstance(keys, type) and issubclass(keys, Section)):
        raise RegistrationError(f"{prefix}: keys has to be a class derived from Section")
    try:
        names = _meanings(_walk(keys))
    except RegistrationError as error:
        raise RegistrationError(f"{prefix}: {error}") from None
    for name in names:
        if name in taken_names:
            raise RegistrationError(f"{prefix}: there is {taken_names[name]}")
        if meaning := other_meaning(name):
            raise RegistrationError(f"{prefix}: a key cannot be called {name!r}: {meaning}")


# Sections whose keys may differ from layer to layer, and single keys of others.
_OF_LAYERS = (
    "block",
    "position",
    "attention",
    "recurrent",
    "feed_forward",
    "mixture_of_experts",
    "pattention",
    "dropout",
)
_PARTS_OF_LAYERS = ("mixer", "feed_forward", "norm", "projection")
_ALSO_OF_LAYERS = ("base_mlp_dim", "base_num_query_heads", "base_num_kv_heads", "head_dim")
_OF_ALL_LAYERS = (
    # what chooses keys by layer, and what stands between layers
    "share_layer_params",
    "connection_type",
    "layer_pattern",
    "layer_kinds",
    "attention_types",
    "moe_layers",
    "first_num_dense_layers",
    "interleave_moe_layer_step",
    "dynamic_mlp_dim",
    "mlp_dim_multiple",
    # what is done to embeddings
    "axial_pos_shape",
    "trainable_position_size",
    "dropout_rates.embedding",
    # one kernel, one order of tokens on devices, one stored form of norms, one objective
    "attention",
    "context_parallel_strategy",
    "context_parallel_load_balance",
    "normalization_zero_centered",
    "causal",
)


_SIZE_TYPES = (int, int | None)
# What stays the same over widths.
_NOT_OF_BASE_SHAPE = ("global_parameter_scale", "vocab_size", "max_target_length")


def keys_of_layers() -> dict[str, Key]:
    """Returns the keys that layer_kinds can set for single layers."""
    return {
        name: key
        for name, key in all_keys().items()
        if _is_of_layer(key) and name not in _OF_ALL_LAYERS
    }


def _is_of_layer(key: Key) -> bool:
    if key.name in _ALSO_OF_LAYERS:
        return True
    if key.section[:2] == ("model", "parts"):
        return key.section[2].partition(".")[0] in _PARTS_OF_LAYERS
    return key.section[:1] == ("model",) and key.section[1] in _OF_LAYERS


def keys_of_base_shape() -> dict[str, Key]:
    """Returns the keys that base_shape can set: numbers that are sizes of the model."""
    return {
        name: key
        for name, key in all_keys().items()
        if (_is_of_layer(key) or key.section == ("model", "shape"))
        and key.annotation in _SIZE_TYPES
        and name not in _NOT_OF_BASE_SHAPE
    } | {"layer_kinds": all_keys()["layer_kinds"]}


def keys_by_section() -> dict[tuple[str, ...], list[Key]]:
    """Returns the keys grouped by the path of their section."""
    groups: dict[tuple[str, ...], list[Key]] = {}
    for key in all_keys().values():
        groups.setdefault(key.section, []).append(key)
    return groups


def flatten(config: Config) -> dict[str, Any]:
    """Returns the values of a configuration by key."""
    return {
        name: value.as_dict() if isinstance(value, LayerKinds | BaseShape) else value
        for name, value in config.values_by_key().items()
    }


def unflatten(flat: Mapping[str, Any]) -> Config:
    """Builds the tree of sections from values by key; keys that are missing have their default."""
    keys = all_keys()
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        section = tree
        for section_name in keys[name].section:
            section = section.setdefault(section_name, {})
        section[keys[name].field_name] = value
    return Config.model_validate(tree)


def dotted(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings by key, those that are nested under the name of a section included.

    {"adafactor": {"momentum": 0.9}} becomes {"adafactor.momentum": 0.9}. Other mappings, such as
    that of layer_kinds, are values.
    """
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if name in named_sections() and isinstance(value, Mapping):
            flat |= dotted({f"{name}.{inner_name}": item for inner_name, item in value.items()})
        else:
            flat[name] = value
    return flat
