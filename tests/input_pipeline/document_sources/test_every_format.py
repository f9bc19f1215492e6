"""All documents come out exactly once, in order, whatever format, files and units they are in."""

import json
import sys
import tempfile
from pathlib import Path

import hypothesis
import pyarrow
import pytest
from hypothesis import strategies

from MaxText.input_pipeline.document_sources import text_streams
from tests.input_pipeline.document_sources.written_corpora import (
    COMPRESS,
    ENDINGS,
    arrow_stream,
    parquet_file,
    read_documents,
    read_texts,
    write,
    write_records,
)
from tests.refusals import refused

# Line ends of all kinds, several planes of Unicode, and what looks like the formats themselves.
TEXTS = strategies.text(
    strategies.sampled_from('ab \n\r\t{}[]",:\\0ä漢🙂\x00\x0a\u2028'), max_size=30
)


@pytest.mark.parametrize("ending", ENDINGS)
@hypothesis.given(
    files=strategies.lists(strategies.lists(TEXTS, max_size=6), min_size=1, max_size=3),
    shard_bytes=strategies.integers(1, 3000),
)
@hypothesis.settings(max_examples=7, deadline=None, derandomize=True)
def test_documents_of_a_format(ending, files, shard_bytes):
    if ending.endswith("array_record"):
        shard_bytes *= 50  # an empty file has 64 KiB
    with tempfile.TemporaryDirectory() as name:
        for index, texts in enumerate(files):
            folder = Path(name, str(index))
            folder.mkdir()
            stem = "" if ending.startswith(("open", "urlsf")) else "x"
            write(ending, folder / f"{stem}{ending}", texts)
        documents, skipped = read_documents(name, shard_bytes=shard_bytes)
        written = [text for texts in files for text in texts]
        expected = [text for text in written if text.strip()]
        assert [document.text for document in documents] == expected
        assert skipped.total() == len(written) - len(expected)
        if not ending.endswith((".jsonl", ".json")):  # there rows are counted from each cut
            assert read_documents(name)[0] == documents


@hypothesis.given(
    text=strategies.text(strategies.sampled_from("ab\n\r ä漢🙂"), min_size=1, max_size=600).filter(
        lambda text: text.strip()
    ),
    shard_bytes=strategies.integers(1, 700),
    compression=strategies.sampled_from(["", *COMPRESS]),
)
@hypothesis.settings(max_examples=100, deadline=None, derandomize=True)
def test_long_plain_text(text, shard_bytes, compression):
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_streams, "LONGEST_TEXT", 64)
        content, path = text.encode(), Path(name, f"a.txt.{compression}".rstrip("."))
        path.write_bytes(COMPRESS[compression](content) if compression else content)
        documents, skipped = read_documents(path, shard_bytes=shard_bytes)
        assert documents == read_documents(path)[0]
        numbers = [document.row for document in documents]
        assert numbers == sorted(set(numbers))
        pieces = [document.text for document in documents]
        if not skipped:
            assert "".join(pieces) == text
        assert "".join("".join(pieces).split()) == "".join(text.split())
        # Split 64 bytes after the last one, plus at most 4 to the end of the line.
        assert all(len(piece.encode()) <= 64 + 4 for piece in pieces)


@hypothesis.given(
    texts=strategies.lists(TEXTS.filter(lambda text: text.strip()), min_size=1, max_size=12),
    shard_bytes=strategies.integers(1, 400),
)
@hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
def test_rows_are_found_by_file_and_row(texts, shard_bytes):
    with tempfile.TemporaryDirectory() as name:
        path = Path(name, "a.jsonl")
        write(".jsonl", path, texts)
        data = path.read_bytes()
        documents, _ = read_documents(path, shard_bytes=shard_bytes)
        for document, text in zip(documents, texts, strict=True):
            at = int(document.file.partition(" from byte ")[2] or 0)
            # The first line that begins at that byte or after it.
            if at:
                at = data.index(b"\n", at - 1) + 1
            assert json.loads(data[at:].splitlines()[document.row])["text"] == text


def test_concatenated_compressed_streams(tmp_path):
    for compression, pack in COMPRESS.items():
        content = pack(b"first ") + pack(b"second ") + pack(b"third")
        (tmp_path / f"a.txt.{compression}").write_bytes(content)
    assert read_texts(tmp_path) == ["first second third"] * 4


def test_surrogates_and_byte_order_marks(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud83d"}\n{"text": "\\ud83d\\ude42"}\n')
    (tmp_path / "b.json").write_text('["\\ude42b"]')
    (tmp_path / "c.jsonl").write_bytes(b"\xef\xbb\xbf")
    (tmp_path / "d.jsonl").write_bytes(b'\xef\xbb\xbf\r\n"text"')
    documents, _ = read_documents(tmp_path)
    assert [(document.text, document.row) for document in documents] == [
        ("a\ufffd", 0),
        ("\U0001f642", 1),
        ("\ufffdb", 0),
        ("text", 1),
    ]


@pytest.mark.parametrize(
    "kind",
    [
        pyarrow.large_string(),
        pyarrow.binary(),
        pyarrow.string_view(),
        pyarrow.dictionary(pyarrow.int32(), pyarrow.string()),
    ],
)
def test_columns_of_other_types(tmp_path, kind):
    texts = ["a", None, "ä", "", "漢"]
    column = [text.encode() if text and pyarrow.types.is_binary(kind) else text for text in texts]
    (tmp_path / "a.arrow").write_bytes(arrow_stream(column, kind))
    documents, skipped = read_documents(tmp_path / "a.arrow")
    assert [(document.text, document.row) for document in documents] == [
        ("a", 0),
        ("ä", 2),
        ("漢", 4),
    ]
    assert skipped == {"empty": 2}


def test_columns_of_paragraphs(tmp_path, monkeypatch):
    kind = pyarrow.list_(pyarrow.string())
    (tmp_path / "a.parquet").write_bytes(parquet_file([["a", "b"], [], ["c", None]], kind))
    documents, skipped = read_documents(tmp_path / "a.parquet")
    assert [(document.text, document.row) for document in documents] == [("a\n\nb", 0), ("c", 2)]
    assert skipped == {"empty": 1}
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    refused(r"jaxpretrain\[data\]", read_texts, tmp_path / "a.parquet")


def test_text_that_looks_like_a_record_stays_text(tmp_path):
    texts = ["\n", "\n\x01a", "\n\x02\n\x00", "\x0a\x04\x0a\x02\x0a\x09 more", "plain"]
    write_records(tmp_path / "a.array_record", [text.encode() for text in texts])
    assert read_texts(tmp_path / "a.array_record") == texts[1:]
