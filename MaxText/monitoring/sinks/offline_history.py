"""Which steps of a run stand in the files that W&B keeps on this machine.

W&B's own process writes them in the background and loses what it still buffers when the machine or
the training program is killed. So what was handed over says little; the files say what is there.

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


def next_step(wandb_folder: pathlib.Path, run_id: str) -> int:
    """The first step that the files of a run lack; 0 if they hold none.

    Steps only grow from one attempt of a run to the next, so the newest file with a step decides.

    Args:
      wandb_folder: holds a folder for each attempt, such as `offline-run-20261121_124740-1f0c`.
      run_id: W&B's id of the run.
    """
    files = wandb_folder.glob(f"*run-*-{run_id}*/run-{run_id}.wandb")
    for file in sorted(files, key=lambda file: file.parent.name.partition("run-")[2], reverse=True):
        steps = history_steps(file)
        if steps:
            return steps[-1] + 1
    return 0


def history_steps(file: pathlib.Path) -> list[int]:
    """The steps of all rows in a file, in their order."""
    return [record.history.step.num for record in records(file) if record.HasField("history")]


def records(file: pathlib.Path) -> Iterator[Any]:
    """The whole records of a file, as messages `Record` of W&B, which this imports."""
    from wandb.proto import wandb_internal_pb2

    for data in _payloads(file):
        # The module takes its names from one of several others, by the version of protobuf.
        yield wandb_internal_pb2.Record.FromString(data)  # pyright: ignore


def _payloads(file: pathlib.Path) -> Iterator[bytes]:
    """What the records of a file hold; one that was cut off by a crash ends it."""
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
