"""Tar archives, indexed without being unpacked, and plain copies of compressed files."""

import gzip
import io
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from MaxText.errors import UserError
from MaxText.input_pipeline.data_errors import BadRecord
from MaxText.input_pipeline.formats.decompressed import decompressed_copy
from MaxText.input_pipeline.formats.tar_members import members
from MaxText.input_pipeline.storage import open_file

CONTENTS = {
    "a.txt": b"",
    "deep/" * 40 + "b.pth": b"x" * 513,
    "zwölf/ü.npy": b"y" * 512,
    "../../escape": b"z",
}


def write_tar(path, contents, style):
    with tarfile.open(path, "w", format=style) as archive:
        folder = tarfile.TarInfo("folder")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "a.txt"
        archive.addfile(link)
    return open_file(str(path))


@pytest.mark.parametrize("contents", [CONTENTS, {}])
@pytest.mark.parametrize("style", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_members_in_order(tmp_path, style, contents):
    file = write_tar(tmp_path / "x.tar", contents, style)
    found = [(member.name, file.read(member.offset, member.size)) for member in members(file)]
    assert found == list(contents.items())


def test_truncated_and_damaged_archives(tmp_path):
    path = tmp_path / "x.tar"
    write_tar(path, {f"{i}.npy": bytes(700) for i in range(3)}, tarfile.USTAR_FORMAT)
    content, header = path.read_bytes(), 512 + 512 + 1024
    for damaged, offset in (
        *((content[:left], r"\d") for left in range(0, 512 + 3 * (512 + 1024) + 512, 256)),
        (b"hello" * 200, 0),
        # A header whose checksum is wrong does not end the archive.
        (content[: header + 3] + b"~" + content[header + 4 :], header),
    ):
        path.write_bytes(damaged)
        with pytest.raises(BadRecord, match=rf"x\.tar at byte {offset}"):
            members(open_file(str(path)))


def test_copy_is_made_once_and_again_after_a_change(tmp_path):
    path = tmp_path / "x.tgz"
    path.write_bytes(gzip.compress(b"first"))
    shown: list[str] = []

    def copied(_=None):
        return decompressed_copy(str(path), tmp_path / "c", shown.append)

    with ThreadPoolExecutor(4) as threads:
        (copy,) = set(threads.map(copied, range(8)))
    assert Path(copy).name == "x.tar"
    assert Path(copy).read_bytes() == b"first"
    lines = len(shown)
    assert lines >= 1
    assert copied() == copy
    assert len(shown) == lines
    path.write_bytes(gzip.compress(b"second"))
    assert Path(copied()).read_bytes() == b"second"
    assert len([p for p in (tmp_path / "c").rglob("*") if p.is_file()]) == 2


@pytest.mark.parametrize(
    "content", [gzip.compress(bytes(5000), mtime=0)[:-9], b"plain text", b"\x1f\x8b"]
)
def test_damaged_gzip_leaves_no_copy(tmp_path, content):
    (tmp_path / "x.gz").write_bytes(content)
    with pytest.raises(BadRecord, match=r"x\.gz"):
        decompressed_copy(str(tmp_path / "x.gz"), tmp_path / "c", lambda _: None)
    assert not [path for path in (tmp_path / "c").rglob("*") if path.is_file()]


def test_unwritable_cache(tmp_path):
    (tmp_path / "x.gz").write_bytes(gzip.compress(b"abc"))
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"data_cache_dir=.*file"):
        decompressed_copy(str(tmp_path / "x.gz"), tmp_path / "file", lambda _: None)
