"""Which checkpoints of a run are good: updates after them went well. Kept in `good.json`."""

from collections.abc import Callable

from etils import epath

from MaxText.checkpointing.whole_files import read_sealed, write_sealed
from MaxText.errors import UserError

_FILE = "good.json"


def read_good_steps(folder: epath.Path) -> tuple[list[int], str]:
    """What the file in a `checkpoints` folder says.

    Returns:
      Steps, none without a file; and what is wrong with the file, "" for nothing.

    Raises:
      UserError: the storage does not give it.
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

    A state can be bad before any number shows it: the loss of an update is that of the state before
    it. A checkpoint is therefore good only when `healthy_steps` updates in a row after it were
    healthy, or when the run stopped on purpose in a healthy state.
    """

    def __init__(self, folder: epath.Path, healthy_steps: int, show: Callable[[str], None]):
        """
        Args:
          folder: of the checkpoints; the file lies in it.
          healthy_steps: updates in a row that make a checkpoint good; with 0 each is good at once.
          show: told once when the file is damaged.
        """
        self._folder = folder
        self._path = folder / _FILE
        self._healthy_steps = healthy_steps
        self._show = show
        self._waiting: dict[int, int] = {}  # step -> healthy updates in a row since
        self._written: list[int] = []
        self._steps: set[int] | None = None  # None until the file was read

    @property
    def steps(self) -> set[int]:
        """The good ones; some may have been deleted since."""
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
        """Counts an update; one that was not healthy starts the count again.

        Args:
          step: the update, from 0, in order.
        """
        for saved in [saved for saved in self._waiting if saved < step]:
            self._waiting[saved] = self._waiting[saved] + 1 if healthy else 0
            if self._waiting[saved] >= self._healthy_steps:
                self.promote(saved)

    def promote(self, step: int) -> None:
        """Declares a checkpoint good."""
        self.steps.add(step)
        self._waiting.pop(step, None)

    def forget(self, is_gone: Callable[[int], bool]) -> None:
        """Leaves out checkpoints that no longer exist or that belong to a past given up."""
        self._steps = {step for step in self.steps if not is_gone(step)}
        self._waiting = {s: count for s, count in self._waiting.items() if not is_gone(s)}

    def to_keep(self) -> set[int]:
        """What must not be deleted: the newest good one, and the one that will be good next.

        Without the latter, retention could delete each one before it has become good.
        """
        newest = max(self.steps, default=-1)
        next_one = min((step for step in self._waiting if step > newest), default=-1)
        return {step for step in (newest, next_one) if step >= 0}

    @property
    def changed(self) -> bool:
        """Whether the file says something else."""
        return sorted(self.steps) != self._written

    def write(self, is_on_disk: Callable[[int], bool]) -> None:
        """Writes the file, whole or not at all. One process does it.

        Args:
          is_on_disk: whether the checkpoint of a step is complete; others are left out. Asked only
            for steps that the file does not list yet: it costs requests in a bucket.

        Raises:
          OSError: the file cannot be written.
        """
        kept = sorted(step for step in self.steps if step in self._written or is_on_disk(step))
        if kept == self._written:
            return
        write_sealed(self._path, "good", kept)
        self._written = kept
