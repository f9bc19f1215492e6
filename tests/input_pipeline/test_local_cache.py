"""The cache folder: what is used stays, what no one used for long goes, whatever its kind."""

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

KINDS = ("copies", "imported", "text", "text_digests", "plan1")


def use(kind, cache, number):
    """Uses an entry, which is made at the first time."""
    text, records = (cache.with_name(f"{number}.{ending}") for ending in ("txt", "tfrecord"))
    remote, system = f"{cache}/{number}", fsspec.filesystem("memory")
    if not text.exists():
        text.write_text(f"text {number}")
        token_files.write_tfrecord(records, [np.arange(5)])
        system.pipe(f"{remote}/manifest.json", b"{}")
    asked = PreparationConfig(prepare_source=str(text), tokenizer_type="byte")
    target = f"memory://{remote}/set" if kind == "prepared" else f"{cache}-set{number}"
    {
        "copies": lambda: local_cache.copy_folder(f"memory://{remote}", cache),
        "imported": lambda: token_files.open_data(records, cache),
        "text": lambda: tokenize_to_cache([str(text)], asked, cache, quiet),
        "plan1": lambda: local_cache.cached_arrays(
            cache, kind, remote, lambda: [{"a": np.ones(9)}]
        ),
    }.get(kind, lambda: prepare(asked, target, quiet, cache_dir=str(cache)))()


@pytest.mark.parametrize("adds", [*KINDS, "prepared"])
def test_entries_unused_for_long_are_deleted(tmp_path, monkeypatch, adds):
    def entries():
        return {path for kind in ("[!p]*/*", "prepared/*", "plan1-*") for path in cache.glob(kind)}

    monkeypatch.setattr(local_cache, "_MIN_ITEMS", 1)
    cache = tmp_path / "cache"
    for kind, number in itertools.product(KINDS, range(2)):
        use(kind, cache, number)
    (cache / "prepared" / f"{0:024x}").mkdir(parents=True)  # of a process that was killed
    own = [cache / "text" / "my-own.txt", cache / "my-own-data"]
    for entry in (*own, *entries()):
        entry.touch()
        os.utime(entry, (0, 0))
    for kind in KINDS:
        use(kind, cache, 0)
    used = {entry for entry in entries() if entry.stat().st_mtime > 1}
    assert (len(used), len(entries())) == (5, 12)
    use(adds, cache, 2)
    assert {*used, own[0]} <= entries()
    assert {path for path in (*own, *entries()) if path.stat().st_mtime < 1} == {*own}
