"""Text as records: contents, splits, sizes of files, and what is kept."""

import contextlib
import json
import random
from pathlib import Path

import numpy as np
import pytest

from MaxText.config.data_sections import PreparationConfig
from MaxText.input_pipeline.formats import tf_example
from MaxText.input_pipeline.formats.array_record import ArrayRecordWriter
from MaxText.input_pipeline.prepare.prepare import prepare
from tests.input_pipeline.document_sources.written_corpora import (
    arrow_stream,
    read_texts,
    rows,
    tfrecord_contents,
)
from tests.input_pipeline.small_data import contents
from tests.refusals import refused

from .small_corpus import split_small

TEXTS = [f"{i} äöü " + random.Random(i).randbytes(i % 37 * 10).hex() for i in range(200)]
# What names the source.
ABOUT = ("export.json", "records_manifest.json")


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch):
    split_small(monkeypatch, 5000)


def export(source: Path, folder: Path, lines: list[str] | None = None, **keys) -> list[dict]:
    """The files that the ledger names."""
    keys = {"prepare_output_format": "text_tfrecord", "validation_fraction": 0.1, **keys}
    preparation = PreparationConfig(prepare_source=str(source), prepare_num_workers=1, **keys)
    prepare(preparation, str(folder), [].append if lines is None else lines.append)
    return json.loads((folder / "export.json").read_text())["files"]


def records(folder: Path) -> dict[str, bytes]:
    return {name: data for name, data in contents(folder).items() if name not in ABOUT}


@pytest.mark.parametrize(
    ("ending", "num_shards"),
    [pytest.param("tfrecord", 0, marks=pytest.mark.slow), ("array_record", 8)],
)
def test_all_documents_in_order(tmp_path, ending, num_shards):
    (source := tmp_path / "source").mkdir()
    for at in range(0, len(TEXTS), 25):
        (source / f"data-{at:05d}.arrow").write_bytes(arrow_stream(TEXTS[at : at + 25]))
    keys = {"prepare_output_format": f"text_{ending}", "records.num_shards": num_shards}
    lines = []
    finished = export(source, tmp_path / "out", lines, **keys)
    train, held_out = (read_texts(f"{tmp_path}/out/{split}*") for split in ("train", "validation"))
    assert [text for text in TEXTS if text in set(train)] == train
    assert [text for text in TEXTS if text in set(held_out)] == held_out
    assert sorted(train + held_out) == sorted(TEXTS)
    assert 8 <= len(held_out) <= 35
    for split, texts in (("train", train), ("validation", held_out)):
        files = [file for file in finished if file["split"] == split]
        for index, file in enumerate(files):
            assert file["file"] == f"{split}_data_{index:05d}.{ending}"
        counts = [file["num_records"] for file in files]
        assert sum(counts) == len(texts)
        assert max(counts) - min(counts) <= 1
        assert sum(file["num_tokens"] for file in files) == len("".join(texts).encode())
    assert len(finished) == (num_shards or 2)
    assert f"  train: {len(train)} documents" in "\n".join(lines)
    # Records become records of the other format, by way of either.
    export(source, tmp_path / "direct", **{"records.num_shards": num_shards})
    export(tmp_path / "out", tmp_path / "again", **{"records.num_shards": num_shards})
    assert records(tmp_path / "direct") == records(tmp_path / "again")


def test_records_are_examples_with_the_text(tmp_path):
    texts = ["x", "y" * 5000, "z"]
    (tmp_path / "a.jsonl").write_bytes(rows(texts))
    keys = {"validation_fraction": 0, "records.num_shards": 4, "records.name": "owt"}
    finished = export(tmp_path / "a.jsonl", tmp_path / "out", **keys)
    # No file is empty.
    names = [f"owt_train_data_{index:05d}.tfrecord" for index in range(3)]
    assert [file["file"] for file in finished] == names
    written = [r for name in names for r in tfrecord_contents(tmp_path / "out" / name)]
    assert written == [tf_example.encode({"text": text.encode()}) for text in texts]


def test_finished_exports_are_kept_and_others_refused(tmp_path):
    path, out = tmp_path / "a.jsonl", tmp_path / "out"
    path.write_bytes(rows(TEXTS))
    export(path, out)
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    lines = []
    export(path, out, lines)
    assert [line.split()[0] for line in lines] == ["Kept"]
    assert before == {path: path.stat().st_mtime_ns for path in out.iterdir()}

    refused("prepare_seed was 0 and is 1", export, path, out, prepare_seed=1)
    refused("records.num_shards was 0 and is 2", export, path, out, **{"records.num_shards": 2})
    refused("not a data set of the requested kind", export, path, tmp_path)
    refused(r"records.name=\.\./x", export, path, tmp_path / "b", **{"records.name": "../x"})
    for texts in ([text.swapcase() for text in TEXTS], TEXTS[1:]):
        path.write_bytes(rows(texts))
        refused("text ", export, path, out)


def test_array_record_on_a_full_disk(tmp_path):
    # A file cannot grow beyond the limit, as if the disk were full there.
    resource = pytest.importorskip("resource", reason="limits of processes are of Unix")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def write_file():
        with contextlib.closing(ArrayRecordWriter(tmp_path / "a.array_record")) as writer:
            for number in range(10):
                writer.write(np.random.default_rng(number).bytes(100_000))

    write_file()
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"write\(\)"):
            write_file()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
