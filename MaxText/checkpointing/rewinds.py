"""Rollbacks of a run and their exclusions: `rewinds.json` next to its checkpoints.

The next checkpoint has the exclusions. Until there is one, a restart begins at a state from before
the trouble, and would meet it again without this file.
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
      number: From 1.
      to: The next update.
      noticed: The update at which the trouble was noticed.
      began: The first suspicious one.
      samples: First excluded sample, and the end.
      source: Of the state.
      reason: A sentence or two.
      data: What fixes the meaning of a sample (BatchIterator.position).
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
        """Returns the facts of its event."""
        facts = dataclasses.asdict(self) | {"samples": list(self.samples)}
        del facts["data"]
        return facts


def write_rewinds(folder: epath.Path, rewinds: Sequence[Rewind]) -> None:
    """Writes the rollbacks of a run atomically, on one process.

    Raises:
      OSError: The file cannot be written.
    """
    rows = [dataclasses.asdict(rewind) for rewind in rewinds]
    folder.mkdir(parents=True, exist_ok=True)
    write_sealed(folder / _FILE, "rewinds", rows)


def read_rewinds(folder: epath.Path, show: Callable[[str], None]) -> tuple[Rewind, ...]:
    """Returns the rollbacks of a run, in order; none without a file, or if it is damaged.

    Raises:
      UserError: The file cannot be read.
    """
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
