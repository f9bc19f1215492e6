"""What must be in the environment before jax starts. Importing this imports no jax."""

import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from MaxText.errors import UserError

Result = TypeVar("Result")

# By default glibc gives large temporaries back to the system after each step, and the next step
# faults them in again: 450,000 page faults and a third of the time of a small CPU step. One heap
# that is never given back has none (docs/decisions.md has the figures).
_TUNABLES = {
    "glibc.malloc.arena_max": "1",  # only the main heap can hold large blocks
    "glibc.malloc.mmap_max": "0",  # large blocks come from the heap too
    "glibc.malloc.trim_threshold": str(2**46),  # and its end is not given back
}


# Tells the restarted process when the user started it.
_LAUNCHED = "MAXTEXT_LAUNCHED"


def restart_with_allocator_setting() -> float:
    """Starts this process again with the allocator setting, which is read only at start.

    Does not outside Linux, or when the user's GLIBC_TUNABLES already sets the allocator.

    Returns:
      Unix seconds at which the program was started.
    """
    launched = float(os.environ.pop(_LAUNCHED, time.time()))
    present = os.environ.get("GLIBC_TUNABLES", "")
    if sys.platform != "linux" or "glibc.malloc." in present:
        return launched
    tunables = [present] if present else []
    tunables += [f"{name}={value}" for name, value in _TUNABLES.items()]
    environment = os.environ | {"GLIBC_TUNABLES": ":".join(tunables), _LAUNCHED: str(launched)}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def choose_platform(hardware: str) -> list[str]:
    """Tells jax which devices to use; returns what is set in the environment, as lines to print."""
    if hardware != "auto":
        os.environ["JAX_PLATFORMS"] = {"gpu": "cuda"}.get(hardware, hardware)
    names = ("GLIBC_TUNABLES", "JAX_PLATFORMS", "XLA_FLAGS", "LIBTPU_INIT_ARGS")
    return [f"environment: {name}={os.environ[name]}" for name in names if os.environ.get(name)]


def use_compilation_cache(folder: str) -> None:
    """Keeps compiled programs in `folder` for later runs; an empty name switches that off."""
    import jax

    if folder:
        jax.config.update("jax_compilation_cache_dir", os.path.expanduser(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def find_devices(hardware: str) -> list[Any]:
    """The devices to train on.

    Raises:
      UserError: jax finds none of the kind asked for.
    """
    import jax

    try:
        return jax.devices()
    # Where it sees no GPU at all, jax 0.10 fails an assertion that says nothing.
    except (RuntimeError, AssertionError) as error:
        reason = (str(error) or "it sees none on this machine").splitlines()[0]
        raise UserError(
            f"hardware={hardware}: jax finds no such device ({reason}).\n"
            "  What to do: install the requirements for it (setup.sh DEVICE=tpu|gpu), or set "
            "hardware=cpu."
        ) from error


def in_background(function: Callable[[], Result]) -> Future[Result]:
    """Starts `function` on a thread; its result is waited for by `.result()`."""
    executor = ThreadPoolExecutor(max_workers=1)
    future = executor.submit(function)
    executor.shutdown(wait=False)
    return future
