"""The persistent compilation cache, shared by restarts and other runs.

JAX writes entries in place, treats unreadable ones as misses, and never replaces existing ones, so
an entry truncated by a kill would be recompiled on every restart. `enable` removes such entries.
"""

import collections
import contextlib
import functools
import hashlib
import os
import platform as machine
import threading

from MaxText.config.training_sections import RunConfig

FOLDER = "jax_cache"

# Minimum compile time in seconds: from a bucket, reading smaller programs takes longer.
_SHORTEST_KEPT = 0.5
_CHECKED = ".checked"  # its mtime is the time of the last check
_HIT = "/jax/compilation_cache/cache_hits"

_hits = collections.Counter[int]()  # thread -> programs loaded from the cache


def enable(run: RunConfig, platform: str, *, may_make: bool = True) -> str:
    """Enables the compilation cache and returns a log line.

    CPU programs go to a folder per processor type, because they use its instructions. `may_make`:
    "auto" may create base_output_directory. Nothing is cached if the folder cannot be written, or
    on simulated devices.
    """
    import jax

    _count_hits()
    if can_deadlock(platform):
        jax.config.update("jax_enable_compilation_cache", False)
        return "compilation cache: off on simulated devices"
    set_by_user = folder_in_use()
    if not run.jax_cache_dir or (run.jax_cache_dir == "auto" and set_by_user):
        return f"compilation cache: {set_by_user or 'off'}"
    folder = run.jax_cache_dir
    if folder == "auto":
        folder = f"{run.base_output_directory}/{FOLDER}"
        if not (may_make or "://" in folder or os.path.isdir(run.base_output_directory)):
            return "compilation cache: off"
    if platform == "cpu":
        folder = f"{folder}/{cpu_fingerprint()}"
    if "://" not in folder:
        folder = os.path.abspath(os.path.expanduser(folder))
        try:
            os.makedirs(folder, exist_ok=True)
            remove_truncated_entries(folder)
        except OSError as error:
            return f"compilation cache: off, jax_cache_dir cannot be written ({error})"
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _SHORTEST_KEPT)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return f"compilation cache: {folder}"


def can_deadlock(platform: str) -> bool:
    """Whether cached programs can hang in XLA's in-process collectives."""
    import jax

    return platform == "cpu" and jax.local_device_count() > 1


def folder_in_use() -> str | None:
    """Returns the folder of JAX's persistent compilation cache; None if it has none."""
    import jax

    return getattr(jax.config, "jax_compilation_cache_dir")  # noqa: B009


def remove_truncated_entries(folder: str) -> None:
    """Removes truncated entries of a local folder."""
    marker = os.path.join(folder, _CHECKED)
    since = os.stat(marker).st_mtime if os.path.exists(marker) else 0.0
    entries = [entry for entry in os.scandir(folder) if entry.name.endswith("-cache")]
    with open(
        marker, "w", encoding="utf-8"
    ):  # before reading, so that later changes are checked next time
        pass
    os.utime(marker)
    for entry in entries:
        with contextlib.suppress(FileNotFoundError):  # another process removed it first
            # Some file systems store whole seconds.
            if entry.stat().st_mtime >= since - 1.0 and not _is_whole(entry.path):
                os.remove(entry.path)


def _is_whole(path: str) -> bool:
    import zstandard

    stream = zstandard.ZstdDecompressor().decompressobj()
    try:
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                stream.decompress(block)
    except zstandard.ZstdError:
        return False
    return stream.eof


def cpu_fingerprint() -> str:
    """Returns a short name for the processor's instruction set."""
    features = ""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:  # Linux
        named = (line for line in file if line.lower().startswith(("flags", "features")))
        features = next(named, "")
    named_so = f"{machine.machine()} {machine.processor()} {features}"
    return f"cpu-{hashlib.sha256(named_so.encode()).hexdigest()[:8]}"


def thread_cache_hits() -> int:
    """Returns this thread's cache hits since `enable` was first called."""
    return _hits[threading.get_ident()]


@functools.cache
def _count_hits() -> None:
    import jax

    def count(event: str, **_: object) -> None:
        _hits[threading.get_ident()] += event == _HIT

    jax.monitoring.register_event_listener(count)
