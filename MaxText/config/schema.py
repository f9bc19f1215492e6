"""The whole configuration, a tree of sections, and the table of its keys."""

import dataclasses
import functools
import operator
from collections.abc import Iterator
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
from MaxText.config.registry import Name, Parts, on_change

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


_BOUNDS = {
    "ge": (operator.ge, ">="),
    "gt": (operator.gt, ">"),
    "le": (operator.le, "<="),
    "lt": (operator.lt, "<"),
    "ne": (operator.ne, "other than"),
}


@dataclasses.dataclass(frozen=True)
class Key:
    name: str  # what users type
    section: tuple[str, ...]  # path of the section that owns it, for example ("model", "attention")
    title: str  # first sentence of the section's docstring
    annotation: Any  # Python type of the value
    default: Any  # value unless a layer sets it
    owner: type[Section | Options]  # class that declares it
    short_help: str  # empty if it is below the field
    unit: str  # for example "steps", or empty
    bounds: tuple[tuple[str, float], ...]  # pairs of "ge", "gt", "le", "lt" or "ne" and a number
    # other keys -> the values under which this one has an effect; one per group must hold
    conditions: tuple[dict[str, Any], ...]
    entries: dict[str, "Key"]  # of a key with Options

    @property
    def help(self) -> str:
        """One line."""
        own = self.name.rpartition(".")[2]
        return self.short_help or field_docstrings(self.owner).get(own, "")

    def violates_bounds(self, value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return not all(_BOUNDS[kind][0](value, bound) for kind, bound in self.bounds)

    @property
    def bounds_text(self) -> str:
        """For example ">= 0 and < 1"; empty without bounds."""
        return " and ".join(
            f"{_BOUNDS[kind][1]} {bound if isinstance(bound, int) else f'{bound:g}'}"
            for kind, bound in self.bounds
        )

    @staticmethod
    def condition_text(group: dict[str, Any]) -> str:
        """Formats a group of conditions, e.g. "opt_type=sgd or muon"."""
        return ", or ".join(
            other
            + (" other than " if isinstance(wanted, OtherThan) else "=")
            + " or ".join(values.to_yaml(value) for value in wanted)
            for other, wanted in group.items()
        )

    @property
    def choices(self) -> tuple[Any, ...]:
        """Values of a Literal key, or of the elements of a list of Literals."""
        return _choices(self.annotation)


def _choices(annotation: Any) -> tuple[Any, ...]:
    parts = get_args(annotation)
    if get_origin(annotation) is Literal:
        return parts
    return tuple(choice for part in parts for choice in _choices(part))


def _key(
    name: str, field: FieldInfo, path: tuple[str, ...], section: type[Section | Options]
) -> Key:
    extra: Any = field.json_schema_extra
    assert isinstance(extra, dict), f"{name} is not declared with key()"
    part = next((one for one in field.metadata if isinstance(one, Name)), None)
    annotation: Any = field.annotation if part is None else Literal[part.choices]
    bounds = tuple(
        (kind, getattr(constraint, kind))
        for constraint in field.metadata
        for kind in _BOUNDS
        if hasattr(constraint, kind)
    )
    common = condition_values(getattr(section, "ONLY_IF", None))
    only_if: dict[str, Any] = {} if name in common else common
    if extra["only_if"] is not None:
        own = condition_values(extra["only_if"])
        only_if = own and only_if | own
    groups = [{other: wanted} for other, wanted in only_if.items()]
    groups.append(condition_values(extra["only_if_any"]))
    return Key(
        name=name,
        section=path,
        title=(section.__doc__ or "").strip().splitlines()[0],
        annotation=annotation,
        default=field.default,
        owner=section,
        short_help=field.description or "",
        unit=str(extra["unit"]),
        bounds=bounds,
        conditions=tuple(group for group in groups if group),
        entries={
            entry: _key(f"{name}.{entry}", field, path, annotation)
            for entry, field in annotation.model_fields.items()
        }
        if isinstance(annotation, type) and issubclass(annotation, Options)
        else {},
    )


def _walk(section: type[Section], path: tuple[str, ...]) -> Iterator[Key]:
    if issubclass(section, Parts):
        for part in section.with_keys():
            yield from _walk(part.keys, (*path, part.section))  # type: ignore[arg-type]
        return
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from _walk(field.annotation, (*path, name))
        else:
            yield _key(name, field, path, section)


@functools.cache
def all_keys() -> dict[str, Key]:
    """Returns every key by name, in the order of the schema."""
    keys: dict[str, Key] = {}
    for key in _walk(Config, ()):
        assert key.name not in keys, f"two sections own {key.name}"
        keys[key.name] = key
    return keys


on_change.append(all_keys.cache_clear)


def keys_of(section: type[Section]) -> dict[str, Key]:
    return {name: _key(name, field, (), section) for name, field in section.model_fields.items()}


def all_names() -> list[str]:
    return [one.name for key in all_keys().values() for one in (key, *key.entries.values())]


def split_entry(name: str) -> tuple[str, str]:
    """Splits a name such as adafactor.momentum into its key and entry."""
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
    """Returns the keys, and entries of keys, for layer_kinds."""
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
    groups: dict[tuple[str, ...], list[Key]] = {}
    for key in all_keys().values():
        groups.setdefault(key.section, []).append(key)
    return groups


def flatten(config: Config) -> dict[str, Any]:
    flat = {}
    for key in all_keys().values():
        section: Any = config
        for name in key.section:
            section = section.named(name) if isinstance(section, Parts) else getattr(section, name)
        value = getattr(section, key.name)
        flat[key.name] = value.as_dict() if hasattr(value, "as_dict") else value
    return flat


def with_entries(flat: dict[str, Any]) -> dict[str, Any]:
    """Returns flat values with entries added, such as adafactor.momentum."""
    return flat | {
        f"{key.name}.{name}": flat[key.name][name]
        for key in all_keys().values()
        for name in key.entries
    }


def unflatten(flat: dict[str, Any]) -> Config:
    """Builds the tree of sections from flat values, or dotted entries."""
    keys = all_keys()
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        branch = tree
        for part in keys[split_entry(name)[0]].section:
            branch = branch.setdefault(part, {})
        branch[name] = value
    return Config.model_validate(tree)
