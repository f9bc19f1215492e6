"""Links, files of another kind than their neighbors, and files that are no text of the corpus."""

import json
import re
from pathlib import Path

import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from MaxText.input_pipeline.document_sources.corpus import open_corpus
from MaxText.input_pipeline.document_sources.text_streams import LONGEST_TEXT
from MaxText.input_pipeline.formats import tf_example
from MaxText.storage import tfrecord
from tests.input_pipeline.document_sources.written_corpora import (
    read_documents,
    read_texts,
    rows,
    tar,
    write_records,
)
from tests.input_pipeline.prepare.small_corpus import byte_options, made
from tests.refusals import refused

TEXTS = [f"text {number}" for number in range(20)]


def pointer(num_bytes: int) -> bytes:
    oid = "4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393"
    lines = f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize {num_bytes}\n"
    return lines.encode()


def test_a_snapshot_of_the_hub_is_read_through_its_links(tmp_path):
    blob = tmp_path / "blobs" / "deadbeef"
    blob.parent.mkdir()
    blob.write_bytes(zstandard.compress(rows(TEXTS)))
    snapshot = tmp_path / "snapshots" / "abc" / "data"
    snapshot.mkdir(parents=True)
    (snapshot / "train.jsonl.zst").symlink_to(blob)
    # The last one matches the blob too, whose name does not tell its format.
    for source in (snapshot.parent, tmp_path, f"{tmp_path}/**/*.zst", f"{tmp_path}/**"):
        assert read_texts(source) == TEXTS
    assert not open_corpus(str(tmp_path), "text").notes


def test_a_file_and_links_to_it_are_one(tmp_path):
    (tmp_path / "b.jsonl").write_bytes(rows(TEXTS))
    (tmp_path / "a.jsonl").symlink_to("b.jsonl")
    (tmp_path / "folder").symlink_to(".")
    documents, _ = read_documents(tmp_path)
    assert [document.text for document in documents] == TEXTS


def write_table(path: Path, column: str, count: int) -> None:
    values = [f"row {number}" for number in range(count)]
    parquet.write_table(pyarrow.table({column: values}), path, row_group_size=7)


def write_arrow_file(path: Path, column: str, count: int) -> None:
    data = pyarrow.table({column: [f"row {number}" for number in range(count)]})
    with pyarrow.ipc.new_file(str(path), data.schema) as writer:
        writer.write_table(data, max_chunksize=7)


def write_arrow_stream(path: Path, column: str, count: int) -> None:
    data = pyarrow.table({column: [f"row {number}" for number in range(count)]})
    with pyarrow.ipc.new_stream(str(path), data.schema) as writer:
        writer.write_table(data, max_chunksize=7)


def write_json_lines(path: Path, column: str, count: int) -> None:
    path.write_bytes(rows([f"row {number}" for number in range(count)], column))


def write_json_list(path: Path, column: str, count: int) -> None:
    path.write_text(json.dumps([{column: f"row {number}"} for number in range(count)]))


def _examples(column: str, count: int) -> list[bytes]:
    return [tf_example.encode({column: f"row {n}".encode(), "id": [n]}) for n in range(count)]


def write_tfrecord(path: Path, column: str, count: int) -> None:
    path.write_bytes(b"".join(map(tfrecord.frame, _examples(column, count))))


def write_array_record(path: Path, column: str, count: int) -> None:
    write_records(path, _examples(column, count))


KINDS = {
    ".parquet": write_table,
    ".arrow": write_arrow_file,
    "-stream.arrow": write_arrow_stream,
    ".jsonl": write_json_lines,
    ".json": write_json_list,
    ".tfrecord": write_tfrecord,
    ".array_record": write_array_record,
}


@pytest.mark.parametrize("ending", KINDS)
def test_rows_of_another_column_are_counted_one_by_one(tmp_path, ending):
    source = tmp_path / "source"
    source.mkdir()
    KINDS[ending](source / f"a{ending}", "text", 20)
    KINDS[ending](source / f"b{ending}", "content", 30)
    lines = []
    manifest = made(byte_options(source), tmp_path / "d", lines.append, max_bad_records=30)
    assert sum(manifest.source.skipped.values()) == 30
    assert sum(split.num_documents for split in manifest.splits.values()) == 20
    assert any(f"b{ending}" in line and "content" in line for line in lines)
    message = rf"bad_records\.maximum=29 .*\(30 or more\).*b{ending}.*content"
    refused(message, made, byte_options(source), tmp_path / "e", max_bad_records=29)


@pytest.mark.parametrize(
    "name",
    [
        "p.jsonl",
        "p.txt",
        "p.json",
        "p.jsonl.zst",
        "p.txt.gz",
        "p.parquet",
        "p.arrow",
        "p.tar",
        "p.tfrecord",
        "p.array_record",
    ],
)
def test_pointers_are_named_and_no_text(tmp_path, name):
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.jsonl").write_bytes(rows(["x" * 60] * 50))
    (source / name).write_bytes(pointer(800))
    refused(rf"{name} is a Git LFS pointer.*800 bytes.*git lfs pull", read_documents, source)
    manifest = made(byte_options(source), tmp_path / "d", max_bad_records=100)
    assert sum(split.num_documents for split in manifest.splits.values()) == 50
    # As many as fit into the bytes that the pointer stands for, or one of plain text.
    num_bytes = (source / "a.jsonl").stat().st_size
    expected = 1 if name == "p.txt" else round(800 / (num_bytes / 50))
    assert manifest.source.skipped == {"unreadable": expected}


def test_a_pointer_to_more_than_may_be_lost(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.jsonl").write_bytes(rows(["x" * 60] * 50))
    for name, size in (("b.parquet", 10**9), ("b.txt", 101 * LONGEST_TEXT)):
        (source / name).write_bytes(pointer(size))
        refused("LFS", made, byte_options(source), tmp_path / "d", max_bad_records=100)
        (source / name).unlink()
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_pointers_in_archives_and_of_git_annex(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    members = [("a.txt", b"one"), ("b.txt", pointer(7)), ("c.png", b"\x89PNG"), ("d.txt", b"two")]
    (source / "a.tar").write_bytes(tar(members))
    (source / "z.txt").write_bytes(b"/annex/objects/SHA256E-s123--00ff.txt\n")
    lines = []
    manifest = made(byte_options(source), tmp_path / "d", lines.append, max_bad_records=3)
    assert manifest.source.skipped == {"unreadable": 3}
    assert sum(split.num_documents for split in manifest.splits.values()) == 2
    named = "\n".join(lines)
    for pattern in ("member 'b.txt', is a Git LFS", "member 'c.png', is not text", "git-annex"):
        assert pattern in named


def test_text_about_pointers_is_text(tmp_path):
    text = "A pointer begins so:\n" + pointer(3).decode()
    (tmp_path / "a.txt").write_text(text)
    assert read_texts(tmp_path) == [text]


def test_zeros_and_utf_16_are_no_text(tmp_path):
    for content in (bytes(5000), ("some words " * 500).encode("utf-16-le")):
        (tmp_path / "a.txt").write_bytes(content)
        refused(r"a\.txt is not text: .* zeros", read_documents, tmp_path)
    (tmp_path / "a.txt").write_text("some \0 words " * 500)
    assert len(read_texts(tmp_path)) == 1


def test_a_link_that_leads_nowhere_is_named(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.txt").write_text("text")
    (source / "b.txt").symlink_to("nowhere")
    lines = []
    manifest = made(byte_options(source), tmp_path / "d", lines.append, max_bad_records=1)
    assert manifest.source.skipped == {"unreadable": 1}
    assert any("b.txt" in line and "link to nowhere" in line for line in lines)
    refused("link to nowhere", made, byte_options(source), tmp_path / "e", max_bad_records=0)


@pytest.mark.parametrize(
    ("names", "read", "notes"),
    [
        # Among rows, plain text that describes them is not read; other text is.
        (["a.jsonl", "LICENSE.txt", "README.md"], ["a.jsonl"], ["about the data.*LICENSE.txt, R"]),
        (["a.jsonl", "b/notes.txt"], ["a.jsonl", "b/notes.txt"], ["1 file of plain text.*b/notes"]),
        (["a.jsonl", "README.md", "notes.txt"], ["README.md", "a.jsonl", "notes.txt"], ["2 files"]),
        (["a.txt", "README.md"], ["README.md", "a.txt"], []),
        (["a.jsonl", "b.csv", "c.pdf"], ["a.jsonl"], ["2 files with other endings.*b.csv, c.pdf"]),
        (["a.jsonl", "b.json"], ["a.jsonl", "b.json"], []),
    ],
)
def test_files_that_are_not_read_are_named(tmp_path, names, read, notes):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "x"}')
    corpus = open_corpus(str(tmp_path), "text")
    assert [part.file.name for shard in corpus.shards for part in shard.ranges] == read
    assert len(corpus.notes) == len(notes)
    for note, expected in zip(corpus.notes, notes, strict=True):
        assert re.search(expected, note)


def test_nested_text_is_named(tmp_path):
    row = {"meta": {"text": "x"}, "messages": [{"role": "user", "content": "x"}], "tags": ["a"]}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    refused(
        r"fields with text: none; nested text, .*: meta\.text, messages\[\]\.role, messages\[\]\.c",
        read_documents,
        tmp_path,
        "meta.text",
    )
    (tmp_path / "a.jsonl").unlink()
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "a.parquet")
    refused(r"text: tags; nested text, .*: meta\.text, mes", read_documents, tmp_path, "meta.text")
    deep = "x"
    for _ in range(200):
        deep = {"a": deep}
    (tmp_path / "b.jsonl").write_text(json.dumps({"a": deep}))
    refused(r"fields with text: none\. Set", read_documents, tmp_path / "b.jsonl")


def test_names_with_commas_and_brackets(tmp_path):
    folder = tmp_path / "sp ace,comma" / "[1]"
    folder.mkdir(parents=True)
    (folder / "b\\{c,d}ü.jsonl").write_bytes(rows(TEXTS[:3]))
    (tmp_path / "z.jsonl").write_bytes(rows(TEXTS[3:]))
    for entry in (
        folder,
        f"{folder}/*.jsonl",
        f"{folder}/b\\{{c,d}}ü.jsonl",
        f"{tmp_path}/sp*/*/*",
    ):
        assert read_texts(entry) == TEXTS[:3]
        assert read_texts(f"{entry},{tmp_path}/z.jsonl") == TEXTS
    refused(
        r"split at its commas: write \[,\]", read_documents, f"{tmp_path}/no,{tmp_path}/z.jsonl"
    )
    assert read_texts(f"{tmp_path}/sp ace[,]comma/*/*") == TEXTS[:3]


def test_names_that_are_not_utf_8_can_be_prepared(tmp_path, capsys):
    source = Path(str(tmp_path) + "/" + b"caf\xe9".decode(errors="surrogateescape"))
    source.mkdir()
    (source / b"\xe9.txt".decode(errors="surrogateescape")).write_text("text")
    manifest = made(byte_options(source), tmp_path / "d", print)
    assert "caf\ufffd" in manifest.source.description
