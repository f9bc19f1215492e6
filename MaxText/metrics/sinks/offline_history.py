"""Rows of a run in W&B's local files, and their numbers.

W&B's own process writes them in the background and loses its buffer when the machine or the
training program is killed, so only the files tell what was kept.

A file is a log of protobuf records in LevelDB's format (leveldb/doc/log_format.md) with 7 bytes of
W&B's own at the start of the first block. Blocks have 32 KiB and hold chunks: a 4-byte checksum, a
2-byte length, a type, and data. A record is one whole chunk, or a first, any number of middle and a
last chunk.
"""

import pathlib
import struct
from collections.abc import Iterator
from typing import Any

_FILE_HEADER = 7
_BLOCK = 32 * 1024
_CHUNK_HEADER = struct.Struct("<IHB")
_WHOLE, _FIRST, _LAST = 1, 2, 4


class RowNumbers:
    """Numbers of W&B's rows, which only grow, for steps that a run may repeat.

    Attributes:
      lacking: The first step that W&B does not have in its valid version.
    """

    def __init__(self, shifts: list[list[int]], next_row: int):
        """Restores the numbering.

        Args:
          shifts: [first step, what is added to it and later ones], in order; the last one holds.
            `begin_again` adds to the list.
          next_row: The first row that W&B does not have.
        """
        self._shifts = shifts
        self._next_row = next_row
        firsts = []
        for first, shift in reversed(shifts):
            if next_row >= first + shift:
                firsts.append(next_row - shift)
                break
            firsts.append(first)
        self.lacking = min(firsts)

    def row(self, step: int) -> int:
        """Returns the number of the row of a step, which is about to be sent."""
        number = step + self._shifts[-1][1]
        self._next_row = max(self._next_row, number + 1)
        return number

    def begin_again(self, step: int) -> None:
        """Makes further rows of the steps from `step` on, if W&B has any of them."""
        if self._next_row > step + self._shifts[-1][1]:
            self._shifts.append([step, self._next_row - step])
            self.lacking = min(self.lacking, step)


def next_step(wandb_folder: pathlib.Path, run_id: str) -> int:
    """Returns the number of the first row that the files of a run lack; 0 if they hold none.

    Numbers only grow between attempts, so the newest file with a row decides.

    Args:
      wandb_folder: With a folder for each attempt, such as `offline-run-20261121_124740-1f0c`.
    """
    files = wandb_folder.glob(f"*run-*-{run_id}*/run-{run_id}.wandb")
    for file in sorted(files, key=lambda file: file.parent.name.partition("run-")[2], reverse=True):
        steps = history_steps(file)
        if steps:
            return steps[-1] + 1
    return 0


def history_steps(file: pathlib.Path) -> list[int]:
    """Returns the numbers of all rows in a file, W&B's steps, in their order."""
    return [record.history.step.num for record in records(file) if record.HasField("history")]


def records(file: pathlib.Path) -> Iterator[Any]:
    """Yields the complete records of a file, as messages `Record` of W&B, which this imports."""
    from wandb.proto import wandb_internal_pb2

    for data in _payloads(file):
        # The module takes its names from one of several others, by the version of protobuf.
        yield wandb_internal_pb2.Record.FromString(data)  # pyright: ignore


def _payloads(file: pathlib.Path) -> Iterator[bytes]:
    """Yields the contents of records, up to a truncated one."""
    record = b""
    with file.open("rb") as stream:
        place = _FILE_HEADER
        while block := stream.read(_BLOCK):
            while place + _CHUNK_HEADER.size <= len(block):
                _, length, kind = _CHUNK_HEADER.unpack_from(block, place)
                place += _CHUNK_HEADER.size
                chunk = block[place : place + length]
                if len(chunk) < length:
                    return
                place += length
                record = chunk if kind in (_WHOLE, _FIRST) else record + chunk
                if kind in (_WHOLE, _LAST):
                    yield record
            place = 0
