"""Streams over record files of every format: any range, damage, and the index behind them."""

import json
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import numpy as np
import pytest

from MaxText.errors import UserError
from MaxText.input_pipeline import storage
from MaxText.input_pipeline.formats import table_ids, tf_example
from MaxText.input_pipeline.formats.array_record_ids import ArrayRecordIds
from MaxText.input_pipeline.formats.table_ids import TableIds, TableLabels
from MaxText.input_pipeline.formats.tar_tensors import TarTensors
from MaxText.input_pipeline.formats.tfrecord_ids import TFRecordIds
from MaxText.input_pipeline.streams import record_index
from MaxText.input_pipeline.streams.bad_record import BadRecord
from MaxText.input_pipeline.streams.record_index import open_index
from MaxText.input_pipeline.streams.record_stream import RecordStream

from . import token_files

NAMES = ("input_ids",)
FORMATS = {
    "tfrecord": (token_files.write_tfrecord, TFRecordIds(NAMES)),
    "array_record": (token_files.write_array_record, ArrayRecordIds(NAMES)),
    "tar": (token_files.write_tar, TarTensors("")),
    "parquet": (token_files.write_parquet, TableIds("input_ids", NAMES)),
    "arrow": (token_files.write_arrow, TableIds("input_ids", NAMES)),
}
# Several files, one of them empty; documents without tokens at both ends of one.
SIZES = [[5, 0, 70, 1, 12, 9, 300], [], [0, 4, 0], [2]]


def silent(line: str) -> None:
    del line


@pytest.fixture(params=FORMATS)
def written(request, tmp_path):
    """Files of one format, their documents, and the format."""
    write, record_format = FORMATS[request.param]
    ids = [token_files.documents(number, sizes) for number, sizes in enumerate(SIZES)]
    files = [tmp_path / f"{number}.{request.param}" for number in range(len(SIZES))]
    for file, part in zip(files, ids, strict=True):
        write(file, part)
    return [str(file) for file in files], [d for part in ids for d in part], record_format


@pytest.mark.parametrize("eos_id", [-1, 7])
def test_any_range_equals_the_documents_end_to_end(written, tmp_path, eos_id):
    files, documents, record_format = written
    if eos_id >= 0:
        documents = [np.append(document, eos_id) for document in documents]
    stream = RecordStream(
        open_index(files, record_format, tmp_path / "cache", silent), record_format, eos_id
    )
    whole = np.concatenate(documents)
    assert len(stream) == whole.size
    ends = np.cumsum([0, *map(len, documents)])
    np.testing.assert_array_equal(stream.document_offsets, ends)
    rng = np.random.default_rng(1)
    places = [tuple(sorted(rng.integers(0, whole.size + 1, 2).tolist())) for _ in range(60)]
    places += [(0, whole.size), (0, 0), (whole.size, whole.size)]
    for (start, stop), piece in zip(places, stream.ranges(places), strict=True):
        assert piece.dtype == np.int32
        np.testing.assert_array_equal(piece, whole[start:stop])
    assert stream.ranges([]) == []
    copy = pickle.loads(pickle.dumps(stream))
    with ThreadPoolExecutor(6) as threads:
        read = threads.map(lambda place: copy.ranges([place])[0], places)
        for (start, stop), piece in zip(places, read, strict=True):
            np.testing.assert_array_equal(piece, whole[start:stop])
    assert len(pickle.dumps(stream)) < 2000
    assert stream.document_name(8) == f"{Path(files[2]).name}, record 1"
    assert stream.document_name(0) == f"{Path(files[0]).name}, record 0"


def test_an_index_is_made_once_and_again_after_a_change(written, tmp_path, monkeypatch):
    files, documents, record_format = written
    cache = tmp_path / "cache"
    lines: list[str] = []
    first = open_index(files, record_format, cache, lines.append)
    assert "Indexing 4 files" in lines[0]
    tokens = sum(map(len, documents))
    assert f"Indexed {len(documents)} records of {tokens} tokens" in lines[-1]
    count = len(lines)
    again = open_index(files, record_format, cache, lines.append)
    assert len(lines) == count
    np.testing.assert_array_equal(again.document_offsets, first.document_offsets)
    # A damaged one is made anew, whatever is wrong with it.
    (folder,) = (cache / "indices").iterdir()
    for damage in (
        lambda: (folder / "index.json").write_text("{"),
        lambda: (folder / "sizes.npy").write_bytes(b""),
        lambda: (folder / "offsets.npy").unlink(),
        lambda: np.save(folder / "document_offsets.npy", np.zeros(11, np.int64)),
    ):
        damage()
        np.testing.assert_array_equal(
            open_index(files, record_format, cache, silent).document_offsets,
            np.cumsum([0, *map(len, documents)]),
        )
    # Another file in place of one: another index.
    other = open_index(files[:1], record_format, cache, lines.append)
    assert other.first_record.tolist() == [0, 7]
    assert len(list((cache / "indices").iterdir())) == 2


def test_a_replaced_file_is_read_anew(written, tmp_path):
    files, _, record_format = written
    open_index(files, record_format, tmp_path / "c", silent)
    other = token_files.documents(99, [40, 2])
    write = next(write for write, known in FORMATS.values() if known is record_format)
    Path(files[0]).unlink()
    write(Path(files[0]), other)
    index = open_index(files, type_again(record_format), tmp_path / "c", silent)
    piece = RecordStream(index, type_again(record_format)).ranges([(0, 42)])[0]
    np.testing.assert_array_equal(piece, np.concatenate(other))


def type_again(record_format):
    """The same format without what it has open, as the next run has it."""
    return pickle.loads(pickle.dumps(record_format))


def test_two_that_make_one_index_at_once_agree(written, tmp_path):
    files, documents, record_format = written
    with ThreadPoolExecutor(4) as threads:
        indices = list(
            threads.map(
                lambda _: open_index(files, record_format, tmp_path / "c", silent), range(4)
            )
        )
    for index in indices:
        assert int(index.document_offsets[-1]) == sum(map(len, documents))
    assert len(list((tmp_path / "c" / "indices").iterdir())) == 1


def test_a_cache_that_cannot_be_written_is_named(written, tmp_path):
    files, _, record_format = written
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"data_cache_dir=.*file cannot be written"):
        open_index(files, record_format, tmp_path / "file", silent)


def test_a_vanished_file_is_named(written, tmp_path):
    files, documents, record_format = written
    index = open_index(files, record_format, tmp_path / "cache", silent)
    Path(files[0]).unlink()
    storage._open.clear()  # an open file would be read on
    with pytest.raises((BadRecord, UserError), match=Path(files[0]).name):
        RecordStream(index, record_format).ranges([(0, 5)])
    # The others are read on.
    last = documents[-1]
    (piece,) = RecordStream(index, record_format).ranges(
        [(len_all(documents) - 2, len_all(documents))]
    )
    np.testing.assert_array_equal(piece, last)


def len_all(documents: list[np.ndarray]) -> int:
    return sum(map(len, documents))


@pytest.mark.parametrize("name", ["tfrecord", "array_record", "parquet"])
def test_a_flipped_bit_is_a_bad_record(tmp_path, name):
    write, record_format = FORMATS[name]
    path = tmp_path / f"x.{name}"
    documents = [np.full(50, 30_000 + i, np.int32) for i in range(9)]
    write(path, documents)
    index = open_index([str(path)], record_format, tmp_path / "cache", silent)
    content = bytearray(path.read_bytes())
    place = {"tfrecord": int(index.offsets[4]) + 30, "array_record": 0, "parquet": 60}[name]
    if name == "array_record":
        place = len(content) // 2
    content[place] ^= 4
    path.write_bytes(content)
    stream = RecordStream(index, record_format)
    at = {"tfrecord": f"byte {index.offsets[4]}", "array_record": "byte 0", "parquet": "row 0"}
    with pytest.raises(BadRecord, match=rf"x\.{name} at {at[name]}: "):
        stream.ranges([(0, len(stream))])


def test_the_offset_of_a_damaged_tfrecord_is_named(tmp_path):
    path = tmp_path / "x.tfrecord"
    documents = [np.full(50, i, np.int32) for i in range(5)]
    token_files.write_tfrecord(path, documents)
    record_format = TFRecordIds(NAMES)
    offsets = open_index([str(path)], record_format, tmp_path / "c", silent).offsets.tolist()
    content = bytearray(path.read_bytes())
    content[offsets[2] + 30] ^= 4
    path.write_bytes(content)
    with pytest.raises(BadRecord, match="the CRC of the record is wrong") as caught:
        open_index([str(path)], record_format, tmp_path / "c", silent)
    assert caught.value.offset == offsets[2]
    lines: list[str] = []
    index = open_index([str(path)], record_format, tmp_path / "c", lines.append, skip_damaged=True)
    assert lines[-1].startswith(f"{path} at byte {offsets[2]}: the CRC")
    # It keeps its place, so that the records after it keep theirs.
    assert index.document_offsets.tolist() == [0, 50, 100, 150, 200, 250]
    stream = RecordStream(index, record_format)
    np.testing.assert_array_equal(stream.ranges([(150, 200)])[0], documents[3])
    with pytest.raises(BadRecord) as caught:
        stream.ranges([(90, 110)])
    assert caught.value.offset == offsets[2]
    # The index remembers: without skipping it fails before training.
    with pytest.raises(BadRecord, match="the CRC"):
        open_index([str(path)], record_format, tmp_path / "c", silent)


def test_a_damaged_array_record_leaves_its_neighbours(tmp_path):
    path = tmp_path / "x.array_record"
    documents = token_files.documents(0, [400] * 8)
    token_files.write_array_record(path, documents, options="group_size:1,uncompressed")
    record_format = ArrayRecordIds(NAMES)
    content = bytearray(path.read_bytes())
    content[bytes(content).index(tf_example.encode({"input_ids": documents[5]})) + 200] ^= 4
    path.write_bytes(content)
    with pytest.raises(BadRecord, match="the record is damaged"):
        open_index([str(path)], record_format, tmp_path / "c", silent)
    index = open_index([str(path)], record_format, tmp_path / "c", silent, skip_damaged=True)
    stream = RecordStream(index, record_format)
    for number, document in enumerate(documents):
        place = (400 * number, 400 * number + 400)
        if number == 5:
            with pytest.raises(BadRecord) as caught:
                stream.ranges([(0, 3200)])
            assert caught.value.offset == 5
            continue
        np.testing.assert_array_equal(stream.ranges([place])[0], document)


def test_a_truncated_tfrecord_names_its_last_record(tmp_path):
    path, other = tmp_path / "x.tfrecord", tmp_path / "y.tfrecord"
    documents = token_files.documents(0, [50, 60, 70, 80])
    token_files.write_tfrecord(path, documents[:3])
    token_files.write_tfrecord(other, documents[3:])
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[: size - 3])
    files = [str(path), str(other)]
    with pytest.raises(BadRecord, match=r"x\.tfrecord at byte \d+: .*it was cut short"):
        open_index(files, TFRecordIds(NAMES), tmp_path / "c", silent)
    # Without it, once newly made and once from the cache.
    for _ in range(2):
        lines = []
        index = open_index(files, TFRecordIds(NAMES), tmp_path / "c", lines.append, True)
        assert lines[-1].endswith("what follows in the file is left out")
        stream = RecordStream(index, TFRecordIds(NAMES))
        assert index.first_record.tolist() == [0, 2, 3]
        ids = np.concatenate([documents[0], documents[1], documents[3]])
        np.testing.assert_array_equal(stream.ranges([(0, 190)])[0], ids)


@pytest.mark.parametrize("left", [0, 10, 65536, 100_000, -65536, -1])
def test_a_truncated_array_record_is_not_an_empty_one(tmp_path, left):
    path = tmp_path / "x.array_record"
    token_files.write_array_record(path, token_files.documents(0, [3000] * 40))
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(BadRecord, match="no ArrayRecord file, damaged or cut short"):
        ArrayRecordIds(NAMES).scan(str(path))


def test_a_record_of_another_length_than_indexed_is_refused(tmp_path):
    path = tmp_path / "x.tfrecord"
    token_files.write_tfrecord(path, [np.array([5, 5, 5, 5])])
    index = open_index([str(path)], TFRecordIds(NAMES), tmp_path / "c", silent)
    size = path.stat().st_size
    token_files.write_tfrecord(path, [np.array([300, 5, 5])])  # as many bytes
    assert path.stat().st_size == size
    with pytest.raises(BadRecord, match="has 3 tokens where the index has 4"):
        RecordStream(index, TFRecordIds(NAMES)).ranges([(0, 4)])


def test_ids_that_are_none(tmp_path):
    path = tmp_path / "x.tfrecord"
    for value, message in [(-1, "-1 is no token id"), (2**31, "2147483648 is no token id")]:
        token_files.write_tfrecord(path, [np.array([1, value])])
        index = open_index([str(path)], TFRecordIds(NAMES), tmp_path / "c", silent)
        with pytest.raises(BadRecord, match=message):
            RecordStream(index, TFRecordIds(NAMES)).ranges([(0, 2)])


@pytest.mark.parametrize("name", ["tfrecord", "tar", "parquet"])
def test_remote_files(tmp_path, name):
    write, record_format = FORMATS[name]
    documents = token_files.documents(3, [40, 3, 17, 9])
    write(tmp_path / "x", documents)
    url = f"memory://remote-{tmp_path.name}/x.{name}"
    with fsspec.open(url, "wb") as file:
        file.write((tmp_path / "x").read_bytes())
    stream = RecordStream(open_index([url], record_format, tmp_path / "c", silent), record_format)
    np.testing.assert_array_equal(stream.ranges([(0, 69)])[0], np.concatenate(documents))
    fsspec.filesystem("memory").rm(url)


@pytest.mark.parametrize("name", ["array_record", "arrow"])
def test_formats_that_need_a_local_file_say_so(tmp_path, name):
    write, record_format = FORMATS[name]
    write(tmp_path / "x", token_files.documents(3, [4]))
    url = f"memory://remote-{tmp_path.name}/x.{name}"
    with fsspec.open(url, "wb") as file:
        file.write((tmp_path / "x").read_bytes())
    with pytest.raises(UserError, match="local file system only"):
        open_index([url], record_format, tmp_path / "c", silent)


def test_tensors_of_torch_in_archives(tmp_path):
    import io
    import tarfile

    golden = Path(__file__).parents[2] / "golden" / "torch_tensors"
    expected = json.loads((golden / "expected.json").read_text())["tensors"]
    names = ["int64", "int32", "int64_slice", "int32_legacy"]
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        for name in names:
            content = (golden / f"{name}.pth").read_bytes()
            member = tarfile.TarInfo(f"{name}.input_id.pth")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    record_format = TarTensors("")
    index = open_index([str(tmp_path / "x.tar")], record_format, tmp_path / "c", silent)
    stream = RecordStream(index, record_format)
    values = [value for name in names for value in expected[name]["values"]]
    assert stream.ranges([(0, len(stream))])[0].tolist() == values


def test_the_field_of_an_archive(tmp_path):
    both = tmp_path / "both.tar"
    token_files.write_tar(both, token_files.documents(0, [3]), field="label")
    with pytest.raises(UserError, match=r"no tensors of field input_id .*members: label"):
        TarTensors("input_id").scan(str(both))
    assert TarTensors("").scan(str(both)).num_tokens.tolist() == [3]
    assert TarTensors("label").scan(str(both)).num_tokens.tolist() == [3]


PADDED = [[101, 5, 0, 7, 102, 0], [101, 0, 102, 0, 0, 0]]
MASKS = [[1.0, 1.0, 0.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]]


def padded_table(tmp_path, labels):
    import pyarrow

    columns = {"attention_mask": pyarrow.array(MASKS, pyarrow.list_(pyarrow.float32()))}
    if labels is not None:
        columns["labels"] = pyarrow.array(labels, pyarrow.list_(pyarrow.int64()))
    token_files.write_parquet(tmp_path / "x.parquet", [np.array(row) for row in PADDED], **columns)
    return str(tmp_path / "x.parquet"), ["input_ids", *columns]


def test_padding_is_told_by_the_mask_never_by_id_0(tmp_path):
    path, columns = padded_table(tmp_path, None)
    record_format = TableIds("input_ids", columns)
    index = open_index([path], record_format, tmp_path / "c", silent)
    assert index.document_offsets.tolist() == [0, 5, 8]
    ids = RecordStream(index, record_format).ranges([(0, 8)])[0]
    assert ids.tolist() == [101, 5, 0, 7, 102, 101, 0, 102]


@pytest.mark.parametrize(
    ("labels", "shift"),
    [
        ([[5, 0, 7, 102, -100, -100], [0, 102, -1, -100, 9, 9]], False),
        ([[101, 5, 0, 7, 102, -100], [101, 0, 102, -100, -100, -100]], True),
    ],
)
def test_labels(tmp_path, labels, shift):
    path, columns = padded_table(tmp_path, labels)
    assert table_ids.labels_are_ids(table_ids.Table(path), "input_ids") == shift
    ids_format = TableIds("input_ids", columns)
    index = open_index([path], ids_format, tmp_path / "c", silent)
    assert index.document_offsets.tolist() == [0, 6, 12]
    assert RecordStream(index, ids_format).ranges([(0, 12)])[0].tolist() == [*PADDED[0], *PADDED[1]]
    stream = RecordStream(index, TableLabels("input_ids", columns, shift))
    read = stream.ranges([(0, 6), (6, 12)])
    assert read[0].tolist() == [5, 0, 7, 102, -100, -100]
    assert read[1].tolist() == [0, 102, -100, -100, -100, -100]


def test_missing_values_in_a_table(tmp_path):
    import pyarrow
    import pyarrow.parquet

    for rows, message in [
        ([[1], None], "1 rows have no list"),
        ([[1, None]], "1 values are missing"),
    ]:
        column = pyarrow.array(rows, pyarrow.list_(pyarrow.int32()))
        pyarrow.parquet.write_table(pyarrow.table({"input_ids": column}), tmp_path / "x.parquet")
        with pytest.raises(BadRecord, match=message):
            TableIds("input_ids", NAMES).scan(str(tmp_path / "x.parquet"))


@pytest.mark.parametrize("kind", ["large", "fixed", "file"])
def test_other_kinds_of_lists_and_files(tmp_path, kind):
    import pyarrow
    import pyarrow.parquet

    rows = [[1, 2], [3, 4], [5, 6]]
    path = tmp_path / "x.parquet"
    if kind == "file":
        token_files.write_arrow(path, [np.array(row) for row in rows], stream=False)
    else:
        kinds = {
            "large": pyarrow.large_list(pyarrow.uint16()),
            "fixed": pyarrow.list_(pyarrow.int64(), 2),
        }
        column = pyarrow.array(rows, kinds[kind])
        pyarrow.parquet.write_table(pyarrow.table({"input_ids": column}), path)
    record_format = TableIds("input_ids", NAMES)
    index = open_index([str(path)], record_format, tmp_path / "c", silent)
    assert RecordStream(index, record_format).ranges([(1, 5)])[0].tolist() == [2, 3, 4, 5]


def test_few_groups_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(table_ids, "_MOST_GROUPS", 2)
    documents = token_files.documents(0, [5] * 30)
    token_files.write_parquet(tmp_path / "x.parquet", documents)
    record_format = TableIds("input_ids", NAMES)
    index = open_index([str(tmp_path / "x.parquet")], record_format, tmp_path / "c", silent)
    ids = RecordStream(index, record_format).ranges([(0, 150)])[0]
    np.testing.assert_array_equal(ids, np.concatenate(documents))
    assert len(record_format._groups) == 2


def test_progress_is_shown(tmp_path, monkeypatch):
    monkeypatch.setattr(record_index, "_SECONDS_BETWEEN_LINES", 0.0)
    for number in range(3):
        token_files.write_tfrecord(tmp_path / f"{number}", token_files.documents(0, [4]))
    lines: list[str] = []
    open_index(
        [str(tmp_path / f"{n}") for n in range(3)], TFRecordIds(NAMES), tmp_path / "c", lines.append
    )
    assert lines[1:4] == ["  1 of 3 files", "  2 of 3 files", "  3 of 3 files"]


@pytest.mark.parametrize("stream", [True, False])
def test_an_arrow_file_that_shrinks_while_it_is_mapped(tmp_path, stream):
    path = tmp_path / "x.arrow"
    documents = [np.full(2000, number, np.int32) for number in range(9)]
    token_files.write_arrow(path, documents, stream=stream)
    record_format = TableIds("input_ids", ["input_ids"])
    index = open_index([str(path)], record_format, tmp_path / "c", silent)
    rows = RecordStream(index, record_format)
    kept = rows.ranges([(0, 2000), (12_000, 14_000)])
    size = path.stat().st_size
    os.truncate(path, 100)
    for row in (0, 8):  # decoded before, and not
        message = rf"x\.arrow at row {row}: the file was cut short: it ends after 100 of {size} "
        with pytest.raises(BadRecord, match=message):
            rows.ranges([(2000 * row, 2000 * row + 2000)])
    # What was read before is no part of the map.
    np.testing.assert_array_equal(kept, [documents[0], documents[6]])


def archive_of(path: Path, contents: list[bytes]) -> None:
    import io
    import tarfile

    with tarfile.open(path, "w") as archive:
        for number, content in enumerate(contents):
            member = tarfile.TarInfo(f"{number}.input_id.pth")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def test_damage_without_a_checksum_is_found_by_its_ids_at_the_start(tmp_path):
    golden = Path(__file__).parents[2] / "golden" / "torch_tensors" / "int32_legacy.pth"
    sound = golden.read_bytes()
    path = tmp_path / "x.tar"
    archive_of(path, [sound, sound[:-1] + b"\xff"])
    record_format = TarTensors("")
    with pytest.raises(BadRecord, match="is no token id") as caught:
        open_index([str(path)], record_format, tmp_path / "c", silent)
    assert path.read_bytes()[caught.value.offset :].startswith(sound[:-1] + b"\xff")
    lines: list[str] = []
    index = open_index([str(path)], record_format, tmp_path / "c", lines.append, skip_damaged=True)
    assert lines == [str(caught.value)]
    first, second = index.document_offsets[1], index.document_offsets[2]
    assert second == 2 * first  # it keeps its place


def test_rows_of_a_table_that_are_no_ids_are_found_at_the_start(tmp_path):
    path = tmp_path / "x.parquet"
    documents = [np.arange(4), np.arange(5), np.arange(6), np.array([1, -2]), np.arange(3)]
    token_files.write_parquet(path, documents)
    record_format = TableIds("input_ids", ["input_ids"])
    with pytest.raises(BadRecord, match=r"x\.parquet at row 3: -2 is no token id"):
        open_index([str(path)], record_format, tmp_path / "c", silent)
    index = open_index([str(path)], record_format, tmp_path / "c", silent, skip_damaged=True)
    rows = RecordStream(index, record_format)
    with pytest.raises(BadRecord, match=r"at row 3: -2 is no token id"):
        rows.ranges([(15, 17)])
    assert rows.ranges([(17, 20)])[0].tolist() == [0, 1, 2]


@pytest.mark.parametrize("unit", [(), ("row",)])
def test_a_bad_record_says_what_its_place_counts_after_pickling_too(unit):
    problem = BadRecord("a.parquet", 30, "is damaged", *unit)
    copy = pickle.loads(pickle.dumps(problem))
    assert str(copy) == str(problem) == f"a.parquet at {(*unit, 'byte')[0]} 30: is damaged"
    assert (copy.path, copy.offset, copy.reason, copy.unit) == (
        "a.parquet", 30, "is damaged", (*unit, "byte")[0],
    )  # fmt: skip
