"""Lets the n-th file operation below a folder fail, in the process of a program.

    python -m tests.storage.failing_calls FOLDER NUMBER TIMES CALLS PROGRAM ARGUMENT...

The operations opened, written, synced, renamed and made below FOLDER are counted from 0. NUMBER and
the TIMES - 1 after it (0: all of them) fail with EIO; each is a line of the file CALLS, which must
be elsewhere. Threads make their operations in any order, so NUMBER may also be a regular
expression: then the first TIMES operations that it matches fail. Operations of C++ libraries are
not seen.
"""

import builtins
import errno
import functools
import io
import os
import re
import runpy
import sys
import threading

from tests.house.sources import REPOSITORY


class FailingCalls:
    """Counts file operations below a folder and lets some of them fail."""

    def __init__(self, folder: str, number: str, times: int, calls: str):
        self._folder = os.path.realpath(folder)
        is_number = re.fullmatch(r"-?\d+", number)
        self._number = int(number) if is_number else 0
        self._pattern = re.compile("" if is_number else number)
        self._times = times
        self._count = 0
        self._lock = threading.Lock()
        self._calls = os.open(calls, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._write = os.write

    def check(self, operation: str, path) -> None:
        """Counts an operation; raises OSError if it is to fail."""
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        path = os.path.abspath(os.fsdecode(path))
        if not f"{path}/".startswith(f"{self._folder}/"):
            return
        call = f"{operation} {path}"
        self._write(self._calls, f"{call}\n".encode())
        if not self._pattern.match(call):
            return
        with self._lock:
            number = self._count
            self._count += 1
        after = number - self._number
        if self._number >= 0 and after >= 0 and (self._times == 0 or after < self._times):
            # As the operating system does: a write or sync does not say which file it was.
            named = () if operation in ("write", "fsync") else (path,)
            raise OSError(errno.EIO, os.strerror(errno.EIO), *named)

    def install(self) -> None:
        """Replaces the functions of this process."""
        for name in ("open", "rename", "replace", "mkdir"):
            setattr(os, name, self._checked(name, getattr(os, name)))
        for name in ("write", "fsync"):
            setattr(os, name, self._checked(name, getattr(os, name)))
        os.sendfile = self._checked("write", os.sendfile)
        builtins.open = io.open = self._open_function(io.open)

    def _checked(self, operation, function):
        @functools.wraps(function)
        def checked(path, *arguments, **keywords):
            self.check(operation, path)
            return function(path, *arguments, **keywords)

        return checked

    def _open_function(self, real_open):
        calls = self

        class CheckedFile(io.FileIO):
            def write(self, content):
                calls.check("write", self.fileno())
                return super().write(content)

        def checked_open(
            file, mode="r", buffering=-1, encoding=None, errors=None, newline=None, *rest, **more
        ):
            if isinstance(file, int) or rest or more:
                return real_open(file, mode, buffering, encoding, errors, newline, *rest, **more)
            self.check("open", file)
            if not {*mode} & {*"wax+"}:
                return real_open(file, mode, buffering, encoding, errors, newline)
            raw = CheckedFile(os.fspath(file), mode.replace("b", "").replace("t", ""))
            if buffering == 0:
                return raw
            buffered = (io.BufferedRandom if "+" in mode else io.BufferedWriter)(raw)
            if "b" in mode:
                return buffered
            return io.TextIOWrapper(
                buffered, encoding, errors, newline, line_buffering=buffering == 1
            )

        return checked_open


def main() -> None:
    folder, number, times, calls, program, *arguments = sys.argv[1:]
    FailingCalls(folder, number, int(times), calls).install()
    path = REPOSITORY / "MaxText" / program
    sys.argv = [str(path), *arguments]
    sys.path[0] = str(path.parent)
    runpy.run_path(str(path), run_name="__main__")


if __name__ == "__main__":
    main()
