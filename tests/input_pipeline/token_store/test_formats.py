"""Token streams over files of every format: any range, threads, damage, and files that change."""

import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from MaxText.input_pipeline.data_errors import BadRecord, UnreadableFile
from MaxText.input_pipeline.formats import tf_example
from tests.input_pipeline.token_store import token_files
from tests.input_pipeline.token_store.token_files import FORMATS, RECORDS, open_data, tokens_of
from tests.refusals import refused

# Several files, one of them empty; documents without tokens at both ends of one.
SIZES = [[5, 0, 70, 1, 12, 9, 300], [], [0, 4, 0], [2]]


def write(kind, folder, sizes=SIZES):
    vocab_size = 70_000 if kind.endswith("u4") else 50_000
    parts = [token_files.documents(number, part, vocab_size) for number, part in enumerate(sizes)]
    if kind.startswith("prepared_"):  # which leaves out what has no tokens
        parts = [[document for document in part if document.size] for part in parts]
    return [document for part in parts for document in part], token_files.write(kind, folder, parts)


@pytest.mark.parametrize("kind", FORMATS)
def test_any_piece_equals_the_documents_end_to_end(tmp_path, kind):
    documents, _ = write(kind, tmp_path / "d")
    for eos_id in (-1, 7) if kind in RECORDS else (-1,):
        end = [] if eos_id < 0 else [eos_id]
        ended = [np.append(document, end) for document in documents]
        whole = np.concatenate(ended)
        store = open_data(tmp_path / "d", tmp_path / "cache", records_eos_id=eos_id).store
        assert len(store) == whole.size
        assert store.document_offsets.tolist() == np.cumsum([0, *map(len, ended)]).tolist()
        rng = np.random.default_rng(1)
        places = np.sort(rng.integers(0, whole.size + 1, (2, 50)), axis=0)
        places = np.append(places, [[0, 0, whole.size], [whole.size, 0, whole.size]], axis=1)
        rows = rng.integers(0, whole.size - 16, 40)
        copy = pickle.loads(pickle.dumps(store))
        # Long pieces, many short ones next to each other, rows of one length, none.
        for starts, stops in (
            places, (places[0], np.minimum(places[0] + 3, places[1])), (rows, rows + 16),
            (rows[:0], rows[:0]),
        ):  # fmt: skip
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
    assert store.document_name(last) in (name, f"ids.bin, document {last}")


@pytest.mark.parametrize("kind", ["prepared_bin", "megatron"])
def test_a_file_that_is_cut_later_is_named(tmp_path, kind):
    documents, files = write(kind, tmp_path / "d", [[400] * 8, [300] * 8])
    store = open_data(tmp_path / "d", tmp_path / "cache").store
    os.truncate(files[-1], 60)
    for _ in range(2):  # it stays unreadable
        with pytest.raises(UnreadableFile, match=files[-1].name):
            store.read(np.array([len(store) - 5]), np.array([len(store)]))
    if len(files) > 1:  # other files are read as before
        read = store.read(np.array([0]), np.array([5]))
        np.testing.assert_array_equal(read, documents[0][:5])


@pytest.mark.parametrize("kind", ["tfrecord", "array_record", "tar", "parquet"])
def test_a_damaged_record_is_an_error_or_left_out(tmp_path, kind):
    path = tmp_path / f"x.{kind}"
    documents = token_files.documents(0, [40] * 3 + [50])
    if kind == "parquet":
        documents[1][3] = -2
    options = {"options": "group_size:1,uncompressed"} if kind == "array_record" else {}
    bad = 1 if kind in ("tar", "parquet") else 0  # the kind of record is told by a later one
    RECORDS[kind](path, documents, **options)
    content = bytearray(path.read_bytes())
    record = tf_example.encode({"input_ids": documents[bad]})
    if kind == "tar":  # without a checksum
        content[content.index(documents[1].astype("<i8").tobytes()) + 7] = 0xFF
    elif kind != "parquet":
        content[content.index(record) + len(record) // 2] ^= 4
    path.write_bytes(content)
    with pytest.raises(BadRecord, match=path.name) as caught:
        open_data(path, tmp_path / "cache")
    keys = {"on_bad_record": "skip"}
    for _ in range(2):  # the import remembers
        lines = []
        data = open_data(path, tmp_path / "cache", show=lines.append, **keys)
        assert data.skipped == (f"Skipped a record: {caught.value}",)
        assert data.skipped[0] in lines
        left = [document for number, document in enumerate(documents) if number != bad]
        assert tokens_of(data) == np.concatenate(left).tolist()
    refused("max_bad_records=1", open_data, path, tmp_path / "c", max_bad_records=1, **keys)


def test_the_rest_of_a_file_that_was_cut_is_left_out(tmp_path):
    _, files = write("tfrecord", tmp_path / "d", [[40] * 4, [30] * 4])
    os.truncate(files[0], files[0].stat().st_size // 2 + 5)
    refused(r"ids0\.tfrecord at byte \d+: .*file ends", open_data, tmp_path / "d", tmp_path / "c")
    data = open_data(tmp_path / "d", tmp_path / "c", on_bad_record="skip")
    assert np.diff(data.store.document_offsets).tolist() == [40, 40] + [30] * 4
    assert "what follows" in data.skipped[0]


def test_more_files_than_are_kept_open(tmp_path):
    documents, files = write("prepared_bin", tmp_path / "d", [[320]] * 150)
    assert len(files) == 150
    assert tokens_of(open_data(tmp_path / "d", tmp_path)) == np.concatenate(documents).tolist()
    descriptors = Path("/proc/self/fd")
    if descriptors.exists():
        links = [os.readlink(link) for link in descriptors.iterdir() if os.path.islink(link)]
        assert 0 < sum(link in map(str, files) for link in links) < 150


def test_an_import_is_used_until_a_file_changes(tmp_path):
    folder, cache = tmp_path / "d", tmp_path / "cache"
    documents, files = write("tfrecord", folder)
    ends = np.cumsum([0, *map(len, documents)]).tolist()
    lines: list[str] = []

    def offsets():
        lines.clear()
        return open_data(folder, cache, show=lines.append).store.document_offsets.tolist()

    for is_new in (True, False):
        assert offsets() == ends
        assert bool(lines) == is_new
    # A damaged one is made anew, whatever is wrong with it; a killed one goes on.
    (made,) = (path for path in (cache / "imported").iterdir() if path.is_dir())
    for damage in (
        lambda: (made / "import.json").write_text("{"),
        lambda: (made / "tokens-00000.bin").write_bytes(b""),
        lambda: (made / "tokens-00002.bin").unlink(),
        lambda: np.save(made / "document_offsets.npy", np.zeros(12, np.int64)),
        lambda: [(made / name).unlink() for name in ("import.json", "file-00001.json")],
    ):
        damage()
        assert offsets() == ends
        assert lines
    # Other records in as many bytes.
    size = files[2].stat().st_size
    token_files.write_tfrecord(files[2], token_files.documents(2, [4, 0, 0]))
    assert files[2].stat().st_size == size
    os.utime(files[2], ns=(1, 1))
    assert np.diff(offsets())[7:10].tolist() == [4, 0, 0]
    # Of several that ask at once one works.
    with ThreadPoolExecutor(4) as threads:
        made = [*threads.map(lambda _: open_data(folder, tmp_path / "new").store, range(4))]
    assert len({int(store.document_offsets[-1]) for store in made}) == 1
    (tmp_path / "file").touch()
    refused(r"data_cache_dir=.*file", open_data, folder, tmp_path / "file")


def test_ids_above_65535_take_four_bytes_in_all_files(tmp_path):
    folder = tmp_path / "d"
    folder.mkdir()
    small, large = np.arange(2**20 + 5), np.array([7, 2**31 - 1])
    for name, document in (("a", small % 1000), ("b", np.append(small % 1000, large))):
        token_files.write_tfrecord(folder / f"{name}.tfrecord", [document])
    data = open_data(folder, tmp_path / "cache")
    whole = np.concatenate([small % 1000, small % 1000, large])
    np.testing.assert_array_equal(data.store.read(np.array([0]), np.array([whole.size])), whole)
    assert data.largest_id == 2**31 - 1


PADDED = [[101, 5, 0, 7, 102, 0], [101, 0, 102, 0, 0, 0]]
MASKS = [[1.0, 1.0, 0.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]]


@pytest.mark.parametrize(
    "labels",
    [
        None,
        [[5, 0, 7, 102, -100, -100], [0, 102, -1, -100, 9, 9]],
        [[101, 5, 0, 7, 102, -100], [101, 0, 102, -100, -100, -100]],  # of their own places
    ],
)
def test_attention_mask_and_labels_of_a_table(tmp_path, labels):
    columns = {"attention_mask": pyarrow.array(MASKS, pyarrow.list_(pyarrow.float32()))}
    if labels is not None:
        columns["labels"] = pyarrow.array(labels, pyarrow.list_(pyarrow.int64()))
    path = tmp_path / "x.parquet"
    token_files.write_parquet(path, [np.array(row) for row in PADDED], **columns)
    data = open_data(path, tmp_path)
    if labels is None:
        # Padding is told by the mask, never by id 0.
        assert data.labels is None
        assert data.store.document_offsets.tolist() == [0, 5, 8]
        assert tokens_of(data) == [101, 5, 0, 7, 102, 101, 0, 102]
        return
    assert data.record_length == 6
    assert tokens_of(data) == [*PADDED[0], *PADDED[1]]
    assert data.labels is not None
    read = data.labels.read(np.array([0]), np.array([12]))
    assert read.tolist() == [5, 0, 7, 102, -100, -100, 0, 102, -100, -100, -100, -100]
    refused(r"records_eos_id=1: .*labels", open_data, path, tmp_path, records_eos_id=1)


@pytest.mark.parametrize("kind", ["large", "fixed", "file", "no list", "no value"])
def test_kinds_of_lists_in_a_table(tmp_path, kind):
    rows = [[1, 2], [3, 4], [5, 6]]
    path = tmp_path / "x.parquet"
    if kind == "file":
        token_files.write_arrow(path, [np.array(row) for row in rows], stream=False)
    else:
        column = {
            "large": pyarrow.array(rows, pyarrow.large_list(pyarrow.uint16())),
            "fixed": pyarrow.array(rows, pyarrow.list_(pyarrow.int64(), 2)),
            "no list": pyarrow.array([[1], None], pyarrow.list_(pyarrow.int32())),
            "no value": pyarrow.array([[1, None]], pyarrow.list_(pyarrow.int32())),
        }[kind]
        parquet.write_table(pyarrow.table({"input_ids": column}), path)
    if kind.startswith("no"):
        with pytest.raises(
            BadRecord, match=rf"{path.name} at row \d: the row (has no list|lacks a value)"
        ):
            open_data(path, tmp_path)
    else:
        assert tokens_of(open_data(path, tmp_path)) == [1, 2, 3, 4, 5, 6]
