"""Run folders: created, checked for write access, and locked for one process at a time.

A run folder on a disk is locked with a file lock. In a bucket the lock is an object that names the
owner, created only if it is not there. A second start that finds it overwrites it with a claim. A
live owner, which reads the object every few seconds, restores it, and the second start is refused;
a dead owner cannot, and loses the folder.
"""

import atexit
import contextlib
import datetime
import errno
import json
import os
import socket
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from etils import epath
from filelock import BaseFileLock, FileLock, Timeout

from MaxText.errors import UserError
from MaxText.exit_codes import USER_ERROR
from MaxText.storage.file_access import file_system
from MaxText.storage.paths import check_checkpoint_path, is_object_store_path, parse_path
from MaxText.value_types import JsonValue

_SECONDS_BEFORE_NOTICE = 3.0
_LOCK_FILE = ".lock"
# Error numbers of file systems that have no locks.
_WITHOUT_LOCKS = (
    errno.ENOSYS,
    errno.ENOLCK,
    errno.EOPNOTSUPP,
    errno.ENOTSUP,
    errno.EINVAL,
    errno.ENOTTY,
)
_locks: "list[BucketLock | BaseFileLock]" = []


def create_run_folder(path: epath.PathLike) -> epath.Path:
    """Creates a run folder and checks that it is writable.

    Args:
      path: base_output_directory/run_name.

    Returns:
      The absolute path.

    Raises:
      UserError: The folder cannot be written.
    """
    # Orbax requires absolute paths.
    folder = parse_path(str(path), "base_output_directory")
    if not is_object_store_path(path):
        folder = folder.resolve()
    check_checkpoint_path(folder, "run_name or base_output_directory")
    # The gs:// client retries for almost a minute before it reports an error.
    line = f"waiting up to a minute for {folder} (base_output_directory) to respond\n"
    waiting = threading.Timer(_SECONDS_BEFORE_NOTICE, lambda: sys.stderr.write(line))
    waiting.start()
    try:
        check_writable(folder)
    except OSError as error:
        raise UserError(
            f"cannot write to the run folder {folder}: {error}. Check that its disk has space, or "
            "that its bucket exists and responds; or choose another base_output_directory."
        ) from error
    finally:
        waiting.cancel()
    return folder


def check_writable(folder: epath.Path) -> None:
    """Creates a folder, and writes and deletes a probe file in it.

    Raises:
      OSError: One of these fails.
    """
    probe = folder / f".writeprobe_{uuid.uuid4().hex[:8]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_text("can this folder be written to?", encoding="utf-8")
        probe.unlink()
    except OSError:
        raise
    except Exception as error:  # from the library behind a URL
        raise OSError(str(error)) from error


def lock_run_folder(run_folder: epath.Path, timeout: float = 3.0) -> None:
    """Locks a run folder until this process ends or calls `unlock_run_folder`.

    Call it in process 0 of a run. A folder on a file system without locks stays unlocked.

    Args:
      run_folder: The folder, on a disk or in a bucket.
      timeout: Seconds to wait for a killed owner on the same disk to end.

    Raises:
      InUseError: Another process holds the lock.
    """
    if is_object_store_path(run_folder):
        bucket_lock = BucketLock(f"{run_folder}/{_LOCK_FILE}")
        bucket_lock.acquire()
        _locks.append(bucket_lock)
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
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise
        return
    _locks.append(lock)
    path.write_text(json.dumps(_this_process()), encoding="utf-8")


def unlock_run_folder() -> None:
    """Releases the lock, so that one process can train several runs."""
    while _locks:
        _locks.pop().release()


class BucketLock:
    """An exclusive lock: an object in a bucket that names its owner.

    The object's content is {"host", "process", "process_space", "started", "token", "is_claim"}.
    The lock is released at program exit at the latest.
    """

    def __init__(self, url: str, *, check_seconds: float = 5.0, answer_seconds: float = 30.0):
        """Prepares the lock; `acquire` writes it.

        Args:
          url: URL of the object.
          check_seconds: Period at which an owner reads the object.
          answer_seconds: Time in which a live owner answers a claim.
        """
        self._url = url
        self._check_seconds = check_seconds
        self._answer_seconds = answer_seconds
        self._holder = _this_process() | {"token": uuid.uuid4().hex}
        self._over = threading.Event()
        self._storage, self._path = file_system(url)

    def acquire(self) -> None:
        """Acquires the lock, and answers claims in a background thread until `release`.

        Raises:
          InUseError: Another owner is alive.
        """
        while not self._create():
            holder = self._read()
            if holder is None:
                continue  # released just now
            if not _is_dead_here(holder):
                self._claim(holder)
            self._write()
            break
        threading.Thread(target=self._answer_claims, daemon=True, name="run folder lock").start()
        atexit.register(self.release)

    def release(self) -> None:
        """Stops answering, and deletes the object if it is still this lock's. Idempotent."""
        if not self._over.is_set():
            self._over.set()
            if self._is_own(self._read()):
                self._storage.rm_file(self._path)

    def _claim(self, holder: dict[str, Any]) -> None:
        """Claims the lock of another owner; returns if that one does not answer.

        Raises:
          InUseError: The owner restored its entry.
        """
        sys.stderr.write(
            f"Waiting up to {self._answer_seconds:g} s for an answer of {describe_holder(holder)}, "
            f"which owns {os.path.dirname(self._url)}\n"
        )
        self._write(is_claim=True)
        deadline = time.monotonic() + self._answer_seconds
        while time.monotonic() < deadline:
            self._over.wait(self._check_seconds / 5)
            current_holder = self._read()
            if current_holder is not None and not self._is_own(current_holder):
                raise InUseError(os.path.dirname(self._url), current_holder)

    def _create(self) -> bool:
        """Returns whether the object was not there and names this process now."""
        try:
            self._write(mode="create")
        except OSError as error:
            holder = self._read()
            if holder is None and not isinstance(error, FileExistsError):
                raise  # nothing is there, and it cannot be written
            # Also true if the response to a successful first try was lost.
            return self._is_own(holder)
        return True

    def _write(self, *, is_claim: bool = False, mode: str = "overwrite") -> None:
        content = json.dumps(self._holder | {"is_claim": is_claim})
        self._storage.pipe_file(self._path, content.encode(), mode=mode)

    def _read(self) -> dict[str, Any] | None:
        try:
            return json.loads(self._storage.cat_file(self._path))
        except FileNotFoundError:
            return None
        except ValueError:
            return {}  # damaged: an unknown owner

    def _is_own(self, holder: dict[str, Any] | None) -> bool:
        return holder is not None and holder.get("token") == self._holder["token"]

    def _answer_claims(self) -> None:
        while not self._over.wait(self._check_seconds):
            try:
                holder = self._read()
                if self._is_own(holder):
                    continue
                if holder and not holder.get("is_claim"):
                    break
                if not self._over.is_set():
                    self._write()
            except Exception:  # storage fails for a while: try again next time
                continue
        if not self._over.is_set():
            # This process or its storage was suspended for longer than a claim waits.
            sys.stderr.write(
                f"error: {os.path.dirname(self._url)} was taken over by {describe_holder(holder)}, "
                "whose claim this process did not answer in time. Exiting, so that only one "
                "process writes there.\n"
            )
            sys.stderr.flush()
            os._exit(USER_ERROR)


def describe_holder(holder: JsonValue) -> str:
    """Returns a phrase for the owner of a lock, from the lock's content, which may be damaged."""
    try:
        return f"process {holder['process']} on {holder['host']}, started {holder['started']}"
    except (LookupError, TypeError):
        return "another process"


def _this_process() -> dict[str, Any]:
    started = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    return {
        "host": socket.gethostname(),
        "process": os.getpid(),
        "process_space": _process_space(),
        "started": started,
    }


def _process_space() -> str:
    """Returns what two processes share if each sees the other's process id; "" if unknown.

    Containers of one machine may have its host name, and process ids of their own.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # another system than Linux
        return ""


class InUseError(UserError):
    """A run folder is in use by another process."""

    def __init__(self, run_folder: object, holder: JsonValue):
        super().__init__(
            f"the run folder {run_folder} is in use by {describe_holder(holder)}. Wait for it, "
            "stop it, or choose another run_name."
        )


def _is_dead_here(holder: dict[str, Any]) -> bool:
    space = _process_space()
    if not space or holder.get("process_space") != space:
        return False
    if not isinstance(holder.get("process"), int):
        return False
    try:
        os.kill(holder["process"], 0)
    except OSError as error:
        return isinstance(error, ProcessLookupError)
    return False
