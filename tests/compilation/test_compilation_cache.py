"""The compilation cache, and compiled steps by shape of batch."""

import os
import warnings

import jax
import jax.numpy as jnp
import pytest
import zstandard
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from MaxText.compilation import compilation_cache
from MaxText.compilation.compiled_steps import SavedSteps, ShapeSpecializedStep
from MaxText.config.training_sections import RunConfig


@pytest.fixture
def cache_dir(monkeypatch):
    """Reads jax's setting on one device, and puts it back."""
    names = (
        "jax_compilation_cache_dir",
        "jax_enable_compilation_cache",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_enable_compilation_cache", True)
    monkeypatch.setattr(jax, "local_device_count", lambda: 1)
    reset_cache()
    yield lambda: jax.config.jax_compilation_cache_dir
    for name, value in before.items():
        jax.config.update(name, value)
    reset_cache()


def run_section(folder, jax_cache_dir="auto"):
    return RunConfig(base_output_directory=str(folder), jax_cache_dir=jax_cache_dir)


def test_where_it_lies(cache_dir, tmp_path):
    assert str(tmp_path / "jax_cache") in compilation_cache.enable(run_section(tmp_path), "tpu")
    assert cache_dir() == str(tmp_path / "jax_cache")
    # The environment of the user is stronger than auto, and empty switches it off.
    jax.config.update("jax_compilation_cache_dir", "/from/the/environment")
    assert "/from/the/environment" in compilation_cache.enable(run_section(tmp_path), "tpu")
    assert cache_dir() == "/from/the/environment"
    jax.config.update("jax_compilation_cache_dir", None)
    assert compilation_cache.enable(run_section(tmp_path, ""), "tpu").endswith("off")
    assert cache_dir() is None
    # A folder that cannot be made stops nothing, and buckets are left to jax.
    (tmp_path / "file").write_text("")
    assert "jax_cache_dir" in compilation_cache.enable(run_section(tmp_path / "file"), "tpu")
    assert cache_dir() is None
    compilation_cache.enable(run_section("gs://bucket/runs"), "gpu")
    assert cache_dir() == "gs://bucket/runs/jax_cache"


def test_processors_of_different_kinds_have_folders_of_their_own(cache_dir, tmp_path, monkeypatch):
    found = []
    for kind in ("x86_64", "aarch64"):
        monkeypatch.setattr(compilation_cache.machine, "machine", lambda kind=kind: kind)
        compilation_cache.enable(run_section(tmp_path, str(tmp_path / "mine")), "cpu")
        found.append(cache_dir())
    assert len(set(found)) == 2
    assert {os.path.dirname(folder) for folder in found} == {str(tmp_path / "mine")}


def test_simulated_devices_have_none(cache_dir, tmp_path, monkeypatch):
    """Programs with collectives that are loaded from it can deadlock."""
    monkeypatch.setattr(jax, "local_device_count", lambda: 2)
    assert "off on simulated devices" in compilation_cache.enable(run_section(tmp_path), "cpu")
    assert not jax.config.jax_enable_compilation_cache
    assert str(tmp_path) in compilation_cache.enable(run_section(tmp_path), "tpu")


def test_truncated_entries_are_removed(tmp_path):
    whole = zstandard.compress(os.urandom(3000))
    for name, content in {"a": whole, "b": whole[:-1], "c": b"", "d": b"\0" * 900}.items():
        (tmp_path / f"{name}-cache").write_bytes(content)
    (tmp_path / "other").write_bytes(b"")
    compilation_cache.remove_truncated_entries(str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"a-cache", "other", ".checked"}
    # What was looked at is not read again.
    for name, time in (("a", 1e9), ("b", None)):
        (tmp_path / f"{name}-cache").write_bytes(b"")
        os.utime(tmp_path / f"{name}-cache", time and (time, time))
    compilation_cache.remove_truncated_entries(str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"a-cache", "other", ".checked"}


def test_a_start_after_a_kill_compiles_once_more_and_the_next_one_not(cache_dir, tmp_path):
    def takes_it_from_the_cache():
        jax.config.update("jax_compilation_cache_dir", None)
        compilation_cache.enable(run_section(tmp_path), "cpu")
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        before = compilation_cache.thread_cache_hits()
        with warnings.catch_warnings(action="error"):
            jax.jit(lambda x: jnp.sin(x) @ x).lower(jnp.ones((3, 3))).compile()
        return compilation_cache.thread_cache_hits() > before

    assert not takes_it_from_the_cache()
    entries = list((tmp_path / "jax_cache").rglob("*-cache"))
    assert entries
    for entry in entries:
        entry.write_bytes(entry.read_bytes()[:-20])  # what a kill leaves
    assert [takes_it_from_the_cache() for _ in range(2)] == [False, True]


def test_each_shape_is_compiled_once_or_taken_from_a_file():
    compiled = []

    def compile_for(batch):
        compiled.append(batch.shape)
        state = jax.ShapeDtypeStruct((8,), jnp.float32)

        def step(state, batch):
            salt = int.from_bytes(os.urandom(3))  # so that the tests' own cache has no such program
            return state + batch.sum(), {"loss": batch.mean(), "salt": salt}

        return jax.jit(step, donate_argnums=0).lower(state, batch).compile(), 0.5

    saved = jax.jit(lambda state, batch: (state, {"loss": batch.sum()}))
    saved = saved.lower(jnp.zeros(8), jnp.ones((8, 8))).compile()
    kept = []
    files = SavedSteps(
        lambda batch: saved if batch.shape == (8, 8) else None,
        lambda batch, step, is_cache_hit: kept.append(batch.shape),
        "file",
    )
    steps = ShapeSpecializedStep(compile_for, files)
    batch, other = jnp.ones((4, 16)), jnp.ones((8, 8))
    assert not steps.fits(batch)
    memory = (compilation := steps.prepare(batch)).pop("memory")
    assert compilation == {"rows": 4, "length": 16, "compile_seconds": 0.5, "source": ""}
    assert (steps.fits(batch), steps.fits(other)) == (True, False)
    state, metrics = steps(jnp.zeros(8), batch)
    assert (float(state[0]), float(metrics["loss"])) == (64, 1)
    assert memory["arguments"] == 4 * (8 + 4 * 16)
    assert memory["aliased"] == 4 * 8  # the state is donated
    assert memory["peak"] >= memory["arguments"] + memory["temporaries"]
    assert steps.prepare(other)["source"] == "file"
    assert float(steps(jnp.zeros(8), other)[1]["loss"]) == 64
    assert compiled == kept == [(4, 16)]
