"""Rollbacks of a run, recorded in rollbacks.json beside its checkpoints."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from etils import epath

from MaxText.errors import UserError
from MaxText.storage.atomic import read_json_with_digest, write_json_with_digest
from MaxText.value_types import JsonValue


def read_run_file(
    folder: epath.Path, name: str, log: Callable[[str], None], consequence: str
) -> JsonValue:
    """Returns the content of `<folder>/<name>.json`; None if it is missing or damaged.

    Args:
      consequence: What a missing file means for the run, for messages.

    Raises:
      UserError: If storage fails.
    """
    path = folder / f"{name}.json"
    try:
        return read_json_with_digest(path, name)
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error}. Fix the folder; without the file {consequence}."
        ) from error
    except ValueError as error:
        log(f"WARNING: cannot read {path}: {error}; {consequence}.")
        return None


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
    source: str  # what was restored, for messages: "checkpoint of step 120"
    reason: str
    data: Mapping[str, Any]  # settings that fix the meaning of a sample number

    def event_fields(self) -> dict[str, Any]:
        """Returns the fields of the event `rollback`: all but the settings of the data."""
        fields = dataclasses.asdict(self) | {"samples": list(self.samples)}
        del fields["data"]
        return fields


class RollbackRecord:
    """The rollbacks of a run, over all its restarts, in the file rollbacks.json."""

    def __init__(self, folder: epath.Path, log: Callable[[str], None]):
        """Reads and writes nothing yet.

        Args:
          folder: The folder of the run's checkpoints.
          log: Gets a line about a file that is damaged or cannot be written.
        """
        self._folder = folder
        self._log = log
        self._rollbacks: tuple[Rollback, ...] | None = None  # None until the file is read

    def rollbacks(self) -> tuple[Rollback, ...]:
        """Returns the rollbacks in order; UserError if the file cannot be read."""
        if self._rollbacks is None:
            self._rollbacks = read_rollbacks(self._folder, self._log)
        return self._rollbacks

    def add(self, rollback: Rollback) -> None:
        """Appends a rollback; process 0 writes it. A file that cannot be written is logged."""
        self._rollbacks = (*self.rollbacks(), rollback)
        if jax.process_index() != 0:
            return
        try:
            write_rollbacks(self._folder, self._rollbacks)
        except OSError as error:
            self._log(
                f"WARNING: cannot write the record of rollbacks: {error}. If the run is killed "
                "before its next checkpoint, it will repeat this rollback."
            )


def write_rollbacks(folder: epath.Path, rollbacks: Sequence[Rollback]) -> None:
    """Writes the rollbacks atomically; call it on one process only."""
    rows = [dataclasses.asdict(rollback) for rollback in rollbacks]
    folder.mkdir(parents=True, exist_ok=True)
    write_json_with_digest(folder / "rollbacks.json", "rollbacks", rows)


def read_rollbacks(folder: epath.Path, log: Callable[[str], None]) -> tuple[Rollback, ...]:
    """Returns the rollbacks in order, none if missing or damaged."""
    consequence = "the run may train on data that rollbacks excluded"
    rows = read_run_file(folder, "rollbacks", log, consequence) or ()
    try:
        rollbacks = [Rollback(**row) for row in rows]
        return tuple(
            dataclasses.replace(rollback, samples=tuple(rollback.samples)) for rollback in rollbacks
        )
    except TypeError as error:
        log(f"WARNING: cannot read {folder / 'rollbacks.json'}: {error}; {consequence}.")
        return ()
