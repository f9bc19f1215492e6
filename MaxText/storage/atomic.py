"""Atomic writes and locks: a rename never makes half-written data visible."""

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import SoftFileLease, Timeout

# Names of files that are being written end in a random number and this.
WRITING_SUFFIX = ".writing"

# A holder on this machine that died is noticed at once. One on another machine is taken for dead
# after so many seconds without a sign of life: network folders show changes late.
_LEASE_SECONDS = 300.0
_HEARTBEAT_SECONDS = 20.0


def sync_file(path: Path) -> None:
    """Blocks until a file's contents, or a folder's list of names, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def writing_name(path: Path) -> Path:
    """Returns a unique path next to `path` to write to before `publish`.

    Unique, so that a process whose lease ran out does not disturb the one that took over.
    """
    return path.with_name(f"{path.name}.{secrets.token_hex(8)}{WRITING_SUFFIX}")


def publish(writing: Path, path: Path) -> None:
    """Renames a complete file once its contents are on disk."""
    sync_file(writing)
    writing.replace(path)


def write_whole(path: Path, contents: str) -> None:
    """Replaces a small text file atomically."""
    writing = writing_name(path)
    writing.write_text(contents, encoding="utf-8")
    publish(writing, path)
    sync_file(path.parent)


@contextlib.contextmanager
def lock(path: Path, show: Callable[[str], None]) -> Iterator[None]:
    """Holds the lock file `path`, which is deleted afterwards; waits for another holder.

    Args:
      path: In an existing folder, which machines may share.
      show: Takes a line if there is another holder.

    Raises:
      OSError: The file cannot be written.
    """
    lease = SoftFileLease(
        path, lease_duration=_LEASE_SECONDS, heartbeat_interval=_HEARTBEAT_SECONDS
    )
    try:
        lease.acquire(timeout=0)
    except Timeout:
        owner = lease.owner
        holder = f"process {owner.pid} on {owner.hostname}" if owner else "another process"
        show(f"Waiting for {holder}, which prepares the same data set")
        lease.acquire(poll_interval=0.2)
    try:
        yield
    finally:
        lease.release()
