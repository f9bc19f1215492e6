"""Start of a run: own checkpoint, another run's, weights, or scratch.

Each checkpoint says what the run and its ancestors have spent, as their folders may be gone.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from etils import epath

from MaxText.checkpointing import checkpoint_files
from MaxText.checkpointing.checkpoint_reader import CheckpointReader
from MaxText.checkpointing.history import Rollback
from MaxText.checkpointing.manager import CheckpointManager
from MaxText.config import import_modules
from MaxText.config.serialization import diff_configs
from MaxText.config.training_sections import CheckpointingConfig
from MaxText.conversion.hf_checkpoint import is_hf_checkpoint, resolve_hf_path
from MaxText.conversion.open_weights import open_pretrained
from MaxText.conversion.weight_source import corruption_as_user_error
from MaxText.errors import UserError, first_line
from MaxText.growth.growth_plan import Record
from MaxText.growth.initialize import grow_opt_state, grow_params
from MaxText.growth.resolve import ResolvedGrowth
from MaxText.input_pipeline.iterator import TrainIterator
from MaxText.metrics.run_record import read_run
from MaxText.run.training_stats import TrainingStats

Log = Callable[[str], None]


class RestoreResult(NamedTuple):
    """The restored start of a run."""

    state: Any
    first_step: int  # from 0
    position: dict[str, Any] | None  # of the data; None to start at that of `first_step`
    source: str  # one line, such as "checkpoint of step 120"
    how: str  # "scratch", "resume", "full_state", "parameters" or "growth"
    metadata: Mapping[str, Any] = {}  # of compatibility.checkpoint_metadata, if there is any
    folder: str = ""  # of the checkpoint; empty for scratch
    stored_step: int | None = None  # the step after which the checkpoint was saved, if known
    changes: Mapping[str, tuple[str, str]] = {}  # key -> value in the checkpoint, value now
    growth: Record | None = None  # how the parameters grew; None if they did not
    rollbacks: tuple[Rollback, ...] = ()  # of the run, including those after the checkpoint


def restore_or_initialize(
    checkpoints: CheckpointManager,
    config: CheckpointingConfig,
    abstract_state: Any,
    initialize: Callable[[], Any],
    config_flat: Mapping[str, Any],
    log: Log = print,
    resolved: ResolvedGrowth | None = None,
) -> RestoreResult:
    """Restores the run's state from the first available source.

    `abstract_state` has the target shardings, on any mesh; `initialize` draws a fresh state.
    Raises UserError if a path has no checkpoint, or none of this run fits and is readable.
    """
    steps = checkpoints.steps_to_resume()
    _log_order(checkpoints, config, log)
    began = time.perf_counter()
    if steps:
        newest = checkpoints.stored(steps[0])
        if newest.try_metadata().get(checkpoint_files.PARAMETERS_ONLY):
            raise UserError(
                f"{newest} contains imported parameters and no train state, so it cannot be "
                "resumed. Start another run_name with "
                f"load_parameters_path={newest.folder.parent.parent}."
            )
        restored = _resume(checkpoints, abstract_state, config_flat, log)
    elif config.load_full_state_path:
        restored = _load_full_state(config, abstract_state, config_flat, log)
    elif resolved and resolved.growth:
        growth = resolved.growth
        state = initialize()
        source = growth.source
        moments = state.opt_state
        if growth.opt_state != "zeroed":
            moments = grow_opt_state(growth, abstract_state.opt_state, moments)
        params = grow_params(growth, abstract_state.params, state.params)
        state = dataclasses.replace(state, params=params, opt_state=moments)
        words = f"parameters grown from {source.folder}"
        restored = RestoreResult(
            state, 0, growth.position, words, "growth", source.metadata, source.folder, source.step
        )
    elif config.load_parameters_path:
        given = open_pretrained(
            config.load_parameters_path,
            "load_parameters_path",
            abstract_state.params,
            config_flat,
            log,
        )
        # Drops the fresh parameters before reading the stored ones: one copy in memory.
        state = dataclasses.replace(initialize(), params=None)
        state = dataclasses.replace(state, params=given.read())
        restored = RestoreResult(
            state, 0, None, given.source, "parameters", given.metadata, given.folder, given.step
        )
    else:
        restored = RestoreResult(initialize(), 0, None, "scratch", "scratch")
        return restored._replace(rollbacks=checkpoints.rollbacks())
    log(f"Restored {restored.source} in {time.perf_counter() - began:.1f} s")
    for warning in import_modules.changes(restored.metadata):
        log(warning)
    stored = restored.metadata.get("config")
    changes = diff_configs(stored, config_flat) if stored else {}
    if changes:
        log("Keys that differ from the checkpoint (checkpoint -> now):")
        for name, (old, new) in changes.items():
            log(f"  {name}: {old} -> {new}")
    return restored._replace(
        changes=changes,
        growth=resolved.record if resolved else None,
        rollbacks=checkpoints.rollbacks(),
    )


def _log_order(checkpoints: CheckpointManager, config: CheckpointingConfig, log: Log) -> None:
    full = config.load_full_state_path
    params = config.load_parameters_path
    newest = next(iter(checkpoints.steps_to_resume()), None)
    own = f"{'none' if newest is None else f'step {newest}'} in {checkpoints.directory}"
    if not config.enable_checkpointing:
        own = "enable_checkpointing is false"
    rows = [
        ("checkpoint of this run", own, newest is not None),
        ("load_full_state_path", full or "not set", bool(full)),
        ("load_parameters_path", params or "not set", bool(params)),
        ("scratch", "new parameters from init_weights_seed", True),
    ]
    taken = next(number for number, row in enumerate(rows) if row[2])
    log("Starting from (first match):")
    for number, (name, what, available) in enumerate(rows):
        mark = "  <- taken" if number == taken else ""
        is_ignored = available and number > taken and name.startswith("load_")
        if is_ignored:
            mark = "  (ignored: this run has its own checkpoint)"
        log(f"  {number + 1}. {name:<31}{what}{mark}")
        if is_ignored and taken == 0 and (problem := _problem_of_weights(what, name)):
            log(f"warning: {name}={what} is ignored, and could not be loaded: {problem}")


def _problem_of_weights(path: str, key: str) -> str:
    """Returns why there are no weights at a local path; empty if there are, or if it is remote."""
    if "://" in path:
        return ""  # slow, and not needed
    try:
        if is_hf_checkpoint(path):
            resolve_hf_path(path, key)
        else:
            checkpoint_files.resolve_checkpoint(path, key)
    except UserError as error:
        return first_line(error)
    return ""


def _resume(
    checkpoints: CheckpointManager, abstract_state: Any, config_flat: Mapping[str, Any], log: Log
) -> RestoreResult:
    failures = []
    for step in checkpoints.steps_to_resume():
        restored, reason = checkpoints.try_restore(step, abstract_state, config_flat, log)
        if restored is not None:
            state, position, metadata = restored
            checkpoints.resume_from(step)
            source = f"checkpoint of step {step}"
            place = str(checkpoints.stored(step))
            return RestoreResult(state, step + 1, position, source, "resume", metadata, place, step)
        failures.append(f"step {step}: {reason}")
        log(f"WARNING: cannot restore a checkpoint; trying an earlier one. {failures[-1]}")
    raise UserError(
        f"no checkpoint in {checkpoints.directory} can be read:\n"
        + "\n".join(f"  {failure}" for failure in failures)
        + "\nNothing was changed. Restore the files, or start from scratch with another run_name."
    )


def _load_full_state(
    config: CheckpointingConfig, abstract_state: Any, config_flat: Mapping[str, Any], log: Log
) -> RestoreResult:
    path = config.load_full_state_path
    stored = checkpoint_files.resolve_checkpoint(path, "load_full_state_path")
    with corruption_as_user_error(stored, "load_full_state_path"):
        position = None
        metadata = stored.metadata.values
        if (stored.folder / checkpoint_files.POSITION).exists():
            position = stored.position()
        else:
            log(f"  {stored} has no data position: data begins at its step")
        reader = CheckpointReader(stored, config_flat, log, storage=config.checkpoint_storage)
        state = reader.restore_state(abstract_state)
    return RestoreResult(
        state,
        int(state.step),
        position,
        f"full state of {stored}",
        "full_state",
        metadata,
        str(stored),
        stored.step,
    )


def restore_data_position(
    restored: RestoreResult, batches: TrainIterator, steps: int, log: Callable[[str], None] = print
) -> int:
    """Moves the data to a start, with exclusions; returns the last step.

    Raises UserError if the stored position counts in other data.
    """
    if restored.position is None:
        batches.seek(restored.first_step)
    else:
        try:
            batches.set_state(restored.position)
        except UserError as error:
            if restored.how != "growth":
                raise
            raise UserError(f"growth.data=continue: {error} Or set growth.data=restart.") from None
    for rollback in active_rollbacks(restored, batches):
        first, end = rollback.samples
        # The state may predate the rollback target: the excluded samples come after both.
        if batches.exclude(first, end):
            log(
                f"Skipping samples {first} to {end - 1} of the training data: rollback at step "
                f"{rollback.detected_step} (rollbacks.json): {rollback.reason}"
            )
    return final_step(batches, steps)


def active_rollbacks(restored: RestoreResult, batches: TrainIterator) -> list[Rollback]:
    """Returns the recorded rollbacks of the run's current data."""
    return [each for each in restored.rollbacks if not batches.differences(each.data)]


def final_step(batches: TrainIterator, steps: int) -> int:
    """Returns the last step of the run, by `steps` or by the data."""
    num_steps = batches.num_steps
    return (steps if num_steps is None else min(steps, num_steps)) - 1


class EndOfRecord(NamedTuple):
    """What events.jsonl says about the end of a run."""

    is_complete: bool  # whether nothing is left to write
    has_evaluation: bool  # after the last step
    has_diverged: bool


def end_of_record(run_folder: epath.Path, restored: RestoreResult) -> EndOfRecord:
    """Returns what the record of a run without a step left says about its end.

    A run that was killed after its last checkpoint has no stop event; without it, a comparison
    would wait for this run forever. A start that is not a resume has nothing to record.
    """
    if restored.how != "resume":
        return EndOfRecord(is_complete=True, has_evaluation=True, has_diverged=False)
    try:
        record = read_run(run_folder)
    except UserError:  # missing, or without a start
        return EndOfRecord(is_complete=False, has_evaluation=False, has_diverged=False)
    last_step = restored.first_step - 1
    evaluated = [row["step"] for row in record.evaluations]
    reaches_end = record.last_step is not None and record.last_step >= last_step
    return EndOfRecord(
        is_complete=record.state in ("completed", "diverged") and reaches_end,
        has_evaluation=last_step in evaluated,
        has_diverged=record.state == "diverged",
    )


def complete_message(restored: RestoreResult, steps: int, last_step: int, num_epoch: int) -> str:
    """Returns the message for a run without a step left."""
    limit = "steps" if last_step + 1 == steps else "num_epoch"
    if restored.how != "resume":
        return (
            f"WARNING: no step was trained: {restored.source}, {steps=}, {num_epoch=}. Raise "
            f"{limit} to train."
        )
    return (
        f"The run is complete: {restored.source}, steps={steps}, num_epoch={num_epoch}. "
        f"Raise {limit} to continue."
    )


class TrainingCost(NamedTuple):
    """Training tokens and FLOPs, counted as in cost/flops.py."""

    tokens: float
    flops: float


_NOTHING = TrainingCost(0, 0.0)


@dataclasses.dataclass(frozen=True)
class Lineage:
    """Origin of a run; `spent` was used by the run itself before `first_step`."""

    stats: TrainingStats
    ancestors: Sequence[dict[str, Any]] = ()  # of `ancestors_of`
    first_step: int = 0
    spent: TrainingCost = _NOTHING

    @classmethod
    def of(cls, restored: RestoreResult, stats: TrainingStats) -> "Lineage":
        if restored.how == "scratch":
            return cls(stats)
        metadata = restored.metadata
        first = restored.first_step
        if restored.how == "resume":
            stored = metadata.get("spent")
            spent = TrainingCost(**stored) if stored else cls(stats).spent_before(first)
            return cls(stats, metadata.get("lineage", ()), first, spent)
        folder = restored.folder
        step = restored.stored_step
        how = restored.how
        return cls(stats, ancestors_of(metadata, folder, step, how, restored.growth), first)

    def spent_before(self, step: int) -> TrainingCost:
        """Returns this run's usage before a step, without its ancestors."""
        stats = self.stats
        first = self.first_step
        tokens = stats.tokens_before(step) - stats.tokens_before(first)
        flops = stats.flops_before(step) - stats.flops_before(first)
        return TrainingCost(self.spent.tokens + tokens, self.spent.flops + flops)

    def progress(self, step: int) -> dict[str, float]:
        """Returns this run's usage up to a step, by event tag."""
        spent = self.spent_before(step + 1)
        return {"progress/tokens": spent.tokens, "progress/flops": spent.flops}

    def metadata(self, step: int) -> dict[str, Any]:
        return {"spent": self.spent_before(step + 1)._asdict(), "lineage": [*self.ancestors]}


def ancestors_of(
    metadata: Mapping[str, Any], folder: str, step: int | None, how: str, growth: Record | None
) -> list[dict[str, Any]]:
    """Returns the ancestors of a new run, the checkpoint it starts from last.

    `step` is the step after which that was saved, `how` "parameters", "full_state" or "growth".
    Its `tokens` and `flops` include those of its own ancestors; None if unknown.
    """
    ancestors = metadata.get("lineage", [])
    spent = metadata.get("spent")
    earlier = ancestors[-1] if ancestors else _NOTHING._asdict()
    tokens = flops = None
    if spent is not None and earlier["tokens"] is not None and earlier["flops"] is not None:
        tokens = earlier["tokens"] + spent["tokens"]
        flops = earlier["flops"] + spent["flops"]
    run_name = (metadata.get("config") or {}).get("run_name")
    newest = {"run_name": run_name, "folder": folder, "step": step, "how": how}
    return [*ancestors, {**newest, "tokens": tokens, "flops": flops, "growth": growth}]
