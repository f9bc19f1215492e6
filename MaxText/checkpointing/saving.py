"""Saves checkpoints with Orbax, in the background, and survives a failed save.

A save is complete when Orbax has renamed its folder (in an object store: has written a marker),
which it does after `verified_save` has found every file. A process killed at any moment before that
leaves every earlier checkpoint intact.

Retention is ours, not that of Orbax's `training.Checkpointer`. That one keeps a second list of
checkpoints, for which it reads a file of each at start (`lightweight_initialize`, which spares the
reads, fails in Orbax 0.12.8: "year 0 is out of range"). And it deletes in place: killed in between,
it leaves a checkpoint that looks complete.
"""

import contextlib
import importlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import jax

from MaxText.checkpointing import checkpoint_files, checkpoint_reader
from MaxText.checkpointing.checksums import array_checksums
from MaxText.checkpointing.health import HealthyCheckpoints
from MaxText.checkpointing.listing import CheckpointListing
from MaxText.checkpointing.retention import Retention
from MaxText.config.training_sections import CheckpointingConfig
from MaxText.errors import UserError
from MaxText.runtime.processes import all_succeed
from MaxText.storage.run_folder import check_writable
from MaxText.value_types import PyTree

if TYPE_CHECKING:
    import orbax.checkpoint.experimental.v1 as ocp

_WARNING_SECONDS = 60.0  # between warnings that a save is blocked on storage


def preload_orbax() -> None:
    """Imports Orbax in the background (0.3 s), hidden behind compilation."""
    threading.Thread(
        target=importlib.import_module, args=("orbax.checkpoint.experimental.v1",), daemon=True
    ).start()


def is_due(config: CheckpointingConfig, step: int, last_step: int) -> bool:
    """Returns whether the configuration asks for a checkpoint after `step`.

    Args:
      last_step: The last step of the run.
    """
    if not config.enable_checkpointing:
        return False
    if step == last_step and config.save_checkpoint_on_completion:
        return True
    if step == 0:
        return config.save_checkpoint_on_start
    return step % config.checkpoint_period == 0


class CheckpointSaver:
    """Writes one checkpoint after another, and then deletes those that retention does not keep.

    One failed save is logged. The second in a row raises UserError, and so does one that leaves the
    run without any checkpoint. A save in the background fails in the next call of `wait`.
    """

    def __init__(
        self,
        config: CheckpointingConfig,
        listing: CheckpointListing,
        health: HealthyCheckpoints,
        retention: Retention,
        log: Callable[[str], None],
    ):
        self._config = config
        self._directory = listing.directory
        self._listing = listing
        self._health = health
        self._retention = retention
        self._log = log
        self._context: ocp.Context | None = None  # created by the first save
        self._saving: int | None = None  # step being written
        self._completion: Future[str] | None = None  # of that save: see _finish
        self._old_steps: list[int] = []  # that are deleted after that save
        self._num_failures = 0  # consecutive failed saves

    def save(
        self, step: int, state: PyTree, position: Mapping[str, Any], metadata: Mapping[str, Any]
    ) -> bool:
        """Saves the state after step `step`; see CheckpointManager.save. Collective.

        Returns False if the step is on disk already or could not be written.
        """
        self.wait()
        import orbax.checkpoint.experimental.v1 as ocp

        items = checkpoint_reader.as_dict(state)
        position = dict(position)
        metadata = checkpoint_files.with_digests(metadata, position, array_checksums(items), step)
        if self._config.async_checkpointing and jax.default_backend() == "cpu":
            # Orbax reads CPU arrays in place. The runtime refuses to donate memory that is being
            # read, so the next step would block until the file is written (0.9 s, against 0.02 s to
            # copy 240 MB).
            items = jax.tree.map(lambda x: x.copy(), items)
        self._saving = step
        try:
            # At the first save since a resume or a rollback, which may never come.
            self._retention.remove_pending()
            if not all_succeed("checking the checkpoint folder", lambda: self._can_write(step)):
                self._saving = None
                return False
            self._health.begin_save(step)
            # Before anything is deleted. A save is worth more than the space of old checkpoints.
            is_deletion_safe = self._health.try_write()
            with self._open_context():
                response = ocp.save_checkpointables_async(
                    self._directory / str(step),
                    {
                        checkpoint_files.ITEMS: items,
                        checkpoint_files.POSITION: position,
                        checkpoint_files.METADATA: metadata,
                    },
                    overwrite=True,  # what is left of a checkpoint that lost pieces
                )
        except Exception as error:  # Orbax and storage clients raise anything
            self._fail(error)
            return False
        self._old_steps = self._retention.old_steps(step)
        background = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._completion = background.submit(
            self._finish, response, self._old_steps, is_deletion_safe=is_deletion_safe
        )
        background.shutdown(wait=False)
        if not self._config.async_checkpointing:
            self.wait()
            return step in self._listing.finalized
        return True

    def wait(self, *, is_last: bool = False) -> None:
        """Waits for the save in progress.

        Args:
          is_last: Whether no later save can make up for this one, so that its failure is raised.

        Raises:
          UserError: As the class documents.
        """
        if self._completion is None:
            return
        assert self._saving is not None
        done = threading.Event()
        threading.Thread(target=self._warn_until, args=(done,), daemon=True).start()
        try:
            try:
                problem = self._completion.result()
            finally:
                done.set()
        except Exception as error:
            if not self._listing.is_finalized(self._saving):
                self._fail(error, is_last=is_last)
                return
            problem = (
                f"the save of step {self._saving} failed after its checkpoint was complete: {error}"
            )
        self._complete()
        if problem:
            self._retention.log_undeleted(problem)

    def _finish(
        self,
        response: "ocp.AsyncResponse[None]",
        old_steps: Sequence[int],
        *,
        is_deletion_safe: bool,
    ) -> str:
        """Waits for Orbax, and deletes old checkpoints once there is a newer one. In a thread.

        Args:
          response: Of Orbax; its errors are raised.
          old_steps: The checkpoints to delete.
          is_deletion_safe: Whether the marks of healthy checkpoints are on disk.

        Returns:
          Why old checkpoints were not deleted, which does not undo the save; empty if they were.
        """
        response.result()
        if not old_steps:
            return ""
        reason = "the list of healthy checkpoints could not be written"
        if is_deletion_safe:
            try:
                self._retention.delete(old_steps)
                return ""
            except Exception as error:  # storage clients raise anything
                reason = str(error)
        return f"cannot delete old checkpoints after saving step {self._saving}: {reason}"

    def _warn_until(self, done: threading.Event) -> None:
        """Logs a warning once a minute until `done` is set; runs in a thread."""
        start = time.monotonic()
        while not done.wait(_WARNING_SECONDS):
            self._log(
                f"WARNING: blocked for {time.monotonic() - start:.0f} s on writing the checkpoint "
                f"of step {self._saving} to {self._directory}; retrying. The process exits after "
                "heartbeat_timeout; rerun the command to resume from the newest checkpoint."
            )

    def _complete(self) -> None:
        """Records that the save in progress succeeded."""
        assert self._saving is not None
        self._listing.finalized.add(self._saving)
        self._retention.forget(self._old_steps)
        self._saving = None
        self._completion = None
        self._num_failures = 0
        self._health.try_write()

    def _fail(self, error: Exception, *, is_last: bool = False) -> None:
        """Logs a failed save, or raises UserError as the class documents."""
        step = self._saving
        self._saving = None
        self._completion = None
        self._num_failures += 1
        self._health.forget(lambda saved: saved == step)
        with contextlib.suppress(OSError):  # if storage fails, the last listing counts
            self._retention.remove_partial()
            self._listing.steps()
        newest = self._listing.newest()
        on_disk = "no complete checkpoint" if newest is None else f"the checkpoint of step {newest}"
        failure = (
            f"the checkpoint of step {step} could not be written to {self._directory}: {error}\n"
            f"  {on_disk} is on disk"
        )
        if is_last or self._num_failures >= 2 or newest is None:
            raise UserError(
                f"{failure}. Free space or fix the folder (base_output_directory), then rerun the "
                "command with the same run_name."
            ) from error
        self._log(f"WARNING: {failure}. Training continues; retrying at the next save.")

    def _can_write(self, step: int) -> bool:
        """Returns whether the step is absent; OSError if it cannot be written."""
        # Checks one step only: listing would cost requests for every checkpoint.
        if self._listing.ask_finalized(step):
            return False
        self._listing.list_once()  # for retention
        # If Orbax cannot create its folder, its threads block the program for minutes.
        check_writable(self._directory)
        return True

    def _open_context(self) -> "ocp.Context":
        """Returns Orbax's options of a save, created when they are first needed."""
        if self._context is None:
            from MaxText.checkpointing import verified_save

            checkpoint_reader.silence_threads()
            self._retention.remove_partial()
            self._context = verified_save.save_context(self._config.checkpoint_storage)
        return self._context
