"""Token streams over files of every format: any range, threads, damage, and files that change."""

import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from MaxText.errors import UserError
from MaxText.input_pipeline.data_errors import BadRecord
from MaxText.input_pipeline.formats import tf_example
from MaxText.input_pipeline.formats.table_ids import TableIds
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
def test_any_range_equals_the_documents_end_to_end(tmp_path, kind):
    documents, _ = write(kind, tmp_path / "d")
    for eos_id in (-1, 7) if kind in RECORDS else (-1,):
        end = [] if eos_id < 0 else [eos_id]
        ended = [np.append(document, end) for document in documents]
        whole = np.concatenate(ended)
        stream = open_data(tmp_path / "d", tmp_path / "cache", records_eos_id=eos_id).stream
        assert len(stream) == whole.size
        assert stream.document_offsets.tolist() == np.cumsum([0, *map(len, ended)]).tolist()
        rng = np.random.default_rng(1)
        places = [tuple(sorted(rng.integers(0, whole.size + 1, 2).tolist())) for _ in range(50)]
        places += [(0, whole.size), (0, 0), (whole.size, whole.size)]
        copy = pickle.loads(pickle.dumps(stream))
        with ThreadPoolExecutor(6) as threads:
            one_by_one = [one for (one,) in threads.map(copy.ranges, [[at] for at in places])]
        pieces = stream.ranges(places)
        for (start, stop), piece, one in zip(places, pieces, one_by_one, strict=True):
            assert piece.dtype == np.int32
            np.testing.assert_array_equal(piece, whole[start:stop])
            np.testing.assert_array_equal(one, piece)
        assert stream.ranges([]) == []
        assert hasattr(stream, "gather") == (kind == "megatron" or "bin" in kind)
        if hasattr(stream, "gather"):
            starts = rng.integers(0, whole.size - 16, 40)
            rows = [whole[start : start + 16] for start in starts]
            np.testing.assert_array_equal(copy.gather(starts, 16), rows)
            assert stream.gather(starts[:0], 16).shape == (0, 16)
            stream.ranges([(0, 5)])[0][:] = 0  # a copy of what is mapped
            np.testing.assert_array_equal(stream.ranges([(0, 5)])[0], whole[:5])
        assert len(pickle.dumps(stream)) < 5000
    last = len(documents) - 1
    name = f"ids3.{kind}, record 0" if kind in RECORDS else f"numbers.txt, row {last}"
    assert stream.document_name(last) in (name, f"ids.bin, document {last}")


@pytest.mark.parametrize("kind", FORMATS)
def test_a_file_that_is_cut_later_is_named(tmp_path, kind):
    documents, files = write(kind, tmp_path / "d", [[400] * 8, [300] * 8])
    stream = open_data(tmp_path / "d", tmp_path / "cache").stream
    whole = stream.ranges([(0, len(stream))])[0]
    os.truncate(files[-1], 60)
    if kind == "parquet":  # keeps the rows that it has decoded
        stream = pickle.loads(pickle.dumps(stream))
    for _ in range(2):  # it stays unreadable
        with pytest.raises((BadRecord, UserError), match=files[-1].name):
            stream.ranges([(len(stream) - 5, len(stream))])
    if len(files) > 1:  # other files are read as before
        np.testing.assert_array_equal(stream.ranges([(0, 5)])[0], documents[0][:5])
    np.testing.assert_array_equal(whole, np.concatenate(documents))  # no part of a map


@pytest.mark.parametrize("kind", ["tfrecord", "array_record", "tar", "parquet"])
def test_a_damaged_record_is_an_error_or_keeps_its_place(tmp_path, kind):
    path = tmp_path / f"x.{kind}"
    documents = token_files.documents(0, [40] * 3 + [50])
    if kind == "parquet":
        documents[1][3] = -2
    options = {"options": "group_size:1,uncompressed"} if kind == "array_record" else {}
    damaged = 1 if kind in ("tar", "parquet") else 0  # the kind of record is told by a later one
    RECORDS[kind](path, documents, **options)
    content = bytearray(path.read_bytes())
    record = tf_example.encode({"input_ids": documents[damaged]})
    if kind == "tar":  # without a checksum
        content[content.index(documents[1].astype("<i8").tobytes()) + 7] = 0xFF
    elif kind != "parquet":
        content[content.index(record) + len(record) // 2] ^= 4
    path.write_bytes(content)
    with pytest.raises(BadRecord, match=path.name) as caught:
        open_data(path, tmp_path / "cache")
    lines = []
    keys = {"on_bad_record": "skip", "show": lines.append}
    stream = open_data(path, tmp_path / "cache", **keys).stream
    assert str(caught.value) in lines
    assert stream.document_offsets.tolist() == [0, 40, 80, 120, 170]
    for number in {0, 1, 2, 3} - {damaged}:
        ids = stream.ranges([(40 * number, 40 * number + len(documents[number]))])[0]
        np.testing.assert_array_equal(ids, documents[number])
    with pytest.raises(BadRecord) as again:
        stream.ranges([(40 * damaged, 40 * damaged + 5)])
    assert (again.value.offset, again.value.unit) == (caught.value.offset, caught.value.unit)
    # The index remembers.
    with pytest.raises(BadRecord, match=path.name):
        open_data(path, tmp_path / "cache")


def test_more_files_than_are_kept_open(tmp_path):
    documents, files = write("prepared_bin", tmp_path / "d", [[320]] * 150)
    assert len(files) == 150
    data = open_data(tmp_path / "d", tmp_path)
    assert tokens_of(data) == np.concatenate(documents).tolist()
    mapped = Path("/proc/self/maps").read_text()
    assert 0 < sum(str(file) in mapped for file in files) < 150
    token_files.write_parquet(tmp_path / "x.parquet", documents)  # 50 groups of rows
    assert tokens_of(open_data(tmp_path / "x.parquet", tmp_path)) == tokens_of(data)


def test_an_index_is_used_until_a_file_changes(tmp_path):
    folder, cache = tmp_path / "d", tmp_path / "cache"
    documents, files = write("tfrecord", folder)
    ends = np.cumsum([0, *map(len, documents)]).tolist()
    lines: list[str] = []

    def offsets():
        lines.clear()
        return open_data(folder, cache, show=lines.append).stream.document_offsets.tolist()

    for is_new in (True, False):
        assert offsets() == ends
        assert bool(lines) == is_new
    # A damaged one is made anew, whatever is wrong with it.
    (index,) = (cache / "indices").iterdir()
    for damage in (
        lambda: (index / "index.json").write_text("{"),
        lambda: (index / "sizes.npy").write_bytes(b""),
        lambda: (index / "offsets.npy").unlink(),
        lambda: np.save(index / "document_offsets.npy", np.zeros(12, np.int64)),
    ):
        damage()
        assert offsets() == ends
    # Other records in as many bytes.
    size = files[2].stat().st_size
    token_files.write_tfrecord(files[2], token_files.documents(2, [4, 0, 0]))
    assert files[2].stat().st_size == size
    os.utime(files[2], ns=(1, 1))
    assert np.diff(offsets())[7:10].tolist() == [4, 0, 0]
    # Several that make one at once agree.
    with ThreadPoolExecutor(4) as threads:
        made = [*threads.map(lambda _: open_data(folder, tmp_path / "new").stream, range(4))]
    assert len({int(stream.document_offsets[-1]) for stream in made}) == 1
    assert len(list((tmp_path / "new" / "indices").iterdir())) == 1
    (tmp_path / "file").touch()
    refused(r"data_cache_dir=.*file", open_data, folder, tmp_path / "file")


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
        assert data.stream.document_offsets.tolist() == [0, 5, 8]
        assert tokens_of(data) == [101, 5, 0, 7, 102, 101, 0, 102]
        return
    assert data.rows
    assert tokens_of(data) == [*PADDED[0], *PADDED[1]]
    assert data.labels is not None
    read = data.labels.ranges([(0, 12)])[0]
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
        with pytest.raises(BadRecord, match=rf"{path.name} at row 0: .*\(1 "):
            TableIds("input_ids", ("input_ids",)).scan(str(path))
    else:
        assert tokens_of(open_data(path, tmp_path)) == [1, 2, 3, 4, 5, 6]
