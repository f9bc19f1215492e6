"""Saves checkpoints with Orbax, in the background, and survives a failed save.

A save is complete when Orbax has renamed its folder (in an object store: has written a marker),
which it does after `verified_save` has found every file. A process killed at any moment before that
leaves every earlier checkpoint intact.
"""

import contextlib
import importlib
import threading
import time
from collections.abc import Callable, Mapping
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
from MaxText.storage.paths import is_object_store_path
from MaxText.storage.run_folder import check_writable
from MaxText.value_types import PyTree

if TYPE_CHECKING:
    import orbax.checkpoint as ocp

_WARNING_SECONDS = 60.0  # between warnings that a save is blocked on storage


def preload_orbax() -> None:
    """Imports Orbax in the background (0.3 s), hidden behind compilation."""
    threading.Thread(
        target=importlib.import_module, args=("orbax.checkpoint",), daemon=True
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
    """Writes one checkpoint after another; owns Orbax's manager.

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
        self._orbax_manager: ocp.CheckpointManager | None = None  # created by the first save
        self._saving: int | None = None  # step being written
        self._num_failures = 0  # consecutive failed saves

    def save(
        self, step: int, state: PyTree, position: Mapping[str, Any], metadata: Mapping[str, Any]
    ) -> bool:
        """Saves the state after step `step`; see CheckpointManager.save. Collective.

        Returns False if the step is on disk already or could not be written.
        """
        self.wait()
        import orbax.checkpoint as ocp

        storage = self._config.checkpoint_storage
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
            if self._retention.remove_pending():
                self.close_orbax()  # it would keep listing the deleted checkpoints
            if not all_succeed("checking the checkpoint folder", lambda: self._can_write(step)):
                self._saving = None
                return False
            self._health.add_candidate(step)
            manager = self._open_orbax()
            is_saved = manager.save(
                step,
                args=ocp.args.Composite(
                    items=ocp.args.PyTreeSave(
                        items, ocdbt_target_data_file_size=storage.target_data_file_size_bytes
                    ),
                    iter=ocp.args.JsonSave(position),
                    metadata=ocp.args.JsonSave(metadata),
                ),
                force=True,  # the caller has decided that a save is due
            )
        except Exception as error:  # Orbax and storage clients raise anything
            self._fail(error)
            return False
        # By now Orbax has decided which steps it deletes once this save completes.
        remaining_steps = set(manager.all_steps())
        self._listing.finalized &= remaining_steps
        self._health.forget(lambda healthy: healthy not in remaining_steps)
        if not self._config.async_checkpointing:
            self._complete()
        return is_saved

    def wait(self, *, is_last: bool = False) -> None:
        """Waits for the save in progress.

        Args:
          is_last: Whether no later save can make up for this one, so that its failure is raised.

        Raises:
          UserError: As the class documents.
        """
        if self._saving is None:
            return
        done = threading.Event()
        threading.Thread(target=self._warn_until, args=(done,), daemon=True).start()
        try:
            try:
                self._open_orbax().wait_until_finished()
            finally:
                done.set()
        except Exception as error:
            if not self._listing.is_finalized(self._saving):
                self._fail(error, is_last=is_last)
                return
            if jax.process_count() == 1:
                self._orbax_manager = None  # recreating it is collective
            self._log(
                f"WARNING: cannot delete old checkpoints after saving step {self._saving}: "
                f"{error}. Retrying after the next save."
            )
        self._complete()

    def delete_old(self) -> None:
        """Deletes the checkpoints that retention does not keep, between saves. Collective."""
        if self._orbax_manager is not None:
            self._retention.delete_old(self._orbax_manager)

    def close_orbax(self) -> None:
        """Stops Orbax's threads and drops its list of checkpoints; the next save rereads it."""
        if self._orbax_manager is not None:
            manager = self._orbax_manager
            self._orbax_manager = None
            manager.close()

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
        if self._saving is not None:
            self._listing.finalized.add(self._saving)
        self._saving = None
        self._num_failures = 0
        self._health.write_if_changed(self._listing.ask_finalized)

    def _fail(self, error: Exception, *, is_last: bool = False) -> None:
        """Logs a failed save, or raises UserError as the class documents."""
        step = self._saving
        self._saving = None
        self._num_failures += 1
        self._health.forget(lambda saved: saved == step)
        # Orbax already lists the failed step; a new manager rereads the disk.
        self._orbax_manager = None
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
        # If Orbax cannot create its folder, its threads block the program for minutes.
        check_writable(self._directory)
        return True

    def _open_orbax(self) -> "ocp.CheckpointManager":
        """Returns Orbax's manager, created when it is first needed. Collective."""
        if self._orbax_manager is None:
            import orbax.checkpoint as ocp

            from MaxText.checkpointing import verified_save

            checkpoint_reader.silence_threads()
            if is_object_store_path(self._directory):  # on local disks Orbax does this
                self._retention.remove_partial()
            storage = self._config.checkpoint_storage
            handlers = verified_save.handler_registry(
                checkpoint_files.ITEMS,
                (checkpoint_files.POSITION, checkpoint_files.METADATA),
                use_ocdbt=storage.use_ocdbt,
                use_zarr3=storage.use_zarr3,
                save_concurrent_gb=storage.concurrent_gb,
                save_device_host_concurrent_gb=storage.device_host_concurrent_gb,
            )
            self._orbax_manager = ocp.CheckpointManager(
                self._directory,
                handler_registry=handlers,
                options=ocp.CheckpointManagerOptions(
                    preservation_policy=self._retention,
                    enable_async_checkpointing=self._config.async_checkpointing,
                    async_options=ocp.options.AsyncOptions(timeout_secs=storage.timeout),
                    lightweight_initialize=True,  # else reads metadata of every step
                ),
            )
        return self._orbax_manager
