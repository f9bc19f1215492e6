"""The checkpoints of a run in progress, behind one object.

The work is done by four parts, which share the list of checkpoints on disk:

  listing.py    which checkpoints there are
  saving.py     writing them, with Orbax
  retention.py  which of them stay, and the removal of the others
  health.py     which of them are healthy: the target of a rollback

Checkpoints that damage or a broken state makes unusable are never deleted but renamed.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from etils import epath

from MaxText.checkpointing import checkpoint_files, checkpoint_reader, saving
from MaxText.checkpointing.checkpoint_files import CheckpointCorruptedError, StoredCheckpoint
from MaxText.checkpointing.health import HealthyCheckpoints
from MaxText.checkpointing.history import Rollback, RollbackRecord
from MaxText.checkpointing.listing import CheckpointListing
from MaxText.checkpointing.retention import Retention
from MaxText.config.training_sections import CheckpointingConfig
from MaxText.runtime.processes import all_processes_agree, all_succeed
from MaxText.storage.paths import LiteralPath
from MaxText.value_types import JsonObject, PyTree

_HEALTH_RETRY_SECONDS = 2.0  # after the list of healthy checkpoints could not be written


class RestoredCheckpoint(NamedTuple):
    """The verified contents of a checkpoint."""

    state: PyTree  # a train state like the abstract one that was asked for
    position: JsonObject | None  # of the data; None if none was saved
    metadata: JsonObject


class RestoreAttempt(NamedTuple):
    """What `try_restore` has got: a checkpoint, or the reason why there is none."""

    restored: RestoredCheckpoint | None
    reason: str  # why it cannot be restored; empty if it was


class CheckpointManager:
    """The checkpoints of one run: `<directory>/<step>/{items,iter,metadata}`.

    Folder <step> holds the state after step <step>, from 0; a run resumes at <step> + 1. A process
    killed at any moment leaves every earlier checkpoint intact. A run resumes from the newest
    complete checkpoint, healthy or not. It rolls back to the newest healthy one, which retention
    never deletes (see HealthyCheckpoints).

    Methods that are called collective must be called by all processes of the run alike.

    Attributes:
      directory: The folder of the checkpoints.
      log: Gets warnings; may be replaced at any time.
      health: Decides which states are healthy. Tell it what happens with `observe_steps` below,
        which also writes the list of healthy checkpoints, and its own `begin` and
        `observe_evaluation`.
    """

    def __init__(
        self,
        directory: epath.PathLike,
        config: CheckpointingConfig,
        healthy_after_steps: int = 0,
        log: Callable[[str], None] = print,
    ):
        """Creates nothing on disk. `healthy_after_steps` 0 promotes at once."""
        self.directory = LiteralPath(directory)
        self.log = log
        self._config = config
        self.health = HealthyCheckpoints(self.directory, healthy_after_steps, self._log)
        self._listing = CheckpointListing(self.directory, enabled=config.enable_checkpointing)
        self._retention = Retention(config, self._listing, self.health, self._log)
        self._saver = saving.CheckpointSaver(
            config, self._listing, self.health, self._retention, self._log
        )
        self._rollback_record = RollbackRecord(self.directory, self._log)
        self._stored: dict[int, StoredCheckpoint] = {}  # with the metadata that were read
        self._health_retry_at = 0.0  # time.monotonic() from which to write after a failure

    def _log(self, line: str) -> None:
        self.log(line)

    # --- Saving -----------------------------------------------------------------------------------

    def preload(self) -> None:
        """Imports Orbax in the background, hidden behind compilation."""
        if self._config.enable_checkpointing:
            saving.preload_orbax()

    def should_save(self, step: int, last_step: int) -> bool:
        """Returns whether a checkpoint is due after `step`; `last_step` is that of the run."""
        return saving.is_due(self._config, step, last_step)

    def save(
        self,
        step: int,
        state: PyTree,
        position: Mapping[str, Any] | None,
        metadata: Mapping[str, Any],
    ) -> bool:
        """Saves the state after step `step`, in the background if asynchronous.

        Collective. Waits for an earlier save, and returns once the state is copied, so the caller
        may donate it. One failed save is logged, here or by the next call. The second in a row
        raises UserError, and so does one that leaves the run without any checkpoint.

        Args:
          state: A TrainState, or another dataclass of arrays with a field `step`.
          position: The data position of the next step, if there is any: a JSON object.
          metadata: Of `compatibility.checkpoint_metadata`, with what `Loop.save` adds: a JSON
            object.

        Returns:
          False if the step is on disk already, could not be written, or checkpointing is disabled.
        """
        if not self._config.enable_checkpointing:
            return False
        assert int(state.step) == step + 1, (int(state.step), step)
        self._stored.pop(step, None)
        return self._saver.save(step, state, position or {}, metadata)

    def wait(self) -> None:
        """Blocks until the background save completes; UserError if it failed."""
        self._saver.wait(is_last=True)

    # --- Health -----------------------------------------------------------------------------------

    def observe_steps(self, last_step: int, last_skipped: int) -> None:
        """Observes the steps up to `last_step` and promotes checkpoints. Collective.

        Args:
          last_skipped: See `HealthyCheckpoints.observe_steps`.
        """
        self.health.observe_steps(last_step, last_skipped)
        if not self._config.enable_checkpointing:
            return
        if time.monotonic() < self._health_retry_at:
            return
        if not self.health.try_write():
            self._health_retry_at = time.monotonic() + _HEALTH_RETRY_SECONDS

    def promote_final(self, last_step: int, problems: Sequence[str] = ()) -> bool:
        """Promotes the final checkpoint if the final state is healthy. Collective.

        Call it when a run ends on purpose, as no later step can then show that the state was
        healthy. Waits for the save.

        Args:
          last_step: The newest step, whose state the run ends with.
          problems: What speaks against the final state besides skipped steps; none if empty.

        Returns:
          Whether the state is healthy.

        Raises:
          UserError: If the save failed, as there is no later one.
        """
        if not self.health.is_newest_healthy(problems):
            return False
        self._saver.wait(is_last=True)
        if self._listing.is_finalized(last_step):
            self.health.promote(last_step)
            self._retention.delete_old()
        return True

    def last_healthy(self, before_step: int | None = None) -> int | None:
        """Waits for the save, then returns the newest healthy step.

        Args:
          before_step: Considers earlier steps only.
        """
        self._saver.wait()
        healthy_steps = self.health.steps & set(self.steps())
        if before_step is not None:
            healthy_steps = {step for step in healthy_steps if step < before_step}
        return max(healthy_steps, default=None)

    # --- Rollbacks --------------------------------------------------------------------------------

    def roll_back_to(self, step: int) -> None:
        """Deletes the checkpoints after `step`. Collective; raises like `save`."""
        self._saver.wait()
        self._retention.quarantine_corrupted()
        self._retention.delete_after(step)

    def set_aside(self, is_broken: Callable[[int], bool]) -> list[int]:
        """Renames checkpoints of broken states to `<step>.unhealthy`; returns their steps.

        No resume and no rollback uses them; they stay on disk to be inspected or renamed back.
        Collective; raises like `save`.
        """
        self._saver.wait()
        listed = all_succeed("listing checkpoints", self.steps)
        broken_steps = [step for step in listed if is_broken(step)]
        self._retention.set_aside(broken_steps, is_broken)
        return broken_steps

    def rollbacks(self) -> tuple[Rollback, ...]:
        """Returns the rollbacks in order; UserError if the file cannot be read."""
        if not self._config.enable_checkpointing:
            return ()
        return self._rollback_record.rollbacks()

    def record_rollback(self, rollback: Rollback) -> None:
        """Records a rollback. Collective; call it after `roll_back_to`.

        Otherwise a killed run could resume from the later checkpoints despite the record.
        """
        if self._config.enable_checkpointing:
            self._rollback_record.add(rollback)

    # --- Restoring --------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Lists the steps with a complete checkpoint, ascending; none if disabled."""
        return self._listing.steps()

    def steps_to_resume(self) -> list[int]:
        """Returns the known steps in the order of resuming; lists them once.

        Includes steps that have lost pieces; see CheckpointListing.
        """
        return self._listing.steps_to_resume()

    def latest_step(self) -> int | None:
        """Returns the newest step with a complete checkpoint."""
        self._listing.steps_to_resume()
        return self._listing.newest()

    def stored(self, step: int) -> StoredCheckpoint:
        """Returns the checkpoint of a step, the same object each time: it caches metadata."""
        items = self.directory / str(step) / checkpoint_files.ITEMS
        return self._stored.setdefault(step, StoredCheckpoint(items, step))

    def restore(
        self,
        step: int,
        abstract_state: PyTree,
        config_flat: Mapping[str, Any] | None = None,
        log: Callable[[str], None] = print,
    ) -> RestoredCheckpoint:
        """Restores the checkpoint of a step, verified.

        Args:
          abstract_state: A train state of `jax.ShapeDtypeStruct` leaves, with shardings.
          config_flat: The run's configuration by key, to explain a mismatch.
          log: Gets a line about arrays that are cast.

        Raises:
          UserError: For other names or shapes of arrays.
          CheckpointCorruptedError: For damage.
        """
        stored = self.stored(step)
        metadata = stored.metadata
        path = stored.json_path(checkpoint_files.METADATA)
        if metadata.checksums is None:
            raise CheckpointCorruptedError(f"{path}: no metadata")
        # The checksums prove that the arrays and the data position are those that were saved with
        # these metadata, so their step is that of the state, whatever the folder's name says.
        if metadata.step != step:
            raise CheckpointCorruptedError(
                f"{path}: belongs to the checkpoint of step {metadata.step}"
            )
        position = stored.position()
        reader = checkpoint_reader.CheckpointReader(
            stored, config_flat or {}, log, True, self._config.checkpoint_storage
        )
        return RestoredCheckpoint(reader.restore_state(abstract_state), position, metadata.values)

    def try_restore(self, step: int, *arguments: Any, **keywords: Any) -> RestoreAttempt:
        """Does what `restore` does, or returns the reason why not. Collective.

        A checkpoint that any process cannot read is marked as corrupted on all.
        """
        restored = None
        reason = "another process could not read it"
        try:
            restored = self.restore(step, *arguments, **keywords)
        except CheckpointCorruptedError as error:
            reason = str(error)
            if missing := self.stored(step).missing_items():
                reason = f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing"
        if all_processes_agree(restored is not None):
            return RestoreAttempt(restored, "")
        self.mark_corrupted(step)
        return RestoreAttempt(None, reason)

    def resume_from(self, step: int) -> None:
        """Records the resumed step, and lets its checkpoint become healthy.

        Later checkpoints stay until the next save.
        """
        self._retention.resume_from(step)
        self.health.add_candidate(step)

    def mark_corrupted(self, step: int) -> None:
        """Marks a damaged checkpoint, to be renamed to `<step>.unreadable` by the next save."""
        self._retention.mark_corrupted(step)
