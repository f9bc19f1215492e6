"""Documents of ids come out once and in order from every format, and damage costs what it hits."""

import functools
import tempfile
from pathlib import Path

import fsspec
import hypothesis
import numpy as np
import pyarrow
import pytest
from hypothesis import strategies
from pyarrow import parquet

from MaxText.input_pipeline.document_sources.records import holds_text, read_ids
from MaxText.input_pipeline.document_sources.tables import TokenDocument
from MaxText.input_pipeline.formats import tf_example
from MaxText.storage import tfrecord
from MaxText.storage.errors import BadRecordError
from tests.hostile.files import npy, tar_archive
from tests.input_pipeline.document_sources.written_corpora import COMPRESS
from tests.input_pipeline.token_store import token_files
from tests.refusals import refused

# Name of a file and what writes it.
FILES = {
    "tfrecord": ("a.tfrecord", token_files.write_tfrecord),
    "arrayrecord": ("a.array_record", token_files.write_array_record),
    "parquet": ("a.parquet", token_files.write_parquet),
    "arrow": ("a.arrow", token_files.write_arrow),
    "arrow ": ("file.arrow", functools.partial(token_files.write_arrow, stream=False)),
    "webdataset": ("a.tar", token_files.write_tar),
    "webdataset ": ("torch.tar", token_files.write_torch_tar),
}
STREAMS = ("tfrecord", "webdataset", "webdataset ")


def write_raw(kind: str, path: Path, records: list[bytes]) -> None:
    if kind == "tfrecord":
        path.write_bytes(b"".join(map(tfrecord.frame, records)))
    else:
        token_files.write_records(path, records)


def read(path, kind, *fields, **keys):
    """Lists of ids, and of a damaged document its position."""
    documents = read_ids(str(path), kind.strip(), fields, **keys)
    return [
        document.ids.tolist() if isinstance(document, TokenDocument) else document.offset
        for document in documents
    ]


@pytest.mark.parametrize("kind", FILES)
@hypothesis.given(
    documents=strategies.lists(
        strategies.lists(strategies.integers(0, 2**31 - 1), max_size=40), max_size=12
    ),
    compression=strategies.sampled_from(["", *COMPRESS]),
)
@hypothesis.settings(max_examples=15, deadline=None, derandomize=True)
def test_what_is_written_is_read(kind, documents, compression):
    name, write = FILES[kind]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)
        write(path, [np.array(ids, np.int32) for ids in documents])
        content = path.read_bytes()
        if compression and kind in STREAMS:
            path = path.with_name(f"{name}.{compression}")
            content = COMPRESS[compression](content)
            path.write_bytes(content)
        assert read(path, kind) == documents
        fsspec.filesystem("memory").pipe(f"/ids/{path.name}", content)
        assert read(f"memory://ids/{path.name}", kind) == documents


@pytest.mark.parametrize("kind", FILES)
def test_a_truncated_file_ends_with_an_error(tmp_path, kind):
    name, write = FILES[kind]
    path, documents = tmp_path / name, token_files.documents(0, [3000] * 8)
    write(path, documents)
    content = path.read_bytes()
    for share in (0.0, 0.01, 0.4, 0.9):
        path.write_bytes(content[: int(share * len(content))])
        if kind == "tfrecord" and not share:  # nothing says that there were records
            continue
        read_documents = []
        with pytest.raises(BadRecordError, match=name):
            read_documents.extend(read_ids(str(path), kind.strip()))
        for document, ids in zip(read_documents, documents, strict=False):
            np.testing.assert_array_equal(document.ids, ids)
        assert len(read_documents) < 8
    with pytest.raises(BadRecordError, match=r"absent .*No such file") as caught:
        read(tmp_path / "absent", kind)
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize("kind", FILES)
def test_damage_costs_one_document(tmp_path, kind):
    name, write = FILES[kind]
    documents = token_files.documents(0, [40] * 4)
    if kind in ("parquet", "arrow", "arrow "):
        documents[1][3] = -2
    options = {"options": "group_size:1,uncompressed"} if kind == "arrayrecord" else {}
    write(tmp_path / name, documents, **options)
    content = bytearray((tmp_path / name).read_bytes())
    record = tf_example.encode({"input_ids": documents[1]})
    if kind.startswith("webdataset"):
        content[content.index(documents[1].astype("<i8").tobytes()) + 7] = 0xFF
    elif record in content:
        content[content.index(record) + len(record) // 2] ^= 4
    (tmp_path / name).write_bytes(content)
    read_documents = list(read_ids(str(tmp_path / name), kind.strip()))
    bad = read_documents.pop(1)
    assert isinstance(bad, BadRecordError)
    assert f"{name} at {bad.unit} {bad.offset}: " in str(bad)
    assert bad.offset == 1 or bad.unit == "byte"
    for document, ids in zip(read_documents, [documents[0], *documents[2:]], strict=True):
        assert isinstance(document, TokenDocument)
        np.testing.assert_array_equal(document.ids, ids)
    # Where the text of a length is damaged, what follows is lost.
    if kind == "tfrecord":
        content[content.index(record[:8]) - 12] ^= 4
        (tmp_path / name).write_bytes(content)
        refused(f"byte {bad.offset}: the CRC of the record's length", read, tmp_path / name, kind)


@pytest.mark.parametrize("kind", ["tfrecord", "arrayrecord"])
def test_features_of_records(tmp_path, kind):
    examples = [{"input_ids": [1, 2], "body": "text"}, {"input_ids": [2**31]}, {"body": "text"}]
    records = [b"no example", *map(tf_example.encode, examples)]
    path = tmp_path / "a"
    write_raw(kind, path, records)
    bad, (ids, labels), large, absent = read_ids(str(path), kind)
    assert "not a tf.train.Example" in str(bad)
    assert (ids.tolist(), ids.dtype, labels) == ([1, 2], np.int32, None)
    assert "2147483648 is not a token id" in str(large)
    assert "feature input_ids or text or tokens (features: body (bytes))" in str(absent)
    absent = [*read_ids(str(path), kind, ["body"])][1]
    assert "no integer feature body (features: body (bytes)," in str(absent)
    write_raw(kind, path, [])
    assert read(path, kind) == []
    assert not holds_text([str(path)], kind)


@pytest.mark.parametrize("kind", ["tfrecord", "arrayrecord"])
def test_text_or_ids_in_records(tmp_path, kind):
    def holds(record, *fields, text_field="text"):
        path = tmp_path / "a"
        write_raw(kind, path, [record])
        if kind == "tfrecord":
            damaged = tfrecord.frame(b"x").replace(b"x", b"y")
            path.write_bytes(damaged + path.read_bytes())
        return holds_text([str(path)], kind, fields, text_field)

    record = tf_example.encode({"input_ids": [1], "body": "x"})
    assert not holds(record)
    assert not holds(record, "other", "input_ids")
    assert holds("ä text".encode())
    assert holds(record, "other", text_field="body")
    message = r"no integer feature other and no text in text .*body \(bytes\)"
    refused(message, holds, record, "other")


def test_text_or_ids_in_tables(tmp_path):
    path = tmp_path / "a.parquet"
    ids = pyarrow.array([[1]], pyarrow.list_(pyarrow.uint16()))
    parquet.write_table(pyarrow.table({"tokens": ids, "body": ["text"], "n": [1]}), path)
    assert not holds_text([str(path)], "parquet")
    assert holds_text([str(path)], "parquet", ["other"], "body")
    message = "lists of integers named other.*tokens .*body .*n .*Set token_records.field"
    refused(message, holds_text, [str(path)], "parquet", ["other"], "text")
    refused(message, read, path, "parquet", "other")
    assert not holds_text(["never read.tar"], "webdataset")


def test_fields_of_archives(tmp_path):
    path = tmp_path / "a.tar"
    members = {
        "x/readme.txt": b"",
        "x/0.json": b"{}",
        "x/0.mask.npy": npy([0]),
        "x/0.ids.npy": npy([1]),
        "x/1.ids.npy": npy([2]),
        "x/2.ids.npy": npy([[3]]),
        "x/3.ids.pth": b"damaged",
        "y/3.ids.npy": npy([1.5]),
    }
    path.write_bytes(tar_archive(members))
    refused(r"a usual field .*: ids, mask\).*records\.field", read, path, "webdataset")
    refused("without other .*ids, mask", read, path, "webdataset", "other")
    documents = [*read_ids(str(path), "webdataset", ["ids"])]
    assert [document.ids.tolist() for document in documents[:2]] == [[1], [2]]
    assert "int64 of shape (1, 1), not a list of ids" in str(documents[2])
    assert "not a torch.save file" in str(documents[3])
    assert "float64" in str(documents[4])
    # A usual name is taken of several, but not where the first samples had another one alone.
    path.write_bytes(tar_archive({"0.a.npy": npy([1]), "0.tokens.npy": npy([2])}))
    assert read(path, "webdataset") == [[2]]
    path.write_bytes(tar_archive({"0.npy": npy([1]), "1.npy": npy([2])}))
    assert read(path, "webdataset") == [[1], [2]]
    path.write_bytes(tar_archive({"0.a.npy": npy([1]), "1.tokens.npy": npy([2])}))
    refused(r"without a .*tokens\).*token_records.field", read, path, "webdataset")
    path.write_bytes(tar_archive({}))
    assert read(path, "webdataset") == []


IDS = [[101, 5, 0, 7, 102, 0], [101, 0, 102, 0, 0, 0]]
MASKS = [[1.0, 1.0, 0.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]]


@pytest.mark.parametrize("write", [token_files.write_parquet, token_files.write_arrow])
@pytest.mark.parametrize(
    ("labels", "kind"),
    [
        (None, None),
        ([[5, 0, 7, 102, -100, -100], [0, 102, -1, -100, 9, 9]], pyarrow.int64()),
        # Of their own positions; the first row says nothing about that.
        ([[-100] * 6, [101, 0, 102, -100, -100, -100]], pyarrow.int16()),
        ([[101, 5, 0, 7, 102, 0], [101, 0, 102, 0, 0, 0]], pyarrow.uint8()),
    ],
)
def test_attention_mask_and_labels_of_a_table(tmp_path, write, labels, kind):
    columns = {"attention_mask": pyarrow.array(MASKS, pyarrow.list_(pyarrow.float32()))}
    if labels is not None:
        columns["labels"] = pyarrow.array(labels, pyarrow.list_(kind))
    write(tmp_path / "a", [np.array(row) for row in IDS], **columns)
    documents = [*read_ids(str(tmp_path / "a"), "parquet")]
    if labels is None:
        # The mask marks padding, never id 0.
        assert [ids.tolist() for ids, _ in documents] == [[101, 5, 0, 7, 102], [101, 0, 102]]
        assert documents[0].labels is None
        return
    assert [ids.tolist() for ids, _ in documents] == IDS
    read_labels = [labels.tolist() for _, labels in documents]
    first = [-100] * 6 if labels[0][0] == -100 else [5, 0, 7, 102, -100, -100]
    second = [0, 102, -100, -100, -100, -100]
    if kind == pyarrow.uint8():  # what follows the attention is padding, whatever it says
        second, first = [0, 102, 0, -100, -100, -100], [5, 0, 7, 102, 0, -100]
    assert read_labels == [first, second]


def test_rows_of_tables_with_mistakes(tmp_path):
    lists, large = pyarrow.list_(pyarrow.int64()), pyarrow.large_list(pyarrow.int32())
    ids = pyarrow.array([[1, 2], None, [3, None], [4], [5, 6], []], large)
    labels = pyarrow.array([[2, -1], [1], [1, 1], [1, 1], None, []], lists)
    with pyarrow.ipc.new_stream(tmp_path / "a", pyarrow.table({"input_ids": ids}).schema) as writer:
        writer.write_table(pyarrow.table({"input_ids": ids}))
    assert read(tmp_path / "a", "arrow") == [[1, 2], 1, 2, [4], [5, 6], []]
    parquet.write_table(pyarrow.table({"input_ids": ids, "labels": labels}), tmp_path / "b")
    documents = [*read_ids(str(tmp_path / "b"), "parquet")]
    errors = [document for document in documents if isinstance(document, BadRecordError)]
    assert [str(document).partition(": ")[2] for document in errors] == [
        "the row lacks a value",
        "the row lacks a value",
        "the row has 2 labels for 1 ids",
        "the row lacks a value",
    ]
    fixed = pyarrow.array([[1, 2], [3, 4]], pyarrow.list_(pyarrow.int64(), 2))
    parquet.write_table(pyarrow.table({"tokens": fixed}), tmp_path / "c")
    assert read(tmp_path / "c", "parquet") == [[1, 2], [3, 4]]
