"""Text as records: contents, splits, numbers of files, and the same bytes after an interruption."""

import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from MaxText.configuration.data_sections import Preparation
from MaxText.errors import UserError
from MaxText.input_pipeline.formats import tf_example, tfrecord
from MaxText.input_pipeline.preparation import export_plan, text_export
from MaxText.input_pipeline.preparation.corpus import Corpus, Document
from MaxText.input_pipeline.preparation.sources import units
from MaxText.input_pipeline.preparation.sources.opening import open_corpus
from MaxText.input_pipeline.preparation.text_export import export_text
from tests.input_pipeline.preparation.sources.written_corpora import arrow_stream, read_texts, rows

REPOSITORY = Path(__file__).resolve().parents[3]
TEXTS = [f"{i} äöü " + random.Random(i).randbytes(i % 37 * 10).hex() for i in range(200)]


@pytest.fixture(autouse=True)
def small_units(monkeypatch):
    monkeypatch.setattr(units, "_SMALLEST_UNIT_BYTES", 5000)


def write_shards(folder: Path, texts: list[str], first: int = 0) -> None:
    """Arrow shards of 25 texts, as the datasets library saves them."""
    folder.mkdir(parents=True)
    names = []
    for index in range(0, len(texts), 25):
        names.append(f"data-{first + index // 25:05d}-of-00010.arrow")
        (folder / names[-1]).write_bytes(arrow_stream(texts[index : index + 25]))
    state = {"_data_files": [{"filename": name} for name in names]}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")


def export(source: Path, folder: Path, lines: list[str] | None = None, **keys):
    keys = {"prepare_output_format": "text_tfrecord", "validation_fraction": 0.1, **keys}
    preparation = Preparation(prepare_source=str(source), **keys)
    corpus = open_corpus(str(source), preparation.text_field)
    return export_text(corpus, preparation, folder, [].append if lines is None else lines.append)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture
def source(tmp_path):
    write_shards(tmp_path / "source", TEXTS)
    return tmp_path / "source"


@pytest.mark.parametrize("output_format", ["text_tfrecord", "text_array_record"])
def test_all_documents_are_written_in_order(source, tmp_path, output_format):
    lines = []
    ledger = export(source, tmp_path / "out", lines, prepare_output_format=output_format)
    ending = output_format.removeprefix("text_")
    assert [path.name for path in sorted((tmp_path / "out").iterdir())] == [
        "export.json",
        f"train_data_00000.{ending}",
        f"validation_data_00000.{ending}",
    ]
    train = read_texts(tmp_path / "out" / "train*")
    held_out = read_texts(f"{tmp_path}/out/validation*")
    assert [text for text in TEXTS if text in set(train)] == train
    assert [text for text in TEXTS if text in set(held_out)] == held_out
    assert sorted(train + held_out) == sorted(TEXTS)
    assert 8 <= len(held_out) <= 35
    assert [file.num_documents for file in sorted(ledger.files, key=lambda f: f.split)] == [
        len(train),
        len(held_out),
    ]
    assert sum(file.num_text_bytes for file in ledger.files) == len("".join(TEXTS).encode())
    assert f"  train: {len(train)} documents" in "\n".join(lines)
    assert not list(tmp_path.glob(".*"))


def test_records_are_examples_with_the_text(source, tmp_path):
    export(source, tmp_path / "out", validation_fraction=0)
    records = list(tfrecord.read_records(tmp_path / "out" / "train_data_00000.tfrecord"))
    assert records == [tf_example.encode({"text": text.encode()}) for text in TEXTS]
    assert len(contents(tmp_path / "out")) == 2


def test_splits_of_the_source_are_kept(tmp_path):
    write_shards(tmp_path / "owt" / "train", TEXTS[:175])
    write_shards(tmp_path / "owt" / "val", TEXTS[175:])
    export(tmp_path / "owt", tmp_path / "out", prepare_num_shards=8)
    assert read_texts(f"{tmp_path}/out/train*") == TEXTS[:175]
    assert read_texts(f"{tmp_path}/out/validation*") == TEXTS[175:]
    train_bytes = len("".join(TEXTS[:175]).encode())
    share = train_bytes / len("".join(TEXTS).encode())
    num_train = len(list((tmp_path / "out").glob("train*")))
    assert num_train == round(8 * share)
    assert len(list((tmp_path / "out").glob("*.tfrecord"))) == 8
    sizes = [path.stat().st_size for path in (tmp_path / "out").glob("train*")]
    assert max(sizes) - min(sizes) < 2 * 800


def test_records_become_records_of_the_other_format(source, tmp_path):
    export(source, tmp_path / "first", prepare_num_shards=5)
    keys = {"prepare_output_format": "text_array_record", "prepare_num_shards": 5}
    export(tmp_path / "first", tmp_path / "second", **keys)
    export(source, tmp_path / "direct", **keys)
    second, direct = contents(tmp_path / "second"), contents(tmp_path / "direct")
    assert [name for name in second if name.startswith("train")] == [
        f"train_data_{i:05d}.array_record" for i in range(4)
    ]
    second.pop("export.json")
    direct.pop("export.json")
    assert second == direct


@pytest.mark.parametrize("fraction", [1e-9, 0.3, 0.999999])
def test_neither_split_is_empty(tmp_path, fraction):
    (tmp_path / "a.jsonl").write_bytes(rows(["one", "two"]))
    ledger = export(tmp_path / "a.jsonl", tmp_path / "out", validation_fraction=fraction)
    assert sorted((file.split, file.num_documents) for file in ledger.files) == [
        ("train", 1),
        ("validation", 1),
    ]


def test_one_document_cannot_be_held_out(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(rows(["one"]))
    ledger = export(tmp_path / "a.jsonl", tmp_path / "out", validation_fraction=0.999)
    assert [(file.split, file.num_documents) for file in ledger.files] == [("train", 1)]


def test_long_documents_leave_no_gaps_in_numbers(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(rows(["x", "y" * 5000, "z"]))
    keys = {"validation_fraction": 0, "prepare_num_shards": 4, "prepare_name": "owt"}
    ledger = export(tmp_path / "a.jsonl", tmp_path / "out", **keys)
    assert [(file.file, file.num_documents) for file in ledger.files] == [
        ("owt_train_data_00000.tfrecord", 2),
        ("owt_train_data_00001.tfrecord", 0),
        ("owt_train_data_00002.tfrecord", 0),
        ("owt_train_data_00003.tfrecord", 1),
    ]


def test_finished_exports_are_kept_and_others_refused(source, tmp_path):
    export(source, tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    lines = []
    export(source, tmp_path / "out", lines)
    assert lines == [f"Kept {tmp_path / 'out'}: it already holds this text with these options"]
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    with pytest.raises(UserError, match="prepare_seed was 0 and is 1"):
        export(source, tmp_path / "out", prepare_seed=1)
    (source.parent / "more.jsonl").write_bytes(rows(["more"]))
    with pytest.raises(UserError, match="its text had files of other sizes"):
        export(source.parent / "more.jsonl", tmp_path / "out")
    (tmp_path / "out" / "export.json").write_text("{")
    with pytest.raises(UserError, match=r"export\.json is damaged"):
        export(source, tmp_path / "out")
    with pytest.raises(UserError, match=r"holds no export\.json, but data-00000"):
        export(source, source.parent / "source")
    with pytest.raises(UserError, match="no plain name"):
        export(source, tmp_path / "b", prepare_name="../x")


def test_text_of_the_same_size_is_told_from_other_text(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(rows(TEXTS))
    export(path, tmp_path / "out", prepare_num_workers=1)
    edited = [text.swapcase() for text in TEXTS]
    path.write_bytes(rows(edited))
    with pytest.raises(UserError, match=r"holds another export: its text was other \(.*a\.jsonl"):
        export(path, tmp_path / "out")
    path.write_bytes(rows(TEXTS))
    lines = []
    export(path, tmp_path / "out", lines)
    assert lines[-1].startswith("Kept")


def test_processes_do_not_show_in_the_files(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_bytes(rows(TEXTS))
    monkeypatch.setattr(text_export.Workers, "for_corpus", lambda self, *_: (self.num_processes, 1))
    for workers in (1, 2):
        export(tmp_path / "a.jsonl", tmp_path / str(workers), prepare_num_workers=workers)
    assert contents(tmp_path / "1") == contents(tmp_path / "2")


def test_lost_files_are_written_again(source, tmp_path):
    export(source, tmp_path / "out", prepare_num_shards=8)
    before = contents(tmp_path / "out")
    (tmp_path / "out" / "train_data_00002.tfrecord").unlink()
    (tmp_path / "out" / "train_data_00004.tfrecord").write_bytes(b"short")
    export(source, tmp_path / "out", prepare_num_shards=8)
    after = contents(tmp_path / "out")
    assert before.keys() == after.keys()
    before.pop("export.json")
    assert {name: after[name] for name in before} == before


def test_finished_files_are_not_made_again(source, tmp_path, monkeypatch):
    keys = {"validation_fraction": 0, "prepare_num_shards": 8}
    export(source, tmp_path / "out", **keys)
    (tmp_path / "out" / "train_data_00007.tfrecord").unlink()
    read = []
    unit_texts = text_export.unit_texts
    monkeypatch.setattr(
        text_export, "unit_texts", lambda *arguments: read.append(1) or unit_texts(*arguments)
    )
    export(source, tmp_path / "out", **keys)
    num_units = len(open_corpus(str(source), "text").units)
    assert 1 <= len(read) <= num_units / 8 + 1


def test_text_that_changes_meanwhile_is_noticed(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    path.write_bytes(rows(["one", "two"]))
    plan = text_export.plan_export

    def change_then_plan(*arguments, **keywords):
        path.write_bytes(rows(["onetwo", ""]))
        return plan(*arguments, **keywords)

    monkeypatch.setattr(text_export, "plan_export", change_then_plan)
    with pytest.raises(UserError, match="changed while they were read"):
        export(path, tmp_path / "out")


def test_no_text_at_all_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(rows(["", " "]))
    with pytest.raises(UserError, match=r"has no document with text \(1 files: 2 empty\)"):
        export(tmp_path / "a.jsonl", tmp_path / "out")
    (tmp_path / "a.jsonl").write_bytes(rows(["", "now"]))
    lines = []
    export(tmp_path / "a.jsonl", tmp_path / "out", lines)
    assert "  left out: 1 empty" in lines


def test_plans_cover_every_document_once():
    class Unit:
        def __init__(self, sizes):
            self.texts = ["x" * size for size in sizes]

        num_bytes = 1

        def documents(self, skipped):
            del skipped
            for row, text in enumerate(self.texts):
                yield Document(text, "file", row)

    generator = random.Random(0)
    for _ in range(50):
        of_units = [
            [generator.randint(1, 30) for _ in range(generator.randint(0, 4))] for _ in range(5)
        ]
        corpus = Corpus("", 1, tuple(map(Unit, of_units)))
        counts = [
            export_plan.count_unit(unit, i, seed=3, validation_fraction=0.3, fix_text=False)
            for i, unit in enumerate(corpus.units)
        ]
        total = sum(map(sum, of_units))
        if not total:
            continue
        num_shards = generator.randint(2, 7)
        plan = export_plan.plan_export(
            corpus, counts, seed=3, validation_fraction=0.3, num_shards=num_shards
        )
        assert sum(plan.num_shards.values()) == num_shards
        assert sum(before[-1] for before in plan.bytes_before.values()) == total
        shards = Counter()
        for split, before in plan.bytes_before.items():
            at = 0
            for number, sizes in enumerate(of_units):
                assert before[number] == at
                for index, size in enumerate(sizes):
                    held_out = export_plan.document_number(number, index) in plan.held_out
                    if ("validation" if held_out else "train") != split:
                        continue
                    shard = plan.shard_of(split, at)
                    assert 0 <= shard < plan.num_shards[split]
                    for finished in range(shard + 1):
                        assert plan.first_unit({**plan.num_shards, split: finished}) <= number
                    shards[split] += 1
                    at += size
            assert before[-1] == at
        assert shards.total() == sum(map(len, of_units))
        assert plan.first_unit(plan.num_shards) == 5


KILLED = """
import os, signal, sys
from pathlib import Path
from MaxText.configuration.data_sections import Preparation
from MaxText.input_pipeline.preparation import text_export
from MaxText.input_pipeline.preparation.corpus import Corpus, Document
from MaxText.input_pipeline.preparation.sources import units
from MaxText.input_pipeline.preparation.sources.opening import open_corpus
units._SMALLEST_UNIT_BYTES = 5000
left = int(sys.argv[4])
encode = text_export.tf_example.encode
def encode_then_die(features):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return encode(features)
text_export.tf_example.encode = encode_then_die
preparation = Preparation(prepare_source=sys.argv[1], prepare_output_format=sys.argv[3],
                          validation_fraction=0.1, prepare_num_shards=6)
text_export.export_text(open_corpus(sys.argv[1], "text"), preparation, Path(sys.argv[2]), print)
"""


@pytest.mark.parametrize("output_format", ["text_tfrecord", "text_array_record"])
def test_a_killed_export_goes_on_to_the_same_bytes(source, tmp_path, output_format):
    keys = {"prepare_output_format": output_format, "prepare_num_shards": 6}
    export(source, tmp_path / "whole", **keys)
    finished = []
    for moment in (60, 90):
        arguments = [str(source), str(tmp_path / "out"), output_format, str(moment)]
        result = subprocess.run([sys.executable, "-c", KILLED, *arguments], cwd=REPOSITORY)
        assert result.returncode == -signal.SIGKILL
        ledger = json.loads((tmp_path / "out" / "export.json").read_text())
        finished.append(len(ledger["files"]))
        assert list((tmp_path / "out").glob("*.writing"))
    assert 0 < finished[0] < finished[1] < 6
    kept = {
        path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("train*_data_00000.*")
    }
    export(source, tmp_path / "out", **keys)
    assert kept == {path: path.stat().st_mtime_ns for path in kept}
    whole, resumed = contents(tmp_path / "whole"), contents(tmp_path / "out")
    assert whole.keys() == resumed.keys()
    for name in whole.keys() - {"export.json"}:
        assert whole[name] == resumed[name], name


def test_a_full_disk_is_named(source, tmp_path, monkeypatch):
    def fail(*arguments):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(text_export, "publish", fail)
    with pytest.raises(UserError, match=r"out cannot be written \(No space left"):
        export(source, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["export.json"]
