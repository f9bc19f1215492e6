"""The checkpoints of a run that are on disk, as far as a process knows."""

import contextlib
from collections.abc import Collection

from etils import epath

from MaxText.checkpointing import checkpoint_files


class CheckpointListing:
    """Lists the checkpoints of a run, and remembers which of them are complete.

    A request to an object store takes some 0.1 s for each checkpoint, so storage is not asked about
    a complete checkpoint again.

    Attributes:
      directory: The folder of the run's checkpoints.
      finalized: Steps with a complete checkpoint, as far as known. Whoever saves, deletes or
        renames a checkpoint updates it.
    """

    def __init__(self, directory: epath.Path, *, enabled: bool):
        """Reads nothing yet. Without `enabled`, a run has no checkpoints, whatever is on disk."""
        self.directory = directory
        self.finalized: set[int] = set()
        self._enabled = enabled
        self._incomplete: set[int] = set()  # steps on disk that have lost pieces
        self._is_listed = False

    def steps(self) -> list[int]:
        """Lists the steps with a complete checkpoint, ascending; none if disabled."""
        if not self._enabled:
            return []
        listed = checkpoint_files.finalized_steps(self.directory, self.finalized)
        self.finalized = set(listed)
        self._is_listed = True
        return listed

    def list_once(self) -> None:
        """Lists the checkpoints, unless they are listed already."""
        if not self._is_listed:
            self.steps()

    def steps_to_resume(self) -> list[int]:
        """Returns the known steps in the order of resuming; lists them once.

        Includes steps that have lost pieces: restoring one fails and says why, where leaving it out
        would silently resume from an older one, or from scratch.
        """
        if not self._is_listed:
            self.steps()
            if self._enabled:
                self._incomplete = set(checkpoint_files.incomplete_steps(self.directory))
        return sorted(self.finalized | self._incomplete, reverse=True)

    def newest(self) -> int | None:
        """Returns the newest step known to be complete, without listing."""
        return max(self.finalized, default=None)

    def ask_finalized(self, step: int) -> bool:
        """Returns whether a checkpoint is complete; OSError if storage fails."""
        return step in self.finalized or checkpoint_files.is_finalized(self.directory / str(step))

    def is_finalized(self, step: int) -> bool:
        """Returns whether a checkpoint is complete; False if storage fails."""
        with contextlib.suppress(OSError):
            return self.ask_finalized(step)
        return False

    def discard(self, steps: Collection[int]) -> None:
        """Removes deleted or renamed checkpoints."""
        self.finalized -= set(steps)
        self._incomplete -= set(steps)
