"""Launch time and malloc settings of a process; imports nothing slow."""

import os
import platform
import sys
import time

from MaxText import early_signals

# By default glibc returns large temporaries to the system after each step, and the next step faults
# them in again in 4 KiB pages: a third of a small CPU step. So the heap is never trimmed. Blocks of
# 1 GiB stay out of it, because small allocations would fragment the holes between steps; those are
# mapped in 2 MiB pages instead (figures in docs/explanation/design_decisions.md).
_TUNABLES = {
    "glibc.malloc.arena_max": "1",  # only the main heap can hold large blocks
    "glibc.malloc.trim_threshold": str(2**46),  # never trim its end
}
_LARGE_BLOCKS = {
    "glibc.malloc.mmap_threshold": str(2**30),  # smaller ones come from the heap
    "glibc.malloc.hugetlb": "1",  # 2 MiB pages
}
# glibc before 2.35 has no such pages and no threshold above 32 MiB: all goes to the heap.
_LARGE_BLOCKS_BEFORE_235 = {"glibc.malloc.mmap_max": "0"}

_LAUNCHED = "MAXTEXT_LAUNCHED"  # passes the launch time to the restarted process
_launch_time = float(os.environ.pop(_LAUNCHED, time.time()))


def launch_time() -> float:
    """Returns the Unix time of the program start, or of this module's import."""
    return _launch_time


def reexec_with_malloc_tuning() -> None:
    """Restarts this process with malloc settings for glibc, if unset.

    Call it before the slow imports, which would be made twice.
    """
    present = os.environ.get("GLIBC_TUNABLES", "")
    if "glibc.malloc." in present:
        return
    library, version = platform.libc_ver()
    if library != "glibc":
        return
    is_old = tuple(map(int, version.split(".")[:2])) < (2, 35)
    chosen = _TUNABLES | (_LARGE_BLOCKS_BEFORE_235 if is_old else _LARGE_BLOCKS)
    tunables = [present] if present else []
    tunables += [f"{name}={value}" for name, value in chosen.items()]
    environment = os.environ | {"GLIBC_TUNABLES": ":".join(tunables), _LAUNCHED: str(_launch_time)}
    early_signals.hold_back()
    try:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
    finally:
        early_signals.release()
