"""Locks, files published whole, and which errors may pass."""

import contextlib
import errno
import os
import socket
import stat
import tempfile

import pytest

from MaxText.errors import UserError
from MaxText.storage import atomic
from MaxText.storage.atomic import atomic_rename, temporary_name
from MaxText.storage.errors import BadRecordError, ObjectStoreError, is_transient


def test_a_lock_says_who_holds_it(tmp_path):
    lock, lines, other = tmp_path / ".d.lock", [], contextlib.ExitStack()
    other.enter_context(atomic.lock(lock, print))
    with atomic.lock(lock, lambda line: (lines.append(line), other.close())):
        assert lock.exists()
    assert not lock.exists()
    (line,) = lines
    assert f"process {os.getpid()} on {socket.gethostname()}" in line


def test_no_damage_of_a_file_with_its_digest_is_read(tmp_path):
    """Every truncation and a flipped bit of every byte, as of the list of healthy checkpoints."""
    path = tmp_path / "healthy.json"
    assert atomic.read_json_with_digest(path, "healthy") is None
    atomic.write_json_with_digest(path, "healthy", [2, 100])
    whole = path.read_bytes()
    damaged = [whole[:length] for length in range(len(whole))]
    for index in range(len(whole)):
        flipped = bytearray(whole)
        flipped[index] ^= 1 << (index % 8)
        damaged.append(bytes(flipped))
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(ValueError):  # noqa: PT011
            atomic.read_json_with_digest(path, "healthy")


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077])
def test_modes_follow_the_umask(umask, tmp_path):
    descriptor, file = tempfile.mkstemp(dir=tmp_path)
    os.close(descriptor)
    private = {tmp_path / file: 0o666, tmp_path / tempfile.mkdtemp(dir=tmp_path): 0o777}
    before = os.umask(umask)
    try:
        for path in private:
            assert not stat.S_IMODE(path.stat().st_mode) & 0o077
            atomic.apply_umask(path)
        atomic.atomic_write_text(tmp_path / "text", "contents")
        private[tmp_path / "text"] = 0o666
        for path, whole in private.items():
            assert stat.S_IMODE(path.stat().st_mode) == whole & ~umask
        assert len(list(tmp_path.iterdir())) == len(private)
    finally:
        os.umask(before)


def test_contents_are_on_disk_before_a_file_has_its_name(tmp_path, monkeypatch):
    synced = []

    def fsync(descriptor):
        inode = os.fstat(descriptor).st_ino
        found = (tmp_path, *tmp_path.iterdir())
        synced.extend(path.name for path in found if path.stat().st_ino == inode)

    monkeypatch.setattr(os, "fsync", fsync)
    writing = temporary_name(tmp_path / "a")
    writing.write_text("contents")
    atomic_rename(writing, tmp_path / "a")
    assert synced == [writing.name, tmp_path.name]
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


class OfALibrary(Exception):
    __module__ = "gcsfs.retry"

    def __init__(self, code=None):
        super().__init__("from a bucket")
        self.code = code


def caused(error, cause):
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "local", "remote"),
    [
        (OSError(errno.EIO, ""), True, True),
        (OSError(errno.ENOSPC, ""), False, False),
        (OSError("no number: damaged contents, or a library behind a URL"), False, True),
        (FileNotFoundError(errno.ENOENT, ""), False, False),
        (ConnectionResetError(errno.ECONNRESET, ""), True, True),
        (OfALibrary(), False, True),
        (OfALibrary(503), False, True),
        (OfALibrary(403), False, False),
        (KeyError("a bug"), False, False),
        (UserError("a mistake"), False, False),
        (caused(UserError("cannot be read"), OSError(errno.ESTALE, "")), True, True),
        (caused(ObjectStoreError(errno.EINVAL, "refused"), OSError("no number")), False, False),
        (caused(BadRecordError("f", 0, "damaged"), ValueError("no number")), False, False),
    ],
)
def test_transient_errors(error, local, remote):
    assert (is_transient(error, remote=False), is_transient(error, remote=True)) == (local, remote)
