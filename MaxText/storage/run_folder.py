"""Run folders: created, checked for write access, and locked for one process at a time.

A run folder on a disk is locked with a file lock. In a bucket the lock is a lease: an object that
its owner rewrites every few seconds (a heartbeat). Clocks of machines are never compared; a lease
that does not change for `timeout_seconds` belongs to a dead owner.
"""

import atexit
import contextlib
import datetime
import errno
import json
import math
import os
import socket
import sys
import threading
import time
import uuid
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
_locks: "list[Lease | BaseFileLock]" = []
_ended: set[str] = set()  # tokens of this process without a heartbeat, maybe still in a bucket


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
        lease = Lease(f"{run_folder}/{_LOCK_FILE}")
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


class Lease:
    """An exclusive lease: an object in a bucket that its owner renews with a heartbeat.

    The object's content is {"host", "process", "started", "token", "renewals"}. The lease is
    released at program exit at the latest.
    """

    def __init__(
        self,
        url: str,
        *,
        renewal_seconds: float = 5.0,
        timeout_seconds: float = 30.0,
        takeover_seconds: float = 2.0,
        is_advisory: bool = False,
    ):
        """Prepares the lease; `acquire` writes it.

        Args:
          url: URL of the object.
          renewal_seconds: Period of the heartbeat.
          timeout_seconds: Time without a heartbeat after which an owner counts as dead.
          takeover_seconds: Time to wait after a takeover for a competing one.
          is_advisory: An advisory lease is silent, and its loss does not end the process.
        """
        self._is_advisory = is_advisory
        self._renewal_seconds = renewal_seconds
        self._timeout_seconds = timeout_seconds
        self._takeover_seconds = takeover_seconds
        self._url = url
        self._holder = _this_process()
        self._token = uuid.uuid4().hex
        self._renewals = 0
        self._watched_holder = ""  # whose heartbeat a line on stderr says we wait for
        self._over = threading.Event()
        self._storage, self._path = file_system(url)

    def acquire(self) -> None:
        """Acquires the lease and renews it in a background thread until `release`.

        Raises:
          InUseError: Another owner is alive.
        """
        while not self._create():
            holder = self._read()
            if holder is None:
                continue  # released just now
            is_dead = holder.get("token") in _ended or _is_dead_here(holder)
            if is_dead or not self._is_renewed(holder):
                self._write()
                # Only other hosts take so long to see that a lease has expired.
                self._over.wait(min(self._takeover_seconds, 2.0 if is_dead else math.inf))
            current = self._read() or {}
            if current.get("token") == self._token:
                break
        threading.Thread(target=self._renew, daemon=True, name="lease").start()
        atexit.register(self.release)

    def release(self) -> None:
        """Stops the heartbeat and deletes the object if it is still this lease's. Idempotent."""
        if not self._over.is_set():
            self._over.set()
            _ended.add(self._token)
            holder = self._read()
            if holder is not None and holder.get("token") == self._token:
                self._storage.rm_file(self._path)

    def _is_renewed(self, holder: dict[str, Any]) -> bool:
        """Watches another owner's lease for `timeout_seconds`.

        Returns:
          False if it expired; True if it was released meanwhile.

        Raises:
          InUseError: The owner renewed it.
        """
        description = describe_holder(holder)
        if not self._is_advisory and description != self._watched_holder:
            self._watched_holder = description
            sys.stderr.write(
                f"Waiting up to {self._timeout_seconds:g} s for a heartbeat of {description} "
                f"({self._url})\n"
            )
        deadline = time.monotonic() + self._timeout_seconds
        while time.monotonic() < deadline:
            self._over.wait(self._renewal_seconds / 5)
            current_holder = self._read()
            if current_holder is None:
                return True  # released: try to create it
            if current_holder != holder:
                raise InUseError(os.path.dirname(self._url), current_holder)
        return False

    def _create(self) -> bool:
        try:
            self._write(mode="create")
        except OSError as error:
            holder = self._read()
            if holder is None and not isinstance(error, FileExistsError):
                raise  # nothing is there, and it cannot be written
            # Also true if the response to a successful first try was lost.
            return holder is not None and holder.get("token") == self._token
        return True

    def _write(self, mode: str = "overwrite") -> None:
        facts = {**self._holder, "token": self._token, "renewals": self._renewals}
        self._storage.pipe_file(self._path, json.dumps(facts).encode(), mode=mode)

    def _read(self) -> dict[str, Any] | None:
        try:
            return json.loads(self._storage.cat_file(self._path))
        except FileNotFoundError:
            return None
        except ValueError:
            return {}  # damaged: no owner

    def _renew(self) -> None:
        while not self._over.wait(self._renewal_seconds):
            try:
                holder = self._read()
                if holder is not None and holder.get("token") not in (self._token, None):
                    break
                self._renewals += 1
                self._write()
            except Exception:  # storage fails for a while: try again next time
                continue
        if not (self._is_advisory or self._over.is_set()):
            sys.stderr.write(
                f"error: {os.path.dirname(self._url)} was taken over by {describe_holder(holder)} "
                "while this process sent no heartbeat. Exiting, so that only one process writes "
                "there.\n"
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
    return {"host": socket.gethostname(), "process": os.getpid(), "started": started}


class InUseError(UserError):
    """A run folder is in use by another process."""

    def __init__(self, run_folder: object, holder: JsonValue):
        super().__init__(
            f"the run folder {run_folder} is in use by {describe_holder(holder)}. Wait for it, "
            "stop it, or choose another run_name."
        )


def _is_dead_here(holder: dict[str, Any]) -> bool:
    if holder.get("host") != socket.gethostname() or not isinstance(holder.get("process"), int):
        return False
    try:
        os.kill(holder["process"], 0)
    except OSError as error:
        return isinstance(error, ProcessLookupError)
    return False
