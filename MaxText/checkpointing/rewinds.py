"""Rollbacks of a run and their excluded samples: `rewinds.json` next to its checkpoints.

The next checkpoint also stores the exclusions. Until then a restart resumes from an earlier state
and would hit the same data again without this file.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from etils import epath

from MaxText.checkpointing.whole_files import read_sealed, write_sealed
from MaxText.errors import UserError

_FILE = "rewinds.json"


@dataclasses.dataclass(frozen=True)
class Rewind:
    """A rollback.

    Attributes:
      number: Counts rollbacks of the run, from 1.
      to: Next step after the rollback.
      noticed: Step at which it was triggered.
      began: First suspicious step.
      samples: Range of excluded samples, end exclusive.
      data: Data settings that fix the meaning of a sample number (BatchIterator.position).
    """

    number: int
    to: int
    noticed: int
    began: int
    samples: tuple[int, int]
    source: str
    reason: str
    data: Mapping[str, Any]

    def facts(self) -> dict[str, Any]:
        facts = dataclasses.asdict(self) | {"samples": list(self.samples)}
        del facts["data"]
        return facts


def write_rewinds(folder: epath.Path, rewinds: Sequence[Rewind]) -> None:
    """Writes the rollbacks atomically; call it on one process only."""
    rows = [dataclasses.asdict(rewind) for rewind in rewinds]
    folder.mkdir(parents=True, exist_ok=True)
    write_sealed(folder / _FILE, "rewinds", rows)


def read_rewinds(folder: epath.Path, show: Callable[[str], None]) -> tuple[Rewind, ...]:
    """Returns the rollbacks in order, none if missing or damaged; UserError if storage fails."""
    path = folder / _FILE
    try:
        rows = read_sealed(path, "rewinds") or []
        return tuple(Rewind(**row | {"samples": tuple(row["samples"])}) for row in rows)
    except OSError as error:
        raise UserError(
            f"{path}, which says what the run leaves out, cannot be read: {error}. Mend the "
            "folder; without the file the run may meet the same trouble again."
        ) from error
    except (ValueError, LookupError, TypeError) as error:
        show(
            f"!!! WARNING: {path} CANNOT BE READ: {error}. Where the run went back after the "
            "checkpoint that it starts from, it may meet the same trouble again."
        )
        return ()
