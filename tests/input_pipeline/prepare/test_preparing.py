"""From text to a dataset: contents, held-out documents, bad records, and what is refused."""

import errno
import gzip
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from MaxText.errors import UserError
from MaxText.input_pipeline.prepare import prepare as prepare_module
from MaxText.input_pipeline.prepare import process_pool
from MaxText.input_pipeline.prepare.prepare import prepare, write_error
from MaxText.input_pipeline.token_store.manifest import read_manifest
from tests.input_pipeline.small_data import contents
from tests.input_pipeline.token_store.token_files import open_data, tokens_of
from tests.refusals import refused

from .small_corpus import (
    byte_options,
    documents,
    made,
    options,
    split_small,
    swap_case,
    write_texts,
)


def decoded_documents(folder: Path, split: str) -> list[str]:
    """Texts of a split without their last token."""
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [
        tokenizer.decode(ids[:-1], skip_special_tokens=False) for ids in documents(folder, split)
    ]


def write_rows(path: Path, texts: list[str]) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture
def corpus(tmp_path):
    write_texts(tmp_path / "text", count=12)
    return tmp_path / "text"


def test_documents_and_manifest(tmp_path, monkeypatch):
    split_small(monkeypatch, 2000)
    folder = tmp_path / "d"
    texts = [*write_texts(tmp_path / "text"), "before <|endoftext|> after" * 3]
    (tmp_path / "text" / "999.txt").write_text(texts[-1])
    manifest = made(options(tmp_path / "text", validation_fraction=0.2), folder)
    train, held_out = (decoded_documents(folder, split) for split in ("train", "validation"))
    assert sorted(train + held_out) == sorted(texts)
    assert train == [text for text in texts if text in set(train)]
    assert 1 <= len(held_out) <= 15
    assert np.load(folder / "train" / "document_rows.npy").tolist() == [0] * len(train)
    names = json.loads((folder / "train" / "source_files.json").read_text())
    assert [texts[min(int(name[:3]), 30)] for _, name in names] == train

    assert manifest == read_manifest(str(folder))
    assert (manifest.schema_version, manifest.format) == (2, "bin")
    assert (manifest.dtype, manifest.chunk_length) == ("uint16", 1)
    assert "prepare_num_workers" not in manifest.options
    split = manifest.splits["train"]
    tokens = np.array(tokens_of(open_data(folder, tmp_path)))
    shares = np.unique(tokens, return_counts=True)[1] / tokens.size
    assert split.unigram_entropy_nats == pytest.approx(-(shares * np.log(shares)).sum(), abs=1e-5)
    assert split.max_token_id == tokens.max()
    assert split.tokens_sha256 == hashlib.sha256(tokens.astype("<u2")).hexdigest()
    offsets = np.load(folder / "train" / "document_offsets.npy")
    assert split.offsets_sha256 == hashlib.sha256(offsets.astype("<i8")).hexdigest()
    assert split.num_text_bytes == len("".join(train).encode())
    assert manifest.tokenizer.eos_id == 0
    assert (tokens == 0).sum() == split.num_documents
    assert tokens[-1] == 0


@settings(max_examples=20, deadline=None)
@given(
    texts=st.lists(
        st.lists(st.text(alphabet="aé漢\n ", max_size=40), max_size=6), min_size=1, max_size=4
    ),
    shard_bytes=st.integers(20, 300),
    fraction=st.sampled_from([0.0, 1e-9, 0.3]),
    keys=st.sampled_from(
        [
            {},
            {"add_bos": True},
            {"add_eos": False, "prepare_minimum_tokens": 5},
            {"prepare_separator_id": 7},
            {"prepare_minimum_tokens": 30},
        ]
    ),
)
def test_nothing_is_lost_or_repeated(tmp_path_factory, texts, shard_bytes, fraction, keys):
    folder = tmp_path_factory.mktemp("corpus")
    for number, rows in enumerate(texts):
        write_rows(folder / "text" / f"{number}.jsonl", rows)
    everything = [row.encode() for rows in texts for row in rows]
    with_text = [row for row in everything if row.decode().strip()]
    read_texts = [
        list(row) for row in with_text if len(row) >= keys.get("prepare_minimum_tokens", 0)
    ]
    ids_before = [257] if keys.get("add_bos") else []
    ids_after = [keys.get("prepare_separator_id", 256)] if keys.get("add_eos", True) else []
    expected = [ids_before + ids + ids_after for ids in read_texts]
    preparation = byte_options(folder / "text", validation_fraction=fraction, **keys)
    with pytest.MonkeyPatch.context() as monkeypatch:
        split_small(monkeypatch, shard_bytes)
        # What is asserted here does not depend on it, and it takes most of the time.
        monkeypatch.setattr(os, "fsync", lambda descriptor: None)
        if not expected:
            refused("no document with text", made, preparation, folder / "d")
            assert not (folder / "d").exists()
            return
        manifest = made(preparation, folder / "d")
    train, validation = (documents(folder / "d", split) for split in ("train", "validation"))
    assert sorted(train + validation) == sorted(expected)
    stored = iter(expected)
    assert all(any(ids == other for other in stored) for ids in train)
    assert fraction or not validation
    assert validation or not fraction or len(expected) == 1
    assert sum(split.num_tokens for split in manifest.splits.values()) == sum(map(len, expected))
    skipped = manifest.source.skipped
    assert skipped.pop("empty", 0) == len(everything) - len(with_text)
    assert sum(skipped.values()) == len(with_text) - len(read_texts)


@pytest.mark.parametrize(
    "keys",
    [
        {"tokenizer_path": "bytes", "prepare_output_format": "tfrecord"},
        pytest.param({"prepare_output_format": "text_array_record"}, marks=pytest.mark.slow),
    ],
)
def test_same_bytes_with_two_processes(corpus, tmp_path, monkeypatch, keys):
    split_small(monkeypatch, 1500)
    monkeypatch.setattr(process_pool, "_BYTES_PER_PROCESS", 1)
    for workers in (1, 2):
        preparation = options(
            corpus, prepare_num_workers=workers, **{"records.num_shards": 3}, **keys
        )
        prepare(preparation, str(tmp_path / str(workers)), lambda line: None)
    assert len(contents(tmp_path / "1")) >= 4
    assert contents(tmp_path / "1") == contents(tmp_path / "2")


def test_separator_and_special_tokens(corpus, tmp_path):
    preparation = byte_options(corpus, prepare_separator_id=259)
    refused("prepare_separator_id=259", made, preparation, tmp_path / "d")
    assert made(byte_options(corpus, prepare_separator_id=7), tmp_path / "d").tokenizer.eos_id == 7
    made(options(corpus, tokenizer_special_tokens=("<end>", "[MASK]")), tmp_path / "e")
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "e" / "tokenizer.json"))
    assert [tokenizer.id_to_token(number) for number in (0, 1)] == ["<end>", "[MASK]"]
    assert {ids[-1] for ids in documents(tmp_path / "e", "train")} == {0}


def test_text_is_fixed_on_request(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("schÃ¶n")
    keys = byte_options(tmp_path / "a.txt", prepare_fix_text=True)
    with monkeypatch.context() as context:
        context.setitem(sys.modules, "ftfy", None)
        refused(r"jaxpretrain\[data\]", made, keys, tmp_path / "d")
    manifest = made(keys, tmp_path / "fixed")
    made(byte_options(tmp_path / "a.txt"), tmp_path / "as it is")
    for name, expected in (("fixed", "schön"), ("as it is", "schÃ¶n")):
        (ids,) = documents(tmp_path / name, "train")
        assert bytes(ids[:-1]).decode() == expected
    assert manifest.splits["train"].num_text_bytes == len("schön".encode())


def splitmix(seed: int, number: int) -> int:
    """The published generator, in plain integers; held-out documents must stay the same."""
    bits = 2**64 - 1
    value = (seed * 0x9E3779B97F4A7C15 + number) & bits
    for _ in range(2):
        value = (value + 0x9E3779B97F4A7C15) & bits
        value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & bits
        value = ((value ^ value >> 27) * 0x94D049BB133111EB) & bits
        value ^= value >> 31
    return value


@pytest.mark.parametrize("seed", [0, 1, 2**40])
def test_held_out_documents_follow_the_seed(tmp_path, seed, monkeypatch):
    split_small(monkeypatch, 1)
    for unit in range(2):
        rows = [f"{unit} {row}" for row in range(100)]
        path = write_rows(tmp_path / "text" / f"{unit}.jsonl.gz", rows)
        path.write_bytes(gzip.compress(path.read_bytes()))
    spy = mock.Mock(side_effect=prepare_module.train_tokenizer)
    monkeypatch.setattr(prepare_module, "train_tokenizer", spy)
    made(options(tmp_path / "text", validation_fraction=0.2, prepare_seed=seed), tmp_path / "d")
    ranks = {f"{i} {row}": splitmix(seed, (i << 40) + row) for i in range(2) for row in range(100)}
    expected = [text for text, rank in ranks.items() if rank < 0.2 * 2**64]
    assert 20 < len(expected) < 60
    assert decoded_documents(tmp_path / "d", "validation") == expected
    # The tokenizer has seen none of them.
    assert sorted(spy.call_args.args[0]) == sorted(ranks.keys() - set(expected))


def test_splits_of_the_source_are_kept(tmp_path):
    texts = {"train-0": "ab", "validation-0": "cd", "train-1": "ef", "test-0": "gh"}
    for name, rows in texts.items():
        write_rows(tmp_path / "text" / f"{name}.jsonl", [*rows])
    lines = []
    manifest = made(byte_options(tmp_path / "text"), tmp_path / "d", lines.append)
    assert list(manifest.splits) == ["test", "train", "validation"]
    for split, rows in (("test", "gh"), ("train", "abef"), ("validation", "cd")):
        assert [chr(ids[0]) for ids in documents(tmp_path / "d", split)] == [*rows]
    assert any("validation_fraction" in line for line in lines)
    assert list(made(options(tmp_path / "text"), tmp_path / "e").splits) == [*manifest.splits]


@pytest.fixture
def bad_text(tmp_path):
    """Seven files, of which two and two rows cannot be read."""
    folder = tmp_path / "source"
    folder.mkdir()
    for number in range(4):
        (folder / f"{number}.txt").write_text(f"some text of file {number} " * 30)
    (folder / "latin.txt").write_bytes("caf\xe9 ".encode("latin-1") * 30)
    rows = ['{"text": "a sound row"}', '{"txt": "no"}', "{bad", '{"text": "another sound row"}']
    (folder / "rows.jsonl").write_text("\n".join(rows))
    (folder / "z.txt.gz").write_bytes(b"no gzip")
    return folder


@pytest.mark.parametrize("make_options", [byte_options, options])
def test_bad_records_are_counted(bad_text, tmp_path, make_options):
    keys = make_options(bad_text)
    for limit in (3, 0):
        caught = refused(r"latin\.txt", made, keys, tmp_path / "d", max_bad_records=limit)
        assert ("bad_records.maximum=3" in str(caught)) == (limit == 3)
    lines = []
    manifest = made(keys, tmp_path / "d", lines.append, max_bad_records=4)
    assert manifest.source.skipped == {"malformed": 2, "unreadable": 2}
    assert sum(split.num_documents for split in manifest.splits.values()) == 6
    named = "\n".join(line for line in lines if line.startswith("warning: "))
    for name in ("latin.txt", "rows.jsonl:2", "rows.jsonl:3", "z.txt.gz"):
        assert name in named
    assert any("2 malformed, 2 unreadable" in line for line in lines)


CUT = gzip.compress(b'{"text": "row"}\n' * 9000, mtime=0)[:-9]


@pytest.mark.parametrize("make_options", [byte_options, options])
@pytest.mark.parametrize(
    ("name", "content", "limit", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', 0, r"a\.jsonl:2"),
        ("a.txt", b" \n ", 0, "no document with text"),
        ("a.jsonl", b'{"content": "words"}\n' * 3, 100, r": content\..* text_field"),
        ("a.txt", "caf\xe9 ".encode("latin-1"), 100, "1 unreadable.*UTF-8"),
        # How much is lost of a file that has begun is not known.
        ("a.jsonl.gz", CUT, 100, r"a\.jsonl\.gz"),
    ],
)
def test_failures_leave_nothing(tmp_path, make_options, name, content, limit, message):
    (tmp_path / name).write_bytes(content)
    refused(message, made, make_options(tmp_path / name), tmp_path / "d", max_bad_records=limit)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_complete_datasets_are_kept_and_others_refused(corpus, tmp_path):
    target, lines = tmp_path / "d", []
    made(options(corpus), target)
    times_before = {path: path.stat().st_mtime_ns for path in target.rglob("*")}
    made(options(f"{corpus}/*.txt", prepare_num_workers=1), target, lines.append)
    # The same tokenizer, now named instead of trained.
    same = {"tokenizer_path": str(target / "tokenizer.json"), "tokenizer_vocab_size": 9999}
    made(options(corpus, **same), target, lines.append)
    assert [line.startswith("Kept") for line in lines] == [True, True]
    for keys, message in [
        ({"add_bos": True}, "add_bos was False and is True"),
        ({"tokenizer_vocab_size": 400}, "tokenizer_vocab_size was 300 and is 400"),
        ({"prepare_minimum_tokens": 3}, "prepare_minimum_tokens was 0 and is 3"),
        ({"tokenizer_path": "bytes"}, "tokenizer"),
        ({"prepare_output_format": "tfrecord"}, "exists"),
    ]:
        refused(message, made, options(corpus, **keys), target)
    (corpus / "new.txt").write_text("one more")
    refused("different source text", made, options(corpus), target)
    assert times_before == {path: path.stat().st_mtime_ns for path in target.rglob("*")}
    # One that was made with fewer keys.
    (corpus / "new.txt").unlink()
    entries = json.loads((target / "manifest.json").read_text())
    for key in ("prepare_fix_text", "prepare_separator_id", "tokenizer_special_tokens"):
        del entries["options"][key]
    (target / "manifest.json").write_text(json.dumps(entries))
    assert made(options(corpus), target).options == entries["options"]


def test_unusable_targets(corpus, tmp_path, told):
    (tmp_path / "e").mkdir()
    made(byte_options(corpus), tmp_path / "e")  # an empty folder does not matter
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "thesis.doc").write_text("precious")
    messages = []
    for target in ("", str(tmp_path / "f"), str(tmp_path / "f" / "thesis.doc" / "below" / "d")):
        with pytest.raises(UserError) as caught:
            prepare(byte_options(corpus), target, lambda line: None)
        messages.append(str(caught.value))
    assert (tmp_path / "f" / "thesis.doc").read_text() == "precious"
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/proc/.x.lock")
    messages.append(str(write_error("out", error)))
    # A library gives words only.
    messages.append(str(write_error("out", OSError(f"RESOURCE: {os.strerror(errno.ENOSPC)}"))))
    told("\n".join(messages))


def test_text_is_read_again_only_where_a_file_changed(corpus, tmp_path, monkeypatch):
    read = mock.Mock(side_effect=prepare_module.sampling.read_shard)
    monkeypatch.setattr(prepare_module.sampling, "read_shard", read)
    preparation, out, cache = byte_options(corpus), tmp_path / "out", tmp_path / "cache"
    for _ in range(2):
        made(preparation, out, cache_dir=cache)
    assert not read.called
    made(preparation, out, cache_dir=tmp_path / "other")
    assert read.called
    swap_case(corpus / "003.txt")
    refused("different source text", made, preparation, out, cache_dir=cache)


@pytest.mark.parametrize("protocol", ["https", "http", "HTTPS", "github", "nonsense"])
def test_targets_that_cannot_be_written_are_refused_before_work(corpus, tmp_path, protocol):
    lines = []
    target = f"{protocol}://host.invalid/x"
    keys = byte_options(corpus)
    refused(f"{protocol}://", prepare, keys, target, lines.append, cache_dir=tmp_path / "cache")
    assert not lines
    assert not (tmp_path / "cache").exists()


def test_a_target_that_is_a_link(corpus, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "empty").mkdir()
    for name, target in (("new", "disk/data"), ("old", "empty")):
        (tmp_path / name).symlink_to(target)
        manifest = made(byte_options(corpus), tmp_path / name)
        assert (tmp_path / name).is_symlink()
        assert (tmp_path / target / "manifest.json").is_file()
        assert made(byte_options(corpus), tmp_path / name) == manifest


def test_two_processes_prepare_one_folder(corpus, tmp_path):
    """One of them prepares it, the other waits and finds it; both have the same result."""
    program = Path(prepare_module.__file__).parents[2] / "prepare_data.py"
    command = [
        sys.executable,
        str(program),
        f"prepare_source={corpus}",
        f"dataset_path={tmp_path / 'd'}",
        "tokenizer_path=bytes",
    ]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert sum("Wrote" in output for output in outputs) == 1
    assert sum("Kept" in output for output in outputs) == 1
    assert not list(tmp_path.glob(".d*"))
