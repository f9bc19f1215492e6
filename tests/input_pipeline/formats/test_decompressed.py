"""Plain copies of compressed files."""

import gzip
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from MaxText.errors import UserError
from MaxText.input_pipeline.formats.decompressed import decompressed_copy
from MaxText.input_pipeline.streams.bad_record import BadRecord


def test_a_copy_is_made_once_and_again_after_a_change(tmp_path):
    path = tmp_path / "x.tar.gz"
    path.write_bytes(gzip.compress(b"first"))
    shown: list[str] = []
    with ThreadPoolExecutor(4) as threads:
        copies = set(
            threads.map(
                lambda _: decompressed_copy(str(path), tmp_path / "c", shown.append), range(8)
            )
        )
    (copy,) = copies
    assert Path(copy).name == "x.tar"
    assert Path(copy).read_bytes() == b"first"
    lines = len(shown)
    assert lines >= 1
    assert decompressed_copy(str(path), tmp_path / "c", shown.append) == copy
    assert len(shown) == lines
    path.write_bytes(gzip.compress(b"second"))
    other = decompressed_copy(str(path), tmp_path / "c", shown.append)
    assert Path(other).read_bytes() == b"second"
    assert len([p for p in (tmp_path / "c").rglob("*") if p.is_file()]) == 2


def test_tgz_becomes_tar(tmp_path):
    (tmp_path / "x.tgz").write_bytes(gzip.compress(b"abc"))
    assert decompressed_copy(str(tmp_path / "x.tgz"), tmp_path, lambda _: None).endswith("/x.tar")


@pytest.mark.parametrize(
    "content", [gzip.compress(bytes(5000), mtime=0)[:-9], b"plain text", b"\x1f\x8b"]
)
def test_damage_leaves_no_copy(tmp_path, content):
    (tmp_path / "x.gz").write_bytes(content)
    with pytest.raises(BadRecord, match="the compressed file is"):
        decompressed_copy(str(tmp_path / "x.gz"), tmp_path / "c", lambda _: None)
    assert not [path for path in (tmp_path / "c").rglob("*") if path.is_file()]


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "x.gz").write_bytes(gzip.compress(b"abc"))
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"data_cache_dir=.*file cannot be written"):
        decompressed_copy(str(tmp_path / "x.gz"), tmp_path / "file", lambda _: None)
