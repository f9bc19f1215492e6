"""Saves, retains and restores the checkpoints of a run in progress."""

import contextlib
import importlib
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
from etils import epath

from MaxText.checkpointing import checkpoint_files, checkpoint_reader, history
from MaxText.checkpointing.checkpoint_files import CheckpointCorruptedError, StoredCheckpoint
from MaxText.checkpointing.checksums import array_checksums
from MaxText.checkpointing.history import HealthyCheckpoints, Rollback
from MaxText.config.training_sections import CheckpointingConfig
from MaxText.errors import UserError
from MaxText.runtime.processes import all_processes_agree, all_succeed
from MaxText.storage.paths import COMMIT_MARK, LiteralPath, is_object_store_path
from MaxText.storage.run_folder import check_writable

_ABANDONED = ".abandoned"
# Suffixes of checkpoints that are kept for inspection and never restored.
_UNREADABLE = "unreadable"
_UNHEALTHY = "unhealthy"
_CHECK_SECONDS = 2.0  # between checks for completion of an asynchronous save
_WARNING_SECONDS = 60.0  # between warnings that a save is blocked on storage


class CheckpointManager:
    """The checkpoints of one run: `<directory>/<step>/{items,iter,metadata}`.

    Folder <step> holds the state after step <step>, from 0; a run resumes at <step> + 1. A process
    killed at any moment leaves every earlier checkpoint intact. A run resumes from the newest
    complete checkpoint, healthy or not. It rolls back to the newest healthy one, which retention
    never deletes (see HealthyCheckpoints).
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
        self._healthy = HealthyCheckpoints(
            self.directory, healthy_after_steps, lambda line: self.log(line)
        )
        self._orbax_manager: Any = None
        self._saving: int | None = None  # step being written
        self._failures = 0  # consecutive failed saves
        # Complete checkpoints on disk, as far as known: storage is not asked about them again.
        self._finalized: set[int] = set()
        self._incomplete: set[int] = set()  # steps on disk that have lost pieces
        self._is_listed = False
        self._stored: dict[int, StoredCheckpoint] = {}  # with the metadata that were read
        self._corrupted: set[int] = set()
        self._resumed_from: int | None = None
        self._rollbacks: tuple[Rollback, ...] | None = None  # None until the file is read
        self._checked = -math.inf

    def preload(self) -> None:
        """Imports Orbax in the background (0.3 s), hidden behind compilation."""
        if self._config.enable_checkpointing:
            name = "orbax.checkpoint"
            threading.Thread(target=importlib.import_module, args=(name,), daemon=True).start()

    def should_save(self, step: int, last_step: int) -> bool:
        config = self._config
        if not config.enable_checkpointing:
            return False
        if step == last_step and config.save_checkpoint_on_completion:
            return True
        if step == 0:
            return config.save_checkpoint_on_start
        return step % config.checkpoint_period == 0

    def save(
        self, step: int, state: Any, position: Mapping[str, Any] | None, metadata: Mapping[str, Any]
    ) -> bool:
        """Saves the state after step `step`, in the background if asynchronous.

        Collective. Waits for an earlier save, and returns once the state is copied, so the caller
        may donate it. One failed save is logged, here or by the next call. The second in a row
        raises UserError, and so does one that leaves the run without any checkpoint. Returns False
        if the step is on disk already, could not be written, or checkpointing is disabled.
        """
        if not self._config.enable_checkpointing:
            return False
        assert int(state.step) == step + 1, (int(state.step), step)
        self._finish()
        import orbax.checkpoint as ocp

        storage = self._config.checkpoint_storage
        items = checkpoint_reader.as_dict(state)
        stored_position = dict(position or {})
        metadata = checkpoint_files.with_digests(
            metadata, stored_position, array_checksums(items), step
        )
        if self._config.async_checkpointing and jax.default_backend() == "cpu":
            # Orbax reads CPU arrays in place. The runtime refuses to donate memory that is being
            # read, so the next step would block until the file is written (0.9 s, against 0.02 s to
            # copy 240 MB).
            items = jax.tree.map(lambda x: x.copy(), items)
        self._saving = step
        try:
            # Of a resume, at its first save, which may never come.
            self._quarantine_corrupted()
            if self._resumed_from is not None:
                self._delete_after(self._resumed_from)
                self._resumed_from = None
            if not all_succeed("checking the checkpoint folder", lambda: self._can_write(step)):
                self._saving = None
                return False
            self._healthy.watch(step)
            self._stored.pop(step, None)
            manager = self._manager()
            saved = manager.save(
                step,
                args=ocp.args.Composite(
                    items=ocp.args.PyTreeSave(
                        items, ocdbt_target_data_file_size=storage.target_data_file_size_bytes
                    ),
                    iter=ocp.args.JsonSave(stored_position),
                    metadata=ocp.args.JsonSave(metadata),
                ),
                force=True,  # should_save already decided
            )
        except Exception as error:  # Orbax and storage clients raise anything
            self._fail(error)
            return False
        # By now Orbax has decided which steps it deletes once this save completes.
        left = set(manager.all_steps())
        self._finalized &= left
        self._healthy.forget(lambda healthy: healthy not in left)
        if not self._config.async_checkpointing:
            self._complete()
        return saved

    def wait(self) -> None:
        """Blocks until the background save completes; UserError if it failed."""
        self._finish(is_last=True)

    def close(self) -> None:
        """Waits and stops Orbax's threads; UserError if the last save failed."""
        try:
            self.wait()
        finally:
            self._close_manager()

    def _finish(self, *, is_last: bool = False) -> None:
        """Waits for the save in progress; fails like `save`."""
        if self._saving is None:
            return
        done = threading.Event()
        threading.Thread(target=self._warn_until, args=(done,), daemon=True).start()
        try:
            try:
                self._manager().wait_until_finished()
            finally:
                done.set()
        except Exception as error:
            if not self._is_finalized(self._saving):
                self._fail(error, is_last=is_last)
                return
            if jax.process_count() == 1:
                self._orbax_manager = None  # recreating it is collective
            self.log(
                f"WARNING: cannot delete old checkpoints after saving step {self._saving}: "
                f"{error}. Retrying after the next save."
            )
        self._complete()

    def _warn_until(self, done: threading.Event) -> None:
        began = time.monotonic()
        while not done.wait(_WARNING_SECONDS):
            self.log(
                f"WARNING: blocked for {time.monotonic() - began:.0f} s on writing the checkpoint "
                f"of step {self._saving} to {self.directory}; retrying. The process exits after "
                "heartbeat_timeout; rerun the command to resume from the newest checkpoint."
            )

    def _complete(self) -> None:
        if self._saving is not None:
            self._finalized.add(self._saving)
        self._saving = None
        self._failures = 0
        self._write_healthy()

    def _is_finalized(self, step: int) -> bool:
        with contextlib.suppress(OSError):
            return self._ask_finalized(step)
        return False

    def _ask_finalized(self, step: int) -> bool:
        return step in self._finalized or checkpoint_files.is_finalized(self.directory / str(step))

    def _fail(self, error: Exception, *, is_last: bool = False) -> None:
        """Logs a failed save, or raises UserError as `save` documents."""
        step = self._saving
        self._saving = None
        self._failures += 1
        self._healthy.forget(lambda saved: saved == step)
        # Orbax already lists the failed step; a new manager rereads the disk.
        self._orbax_manager = None
        with contextlib.suppress(OSError):  # if storage fails, the last listing counts
            self._remove_partial()
            self.steps()
        newest = max(self._finalized, default=None)
        kept = "no complete checkpoint" if newest is None else f"the checkpoint of step {newest}"
        failure = (
            f"the checkpoint of step {step} could not be written to {self.directory}: {error}\n"
            f"  {kept} is on disk"
        )
        if is_last or self._failures >= 2 or newest is None:
            raise UserError(
                f"{failure}. Free space or fix the folder (base_output_directory), then rerun the "
                "command with the same run_name."
            ) from error
        self.log(f"WARNING: {failure}. Training continues; retrying at the next save.")

    def update_health(self, step: int, healthy: bool) -> None:
        """Records whether step `step` was healthy. Collective; call in order."""
        if not self._config.enable_checkpointing:
            return
        self._healthy.update(step, healthy)
        # A checkpoint may be promoted before its save completes; check again later, do not block.
        if self._healthy.changed and time.monotonic() > self._checked + _CHECK_SECONDS:
            self._checked = time.monotonic()
            self._write_healthy()

    def promote(self, step: int) -> None:
        """Waits for the save, then marks its checkpoint healthy. Collective.

        Called at the end of a run: raises UserError if the save failed, as there is no later one.
        """
        self._finish(is_last=True)
        if self._is_finalized(step):
            self._healthy.promote(step)
            self._write_healthy()
            self._delete_old()

    def last_healthy(self, before: int | None = None) -> int | None:
        """Waits for the save, then returns the newest healthy step."""
        self._finish()
        healthy = self._healthy.steps & set(self.steps())
        return max((step for step in healthy if before is None or step < before), default=None)

    def roll_back_to(self, step: int) -> None:
        """Deletes the checkpoints after `step`. Collective; raises like `save`."""
        self._finish()
        self._quarantine_corrupted()
        self._delete_after(step)
        self._resumed_from = None

    def set_aside(self, is_broken: Callable[[int], bool]) -> list[int]:
        """Renames checkpoints of broken states to `<step>.unhealthy`; returns their steps.

        No resume and no rollback uses them; they stay on disk to be inspected or renamed back.
        Collective; raises like `save`.
        """
        self._finish()
        listed = all_succeed("listing checkpoints", self.steps)
        broken = [step for step in listed if is_broken(step)]
        self._healthy.forget(is_broken)
        if broken:
            # Before the renaming: a process killed in between must not roll back to one of these.
            self._write_healthy()
            self._rename(broken, _UNHEALTHY)
            self._close_manager()  # Orbax would keep listing them
        return broken

    def rollbacks(self) -> tuple[Rollback, ...]:
        """Returns the rollbacks in order; UserError if the file cannot be read."""
        if not self._config.enable_checkpointing:
            return ()
        if self._rollbacks is None:
            self._rollbacks = history.read_rollbacks(self.directory, self.log)
        return self._rollbacks

    def record_rollback(self, rollback: Rollback) -> None:
        """Records a rollback. Collective; call it after `roll_back_to`.

        Otherwise a killed run could resume from the later checkpoints despite the record.
        """
        if not self._config.enable_checkpointing:
            return
        self._rollbacks = (*self.rollbacks(), rollback)
        if jax.process_index() != 0:
            return
        try:
            history.write_rollbacks(self.directory, self._rollbacks)
        except OSError as error:
            self.log(
                f"WARNING: cannot write the record of rollbacks: {error}. If the run is killed "
                "before its next checkpoint, it will repeat this rollback."
            )

    def _write_healthy(self) -> None:
        if jax.process_index() != 0 or not self._healthy.changed:
            return
        try:
            self._healthy.write(self._ask_finalized)
        except OSError as error:
            self.log(
                f"WARNING: cannot write the list of healthy checkpoints: {error}. Retrying later."
            )

    def steps(self) -> list[int]:
        """Lists the steps with a complete checkpoint, ascending; none if disabled."""
        if not self._config.enable_checkpointing:
            return []
        listed = checkpoint_files.finalized_steps(self.directory, self._finalized)
        self._finalized = set(listed)
        self._is_listed = True
        return listed

    def steps_to_resume(self) -> list[int]:
        """Returns the known steps in the order of resuming; lists them once.

        Includes steps that have lost pieces: restoring one fails and says why, where leaving it out
        would silently resume from an older one, or from scratch.
        """
        if not self._is_listed:
            self.steps()
            if self._config.enable_checkpointing:
                self._incomplete = set(checkpoint_files.incomplete_steps(self.directory))
        return sorted(self._finalized | self._incomplete, reverse=True)

    def latest_step(self) -> int | None:
        """Returns the newest step with a complete checkpoint."""
        self.steps_to_resume()
        return max(self._finalized, default=None)

    def stored(self, step: int) -> StoredCheckpoint:
        items = self.directory / str(step) / checkpoint_files.ITEMS
        return self._stored.setdefault(step, StoredCheckpoint(items, step))

    def restore(
        self,
        step: int,
        abstract_state: Any,
        config_flat: Mapping[str, Any] | None = None,
        log: Callable[[str], None] = print,
    ) -> tuple[Any, dict[str, Any] | None, dict[str, Any]]:
        """Restores (state, data position or None, metadata), verified.

        Raises UserError for other names or shapes, CheckpointCorruptedError for damage.
        """
        stored = self.stored(step)
        metadata, checksums, _, saved_step = stored.metadata
        path = stored.json_path(checkpoint_files.METADATA)
        if not metadata and checksums is None:
            raise CheckpointCorruptedError(f"{path}: no metadata")
        if saved_step is not None and saved_step != step:
            raise CheckpointCorruptedError(
                f"{path}: belongs to the checkpoint of step {saved_step}"
            )
        position = stored.position()
        reader = checkpoint_reader.CheckpointReader(
            stored, config_flat or {}, log, True, self._config.checkpoint_storage
        )
        return reader.restore_state(abstract_state), position, metadata

    def try_restore(
        self, step: int, *arguments: Any, **keywords: Any
    ) -> tuple[tuple[Any, dict[str, Any] | None, dict[str, Any]] | None, str]:
        """Returns what `restore` does and "", or None and the reason. Collective.

        A checkpoint that any process cannot read is marked as corrupted on all.
        """
        restored = None
        reason = "another process could not read it"
        try:
            restored = self.restore(step, *arguments, **keywords)
            if (after := int(restored[0].step)) != step + 1:
                restored = None
                reason = f"it contains step {after - 1}: renamed?"
        except CheckpointCorruptedError as error:
            reason = str(error)
            if missing := self.stored(step).missing_items():
                reason = f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing"
        if all_processes_agree(restored is not None):
            return restored, ""
        self.mark_corrupted(step)
        return None, reason

    def resume_from(self, step: int) -> None:
        """Records the resumed step. Later checkpoints stay until the next save."""
        self._resumed_from = step
        self._healthy.watch(step)

    def mark_corrupted(self, step: int) -> None:
        """Marks a damaged checkpoint for renaming to `<step>.unreadable`.

        Otherwise retention would count it as the newest and delete healthy ones for it.
        """
        self._corrupted.add(step)
        self._healthy.forget(lambda healthy: healthy == step)

    def _can_write(self, step: int) -> bool:
        """Returns whether the step is absent; OSError if it cannot be written."""
        # Checks one step only: listing would cost requests for every checkpoint.
        if self._ask_finalized(step):
            return False
        # If Orbax cannot create its folder, its threads block the program for minutes.
        check_writable(self.directory)
        return True

    def _quarantine_corrupted(self) -> None:
        if not self._corrupted:
            return
        self._write_healthy()
        self._rename(self._corrupted, _UNREADABLE)
        self._corrupted.clear()

    def _rename(self, steps: Collection[int], suffix: str) -> None:
        """Renames checkpoints to `<step>.<suffix>`. Collective."""

        def rename() -> None:
            for step in sorted(steps) if jax.process_index() == 0 else ():
                target = self.directory / f"{step}.{suffix}"
                if target.exists() and suffix == _UNHEALTHY:
                    target.rmtree()  # a run that breaks again and again must not fill the disk
                elif target.exists():
                    target = self.directory / f"{step}.{suffix}-{int(time.time())}"
                (self.directory / str(step)).rename(target)

        all_succeed(f"renaming {suffix} checkpoints", rename)
        self._finalized -= set(steps)
        self._incomplete -= set(steps)

    def _delete_after(self, last: int) -> None:
        listed = all_succeed("listing newer checkpoints", self.steps)
        newer = [step for step in listed if step > last]
        self._healthy.forget(lambda step: step > last)
        # Before the deletion: a process killed in between must not resume from one of these.
        self._write_healthy()

        def remove() -> None:
            self._remove_partial()
            for step in newer if jax.process_index() == 0 else ():
                folder = self.directory / str(step)
                # Atomically incomplete first: the deletion takes time.
                if is_object_store_path(folder):
                    (folder / COMMIT_MARK).unlink(missing_ok=True)
                else:
                    folder = folder.rename(self.directory / f"{step}{_ABANDONED}")
                folder.rmtree()

        all_succeed("deleting newer checkpoints", remove)
        self._finalized -= set(newer)
        if newer:
            self._close_manager()  # Orbax would keep listing them

    def _remove_partial(self) -> None:
        """Deletes leftovers of killed or failed saves."""
        if jax.process_index() != 0:
            return
        for folder in checkpoint_files.list_dir(self.directory):
            name = folder.name
            is_partial = ".orbax-checkpoint-tmp" in name or name.endswith((_ABANDONED, ".given_up"))
            if is_object_store_path(folder) and name.isdigit():
                is_partial = not self._ask_finalized(int(name))
            if is_partial:
                with contextlib.suppress(OSError):  # threads of a failed save may still write there
                    folder.rmtree()

    def _manager(self) -> Any:
        if self._orbax_manager is None:
            import orbax.checkpoint as ocp

            from MaxText.checkpointing import verified_save

            checkpoint_reader.silence_threads()
            if is_object_store_path(self.directory):  # on local disks Orbax does this
                self._remove_partial()
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
                self.directory,
                handler_registry=handlers,
                options=ocp.CheckpointManagerOptions(
                    preservation_policy=self,
                    enable_async_checkpointing=self._config.async_checkpointing,
                    async_options=ocp.options.AsyncOptions(timeout_secs=storage.timeout),
                    lightweight_initialize=True,  # else reads metadata of every step
                ),
            )
        return self._orbax_manager

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Decides, as Orbax's PreservationPolicy, while a save is in progress."""
        steps = [checkpoint.step for checkpoint in checkpoints]
        kept = self._kept(sorted(steps))
        return [step in kept for step in steps]

    def _kept(self, steps: Sequence[int]) -> set[int]:
        config = self._config
        if config.max_to_keep is None:
            return set(steps)
        kept = {*steps[-config.max_to_keep :], *self._healthy.steps_to_preserve()}
        if config.keep_period is not None:
            kept |= {step for step in steps if step % config.keep_period == 0}
        return kept

    def _delete_old(self) -> None:
        if self._orbax_manager is None:
            return
        # Orbax's own list is identical on every process.
        steps = sorted(self._orbax_manager.all_steps())
        try:
            for step in sorted(set(steps) - self._kept(steps)):
                self._orbax_manager.delete(step)
                self._finalized.discard(step)
                self._healthy.forget(lambda healthy, deleted=step: healthy == deleted)
        except Exception as error:  # Orbax and storage clients raise anything
            if jax.process_count() > 1:
                raise  # the other processes wait for this deletion: fail together and restart
            self.log(f"WARNING: cannot delete old checkpoints: {error}.")
        self._write_healthy()

    def _close_manager(self) -> None:
        if self._orbax_manager is not None:
            manager = self._orbax_manager
            self._orbax_manager = None
            manager.close()
