"""Run folders: created, probed, and locked for one process at a time.

In a bucket the lock is a lease, an object with a heartbeat. Clocks are never compared; a lease
unchanged for `timeout_seconds` belongs to a dead owner.
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
    """Creates a writable run folder and returns its absolute path."""
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
    """Creates a folder and a probe file in it; raises OSError on failure."""
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
    """Locks a run folder until process 0 ends; by a lease in a bucket.

    File systems without locks stay unlocked. Waits `timeout` seconds for a killed owner to end.
    Raises UserError if another process holds it.
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
    """An exclusive lease on an object, released at program exit."""

    def __init__(
        self,
        url: str,
        *,
        renewal_seconds: float = 5.0,
        timeout_seconds: float = 30.0,
        takeover_seconds: float = 2.0,
        is_advisory: bool = False,
    ):
        """Waits `takeover_seconds` after a takeover for a competing one.

        An advisory lease is silent, and its loss does not end the process.
        """
        self._is_advisory = is_advisory
        self._renewal_seconds = renewal_seconds
        self._timeout_seconds = timeout_seconds
        self._takeover_seconds = takeover_seconds
        self._url, self._holder, self._token = url, _this_process(), uuid.uuid4().hex
        self._renewals = 0
        self._watched = ""
        self._over = threading.Event()
        self._storage, self._path = file_system(url)

    def acquire(self) -> None:
        """Acquires and keeps the lease; InUseError if its owner is alive."""
        while not self._create():
            found = self._read()
            if found is None:
                continue  # released just now
            is_dead = found.get("token") in _ended or _is_dead_here(found)
            if is_dead or not self._is_renewed(found):
                self._write()
                # Only other hosts take so long to see that a lease has expired.
                self._over.wait(min(self._takeover_seconds, 2.0 if is_dead else math.inf))
            current = self._read() or {}
            if current.get("token") == self._token:
                break
        threading.Thread(target=self._renew, daemon=True, name="lease").start()
        atexit.register(self.release)

    def release(self) -> None:
        if not self._over.is_set():
            self._over.set()
            _ended.add(self._token)
            found = self._read()
            if found is not None and found.get("token") == self._token:
                self._storage.rm_file(self._path)

    def _is_renewed(self, found: dict[str, Any]) -> bool:
        """Watches a lease; False once it expires, InUseError if renewed."""
        if not self._is_advisory and (who := describe_holder(found)) != self._watched:
            seconds = f"{self._timeout_seconds:g} s"
            self._watched = who
            sys.stderr.write(f"Waiting up to {seconds} for a heartbeat of {who} ({self._url})\n")
        until = time.monotonic() + self._timeout_seconds
        while time.monotonic() < until:
            self._over.wait(self._renewal_seconds / 5)
            now = self._read()
            if now is None:
                return True  # released: try to create it
            if now != found:
                raise InUseError(os.path.dirname(self._url), now)
        return False

    def _create(self) -> bool:
        try:
            self._write(mode="create")
        except OSError as error:
            found = self._read()
            if found is None and not isinstance(error, FileExistsError):
                raise  # nothing is there, and it cannot be written
            # Also true if the response to a successful first try was lost.
            return found is not None and found.get("token") == self._token
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
                found = self._read()
                if found is not None and found.get("token") not in (self._token, None):
                    break
                self._renewals += 1
                self._write()
            except Exception:  # storage fails for a while: try again next time
                continue
        if not (self._is_advisory or self._over.is_set()):
            sys.stderr.write(
                f"error: {os.path.dirname(self._url)} was taken over by {describe_holder(found)} "
                "while this process sent no heartbeat. Exiting, so that only one process writes "
                "there.\n"
            )
            sys.stderr.flush()
            os._exit(USER_ERROR)


def describe_holder(holder: Any) -> str:
    try:
        return f"process {holder['process']} on {holder['host']}, started {holder['started']}"
    except (LookupError, TypeError):
        return "another process"


def _this_process() -> dict[str, Any]:
    started = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    return {"host": socket.gethostname(), "process": os.getpid(), "started": started}


class InUseError(UserError):
    """A run folder is in use by another process."""

    def __init__(self, run_folder: object, holder: Any):
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
