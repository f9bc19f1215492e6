"""Keeps two processes from making the same data set at once: `hold`. Imports no jax."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import SoftFileLease, Timeout

# A holder on this machine that died is noticed at once. One on another machine that gave no sign of
# life for so long is taken for dead: network folders show changes late.
_LEASE_SECONDS = 300.0
_SIGN_OF_LIFE_SECONDS = 20.0


@contextlib.contextmanager
def hold(path: Path, show: Callable[[str], None]) -> Iterator[None]:
    """Waits until no other process holds `path`, then holds it; the file is gone afterwards.

    Args:
      path: of the lock; its folder exists, and may be shared by machines.
      show: takes one line when there is somebody to wait for.

    Raises:
      OSError: the file cannot be written.
    """
    lock = SoftFileLease(
        path, lease_duration=_LEASE_SECONDS, heartbeat_interval=_SIGN_OF_LIFE_SECONDS
    )
    try:
        lock.acquire(timeout=0)
    except Timeout:
        owner = lock.owner
        holder = f"process {owner.pid} on {owner.hostname}" if owner else "another process"
        show(f"Waiting for {holder}, which prepares the same data set")
        lock.acquire(poll_interval=0.2)
    try:
        yield
    finally:
        lock.release()
