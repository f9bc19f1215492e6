"""Where the members of archives lie, for every way of writing names, and damaged archives."""

import io
import tarfile

import pytest

from MaxText.input_pipeline.formats.tar_members import members
from MaxText.input_pipeline.storage import open_file
from MaxText.input_pipeline.streams.bad_record import BadRecord

CONTENTS = {
    "a.txt": b"",
    "deep/" * 40 + "b.pth": b"x" * 513,
    "zwölf/ü.npy": b"y" * 512,
    "../../escape": b"z",
}


def write_tar(path, contents, style=tarfile.PAX_FORMAT):
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


@pytest.mark.parametrize("style", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_every_member_is_found(tmp_path, style):
    path = tmp_path / "x.tar"
    write_tar(path, CONTENTS, style)
    file = open_file(str(path))
    found = members(file)
    assert {m.name: file.read(m.offset, m.size) for m in found} == CONTENTS
    assert [m.name for m in found] == list(CONTENTS)


def test_an_empty_archive(tmp_path):
    with tarfile.open(tmp_path / "x.tar", "w"):
        pass
    assert members(open_file(str(tmp_path / "x.tar"))) == []


def test_every_truncation_is_found(tmp_path):
    path = tmp_path / "x.tar"
    write_tar(path, {f"{i}.npy": bytes(700) for i in range(3)}, tarfile.USTAR_FORMAT)
    content = path.read_bytes()
    end = 512 + 3 * (512 + 1024) + 512
    for left in range(0, end, 256):
        path.write_bytes(content[:left])
        with pytest.raises(BadRecord):
            members(open_file(str(path)))


def test_a_damaged_header_is_not_the_end(tmp_path):
    path = tmp_path / "x.tar"
    write_tar(path, {f"{i}.npy": bytes(700) for i in range(3)}, tarfile.USTAR_FORMAT)
    content = bytearray(path.read_bytes())
    header = 512 + 512 + 1024
    content[header + 3] ^= 1
    path.write_bytes(content)
    with pytest.raises(BadRecord, match="no end mark") as caught:
        members(open_file(str(path)))
    assert caught.value.offset == header


@pytest.mark.parametrize("content", [b"", b"hello" * 200])
def test_no_archive(tmp_path, content):
    path = tmp_path / "x.tar"
    path.write_bytes(content)
    with pytest.raises(BadRecord, match=r"x\.tar at byte 0: no tar archive"):
        members(open_file(str(path)))
