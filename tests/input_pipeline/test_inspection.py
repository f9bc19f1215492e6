"""inspect_data.py: every number it shows, against plain NumPy."""

import functools
import re
from pathlib import Path

import numpy as np
import pytest

from MaxText.config.loading import load_config
from MaxText.input_pipeline import inspect_dataset
from MaxText.input_pipeline.inspect_dataset import (
    Inspection,
    batch_lines,
    measure_tokens,
    show_sequence,
)
from MaxText.input_pipeline.tokenization.load_tokenizer import load_tokenizer
from MaxText.layers.batch import Batch
from tests.input_pipeline.small_data import quiet, random_documents, write_data_set
from tests.input_pipeline.token_store.token_files import open_data, write, write_tfrecord
from tests.programs import run
from tests.refusals import refused

ALL = 10**9


@pytest.fixture(scope="module")
def documents() -> list[np.ndarray]:
    """Random documents, and one id that is larger than all others."""
    documents = random_documents(0, 120, 60, vocab_size=1000)
    documents[70] = np.append(np.arange(5, 25), 40_000)
    return documents


@pytest.mark.parametrize("kind", ["prepared_array_record", "tfrecord"])
@pytest.mark.parametrize("block", [7, 1000, 10**6])
def test_tokens_are_those_of_numpy(tmp_path, documents, monkeypatch, kind, block):
    write(kind, tmp_path / "set", [documents[:50], documents[50:]])
    monkeypatch.setattr(inspect_dataset, "BLOCK_TOKENS", block)
    seen: list[int] = []
    store = open_data(tmp_path / "set", tmp_path / "cache").store
    found = measure_tokens(store, ALL, seen.append)
    stream = np.concatenate(documents)
    assert found.num_read == sum(seen) == stream.size
    assert (found.min_token_id, found.max_token_id) == (stream.min(), stream.max())
    assert found.max_id_offset == stream.argmax()


def test_a_sample_is_spread_evenly(tmp_path, monkeypatch):
    stream = np.arange(1, 1001)
    write_data_set(tmp_path / "set", {"train": np.split(stream, 20)})
    monkeypatch.setattr(inspect_dataset, "BLOCK_TOKENS", 100)
    store = open_data(tmp_path / "set", tmp_path).store
    found = measure_tokens(store, 350, quiet)
    # Blocks 0, 3, and 6 of ten.
    assert (found.num_read, found.min_token_id, found.max_token_id) == (300, 1, 700)
    assert measure_tokens(store, 1, quiet).num_read == 100
    monkeypatch.setattr(inspect_dataset, "BLOCK_TOKENS", 400)
    assert measure_tokens(store, 1000, quiet).num_read == 1000  # 2.5 blocks


def test_rows_are_shown_from_both_ends_and_visibly():
    tokenizer = load_tokenizer("bytes")
    (shown,) = show_sequence(np.frombuffer("ünï\t日本\n\0".encode(), np.uint8), tokenizer)
    assert shown == "ünï\\t日本\\n\\x00"
    text = "".join(chr(65 + i % 26) for i in range(1203))
    ids = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    assert show_sequence(ids[:1000], tokenizer) == [text[:1000]]
    assert show_sequence(ids, tokenizer)[::2] == [text[:500], text[-500:]]
    assert "203" in show_sequence(ids, tokenizer)[1]
    assert show_sequence(np.arange(120), None) == [" ".join(map(str, range(120)))]
    assert "1 more" in show_sequence(np.arange(121), None)[1]


def test_rows_of_a_batch_cut_in_two(told):
    ids, mask = [[5, 6], [7, 0], [0, 0], [8, 0]], [[1, 1], [1, 0], [0, 0], [0, 0]]
    batch = Batch(np.array(ids), np.array(ids), np.array(mask, np.float32))
    origins = [[("a", 0, 4)], [("b", 10, 1), ("c", 0, 1)]]
    lines = batch_lines(3, batch, origins, None, pad_id=0)
    told("\n".join(lines))


def text_set(folder: Path) -> list[np.ndarray]:
    tokenizer = load_tokenizer("bytes")
    texts = ["first document\n", "second\tone", "ß" * 30]
    encoded, end = tokenizer.encode(texts), tokenizer.entry.eos_id
    documents = [np.append(ids, end).astype(np.int64) for ids in encoded]
    write_data_set(folder, {"train": documents}, vocab_size=tokenizer.entry.vocab_size)
    tokenizer.save(folder)
    return documents


def inspection(log, has_model=False, num_devices=1, **keys) -> Inspection:
    keys = {"max_target_length": 8, "per_device_batch_size": 2} | keys
    return Inspection(load_config(**keys), num_devices, has_model, log)


def shown_batch(step=0, **keys) -> str:
    lines: list[str] = []
    inspection(lines.append, enable_data_shuffling=False, **keys).show_batch(step)
    return "\n".join(lines)


def test_the_batch_is_that_of_training(tmp_path):
    keys = {"dataset_path": str(tmp_path / "set")}
    stream = np.concatenate(text_set(tmp_path / "set"))
    shown = shown_batch(gradient_accumulation_steps=2, num_devices=2, **keys)
    assert "Step 0: 8 sequences of 8 tokens" in shown
    assert "\n  | first do\n" in shown
    assert "\n  | cument\\n" in shown
    # 88 tokens make 11 windows: step 3 begins with window 6, and step 5 holds the last.
    shown = shown_batch(3, **keys)
    assert f"ids {stream[48:64].min()} to {stream[48:64].max()}" in shown
    text = bytes(stream[48:56].astype(np.uint8)).decode(errors="replace")
    assert f"\n  | {text}\n" in shown
    assert "  numbers.txt, row 2: tokens 21 to 29\n" in shown


def test_tokens_are_shown_as_text_or_ids(tmp_path):
    text_set(tmp_path / "set")
    masks = {"mlm.mask_prob": 1.0, "mlm.same_token_prob": 0.0, "mlm.random_token_prob": 0.0}
    keys = {"dataset_path": str(tmp_path / "set"), "vocab_size": 300, "mlm.mask_id": 258, **masks}
    first = f"8 targets of 8\n  numbers.txt, row 0: tokens 0 to 8\n  | {'<pad>' * 8}\n"
    assert f"Sequence 0: {first}" in shown_batch(mlm_training=True, **keys)
    # Records are shown as text by the tokenizer next to them, without one as ids.
    tokenizer = load_tokenizer("bytes")
    (ids,) = tokenizer.encode(["some text"])
    path = tmp_path / "validation.tfrecord"  # named for evaluation, but the only one
    write_tfrecord(path, [np.asarray(ids)] * 2)
    keys = {"dataset_path": str(path), "max_target_length": 16}
    assert "  | 115 111" in shown_batch(**keys)
    tokenizer.save(tmp_path)
    assert "  | some tex" in shown_batch(**keys)


def test_checksums_are_compared(tmp_path):
    text_set(tmp_path / "set")
    lines: list[str] = []
    opened = functools.partial(inspection, lines.append, dataset_path=str(tmp_path / "set"))
    opened().show_statistics(ALL)
    (tmp_path / "set/train/tokens_running_crc32c.npy").unlink()  # as where it was not copied
    opened().show_statistics(ALL)
    shown = re.findall("Checksums: (.*), ", "\n".join(lines))
    assert shown == ["CRC-32C of every 4 KiB", "SHA-256 of the manifest"]
    path = tmp_path / "set/train/tokens-00000.bin"
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    refused("set is damaged: .*tokens_sha256", opened().show_statistics, ALL)


def test_an_import_need_not_have_the_bytes_of_the_manifest(tmp_path):
    """Small ids of a large vocabulary take two bytes."""
    keys = {"vocab_size": 70_000, "file_format": "array_record"}
    write_data_set(tmp_path / "set", {"train": [np.arange(1, 3000)]}, **keys)
    lines: list[str] = []
    keys = {"dataset_path": str(tmp_path / "set"), "data_cache_dir": str(tmp_path / "cache")}
    opened = functools.partial(inspection, lines.append, **keys)
    opened().show_statistics(ALL)
    for checksums in tmp_path.glob("cache/imported/*/*_crc32c.npy"):
        checksums.unlink()  # as where they were not copied
    opened().show_statistics(ALL)
    shown = re.findall("Checksums: (.*)", "\n".join(lines))
    assert shown == ["CRC-32C of every 4 KiB, compared at each read", "none"]


def test_mistakes(tmp_path):
    text_set(tmp_path / "set")
    keys = {"dataset_path": str(tmp_path / "set")}
    short = inspection(quiet, num_epoch=1, **keys)
    refused(r"step=6: .*num_epoch=1 .*6 steps.* 5", short.show_batch, 6)
    refused("num_devices=1", inspection, quiet, per_device_batch_size=0.5, **keys)
    refused("dataset_type=synthetic", inspection, quiet, dataset_type="synthetic")
    lines: list[str] = []
    small = inspection(lines.append, has_model=True, vocab_size=200, **keys)
    refused(r"vocab_size=200 .*id 256", small.show_statistics, ALL)
    assert "ids: 9 to 256, which is token 15 of" in "\n".join(lines)


def test_the_program_reports_statistics(tmp_path, users_environment, told):
    text_set(tmp_path / "set")
    keys = ["max_target_length=8", "vocab_size=300"]
    result = run("inspect_data.py", ["set", *keys], tmp_path, users_environment)
    assert result.returncode == 0, result.stderr
    told(result.stdout)
