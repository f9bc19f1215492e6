"""Which checkpoints stay on disk, and the removal of the others.

Checkpoints go for four reasons: they are older than retention keeps, they are of a past that a
rollback or a resume from an earlier step abandoned, they are damaged or of a broken state (renamed,
so that a person can look at them), or a killed save left them unfinished.
"""

import contextlib
import time
from collections.abc import Callable, Collection, Sequence

import jax

from MaxText.checkpointing import checkpoint_files
from MaxText.checkpointing.health import HealthyCheckpoints
from MaxText.checkpointing.listing import CheckpointListing
from MaxText.config.training_sections import CheckpointingConfig
from MaxText.runtime.processes import all_succeed
from MaxText.storage.paths import COMMIT_MARK, is_object_store_path

_ABANDONED = ".abandoned"
# Suffixes of checkpoints that are kept for inspection and never restored.
UNREADABLE = "unreadable"
UNHEALTHY = "unhealthy"


class Retention:
    """Decides which checkpoints a run keeps, and removes the others.

    A process killed at any moment leaves the list of healthy checkpoints in healthy.json usable:

    - before old checkpoints are deleted, the marks of all that stay are in the file;
    - before a checkpoint of an abandoned past or of a broken state is deleted or renamed, its mark
      goes from the file, because a killed run must not roll back to one of them.
    """

    def __init__(
        self,
        config: CheckpointingConfig,
        listing: CheckpointListing,
        health: HealthyCheckpoints,
        log: Callable[[str], None],
    ):
        self._config = config
        self._listing = listing
        self._health = health
        self._log = log
        # What the next save removes: reading alone must not change the disk.
        self._corrupted: set[int] = set()
        self._resumed_from: int | None = None

    # --- Old checkpoints --------------------------------------------------------------------------

    def steps_to_keep(self, steps: Sequence[int]) -> set[int]:
        """Returns which of the checkpoints `steps` (ascending) to keep.

        They are the newest `max_to_keep`, every `keep_period`-th step, the newest healthy one and
        the next that can become healthy.
        """
        config = self._config
        if config.max_to_keep is None:
            return set(steps)
        kept_steps = {*steps[-config.max_to_keep :], *self._health.steps_to_preserve(steps)}
        if config.keep_period is not None:
            kept_steps |= {step for step in steps if step % config.keep_period == 0}
        return kept_steps

    def old_steps(self, saved_step: int | None = None) -> list[int]:
        """Returns the steps of checkpoints that are not kept.

        Args:
          saved_step: The step of a save in progress, which counts as the newest.
        """
        steps = self._listing.finalized | ({saved_step} if saved_step is not None else set())
        return sorted(steps - self.steps_to_keep(sorted(steps)))

    def forget(self, old_steps: Collection[int]) -> None:
        """Removes checkpoints from the list, and marks of those that are not in it (any more).

        Processes must do so alike, as they choose the target of a rollback each by itself.
        """
        self._listing.discard(old_steps)
        self._health.forget(lambda healthy: healthy not in self._listing.finalized)

    def delete(self, steps: Sequence[int]) -> None:
        """Deletes checkpoints, on process 0. Changes no list, so that a thread may call it."""
        if jax.process_index() == 0:
            for step in steps:
                self._delete(step)

    def delete_old(self) -> None:
        """Deletes what retention does not keep, between saves.

        A failure is logged: the next save deletes them.
        """
        old_steps = self.old_steps()
        is_written = self._health.try_write()
        self.forget(old_steps)
        try:
            if is_written:
                self.delete(old_steps)
        except Exception as error:  # storage clients raise anything
            self.log_undeleted(f"cannot delete old checkpoints: {error}")
        self._health.try_write()

    def log_undeleted(self, problem: str) -> None:
        """Logs why old checkpoints are still on disk, and lists them for the next save."""
        self._log(f"WARNING: {problem}. Old checkpoints are deleted after the next save.")
        with contextlib.suppress(OSError):
            self._listing.steps()

    # --- Checkpoints of an abandoned past ---------------------------------------------------------

    def resume_from(self, step: int) -> None:
        """Records the resumed step. Later checkpoints stay until the next save."""
        self._resumed_from = step

    def mark_corrupted(self, step: int) -> None:
        """Marks a damaged checkpoint, to be renamed to `<step>.unreadable` by the next save.

        Otherwise retention would count it as the newest and delete healthy ones for it.
        """
        self._corrupted.add(step)
        self._health.forget(lambda healthy: healthy == step)

    def remove_pending(self) -> None:
        """Removes what `mark_corrupted` and `resume_from` left to the first save. Collective."""
        self.quarantine_corrupted()
        if self._resumed_from is not None:
            self.delete_after(self._resumed_from)

    def quarantine_corrupted(self) -> None:
        """Renames the checkpoints marked as corrupted. Collective."""
        if not self._corrupted:
            return
        self._health.try_write()
        self._rename(self._corrupted, UNREADABLE)
        self._corrupted.clear()

    def set_aside(self, steps: Collection[int], is_broken: Callable[[int], bool]) -> None:
        """Renames the checkpoints `steps` to `<step>.unhealthy`. Collective.

        Args:
          is_broken: Whether a step is one of a broken state; of all steps, not only those on disk.
        """
        self._health.forget(is_broken)
        if not steps:
            return
        # Before the renaming: a process killed in between must not roll back to one of these.
        self._health.try_write()
        self._rename(steps, UNHEALTHY)

    def _rename(self, steps: Collection[int], suffix: str) -> None:
        """Renames checkpoints to `<step>.<suffix>`. Collective."""
        directory = self._listing.directory

        def rename() -> None:
            if jax.process_index() != 0:
                return
            for step in sorted(steps):
                target = directory / f"{step}.{suffix}"
                if target.exists() and suffix == UNHEALTHY:
                    target.rmtree()  # a run that breaks again and again must not fill the disk
                elif target.exists():
                    target = directory / f"{step}.{suffix}-{int(time.time())}"
                (directory / str(step)).rename(target)

        all_succeed(f"renaming {suffix} checkpoints", rename)
        self._listing.discard(steps)

    def delete_after(self, last_step: int) -> None:
        """Deletes the checkpoints after `last_step`, and leftovers of killed saves. Collective."""
        listed = all_succeed("listing newer checkpoints", self._listing.steps)
        newer_steps = [step for step in listed if step > last_step]
        self._health.forget(lambda step: step > last_step)
        # Before the deletion: a process killed in between must not resume from one of these.
        self._health.try_write()

        def remove() -> None:
            self.remove_partial()
            self.delete(newer_steps)

        all_succeed("deleting newer checkpoints", remove)
        self._listing.finalized -= set(newer_steps)
        self._resumed_from = None

    def _delete(self, step: int) -> None:
        """Deletes a checkpoint. It is incomplete at once, for the deletion takes time."""
        folder = self._listing.directory / str(step)
        if is_object_store_path(folder):
            (folder / COMMIT_MARK).unlink(missing_ok=True)
        else:
            folder = folder.rename(self._listing.directory / f"{step}{_ABANDONED}")
        folder.rmtree()

    def remove_partial(self) -> None:
        """Deletes leftovers of killed or failed saves and deletions, on process 0."""
        if jax.process_index() != 0:
            return
        for folder in checkpoint_files.list_dir(self._listing.directory):
            if self._is_partial(folder.name):
                with contextlib.suppress(OSError):  # threads of a failed save may still write there
                    folder.rmtree()

    def _is_partial(self, name: str) -> bool:
        """Returns whether a name in the folder is that of an unfinished save or deletion."""
        if is_object_store_path(self._listing.directory) and name.isdigit():
            return not self._listing.ask_finalized(int(name))
        return ".orbax-checkpoint-tmp" in name or name.endswith(_ABANDONED)
