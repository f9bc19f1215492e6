"""Which files are read, in which order and units, and what is said where there are none."""

import gzip
import json
import os
import pickle
import subprocess
import sys
from collections import Counter
from pathlib import Path

import fsspec
import pyarrow
import pytest
from pyarrow import parquet

from MaxText.configuration.data_sections import Preparation
from MaxText.errors import UserError
from MaxText.input_pipeline.formats import tf_example, tfrecord
from MaxText.input_pipeline.preparation.corpus import Document
from MaxText.input_pipeline.preparation.preparing import prepare
from MaxText.input_pipeline.preparation.sources import finding, units
from MaxText.input_pipeline.preparation.sources.opening import open_corpus
from tests.input_pipeline.preparation.sources.written_corpora import (
    arrow_stream,
    parquet_file,
    read_documents,
    read_texts,
    rows,
    write_array_record,
)

REPOSITORY = Path(__file__).resolve().parents[4]


def test_sources_of_every_kind(tmp_path):
    folder = tmp_path / "mixed"
    (folder / "below").mkdir(parents=True)
    (folder / "a.txt").write_text("text a")
    (folder / "below" / "b.md").write_text("text b")
    (folder / ".hidden.txt").write_text("never")
    (folder / ".git").mkdir()
    (folder / ".git" / "c.txt").write_text("never")
    (folder / "c.py").write_text("not taken from a folder")
    lines = '{"body": "row 1"}\n\n{"body": "row 2", "text": 3}\n{"body": "  "}\n{"body": null}\n'
    (folder / "d.jsonl").write_text(lines)
    with gzip.open(folder / "e.jsonl.gz", "wt") as file:
        file.write('{"body": "row \\ud83d 3"}\n{"body": ["one", "two"]}\n"bare"\n')
    with gzip.open(folder / "f.txt.gz", "wt", encoding="utf-8-sig") as file:
        file.write("text f")
    source = f"{folder}, {folder}/*.py, {folder}/a.txt, {folder}/**/*.md"
    documents, skipped = read_documents(source, "body")
    assert documents == [
        Document("text a", "a.txt", 0),
        Document("text b", "below/b.md", 0),
        Document("row 1", "d.jsonl", 0),
        Document("row 2", "d.jsonl", 2),
        Document("row \ufffd 3", "e.jsonl.gz", 0),
        Document("one\n\ntwo", "e.jsonl.gz", 1),
        Document("bare", "e.jsonl.gz", 2),
        Document("text f", "f.txt.gz", 0),
        Document("not taken from a folder", "c.py", 0),
    ]
    assert skipped == {"empty": 2}
    corpus = open_corpus(source, "body")
    assert corpus.num_files == 6
    assert corpus.description == source


def test_numbers_in_names_count(tmp_path):
    for number in (10, 2, 1):
        (tmp_path / f"part-{number}.txt").write_text(str(number))
    assert read_texts(tmp_path) == ["1", "2", "10"]
    assert read_texts(f"{tmp_path}/part-*.txt") == ["1", "2", "10"]
    assert read_texts(f"{tmp_path}/part-{{10,2}}.txt") == ["10", "2"]
    assert read_texts(f"{tmp_path}/part-{{1..2}}.txt,{tmp_path}/part-1*") == ["1", "2", "10"]
    with pytest.raises(UserError, match=r"no such file .*part-3\.txt"):
        open_corpus(f"{tmp_path}/part-{{1..3}}.txt", "text")


def test_units_follow_names_and_sizes(tmp_path, monkeypatch):
    monkeypatch.setattr(units, "_SMALLEST_UNIT_BYTES", 25)
    for index in range(7):
        (tmp_path / f"{index}.txt").write_text("x" * 10)
    (tmp_path / "7.txt.gz").write_bytes(gzip.compress(b"yellow-red", mtime=0))
    (tmp_path / "8.jsonl").write_bytes(rows(["z" * 20] * 10))
    corpus = open_corpus(str(tmp_path), "text", unit_bytes=25)
    sizes = [unit.num_bytes for unit in corpus.units]
    assert sizes[:4] == [20, 20, 20, 10]
    packed = (tmp_path / "7.txt.gz").stat().st_size
    assert sizes[4] == packed > 25
    assert sum(sizes) == 70 + packed + (tmp_path / "8.jsonl").stat().st_size
    assert all(0 < size <= 25 for size in sizes[5:])
    copies = pickle.loads(pickle.dumps(corpus)).units
    assert copies == corpus.units
    texts = [document.text for unit in copies for document in unit.documents(Counter())]
    assert texts == ["x" * 10] * 7 + ["yellow-red"] + ["z" * 20] * 10


def test_small_corpora_are_cut_finer(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n' * (9 * 2**20 // 14))
    corpus = open_corpus(str(tmp_path), "text")
    assert [unit.num_bytes for unit in corpus.units] == [3145725, 3145725, 3145726]


def test_standard_library(tmp_path, monkeypatch):
    root = tmp_path / "lib"
    for name, content in {
        "b.py": b"import a\n",
        "a/__init__.py": b"",
        "a/c.py": "x = 'ä'\n".encode(),
        "latin.py": b"# -*- coding: latin-1 -*- \xe4\n",
        "site-packages/other.py": b"never\n",
        "config-3.11/here.py": b"never\n",
        "_sysconfigdata_linux.py": b"never\n",
        "readme.txt": b"never\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    monkeypatch.setattr(finding, "stdlib_root", lambda: root)
    documents, skipped = read_documents("python_stdlib")
    assert documents == [Document("x = 'ä'\n", "a/c.py", 0), Document("import a\n", "b.py", 0)]
    assert skipped == {"empty": 1, "not UTF-8": 1}
    assert "Python 3." in open_corpus("python_stdlib", "text").description
    monkeypatch.setattr(finding, "stdlib_root", lambda: tmp_path / "empty")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="has no source files"):
        open_corpus("python_stdlib", "text")


def save_to_disk(folder: Path, shards: dict[str, list[str]]) -> None:
    """A folder as the datasets library saves it."""
    folder.mkdir(parents=True)
    state = {"_data_files": [{"filename": name} for name in shards], "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text('{"features": {}}')
    for name, texts in shards.items():
        (folder / name).write_bytes(arrow_stream(texts))


def test_saved_data_sets_keep_their_order(tmp_path):
    save_to_disk(tmp_path / "d" / "train", {"b.arrow": ["1", "2", "3"], "a.arrow": ["4"]})
    save_to_disk(tmp_path / "d" / "test", {"data-00000-of-00001.arrow": ["0"]})
    (tmp_path / "d" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    (tmp_path / "d" / "README.md").write_text("about")
    (tmp_path / "d" / "train" / "cache-12ab.arrow").write_bytes(arrow_stream(["kept"]))
    documents, _ = read_documents(tmp_path / "d")
    assert documents == [
        Document("0", "test/data-00000-of-00001.arrow", 0),
        Document("1", "train/b.arrow", 0),
        Document("2", "train/b.arrow", 1),
        Document("3", "train/b.arrow", 2),
        Document("4", "train/a.arrow", 0),
    ]
    assert read_texts(tmp_path / "d" / "train") == ["1", "2", "3", "4"]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"_data_files": [{"filename": "../x.arrow"}]}, "no plain file name"),
        ({"_data_files": [{"filename": "gone.arrow"}]}, "gone.arrow, which is missing"),
        (
            {"_data_files": [{"filename": "x.arrow"}], "_indices_data_files": [{"filename": "i"}]},
            "flatten_indices",
        ),
    ],
)
def test_unusable_saved_data_sets_are_named(tmp_path, state, message):
    (tmp_path / "state.json").write_text(json.dumps(state))
    (tmp_path / "x.arrow").write_bytes(arrow_stream(["a"]))
    with pytest.raises(UserError, match=message):
        open_corpus(str(tmp_path), "text")


def test_state_of_another_program_is_no_saved_data_set(tmp_path):
    (tmp_path / "state.json").write_text('{"step": 3}')
    (tmp_path / "a.parquet").write_bytes(parquet_file(["a", "b", "c"]))
    (tmp_path / "b.arrow").write_bytes(arrow_stream(["d"]))
    assert read_texts(tmp_path) == ["a", "b", "c", "d"]


def test_remote_files(tmp_path):
    system = fsspec.filesystem("memory")
    contents = {
        "2.jsonl": rows(["b"]),
        "10.jsonl.gz": gzip.compress(rows(["c", "d"])),
        "1.txt": b"a",
        "t.parquet": parquet_file(["e", "f", "g"]),
        "u.arrow": arrow_stream(["h", "i", "j"]),
        "cache-1.arrow": arrow_stream(["never"]),
        "dataset_info.json": b"{}",
        "picture.png": b"\x89",
    }
    for name, content in contents.items():
        system.pipe(f"/corpus/{name}", content)
    try:
        texts = list("abcdefghij")
        assert read_texts("memory://corpus") == texts
        assert read_texts("memory://corpus/*.jsonl*", unit_bytes=1) == ["b", "c", "d"]
        assert read_texts("memory://corpus/{1.txt,u.arrow}") == ["a", "h", "i", "j"]
        assert open_corpus("memory://corpus", "text").units[0].num_bytes == sum(
            len(contents[name]) for name in list(contents)[:5]
        )
        with pytest.raises(UserError, match="no such file"):
            open_corpus("memory://corpus/absent.txt", "text")
    finally:
        system.rm("/corpus", recursive=True)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", "prepare_source is not set"),
        (" , ", "prepare_source is not set"),
        ("absent.txt", r"no such file or folder \(seen from"),
        ("absent/*.txt", "no such file"),
        ("nothing://bucket/text", "no kind of address"),
        (".", "holds no file that ends in"),
        ("thesis.pdf", r"\.pdf files are not read"),
        ("t.parquet.gz", "parquet files are not read when they are compressed"),
    ],
)
def test_missing_sources_are_named(tmp_path, monkeypatch, source, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "thesis.pdf").write_bytes(b"%PDF")
    (tmp_path / "t.parquet.gz").write_bytes(b"")
    if source == ".":
        (tmp_path / "t.parquet.gz").unlink()
    with pytest.raises(UserError, match=message):
        open_corpus(source, "text")


def test_what_happens_to_files_meanwhile_is_named(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("text")
    (unit,) = open_corpus(str(path), "text").units
    path.write_text("longer text")
    with pytest.raises(UserError, match=r"a\.txt has 11 bytes and had 4 .*changed while they were"):
        list(unit.documents(Counter()))
    path.unlink()
    with pytest.raises(UserError, match=r"a\.txt cannot be read: No such file"):
        list(unit.documents(Counter()))
    path.mkdir()
    with pytest.raises(UserError, match=r"a\.txt cannot be read: Is a directory"):
        list(unit.documents(Counter()))


def test_folders_without_permission_are_named(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", os.fspath(path))

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(UserError, match=f"{tmp_path} cannot be read: Permission denied"):
        open_corpus(str(tmp_path), "text")


def test_opening_imports_no_jax_and_no_pyarrow():
    check = (
        "import sys, MaxText.input_pipeline.preparation.sources.opening; "
        "assert not {'jax', 'grain', 'flax', 'pyarrow'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", check], check=True, cwd=REPOSITORY)


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
def test_splits_of_the_source_are_known(tmp_path, names, splits):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(rows([name]))
    corpus = open_corpus(str(tmp_path), "text")
    assert corpus.splits == splits
    texts = [[d.text for d in unit.documents(Counter())] for unit in corpus.units]
    assert [text for unit in texts for text in unit] == names
    assert len(texts) == max(1, len(splits))


def test_pipes_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    os.mkfifo(tmp_path / "b.txt")
    with pytest.raises(UserError, match=r"b\.txt is no plain file"):
        open_corpus(str(tmp_path), "text")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such names")
def test_names_that_are_not_utf8_can_be_shown(tmp_path):
    path = os.path.join(os.fsencode(tmp_path), b"a\xff.txt")
    with open(path, "wb") as file:
        file.write(b"text")
    corpus = open_corpus(str(tmp_path), "text")
    (document,) = corpus.units[0].documents(Counter())
    assert document == Document("text", "a\ufffd.txt", 0)


def test_what_was_made_out_of_a_folder_may_lie_in_it(tmp_path):
    folder = tmp_path / "txt"
    folder.mkdir()
    (folder / "a.txt").write_text("text a")
    (folder / "web").mkdir()
    (folder / "web" / "manifest.json").write_text('{"text": "of another program"}')
    for keys, made in [
        ({"prepare_output_format": "bin"}, "bin"),
        ({"prepare_output_format": "tfrecord"}, "ids"),
        ({"prepare_output_format": "text_tfrecord"}, "records"),
    ]:
        keys = {**keys, "prepare_source": str(folder), "tokenizer_path": "bytes"}
        for expected in ("Wrote", "Kept"):
            lines = []
            prepare(Preparation.model_validate(keys), str(folder / made), lines.append)
            assert lines[-1].startswith(expected)
            assert read_texts(folder) == ["text a", "of another program"]
    # What is named itself is read, if it holds text.
    assert read_texts(folder / "records") == ["text a", "of another program"]
    for made in ("bin", "ids"):
        with pytest.raises(UserError, match=f"token ids.* with dataset_path={folder / made}$"):
            open_corpus(str(folder / made), "text")


@pytest.mark.parametrize(
    ("names", "suggested"),
    [
        (["LICENSE", "notes"], "/*'."),
        (["LICENSE", "below/notes"], "/**/*'."),
        (["a.tex", "b.tex", "notes", "c.png", "d.png", "e.png"], "/**/*.tex'."),
        (["c.png"], "Convert them to plain text"),
        ([], "/**/*.py'."),
    ],
)
def test_the_pattern_that_is_suggested_matches_the_files(tmp_path, names, suggested):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    with pytest.raises(UserError) as raised:
        open_corpus(str(tmp_path), "text")
    assert (suggested if suggested[0] == "C" else f"{tmp_path}{suggested}") in str(raised.value)


def test_records_of_token_ids_are_named(tmp_path):
    column = pyarrow.array([[1, 2], [3]], pyarrow.list_(pyarrow.uint16()))
    table = pyarrow.table({"input_ids": column, "length": [2, 1]})
    parquet.write_table(table, tmp_path / "a.parquet")
    with pyarrow.ipc.new_stream(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    record = tf_example.encode({"input_ids": [5, 6]})
    (tmp_path / "a.tfrecord").write_bytes(tfrecord.frame(record))
    write_array_record(tmp_path / "a.array_record", [record])
    for ending in ("parquet", "arrow", "tfrecord", "array_record"):
        path = tmp_path / f"a.{ending}"
        with pytest.raises(UserError) as raised:
            read_texts(path)
        assert str(raised.value).endswith(
            " holds integers in input_ids, not text: these are token ids. Train on them directly "
            f"with dataset_path={path}"
        )
