"""Where a run has gone back, and what it leaves out since: `rewinds.json` beside its checkpoints.

The next checkpoint knows what was left out. Until there is one, a restart begins at a state from
before the trouble, and would meet the trouble again without this file.
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
    """One time that a run went back.

    Attributes:
      number: 1 for the first of the run.
      to: the update that was done next.
      noticed: the update at which the trouble was noticed.
      began: the first suspicious one.
      samples: first sample that is left out, and the one after the last.
      source: what the state came from.
      reason: a sentence or two.
      data: what fixes the meaning of a sample (BatchIterator.position).
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
        """What its event says."""
        facts = dataclasses.asdict(self) | {"samples": list(self.samples)}
        del facts["data"]
        return facts


def write_rewinds(folder: epath.Path, rewinds: Sequence[Rewind]) -> None:
    """Writes the file, whole or not at all. One process does it.

    Args:
      folder: of the checkpoints; may be gs://.
      rewinds: all of the run, in order.

    Raises:
      OSError: the file cannot be written.
    """
    rows = [dataclasses.asdict(rewind) for rewind in rewinds]
    folder.mkdir(parents=True, exist_ok=True)
    write_sealed(folder / _FILE, "rewinds", rows)


def read_rewinds(folder: epath.Path, show: Callable[[str], None]) -> tuple[Rewind, ...]:
    """The rewinds of a run, in order; none if there is no file.

    Args:
      folder: of the checkpoints.
      show: told when the file is damaged, which then counts as none.

    Raises:
      UserError: the file cannot be read.
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
