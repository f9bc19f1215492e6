"""Locks a run folder, so that one process at a time owns it.

The kernel drops the lock of a dead process, so a leftover lock file is free.
"""

import datetime
import errno
import fcntl
import json
import os
import socket
import time
from typing import Any

from etils import epath

from MaxText.errors import UserError
from MaxText.storage.lease import Lease, described
from MaxText.storage.paths import is_bucket

_FILE = ".lock"
_leases: list[Lease] = []
_descriptors: list[int] = []  # of locked files; closing one releases its lock


def hold(run_folder: epath.Path, patience: float = 3.0) -> None:
    """Locks a run folder until this process (process 0) ends; by a lease in a bucket.

    File systems without locks stay unlocked. Waits `patience` seconds for an owner that was killed.
    Raises UserError if another process holds it.
    """
    started = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    holder = {"host": socket.gethostname(), "process": os.getpid(), "started": started}
    if is_bucket(run_folder):
        lease = Lease(f"{run_folder}/{_FILE}", holder)
        lease.acquire()
        _leases.append(lease)
        return
    path = run_folder / _FILE
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                os.close(descriptor)
                return  # a file system without locks
        if time.monotonic() < deadline:
            time.sleep(0.1)
            continue
        other = described(_read(descriptor))
        os.close(descriptor)
        raise UserError(
            f"the run folder {run_folder} is in use by {other}. Wait for it, stop it, or choose "
            "another run_name."
        )
    _descriptors.append(descriptor)
    os.truncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(holder).encode(), 0)


def release() -> None:
    """Releases the lock, for a process that trains several runs in turn."""
    while _leases:
        _leases.pop().release()
    _close()


def _close() -> None:
    while _descriptors:
        os.close(_descriptors.pop())


# A child that outlives this process must not keep the lock.
os.register_at_fork(after_in_child=_close)


def _read(descriptor: int) -> Any:
    try:
        return json.loads(os.pread(descriptor, 1000, 0))
    except ValueError:
        return None
