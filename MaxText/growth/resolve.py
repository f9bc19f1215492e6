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
        """Number of leading, pre-existing slots by parameter name."""
        return growth_plan.existing_slots(self.record)

    @property
    def existing_slots_lr_scale(self) -> float:
        """The factor of the learning rate of pre-existing slots."""
        return self.record["existing_slots_lr_scale"] if self.record else 1.0


def resolve_growth(
    config: Config, checkpoints: Sequence[checkpoint_files.StoredCheckpoint]
) -> ResolvedGrowth:
    """Resolves a run's growth without reading arrays; UserError on misfit.

    Args:
      checkpoints: Those of this run, oldest first; the newest readable one decides.
    """
    full_state_path = config.checkpoint.load_full_state_path
    parameters_path = config.checkpoint.load_parameters_path
    if checkpoints:
        return _as_recorded(config, checkpoints, is_resumed=True)
    if full_state_path:
        stored = checkpoint_files.resolve_checkpoint(full_state_path, "load_full_state_path")
        return _as_recorded(config, [stored], is_resumed=False)
    if parameters_path:
        return resolve_growth_from(config, open_source(parameters_path, flatten(config)))
    _refuse_rate(config, "a run without load_parameters_path")
    return ResolvedGrowth(config)


def _as_recorded(
    config: Config, checkpoints: Sequence[checkpoint_files.StoredCheckpoint], *, is_resumed: bool
) -> ResolvedGrowth:
    """Resolves a run with a restored full state, its own or another's."""
    newest_first = (checkpoint.try_metadata() for checkpoint in reversed(checkpoints))
    metadata = next(filter(None, newest_first), {})
    stored = checkpoints[-1]
    record = growth_plan.from_metadata(metadata)
    # The zoom that the run was trained with. One that the user sets stays, and
    # restoring reports the difference.
    keys = inherited_zoom(stored_config(metadata), config)
    rate = config.checkpoint.growth.existing_slots_lr_scale
    is_run = not metadata.get(checkpoint_files.PARAMETERS_ONLY)  # else restoring reports it
    if is_run and record and growth_plan.existing_slots(record):
        recorded_rate = record["existing_slots_lr_scale"]
        if rate is None and recorded_rate != 1:
            keys |= {_RATE: recorded_rate}
        if rate is not None and is_resumed and rate != recorded_rate:
            raise UserError(
                f"{_RATE}={rate:g} conflicts with the checkpoint ({recorded_rate:g}, {stored}). "
                "Remove the key. To change the rate, start another run_name with "
                f"load_full_state_path={stored.folder.parent.parent}."
            )
        if rate is not None:
            record = {**record, "existing_slots_lr_scale": rate}
    elif is_run:
        _refuse_rate(config, f"the run of {stored}")
    lines = [f"{_as_arguments(keys)}, with which {stored} was trained"] if keys else []
    return ResolvedGrowth(_with(config, keys), None, record, lines)


def _refuse_rate(config: Config, run: str) -> None:
    """Refuses a rate of pre-existing slots if there are no others.

    Args:
      run: Which run that is, for the message: "a run without load_parameters_path".
    """
    rate = config.checkpoint.growth.existing_slots_lr_scale
    if rate is not None and rate != 1:
        raise UserError(
            f"{_RATE}={rate:g}: {run} adds no slots, so none counts as pre-existing. "
            "learning_rate_overrides sets rates by name."
        )


def resolve_growth_from(config: Config, source: SourceCheckpoint) -> ResolvedGrowth:
    """Resolves a run without checkpoints; load_parameters_path names `source`.

    Raises:
      UserError: If `source` cannot become this model as the configuration asks.
    """
    from MaxText.training.backend_defaults import abstract_model

    checkpoint = config.checkpoint
    plan = source.plan(abstract_model(config.model).parameters, flatten(config))
    mode = checkpoint.growth.mode
    is_changed = bool(plan.slots or plan.layers)
    _check_slot_number(checkpoint.growth.stored_slot_num, plan, source)
    if is_changed:
        _check_possible(config, plan, source)
    keys = _zoom_keys(config, plan, source)
    lines = [f"{_as_arguments(keys)}, with which {source.folder} was trained"] if keys else []
    if keys and plan.slots and mode != "function_preserving":
        names = " and ".join(keys)
        lines.append(f"To scale scores by the new number of slots instead, set {names} to it.")
    if not is_changed:
        return _resolve_without_change(config, source, keys, lines)
    record = growth_plan.make_record(plan, checkpoint, keys)
    position = None
    if checkpoint.growth.data == "continue":
        position = {**source.position(), "step": 0}
    growth = PendingGrowth(source, plan, mode, checkpoint.growth.opt_state, position)
    changes = growth_plan.sizes(record).items()
    description = ", ".join(f"{name} {sizes}" for name, sizes in changes)
    growth_lines = [f"Growth from {source.folder}: {description}; growth.mode={mode}"]
    if plan.drops:
        growth_lines.append(f"What is dropped can change the function: {', '.join(plan.drops)}")
    return ResolvedGrowth(_with(config, keys), growth, record, [*growth_lines, *lines])


def _resolve_without_change(
    config: Config, source: SourceCheckpoint, keys: Mapping[str, float], lines: Sequence[str]
) -> ResolvedGrowth:
    """Resolves a run whose load_parameters_path has this model's slots and layers already.

    Args:
      keys: Keys that keep the zoom of `source`.
      lines: Messages for the user.
    """
    checkpoint = config.checkpoint
    for name, default in (("opt_state", "zeroed"), ("data", "restart")):
        value = getattr(checkpoint.growth, name)
        if value != default:
            raise UserError(
                f"growth.{name}={value} has no effect: {source.folder} already has this model's "
                "slots and layers. To keep optimizer state and data position, use "
                "load_full_state_path."
            )
    # A model that convert.py grew is trained for the first time here.
    is_untrained = source.metadata.get(checkpoint_files.PARAMETERS_ONLY)
    record = growth_plan.from_metadata(source.metadata) if is_untrained else None
    if record:
        rate = checkpoint.growth.existing_slots_lr_scale
        record = {**record, "existing_slots_lr_scale": 1.0 if rate is None else rate}
    if not growth_plan.existing_slots(record):
        _refuse_rate(config, f"a run from {source.folder}")
    if keys:
        empty_record = growth_plan.make_record(GrowthPlan({}), checkpoint, keys)
        record = {**(record or empty_record), "zoom": dict(keys)}
    return ResolvedGrowth(_with(config, keys), None, record, lines)


def _with(config: Config, keys: Mapping[str, Any]) -> Config:
    return unflatten(flatten(config) | dict(keys)) if keys else config


def _as_arguments(keys: Mapping[str, float]) -> str:
    """Returns keys as a user types them: "zoom_dim=24, slot_num=40"."""
    return ", ".join(f"{name}={value:g}" for name, value in keys.items())


def _check_slot_number(number: int, plan: GrowthPlan, source: SourceCheckpoint) -> None:
    """Checks growth.stored_slot_num against the stored slots; -1 leaves them unchecked.

    The feed-forward part has four times as many slots as `slot_num` says.
    """
    num_slots = plan.stored_slots
    quarters = {slots / 4 for name, slots in num_slots.items() if slot_place(name) == "ffn"}
    if number in {-1, *num_slots.values(), *quarters}:
        return
    stored = slots_by_place({name: str(slots) for name, slots in num_slots.items()}) or "0"
    raise UserError(
        f"growth.stored_slot_num={number}: the slots of {source.folder} are {stored}. The number "
        "is read from the checkpoint; remove the key."
    )


def _check_possible(config: Config, plan: GrowthPlan, source: SourceCheckpoint) -> None:
    """Raises UserError if a model cannot grow as the configuration asks."""
    growth_config = config.checkpoint.growth
    if plan.drops and not growth_config.allow_truncation:
        raise UserError(
            f"{source.folder} is larger than this model: {', '.join(plan.drops)}. To drop the "
            "last slots, or layers evenly, set growth.allow_truncation=true."
        )
    if not plan.adds_slots:
        _refuse_rate(config, f"a run from {source.folder}")
    if growth_config.mode == "function_preserving":
        _check_function_preserving(config, plan, source)


def _check_function_preserving(config: Config, plan: GrowthPlan, source: SourceCheckpoint) -> None:
    """Raises UserError if the grown model cannot compute the same function."""
    if plan.layers:
        old_depth, new_depth = plan.layers
        raise UserError(
            f"growth.mode=function_preserving: a model of {new_depth} layers made of one of "
            f"{old_depth} ({source.folder}) computes something else, as layer j becomes a copy of "
            "layer floor(j * old / new).\n  Set growth.mode=random to do so, or "
            f"base_num_decoder_layers back to {old_depth}."
        )
    if plan.adds_slots:
        for layer in config.model.distinct_layers:
            for part in layer.parts:
                problem = part.slots_problem(layer)
                if problem:
                    raise UserError(f"growth.mode=function_preserving is impossible with {problem}")
    changes = _changed_scores(stored_config(source.metadata), config)
    if changes:
        raise UserError(
            f"growth.mode=function_preserving: {source.folder} was trained with other scores: "
            f"{'; '.join(changes)}.\n  Set them back, or set growth.mode=random."
        )


def _zoom_keys(config: Config, plan: GrowthPlan, source: SourceCheckpoint) -> dict[str, float]:
    """Returns keys to keep the zoom with which `source` was trained; empty if none is needed.

    Raises:
      UserError: If the configuration fixes another zoom although the function is to stay.
    """
    stored = stored_config(source.metadata)
    if plan.slots and config.checkpoint.growth.mode != "function_preserving":
        # As in TokenFormer's JAX code, the user sets the scale; one that is already fixed stays.
        return inherited_zoom(stored, config, by_keys=True)
    if not plan.adds_slots:
        return inherited_zoom(stored, config)
    if not _slot_places(config) or config.model.pattention.normalize_type not in ZOOMED:
        return {}
    zooms = _zooms(stored, config) if stored else _fixed_zooms(config)
    for name, num_slots in plan.stored_slots.items():  # unless a configuration says otherwise
        slots_place = slot_place(name)
        if slots_place:
            zooms.setdefault(slots_place, float(num_slots))
    wrong_zooms = [
        f"zoom_dims.{name} {zooms[name]:g}, not {fixed_zoom:g}"
        for name, fixed_zoom in _fixed_zooms(config).items()
        if fixed_zoom != zooms[name]
    ]
    if wrong_zooms:
        raise UserError(
            "growth.mode=function_preserving keeps the zoom that the stored slots were trained "
            f"with: {'; '.join(wrong_zooms)}.\n  Remove zoom_dim, or set growth.mode=random."
        )
    return _zoom_dim_overrides(zooms, config)


def _slot_places(config: Config) -> list[SlotPlace]:
    """Returns where in a model there are slots: "qkv", "proj" and "ffn", or some of them."""
    projections = config.model.attention.attention_projections
    parts: dict[SlotPlace, str] = {"qkv": projections, "proj": projections}
    parts["ffn"] = config.model.feed_forward.feed_forward_type
    return [name for name, part in parts.items() if part == "pattention"]


def _fixed_zooms(config: Config) -> dict[SlotPlace, float]:
    """Returns the zoom of each place of slots where it does not follow their number."""
    zooms: dict[SlotPlace, float] = {}
    for name in _slot_places(config):
        zoom = config.model.pattention.fixed_zoom(name)
        if zoom:
            zooms[name] = zoom
    return zooms


def inherited_zoom(
    stored: Config | None, config: Config, *, by_keys: bool = False
) -> dict[str, float]:
    """Returns keys to keep the zoom of `stored`; empty if the user sets one.

    Args:
      stored: The configuration of a checkpoint, if it has one.
      by_keys: Lets slots without a fixed zoom follow their new number.
    """
    uses_zoom = config.model.pattention.normalize_type in ZOOMED
    if stored is None or not uses_zoom or not _fixed_zooms(stored) or _fixed_zooms(config):
        return {}
    return _zoom_dim_overrides(_fixed_zooms(stored) if by_keys else _zooms(stored, config), config)


def _zooms(stored: Config, config: Config) -> dict[SlotPlace, float]:
    """Returns the zoom of `stored`, at the places where `config` has slots."""
    emb_dim = stored.model.shape.dimensions.emb_dim
    pattention = stored.model.pattention
    return {name: float(pattention.zoom(name, emb_dim)) for name in _slot_places(config)}


def stored_config(metadata: Mapping[str, Any]) -> Config | None:
    """Returns the configuration of a checkpoint, or None."""
    values = metadata.get("config")
    if not values:
        return None
    # The keys of modules that are no longer imported (import_modules) are unknown now.
    return unflatten({name: value for name, value in values.items() if name in all_keys()})


def _zoom_dim_overrides(zooms: Mapping[SlotPlace, float], config: Config) -> dict[str, float]:
    """Returns keys to fix the zoom of each place; empty if already set."""
    if zooms.items() <= _fixed_zooms(config).items():
        return {}
    pattention = config.model.pattention
    # What zoom_dim would be for each place: the zoom of the feed-forward part is four times that.
    bases = {zoom / 4 if name == "ffn" else zoom for name, zoom in zooms.items()}
    covers_all = zooms.keys() == {*_slot_places(config)}
    has_own_zooms = any(zoom_dim != -1 for _, zoom_dim in pattention.zoom_dims)
    if covers_all and len(bases) == 1 and not has_own_zooms:
        return {"zoom_dim": bases.pop()}
    return {f"zoom_dims.{name}": zoom for name, zoom in zooms.items()}


def _changed_scores(stored: Config | None, config: Config) -> list[str]:
    """Describes differing keys of model.pattention, except sizes and zoom."""
    if stored is None or not _slot_places(config):
        return []
    stored_keys = stored.model.pattention.values_by_key()
    return [
        f"{name} {stored_keys[name]} -> {value}"
        for name, value in config.model.pattention.values_by_key().items()
        if not name.endswith(("slot_num", "zoom_dim")) and not name.startswith("zoom_dims.")
        if stored_keys[name] != value
    ]
