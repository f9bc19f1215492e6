"""Healthy checkpoints of a run, recorded in `good.json`."""

from collections.abc import Callable

from etils import epath

from MaxText.checkpointing.whole_files import read_sealed, write_sealed
from MaxText.errors import UserError

_FILE = "good.json"


def read_good_steps(folder: epath.Path) -> tuple[list[int], str]:
    """Reads the file in a `checkpoints` folder.

    Returns:
      Steps, none without a file; and what is wrong with the file, "" for nothing.

    Raises:
      UserError: Storage fails.
    """
    path = folder / _FILE
    try:
        return read_sealed(path, "good") or [], ""
    except OSError as error:
        raise UserError(
            f"{path}, which says which checkpoints are good, cannot be read: {error}. "
            "Mend the folder, or delete the file: no checkpoint then counts as healthy."
        ) from error
    except ValueError as error:
        return [], f"{path} CANNOT BE READ: {error}. No checkpoint counts as good."


class GoodSteps:
    """Promotes checkpoints after healthy updates and remembers them across restarts.

    The loss of an update is that of the state before it, so a state can be bad before any number
    shows it. A checkpoint is therefore healthy only after `healthy_steps` healthy updates in a row,
    or if the run stopped on purpose in a healthy state.
    """

    def __init__(self, folder: epath.Path, healthy_steps: int, show: Callable[[str], None]):
        """Reads the file in `folder`; with `healthy_steps` 0 checkpoints are healthy at once."""
        self._folder = folder
        self._path = folder / _FILE
        self._healthy_steps = healthy_steps
        self._show = show
        self._waiting: dict[int, int] = {}  # step -> healthy updates in a row since
        self._written: list[int] = []
        self._steps: set[int] | None = None  # None until the file was read

    @property
    def steps(self) -> set[int]:
        """Healthy checkpoints; some may have been deleted since."""
        if self._steps is None:
            self._written, damage = read_good_steps(self._folder)
            if damage:
                self._show(f"!!! WARNING: {damage}")
            self._steps = set(self._written)
        return self._steps

    def watch(self, step: int) -> None:
        """Begins to count the updates after a checkpoint."""
        if self._healthy_steps == 0:
            self.steps.add(step)
        elif step not in self.steps:
            self._waiting[step] = 0

    def observe(self, step: int, healthy: bool) -> None:
        """Counts an update, in order; one that is not healthy restarts the count."""
        for saved in [saved for saved in self._waiting if saved < step]:
            self._waiting[saved] = self._waiting[saved] + 1 if healthy else 0
            if self._waiting[saved] >= self._healthy_steps:
                self.promote(saved)

    def promote(self, step: int) -> None:
        self.steps.add(step)
        self._waiting.pop(step, None)

    def forget(self, is_gone: Callable[[int], bool]) -> None:
        """Drops checkpoints that no longer exist or that were rolled back."""
        self._steps = {step for step in self.steps if not is_gone(step)}
        self._waiting = {s: count for s, count in self._waiting.items() if not is_gone(s)}

    def to_keep(self) -> set[int]:
        """Returns the newest healthy checkpoint and the next candidate, which must not be deleted.

        Otherwise retention could delete each candidate before it is promoted.
        """
        newest = max(self.steps, default=-1)
        next_one = min((step for step in self._waiting if step > newest), default=-1)
        return {step for step in (newest, next_one) if step >= 0}

    @property
    def changed(self) -> bool:
        """Whether the file is outdated."""
        return sorted(self.steps) != self._written

    def write(self, is_on_disk: Callable[[int], bool]) -> None:
        """Writes the file atomically, on one process.

        Args:
          is_on_disk: Whether the checkpoint of a step is complete. Asked only for steps that the
            file does not list yet: it costs requests in a bucket.

        Raises:
          OSError: The file cannot be written.
        """
        kept = sorted(step for step in self.steps if step in self._written or is_on_disk(step))
        if kept == self._written:
            return
        write_sealed(self._path, "good", kept)
        self._written = kept
