"""Settings that must be in place before jax starts."""

import gc
import os
import signal
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.version import Version

from MaxText.config import import_modules, registry
from tests.house.sources import REPOSITORY

# Compiling is most of the suite's time, and its programs are tiny: compile them fast, not well.
# A train step of three layers: 10 CPU seconds without these, 5 with the first two, 0.7 with all.
# tests/compilation/test_ahead_of_time.py compiles as users do.
_FAST_COMPILATION = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    " --xla_cpu_parallel_codegen_split_count=1"
)
# Later ones refuse to start with the last one, and compile each fusion in an MLIR pipeline: a train
# step of three layers takes 2.0 CPU seconds, not 0.4. None of 15 other flags that were tried helps.
if Version(metadata.version("jaxlib")) < Version("0.11"):
    _FAST_COMPILATION += " --xla_cpu_use_fusion_emitters=false"
_USERS_FLAGS = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = f"{_USERS_FLAGS} {_FAST_COMPILATION}"

# Where users let programs write instead of $HOME.
_ALSO_AT_HOME = ("XDG_", "HF_", "WANDB_", "MPLCONFIGDIR")

gc.disable()  # until all tests are collected: imports leave little behind


def pytest_configure(config):
    """What is kept from run to run, also what programs keep at home, lies in pytest's own cache.

    Without that (-p no:cacheprovider) it lies in a temporary folder, the same for all workers.
    """
    from hypothesis import configuration

    if hasattr(config, "workerinput"):
        home = Path(os.environ["HOME"])  # as the process that started the workers set it
    elif hasattr(config, "cache"):
        home = config.cache.mkdir("home")
    else:
        folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        config.add_cleanup(folder.cleanup)
        home = Path(folder.name)
    for name in [name for name in os.environ if name.startswith(_ALSO_AT_HOME)]:
        del os.environ[name]
    os.environ["HOME"] = str(home)
    configuration.set_hypothesis_home_dir(home / "hypothesis")
    if sys.dont_write_bytecode and hasattr(config, "cache"):
        # Some want none next to the sources: rewriting asserts is half the time of a collection.
        sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = str(home / "bytecode")
        sys.dont_write_bytecode = False
        del os.environ["PYTHONDONTWRITEBYTECODE"]


def pytest_collection_finish():
    """Tracing makes many short-lived objects: it need not look at thousands of tests for them."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def compilation_cache():
    """The folder of compiled programs: tests build the same small ones repeatedly.

    Workers share it: an entry that another one is still writing counts as missing (pyproject.toml
    ignores jax's warning).
    """
    import jax

    from MaxText.compilation.compilation_cache import can_deadlock

    folder = Path.home() / "compiled_programs"
    if not can_deadlock(jax.default_backend()):
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return folder


@pytest.fixture(scope="module", autouse=True)
def parts_of_this_module():
    """Parts that a test's modules register are not there for the tests of other files."""
    before = registry.registrations()
    yield
    if registry.registrations() != before:
        import_modules.forget(before)


@pytest.fixture
def own_modules(tmp_path, monkeypatch):
    """Tests import modules that they write to the current folder, each of them newly."""
    before = registry.registrations()
    import_modules.forget(before)
    monkeypatch.chdir(tmp_path)
    yield
    import_modules.forget(before)


@pytest.fixture
def users_environment(compilation_cache):
    """The environment for a program started as a user would, except that it compiles fast."""
    users = {name: value for name, value in os.environ.items() if not name.startswith("M_")}
    return users | {"M_JAX_CACHE_DIR": str(compilation_cache)}


@pytest.fixture
def ctrl_c_counts():
    """For tests of Ctrl-C: shells start background jobs, such as these tests, with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def told(snapshot, tmp_path):
    """Compares a message with the one kept under __snapshots__; `--snapshot-update` writes those.

    For texts that users read. All other tests assert keys, exit codes and kinds of problems, so
    that wording can be improved with one command.
    """

    def compare(message: object) -> None:
        text = str(message).replace(str(tmp_path), "<tmp>").replace(str(REPOSITORY), "<repository>")
        assert text == snapshot

    return compare
