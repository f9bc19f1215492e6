"""Creates a run folder and locks it for one process at a time."""

import contextlib
import errno
import json
import sys
import threading
import uuid

from etils import epath
from filelock import BaseFileLock, FileLock, Timeout

from MaxText.errors import UserError
from MaxText.storage.errors import is_unavailable
from MaxText.storage.lease import InUseError, Lease, this_process
from MaxText.storage.paths import is_object_store_path, parse_path

_SECONDS_BEFORE_NOTICE = 3.0
_LOCK_FILE = ".lock"
_locks: list[Lease | BaseFileLock] = []


def create_run_folder(path: epath.PathLike) -> epath.Path:
    """Creates a writable run folder and returns its absolute path."""
    # Orbax requires absolute paths.
    folder = parse_path(str(path), "base_output_directory")
    if not is_object_store_path(path):
        folder = folder.resolve()
    # The gs:// client retries for almost a minute before it reports an error.
    line = f"waiting up to a minute for {folder} (base_output_directory) to respond\n"
    waiting = threading.Timer(_SECONDS_BEFORE_NOTICE, lambda: sys.stderr.write(line))
    waiting.start()
    try:
        check_writable(folder)
    except OSError as error:
        remedy = "Choose another base_output_directory (or run_name)"
        remedy += ", or free disk space there." if error.errno == errno.ENOSPC else "."
        if is_object_store_path(path):
            remedy += " Check the bucket's name and that this machine can reach it."
        if is_unavailable(error):
            remedy = "Rerun the command once it responds."
        raise UserError(f"cannot write to the run folder {folder}: {error}. {remedy}") from error
    finally:
        waiting.cancel()
    return folder


def check_writable(folder: epath.Path) -> None:
    """Creates a folder and a probe file in it; raises OSError on failure."""
    probe = folder / f".writeprobe_{uuid.uuid4().hex[:8]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_text("can this folder be written to?")
        probe.unlink()
    except OSError:
        raise
    except Exception as error:  # from the library behind a URL
        raise OSError(str(error)) from error


def lock_run_folder(run_folder: epath.Path, timeout: float = 3.0) -> None:
    """Locks a run folder until process 0 ends; by a lease in a bucket.

    File systems without locks stay unlocked. Waits `timeout` seconds for a killed owner to end.
    Raises UserError if another process holds it.
    """
    if is_object_store_path(run_folder):
        lease = Lease(f"{run_folder}/{_LOCK_FILE}", this_process())
        lease.acquire()
        _locks.append(lease)
        return
    path = run_folder / _LOCK_FILE
    lock = FileLock(path, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire(timeout=timeout)
    except Timeout:
        owner = None  # unless the file says
        with contextlib.suppress(ValueError):
            owner = json.loads(path.read_bytes())
        raise InUseError(run_folder, owner) from None
    except PermissionError:
        raise
    except OSError:
        return  # the file system has no locks
    _locks.append(lock)
    path.write_text(json.dumps(this_process()))


def unlock_run_folder() -> None:
    """Releases the lock, so that one process can train several runs."""
    while _locks:
        _locks.pop().release()
