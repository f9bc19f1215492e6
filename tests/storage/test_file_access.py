"""Files found by every kind of name and read at any offset, local and remote."""

import functools
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from unittest import mock

import fsspec
import pytest

from MaxText.storage import file_access
from MaxText.storage.errors import FileReadError
from tests.input_pipeline.small_data import denying
from tests.refusals import refused

NAMES = ["shard-2.tar", "shard-10.tar", "deep/er/shard-1.tar", ".hidden", "deep/.git/x"]


@pytest.fixture(params=["", "memory://"], ids=["local", "memory"])
def root(request, tmp_path):
    root = f"{request.param}{tmp_path}/d"
    for name in NAMES:
        with fsspec.open(f"{root}/{name}", "wb", auto_mkdir=True) as file:
            file.write(name.encode())
    yield root
    if request.param:
        fsspec.filesystem("memory").rm(root, recursive=True)


def below(files, root: str) -> list[str]:
    return [file.path.partition(f"{root.removeprefix('memory://')}/")[2] for file in files]


@pytest.mark.parametrize(
    ("location", "expected"),
    [
        ("", ["deep/er/shard-1.tar", "shard-2.tar", "shard-10.tar"]),
        ("/shard-2.tar", ["shard-2.tar"]),
        ("/*.tar", ["shard-2.tar", "shard-10.tar"]),
        ("/**/*.tar", ["deep/er/shard-1.tar", "shard-2.tar", "shard-10.tar"]),
        ("/shard-{10,2}.tar", ["shard-10.tar", "shard-2.tar"]),
        ("/shard-{2..2}.tar", ["shard-2.tar"]),
    ],
)
def test_locations(root, location, expected):
    assert below(file_access.list_files(root + location, "dataset_path"), root) == expected


def test_numbers_and_other_special_characters(tmp_path):
    names = ["a-008", "a-009", "a-010", "b-9", "b-10", "x[1]{2,3}*.tar"]
    for name in names:
        (tmp_path / name).touch()
    for pattern, expected in (
        ("a-{008..010}", names[:3]),
        ("b-{9..10}", names[3:5]),
        (names[5], names[5:]),
    ):
        for prefix in ("", "file://"):
            files = file_access.list_files(f"{prefix}{tmp_path}/{pattern}", "k")
            assert below(files, str(tmp_path)) == expected
    # Digits of other scripts, and superscripts, which are not decimal numbers.
    order = ["t.b0", "t.b500", "t.b1000", "t.b19500", "x1", "x٣", "x²"]
    assert sorted(order[1::2] + order[::2], key=file_access.natural_key) == order


def test_list_files_keep_their_order(root, tmp_path):
    listing = tmp_path / "train.index"
    listing.write_text(f"# first ten\n{root}/shard-10.tar\n\n  {root}/shard-2.tar\n")
    files = file_access.list_files(f"@{listing}", "dataset_path")
    assert below(files, root) == ["shard-10.tar", "shard-2.tar"]


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("", "dataset_path"),
        ("/no/such/file", "dataset_path=/no/such/file"),
        ("/no/such/*.tar", r"/\*\.tar: no such file"),
        ("/no/such/{a,b}", r"no such file \(/no/such/a\)"),
        ("@/no/such/list", "@/no/such/list"),
        ("@empty", "@empty"),
        ("@wrong", "/nowhere/a.tar"),
        ("@binary", "@binary"),
        ("memory://no-such-folder", "no such file"),
        ("nonsense://bucket/x", "nonsense://"),
        (".", "folder without files"),
    ],
)
def test_nothing_found(tmp_path, monkeypatch, location, message):
    monkeypatch.chdir(tmp_path)
    if location.startswith("@"):
        (tmp_path / "empty").write_text("# only this\n")
        (tmp_path / "wrong").write_text("/nowhere/a.tar\n")
        (tmp_path / "binary").write_bytes(b"\xff\xfe")
    refused(message, file_access.list_files, location, "dataset_path")


def read(*places):
    """The bytes of (path, offset, length) each, by one call."""
    return file_access.read_ranges(*zip(*places, strict=True))


def test_ranges_of_several_files(root):
    ten, two = f"{root}/shard-10.tar", f"{root}/shard-2.tar"
    assert file_access.file_info(ten).size == len("shard-10.tar")
    assert read((ten, 6, 2), (two, 0, 7), (ten, 11, 1), (two, 3, 0)) == [
        b"10",
        b"shard-2",
        b"r",
        b"",
    ]
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda at: read((ten, at % 12, 1))[0], range(200)))
    assert b"".join(found[:12]) == b"shard-10.tar"


def test_remote_ranges_are_one_call_and_a_folder_one_listing(tmp_path, monkeypatch):
    system, folder = fsspec.filesystem("memory"), f"memory://{tmp_path}/many"
    for number in range(30):
        system.pipe(f"{folder}/{number:03d}", bytes([number]) * 4)
    names = ("cat_ranges", "info", "ls")
    counted = {name: mock.Mock(side_effect=getattr(system, name)) for name in names}
    for name in names:
        monkeypatch.setattr(type(system), name, counted[name])
    files = file_access.list_files(f"{folder}/{{000..029}}", "dataset_path")
    assert [file.size for file in files] == [4] * 30
    assert counted["ls"].call_count == 1
    assert not counted["info"].called
    assert read(*((file.path, 1, 2) for file in files))[7] == b"\x07\x07"
    assert counted["cat_ranges"].call_count == 1
    system.rm(folder, recursive=True)


@pytest.mark.parametrize("pattern", ["{0..3}/x", "{0..3}/*"])
def test_remote_folders_are_looked_at_together(tmp_path, monkeypatch, pattern):
    system, folder, together = fsspec.filesystem("memory"), f"memory://{tmp_path}", Barrier(4)
    for number in range(4):
        system.pipe(f"{folder}/{number}/x", b"")
    info = type(system).info
    waits = lambda *args, **keys: (together.wait(9), info(*args, **keys))[1]  # noqa: E731
    monkeypatch.setattr(type(system), "info", waits)
    assert len(file_access.list_files(f"{folder}/{pattern}", "dataset_path")) == 4


def test_truncated_and_missing_files(root):
    with pytest.raises(FileReadError, match=r"shard-2\.tar ends at byte 11, where 3 more"):
        read((f"{root}/shard-2.tar", 9, 5))
    for call in (lambda name: read((name, 4, 1)), file_access.file_info):
        with pytest.raises(FileReadError, match=r"gone\.tar"):
            call(f"{root}/gone.tar")


def test_folders_and_denied_files(tmp_path, monkeypatch):
    (tmp_path / "secret").write_bytes(b"x")
    refused("is a folder", file_access.file_info, str(tmp_path))
    with pytest.raises(FileReadError, match="directory"):
        read((str(tmp_path), 0, 1))
    monkeypatch.setattr(os, "open", denying(os.open, "secret"))
    with pytest.raises(FileReadError, match=r"secret.*Permission denied"):
        read((str(tmp_path / "secret"), 0, 1))


def test_more_files_than_are_kept_open(tmp_path, monkeypatch):
    few = functools.lru_cache(128)(file_access._descriptor.__wrapped__)
    monkeypatch.setattr(file_access, "_descriptor", few)
    for number in range(200):
        (tmp_path / f"{number}").write_bytes(bytes([number]))
    with ThreadPoolExecutor(8) as threads:
        for _ in range(2):
            found = threads.map(lambda number: read((f"{tmp_path}/{number}", 0, 1))[0], range(200))
            assert list(found) == [bytes([number]) for number in range(200)]
    descriptors = Path("/proc/self/fd")
    if descriptors.exists():
        links = [Path(os.readlink(p)) for p in descriptors.iterdir() if os.path.islink(p)]
        assert 0 < sum(link.parent == tmp_path for link in links) <= 128
