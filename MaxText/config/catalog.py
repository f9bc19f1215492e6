"""All keys of the schema in one table."""

import dataclasses
import functools
import operator
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from MaxText.config.keys import Section, condition_values
from MaxText.config.layer_kinds import LayerKinds
from MaxText.config.registry import Name, Parts, on_change
from MaxText.config.schema import Config

_BOUNDS = {
    "ge": (operator.ge, ">="),
    "gt": (operator.gt, ">"),
    "le": (operator.le, "<="),
    "lt": (operator.lt, "<"),
    "ne": (operator.ne, "other than"),
}


@dataclasses.dataclass(frozen=True)
class Key:
    """One key of the schema."""

    name: str  # what users type
    section: tuple[str, ...]  # path of the section that owns it, for example ("model", "attention")
    title: str  # first sentence of the section's docstring
    annotation: Any  # Python type of the value
    default: Any  # value when nobody sets it
    help: str  # one line
    unit: str  # for example "steps", or empty
    bounds: tuple[tuple[str, float], ...]  # pairs of "ge", "gt", "le", "lt" or "ne" and a number
    # other keys -> the values under which this one has an effect; one per group must hold
    conditions: tuple[dict[str, list[Any]], ...]

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

    @property
    def choices(self) -> tuple[Any, ...]:
        """Values of a Literal key, or of the elements of a list of Literals."""
        return tuple(_choices(self.annotation))


def _choices(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
        return
    for part in get_args(annotation):
        yield from _choices(part)


def _key(name: str, field: FieldInfo, path: tuple[str, ...], section: type[Section]) -> Key:
    extra: Any = field.json_schema_extra
    assert isinstance(extra, dict), f"{name} is not declared with key()"
    bounds = tuple(
        (kind, getattr(constraint, kind))
        for constraint in field.metadata
        for kind in _BOUNDS
        if hasattr(constraint, kind)
    )
    common = condition_values(section.ONLY_IF)
    only_if = {} if name in common else common
    if extra["only_if"] is not None:
        own = condition_values(extra["only_if"])
        only_if = own and only_if | own
    groups = [{other: values} for other, values in only_if.items()]
    groups.append(condition_values(extra["only_if_any"]))
    return Key(
        name=name,
        section=path,
        title=(section.__doc__ or "").strip().splitlines()[0],
        annotation=_annotation(field),
        default=field.default,
        help=field.description or "",
        unit=str(extra["unit"]),
        bounds=bounds,
        conditions=tuple(group for group in groups if group),
    )


def _annotation(field: FieldInfo) -> Any:
    """Returns the type of a key; for one that names a part, the current choices."""
    for fact in field.metadata:
        if isinstance(fact, Name):
            return Literal[fact.choices]
    return field.annotation


def _walk(section: type[Section], path: tuple[str, ...]) -> Iterator[Key]:
    if issubclass(section, Parts):
        for part in section.with_keys():
            yield from _walk(part.keys, (*path, part.name))  # type: ignore[arg-type]
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


on_change(all_keys.cache_clear)


# Sections whose keys may differ from layer to layer, and single keys of others.
_OF_LAYERS = ("block", "attention", "feed_forward", "mixture_of_experts", "pattention", "parts")
_ALSO_OF_LAYERS = ("base_mlp_dim", "base_num_kv_heads", "position_embedding")
_OF_ALL_LAYERS = (
    "share_parameters", "connection_type", "layer_pattern", "layer_kinds", "attention_types",
    "causal", "moe_layers", "dynamic_mlp_dim", "mlp_dim_multiple", "attention",
)  # fmt: skip


def is_of_layer(key: Key) -> bool:
    """Returns whether layer_kinds may set a key."""
    if key.name in _ALSO_OF_LAYERS:
        return True
    return (
        key.section[:1] == ("model",)
        and key.section[1] in _OF_LAYERS
        and (key.name not in _OF_ALL_LAYERS)
    )


def keys_by_section() -> dict[tuple[str, ...], list[Key]]:
    """Returns keys by the section that owns them, in the order of the schema."""
    groups: dict[tuple[str, ...], list[Key]] = {}
    for key in all_keys().values():
        groups.setdefault(key.section, []).append(key)
    return groups


def flatten(config: Config) -> dict[str, Any]:
    values = {}
    for key in all_keys().values():
        section: Any = config
        for name in key.section:
            is_parts = isinstance(section, Parts)
            section = section.named(name) if is_parts else getattr(section, name)
        value = getattr(section, key.name)
        values[key.name] = value.as_dict() if isinstance(value, LayerKinds) else value
    return values


def unflatten(values: dict[str, Any]) -> Config:
    """Builds the tree of sections from flat values; absent keys keep their default."""
    keys = all_keys()
    tree: dict[str, Any] = {}
    for name, value in values.items():
        branch = tree
        for part in keys[name].section:
            branch = branch.setdefault(part, {})
        branch[name] = value
    return Config.model_validate(tree)
