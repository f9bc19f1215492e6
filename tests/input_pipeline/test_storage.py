"""Finding files by every kind of name, and reading them at any place, local and remote."""

import os
import pickle
from concurrent.futures import ThreadPoolExecutor

import fsspec
import pytest

from MaxText.errors import UserError
from MaxText.input_pipeline import storage
from MaxText.input_pipeline.streams.bad_record import BadRecord

NAMES = ["shard-2.tar", "shard-10.tar", "deep/er/shard-1.tar", ".hidden", "deep/.git/x"]


@pytest.fixture(params=["local", "memory"])
def root(request, tmp_path):
    """A folder with NAMES, on the disk or in fsspec's memory."""
    if request.param == "memory":
        root = f"memory://{tmp_path.name}-{os.getpid()}"
        for name in NAMES:
            with fsspec.open(f"{root}/{name}", "wb") as file:
                file.write(name.encode())
        yield root
        fsspec.filesystem("memory").rm(root, recursive=True)
        return
    for name in NAMES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    yield str(tmp_path)


def below(files: list[str], root: str) -> list[str]:
    name = root.removeprefix("memory://")
    return [file[file.index(name) + len(name) + 1 :] for file in files]


@pytest.mark.parametrize(
    ("location", "expected"),
    [
        ("", ["deep/er/shard-1.tar", "shard-2.tar", "shard-10.tar"]),
        ("/shard-2.tar", ["shard-2.tar"]),
        ("/*.tar", ["shard-2.tar", "shard-10.tar"]),
        ("/**/*.tar", ["deep/er/shard-1.tar", "shard-2.tar", "shard-10.tar"]),
        ("/shard-{10,2}.tar", ["shard-10.tar", "shard-2.tar"]),
        ("/shard-{2..2}.tar", ["shard-2.tar"]),
        ("/{deep/er,.}/shard-{1,2}*", None),
    ],
)
def test_every_kind_of_name(root, location, expected):
    if expected is None:
        with pytest.raises(UserError, match=r"no such file \(.*deep/er/shard-2\*\)"):
            storage.list_files(root + location, "dataset_path")
        return
    assert below(storage.list_files(root + location, "dataset_path"), root) == expected


def test_numbers_in_braces_keep_their_zeros(tmp_path):
    for number in range(8, 12):
        (tmp_path / f"a-{number:03d}").touch()
    files = storage.list_files(f"{tmp_path}/a-{{008..011}}", "k")
    assert [os.path.basename(file) for file in files] == ["a-008", "a-009", "a-010", "a-011"]
    (tmp_path / "b-9").touch()
    (tmp_path / "b-10").touch()
    files = storage.list_files(f"{tmp_path}/b-{{9..10}}", "k")
    assert [os.path.basename(file) for file in files] == ["b-9", "b-10"]


def test_a_name_with_pattern_characters_is_itself(tmp_path):
    path = tmp_path / "a[1]{2,3}*.tar"
    path.touch()
    assert storage.list_files(str(path), "k") == [str(path)]
    assert storage.list_files(f"file://{path}", "k") == [str(path)]


def test_lists_of_files_keep_their_order(root, tmp_path):
    listing = tmp_path / "train.index"
    listing.write_text(f"# first ten\n{root}/shard-10.tar\n\n  {root}/shard-2.tar\n")
    files = storage.list_files(f"@{listing}", "dataset_path")
    assert below(files, root) == ["shard-10.tar", "shard-2.tar"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "lists no file"),
        (b"# only this\n", "lists no file"),
        (b"/nowhere/a.tar\n", r"lists /nowhere/a\.tar, which is no file"),
        (b"\xff\xfe", "is no text file"),
    ],
)
def test_lists_that_are_no_use(tmp_path, content, message):
    listing = tmp_path / "list"
    listing.write_bytes(content)
    with pytest.raises(UserError, match=message):
        storage.list_files(f"@{listing}", "dataset_path")


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("", "dataset_path is empty"),
        ("/no/such/file", "dataset_path=/no/such/file: no such file"),
        ("/no/such/*.tar", "no such file"),
        ("@/no/such/list", "cannot be looked at"),
        ("memory://no-such-folder", "no such file"),
        ("nonsense://bucket/x", "nonsense:// is no kind of address"),
    ],
)
def test_nothing_there(location, message):
    with pytest.raises(UserError, match=message):
        storage.list_files(location, "dataset_path")


def test_an_empty_folder_is_said_to_be_one(tmp_path):
    with pytest.raises(UserError, match="is a folder without files"):
        storage.list_files(str(tmp_path), "dataset_path")


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr("MaxText.buckets.paths._has_client", lambda: False)
    with pytest.raises(UserError, match=r"pip install 'MaxText\[gcs\]'"):
        storage.list_files("gs://bucket/x", "dataset_path")


def test_any_place_is_read_from_threads_and_after_pickling(root):
    file = pickle.loads(pickle.dumps(storage.open_file(f"{root}/shard-10.tar")))
    assert file.size == len("shard-10.tar")
    assert file.read(6, 2) == b"10"
    assert file.read_many([(0, 5), (11, 1), (3, 0)]) == [b"shard", b"r", b""]
    with ThreadPoolExecutor(8) as threads:
        read = list(threads.map(lambda at: file.read(at % 12, 1), range(200)))
    assert b"".join(read[:12]) == b"shard-10.tar"


def test_short_and_vanished_files_are_bad_records(root):
    file = storage.open_file(f"{root}/shard-2.tar")
    with pytest.raises(BadRecord, match="the file ends after 2 of 5 bytes") as caught:
        file.read(9, 5)
    assert (caught.value.path, caught.value.offset) == (f"{root}/shard-2.tar", 9)
    gone = storage.open_file(f"{root}/gone.tar")
    with pytest.raises(BadRecord, match="the file cannot be read") as caught:
        gone.read(4, 1)
    assert caught.value.offset == 4
    with pytest.raises(UserError, match=r"gone\.tar cannot be read"):
        _ = gone.size


def test_a_folder_where_a_file_is_expected(tmp_path):
    with pytest.raises(UserError, match="is a folder where a file is expected"):
        storage.version(str(tmp_path))
    with pytest.raises(BadRecord, match="cannot be read"):
        storage.open_file(str(tmp_path)).read(0, 1)


def test_a_file_that_may_not_be_read(tmp_path, monkeypatch):
    path = tmp_path / "secret"
    path.write_bytes(b"x")

    def denied(*arguments):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", denied)  # chmod does not stop root
    with pytest.raises(BadRecord, match="Permission denied"):
        storage.open_file(str(path)).read(0, 1)


def test_more_files_than_are_kept_open(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "_MOST_OPEN", 3)
    paths = [tmp_path / f"{number}" for number in range(20)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number]))
    files = [storage.open_file(str(path)) for path in paths]
    with ThreadPoolExecutor(8) as threads:
        for _ in range(5):
            read = list(threads.map(lambda file: file.read(0, 1), files))
            assert read == [bytes([number]) for number in range(20)]
    assert len(storage._open) <= 3


def test_blocks_slice_as_the_bytes_do(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "_BLOCK_BYTES", 7)
    content = bytes(range(100))
    (tmp_path / "x").write_bytes(content)
    blocks = storage.Blocks(storage.open_file(str(tmp_path / "x")))
    assert len(blocks) == 100
    for start, stop in [(0, 3), (2, 9), (9, 40), (39, 41), (95, 200), (3, 4), (100, 100)]:
        assert blocks[start:stop] == content[start:stop]


def test_names_below_the_shared_folder():
    assert list(storage.names_below(["/a/b/train/x", "/a/b/valid/x"])) == ["train/x", "valid/x"]
    assert list(storage.names_below(["/a/valid/x1", "/a/valid/x2"])) == ["x1", "x2"]
    assert list(storage.names_below(["gs://valid/x"])) == ["x"]
    assert list(storage.names_below([])) == []


def test_order_by_numbers():
    names = [
        "pile.tfrecord.b1000",
        "pile.tfrecord.b0",
        "pile.tfrecord.b19500",
        "pile.tfrecord.b500",
    ]
    assert sorted(names, key=storage.natural_key) == [
        "pile.tfrecord.b0", "pile.tfrecord.b500", "pile.tfrecord.b1000", "pile.tfrecord.b19500",
    ]  # fmt: skip
    # Digits of other scripts, and superscripts, which are no decimal number.
    assert sorted(["x²", "x1", "x٣"], key=storage.natural_key) == ["x1", "x٣", "x²"]
