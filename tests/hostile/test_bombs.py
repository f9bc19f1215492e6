"""Small files that stand for gigabytes: refused, or read a piece at a time."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.hostile import bombs
from tests.house.sources import REPOSITORY

# What comes out, and the most megabytes that a file may add to what those before it took.
REFUSED = {
    "rows.jsonl.gz": "longer than 268435456 bytes",
    "rows.jsonl.zst": "longer than 268435456 bytes",
    "rows.jsonl.xz": "longer than 268435456 bytes",
    "rows.jsonl.bz2": "longer than 268435456 bytes",
    "list.json.zst": "a value is longer than 268435456 characters",
    "lines.gz.named/lines.gz": "longer than 268435456 bytes",
    "counted.dat.zst": "has 9,999,999,999,999,999 bytes; up to 268,435,456 are read",
    "records.tfrecord.zst": "has 1,099,511,627,776 bytes; up to 268,435,456 are read",
    "records.tfrecord.gz": "has 1,099,511,627,776 bytes; up to 268,435,456 are read",
    "rows.zip": "longer than 268435456 bytes",
    "bzip2.zip": "it is compressed by bzip2",
    "nested.zip": "an archive of more than 268,435,456 bytes in another one",
    "long_name.tar.zst": "a header claims 8,589,934,592 bytes",
    "copy/tokens.tfrecord.gz": "grows to more than 200 times its size",
    "webdataset/long_name.tar": "a header claims 8,589,934,592 bytes",
}


@pytest.mark.slow
def test_memory_has_a_bound(tmp_path):
    """A row of 2^28 bytes is the most that is held at once, twice while its pieces are joined."""
    assert REFUSED.keys() == bombs.FILES.keys()
    for name, make in bombs.FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(make())
        assert path.stat().st_size < 500_000
    ended = subprocess.run(
        [sys.executable, "-m", "tests.hostile.bombs", str(tmp_path)],
        cwd=REPOSITORY,
        env={**os.environ, "MALLOC_ARENA_MAX": "1"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    for name, message in REFUSED.items():
        assert re.search(re.escape(message), found[name][0]), (name, found[name][0])
    assert sum(megabytes for _, megabytes in found.values()) < 1000, found
    # Of the copy that was begun nothing is left.
    assert not [path for path in (tmp_path / "copy").rglob("*") if path.stat().st_size > 1 << 20]
