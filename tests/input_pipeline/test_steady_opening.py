"""Storage that fails while a run opens its data, and works again."""

import builtins
import errno
import os
import time

import pytest

from MaxText.errors import UserError
from MaxText.input_pipeline.streams.bad_record import BadRecord
from MaxText.input_pipeline.streams.passing import may_pass

from .faults import (
    KINDS,
    assert_undisturbed,
    kept_files,  # noqa: F401
    opened,
    undisturbed,
)
from .test_loader import take


class Storage:
    """Counts looks at what lies below a folder, and lets some of them fail."""

    def __init__(self, folder, monkeypatch):
        self.calls, self.failing, self.number = 0, range(0), errno.EIO
        self._folder = str(folder)
        for place, name in (
            (os, "stat"), (os, "open"), (os, "scandir"), (os, "listdir"), (builtins, "open"),
        ):  # fmt: skip
            monkeypatch.setattr(place, name, self._counted(getattr(place, name)))

    def fail(self, calls, number=errno.EIO):
        """Lets these of the next calls fail, counted from 0."""
        self.calls, self.failing, self.number = 0, calls, number

    def _counted(self, real):
        def call(path, *arguments, **options):
            if str(path).startswith(self._folder):
                self.calls += 1
                if self.calls - 1 in self.failing:
                    raise OSError(self.number, os.strerror(self.number), str(path))
            return real(path, *arguments, **options)

        return call


@pytest.mark.parametrize("kept", KINDS, indirect=True)
def test_whichever_look_fails_the_data_are_the_same(kept, monkeypatch):
    folder, _, keys = kept
    expected = undisturbed(folder, keys, 6)
    storage = Storage(folder, monkeypatch)
    keys = keys | {"on_bad_record": "skip"}  # which must not take it for damage
    position, tried_again = None, 0
    for failing in range(200):
        cache = {"data_cache_dir": f"{keys['data_cache_dir']}-{failing}"}
        # The first one fails never; it says what is to be expected.
        storage.fail([failing - 1])
        lines = []
        iterator = opened(folder, keys | cache, lines.append)
        position = position or (iterator.position, iterator.tokenizer_folder)
        assert (iterator.position, iterator.tokenizer_folder) == position
        if messages := iterator.incidents.drain():
            tried_again += 1
            assert f"{folder} could not be opened: " in messages[0]
            assert "Try 2 of 6 in 0 s." in messages[0]
            assert messages[1].startswith(f"{folder} was opened at try 2, after ")
            assert [line for line in lines if line in messages] == messages
        if failing % 8 == 1:
            storage.fail([])
            assert_undisturbed(take(iterator, 6), expected)
        if failing > storage.calls:
            break
    else:
        pytest.fail("there is no end of looks")
    assert tried_again > 3


@pytest.mark.parametrize("kept", ["tfrecord"], indirect=True)
def test_a_failure_that_lasts_ends_the_run_with_a_message(kept, monkeypatch):
    folder, _, keys = kept
    storage = Storage(folder, monkeypatch)
    storage.fail(range(1000), errno.ESTALE)
    lines = []
    with pytest.raises(UserError, match=r"could not be opened after 3 tries in .* storage"):
        opened(folder, keys | {"data_read_retries": 2}, lines.append)
    assert len(lines) == 2


@pytest.mark.parametrize("kept", ["tfrecord"], indirect=True)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda files: [file.unlink() for file in files], "without files"),
        (lambda files: files[0].write_bytes(files[0].read_bytes()[:50]), "at byte"),
    ],
)
def test_a_mistake_is_said_at_once(kept, change, message, monkeypatch):
    folder, files, keys = kept
    monkeypatch.setattr(time, "sleep", pytest.fail)
    change(files)
    lines = []
    with pytest.raises(UserError, match=message):
        opened(folder, keys, lines.append)
    with pytest.raises(UserError, match="no such file"):
        opened(folder.parent / "nothing", keys, lines.append)
    assert not any("could not be opened" in line for line in lines)


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
        (PermissionError(errno.EACCES, ""), False, False),
        (ConnectionResetError(errno.ECONNRESET, ""), True, True),
        (TimeoutError(), True, True),
        (OfALibrary(), False, True),
        (OfALibrary(503), False, True),
        (OfALibrary(429), False, True),
        (OfALibrary(403), False, False),
        (KeyError("ours"), False, False),
        (UserError("a mistake"), False, False),
        (caused(UserError("cannot be read"), OSError(errno.ESTALE, "")), True, True),
        (caused(BadRecord("f", 0, "damaged"), ValueError("no number")), False, False),
    ],
)
def test_what_may_pass(error, local, remote):
    assert (may_pass(error, remote=False), may_pass(error, remote=True)) == (local, remote)
