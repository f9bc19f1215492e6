"""Start of a run: its own checkpoint, another run's, initial weights, or scratch."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from MaxText.checkpointing import description, layout, reading
from MaxText.checkpointing.manager import Checkpoints
from MaxText.checkpointing.rewinds import Rewind
from MaxText.config import import_modules
from MaxText.config.serialization import diff_configs
from MaxText.config.training_sections import Checkpoint
from MaxText.conversion.given_parameters import (
    open_parameters,
    unreadable_is_user_error,
)
from MaxText.errors import UserError
from MaxText.growth.placing import grown_moments, grown_parameters
from MaxText.growth.record import Record
from MaxText.growth.settling import Growth, Settled
from MaxText.runtime.agreement import on_all_processes

Show = Callable[[str], None]


class Start(NamedTuple):
    """The restored start of a run.

    Attributes:
      first_step: The first step, from 0.
      position: Data position, or None to start at the data of `first_step`.
      source: One line, such as "checkpoint of step 120".
      how: "scratch", "resume", "full_state", "parameters" or "growth".
      metadata: See matching.checkpoint_metadata; empty if there is none.
      folder: Of the checkpoint; empty for scratch.
      stored_step: The step after which the checkpoint was saved, if known.
      changes: {key: (value in the checkpoint, value now)}.
      growth: How the parameters grew; None if they did not.
      rewinds: Rollbacks of the run, including those after the checkpoint.
    """

    state: Any
    first_step: int
    position: dict[str, Any] | None
    source: str
    how: str
    metadata: Mapping[str, Any] = {}
    folder: str = ""
    stored_step: int | None = None
    changes: Mapping[str, tuple[str, str]] = {}
    growth: Record | None = None
    rewinds: tuple[Rewind, ...] = ()


def restore_or_initialize(
    checkpoints: Checkpoints,
    section: Checkpoint,
    abstract_state: Any,
    initialize: Callable[[], Any],
    config_flat: Mapping[str, Any],
    show: Show = print,
    settled: Settled | None = None,
) -> Start:
    """Restores own checkpoint, else load_full_state_path, else load_parameters_path, else scratch.

    Args:
      abstract_state: A train state of jax.ShapeDtypeStruct with target shardings, on any mesh.
      initialize: Creates a fresh state, called unless a whole state is restored.
      settled: Result of growth.settling.settle; None if nothing can grow.

    Raises:
      UserError: A path has no checkpoint, one does not fit, or none of this run is readable.
    """
    if section.load_full_state_path and section.load_parameters_path:
        raise UserError(
            "load_full_state_path and load_parameters_path are both set: clear one. The first "
            "brings parameters, optimizer state and step, the second only parameters."
        )
    steps = checkpoints.steps_to_resume()
    _show_order(checkpoints, section, steps, show)
    began = time.perf_counter()
    if steps:
        _check_is_a_run(checkpoints.stored(steps[0]))
        start = _resume(checkpoints, steps, abstract_state, config_flat, show)
    elif section.load_full_state_path:
        start = _load_full_state(section.load_full_state_path, abstract_state, config_flat, show)
    elif settled and settled.growth:
        start = _grow(settled.growth, abstract_state, initialize)
    elif section.load_parameters_path:
        start = _load_parameters(
            section.load_parameters_path, abstract_state, initialize, config_flat, show
        )
    else:
        start = Start(initialize(), 0, None, "scratch", "scratch")
        return start._replace(rewinds=checkpoints.rewinds())
    show(f"Restored {start.source} in {time.perf_counter() - began:.1f} s")
    for warning in import_modules.changes(start.metadata):
        show(warning)
    stored = start.metadata.get("config")
    changes = diff_configs(stored, config_flat) if stored else {}
    if changes:
        show("Keys that differ from the checkpoint (checkpoint -> now):")
        for name, (old, new) in changes.items():
            show(f"  {name}: {old} -> {new}")
    return start._replace(
        changes=changes,
        growth=settled.record if settled else None,
        rewinds=checkpoints.rewinds(),
    )


def _show_order(
    checkpoints: Checkpoints, section: Checkpoint, steps: list[int], show: Show
) -> None:
    full, params = section.load_full_state_path, section.load_parameters_path
    if not section.enable_checkpointing:
        own = "enable_checkpointing is false"
    elif steps:
        own = f"step {steps[0]} in {checkpoints.directory}"
    else:
        own = f"none in {checkpoints.directory}"
    rows = [
        ("checkpoint of this run", own, bool(steps)),
        ("load_full_state_path", full or "not set", bool(full)),
        ("load_parameters_path", params or "not set", bool(params)),
        ("scratch", "new parameters from init_weights_seed", True),
    ]
    taken = next(number for number, row in enumerate(rows) if row[2])
    show("Starting from (first match):")
    for number, (name, what, available) in enumerate(rows):
        mark = "  <- taken" if number == taken else ""
        if available and number > taken and name.startswith("load_"):
            mark = "  (ignored: this run has its own checkpoint)"
        show(f"  {number + 1}. {name:<31}{what}{mark}")


def _check_is_a_run(stored: layout.Stored) -> None:
    """Rejects parameters that convert.py wrote into a folder of this name."""
    if description.metadata_if_any(stored).get(layout.PARAMETERS_ONLY):
        raise UserError(
            f"{stored} holds imported parameters and no train state, so no run can resume there. "
            f"Start another run_name with load_parameters_path={stored.folder.parent.parent}."
        )


def _resume(
    checkpoints: Checkpoints,
    steps: list[int],
    abstract_state: Any,
    config_flat: Mapping[str, Any],
    show: Show,
) -> Start:
    failures = []
    for step in steps:
        reason = None
        restored = None
        try:
            restored = checkpoints.restore(step, abstract_state, config_flat, show)
            after = int(restored[0].step)
            if after != step + 1:
                restored, reason = None, f"it holds the state after step {after - 1}: renamed?"
        except description.Unreadable as error:
            reason = str(error)
        if on_all_processes(restored is not None):
            assert restored is not None
            state, position, metadata = restored
            first_step = step + 1
            checkpoints.resume_from(step)
            source = f"checkpoint of step {step}"
            folder = str(checkpoints.stored(step))
            return Start(state, first_step, position, source, "resume", metadata, folder, step)
        checkpoints.mark_unreadable(step)
        failures.append(f"step {step}: {reason or 'another process could not read it'}")
        show(f"warning: a checkpoint cannot be read; trying the one before it. {failures[-1]}")
    raise UserError(
        f"no checkpoint in {checkpoints.directory} can be read:\n"
        + "\n".join(f"  {failure}" for failure in failures)
        + "\nNothing was changed. Restore the files, or start anew with another run_name."
    )


def _load_full_state(
    path: str, abstract_state: Any, config_flat: Mapping[str, Any], show: Show
) -> Start:
    stored = layout.find(path, "load_full_state_path")
    with unreadable_is_user_error("load_full_state_path", stored):
        described, position = description.describe(stored), None
        if (stored.folder / layout.POSITION).exists():
            position = description.read_position(stored, described)
        else:
            show(f"  no data position beside {stored}: data begins at its step")
        state = reading.read_state(stored, abstract_state, config_flat, show)
    return Start(
        state, int(state.step), position, f"full state of {stored}", "full_state",
        described.metadata, str(stored), stored.step,
    )  # fmt: skip


def _load_parameters(
    path: str,
    abstract_state: Any,
    initialize: Callable[[], Any],
    config_flat: Mapping[str, Any],
    show: Show,
) -> Start:
    params = abstract_state.params
    given = open_parameters(path, "load_parameters_path", params, config_flat, show)
    # Drops the fresh parameters before reading the stored ones: one copy in memory.
    state = dataclasses.replace(initialize(), params=None)
    state = dataclasses.replace(state, params=given.read())
    return Start(
        state, 0, None, given.source, "parameters", given.metadata, given.folder, given.step
    )


def _grow(growth: Growth, abstract_state: Any, initialize: Callable[[], Any]) -> Start:
    state, source = initialize(), growth.source
    moments = state.opt_state
    if growth.moments != "zeroed":
        moments = grown_moments(growth, abstract_state.opt_state, moments)
    params = grown_parameters(growth, abstract_state.params, state.params)
    state = dataclasses.replace(state, params=params, opt_state=moments)
    words = f"parameters grown from {source.folder}"
    return Start(
        state, 0, growth.position, words, "growth", source.metadata, source.folder, source.step
    )
