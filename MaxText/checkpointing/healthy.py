"""Healthy checkpoints of a run, recorded in `healthy.json`."""

import functools
from collections.abc import Callable

from etils import epath

from MaxText.errors import UserError
from MaxText.storage.atomic import read_json_with_digest, write_json_with_digest

_FILE = "healthy.json"
_OLD_FILE = "good.json"  # its name in earlier versions


class HealthyCheckpoints:
    """Promotes checkpoints after healthy steps; survives restarts.

    A step's loss is that of the state before it, so a state can be bad before any metric shows it.
    A checkpoint is therefore healthy only after `healthy_steps` healthy steps in a row, or if the
    run stopped on purpose in a healthy state.
    """

    def __init__(self, folder: epath.Path, healthy_steps: int, log: Callable[[str], None]):
        self._path, self._old_path = folder / _FILE, folder / _OLD_FILE
        self._healthy_steps = healthy_steps
        self._log = log
        self._waiting: dict[int, int] = {}  # step -> consecutive healthy steps since
        self._written: list[int] = []

    @functools.cached_property
    def steps(self) -> set[int]:
        """Healthy checkpoints; some may have been deleted since."""
        self._written = self._read()
        return set(self._written)

    def _read(self) -> list[int]:
        try:
            found = read_json_with_digest(self._path, "healthy")
            if found is None:
                found = read_json_with_digest(self._old_path, "good")
            return found or []
        except OSError as error:
            raise UserError(
                f"cannot read {self._path}: {error}. Fix the folder, or delete the file: no "
                "checkpoint then counts as healthy."
            ) from error
        except ValueError as error:
            self._log(
                f"WARNING: cannot read {self._path}: {error}. No checkpoint counts as healthy."
            )
            return []

    def watch(self, step: int) -> None:
        if self._healthy_steps == 0:
            self.steps.add(step)
        elif step not in self.steps:
            self._waiting[step] = 0

    def update(self, step: int, healthy: bool) -> None:
        """Counts a step, in order; an unhealthy one restarts the count."""
        for saved in [saved for saved in self._waiting if saved < step]:
            self._waiting[saved] = self._waiting[saved] + 1 if healthy else 0
            if self._waiting[saved] >= self._healthy_steps:
                self.promote(saved)

    def promote(self, step: int) -> None:
        self.steps.add(step)
        self._waiting.pop(step, None)

    def forget(self, is_gone: Callable[[int], bool]) -> None:
        self.steps = {step for step in self.steps if not is_gone(step)}
        self._waiting = {s: count for s, count in self._waiting.items() if not is_gone(s)}

    def steps_to_preserve(self) -> set[int]:
        """Returns the newest healthy step and the next candidate."""
        newest = max(self.steps, default=-1)
        next_one = min((step for step in self._waiting if step > newest), default=-1)
        return {step for step in (newest, next_one) if step >= 0}

    @property
    def changed(self) -> bool:
        return sorted(self.steps) != self._written

    def write(self, is_finalized: Callable[[int], bool]) -> None:
        """Writes the file atomically; calls `is_finalized` for new steps only."""
        kept = sorted(step for step in self.steps if step in self._written or is_finalized(step))
        if kept == self._written:
            return
        write_json_with_digest(self._path, "healthy", kept)
        self._written = kept
