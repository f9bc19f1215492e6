"""From text to a data set: contents, held-out documents, crash safety, and what is refused."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from MaxText.configuration.training_sections import Preparation
from MaxText.errors import UserError
from MaxText.input_pipeline.manifest import MANIFEST_NAME, read_manifest
from MaxText.input_pipeline.preparation import preparing as preparation_module
from MaxText.input_pipeline.preparation import text_sources
from MaxText.input_pipeline.preparation.preparing import prepare
from MaxText.input_pipeline.token_stream import TokenStream

REPOSITORY = Path(__file__).resolve().parents[3]


def write_texts(folder: Path, count: int = 30) -> list[str]:
    """Text files of random words; returns their texts in the order they are read."""
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abcdefgh"), rng.integers(2, 8))) for _ in range(100)]
    folder.mkdir(parents=True)
    texts = []
    for index in range(count):
        text = " ".join(rng.choice(words, 60)) + f"\nText {index}, äöü 漢字 🙂.\r\n"
        (folder / f"{index:03d}.txt").write_bytes(text.encode())
        texts.append(text)
    return texts


def options(source, **keys) -> Preparation:
    keys.setdefault("tokenizer_vocab_size", 300)
    return Preparation(prepare_source=str(source), **keys)


def quiet(line: str) -> None:
    del line


def decoded_documents(folder: Path, split: str) -> list[str]:
    """Texts of a split without their last token."""
    manifest = read_manifest(str(folder))
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    stream = TokenStream(str(folder), manifest, split)
    ends = stream.document_offsets
    return [
        tokenizer.decode(
            stream[int(ends[i]) : int(ends[i + 1]) - 1].tolist(), skip_special_tokens=False
        )
        for i in range(len(ends) - 1)
    ]


@pytest.fixture
def corpus(tmp_path):
    texts = write_texts(tmp_path / "text")
    return tmp_path / "text", texts


def test_every_document_is_stored_whole_and_in_order(corpus, tmp_path):
    folder, texts = corpus
    manifest = prepare(options(folder, validation_fraction=0.2), str(tmp_path / "d"), quiet)
    train = decoded_documents(tmp_path / "d", "train")
    held_out = decoded_documents(tmp_path / "d", "validation")
    assert sorted(train + held_out) == sorted(texts)
    assert train == [text for text in texts if text in set(train)]
    assert 1 <= len(held_out) <= 15
    sizes = [manifest.splits[split].num_text_bytes for split in ("train", "validation")]
    assert sum(sizes) == sum(len(text.encode()) for text in texts)


def test_statistics_of_the_manifest(corpus, tmp_path):
    manifest = prepare(options(corpus[0]), str(tmp_path / "d"), quiet)
    assert manifest == read_manifest(str(tmp_path / "d"))
    split = manifest.splits["train"]
    tokens = TokenStream(str(tmp_path / "d"), manifest, "train")[:]
    shares = np.unique(tokens, return_counts=True)[1] / tokens.size
    assert split.unigram_entropy == pytest.approx(-(shares * np.log(shares)).sum(), abs=1e-5)
    assert split.largest_id == tokens.max()
    assert manifest.dtype == "uint16"
    assert manifest.tokenizer.eos_id == 0
    assert (tokens == 0).sum() == split.num_documents
    assert tokens[-1] == 0


def test_two_preparations_give_the_same_data(corpus, tmp_path):
    for name in "ab":
        prepare(options(corpus[0]), str(tmp_path / name), quiet)
    first, second = (
        {p.relative_to(tmp_path / n): p.read_bytes() for p in (tmp_path / n).rglob("*.*")}
        for n in "ab"
    )
    assert first.keys() == second.keys()
    for name, content in first.items():
        if name.suffix != ".array_record":
            assert content == second[name], name


def test_special_tokens_in_text_stay_text(tmp_path):
    text = "before <|endoftext|> after" * 3
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}) + "\n")
    manifest = prepare(options(tmp_path / "a.jsonl"), str(tmp_path / "d"), quiet)
    tokens = TokenStream(str(tmp_path / "d"), manifest, "train")[:]
    assert (tokens == manifest.tokenizer.eos_id).sum() == 1
    assert decoded_documents(tmp_path / "d", "train") == [text]


def test_bos_and_eos_as_asked(corpus, tmp_path):
    both = options(corpus[0], add_bos=True, validation_fraction=0)
    manifest = prepare(both, str(tmp_path / "both"), quiet)
    assert list(manifest.splits) == ["train"]
    stream = TokenStream(str(tmp_path / "both"), manifest, "train")
    starts = stream.document_offsets[:-1]
    assert all(stream[int(start) : int(start) + 1][0] == 0 for start in starts)
    none = options(corpus[0], add_eos=False, validation_fraction=0)
    bare = prepare(none, str(tmp_path / "none"), quiet)
    assert bare.splits["train"].num_tokens == len(stream) - 2 * len(starts)


@pytest.mark.parametrize("fraction", [1e-9, 0.3, 0.999999])
def test_neither_split_is_empty(tmp_path, fraction):
    write_texts(tmp_path / "text", count=2)
    manifest = prepare(
        options(tmp_path / "text", validation_fraction=fraction), str(tmp_path / "d"), quiet
    )
    assert [split.num_documents for split in manifest.splits.values()] == [1, 1]


def test_seed_chooses_the_held_out_documents(corpus, tmp_path):
    held_out = []
    for seed in range(3):
        keys = options(corpus[0], validation_fraction=0.2, prepare_seed=seed)
        prepare(keys, str(tmp_path / str(seed)), quiet)
        held_out.append(tuple(decoded_documents(tmp_path / str(seed), "validation")))
    assert len(set(held_out)) == 3


def test_one_document_cannot_be_held_out(tmp_path):
    write_texts(tmp_path / "text", count=1)
    lines = []
    manifest = prepare(options(tmp_path / "text"), str(tmp_path / "d"), lines.append)
    assert list(manifest.splits) == ["train"]
    assert any("none is held out" in line for line in lines)


def test_sources_of_every_kind(tmp_path):
    folder = tmp_path / "mixed"
    (folder / "below").mkdir(parents=True)
    (folder / "a.txt").write_text("text a")
    (folder / "below" / "b.md").write_text("text b")
    (folder / ".hidden.txt").write_text("never")
    (folder / "c.py").write_text("not taken from a folder")
    rows = '{"body": "row 1"}\n\n{"body": "row 2", "text": 3}\n{"body": "  "}\n'
    (folder / "d.jsonl").write_text(rows)
    with gzip.open(folder / "e.jsonl.gz", "wt") as file:
        file.write('{"body": "row \\ud83d 3"}\n')
    with gzip.open(folder / "f.txt.gz", "wt", encoding="utf-8-sig") as file:
        file.write("text f")
    source = text_sources.open_source(
        f"{folder}, {folder}/*.py, {folder}/a.txt, {folder}/**/*.md", "body"
    )
    expected = ["text a", "text b", "row 1", "row 2", "row \ufffd 3", "text f"]
    assert list(source.documents()) == [*expected, "not taken from a folder"]


def test_long_files_are_cut_at_line_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(text_sources, "LONGEST_TEXT", 100)
    text = "".join(f"line {i}\n" for i in range(100))
    (tmp_path / "long.txt").write_text(text)
    pieces = list(text_sources.open_source(str(tmp_path / "long.txt"), "text").documents())
    assert "".join(pieces) == text
    assert len(pieces) > 5
    assert all(piece.endswith("\n") and len(piece) < 120 for piece in pieces)


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
    monkeypatch.setattr(text_sources, "stdlib_root", lambda: root)
    keys = options("python_stdlib", validation_fraction=0)
    manifest = prepare(keys, str(tmp_path / "d"), quiet)
    assert decoded_documents(tmp_path / "d", "train") == ["x = 'ä'\n", "import a\n"]
    assert manifest.source.skipped == {"empty": 1, "not UTF-8": 1}
    assert str(tmp_path) not in manifest.to_json()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', r"a\.jsonl:2 is not JSON"),
        ("a.jsonl", b'{"content": "x", "id": 3}\n', r"a\.jsonl:1 has no text.*content"),
        ("a.json", b'["x"]\n', r"a\.json:1 is a JSON list"),
        ("a.jsonl", b'{"text": "\xff"}\n', r"a\.jsonl:1 is not UTF-8"),
        ("a.txt", b"abc \xff def", r"a\.txt is not UTF-8 text \(byte 0xff"),
        ("a.txt.gz", b"not packed", r"a\.txt\.gz is not a whole gzip file"),
        ("a.txt", b" \n ", "no document with text"),
        ("a.parquet", b"PAR1", "parquet files are not read"),
    ],
)
def test_unreadable_sources_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        prepare(options(tmp_path / name), str(tmp_path / "d"), quiet)
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", "prepare_source is not set"),
        ("absent.txt", "no such file or folder"),
        ("absent/*.txt", "matches no file"),
        ("gs://bucket/text", "only local files"),
        (".", "holds no file that ends in"),
    ],
)
def test_missing_sources_are_named(tmp_path, monkeypatch, source, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        prepare(options(source), "d", quiet)


def test_only_local_folders_are_written(corpus):
    with pytest.raises(UserError, match="Prepare into a local folder"):
        prepare(options(corpus[0]), "gs://bucket/data", quiet)
    with pytest.raises(UserError, match="dataset_path is not set"):
        prepare(options(corpus[0]), "", quiet)


def test_complete_data_set_is_kept_and_another_one_refused(corpus, tmp_path):
    folder, _ = corpus
    target = tmp_path / "d"
    prepare(options(folder), str(target), quiet)
    before = {path: path.stat().st_mtime_ns for path in target.rglob("*")}
    lines = []
    prepare(options(f"{folder}/*.txt"), str(target), lines.append)
    assert lines[-1].startswith("Kept")
    assert before == {path: path.stat().st_mtime_ns for path in target.rglob("*")}
    with pytest.raises(UserError, match="add_bos was False and is True"):
        prepare(options(folder, add_bos=True), str(target), quiet)
    with pytest.raises(UserError, match="tokenizer_vocab_size was 300 and is 400"):
        prepare(options(folder, tokenizer_vocab_size=400), str(target), quiet)
    (folder / "new.txt").write_text("one more")
    with pytest.raises(UserError, match="its text was other"):
        prepare(options(folder), str(target), quiet)


def test_folder_with_other_things_is_left_alone(corpus, tmp_path):
    (tmp_path / "d").mkdir()
    prepare(options(corpus[0]), str(tmp_path / "d"), quiet)
    (tmp_path / "e").mkdir()
    (tmp_path / "e" / "thesis.doc").write_text("precious")
    with pytest.raises(UserError, match="exists and is no data set"):
        prepare(options(corpus[0]), str(tmp_path / "e"), quiet)
    assert (tmp_path / "e" / "thesis.doc").read_text() == "precious"


def test_failed_preparation_leaves_nothing(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(
        preparation_module, "describe", lambda manifest: pytest.fail("must not get here")
    )

    def fail(path):
        raise OSError("disk full")

    monkeypatch.setattr(preparation_module, "sync_file", fail)
    with pytest.raises(OSError, match="disk full"):
        prepare(options(corpus[0]), str(tmp_path / "d"), quiet)
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


def test_sources_that_change_meanwhile_are_noticed(corpus, tmp_path, monkeypatch):
    folder, _ = corpus
    train = preparation_module.train_tokenizer

    def change_then_train(*arguments):
        (folder / "003.txt").write_text("changed")
        return train(*arguments)

    monkeypatch.setattr(preparation_module, "train_tokenizer", change_then_train)
    with pytest.raises(UserError, match="changed while they were read"):
        prepare(options(folder), str(tmp_path / "d"), quiet)
    assert not (tmp_path / "d").exists()


def test_the_second_of_two_at_once_keeps_what_the_first_made(corpus, tmp_path, monkeypatch):
    keys, target = options(corpus[0]), tmp_path / "d"
    train = preparation_module.train_tokenizer

    def let_another_finish(*arguments):
        monkeypatch.setattr(preparation_module, "train_tokenizer", train)
        prepare(keys, str(target), quiet)
        return train(*arguments)

    monkeypatch.setattr(preparation_module, "train_tokenizer", let_another_finish)
    lines = []
    assert prepare(keys, str(target), lines.append) == read_manifest(str(target))
    assert lines[-1].startswith("Kept")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d", "text"]


KILLED = """
import os, sys, time
from MaxText.configuration.training_sections import Preparation
from MaxText.input_pipeline.preparation import preparing
def stop(*arguments, **keywords):
    print("writing", flush=True)
    time.sleep(60)
preparing.describe = stop if sys.argv[3] == "after" else preparing.describe
if sys.argv[3] == "before":
    preparing.Manifest = stop
preparing.prepare(Preparation(prepare_source=sys.argv[1], tokenizer_vocab_size=300), sys.argv[2])
"""


@pytest.mark.parametrize("moment", ["before", "after"])
def test_killed_preparation_is_complete_or_absent(corpus, tmp_path, moment):
    folder, _ = corpus
    target = tmp_path / "d"
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(folder), str(target), moment],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert any(line == "writing\n" for line in process.stdout)
        os.kill(process.pid, signal.SIGKILL)
    leftovers = [path for path in tmp_path.iterdir() if ".preparing-" in path.name]
    if moment == "after":
        assert not leftovers
        assert (target / MANIFEST_NAME).exists()
    else:
        assert len(leftovers) == 1
        assert not target.exists()
        assert not list(leftovers[0].glob(MANIFEST_NAME))
    prepare(options(folder), str(target), quiet)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d", "text"]


def test_script_prepares_and_reports_mistakes(corpus, tmp_path):
    def run(*arguments):
        script = REPOSITORY / "MaxText" / "prepare_data.py"
        return subprocess.run(
            [sys.executable, str(script), *arguments], capture_output=True, text=True, cwd=tmp_path
        )

    started = time.monotonic()
    mistake = run("prepare_source=absent.txt", "dataset_path=d")
    assert time.monotonic() - started < 10
    assert mistake.returncode == 2
    assert "no such file or folder" in mistake.stderr
    assert "Traceback" not in mistake.stderr
    done = run(f"prepare_source={corpus[0]}", "dataset_path=d", "tokenizer_vocab_size=300")
    assert done.returncode == 0, done.stderr
    assert "nats per token" in done.stdout
    assert read_manifest(str(tmp_path / "d")).splits["train"].num_tokens > 0


def test_preparation_imports_no_jax():
    check = (
        "import sys, MaxText.input_pipeline.preparation; "
        "assert not {'jax', 'grain', 'flax'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", check], check=True, cwd=REPOSITORY)
