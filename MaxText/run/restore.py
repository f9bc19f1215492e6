"""Start of a run: own checkpoint, another run's, weights, or scratch.

Each checkpoint says what the run and its ancestors have spent, as their folders may be gone.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from etils import epath

from MaxText.checkpointing import checkpoint_files
from MaxText.checkpointing.checkpoint_reader import OBJECTIVE, CheckpointReader
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
from MaxText.growth.resolve import PendingGrowth, ResolvedGrowth
from MaxText.input_pipeline.iterator import TrainIterator
from MaxText.input_pipeline.sequences.batch_schedule import BatchSchedule
from MaxText.monitoring.run_record import read_run
from MaxText.run.training_stats import TrainingStats
from MaxText.training.state import TrainState

Log = Callable[[str], None]
Ancestor = dict[str, Any]  # a row of `ancestors_of`, as JSON in checkpoints


class RestoreResult(NamedTuple):
    """The restored start of a run."""

    state: TrainState
    first_step: int  # from 0
    position: dict[str, Any] | None  # of the data; None to start at that of `first_step`
    source: str  # one line, such as "checkpoint of step 120"
    how: str  # "scratch", "resume", "full_state", "parameters" or "growth"
    # What `Loop.save` stored with the checkpoint. Of another run, unless `how` is "resume".
    metadata: Mapping[str, Any] = {}
    folder: str = ""  # of the checkpoint; empty for scratch
    stored_step: int | None = None  # the step after which the checkpoint was saved, if known
    changes: Mapping[str, tuple[str, str]] = {}  # key -> value in the checkpoint, value now
    growth: Record | None = None  # how the parameters grew; None if they did not
    rollbacks: tuple[Rollback, ...] = ()  # of the run, including those after the checkpoint

    @property
    def progress(self) -> Mapping[str, Any]:
        """What the checkpoint recorded of the training that this run goes on with.

        The trend of its loss, its validation losses, its rollbacks, and whether an evaluation is
        due. Empty if only parameters were taken from another run: its losses and steps are not
        those of this one.
        """
        return self.metadata if self.how in ("resume", "full_state") else {}


def restore_or_initialize(
    checkpoints: CheckpointManager,
    config: CheckpointingConfig,
    abstract_state: TrainState,
    initialize: Callable[[], TrainState],
    config_flat: Mapping[str, Any],
    *,
    log: Log = print,
    resolved: ResolvedGrowth | None = None,
) -> RestoreResult:
    """Restores the run's state from the first available source.

    The sources are, in this order: a checkpoint of the run itself, load_full_state_path,
    load_parameters_path (which may be grown), and a fresh state.

    Args:
      checkpoints: Those of the run.
      abstract_state: The state with its target shardings, on any mesh.
      initialize: Draws a fresh state.
      config_flat: The configuration by key.
      log: Gets lines for the user.
      resolved: The growth of the run, if it has any.

    Raises:
      UserError: If a path has no checkpoint, or none of this run fits and is readable.
    """
    steps = checkpoints.steps_to_resume()
    _log_order(checkpoints, config, log)
    start_time = time.perf_counter()
    if steps:
        _require_train_state(checkpoints.stored(steps[0]))
        restored = _resume(checkpoints, abstract_state, config_flat, log)
    elif config.load_full_state_path:
        restored = _load_full_state(config, abstract_state, config_flat, log)
    elif resolved and resolved.growth:
        restored = _grow(resolved.growth, abstract_state, initialize)
    elif config.load_parameters_path:
        restored = _load_parameters(config, abstract_state, initialize, config_flat, log)
    else:
        restored = RestoreResult(
            state=initialize(), first_step=0, position=None, source="scratch", how="scratch"
        )
        return restored._replace(rollbacks=checkpoints.rollbacks())
    log(f"Restored {restored.source} in {time.perf_counter() - start_time:.1f} s")
    for warning in import_modules.changes(restored.metadata):
        log(warning)
    stored_config = restored.metadata.get("config")
    changes = diff_configs(stored_config, config_flat) if stored_config else {}
    if changes:
        log("Keys that differ from the checkpoint (checkpoint -> now):")
        for name, (stored_value, value) in changes.items():
            log(f"  {name}: {stored_value} -> {value}")
    return restored._replace(
        changes=changes,
        growth=resolved.record if resolved else None,
        rollbacks=checkpoints.rollbacks(),
    )


def _require_train_state(stored: checkpoint_files.StoredCheckpoint) -> None:
    """Refuses to resume a checkpoint that convert.py imported."""
    if stored.try_metadata().get(checkpoint_files.PARAMETERS_ONLY):
        raise UserError(
            f"{stored} contains imported parameters and no train state, so it cannot be "
            "resumed. Start another run_name with "
            f"load_parameters_path={stored.folder.parent.parent}."
        )


def _grow(
    growth: PendingGrowth, abstract_state: TrainState, initialize: Callable[[], TrainState]
) -> RestoreResult:
    """Starts with the parameters of a smaller model, and its moments if they are asked for."""
    state = initialize()
    opt_state = state.opt_state
    if growth.opt_state != "zeroed":
        opt_state = grow_opt_state(growth, abstract_state.opt_state, opt_state)
    params = grow_params(growth, abstract_state.params, state.params)
    source = growth.source
    return RestoreResult(
        state=dataclasses.replace(state, params=params, opt_state=opt_state),
        first_step=0,
        position=growth.position,
        source=f"parameters grown from {source.folder}",
        how="growth",
        metadata=source.metadata,
        folder=source.folder,
        stored_step=source.step,
    )


def _load_parameters(
    config: CheckpointingConfig,
    abstract_state: TrainState,
    initialize: Callable[[], TrainState],
    config_flat: Mapping[str, Any],
    log: Log,
) -> RestoreResult:
    """Starts with the parameters of load_parameters_path and a fresh optimizer state."""
    weights = open_pretrained(
        config.load_parameters_path,
        key="load_parameters_path",
        abstract_params=abstract_state.params,
        config_flat=config_flat,
        log=log,
    )
    # Drops the fresh parameters before reading the stored ones: one copy in memory. Those of an
    # objective are kept, in case that the weights were trained with another one.
    state = initialize()
    params = {name: tree for name, tree in state.params.items() if name == OBJECTIVE}
    state = dataclasses.replace(state, params=None)
    state = dataclasses.replace(state, params=params | weights.read())
    return RestoreResult(
        state=state,
        first_step=0,
        position=None,
        source=weights.source,
        how="parameters",
        metadata=weights.metadata,
        folder=weights.folder,
        stored_step=weights.step,
    )


class _StartOption(NamedTuple):
    """A row of the list of sources that a run can start from."""

    name: str
    value: str  # which checkpoint or path
    is_available: bool


def _log_order(checkpoints: CheckpointManager, config: CheckpointingConfig, log: Log) -> None:
    """Logs the possible sources in their order, and which one is taken."""
    full_state_path = config.load_full_state_path
    parameters_path = config.load_parameters_path
    newest = next(iter(checkpoints.steps_to_resume()), None)
    own_checkpoint = f"{'none' if newest is None else f'step {newest}'} in {checkpoints.directory}"
    if not config.enable_checkpointing:
        own_checkpoint = "enable_checkpointing is false"
    options = [
        _StartOption("checkpoint of this run", own_checkpoint, newest is not None),
        _StartOption("load_full_state_path", full_state_path or "not set", bool(full_state_path)),
        _StartOption("load_parameters_path", parameters_path or "not set", bool(parameters_path)),
        _StartOption("scratch", "new parameters from init_weights_seed", True),
    ]
    taken_index = next(index for index, option in enumerate(options) if option.is_available)
    log("Starting from (first match):")
    for index, option in enumerate(options):
        is_path = option.name.startswith("load_")
        is_ignored = option.is_available and index > taken_index and is_path
        mark = "  <- taken" if index == taken_index else ""
        if is_ignored:
            mark = "  (ignored: this run has its own checkpoint)"
        log(f"  {index + 1}. {option.name:<31}{option.value}{mark}")
        if is_ignored and taken_index == 0:
            problem = _problem_of_weights(option.value, option.name)
            if problem:
                log(
                    f"warning: {option.name}={option.value} is ignored, and could not be loaded: "
                    f"{problem}"
                )


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
    checkpoints: CheckpointManager,
    abstract_state: TrainState,
    config_flat: Mapping[str, Any],
    log: Log,
) -> RestoreResult:
    """Restores the newest checkpoint of the run that can be read; UserError if none can."""
    failures = []
    for step in checkpoints.steps_to_resume():
        restored, reason = checkpoints.try_restore(step, abstract_state, config_flat, log)
        if restored is not None:
            checkpoints.resume_from(step)
            return RestoreResult(
                state=restored.state,
                first_step=step + 1,
                position=restored.position,
                source=f"checkpoint of step {step}",
                how="resume",
                metadata=restored.metadata,
                folder=str(checkpoints.stored(step)),
                stored_step=step,
            )
        failures.append(f"step {step}: {reason}")
        log(f"WARNING: cannot restore a checkpoint; trying an earlier one. {failures[-1]}")
    raise UserError(
        f"no checkpoint in {checkpoints.directory} can be read:\n"
        + "\n".join(f"  {failure}" for failure in failures)
        + "\nNothing was changed. Restore the files, or start from scratch with another run_name."
    )


def _load_full_state(
    config: CheckpointingConfig,
    abstract_state: TrainState,
    config_flat: Mapping[str, Any],
    log: Log,
) -> RestoreResult:
    """Starts with the whole state of load_full_state_path, at the step that it says."""
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
        state=state,
        first_step=int(state.step),
        position=position,
        source=f"full state of {stored}",
        how="full_state",
        metadata=metadata,
        folder=str(stored),
        stored_step=stored.step,
    )


def restore_data_position(
    restored: RestoreResult, batches: TrainIterator, steps: int, log: Callable[[str], None] = print
) -> int:
    """Moves the data to a start, with exclusions; returns the last step.

    Args:
      steps: The number of steps of the run, if the data have as many.

    Raises:
      UserError: If the stored position counts in other data.
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
    return [rollback for rollback in restored.rollbacks if not batches.differences(rollback.data)]


def final_step(batches: TrainIterator, steps: int) -> int:
    """Returns the last step of the run, by `steps` or by the data."""
    num_steps = batches.num_steps
    return (steps if num_steps is None else min(steps, num_steps)) - 1


def scale_lines(
    restored: RestoreResult, batch_schedule: BatchSchedule, num_processes: int
) -> list[str]:
    """Returns what to say of a run that goes on with another number of processes or batch.

    Args:
      restored: Where it begins.
      batch_schedule: The batch size of each step.
      num_processes: Processes of the run now.
    """
    lines = []
    stored_count = restored.progress.get("num_processes", num_processes)
    if stored_count != num_processes:
        lines.append(
            f"Going on with {num_processes} processes: {stored_count} before, as the checkpoint of "
            f"step {restored.stored_step} says"
        )
    if restored.stored_step is None or "global_batch_size" not in restored.progress:
        return lines
    stored_size = restored.progress["global_batch_size"]
    batch_size = batch_schedule.batch_size(batch_schedule.at(restored.stored_step))
    if batch_size == stored_size:
        if lines:
            lines[0] += f"; global batch unchanged: {batch_size} sequences"
        return lines
    lines.append(
        f"WARNING: the global batch is now {batch_size} sequences, and was {stored_size} when the "
        f"checkpoint was saved. To keep it on any number of devices, set global_batch_size="
        f"{stored_size}."
    )
    return lines


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
    """Returns the message for a run without a step left.

    Args:
      steps: As configured.
      last_step: That of the run, by `steps` or by the data.
      num_epoch: As configured.
    """
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
    """Origin of a run, and what it has cost."""

    stats: TrainingStats
    ancestors: Sequence[Ancestor] = ()  # of `ancestors_of`
    first_step: int = 0  # of this start
    spent: TrainingCost = _NOTHING  # by the run itself before `first_step`

    @classmethod
    def of(cls, restored: RestoreResult, stats: TrainingStats) -> "Lineage":
        """Returns the lineage of a start: that of the run, or one that begins with its source."""
        if restored.how == "scratch":
            return cls(stats)
        metadata = restored.metadata
        if restored.how == "resume":
            return cls(
                stats,
                ancestors=metadata.get("lineage", ()),
                first_step=restored.first_step,
                spent=TrainingCost(**metadata["spent"]),
            )
        ancestors = ancestors_of(
            metadata,
            folder=restored.folder,
            step=restored.stored_step,
            how=restored.how,
            growth=restored.growth,
        )
        return cls(stats, ancestors=ancestors, first_step=restored.first_step)

    def spent_before(self, step: int) -> TrainingCost:
        """Returns this run's usage before a step, without its ancestors."""
        stats = self.stats
        tokens = stats.tokens_before(step) - stats.tokens_before(self.first_step)
        flops = stats.flops_before(step) - stats.flops_before(self.first_step)
        return TrainingCost(self.spent.tokens + tokens, self.spent.flops + flops)

    def progress(self, step: int) -> dict[str, float]:
        """Returns this run's usage up to a step, by event tag."""
        spent = self.spent_before(step + 1)
        return {"progress/tokens": spent.tokens, "progress/flops": spent.flops}

    def metadata(self, step: int) -> dict[str, Any]:
        """Returns what a checkpoint of `step` says about it: keys of its metadata."""
        return {"spent": self.spent_before(step + 1)._asdict(), "lineage": [*self.ancestors]}


def ancestors_of(
    metadata: Mapping[str, Any], folder: str, step: int | None, how: str, growth: Record | None
) -> list[Ancestor]:
    """Returns the ancestors of a new run, the checkpoint it starts from last.

    Args:
      metadata: Of that checkpoint.
      folder: Of that checkpoint.
      step: The step after which it was saved, if known.
      how: "parameters", "full_state" or "growth".
      growth: How the parameters grew, if they did.

    Returns:
      Rows with `run_name`, `folder`, `step`, `how`, `tokens`, `flops` and `growth`. `tokens` and
      `flops` include those of the ancestor's own ancestors; None if unknown.
    """
    ancestors = metadata.get("lineage", [])
    spent = metadata.get("spent")
    earlier = ancestors[-1] if ancestors else _NOTHING._asdict()
    tokens = None
    flops = None
    if spent is not None and earlier["tokens"] is not None and earlier["flops"] is not None:
        tokens = earlier["tokens"] + spent["tokens"]
        flops = earlier["flops"] + spent["flops"]
    newest = {
        "run_name": (metadata.get("config") or {}).get("run_name"),
        "folder": folder,
        "step": step,
        "how": how,
        "tokens": tokens,
        "flops": flops,
        "growth": growth,
    }
    return [*ancestors, newest]
