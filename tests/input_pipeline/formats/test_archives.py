"""Tar archives, indexed without being unpacked, and plain copies of compressed files."""

import gzip
import io
import tarfile

import pytest

from MaxText.input_pipeline.data_errors import BadRecord
from MaxText.input_pipeline.formats.tar_members import members
from MaxText.input_pipeline.formats.token_records import plain_stream
from MaxText.input_pipeline.storage import file_info

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


def found(path):
    with open(path, "rb") as stream:
        return members(stream, str(path))


@pytest.mark.parametrize("contents", [CONTENTS, {}])
@pytest.mark.parametrize("style", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_members_in_order(tmp_path, style, contents):
    write_tar(tmp_path / "x.tar", contents, style)
    content = (tmp_path / "x.tar").read_bytes()
    assert [
        (member.name, content[member.offset : member.offset + member.size])
        for member in found(tmp_path / "x.tar")
    ] == list(contents.items())


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
            found(path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (gzip.compress(bytes(5000), mtime=0)[:-9], "cut short"), (b"plain text", "damaged"),
        (b"\x1f\x8b", "cut short"), (gzip.compress(bytes(1 << 27), mtime=0), "fill a disk"),
    ],
)  # fmt: skip
def test_damaged_gzip_files(tmp_path, content, reason):
    path = tmp_path / "x.tgz"
    path.write_bytes(content)
    with pytest.raises(BadRecord, match=rf"x\.tgz .*{reason}"), plain_stream(file_info(str(path))):
        pass
    path.write_bytes(gzip.compress(b"whole"))
    with plain_stream(file_info(str(path))) as stream:
        assert stream.read() == b"whole"
