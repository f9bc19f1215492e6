"""The compilation cache: where it lies, and entries that a kill has cut short."""

import os
import subprocess
import sys

import jax
import pytest
import zstandard

from MaxText.configuration.training_sections import Run
from MaxText.parallelism import compilation_cache


@pytest.fixture
def cache_dir(monkeypatch):
    """Reads jax's setting, and puts it back."""
    names = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    yield lambda: jax.config.jax_compilation_cache_dir
    for name, value in before.items():
        jax.config.update(name, value)


def run_section(folder, jax_cache_dir="auto"):
    return Run(base_output_directory=str(folder), jax_cache_dir=jax_cache_dir)


def test_it_lies_beside_the_runs(cache_dir, tmp_path):
    line = compilation_cache.use(run_section(tmp_path), "tpu")
    assert cache_dir() == str(tmp_path / "jax_cache")
    assert cache_dir() in line


def test_processors_of_different_kinds_have_folders_of_their_own(cache_dir, tmp_path, monkeypatch):
    found = []
    for kind in ("x86_64", "aarch64"):
        monkeypatch.setattr(compilation_cache.machine, "machine", lambda kind=kind: kind)
        compilation_cache.use(run_section(tmp_path, str(tmp_path / "mine")), "cpu")
        found.append(cache_dir())
    assert len(set(found)) == 2
    assert {os.path.dirname(folder) for folder in found} == {str(tmp_path / "mine")}


def test_buckets_are_left_to_jax(cache_dir):
    compilation_cache.use(run_section("gs://bucket/runs"), "gpu")
    assert cache_dir() == "gs://bucket/runs/jax_cache"


def test_users_environment_is_stronger_than_auto(cache_dir, tmp_path):
    jax.config.update("jax_compilation_cache_dir", "/from/the/environment")
    assert "/from/the/environment" in compilation_cache.use(run_section(tmp_path), "tpu")
    assert cache_dir() == "/from/the/environment"


def test_empty_switches_it_off(cache_dir, tmp_path):
    assert compilation_cache.use(run_section(tmp_path, ""), "tpu").endswith("off")
    assert cache_dir() is None


def test_a_folder_that_cannot_be_made_stops_nothing(cache_dir, tmp_path):
    (tmp_path / "jax_cache").write_text("a file")
    assert "cannot be written" in compilation_cache.use(run_section(tmp_path), "tpu")
    assert cache_dir() is None


def test_entries_that_were_cut_short_are_removed(tmp_path):
    whole = zstandard.compress(os.urandom(3000))
    for name, content in {"a": whole, "b": whole[:-1], "c": b"", "d": b"\0" * 900}.items():
        (tmp_path / f"{name}-cache").write_bytes(content)
    (tmp_path / "other").write_bytes(b"")
    removed = compilation_cache.remove_cut_short(str(tmp_path))
    assert sorted(removed) == ["b-cache", "c-cache", "d-cache"]
    assert (tmp_path / "a-cache").exists()
    assert (tmp_path / "other").exists()


def test_entries_are_read_once(tmp_path, monkeypatch):
    (tmp_path / "old-cache").write_bytes(zstandard.compress(b"1"))
    os.utime(tmp_path / "old-cache", (1e9, 1e9))
    read = []

    def is_whole(path):
        read.append(os.path.basename(path))
        return True

    monkeypatch.setattr(compilation_cache, "_is_whole", is_whole)
    compilation_cache.remove_cut_short(str(tmp_path))
    (tmp_path / "new-cache").write_bytes(b"")
    compilation_cache.remove_cut_short(str(tmp_path))
    assert read == ["old-cache", "new-cache"]


PROGRAM = """
import sys
import jax, jax.numpy as jnp
from MaxText.configuration.training_sections import Run
from MaxText.parallelism import compilation_cache
compilation_cache.use(Run(base_output_directory=sys.argv[1]), "cpu")
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
before = compilation_cache.hits_of_this_thread()
jax.jit(lambda x: jnp.sin(x) @ x).lower(jnp.ones((3, 3))).compile()
print("hit" if compilation_cache.hits_of_this_thread() > before else "miss")
"""


def test_a_start_after_a_kill_compiles_once_more_and_the_next_one_not(tmp_path, users_environment):
    def start():
        command = [sys.executable, "-W", "error", "-c", PROGRAM, str(tmp_path)]
        environment = users_environment | {"JAX_PLATFORMS": "cpu"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert start() == "miss"
    (folder,) = (tmp_path / "jax_cache").iterdir()
    for entry in folder.glob("*-cache"):
        entry.write_bytes(entry.read_bytes()[:-20])  # what a kill leaves
    assert [start(), start()] == ["miss", "hit"]
