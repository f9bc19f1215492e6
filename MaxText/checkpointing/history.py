"""Healthy checkpoints and rollbacks of a run, in two JSON files."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from etils import epath

from MaxText.errors import UserError
from MaxText.storage.atomic import read_json_with_digest, write_json_with_digest


def _read(
    folder: epath.Path, name: str, old_name: str, log: Callable[[str], None], consequence: str
) -> Any:
    """Returns a file's content, if need be by its old name; None if damaged."""
    path = folder / f"{name}.json"
    try:
        found = read_json_with_digest(path, name)
        if found is None:
            found = read_json_with_digest(folder / f"{old_name}.json", old_name)
        return found
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error}. Fix the folder; without the file {consequence}."
        ) from error
    except ValueError as error:
        log(f"WARNING: cannot read {path}: {error}; {consequence}.")


class HealthyCheckpoints:
    """Promotes checkpoints after healthy steps; survives restarts.

    A step's loss is that of the state before it, so a state can be bad before any metric shows it.
    A checkpoint is therefore healthy only after `healthy_steps` healthy steps in a row, or if the
    run stopped on purpose in a healthy state.
    """

    def __init__(self, folder: epath.Path, healthy_steps: int, log: Callable[[str], None]):
        self._folder = folder
        self._healthy_steps = healthy_steps
        self._log = log
        self._waiting: dict[int, int] = {}  # step -> consecutive healthy steps since
        self._written: list[int] = []

    @functools.cached_property
    def steps(self) -> set[int]:
        """Healthy checkpoints; some may have been deleted since."""
        consequence = "no checkpoint counts as healthy"
        self._written = _read(self._folder, "healthy", "good", self._log, consequence) or []
        return set(self._written)

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
        write_json_with_digest(self._folder / "healthy.json", "healthy", kept)
        self._written = kept


@dataclasses.dataclass(frozen=True)
class Rollback:
    """A rollback and its excluded samples.

    The next checkpoint also stores the exclusions. Until then a restart resumes from an earlier
    state, and would hit the same data again without the file.
    """

    number: int  # counts rollbacks of the run, from 1
    restored_step: int  # the next step after it
    detected_step: int  # the step at which it was triggered
    onset_step: int  # the first suspicious step
    samples: tuple[int, int]  # range of excluded samples, end exclusive
    source: str
    reason: str
    data: Mapping[str, Any]  # settings that fix the meaning of a sample number

    def fields(self) -> dict[str, Any]:
        fields = dataclasses.asdict(self) | {"samples": list(self.samples)}
        del fields["data"]
        return fields


def write_rollbacks(folder: epath.Path, rollbacks: Sequence[Rollback]) -> None:
    """Writes the rollbacks atomically; call it on one process only."""
    rows = [dataclasses.asdict(rollback) for rollback in rollbacks]
    folder.mkdir(parents=True, exist_ok=True)
    write_json_with_digest(folder / "rollbacks.json", "rollbacks", rows)


def read_rollbacks(folder: epath.Path, log: Callable[[str], None]) -> tuple[Rollback, ...]:
    """Returns the rollbacks in order, none if missing or damaged."""
    consequence = "the run may train on data that rollbacks excluded"
    rows = _read(folder, "rollbacks", "rewinds", log, consequence) or ()
    try:
        # Earlier versions named the fields differently, in the same order.
        found = [Rollback(*row.values()) for row in rows]
        return tuple(dataclasses.replace(each, samples=tuple(each.samples)) for each in found)
    except (AttributeError, TypeError) as error:
        log(f"WARNING: cannot read {folder / 'rollbacks.json'}: {error}; {consequence}.")
        return ()
