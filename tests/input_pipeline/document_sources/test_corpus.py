"""Which files a source names, in which order and units."""

import gzip
import os
import pickle
import sys
from pathlib import Path

import fsspec
import numpy as np
import pytest

from MaxText.config.data_sections import PreparationConfig
from MaxText.input_pipeline.document_sources import source_files
from MaxText.input_pipeline.document_sources.corpus import TextDocument, open_corpus
from MaxText.input_pipeline.document_sources.text_streams import Skipped
from MaxText.input_pipeline.prepare.prepare import prepare
from tests.input_pipeline.document_sources.written_corpora import (
    arrow_stream,
    parquet_file,
    read_documents,
    read_texts,
    rows,
    write_records,
)
from tests.input_pipeline.small_data import denying
from tests.input_pipeline.token_store import token_files
from tests.refusals import refused


def write(folder: Path, contents: dict[str, bytes]) -> None:
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def test_files_folders_and_patterns(tmp_path):
    folder = tmp_path / "mixed"
    row = b'{"body": "row 1"}\n\n{"body": "row 2", "text": 3}\n{"body": "  "}\n{"body": null}\n'
    packed = b'{"body": "row \\ud83d 3"}\n{"body": ["one", "two"]}\n"bare"\n'
    files = {
        "a.txt": b"text a",
        "below/b.md": b"text b",
        ".hidden.txt": b"never",
        ".git/c.txt": b"never",
        "c.py": b"not taken from a folder",
        "d.jsonl": row,
        "e.jsonl.gz": gzip.compress(packed),
        "f.txt.gz": gzip.compress("\ufefftext f".encode()),
        "g/part-10.txt": b"10",
        "g/part-2.txt": b"2",
    }
    write(folder, files)
    if sys.platform == "linux":  # other systems refuse such names
        (folder / os.fsdecode(b"h\xff.txt")).write_bytes(b"bytes in a name")
    source = f"{folder}, {folder}/*.py, {folder}/a.txt, {folder}/**/*.md"
    documents, skipped = read_documents(source, "body")
    assert documents == [
        TextDocument("text a", "a.txt", 0),
        TextDocument("text b", "below/b.md", 0),
        TextDocument("row 1", "d.jsonl", 0),
        TextDocument("row 2", "d.jsonl", 2),
        TextDocument("row \ufffd 3", "e.jsonl.gz", 0),
        TextDocument("one\n\ntwo", "e.jsonl.gz", 1),
        TextDocument("bare", "e.jsonl.gz", 2),
        TextDocument("text f", "f.txt.gz", 0),
        TextDocument("2", "g/part-2.txt", 0),
        TextDocument("10", "g/part-10.txt", 0),
        *([TextDocument("bytes in a name", "h\ufffd.txt", 0)] if sys.platform == "linux" else []),
        TextDocument("not taken from a folder", "c.py", 0),
    ]
    assert skipped == {"empty": 2}
    corpus = open_corpus(source, "body")
    assert corpus.num_files == 8 + (sys.platform == "linux")
    assert corpus.description == source
    assert read_texts(f"{folder}/g/part-{{10,2}}.txt") == ["10", "2"]


def test_units_follow_names_and_sizes(tmp_path):
    write(tmp_path, {f"{index}.txt": b"x" * 10 for index in range(7)})
    packed = gzip.compress(b"yellow-red", mtime=0)
    write(tmp_path, {"7.txt.gz": packed, "8.jsonl": rows(["z" * 20] * 10)})
    corpus = open_corpus(str(tmp_path), "text", shard_bytes=25)
    sizes = [unit.num_bytes for unit in corpus.shards]
    assert sizes[:5] == [20, 20, 20, 10, len(packed)]
    assert sum(sizes) == 70 + len(packed) + (tmp_path / "8.jsonl").stat().st_size
    assert all(0 < size <= 25 for size in sizes[5:])
    copies = pickle.loads(pickle.dumps(corpus)).shards
    assert copies == corpus.shards
    texts = [document.text for unit in copies for document in unit.documents(Skipped())]
    assert texts == ["x" * 10] * 7 + ["yellow-red"] + ["z" * 20] * 10


def test_standard_library(tmp_path, monkeypatch):
    files = {
        "b.py": b"import a\n",
        "a/__init__.py": b"",
        "a/c.py": "x = 'ä'\n".encode(),
        "latin.py": b"# -*- coding: latin-1 -*- \xe4\n",
        "readme.txt": b"never\n",
        "site-packages/other.py": b"never\n",
        "config-3.11/here.py": b"never\n",
        "_sysconfigdata_linux.py": b"never\n",
    }
    write(tmp_path / "lib", files)
    monkeypatch.setattr(source_files, "stdlib_root", lambda: tmp_path / "lib")
    documents, skipped = read_documents("python_stdlib")
    assert documents == [
        TextDocument("x = 'ä'\n", "a/c.py", 0),
        TextDocument("import a\n", "b.py", 0),
    ]
    assert skipped == {"empty": 1, "not UTF-8": 1}
    assert "Python 3." in open_corpus("python_stdlib", "text").description


def test_saved_datasets(tmp_path):
    state = b'{"_data_files": [{"filename": "data-0.arrow"}, {"filename": "data-1.arrow"}]}'
    saved = {
        "train/data-0.arrow": arrow_stream(["1", "2", "3"]),
        "train/data-1.arrow": parquet_file(["4"]),
        "train/cache-1.arrow": arrow_stream(["never"]),
        "train/state.json": state,
        "train/data-2.arrow": arrow_stream(["left by an older result"]),
        "test/state.json": b"{}",
        "test/data-00000-of-00001.arrow": arrow_stream(["0"]),
        "README.md": b"about",
        "dataset_dict.json": b'{"splits": ["train", "test"]}',
    }
    write(tmp_path, saved)
    assert read_texts(tmp_path) == ["0", "1", "2", "3", "4"]
    (tmp_path / "train/data-1.arrow").unlink()
    refused(r"data-1\.arrow, which is missing", open_corpus, str(tmp_path), "text")


def test_remote_files(tmp_path):
    system = fsspec.filesystem("memory")
    write_records(tmp_path / "v", [b"k"])
    contents = {
        "2.jsonl": rows(["b"]),
        "10.jsonl.gz": gzip.compress(rows(["c", "d"])),
        "1.txt": b"a",
        "t.parquet": parquet_file(["e", "f", "g"]),
        "u.arrow": arrow_stream(["h", "i", "j"]),
        "v.array_record": (tmp_path / "v").read_bytes(),
        "cache-1.arrow": arrow_stream(["never"]),
        "dataset_info.json": b"{}",
        "figure.png": b"\x89",
    }
    for name, content in contents.items():
        system.pipe(f"/corpus/{name}", content)
    try:
        assert read_texts("memory://corpus") == list("abcdefghijk")
        assert read_texts("memory://corpus/*.jsonl*", shard_bytes=1) == ["b", "c", "d"]
        assert read_texts("memory://corpus/{1.txt,u.arrow}") == ["a", "h", "i", "j"]
        size = sum(len(contents[name]) for name in list(contents)[:6])
        assert open_corpus("memory://corpus", "text").shards[0].num_bytes == size
        refused(r"absent\.txt", open_corpus, "memory://corpus/absent.txt", "text")
    finally:
        system.rm("/corpus", recursive=True)


@pytest.mark.parametrize(
    ("source", "names", "message"),
    [
        ("", [], "prepare_source is not set"),
        ("absent.txt", [], r"absent\.txt"),
        ("part-{1..3}.txt", ["part-1.txt"], r"part-2\.txt"),
        ("nothing://bucket/text", [], "nothing://"),
        ("thesis.pdf", ["thesis.pdf"], r"\.pdf"),
        (".", ["c.png"], "plain text"),
        (".", ["LICENSE"], r"/\*\*/\*\.py'\."),
    ],
)
def test_sources_without_text(tmp_path, monkeypatch, source, names, message):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, dict.fromkeys(names, b"text"))
    refused(message, open_corpus, source, "text")


def test_files_that_cannot_be_read(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("text")
    (unit,) = open_corpus(str(path), "text").shards
    path.unlink()
    refused(r"a\.txt .*No such file", list, unit.documents(Skipped()))
    path.mkdir()
    refused(r"a\.txt changed", list, unit.documents(Skipped()))

    monkeypatch.setattr(os, "scandir", denying(os.scandir, str(tmp_path)))
    refused(f"{tmp_path} .*Permission denied", open_corpus, str(tmp_path), "text")


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (["data/test-0.jsonl", "data/train-0.jsonl"], ("test", "train")),
        (["train_data_00000.jsonl", "validation_data_00000.jsonl"], ("train", "validation")),
        (["train/a.jsonl", "train/b.jsonl", "val/a.jsonl"], ("train", "validation")),
        (["dev.jsonl"], ("validation",)),
        (["train/a.jsonl", "train/b.jsonl"], ()),
        (["trainers.jsonl", "val.jsonl"], ()),
        (["a.jsonl", "test.jsonl"], ()),
    ],
)
def test_splits_of_the_source(tmp_path, names, splits):
    write(tmp_path, {name: rows([name]) for name in names})
    corpus = open_corpus(str(tmp_path), "text")
    assert corpus.splits == splits
    assert len(corpus.shards) == max(1, len(splits))
    assert read_texts(tmp_path) == names


def test_output_below_its_own_source(tmp_path):
    folder = tmp_path / "txt"
    write(folder, {"a.txt": b"text a", "web/manifest.json": b'{"text": "of another program"}'})
    for output_format, output in [
        ("bin", "bin"),
        ("tfrecord", "ids"),
        ("text_tfrecord", "records"),
    ]:
        keys = PreparationConfig(
            prepare_source=str(folder), tokenizer_path="bytes", prepare_output_format=output_format
        )
        for expected in ("Wrote", "Kept"):
            lines = []
            prepare(keys, str(folder / output), lines.append)
            assert lines[-1].startswith(expected)
            assert read_texts(folder) == ["text a", "of another program"]
    # What is named itself is read, if it holds text.
    assert read_texts(folder / "records") == ["text a", "of another program"]


def test_records_of_token_ids(tmp_path):
    for kind in ("parquet", "arrow", "tfrecord", "array_record"):
        path = tmp_path / f"a.{kind}"
        token_files.RECORDS[kind](path, [np.array([1, 2]), np.array([3])])
        refused(f"{path}.* no text .*Token ids .*dataset_path", read_texts, path)
