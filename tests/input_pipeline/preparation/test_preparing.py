"""From text to a data set: contents, held-out documents, what is kept and what is refused."""

import gzip
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from MaxText.errors import UserError
from MaxText.input_pipeline.manifest import Manifest, read_manifest
from MaxText.input_pipeline.preparation import building, preparing
from MaxText.input_pipeline.preparation.preparing import prepare
from MaxText.input_pipeline.preparation.sources import finding
from MaxText.input_pipeline.streams.token_stream import TokenStream

from .small_corpus import (
    byte_options,
    contents,
    cut_small,
    documents,
    options,
    quiet,
    write_texts,
)

REPOSITORY = Path(__file__).resolve().parents[3]


def made(*arguments) -> Manifest:
    """The manifest of what `prepare` makes."""
    manifest = prepare(*arguments)
    assert manifest is not None
    return manifest


def decoded_documents(folder: Path, split: str) -> list[str]:
    """Texts of a split without their last token."""
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [
        tokenizer.decode(ids[:-1], skip_special_tokens=False) for ids in documents(folder, split)
    ]


@pytest.fixture
def corpus(tmp_path):
    texts = write_texts(tmp_path / "text")
    return tmp_path / "text", texts


def test_every_document_is_stored_whole_and_in_order(corpus, tmp_path, monkeypatch):
    cut_small(monkeypatch, 2000)
    folder, texts = corpus
    manifest = made(options(folder, validation_fraction=0.2), str(tmp_path / "d"), quiet)
    train = decoded_documents(tmp_path / "d", "train")
    held_out = decoded_documents(tmp_path / "d", "validation")
    assert sorted(train + held_out) == sorted(texts)
    assert train == [text for text in texts if text in set(train)]
    assert 1 <= len(held_out) <= 15
    sizes = [manifest.splits[split].num_text_bytes for split in ("train", "validation")]
    assert sum(sizes) == sum(len(text.encode()) for text in texts)
    rows = np.load(tmp_path / "d" / "train" / "document_rows.npy")
    assert rows.tolist() == [0] * len(train)
    names = json.loads((tmp_path / "d" / "train" / "source_files.json").read_text())
    assert [texts[int(name[:3])] for _, name in names] == train


def test_statistics_of_the_manifest(corpus, tmp_path):
    manifest = made(options(corpus[0]), str(tmp_path / "d"), quiet)
    assert manifest == read_manifest(str(tmp_path / "d"))
    assert manifest.schema_version == 2
    split = manifest.splits["train"]
    tokens = TokenStream(str(tmp_path / "d"), manifest, "train")[:]
    shares = np.unique(tokens, return_counts=True)[1] / tokens.size
    assert split.unigram_entropy == pytest.approx(-(shares * np.log(shares)).sum(), abs=1e-5)
    assert split.largest_id == tokens.max()
    assert (manifest.format, manifest.dtype, manifest.chunk_length) == (
        "array_record",
        "uint16",
        8192,
    )
    assert manifest.tokenizer.eos_id == 0
    assert (tokens == 0).sum() == split.num_documents
    assert tokens[-1] == 0
    assert "prepare_num_workers" not in manifest.options


def test_processes_do_not_show_in_the_data(corpus, tmp_path, monkeypatch):
    cut_small(monkeypatch, 1500)
    monkeypatch.setattr(building.Workers, "for_corpus", lambda self, *_: (self.num_processes, 1))
    for workers in (1, 2):
        keys = options(corpus[0], prepare_num_workers=workers)
        prepare(keys, str(tmp_path / str(workers)), quiet)
    assert contents(tmp_path / "1") == contents(tmp_path / "2")


def test_formats_hold_the_same(corpus, tmp_path):
    manifests = {
        name: made(options(corpus[0], prepare_output_format=name), str(tmp_path / name), quiet)
        for name in ("array_record", "bin")
    }
    assert manifests["bin"].splits["train"].files[0].name == "tokens-00000-of-00001.bin"
    assert manifests["bin"].fingerprint == manifests["array_record"].fingerprint
    for split in ("train", "validation"):
        assert documents(tmp_path / "bin", split) == documents(tmp_path / "array_record", split)


@settings(max_examples=25, deadline=None)
@given(
    texts=st.lists(
        st.lists(st.text(alphabet="aé漢\n ", max_size=40), max_size=6), min_size=1, max_size=4
    ),
    unit_bytes=st.integers(20, 300),
    fraction=st.sampled_from([0.0, 0.01, 0.5, 0.99]),
    keys=st.sampled_from(
        [
            {},
            {"add_bos": True},
            {"add_eos": False, "prepare_minimum_tokens": 5},
            {"prepare_separator_id": 7, "prepare_output_format": "bin"},
            {"prepare_minimum_tokens": 30},
        ]
    ),
)
def test_nothing_is_lost_and_nothing_repeated(tmp_path_factory, texts, unit_bytes, fraction, keys):
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "text").mkdir()
    for number, rows in enumerate(texts):
        lines = "".join(json.dumps({"text": row}) + "\n" for row in rows)
        (folder / "text" / f"{number}.jsonl").write_text(lines)
    everything = [row.encode() for rows in texts for row in rows]
    with_text = [row for row in everything if row.decode().strip()]
    kept = [list(row) for row in with_text if len(row) >= keys.get("prepare_minimum_tokens", 0)]
    before = [257] if keys.get("add_bos") else []
    after = [keys.get("prepare_separator_id", 256)] if keys.get("add_eos", True) else []
    expected = [before + ids + after for ids in kept]
    asked = byte_options(folder / "text", validation_fraction=fraction, **keys)
    with pytest.MonkeyPatch.context() as monkeypatch:
        cut_small(monkeypatch, unit_bytes)
        # What is asserted here does not depend on it, and it takes most of the time.
        monkeypatch.setattr(os, "fsync", lambda descriptor: None)
        if not expected:
            with pytest.raises(UserError, match="no document with text"):
                prepare(asked, str(folder / "d"), quiet)
            assert [path.name for path in folder.iterdir() if path.name != "text"] in (
                [],
                [".d.preparing"],
            )
            return
        manifest = made(asked, str(folder / "d"), quiet)
    parts = {split: documents(folder / "d", split, manifest) for split in ("train", "validation")}
    assert sorted(parts["train"] + parts["validation"]) == sorted(expected)
    stored = iter(expected)
    assert all(any(ids == other for other in stored) for ids in parts["train"])
    assert parts["train"]
    assert bool(parts["validation"]) == (fraction > 0 and len(expected) > 1)
    num_tokens = sum(split.num_tokens for split in manifest.splits.values())
    assert num_tokens == sum(len(ids) + len(before) + len(after) for ids in kept)
    skipped = manifest.source.skipped
    assert skipped.pop("empty", 0) == len(everything) - len(with_text)
    assert sum(skipped.values()) == len(with_text) - len(kept)


def test_special_tokens_in_text_stay_text(tmp_path):
    text = "before <|endoftext|> after" * 3
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}) + "\n")
    made(options(tmp_path / "a.jsonl"), str(tmp_path / "d"), quiet)
    (ids,) = documents(tmp_path / "d", "train")
    assert ids.count(0) == 1
    assert decoded_documents(tmp_path / "d", "train") == [text]


def test_separator_must_be_an_id_and_have_a_place(corpus, tmp_path):
    with pytest.raises(UserError, match="prepare_separator_id=259 is not below 259"):
        prepare(byte_options(corpus[0], prepare_separator_id=259), str(tmp_path / "d"), quiet)
    keys = byte_options(corpus[0], prepare_separator_id=7, add_eos=False)
    with pytest.raises(UserError, match="no effect with add_eos=false"):
        prepare(keys, str(tmp_path / "d"), quiet)
    manifest = made(byte_options(corpus[0], prepare_separator_id=7), str(tmp_path / "d"), quiet)
    assert manifest.tokenizer.eos_id == 7


def test_broken_text_is_repaired_on_request(tmp_path):
    pytest.importorskip("ftfy", reason="prepare_fix_text needs it")
    (tmp_path / "a.txt").write_text("schÃ¶n")
    for fix_text, expected in ((False, "schÃ¶n"), (True, "schön")):
        keys = byte_options(tmp_path / "a.txt", prepare_fix_text=fix_text)
        manifest = made(keys, str(tmp_path / str(fix_text)), quiet)
        (ids,) = documents(tmp_path / str(fix_text), "train")
        assert bytes(ids[:-1]).decode() == expected
        assert manifest.splits["train"].num_text_bytes == len(expected.encode())


def test_a_missing_package_is_named(corpus, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ftfy", None)
    keys = byte_options(corpus[0], prepare_fix_text=True)
    with pytest.raises(UserError, match=r"pip install 'MaxText\[data\]'"):
        prepare(keys, str(tmp_path / "d"), quiet)


def test_several_special_tokens(corpus, tmp_path):
    keys = options(corpus[0], tokenizer_special_tokens=("<end>", "[MASK]"))
    manifest = made(keys, str(tmp_path / "d"), quiet)
    assert manifest.tokenizer.eos_id == 0
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "d" / "tokenizer.json"))
    assert [tokenizer.id_to_token(number) for number in (0, 1)] == ["<end>", "[MASK]"]


@pytest.mark.parametrize("fraction", [1e-9, 0.3, 0.999999])
def test_neither_split_is_empty(tmp_path, monkeypatch, fraction):
    cut_small(monkeypatch, 1)
    write_texts(tmp_path / "text", count=2)
    keys = options(tmp_path / "text", validation_fraction=fraction)
    manifest = made(keys, str(tmp_path / "d"), quiet)
    assert [split.num_documents for split in manifest.splits.values()] == [1, 1]


def test_seed_chooses_the_held_out_documents(corpus, tmp_path):
    held_out = []
    for seed in range(3):
        keys = byte_options(corpus[0], validation_fraction=0.2, prepare_seed=seed)
        prepare(keys, str(tmp_path / str(seed)), quiet)
        held_out.append(str(documents(tmp_path / str(seed), "validation")))
    assert len(set(held_out)) == 3


@pytest.mark.parametrize("fraction", [0.01, 0.999999])
def test_one_document_cannot_be_held_out(tmp_path, fraction):
    write_texts(tmp_path / "text", count=1)
    lines = []
    keys = options(tmp_path / "text", validation_fraction=fraction)
    manifest = made(keys, str(tmp_path / "d"), lines.append)
    assert list(manifest.splits) == ["train"]
    assert any("none is held out" in line for line in lines)


def test_standard_library(tmp_path, monkeypatch):
    root = tmp_path / "lib"
    for name, content in {
        "b.py": b"import a\n",
        "a/__init__.py": b"",
        "a/c.py": "x = 'ä'\n".encode(),
        "latin.py": b"# -*- coding: latin-1 -*- \xe4\n",
        "site-packages/other.py": b"never\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    monkeypatch.setattr(finding, "stdlib_root", lambda: root)
    lines = []
    keys = options("python_stdlib", validation_fraction=0)
    manifest = made(keys, str(tmp_path / "d"), lines.append)
    assert decoded_documents(tmp_path / "d", "train") == ["x = 'ä'\n", "import a\n"]
    assert manifest.source.skipped == {"empty": 1, "not UTF-8": 1}
    assert str(tmp_path) not in manifest.to_json()
    assert any(line.endswith("; left out: 1 empty, 1 not UTF-8") for line in lines)


@pytest.mark.parametrize("tokenizer_path", ["", "bytes"])
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', r"a\.jsonl:2 is not JSON"),
        ("a.txt", b" \n ", "no document with text"),
        ("a.txt.gz", gzip.compress(b"x" * 1000, mtime=0)[:-9], "not a whole compressed file"),
    ],
)
def test_unreadable_sources_leave_nothing(tmp_path, name, content, message, tokenizer_path):
    (tmp_path / name).write_bytes(content)
    keys = options(tmp_path / name, tokenizer_path=tokenizer_path)
    with pytest.raises(UserError, match=message):
        prepare(keys, str(tmp_path / "d"), quiet)
    assert not (tmp_path / "d").exists()
    assert not (tmp_path / ".d.lock").exists()


def test_a_folder_must_be_named(corpus):
    with pytest.raises(UserError, match="dataset_path is not set"):
        prepare(options(corpus[0]), "", quiet)


def test_complete_data_set_is_kept_and_another_one_refused(corpus, tmp_path):
    folder, _ = corpus
    target = tmp_path / "d"
    prepare(options(folder), str(target), quiet)
    before = {path: path.stat().st_mtime_ns for path in target.rglob("*")}
    lines = []
    prepare(options(f"{folder}/*.txt", prepare_num_workers=1), str(target), lines.append)
    assert lines[-1].startswith("Kept")
    assert before == {path: path.stat().st_mtime_ns for path in target.rglob("*")}
    for keys, message in [
        ({"add_bos": True}, "add_bos was False and is True"),
        ({"tokenizer_vocab_size": 400}, "tokenizer_vocab_size was 300 and is 400"),
        ({"prepare_output_format": "bin"}, "prepare_output_format was 'array_record' and is 'bin'"),
        ({"prepare_minimum_tokens": 3}, "prepare_minimum_tokens was 0 and is 3"),
        ({"tokenizer_path": "bytes"}, "its tokenizer was other"),
    ]:
        with pytest.raises(UserError, match=message):
            prepare(options(folder, **keys), str(target), quiet)
    # The same tokenizer, now named instead of trained.
    same = options(folder, tokenizer_path=str(target / "tokenizer.json"), tokenizer_vocab_size=9999)
    prepare(same, str(target), lines.append)
    assert lines[-1].startswith("Kept")
    (folder / "new.txt").write_text("one more")
    with pytest.raises(UserError, match="its text was other"):
        prepare(options(folder), str(target), quiet)


def test_data_sets_of_schema_version_1_are_kept(corpus, tmp_path):
    target = tmp_path / "d"
    manifest = made(options(corpus[0]), str(target), quiet)
    entries = json.loads(manifest.to_json())
    del entries["format"]
    entries["schema_version"] = 1
    for split in entries["splits"].values():
        for file in split["files"]:
            del file["num_tokens"]
    for key in ("prepare_fix_text", "prepare_separator_id", "tokenizer_special_tokens"):
        del entries["options"][key]
    (target / "manifest.json").write_text(json.dumps(entries))
    old = made(options(corpus[0]), str(target), quiet)
    assert (old.schema_version, old.format) == (1, "array_record")
    assert old.splits["train"].files[0].num_tokens is None
    assert old.fingerprint == manifest.fingerprint
    with pytest.raises(UserError, match="prepare_fix_text was False and is True"):
        prepare(options(corpus[0], prepare_fix_text=True), str(target), quiet)


def test_folder_with_other_things_is_left_alone(corpus, tmp_path):
    (tmp_path / "d").mkdir()
    prepare(options(corpus[0]), str(tmp_path / "d"), quiet)
    (tmp_path / "e").mkdir()
    (tmp_path / "e" / "thesis.doc").write_text("precious")
    with pytest.raises(UserError, match="exists and is no data set"):
        prepare(options(corpus[0]), str(tmp_path / "e"), quiet)
    assert (tmp_path / "e" / "thesis.doc").read_text() == "precious"


def test_a_place_that_cannot_be_written_is_named(corpus, tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(UserError, match=r"below cannot be written \(Not a dir"):
        prepare(options(corpus[0]), str(tmp_path / "file" / "below" / "d"), quiet)


def test_sources_that_change_meanwhile_are_noticed(corpus, tmp_path, monkeypatch):
    folder, _ = corpus
    train = preparing.train_tokenizer

    def change_then_train(*arguments):
        path = folder / "003.txt"
        path.write_bytes(path.read_bytes().swapcase())
        return train(*arguments)

    monkeypatch.setattr(preparing, "train_tokenizer", change_then_train)
    with pytest.raises(UserError, match="changed while they were read"):
        prepare(options(folder), str(tmp_path / "d"), quiet)
    assert not (tmp_path / "d").exists()


def test_the_second_of_two_at_once_keeps_what_the_first_made(corpus, tmp_path, monkeypatch):
    keys, target = options(corpus[0]), tmp_path / "d"
    begun, lines, manifests = threading.Event(), [], []
    train = preparing.train_tokenizer

    def slow_train(*arguments):
        begun.set()
        while not any("Waiting for process" in line for line in lines):
            time.sleep(0.01)
        return train(*arguments)

    monkeypatch.setattr(preparing, "train_tokenizer", slow_train)
    first = threading.Thread(target=lambda: manifests.append(prepare(keys, str(target), quiet)))
    first.start()
    begun.wait()
    second = prepare(keys, str(target), lines.append)
    first.join()
    assert manifests == [second]
    assert lines[-1].startswith("Kept")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d", "text"]


def test_script_prepares_and_reports_mistakes(corpus, tmp_path):
    def run(*arguments):
        script = REPOSITORY / "MaxText" / "prepare_data.py"
        return subprocess.run(
            [sys.executable, str(script), *arguments], capture_output=True, text=True, cwd=tmp_path
        )

    mistake = run("prepare_source=absent.txt", "dataset_path=d")
    assert mistake.returncode == 2
    assert "no such file or folder" in mistake.stderr
    assert "Traceback" not in mistake.stderr
    done = run(f"prepare_source={corpus[0]}", "dataset_path=d", "tokenizer_vocab_size=300")
    assert done.returncode == 0, done.stderr
    assert "tokens per CPU second" in done.stdout
    assert read_manifest(str(tmp_path / "d")).splits["train"].num_tokens > 0


def test_preparation_imports_no_jax():
    check = (
        "import sys, MaxText.input_pipeline.preparation.preparing, "
        "MaxText.input_pipeline.preparation.text_cache; "
        "assert not {'jax', 'grain', 'flax', 'pyarrow', 'ftfy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", check], check=True, cwd=REPOSITORY)


def test_splits_of_the_source_are_kept(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for name in ("train-0", "validation-0", "train-1", "test-0"):
        rows = [{"text": f"{name} row {row}"} for row in range(3)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = []
    for target, keys in ((tmp_path / "bytes", byte_options), (tmp_path / "trained", options)):
        manifest = made(keys(folder), str(target), lines.append)
        assert list(manifest.splits) == ["test", "train", "validation"]
        for split, files in (("train", 2), ("validation", 1), ("test", 1)):
            assert manifest.splits[split].num_documents == 3 * files
    for split, names in (
        ("train", ["train-0", "train-1"]),
        ("validation", ["validation-0"]),
        ("test", ["test-0"]),
    ):
        texts = [bytes(ids[:-1]).decode() for ids in documents(tmp_path / "bytes", split)]
        assert texts == [f"{name} row {row}" for name in names for row in range(3)]
    assert any("splits of its own" in line for line in lines)


STOPPED = """
import os, runpy, signal, sys
from MaxText.input_pipeline.preparation import building
encode = building.encode_unit
def encode_then_stop(*arguments):
    encode(*arguments)
    os.kill(os.getpid(), signal.SIGINT)
building.encode_unit = encode_then_stop
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


def test_ctrl_c_stops_without_traceback_and_the_command_goes_on(corpus, tmp_path, ctrl_c_counts):
    script = str(REPOSITORY / "MaxText" / "prepare_data.py")
    keys = [f"prepare_source={corpus[0]}", "dataset_path=d", "tokenizer_path=bytes"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}

    def run(*program):
        return subprocess.run(
            [sys.executable, *program, *keys],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=environment,
        )

    stopped = run("-c", STOPPED, script)
    assert stopped.returncode == 130
    assert stopped.stderr == "stopped: the same command goes on where it stood\n"
    done = run(script)
    assert done.returncode == 0, done.stderr
    # Nothing was left to encode, so no speed is shown.
    manifest = read_manifest(str(tmp_path / "d"))
    num_tokens = sum(split.num_tokens for split in manifest.splits.values())
    assert f"Kept {num_tokens:,} tokens in 1 of 1 parts, encoded before" in done.stdout
    assert "Encoded" not in done.stdout


def test_only_what_this_process_encoded_is_counted(corpus, tmp_path, monkeypatch):
    cut_small(monkeypatch, 2000)
    left = [3]
    encode = building.encode_unit

    def fail_later(*arguments):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return encode(*arguments)

    keys = byte_options(corpus[0], prepare_num_workers=1)
    monkeypatch.setattr(building, "encode_unit", fail_later)
    with pytest.raises(KeyboardInterrupt):
        prepare(keys, str(tmp_path / "d"), quiet)
    monkeypatch.setattr(building, "encode_unit", encode)
    lines = []
    manifest = made(keys, str(tmp_path / "d"), lines.append)
    (kept,) = [line for line in lines if line.startswith("Kept")]
    (encoded,) = [line for line in lines if line.startswith("Encoded")]
    assert " tokens in 3 of " in kept
    counts = [int(line.split()[1].replace(",", "")) for line in (kept, encoded)]
    assert sum(counts) == sum(split.num_tokens for split in manifest.splits.values())
    assert min(counts) > 0
