"""All documents come out exactly once, in order, whatever format, files and units they are in."""

import tempfile
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies

from MaxText.input_pipeline.preparation.sources import plain_text, units
from tests.input_pipeline.preparation.sources.written_corpora import (
    COMPRESS,
    WRITERS,
    read_documents,
    read_texts,
)

# Line ends of all kinds, several planes of Unicode, and what looks like the formats themselves.
TEXTS = strategies.text(
    strategies.sampled_from('ab \n\r\t{}[]",:\\0ä漢🙂\x00\x0a\u2028'), max_size=30
)
FEW = hypothesis.settings(max_examples=8, deadline=None, derandomize=True)


@pytest.fixture(autouse=True)
def small_units(monkeypatch):
    monkeypatch.setattr(units, "_SMALLEST_UNIT_BYTES", 1)


@pytest.mark.parametrize("ending", WRITERS)
@hypothesis.given(
    files=strategies.lists(strategies.lists(TEXTS, max_size=6), min_size=1, max_size=3),
    unit_bytes=strategies.integers(1, 3000),
)
@FEW
def test_of_every_format(ending, files, unit_bytes):
    with tempfile.TemporaryDirectory() as name:
        for index, texts in enumerate(files):
            folder = Path(name, str(index))
            folder.mkdir()
            stem = "" if ending.startswith(("open", "urlsf")) else "x"
            WRITERS[ending](folder / f"{stem}{ending}", texts)
        documents, skipped = read_documents(name, unit_bytes=unit_bytes)
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
    unit_bytes=strategies.integers(1, 700),
    compression=strategies.sampled_from(["", *COMPRESS]),
)
@hypothesis.settings(max_examples=150, deadline=None, derandomize=True)
def test_of_long_plain_text(text, unit_bytes, compression):
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain_text, "LONGEST_TEXT", 64)
        content, path = text.encode(), Path(name, f"a.txt.{compression}".rstrip("."))
        path.write_bytes(COMPRESS[compression](content) if compression else content)
        documents, skipped = read_documents(path, unit_bytes=unit_bytes)
        whole, _ = read_documents(path)
        assert documents == whole
        assert [document.row for document in documents] == sorted(
            {document.row for document in documents}
        )
        pieces = [document.text for document in documents]
        if not skipped:
            assert "".join(pieces) == text
        assert "".join("".join(pieces).split()) == "".join(text.split())
        # Cut 64 bytes after the last one, plus at most 4 to the end of the line.
        assert all(len(piece.encode()) <= 64 + 4 for piece in pieces)


@hypothesis.given(
    texts=strategies.lists(TEXTS.filter(lambda text: text.strip()), min_size=1, max_size=12),
    unit_bytes=strategies.integers(1, 400),
)
@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
def test_rows_are_found_by_file_and_row(texts, unit_bytes):
    with tempfile.TemporaryDirectory() as name:
        path = Path(name, "a.jsonl")
        WRITERS[".jsonl"](path, texts)
        data = path.read_bytes()
        documents, _ = read_documents(path, unit_bytes=unit_bytes)
        assert len(documents) == len(texts)
        for document, text in zip(documents, texts, strict=True):
            _, _, start = document.file.partition(" from byte ")
            at = int(start or 0)
            # The first line that begins at that byte or behind it.
            if at:
                at = data.index(b"\n", at - 1) + 1
            line = data[at:].splitlines(keepends=True)[document.row]
            assert line in data
            path.with_name("one.jsonl").write_bytes(line)
            assert read_texts(path.with_name("one.jsonl")) == [text]
