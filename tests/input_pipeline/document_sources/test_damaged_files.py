"""Damaged files, truncated files and files without text: an error that names the place."""

import random

import pyarrow
import pytest
import zstandard

from MaxText.input_pipeline.formats import tf_example
from MaxText.storage import tfrecord
from tests.input_pipeline.document_sources.written_corpora import (
    COMPRESS,
    ENDINGS,
    arrow_stream,
    read_documents,
    read_texts,
    rows,
    tar,
    write,
    write_records,
)
from tests.refusals import refused

OTHER_FIELD = tf_example.encode({"text": [1], "body": b"x"})
# Little to compress, so that a truncated file lacks text.
TEXTS = [f"text {i} äöü " + random.Random(i).randbytes(200 * i).hex() for i in range(20)]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', ":2.* JSON"),
        ("a.jsonl", b'{"content": "x", "id": 3}\n', r":1.*'text'.*: content\."),
        ("a.jsonl", b'{"id": 3}\n', ":1.*: none"),
        ("a.jsonl", b'"x"\n["x"]\n', ":2.* JSON list"),
        ("a.jsonl", b'{"text": ["x", 1]}\n', ":1.*'text'"),
        ("a.jsonl", b'{"text": "\xff"}\n', ":1.* UTF-8"),
        ("a.jsonl", rows(TEXTS)[:-3], ":20.* JSON"),
        ("a.json", b'["x", 3]', ", value 2.* JSON int"),
        ("a.json", b'["x", "y"', ".* JSON"),
        ("a.json", b'["x"] more', ".* JSON"),
        ("a.json", b'["x",]', ".* JSON"),
        ("a.json", b'["\xff"]', ".* UTF-8"),
        ("a.txt", b"abc \xff def", ".* UTF-8 .*0xff in position 4"),
        ("a.txt.gz", b"not packed", ".* gzipped"),
        ("a.txt.gz", b"", ".* empty"),
        ("a.parquet.gz", b"not packed", ""),
        ("a.tar", b"no archive", ".* header"),
        ("a.tar", tar([("b.txt", b"\xff")]), r", member 'b\.txt',.* UTF-8"),
        ("a.tar", tar([("b.parquet", b"PAR1")]), r", member 'b\.parquet'"),
        ("a.tar", tar([("b.jsonl.gz", b"x")]), r", member 'b\.jsonl\.gz',.* gzipped"),
        ("a.arrow", arrow_stream(TEXTS)[:5000], ""),
        ("a.arrow", arrow_stream([b"a", b"\xff"], pyarrow.binary()), ", row 1,.*0xff"),
        ("a.tfrecord", b"x" * 100, ".*CRC"),
        ("a.tfrecord", tfrecord.frame(b"x")[:-1], ".*truncated"),
        ("a.tfrecord", tfrecord.frame(b"\xff"), ", record 0,.* UTF-8"),
        ("a.tfrecord", tfrecord.frame(OTHER_FIELD), ", record 0,.*'text'.*: body"),
    ],
)
def test_unreadable_files(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    refused(name.replace(".", r"\.") + message, read_texts, tmp_path / name)


NOT_NOTICED_BETWEEN_ROWS = (".jsonl", ".json", "_strings.jsonl", ".arrow")


@pytest.mark.parametrize("ending", [e for e in ENDINGS if e not in NOT_NOTICED_BETWEEN_ROWS])
def test_truncated_files(tmp_path, ending):
    path = tmp_path / (ending if ending[0] in "ou" else f"a{ending}")
    write(ending, path, TEXTS)
    content = path.read_bytes()
    for share in (0.2, 0.5, 0.8):
        path.write_bytes(content[: int(len(content) * share)])
        refused(path.name.replace(".", r"\."), read_texts, path)


@pytest.mark.parametrize("compression", COMPRESS)
def test_flipped_bit_in_compressed_files(tmp_path, compression):
    checked = {"zst": zstandard.ZstdCompressor(write_checksum=True).compress}
    content = bytearray((COMPRESS | checked)[compression]("".join(TEXTS).encode()))
    content[len(content) // 2] ^= 16
    (tmp_path / f"a.txt.{compression}").write_bytes(content)
    refused(rf"a\.txt\.{compression} ", read_texts, tmp_path / f"a.txt.{compression}")
    # A damaged second stream does not end the file.
    streams = bytearray(COMPRESS[compression](b"one") * 2)
    streams[len(streams) // 2 + 1] ^= 16
    (tmp_path / f"a.txt.{compression}").write_bytes(streams)
    refused(rf"a\.txt\.{compression} ", read_texts, tmp_path / f"a.txt.{compression}")


def test_damaged_records_and_headers(tmp_path):
    write_records(tmp_path / "a.array_record", [text.encode() * 9 for text in TEXTS])
    content = bytearray((tmp_path / "a.array_record").read_bytes())
    content[300] ^= 1
    (tmp_path / "a.array_record").write_bytes(content)
    refused(r"a\.array_record.* record", read_texts, tmp_path / "a.array_record")
    # A damaged header does not end an archive.
    content = bytearray(tar([(f"{i}.txt", b"text") for i in range(3)]))
    at = content.index(b"1.txt")
    content[at + 110] ^= 1
    (tmp_path / "a.tar").write_bytes(content)
    refused(rf"a\.tar.* byte {at}", read_texts, tmp_path / "a.tar")
    (tmp_path / "a.tar").write_bytes(content[:at])
    refused(rf"a\.tar.* byte {at}", read_texts, tmp_path / "a.tar")
    # Bytes that pyarrow itself takes for UTF-8.
    invalid = pyarrow.array([b"a", b"\xff"], pyarrow.binary()).view(pyarrow.string())
    data = pyarrow.table({"text": invalid})
    with pyarrow.ipc.new_stream(str(tmp_path / "b.arrow"), data.schema) as writer:
        writer.write_table(data)
    refused(r"b\.arrow.*UTF8", read_texts, tmp_path / "b.arrow")


def test_hidden_members_are_counted(tmp_path):
    contents = [("._a.txt", b"\xff"), ("a/.git/objects/x", b"\xff"), ("../outside.txt", b"text")]
    (tmp_path / "a.tar").write_bytes(tar(contents))
    documents, skipped = read_documents(tmp_path / "a.tar")
    assert [(document.text, document.file) for document in documents] == [("text", "a.tar")]
    assert skipped == {"hidden files in archives": 2}


def test_nested_archives(tmp_path):
    content = b"text"
    for depth in range(4):
        content = tar([(f"{depth}.tar" if depth else "a.txt", content)])
    (tmp_path / "a.tar").write_bytes(content)
    assert read_texts(tmp_path / "a.tar") == ["text"]


@pytest.mark.parametrize("compression", ["", *COMPRESS])
def test_concatenated_archives(tmp_path, compression):
    pack = COMPRESS.get(compression, bytes)
    content = b"".join(pack(tar([(name, name.encode())])) for name in ("a", "b"))
    path = tmp_path / f"a.tar.{compression}".rstrip(".")
    path.write_bytes(content)
    assert read_texts(path) == ["a", "b"]


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_missing_columns(tmp_path, name):
    write(name[1:], tmp_path / name, ["a"])
    refused(r"'body'.*: text.* text_field", read_texts, tmp_path / name, "body")
    refused("'number'", read_texts, tmp_path / name, "number")
