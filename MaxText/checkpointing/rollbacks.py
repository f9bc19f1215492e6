"""Rollbacks of a run and their excluded samples: `rollbacks.json`.

The next checkpoint also stores the exclusions. Until then a restart resumes from an earlier state
and would hit the same data again without this file.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from etils import epath

from MaxText.errors import UserError
from MaxText.storage.atomic import read_json_with_digest, write_json_with_digest

_FILE = "rollbacks.json"
_OLD_FILE = "rewinds.json"  # its name in earlier versions


@dataclasses.dataclass(frozen=True)
class Rollback:
    """A rollback."""

    number: int  # counts rollbacks of the run, from 1
    restored_step: int  # the next step after it
    detected_step: int  # the step at which it was triggered
    onset_step: int  # the first suspicious step
    samples: tuple[int, int]  # range of excluded samples, end exclusive
    source: str
    reason: str
    data: Mapping[str, Any]  # settings that fix the meaning of a sample number

    def facts(self) -> dict[str, Any]:
        facts = dataclasses.asdict(self) | {"samples": list(self.samples)}
        del facts["data"]
        return facts


def write_rollbacks(folder: epath.Path, rollbacks: Sequence[Rollback]) -> None:
    """Writes the rollbacks atomically; call it on one process only."""
    rows = [dataclasses.asdict(rollback) for rollback in rollbacks]
    folder.mkdir(parents=True, exist_ok=True)
    write_json_with_digest(folder / _FILE, "rollbacks", rows)


def read_rollbacks(folder: epath.Path, show: Callable[[str], None]) -> tuple[Rollback, ...]:
    """Returns the rollbacks in order, none if missing or damaged."""
    path = folder / _FILE
    try:
        rows: Any = read_json_with_digest(path, "rollbacks")
        if rows is None:
            old = read_json_with_digest(folder / _OLD_FILE, "rewinds") or []
            # Fields had other names, in the same order.
            names = [field.name for field in dataclasses.fields(Rollback)]
            rows = (dict(zip(names, row.values(), strict=True)) for row in old)
        return tuple(Rollback(**row | {"samples": tuple(row["samples"])}) for row in rows)
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error}. Fix the folder; without the file the run would train "
            "again on data that rollbacks excluded."
        ) from error
    except (ValueError, LookupError, TypeError) as error:
        show(
            f"WARNING: cannot read {path}: {error}. The run may repeat rollbacks that happened "
            "after the checkpoint it resumes from."
        )
        return ()
