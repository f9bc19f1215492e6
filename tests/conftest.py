"""Settings that must be in place before jax starts."""

import os
import signal

import pytest

# Compiling is most of the suite's time, and its programs are tiny: compile them fast, not well.
# The end-to-end tests start processes of their own without this.
_FAST_COMPILATION = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
_USERS_FLAGS = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = f"{_USERS_FLAGS} {_FAST_COMPILATION}"


@pytest.fixture(scope="session", autouse=True)
def compilation_cache(pytestconfig):
    """Tests build the same small programs again and again."""
    import jax

    if not hasattr(pytestconfig, "cache"):
        return  # -p no:cacheprovider
    folder = pytestconfig.cache.mkdir("compiled_programs")
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture
def users_environment():
    """The environment for a program started as a user would."""
    return {name: value for name, value in os.environ.items() if not name.startswith("M_")} | {
        "XLA_FLAGS": _USERS_FLAGS
    }


@pytest.fixture
def ctrl_c_counts():
    """For tests of Ctrl-C: shells start background jobs, such as these tests, with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
