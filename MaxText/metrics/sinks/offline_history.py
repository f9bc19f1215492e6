"""Row numbers of a run in W&B's local files.

W&B's own process writes them in the background and loses its buffer when the machine or the
training program is killed, so only the files show what was kept. A file is a log of protobuf
records in LevelDB's format (leveldb/doc/log_format.md), after W&B's 7-byte header in the first
block. Blocks of 32 KiB hold chunks: a 4-byte checksum, a 2-byte length, a type, and data. A record
is one whole chunk, or a first, any number of middle and a last chunk.
"""

import pathlib
import struct
from collections.abc import Iterator
from typing import Any

_FILE_HEADER = 7
_BLOCK = 32 * 1024
_CHUNK_HEADER = struct.Struct("<IHB")
_WHOLE, _FIRST, _LAST = 1, 2, 4


class StepCounter:
    """Maps repeatable steps to W&B's row numbers, growing only.

    `first_missing` is the first step whose valid version W&B does not have.
    """

    def __init__(self, shifts: list[list[int]], next_row: int):
        """Takes [first step, offset] pairs, and W&B's first missing row."""
        self._shifts = shifts
        self._next_row = next_row
        firsts = []
        for first, shift in reversed(shifts):
            if next_row >= first + shift:
                firsts.append(next_row - shift)
                break
            firsts.append(first)
        self.first_missing = min(firsts)

    def row(self, step: int) -> int:
        """Returns the row number of the next step to send."""
        number = step + self._shifts[-1][1]
        self._next_row = max(self._next_row, number + 1)
        return number

    def repeat_from(self, step: int) -> None:
        """Starts new rows for the steps from `step` on, if W&B has any of them."""
        if self._next_row > step + self._shifts[-1][1]:
            self._shifts.append([step, self._next_row - step])
            self.first_missing = min(self.first_missing, step)


def next_step(wandb_folder: pathlib.Path, run_id: str) -> int:
    """Returns the first row missing in a run's files; 0 without rows.

    Numbers only grow between attempts, so the newest file with a row decides.
    """
    files = wandb_folder.glob(f"*run-*-{run_id}*/run-{run_id}.wandb")
    for file in sorted(files, key=lambda file: file.parent.name.partition("run-")[2], reverse=True):
        rows = [record.history for record in records(file) if record.HasField("history")]
        if rows:
            return rows[-1].step.num + 1
    return 0


def records(file: pathlib.Path) -> Iterator[Any]:
    """Yields the complete W&B `Record` messages of a file."""
    from wandb.proto import wandb_internal_pb2

    for data in _payloads(file):
        # The module re-exports another one, depending on the protobuf version.
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
