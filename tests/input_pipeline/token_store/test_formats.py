"""Token streams over files of every format: any range, threads, damage, and files that change."""

import os
import pickle
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow
import pytest

from MaxText.input_pipeline.formats import tf_example
from MaxText.storage.atomic import lock
from MaxText.storage.errors import BadRecordError, FileReadError
from tests.input_pipeline.token_store import token_files
from tests.input_pipeline.token_store.token_files import FORMATS, RECORDS, open_data, tokens_of
from tests.refusals import refused

# Several files, one of them empty; documents without tokens at both ends of one.
SIZES = [[5, 0, 70, 1, 12, 9, 300], [], [0, 4, 0], [2]]


def write(kind, folder, sizes=SIZES):
    vocab_size = 70_000 if kind.endswith("u4") else 50_000
    parts = [token_files.documents(number, part, vocab_size) for number, part in enumerate(sizes)]
    if kind.startswith("prepared_"):  # which skips what has no tokens
        parts = [[document for document in part if document.size] for part in parts]
    return [document for part in parts for document in part], token_files.write(kind, folder, parts)


@pytest.mark.parametrize("kind", FORMATS)
def test_any_piece_equals_the_documents_end_to_end(tmp_path, kind):
    documents, _ = write(kind, tmp_path / "d")
    for eos_id in (-1, 7) if kind in RECORDS else (-1,):
        end = [] if eos_id < 0 else [eos_id]
        ended = [np.append(document, end) for document in documents]
        whole = np.concatenate(ended)
        keys = {"token_records.eos_id": eos_id}
        store = open_data(tmp_path / "d", tmp_path / "cache", **keys).store
        assert len(store) == whole.size
        assert store.document_offsets.tolist() == np.cumsum([0, *map(len, ended)]).tolist()
        rng = np.random.default_rng(1)
        places = np.sort(rng.integers(0, whole.size + 1, (2, 50)), axis=0)
        places = np.append(places, [[0, 0, whole.size], [whole.size, 0, whole.size]], axis=1)
        rows = rng.integers(0, whole.size - 16, 40)
        copy = pickle.loads(pickle.dumps(store))
        # Long pieces, many short ones next to each other, rows of one length, none.
        for starts, stops in (
            places,
            (places[0], np.minimum(places[0] + 3, places[1])),
            (rows, rows + 16),
            (rows[:0], rows[:0]),
        ):
            expected = [whole[start:stop] for start, stop in zip(starts, stops, strict=True)]
            read = store.read(starts, stops)
            assert read.dtype == np.int32
            np.testing.assert_array_equal(read, np.concatenate([whole[:0], *expected]))
            with ThreadPoolExecutor(6) as threads:
                ones = threads.map(copy.read, starts[:, None], stops[:, None])
            for one, piece in zip(ones, expected, strict=True):
                np.testing.assert_array_equal(one, piece)
        assert len(pickle.dumps(store)) < 5000
    last = len(documents) - 1
    name = f"ids3.{kind}, record 0" if kind in RECORDS else f"numbers.txt, row {last}"
    assert store.document_name(last) in (name, f"document {last}")


def test_one_process_imports_and_the_others_wait(tmp_path):
    """As hosts do that share a folder for data_cache_dir."""
    write("tfrecord", tmp_path / "d")
    open_data(tmp_path / "d", tmp_path / "first")
    (made,) = (path.name for path in (tmp_path / "first/imported").iterdir() if path.is_dir())
    (shared := tmp_path / "shared/imported").mkdir(parents=True)
    code = (
        "import functools, pathlib\n"
        "from tests.input_pipeline.token_store.token_files import open_data\n"
        "open_data('d', pathlib.Path('shared'), log=functools.partial(print, flush=True))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code]
    options = {"cwd": tmp_path, "env": environment, "stdout": subprocess.PIPE, "text": True}
    with lock(shared / f".{made}.lock", str):
        others = [subprocess.Popen(command, **options) for _ in range(2)]
        for other in others:
            assert other.stdout.readline().startswith(f"Waiting for process {os.getpid()} on ")
    lines = [other.communicate()[0].splitlines() for other in others]
    assert sorted(map(bool, lines)) == [False, True], lines  # what importing says
    assert [other.returncode for other in others] == [0, 0]


def test_a_damaged_record_is_an_error_or_skipped(tmp_path):
    path, documents = tmp_path / "x.tfrecord", token_files.documents(0, [40] * 3 + [50])
    token_files.write_tfrecord(path, documents)
    content = bytearray(path.read_bytes())
    content[content.index(tf_example.encode({"input_ids": documents[0]})) + 30] ^= 4
    path.write_bytes(content)
    with pytest.raises(BadRecordError, match=path.name) as caught:
        open_data(path, tmp_path / "cache")
    keys = {"bad_records.action": "skip"}
    for _ in range(2):  # the import remembers
        lines = []
        data = open_data(path, tmp_path / "cache", log=lines.append, **keys)
        assert data.skipped == (f"Skipped a record: {caught.value}",)
        assert data.skipped[0] in lines
        assert tokens_of(data) == np.concatenate(documents[1:]).tolist()
    keys |= {"bad_records.maximum": 1}
    for cache in ("c", "cache"):  # of which one has the import
        refused("bad_records.maximum=1", open_data, path, tmp_path / cache, **keys)


@pytest.mark.parametrize(
    "kind", [*RECORDS, "prepared_bin", "prepared_bin_u4", "prepared_array_record"]
)
@pytest.mark.parametrize("at", [0, 0.7, -1])
def test_a_flipped_bit_is_found(tmp_path, kind, at):
    documents, _ = write(kind, tmp_path / "d", [[40] * 3, [4000, 3000]])
    whole, ends = np.concatenate(documents), (np.array([0]), np.array([7120]))
    path = Path(open_data(tmp_path / "d", tmp_path / "cache").store.files[-1])
    content = bytearray(path.read_bytes())
    content[int(at * len(content)) if at > 0 else at] ^= 64
    path.write_bytes(content)
    store = open_data(tmp_path / "d", tmp_path / "cache").store
    with pytest.raises(FileReadError, match=rf"{path} is damaged: .* from byte \d.*Copy it again"):
        store.read(*ends)
    # The block is what counts: reads elsewhere give what was written.
    np.testing.assert_array_equal(store.read(ends[0], ends[0] + 100), whole[:100])
    for checksums in tmp_path.rglob("*_crc32c.npy"):
        without_brace = checksums.read_bytes().replace(b"}", b"{", 1)
        np.save(checksums, np.load(checksums)[1:])
        problem = r"_crc32c\.npy belongs to other data"
        refused(problem, open_data, tmp_path / "d", tmp_path / "cache")
        checksums.write_bytes(without_brace)
        refused(r"_crc32c\.npy is damaged", open_data, tmp_path / "d", tmp_path / "cache")
        checksums.unlink()  # as where they were not copied
    assert (open_data(tmp_path / "d", tmp_path / "cache").store.read(*ends) != whole).sum() == 1


def test_the_rest_of_a_truncated_file_is_skipped(tmp_path):
    _, files = write("tfrecord", tmp_path / "d", [[40] * 4, [30] * 4])
    os.truncate(files[0], files[0].stat().st_size // 2 + 5)
    refused(r"ids0\.tfrecord at byte \d+: .*truncated", open_data, tmp_path / "d", tmp_path / "c")
    data = open_data(tmp_path / "d", tmp_path / "c", **{"bad_records.action": "skip"})
    assert np.diff(data.store.document_offsets).tolist() == [40, 40] + [30] * 4
    assert "rest of the file is skipped" in data.skipped[0]


def test_an_import_is_used_until_a_file_changes(tmp_path):
    folder, cache = tmp_path / "d", tmp_path / "cache"
    documents, files = write("tfrecord", folder)
    ends = np.cumsum([0, *map(len, documents)]).tolist()
    lines: list[str] = []

    def offsets():
        lines.clear()
        return open_data(folder, cache, log=lines.append).store.document_offsets.tolist()

    for is_new in (True, False):
        assert offsets() == ends
        assert bool(lines) == is_new
    (header,) = cache.glob("imported/*/import.json")
    # A killed one goes on.
    before = header.with_name("tokens-00000.bin").stat().st_mtime_ns
    for name in ("import.json", "uint16/000001.json"):
        (header.parent / name).unlink()
    os.utime(header.parent, (0, 0))  # long ago
    assert offsets() == ends
    assert lines
    assert before == header.with_name("tokens-00000.bin").stat().st_mtime_ns
    # Other records in as many bytes.
    size = files[2].stat().st_size
    token_files.write_tfrecord(files[2], token_files.documents(2, [4, 0, 0]))
    assert files[2].stat().st_size == size
    os.utime(files[2], ns=(1, 1))
    assert np.diff(offsets())[7:10].tolist() == [4, 0, 0]
    refused(r"data_cache_dir=.*tfrecord", open_data, folder, files[0])


def test_ids_above_65535_take_four_bytes_in_all_files(tmp_path):
    folder = tmp_path / "d"
    folder.mkdir()
    small, large = np.arange(2**20 + 5), np.array([7, 2**31 - 1])
    for name, document in (("a", small % 1000), ("b", np.append(small % 1000, large))):
        token_files.write_tfrecord(folder / f"{name}.tfrecord", [document])
    whole = np.concatenate([small % 1000, small % 1000, large])
    lines: list[str] = []
    for _ in range(2):  # the second one goes on after a kill
        data = open_data(folder, tmp_path / "cache", log=lines.append)
        np.testing.assert_array_equal(data.store.read(np.array([0]), np.array([whole.size])), whole)
        assert data.max_token_id == 2**31 - 1
        for name in ("import.json", "uint32/000001.json"):
            next(tmp_path.glob(f"cache/imported/*/{name}")).unlink()
    assert re.findall(r"about (.*?) MB, (\d)", str(lines)) == [("4.2", "2"), *[("8.4", "4")] * 2]


def test_labels_are_imported_next_to_the_ids(tmp_path):
    labels = pyarrow.array([[6, 7, -100], [9, -1, -100]], pyarrow.list_(pyarrow.int64()))
    path, ids = tmp_path / "x.parquet", [np.array([5, 6, 7]), np.array([8, 9, 0])]
    token_files.write_parquet(path, ids, labels=labels)
    data = open_data(path, tmp_path)
    assert (data.record_length, tokens_of(data)) == (3, [5, 6, 7, 8, 9, 0])
    assert data.labels is not None
    read = data.labels.read(np.array([0]), np.array([6]))
    assert read.tolist() == [6, 7, -100, 9, -100, -100]
    keys = {"token_records.eos_id": 1}
    refused(r"token_records.eos_id=1: .*labels", open_data, path, tmp_path, **keys)
    for name in "yw":  # the first and the last of the files
        token_files.write_parquet(tmp_path / f"{name}.parquet", ids)
        refused(f"{name}.parquet.* labels", open_data, tmp_path / f"[x{name}].parquet", tmp_path)


@pytest.mark.parametrize(("kind", "size"), [("tfrecord", 1), ("parquet", 3)])
def test_an_import_says_its_size_before(tmp_path, kind, size):
    ids, path, lines = np.arange(36_000).reshape(-1, size) % 1000, tmp_path / f"x.{kind}", []
    labels = {"labels": pyarrow.array(ids.tolist()), "row_group_size": 999}
    RECORDS[kind](path, ids, **(labels if kind == "parquet" else {}))
    open_data(path, tmp_path, log=lines.append)
    size = sum(file.stat().st_size for file in tmp_path.glob("imported/*/*"))
    assert float(re.findall(r"about (.*?) MB", lines[0])[0]) == pytest.approx(size / 1e6, abs=0.06)
