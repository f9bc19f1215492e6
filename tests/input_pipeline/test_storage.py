"""Files found by every kind of name and read at any offset, local and remote."""

import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest

from MaxText.errors import UserError
from MaxText.input_pipeline import storage
from MaxText.input_pipeline.data_errors import BadRecord
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


def below(files: list[str], root: str) -> list[str]:
    return [file.partition(f"{root.removeprefix('memory://')}/")[2] for file in files]


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
    assert below(storage.list_files(root + location, "dataset_path"), root) == expected


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
            files = storage.list_files(f"{prefix}{tmp_path}/{pattern}", "k")
            assert below(files, str(tmp_path)) == expected
    # Digits of other scripts, and superscripts, which are no decimal number.
    order = ["t.b0", "t.b500", "t.b1000", "t.b19500", "x1", "x٣", "x²"]
    assert sorted(order[1::2] + order[::2], key=storage.natural_key) == order


def test_list_files_keep_their_order(root, tmp_path):
    listing = tmp_path / "train.index"
    listing.write_text(f"# first ten\n{root}/shard-10.tar\n\n  {root}/shard-2.tar\n")
    files = storage.list_files(f"@{listing}", "dataset_path")
    assert below(files, root) == ["shard-10.tar", "shard-2.tar"]


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("", "dataset_path"), ("/no/such/file", "dataset_path=/no/such/file"),
        ("/no/such/*.tar", r"/\*\.tar: no such file"),
        ("/no/such/{a,b}", r"no such file \(/no/such/a\)"), ("@/no/such/list", "@/no/such/list"),
        ("@empty", "@empty"), ("@wrong", "/nowhere/a.tar"), ("@binary", "@binary"),
        ("memory://no-such-folder", "no such file"), ("nonsense://bucket/x", "nonsense://"),
        (".", "folder without files"),
    ],
)  # fmt: skip
def test_nothing_found(tmp_path, monkeypatch, location, message):
    monkeypatch.chdir(tmp_path)
    if location.startswith("@"):
        (tmp_path / "empty").write_text("# only this\n")
        (tmp_path / "wrong").write_text("/nowhere/a.tar\n")
        (tmp_path / "binary").write_bytes(b"\xff\xfe")
    refused(message, storage.list_files, location, "dataset_path")


def test_read_from_threads_and_after_pickling(root):
    file = pickle.loads(pickle.dumps(storage.open_file(f"{root}/shard-10.tar")))
    assert file.size == len("shard-10.tar")
    assert file.read(6, 2) == b"10"
    assert file.read_many([(0, 5), (11, 1), (3, 0)]) == [b"shard", b"r", b""]
    with ThreadPoolExecutor(8) as threads:
        read = list(threads.map(lambda at: file.read(at % 12, 1), range(200)))
    assert b"".join(read[:12]) == b"shard-10.tar"


def test_truncated_and_missing_files(root):
    with pytest.raises(BadRecord, match="2 of 5 bytes") as caught:
        storage.open_file(f"{root}/shard-2.tar").read(9, 5)
    assert (caught.value.path, caught.value.offset) == (f"{root}/shard-2.tar", 9)
    gone = storage.open_file(f"{root}/gone.tar")
    with pytest.raises(BadRecord, match=r"gone\.tar") as caught:
        gone.read(4, 1)
    assert caught.value.offset == 4
    with pytest.raises(UserError, match=r"gone\.tar"):
        _ = gone.size


def test_folders_and_denied_files(tmp_path, monkeypatch):
    (tmp_path / "secret").write_bytes(b"x")
    refused("is a folder", storage.version, str(tmp_path))
    with pytest.raises(BadRecord, match="directory"):
        storage.open_file(str(tmp_path)).read(0, 1)

    monkeypatch.setattr(os, "open", denying(os.open, "secret"))
    with pytest.raises(BadRecord, match=r"secret.*Permission denied"):
        storage.open_file(str(tmp_path / "secret")).read(0, 1)


def test_more_files_than_are_kept_open(tmp_path):
    for number in range(200):
        (tmp_path / f"{number}").write_bytes(bytes([number]))
    files = [storage.open_file(f"{tmp_path}/{number}") for number in range(200)]
    with ThreadPoolExecutor(8) as threads:
        for _ in range(2):
            read = list(threads.map(lambda file: file.read(0, 1), files))
            assert read == [bytes([number]) for number in range(200)]
    descriptors = Path("/proc/self/fd")
    if descriptors.exists():
        links = [Path(os.readlink(p)) for p in descriptors.iterdir() if os.path.islink(p)]
        assert 0 < sum(link.parent == tmp_path for link in links) <= 128


def test_blocks_slice_as_the_bytes_do(tmp_path):
    size = 20 << 20  # of a few blocks
    content = bytes(range(251)) * (size // 251)
    (tmp_path / "x").write_bytes(content)
    blocks = storage.Blocks(storage.open_file(str(tmp_path / "x")))
    assert len(blocks) == len(content)
    for place in (0, 1000, (8 << 20) - 1, 8 << 20, 5, (16 << 20) + 3, len(content) - 2, 99):
        assert blocks[place : place + 4] == content[place : place + 4]
    assert blocks[3 : 18 << 20] == content[3 : 18 << 20]
