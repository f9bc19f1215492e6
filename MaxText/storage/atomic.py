"""Atomic file writes, JSON files with a checksum, and lock files.

A local file is written under a temporary name, flushed to disk and renamed, so that a crash leaves
either the old or the complete new file. Objects in a bucket appear only when complete anyway.
"""

import contextlib
import hashlib
import json
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from etils import epath
from filelock import SoftFileLease, Timeout

from MaxText.storage.paths import is_object_store_path
from MaxText.value_types import JsonValue

WRITING_SUFFIX = ".writing"  # temporary files end in a random number and this

# A holder that died on this machine is noticed at once, one on another machine after this time
# without a heartbeat, because network folders show changes late.
_LEASE_SECONDS = 300.0
_HEARTBEAT_SECONDS = 20.0


def sync_file(path: Path) -> None:
    """Flushes a file, or the entries of a folder, to disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def temporary_name(path: Path) -> Path:
    """Returns a path next to `path` for writing, unique per writer; see `atomic_rename`."""
    return path.with_name(f"{path.name}.{secrets.token_hex(8)}{WRITING_SUFFIX}")


def atomic_rename(writing: Path, path: Path) -> None:
    """Flushes the file `writing` to disk, then renames it to `path`, which it replaces."""
    sync_file(writing)
    writing.replace(path)
    sync_file(path.parent)


def apply_umask(path: Path) -> None:
    """Gives a file or folder the mode that `open` or `mkdir` would have given it.

    Libraries that write through `tempfile` (safetensors, for example) leave files that only their
    owner can read, whatever the umask says. A new neighbor shows the right mode: reading the umask
    itself means setting it, for all threads, and it does not hold below a folder with default ACLs.
    """
    probe = temporary_name(path)
    if path.is_dir():
        probe.mkdir()
    else:
        probe.touch()
    try:
        path.chmod(stat.S_IMODE(probe.stat().st_mode))
    finally:
        if probe.is_dir():
            probe.rmdir()
        else:
            probe.unlink()


def atomic_write_text(path: Path | epath.Path, contents: str) -> None:
    """Replaces a small text file (UTF-8), local or gs://, atomically and durably."""
    atomic_write_bytes(path, contents.encode("utf-8"))


def atomic_write_bytes(path: Path | epath.Path, contents: bytes) -> None:
    """Replaces a file, local or gs://, atomically and durably."""
    if is_object_store_path(path):  # objects appear only when complete
        path.write_bytes(contents)
        return
    path = Path(path)
    writing = temporary_name(path)
    try:
        writing.write_bytes(contents)
        atomic_rename(writing, path)
    except OSError:
        writing.unlink(missing_ok=True)
        raise


def write_json_with_digest(path: epath.Path, name: str, value: JsonValue) -> None:
    """Writes {name: value, "sha256": ...} atomically; see `read_json_with_digest`."""
    atomic_write_text(path, json.dumps({name: value, "sha256": _digest(value)}))


def read_json_with_digest(path: epath.Path, name: str) -> JsonValue:
    """Returns the value that `write_json_with_digest` wrote; None if there is no file.

    Raises:
      ValueError: The file is damaged.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["sha256"] != _digest(content[name]):
            raise ValueError("not what was written (SHA-256 differs)")
        return content[name]
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (LookupError, TypeError, RecursionError) as error:
        raise ValueError(str(error)) from error


def _digest(value: JsonValue) -> str:
    # Via JSON: a tuple that was written is read back as a list.
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


@contextlib.contextmanager
def lock(path: Path, log: Callable[[str], None]) -> Iterator[None]:
    """Holds a lock file, on a local or network disk, while the block runs; deletes it afterwards.

    Waits for another process that holds it.

    Args:
      path: The lock file.
      log: Called with a line if there is another holder.

    Raises:
      OSError: The file cannot be written.
    """
    lease = SoftFileLease(
        path, lease_duration=_LEASE_SECONDS, heartbeat_interval=_HEARTBEAT_SECONDS
    )
    try:
        acquired_lease = lease.acquire(timeout=0)
    except Timeout:
        owner = lease.owner
        holder = f"process {owner.pid} on {owner.hostname}" if owner else "another process"
        log(f"Waiting for {holder}, which prepares the same data set")
        acquired_lease = lease.acquire(poll_interval=0.2)
    with acquired_lease:
        yield
