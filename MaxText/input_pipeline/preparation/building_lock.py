"""Keeps two processes from preparing the same data set at once: `hold`.

The kernel holds a file lock for each process and drops it when the process dies, however it dies.
Between machines that share a folder such locks may not work, so the file also names its holder,
who touches it again and again as a sign of life. Imports no jax.
"""

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from MaxText.meanwhile import meanwhile

_SIGN_OF_LIFE_SECONDS = 20.0
# A holder on another machine that gave no sign for so long is taken for dead. Far above the
# interval, because clocks of machines differ and network folders show changes late.
_SILENCE_SECONDS = 300.0
_POLL_SECONDS = 0.2


class _Holder(NamedTuple):
    host: str
    process: int


@contextlib.contextmanager
def hold(path: Path, show: Callable[[str], None]) -> Iterator[None]:
    """Waits until no other process holds `path`, then holds it; the file is gone afterwards.

    Not reentrant: a process that holds it and asks again waits for itself.

    Args:
      path: of the lock; its folder exists.
      show: takes one line when there is somebody to wait for.

    Raises:
      OSError: the file cannot be written.
    """
    us = _Holder(socket.gethostname(), os.getpid())
    waiting = False
    while (descriptor := _try_to_hold(path, us)) is None:
        if not waiting:
            waiting = True
            show(f"Waiting for {_describe(path)}, which prepares the same data set")
        time.sleep(_POLL_SECONDS)

    def give_sign_of_life() -> None:
        with contextlib.suppress(OSError):
            os.utime(path)

    try:
        with meanwhile(give_sign_of_life, _SIGN_OF_LIFE_SECONDS, "sign of life"):
            yield
    finally:
        # Removed while it is held: nobody can be given a lock on a file that has no name.
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _try_to_hold(path: Path, us: _Holder) -> int | None:
    """The descriptor of the held file, or None while another process holds it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    held = False
    try:
        locked = True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return None
            locked = False  # This file system has no locks.
        try:
            same_file = os.path.samestat(os.fstat(descriptor), os.stat(path))
        except FileNotFoundError:
            same_file = False
        # Its last holder removed it between our opening and locking it.
        if not same_file or _is_alive(path, us, locked):
            return None
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(us).encode(), 0)
        held = True
        return descriptor
    finally:
        if not held:
            os.close(descriptor)


def _is_alive(path: Path, us: _Holder, locked: bool) -> bool:
    """Whether the holder that the file names still works, given whether we could lock it."""
    holder = _read(path)
    if holder is None:
        return False
    if holder.host == us.host:
        return not locked and holder.process != us.process and _process_exists(holder.process)
    with contextlib.suppress(OSError):
        return time.time() - path.stat().st_mtime < _SILENCE_SECONDS
    return False


def _read(path: Path) -> _Holder | None:
    with contextlib.suppress(OSError, ValueError, TypeError):
        host, process = json.loads(path.read_text(encoding="utf-8"))
        return _Holder(str(host), int(process))
    return None


def _describe(path: Path) -> str:
    holder = _read(path)
    return f"process {holder.process} on {holder.host}" if holder else "another process"


def _process_exists(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
