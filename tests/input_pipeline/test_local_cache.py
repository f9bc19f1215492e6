"""The cache folder: what is used stays, what no one used for long goes, whatever its kind."""

import itertools
import os
import stat

import fsspec
import numpy as np
import pytest

from MaxText.config.data_sections import PreparationConfig
from MaxText.input_pipeline import local_cache
from MaxText.input_pipeline.prepare.prepare import prepare, tokenize_to_cache
from tests.input_pipeline.small_data import quiet
from tests.input_pipeline.token_store import token_files

KINDS = ("copies", "imported", "text", "text_digests", "packing2")


def use(kind, cache, number):
    """Uses an entry, which is made at the first time."""
    text, records = (cache.with_name(f"{number}.{ending}") for ending in ("txt", "tfrecord"))
    block = {"a": np.ones(local_cache.MIN_ITEMS, np.int8)}
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
        "packing2": lambda: local_cache.cached_arrays(cache, kind, remote, lambda: [block]),
    }.get(kind, lambda: prepare(asked, target, quiet, cache_dir=cache))()


@pytest.mark.parametrize("adds", [*KINDS, "prepared"])
def test_entries_unused_for_long_are_deleted(tmp_path, adds):
    cache, key, short = tmp_path / "cache", f"{0:032x}", f"{0:024x}"
    for kind, number in itertools.product(KINDS, range(2)):
        use(kind, cache, number)
    made = {entry for kind in ("[!p]*/*", "packing*") for entry in cache.glob(kind)}
    assert len(made) == 10
    own = (f"wiki-{key}.tar", f"model-{key}{0:08x}", f"text/{key}.txt", f"prepared/my_{key}_set")
    left = (  # by processes that were killed
        f"prepared/{short}",
        f"imported/.{short}.lock",
        f"text/.{key}.preparing",
        f"text/..{key}.lock.unused",
        f"text_digests/{key}.{0:016x}.writing",
        f".packing2-{short}.ab_c1234",
    )
    (cache / "prepared").mkdir()
    for entry in (*made, *(cache / name for name in own + left)):
        entry.touch()
        os.utime(entry, (0, 0))
    for kind in KINDS:
        use(kind, cache, 0)
    used = {entry for entry in made if entry.stat().st_mtime > 1}
    assert len(used) == 5
    use(adds, cache, 2)
    assert all(entry.exists() for entry in used)
    old = [path for path in cache.rglob("*") if path.stat().st_mtime < 1]
    assert {str(path.relative_to(cache)) for path in old} == {*own}


def test_other_users_may_read_the_cache(tmp_path):
    cache, before = tmp_path / "cache", os.umask(0o022)
    try:
        for kind in KINDS:
            use(kind, cache, 0)
    finally:
        os.umask(before)
    entries = list(cache.rglob("*"))
    assert len(entries) > len(KINDS)
    for entry in entries:
        wanted = 0o755 if entry.is_dir() else 0o644
        assert stat.S_IMODE(entry.stat().st_mode) == wanted, entry
