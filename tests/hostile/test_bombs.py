"""Small files that stand for gigabytes: refused, or read a piece at a time.

As a program it reads all of them, and prints what came out and how many megabytes it grew by."""

import bz2
import functools
import json
import lzma
import os
import re
import resource
import struct
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import zstandard

from MaxText.errors import UserError
from MaxText.input_pipeline.document_sources.corpus import open_corpus
from MaxText.input_pipeline.document_sources.records import read_ids
from MaxText.input_pipeline.document_sources.text_streams import Skipped
from MaxText.input_pipeline.formats import tfrecord
from MaxText.storage.errors import BadRecordError
from tests.house.sources import REPOSITORY

MEGABYTE = 1 << 20
_BLOCK = bytes(MEGABYTE)
# More than is ever read as a whole.
SIZE = 272 * MEGABYTE


def _packed(compressor, first: bytes = b"") -> bytes:
    parts = [compressor.compress(block) for block in (first, *[_BLOCK] * (SIZE // MEGABYTE))]
    return b"".join([*parts, compressor.flush()])


@functools.cache
def _gz() -> bytes:
    return _packed(zlib.compressobj(1, wbits=31))


def _long_record() -> bytes:
    """The header of a record of 2^40 bytes, with the right checksum."""
    length = struct.pack("<Q", 1 << 40)
    return length + tfrecord.masked_crc32c(length)


def _long_name() -> bytes:
    """A member of a tar archive that is the name of the next one, of 2^33 bytes."""
    member = tarfile.TarInfo("././@LongLink")
    member.type, member.size = tarfile.GNUTYPE_LONGNAME, 1 << 33
    return member.tobuf(tarfile.GNU_FORMAT)


def _zst(first: bytes = b"") -> bytes:
    return _packed(zstandard.ZstdCompressor(level=1).compressobj(), first)


_A_RECORD = "268,?435,?456"
# Maker of each file, and the number or word of the message.
FILES: dict[str, tuple[Callable[[], bytes], str]] = {
    "rows.jsonl.gz": (_gz, _A_RECORD), "rows.jsonl.zst": (_zst, _A_RECORD),
    "rows.jsonl.xz": (lambda: _packed(lzma.LZMACompressor(preset=0)), _A_RECORD),
    "rows.jsonl.bz2": (lambda: bz2.compress(_BLOCK) * (SIZE // MEGABYTE), _A_RECORD),
    "list.json.zst": (lambda: _zst(b'["'), _A_RECORD),
    "records.tfrecord.zst": (lambda: _zst(_long_record()), "1,099,511,627,776"),
    "long_name.tar.zst": (lambda: _zst(_long_name()), "8,589,934,592"),
    "ids/tokens.tfrecord.gz": (_gz, "CRC"),
    "ids/long_name.tar": (lambda: _long_name() + bytes(4096), "8,589,934,592"),
}  # fmt: skip


def _read(path: Path, name: str) -> Iterable[object]:
    if name.startswith("ids/"):
        kind = "webdataset" if ".tar" in name else "tfrecord"
        for record in read_ids(str(path), kind):
            if isinstance(record, BadRecordError):
                raise record
            yield record
    else:
        for unit in open_corpus(str(path), "text").shards:
            for _ in unit.documents(Skipped()):
                yield


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(folder: Path) -> None:
    found: dict[str, tuple[str, float]] = {}
    for name in FILES:
        path = folder / name
        before = _peak()
        try:
            outcome = f"{sum(1 for _ in _read(path, name))} documents"
        except UserError as error:
            outcome = str(error)
        found[name] = outcome, _peak() - before
    print(json.dumps(found))


@pytest.mark.slow
def test_memory_has_a_bound(tmp_path):
    """A row of 2^28 bytes is the most that is held at once, twice while its pieces are joined."""
    for name, (make, _) in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(make())
        assert path.stat().st_size < 2_000_000
    printed = subprocess.check_output(
        [sys.executable, "-m", "tests.hostile.test_bombs", str(tmp_path)],
        cwd=REPOSITORY, env={**os.environ, "MALLOC_ARENA_MAX": "1"},
    )  # fmt: skip
    found = json.loads(printed)
    for name, (_, said) in FILES.items():
        assert re.search(said, found[name][0]), (name, found[name][0])
    assert sum(megabytes for _, megabytes in found.values()) < 1000, found


if __name__ == "__main__":
    main(Path(sys.argv[1]))
