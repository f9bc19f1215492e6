"""The cache folder: entries that are kept or deleted, and files that are cut while mapped."""

import itertools
import os

import fsspec
import numpy as np
import pytest

from MaxText.config.data_sections import PreparationConfig
from MaxText.input_pipeline import local_cache
from MaxText.input_pipeline.prepare.prepare import prepare, tokenize_to_cache
from tests.input_pipeline.small_data import quiet
from tests.input_pipeline.token_store import token_files


def copied(cache, number):
    system, name = fsspec.filesystem("memory"), f"{cache}/{number}/manifest.json"
    if not system.exists(name):
        system.pipe(name, b"{}")
    local_cache.copy_folder(f"memory://{cache}/{number}", cache)


def imported(cache, number):
    path = cache.with_name(f"{number}.tfrecord")
    if not path.exists():
        token_files.write_tfrecord(path, [np.arange(5)])
    token_files.open_data(path, cache)


def text(cache, number):
    path = cache.with_name(f"{number}.txt")
    return path if path.exists() else (path.write_text(f"text {number}"), path)[1]


def tokenized(cache, number):
    tokenize_to_cache(
        [str(text(cache, number))], PreparationConfig(tokenizer_type="byte"), cache, quiet
    )


def digested(cache, number):
    asked = PreparationConfig(prepare_source=str(text(cache, number)), tokenizer_type="byte")
    prepare(asked, str(cache.with_name(f"set{number}")), quiet, cache_dir=str(cache))


def uploaded(cache, number):
    asked = PreparationConfig(prepare_source=str(text(cache, 0)), tokenizer_type="byte")
    prepare(asked, f"memory://{cache}/uploaded/{number}", quiet, cache_dir=str(cache))


def planned(cache, number):
    local_cache.cached_arrays(cache, "plan1", str(number), lambda: [{"a": np.arange(9)}])


MAKERS = (copied, imported, tokenized, digested, uploaded, planned)


@pytest.mark.parametrize("adds", MAKERS)
def test_entries_unused_for_long_are_deleted(tmp_path, monkeypatch, adds):
    monkeypatch.setattr(local_cache, "_MIN_ITEMS", 1)
    cache = tmp_path / "cache"

    def entries():
        return {*cache.glob("*/*"), *cache.glob("plan1-*")} - {*cache.glob("plan1-*/*")}

    kept = [make for make in MAKERS if make is not uploaded]  # which leaves nothing
    for make, number in itertools.product(kept, range(2)):
        make(cache, number)
    (cache / "prepared" / "killed").mkdir(parents=True)
    for entry in entries():
        os.utime(entry, (0, 0))
    for make in kept:
        make(cache, 0)
    used = {entry for entry in entries() if entry.stat().st_mtime > 1}
    assert (len(used), len(entries())) == (5, 11)
    adds(cache, 2)
    assert all(entry.stat().st_mtime > 1 for entry in entries())
    assert used <= entries()
