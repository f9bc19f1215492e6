"""Resolves growth, with the zoom of Pattention, before a model exists.

Theta multiplies scores by sqrt(n), the zoom. A larger n changes the function even if every new key
is zero, unless zoom_dim (model.pattention in the configuration) keeps the n of training.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from MaxText.checkpointing import checkpoint_files
from MaxText.config.layer_sections import SlotPlace
from MaxText.config.schema import Config, all_keys, flatten, unflatten
from MaxText.config.training_sections import GrowthMode
from MaxText.errors import UserError
from MaxText.growth import growth_plan
from MaxText.growth.growth_plan import GrowthPlan, Record, SourceCheckpoint, open_source
from MaxText.layers.feed_forward.pattention import ZOOMED, slot_place, slots_by_place

_RATE = "growth.existing_slots_lr_scale"


class PendingGrowth(NamedTuple):
    """Parameters to grow."""

    source: SourceCheckpoint  # the smaller model
    plan: GrowthPlan
    mode: GrowthMode  # initialization of new slots
    opt_state: str  # "zeroed", "reused" or "warmed"
    position: dict[str, Any] | None  # data position to continue at; None to restart


class ResolvedGrowth(NamedTuple):
    """A configuration with a fixed zoom, and its growth."""

    config: Config  # to build a model of
    growth: PendingGrowth | None = None  # to be done at the start of this run
    # How the run's parameters grew, now or at its first start, or None. Saved with each checkpoint
    # (run/restore.py), as the source may be gone by then.
    record: Record | None = None
    lines: Sequence[str] = ()  # messages for the user

    @property
    def existing_slots(self) -> dict[str, int]:
        return growth_plan.existing_slots(self.record)

    @property
    def existing_slots_lr_scale(self) -> float:
        return self.record["existing_slots_lr_scale"] if self.record else 1.0


def resolve_growth(
    config: Config, own: Sequence[checkpoint_files.StoredCheckpoint]
) -> ResolvedGrowth:
    """Resolves a run's growth without reading arrays; UserError on misfit.

    `own` are checkpoints of this run, oldest first; the newest readable one decides.
    """
    if own:
        return _as_recorded(config, own, is_resumed=True)
    if path := config.checkpoint.load_full_state_path:
        stored = checkpoint_files.resolve_checkpoint(path, "load_full_state_path")
        return _as_recorded(config, [stored], is_resumed=False)
    if path := config.checkpoint.load_parameters_path:
        return resolve_growth_from(config, open_source(path, flatten(config)))
    _refuse_rate(config, "a run without load_parameters_path")
    return ResolvedGrowth(config)


def _as_recorded(
    config: Config, checkpoints: Sequence[checkpoint_files.StoredCheckpoint], *, is_resumed: bool
) -> ResolvedGrowth:
    """Resolves a run with a restored full state, its own or another's."""
    newest_first = (each.try_metadata() for each in reversed(checkpoints))
    metadata = next(filter(None, newest_first), {})
    stored = checkpoints[-1]
    record = growth_plan.from_metadata(metadata)
    # The zoom that the run was trained with. One that the user sets stays, and
    # restoring reports the difference.
    keys = inherited_zoom(stored_config(metadata), config)
    asked = config.checkpoint.growth.existing_slots_lr_scale
    is_run = not metadata.get(checkpoint_files.PARAMETERS_ONLY)  # else restoring reports it
    if is_run and record and growth_plan.existing_slots(record):
        recorded = record["existing_slots_lr_scale"]
        if asked is None and recorded != 1:
            keys |= {_RATE: recorded}
        if asked is not None and is_resumed and asked != recorded:
            raise UserError(
                f"{_RATE}={asked:g} conflicts with the checkpoint ({recorded:g}, {stored}). Remove "
                "the key. To change the rate, start another run_name with "
                f"load_full_state_path={stored.folder.parent.parent}."
            )
        if asked is not None:
            record = {**record, "existing_slots_lr_scale": asked}
    elif is_run:
        _refuse_rate(config, f"the run of {stored}")
    lines = [f"{_words(keys)}, with which {stored} was trained"] if keys else []
    return ResolvedGrowth(_with(config, keys), None, record, lines)


def _refuse_rate(config: Config, what: str) -> None:
    """Refuses a rate of pre-existing slots if there are no others."""
    asked = config.checkpoint.growth.existing_slots_lr_scale
    if asked is not None and asked != 1:
        raise UserError(
            f"{_RATE}={asked:g}: {what} adds no slots, so none counts as pre-existing. "
            "learning_rate_overrides sets rates by name."
        )


def resolve_growth_from(config: Config, source: SourceCheckpoint) -> ResolvedGrowth:
    """Resolves a run without checkpoints; load_parameters_path names `source`."""
    from MaxText.conversion.weight_source import abstract_model

    checkpoint = config.checkpoint
    growth = source.plan(abstract_model(config).parameters, flatten(config))
    mode = checkpoint.growth.mode
    changes = growth.slots or growth.layers
    _check_slot_number(checkpoint.growth.stored_slot_num, growth, source)
    if changes:
        _check_possible(config, growth, source)
    keys = _zoom_keys(config, growth, source)
    lines = [f"{_words(keys)}, with which {source.folder} was trained"] if keys else []
    if keys and growth.slots and mode != "function_preserving":
        names = " and ".join(keys)
        lines.append(f"To scale scores by the new number of slots instead, set {names} to it.")
    if not changes:
        return _resolve_without_change(config, source, keys, lines)
    record = growth_plan.make_record(growth, checkpoint, keys)
    position = None
    if checkpoint.growth.data == "continue":
        position = {**source.position(), "step": 0}
    asked = PendingGrowth(source, growth, mode, checkpoint.growth.opt_state, position)
    changed = ", ".join(f"{name} {words}" for name, words in growth_plan.sizes(record).items())
    changed_lines = [f"Growth from {source.folder}: {changed}; growth.mode={mode}"]
    if growth.drops:
        changed_lines.append(f"What is dropped can change the function: {', '.join(growth.drops)}")
    return ResolvedGrowth(_with(config, keys), asked, record, [*changed_lines, *lines])


def _resolve_without_change(
    config: Config, source: SourceCheckpoint, keys: Mapping[str, float], lines: Sequence[str]
) -> ResolvedGrowth:
    checkpoint = config.checkpoint
    for name, unasked in (("opt_state", "zeroed"), ("data", "restart")):
        if (value := getattr(checkpoint.growth, name)) != unasked:
            raise UserError(
                f"growth.{name}={value} has no effect: {source.folder} already has this model's "
                "slots and layers. To keep optimizer state and data position, use "
                "load_full_state_path."
            )
    # A model that convert.py grew is trained for the first time here.
    grown_by_itself = source.metadata.get(checkpoint_files.PARAMETERS_ONLY)
    record = growth_plan.from_metadata(source.metadata) if grown_by_itself else None
    if record:
        rate = checkpoint.growth.existing_slots_lr_scale
        record = {**record, "existing_slots_lr_scale": 1.0 if rate is None else rate}
    if not growth_plan.existing_slots(record):
        _refuse_rate(config, f"a run from {source.folder}")
    if keys:
        empty = growth_plan.make_record(GrowthPlan({}), checkpoint, keys)
        record = {**(record or empty), "zoom": dict(keys)}
    return ResolvedGrowth(_with(config, keys), None, record, lines)


def _with(config: Config, keys: Mapping[str, Any]) -> Config:
    return unflatten(flatten(config) | dict(keys)) if keys else config


def _words(keys: Mapping[str, float]) -> str:
    return ", ".join(f"{name}={value:g}" for name, value in keys.items())


def _check_slot_number(number: int, growth: GrowthPlan, source: SourceCheckpoint) -> None:
    stored = growth.stored_slots
    quarters = {slots / 4 for name, slots in stored.items() if slot_place(name) == "ffn"}
    if number in {-1, *stored.values(), *quarters}:
        return
    found = slots_by_place({name: str(slots) for name, slots in stored.items()}) or "0"
    raise UserError(
        f"growth.stored_slot_num={number}: the slots of {source.folder} are {found}. The number is "
        "read from the checkpoint; remove the key."
    )


def _check_possible(config: Config, growth: GrowthPlan, source: SourceCheckpoint) -> None:
    checkpoint = config.checkpoint
    if growth.drops and not checkpoint.growth.allow_truncation:
        raise UserError(
            f"{source.folder} is larger than this model: {', '.join(growth.drops)}. To drop the "
            "last slots, or layers evenly, set growth.allow_truncation=true."
        )
    if not growth.adds_slots:
        _refuse_rate(config, f"a run from {source.folder}")
    if checkpoint.growth.mode != "function_preserving":
        return
    if growth.layers:
        old, new = growth.layers
        raise UserError(
            f"growth.mode=function_preserving: a model of {new} layers made of one of {old} "
            f"({source.folder}) computes something else, as layer j becomes a copy of layer "
            "floor(j * old / new).\n  Set growth.mode=random to do so, or base_num_decoder_layers "
            f"back to {old}."
        )
    for layer in dict.fromkeys(config.model.layers) if growth.adds_slots else ():
        for problem in filter(None, (part.slots_problem(layer) for part in layer.parts)):
            raise UserError(f"growth.mode=function_preserving is impossible with {problem}")
    if changed := _other_changes(stored_config(source.metadata), config):
        raise UserError(
            f"growth.mode=function_preserving: {source.folder} was trained with other scores: "
            f"{'; '.join(changed)}.\n  Set them back, or set growth.mode=random."
        )


def _zoom_keys(config: Config, growth: GrowthPlan, source: SourceCheckpoint) -> dict[str, float]:
    stored = stored_config(source.metadata)
    if growth.slots and config.checkpoint.growth.mode != "function_preserving":
        # As in TokenFormer's JAX code, the user sets the scale; one that is already fixed stays.
        return inherited_zoom(stored, config, by_keys=True)
    if not growth.adds_slots:
        return inherited_zoom(stored, config)
    if not _places(config) or config.model.pattention.normalize_type not in ZOOMED:
        return {}
    zooms = _zooms(stored, config) if stored else _fixed_zooms(config)
    for name, slots in growth.stored_slots.items():  # unless a configuration says otherwise
        if place := slot_place(name):
            zooms.setdefault(place, float(slots))
    wrong = [
        f"zoom_dims.{place} {zooms[place]:g}, not {own:g}"
        for place, own in _fixed_zooms(config).items()
        if own != zooms[place]
    ]
    if wrong:
        raise UserError(
            "growth.mode=function_preserving keeps the zoom that the stored slots were trained "
            f"with: {'; '.join(wrong)}.\n  Remove zoom_dim, or set growth.mode=random."
        )
    return _zoom_dim_overrides(zooms, config)


def _places(config: Config) -> list[SlotPlace]:
    """Returns the places of slots in a model."""
    projections = config.model.attention.attention_projections
    parts: dict[SlotPlace, str] = {"qkv": projections, "proj": projections}
    parts["ffn"] = config.model.feed_forward.feed_forward_type
    return [place for place, part in parts.items() if part == "pattention"]


def _fixed_zooms(config: Config) -> dict[SlotPlace, float]:
    """Returns place -> zoom where it does not follow the number of slots."""
    fixed = config.model.pattention.fixed_zoom
    return {place: zoom for place in _places(config) if (zoom := fixed(place))}


def inherited_zoom(
    stored: Config | None, config: Config, *, by_keys: bool = False
) -> dict[str, float]:
    """Returns keys to keep the zoom of `stored`; empty if the user sets one.

    With `by_keys`, a place without a fixed zoom follows its new number of slots.
    """
    uses_zoom = config.model.pattention.normalize_type in ZOOMED
    if stored is None or not uses_zoom or not _fixed_zooms(stored) or _fixed_zooms(config):
        return {}
    return _zoom_dim_overrides(_fixed_zooms(stored) if by_keys else _zooms(stored, config), config)


def _zooms(stored: Config, config: Config) -> dict[SlotPlace, float]:
    width = stored.model.shape.dimensions.emb_dim
    return {place: float(stored.model.pattention.zoom(place, width)) for place in _places(config)}


def stored_config(metadata: Mapping[str, Any]) -> Config | None:
    """Returns the configuration of a checkpoint, or None."""
    values = metadata.get("config")
    if not values:
        return None
    # Keys of a part whose module is not imported are left out.
    return unflatten({name: value for name, value in values.items() if name in all_keys()})


def _zoom_dim_overrides(zooms: Mapping[SlotPlace, float], config: Config) -> dict[str, float]:
    """Returns keys to fix the zoom of each place; empty if already set."""
    if zooms.items() <= _fixed_zooms(config).items():
        return {}
    pattention = config.model.pattention
    bases = {zoom / 4 if place == "ffn" else zoom for place, zoom in zooms.items()}
    is_whole = zooms.keys() == {*_places(config)}
    if is_whole and len(bases) == 1 and all(own == -1 for _, own in pattention.zoom_dims):
        return {"zoom_dim": bases.pop()}
    return {f"zoom_dims.{place}": zoom for place, zoom in zooms.items()}


def _other_changes(stored: Config | None, config: Config) -> list[str]:
    """Describes differing keys of model.pattention, except sizes and zoom."""
    if stored is None or not _places(config):
        return []
    old = stored.model.pattention
    new = config.model.pattention
    was, now = (
        dict(pattention) | {f"scale_factors.{name}": one for name, one in pattention.scale_factors}
        for pattention in (old, new)
    )
    return [
        f"{name} {was[name]} -> {now[name]}"
        for name in now
        if not name.endswith(("slot_num", "zoom_dim", "zoom_dims", "scale_factors"))
        if was[name] != now[name]
    ]
