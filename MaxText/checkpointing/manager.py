"""Saves, retains and restores the checkpoints of a run in progress."""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from etils import epath

from MaxText.checkpointing import description, layout, quiet_threads, reading
from MaxText.checkpointing.checksums import array_checksums
from MaxText.checkpointing.good_steps import GoodSteps
from MaxText.checkpointing.patience import told_while_waiting
from MaxText.checkpointing.rewinds import Rewind, read_rewinds, write_rewinds
from MaxText.checkpointing.run_folder import probe
from MaxText.config.training_sections import Checkpoint
from MaxText.errors import UserError
from MaxText.runtime.agreement import agreed
from MaxText.storage.paths import is_bucket

_GIVEN_UP = ".given_up"
_SECONDS_BETWEEN_LOOKS = 2.0  # between checks for completion of an asynchronous save


class Checkpoints:
    """The checkpoints of one run: `<directory>/<step>/{items,iter,metadata}`.

    Folder <step> holds the state after step <step>, from 0; a run resumes at <step> + 1. A process
    killed at any moment leaves every earlier checkpoint intact. A run resumes from the newest
    complete checkpoint, healthy or not. It rolls back to the newest healthy one (see GoodSteps),
    which retention never deletes.
    """

    def __init__(
        self,
        directory: str | epath.Path,
        section: Checkpoint,
        guard_healthy_steps: int = 0,
        show: Callable[[str], None] = print,
    ):
        """Creates nothing on disk. `guard_healthy_steps` 0 promotes every checkpoint at once."""
        self.directory = epath.Path(directory)
        self.guard_healthy_steps = guard_healthy_steps
        self.show = show
        self._section = section
        self._good = GoodSteps(self.directory, guard_healthy_steps, lambda line: self.show(line))
        self._orbax_manager: Any = None
        self._saving: int | None = None  # step being written
        self._failures = 0  # consecutive failed saves
        self._seen: list[int] = []  # steps on disk when last listed
        self._unreadable: set[int] = set()
        self._resumed_from: int | None = None
        self._rewinds: tuple[Rewind, ...] | None = None  # None until the file is read
        self._looked = -math.inf

    def preload(self) -> None:
        """Imports Orbax in the background (0.3 s), hidden behind compilation."""
        if self._section.enable_checkpointing:
            threading.Thread(target=_import_orbax, daemon=True).start()

    def should_save(self, step: int, last_step: int) -> bool:
        section = self._section
        if not section.enable_checkpointing:
            return False
        if step == last_step and section.save_checkpoint_on_completion:
            return True
        if step == 0:
            return section.save_checkpoint_on_start
        return step % section.checkpoint_period == 0

    def save(
        self,
        step: int,
        state: Any,
        position: Mapping[str, Any] | None,
        metadata: Mapping[str, Any],
    ) -> bool:
        """Saves the state after step `step`, in the background if async_checkpointing.

        Collective. Waits for an earlier save, and returns once the state is copied, so the caller
        may donate it. One failed save is logged, here or by the next call. The second in a row
        raises UserError, and so does one that leaves the run without any checkpoint. Returns False
        if the step is on disk already, could not be written, or checkpointing is disabled.
        """
        if not self._section.enable_checkpointing:
            return False
        assert int(state.step) == step + 1, (int(state.step), step)
        self._report(self._finish())
        import orbax.checkpoint as ocp

        items, stored_position = reading.as_dict(state), dict(position or {})
        sealed = description.sealed(metadata, stored_position, array_checksums(items))
        if self._section.async_checkpointing and jax.default_backend() == "cpu":
            # Orbax reads CPU arrays in place. The runtime refuses to donate memory that is being
            # read, so the next step would block until the file is written (0.9 s, against 0.02 s to
            # copy 240 MB).
            items = jax.tree.map(lambda x: x.copy(), items)
        self._saving = step
        try:
            self._clear_the_way()
            if not agreed("the check for room", lambda: self._has_room(step)):
                self._saving = None
                return False
            self._good.watch(step)
            manager = self._manager()
            saved = manager.save(
                step,
                args=ocp.args.Composite(
                    **{
                        layout.ITEMS: ocp.args.PyTreeSave(items),
                        layout.POSITION: ocp.args.JsonSave(stored_position),
                        layout.METADATA: ocp.args.JsonSave(sealed),
                    }
                ),
                force=True,  # should_save already decided
            )
        except Exception as error:  # Orbax and storage clients raise anything
            self._report(self._failed(error))
            return False
        # By now Orbax has decided which steps it deletes once this save completes.
        left = set(manager.all_steps())
        self._good.forget(lambda kept: kept not in left)
        if not self._section.async_checkpointing:
            self._complete()
        return saved

    def wait(self) -> None:
        """Blocks until the background save completes; raises UserError if it failed."""
        if failure := self._finish():
            raise failure.error()

    def close(self) -> None:
        """Waits and stops Orbax's threads; UserError if the last save failed. Idempotent."""
        try:
            self.wait()
        finally:
            self._close_manager()

    def _finish(self) -> "_Failure | None":
        if self._saving is None:
            return None
        try:
            slow = f"the checkpoint of step {self._saving} is still on its way to {self.directory}"
            with told_while_waiting(slow, lambda line: self.show(line)):
                self._manager().wait_until_finished()
        except Exception as error:
            if not self._is_whole(self._saving):
                return self._failed(error)
            if jax.process_count() == 1:
                self._orbax_manager = None  # recreating it is collective
            self.show(
                f"!!! WARNING: after step {self._saving} was saved, old checkpoints could not be "
                f"deleted: {error}. It is tried again after the next save."
            )
        self._complete()
        return None

    def _complete(self) -> None:
        if self._saving is not None:
            self._seen = [*self._seen, self._saving]
        self._saving = None
        self._failures = 0
        self._write_good()

    def _is_whole(self, step: int) -> bool:
        try:
            return layout.is_complete(self.directory / str(step))
        except OSError:
            return False

    def _failed(self, error: Exception) -> "_Failure":
        step, self._saving = self._saving, None
        self._failures += 1
        self._good.forget(lambda saved: saved == step)
        # Orbax already lists the failed step; a new manager rereads the disk.
        self._orbax_manager = None
        with contextlib.suppress(OSError):  # if storage fails, the last listing counts
            self._remove_partial(f"{step}.")
            self.steps()
        return _Failure(step, self.directory, max(self._seen, default=None), error)

    def _report(self, failure: "_Failure | None") -> None:
        if failure is None:
            return
        if self._failures >= 2 or failure.newest is None:
            raise failure.error()
        self.show(f"!!! WARNING: {failure}. The run goes on, and the next save tries again.")

    def observe(self, step: int, healthy: bool) -> None:
        """Records whether step `step` was healthy. Collective; call it in order of steps."""
        if not self._section.enable_checkpointing:
            return
        self._good.observe(step, healthy)
        # A checkpoint may be promoted before its save completes; check again later, do not block.
        if self._good.changed and time.monotonic() > self._looked + _SECONDS_BETWEEN_LOOKS:
            self._looked = time.monotonic()
            self._write_good()

    def mark_good(self, step: int) -> None:
        """Waits for the save, then promotes its checkpoint. Collective; raises like `save`."""
        self._report(self._finish())
        if self._is_whole(step):
            self._good.promote(step)
            self._write_good()
            self._delete_old()

    def latest_good(self, before: int | None = None) -> int | None:
        """Waits for the save, then returns the newest healthy step. Raises like `save`."""
        self._report(self._finish())
        good = self._good.steps & set(self.steps())
        return max((step for step in good if before is None or step < before), default=None)

    def go_back_to(self, step: int) -> None:
        """Deletes the checkpoints after `step`. Collective; raises like `save`."""
        self._report(self._finish())
        self._set_unreadable_aside()
        self._give_up(step)
        self._resumed_from = None

    def rewinds(self) -> tuple[Rewind, ...]:
        """Returns the rollbacks in order; UserError if the file cannot be read."""
        if not self._section.enable_checkpointing:
            return ()
        if self._rewinds is None:
            self._rewinds = read_rewinds(self.directory, self.show)
        return self._rewinds

    def record_rewind(self, rewind: Rewind) -> None:
        """Records a rollback. Collective; call it after `go_back_to`.

        Otherwise a killed run could resume from the later checkpoints despite the record.
        """
        if not self._section.enable_checkpointing:
            return
        self._rewinds = (*self.rewinds(), rewind)
        if jax.process_index() != 0:
            return
        try:
            write_rewinds(self.directory, self._rewinds)
        except OSError as error:
            self.show(
                f"!!! WARNING: what the run leaves out could not be noted: {error}. Killed before "
                "its next checkpoint, it will meet the same trouble again."
            )

    def _write_good(self) -> None:
        if jax.process_index() != 0 or not self._good.changed:
            return
        try:
            self._good.write(lambda step: layout.is_complete(self.directory / str(step)))
        except OSError as error:
            self.show(
                f"!!! WARNING: the list of good checkpoints could not be written: {error}. "
                "It is tried again."
            )

    def steps(self) -> list[int]:
        """Lists the steps with a complete checkpoint, ascending; none if disabled."""
        if not self._section.enable_checkpointing:
            return []
        self._seen = layout.complete_steps(self.directory)
        return self._seen

    def steps_to_resume(self) -> list[int]:
        """Returns the steps on disk in the order in which a resume tries them."""
        return self.steps()[::-1]

    def latest_step(self) -> int | None:
        return next(iter(self.steps_to_resume()), None)

    def stored(self, step: int) -> layout.Stored:
        return layout.Stored(self.directory / str(step) / layout.ITEMS, step)

    def restore(
        self,
        step: int,
        abstract_state: Any,
        config_flat: Mapping[str, Any] | None = None,
        show: Callable[[str], None] = print,
    ) -> tuple[Any, dict[str, Any] | None, dict[str, Any]]:
        """Restores (state, data position or None, metadata) and verifies checksums.

        `config_flat` explains a mismatch. Raises UserError if names or shapes differ, and
        description.Unreadable if files are damaged.
        """
        stored = self.stored(step)
        described = description.describe(stored, is_own=True)
        position = description.read_position(stored, described)
        state = reading.read_state(stored, abstract_state, config_flat or {}, show, is_own=True)
        return state, position, described.metadata

    def resume_from(self, step: int) -> None:
        """Records the resumed step. Later checkpoints stay on disk until the next save."""
        self._resumed_from = step
        self._good.watch(step)

    def mark_unreadable(self, step: int) -> None:
        """Marks a damaged checkpoint, which the next save renames to `<step>.unreadable`.

        Otherwise retention would count it as the newest and delete healthy ones for it.
        """
        self._unreadable.add(step)
        self._good.forget(lambda good: good == step)

    def _clear_the_way(self) -> None:
        """Applies a resume's pending removals at its first save, which may never come."""
        self._set_unreadable_aside()
        if self._resumed_from is not None:
            self._give_up(self._resumed_from)
            self._resumed_from = None

    def _has_room(self, step: int) -> bool:
        """Returns whether the step is not on disk yet; raises OSError if it cannot be written."""
        # Checks one step only: listing would cost requests for every checkpoint.
        if layout.is_complete(self.directory / str(step)):
            return False
        # If Orbax cannot create its folder, its threads block the program for minutes.
        probe(self.directory)
        return True

    def _set_unreadable_aside(self) -> None:
        if not self._unreadable:
            return
        self._write_good()

        def rename() -> None:
            for step in sorted(self._unreadable) if jax.process_index() == 0 else ():
                target = self.directory / f"{step}.unreadable"
                if target.exists():
                    target = self.directory / f"{step}.unreadable-{int(time.time())}"
                (self.directory / str(step)).rename(target)

        agreed("setting unreadable checkpoints aside", rename)
        self._unreadable.clear()

    def _give_up(self, after: int) -> None:
        known = agreed("the search for newer checkpoints", self.steps)
        newer = [step for step in known if step > after]
        self._good.forget(lambda step: step > after)
        # Before the deletion: a process killed in between must not resume from one of these.
        self._write_good()

        def remove() -> None:
            self._remove_partial("")
            for step in newer if jax.process_index() == 0 else ():
                layout.withdraw(self.directory / str(step), f"{step}{_GIVEN_UP}").rmtree()

        agreed("the removal of newer checkpoints", remove)
        if newer:
            self._close_manager()  # Orbax would keep listing them

    def _remove_partial(self, name: str) -> None:
        """Deletes leftovers of killed or failed saves whose folder name starts with `name`."""
        if jax.process_index() != 0:
            return
        for folder in layout.children(self.directory):
            is_partial = (
                ".orbax-checkpoint-tmp" in folder.name
                or folder.name.endswith(_GIVEN_UP)
                or (is_bucket(folder) and folder.name.isdigit() and not layout.is_complete(folder))
            )
            if is_partial and f"{folder.name}.".startswith(name):
                with contextlib.suppress(OSError):  # threads of a failed save may still write there
                    folder.rmtree()

    def _manager(self) -> Any:
        if self._orbax_manager is None:
            import orbax.checkpoint as ocp

            quiet_threads.install()
            if is_bucket(self.directory):  # on local disks Orbax does this
                self._remove_partial("")
            self._orbax_manager = ocp.CheckpointManager(
                self.directory,
                options=ocp.CheckpointManagerOptions(
                    preservation_policy=_Preservation(self._kept),
                    enable_async_checkpointing=self._section.async_checkpointing,
                ),
            )
        return self._orbax_manager

    def _kept(self, steps: Sequence[int]) -> set[int]:
        section = self._section
        if section.max_to_keep is None:
            return set(steps)
        kept = {*steps[-section.max_to_keep :], *self._good.to_keep()}
        if section.keep_period is not None:
            kept |= {step for step in steps if step % section.keep_period == 0}
        return kept

    def _delete_old(self) -> None:
        if self._orbax_manager is None:
            return
        # Orbax's own list is identical on every process.
        steps = sorted(self._orbax_manager.all_steps())
        try:
            for step in sorted(set(steps) - self._kept(steps)):
                self._orbax_manager.delete(step)
                self._good.forget(lambda good, gone=step: good == gone)
        except Exception as error:  # Orbax and storage clients raise anything
            if jax.process_count() > 1:
                raise  # the other processes wait for this deletion: fail together and restart
            self.show(f"!!! WARNING: old checkpoints could not be deleted: {error}.")
        self._write_good()

    def _close_manager(self) -> None:
        if self._orbax_manager is not None:
            manager, self._orbax_manager = self._orbax_manager, None
            manager.close()


class _Failure(NamedTuple):
    step: int | None
    directory: epath.Path
    newest: int | None
    cause: Exception

    def __str__(self) -> str:
        kept = (
            "no complete checkpoint"
            if self.newest is None
            else f"the checkpoint of step {self.newest}"
        )
        return (
            f"the checkpoint of step {self.step} could not be written to {self.directory}: "
            f"{self.cause}\n  {kept} is on disk"
        )

    def error(self) -> UserError:
        error = UserError(
            f"{self}. Free space or mend the folder (base_output_directory), then start again "
            "with the same run_name."
        )
        error.__cause__ = self.cause
        return error


class _Preservation:
    """Orbax PreservationPolicy, evaluated while a save is in progress."""

    def __init__(self, kept: Callable[[Sequence[int]], Collection[int]]):
        self._kept = kept

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        del context
        kept = self._kept(sorted(checkpoint.step for checkpoint in checkpoints))
        return [checkpoint.step in kept for checkpoint in checkpoints]


def _import_orbax() -> None:
    import orbax.checkpoint  # noqa: F401
