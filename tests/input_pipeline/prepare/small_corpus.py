"""Small texts to prepare, and what a prepared dataset holds."""

import functools
from pathlib import Path

import numpy as np
import pytest

from MaxText.config.data_sections import PreparationConfig
from MaxText.input_pipeline.document_sources.corpus import open_corpus
from MaxText.input_pipeline.prepare import prepare as prepare_module
from MaxText.input_pipeline.token_store.manifest import Manifest, read_manifest
from tests.input_pipeline.token_store.token_files import open_data, tokens_of


def write_texts(folder: Path, count: int = 30) -> list[str]:
    """Text files of random words; returns their texts in the order they are read."""
    rng = np.random.default_rng(0)
    vocabulary = ["".join(rng.choice(list("abcdefgh"), rng.integers(2, 8))) for _ in range(100)]
    folder.mkdir(parents=True)
    texts = []
    for index in range(count):
        text = " ".join(rng.choice(vocabulary, 60)) + f"\nText {index}, äöü 漢字 🙂.\r\n"
        (folder / f"{index:03d}.txt").write_bytes(text.encode())
        texts.append(text)
    return texts


def swap_case(path: Path) -> None:
    """Other text in as many bytes."""
    path.write_bytes(path.read_bytes().swapcase())


def options(source: Path | str, **keys) -> PreparationConfig:
    """Keys to prepare `source` with a tiny tokenizer that is trained on it."""
    keys.setdefault("tokenizer_vocab_size", 300)
    return PreparationConfig(prepare_source=str(source), **keys)


def byte_options(source: Path | str, **keys) -> PreparationConfig:
    """Keys to prepare `source` with the bytes of its text as ids."""
    return PreparationConfig(prepare_source=str(source), tokenizer_path="bytes", **keys)


def made(keys: PreparationConfig, folder: Path, log=lambda line: None, **arguments) -> Manifest:
    manifest = prepare_module.prepare(keys, str(folder), log, **arguments)
    assert manifest is not None
    return manifest


def split_small(monkeypatch: pytest.MonkeyPatch, shard_bytes: int) -> None:
    """Makes units of a few hundred bytes, so that small texts have many."""
    small = functools.partial(open_corpus, shard_bytes=shard_bytes)
    monkeypatch.setattr(prepare_module, "open_corpus", small)


def documents(folder: Path, split: str) -> list[list[int]]:
    manifest = read_manifest(str(folder))
    if split not in manifest.splits:
        return []
    data = open_data(folder, folder.parent / "cache", split=split, for_training=False)
    tokens, ends = np.array(tokens_of(data)), data.store.document_offsets
    return [tokens[ends[i] : ends[i + 1]].tolist() for i in range(len(ends) - 1)]
