"""The whole configuration, a tree of sections, and the table of its keys.

Two views of the same values: `Config` is the tree that code reads, `config.schedule.learning_rate`;
a flat dictionary by key is what users type, and what files and checkpoints hold. `flatten` and
`unflatten` convert between them. `all_keys` describes each key: type, default, bounds, help, and
the conditions under which it has an effect.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from MaxText.config import data_sections, model_sections, training_sections, values
from MaxText.config.keys import (
    Options,
    OtherThan,
    Section,
    condition_values,
    field_docstrings,
)
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


@dataclasses.dataclass(frozen=True)
class Key:
    """What is declared about one key.

    Attributes:
      name: What users type.
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
      entries: Of a key with Options, its entries by their names without the key's.
    """

    name: str
    section: tuple[str, ...]
    title: str
    annotation: Any
    default: Any
    owner: type[Section | Options]
    short_help: str
    unit: str
    constraints: tuple[Any, ...]
    conditions: tuple[dict[str, Any], ...]
    entries: dict[str, "Key"]

    @property
    def help(self) -> str:
        """What the key does, in one line."""
        field_name = self.name.rpartition(".")[2]
        return self.short_help or field_docstrings(self.owner).get(field_name, "")

    def convert(self, value: Any) -> Any:
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


def _choices(annotation: Any) -> tuple[Any, ...]:
    type_arguments = get_args(annotation)
    if get_origin(annotation) is Literal:
        return type_arguments
    return tuple(choice for inner in type_arguments for choice in _choices(inner))


def _key(
    name: str, field: FieldInfo, path: tuple[str, ...], section: type[Section | Options]
) -> Key:
    """Builds the description of a key from the field that declares it.

    Args:
      name: What users type.
      field: The field, made by keys.key().
      path: Of the section in the tree.
      section: The class with the field.
    """
    facts: Any = field.json_schema_extra
    assert isinstance(facts, dict), f"{name} is not declared with key()"
    part_name = next((mark for mark in field.metadata if isinstance(mark, Name)), None)
    annotation: Any = field.annotation if part_name is None else Literal[part_name.choices]
    entries: dict[str, Key] = {}
    if isinstance(annotation, type) and issubclass(annotation, Options):
        for entry, entry_field in annotation.model_fields.items():
            entries[entry] = _key(f"{name}.{entry}", entry_field, path, annotation)
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
        conditions=_conditions(name, facts, section),
        entries=entries,
    )


def _conditions(
    name: str, facts: dict[str, Any], section: type[Section | Options]
) -> tuple[dict[str, Any], ...]:
    """Returns Key.conditions: those of the section and the key's own."""
    of_section = condition_values(getattr(section, "ONLY_IF", None))
    # The switch of a section has an effect on its own.
    only_if: dict[str, Any] = {} if name in of_section else of_section
    if facts["only_if"] is not None:
        of_key = condition_values(facts["only_if"])
        # An explicit {} drops the section's conditions.
        only_if = only_if | of_key if of_key else {}
    groups = [{other_key: allowed} for other_key, allowed in only_if.items()]
    groups.append(condition_values(facts["only_if_any"]))
    return tuple(group for group in groups if group)


def _walk(
    section: type[Section], path: tuple[str, ...], without: Sequence[Registration] = ()
) -> Iterator[Key]:
    """Yields the keys of a section and of those inside, in order.

    Args:
      section: The class of the section.
      path: Of the section in the tree.
      without: Parts whose keys are left out.
    """
    if issubclass(section, Parts):
        for part in section.with_keys():
            if part.keys is not None and part not in without:
                yield from _walk(part.keys, (*path, part.section))
        return
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from _walk(field.annotation, (*path, name), without)
        else:
            yield _key(name, field, path, section)


@functools.cache
def all_keys() -> dict[str, Key]:
    """Returns every key by name, in the order of the schema.

    Raises:
      RegistrationError: a user's part has keys that cannot be added. The part is then no longer
        registered, so that a corrected one can take its name.
    """
    _check_users_keys()
    keys: dict[str, Key] = {}
    for key in _walk(Config, ()):
        assert key.name not in keys, f"two sections own {key.name}"
        keys[key.name] = key
    return keys


on_change.append(all_keys.cache_clear)


def _check_users_keys() -> None:
    """Checks the keys that users' parts add against all others."""
    parts = [part for part in registrations() if not part.is_built_in and part.keys is not None]
    for index, part in enumerate(parts):
        earlier_keys = _walk(Config, (), without=parts[index:])
        try:
            _check_keys_of(part, {key.name: key.section for key in earlier_keys})
        except RegistrationError:
            remove(part)
            raise


def _check_keys_of(part: Registration, section_of: Mapping[str, tuple[str, ...]]) -> None:
    """Raises RegistrationError if a part's keys are no keys, or have names that are taken.

    Args:
      part: A part with keys of its own.
      section_of: Path of the section of each key that there is already.
    """
    prefix = f"{part.location}: {part.kind} {part.name!r}"
    keys = part.keys
    if not (isinstance(keys, type) and issubclass(keys, Section)):
        raise RegistrationError(f"{prefix}: keys has to be a class derived from Section")
    for name, field in keys.model_fields.items():
        facts = field.json_schema_extra
        if not isinstance(facts, dict) or "unit" not in facts:
            raise RegistrationError(f"{prefix}: key {name!r} is not declared with key(...)")
        if name in section_of:
            section = ".".join(section_of[name])
            raise RegistrationError(f"{prefix}: there is a key {name!r} in {section}")
        if meaning := other_meaning(name):
            raise RegistrationError(f"{prefix}: a key cannot be called {name!r}: {meaning}")


def keys_of(section: type[Section]) -> dict[str, Key]:
    """Returns the keys of one section that is not part of the tree, such as program options."""
    return {name: _key(name, field, (), section) for name, field in section.model_fields.items()}


def all_names() -> list[str]:
    """Returns every name that users can set: keys, and entries as key.entry."""
    return [named.name for key in all_keys().values() for named in (key, *key.entries.values())]


def split_entry(name: str) -> tuple[str, str]:
    """Splits a name such as adafactor.momentum into key and entry; the entry may be empty."""
    key, _, entry = name.partition(".")
    return (key, entry) if entry and key in all_keys() and all_keys()[key].entries else (name, "")


# Sections whose keys may differ from layer to layer, and single keys of others.
_OF_LAYERS = (
    "block",
    "position",
    "attention",
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


def keys_of_layers() -> dict[str, Key]:
    """Returns the keys, and entries of keys, that layer_kinds can set for single layers."""
    keys = [key for key in all_keys().values() if _is_of_layer(key)]
    entries = [entry for key in keys for entry in key.entries.values()]
    return {key.name: key for key in (*keys, *entries) if key.name not in _OF_ALL_LAYERS}


def _is_of_layer(key: Key) -> bool:
    if key.name in _ALSO_OF_LAYERS:
        return True
    if key.section[:2] == ("model", "parts"):
        return key.section[2].partition(".")[0] in _PARTS_OF_LAYERS
    return key.section[:1] == ("model",) and key.section[1] in _OF_LAYERS


def keys_by_section() -> dict[tuple[str, ...], list[Key]]:
    """Returns the keys grouped by the path of their section."""
    groups: dict[tuple[str, ...], list[Key]] = {}
    for key in all_keys().values():
        groups.setdefault(key.section, []).append(key)
    return groups


def flatten(config: Config) -> dict[str, Any]:
    """Returns the values of a configuration by key; those of a key with entries as a dict."""
    flat = {}
    for key in all_keys().values():
        section: Any = config
        for name in key.section:
            section = section.named(name) if isinstance(section, Parts) else getattr(section, name)
        value = getattr(section, key.name)
        flat[key.name] = value.as_dict() if hasattr(value, "as_dict") else value
    return flat


def with_entries(flat: dict[str, Any]) -> dict[str, Any]:
    """Returns flat values with those of entries added, such as adafactor.momentum."""
    return flat | {
        f"{key.name}.{name}": flat[key.name][name]
        for key in all_keys().values()
        for name in key.entries
    }


def unflatten(flat: dict[str, Any]) -> Config:
    """Builds the tree of sections from flat values; keys that are missing have their default.

    Args:
      flat: Values by key, or by key.entry.
    """
    keys = all_keys()
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        section = tree
        for section_name in keys[split_entry(name)[0]].section:
            section = section.setdefault(section_name, {})
        section[name] = value
    return Config.model_validate(tree)
