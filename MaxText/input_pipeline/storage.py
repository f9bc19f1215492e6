"""Finding and reading files, on local disks and behind URLs that fsspec knows, such as gs://."""

import abc
import collections
import errno
import functools
import glob
import hashlib
import itertools
import json
import os
import re
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO, TypeVar, cast

import fsspec

from MaxText.buckets.paths import prepare_clients
from MaxText.errors import UserError
from MaxText.input_pipeline.data_errors import BadRecord, UnreadableFile

_Found = TypeVar("_Found")

_BRACES = re.compile(r"\{([^{}]*)\}")
_NUMBERS = re.compile(r"(\d+)\.\.(\d+)")

# Open files at once; systems allow 256 or more per process, and a data set may have thousands.
_MOST_OPEN = 128

_REQUESTS_AT_ONCE = 32

# What a scan reads at a time: large against the delay of one request to a bucket.
_BLOCK_BYTES = 8 << 20


def is_url(path: str) -> bool:
    """Whether a path must be read through fsspec; file:// does not count."""
    return "://" in path and not path.startswith("file://")


def local_path(path: str) -> str:
    """A path as the operating system takes it: without file://, with the home folder for ~."""
    return os.path.expanduser(path.removeprefix("file://"))


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """Sorts numbers inside names by value: shard-2 before shard-10."""
    parts = re.split(r"(\d+)", name)
    return [(1, int(part), part) if part.isdecimal() else (0, 0, part) for part in parts]


def list_files(location: str, key: str) -> list[str]:
    """The files that one location names.

    Args:
      location: a file; a folder (all files below it without hidden ones); a pattern with *, ?, []
        and **; braces {000..127} or {a,b} in any of them; or @FILE, a text file with one name or
        URL per line. Local or a URL.
      key: configuration key it came from, for messages.

    Returns:
      Paths or URLs in natural order; those of an @FILE as they are listed, those of braces in
      the order of the braces.

    Raises:
      UserError: nothing is there, a listed file is missing, or it cannot be looked at.
    """
    if not location:
        raise UserError(f"{key} is empty. Name a file, a folder or a pattern.")
    try:
        if location.startswith("@"):
            return _listed(location[1:], key)
        if not is_url(location) and status_of(local_path(location)) is not None:
            return _matches(location, key)  # whatever characters its name has
        files = []
        for name in _expand_braces(location):
            found = _matches(name, key)
            if not found:
                part = "" if name == location else f" ({name})"
                raise UserError(
                    f"{key}={location}: no such file{part}. Check the path; a pattern is given in "
                    "quotes, and ** stands for folders of any depth."
                )
            files += found
        return files
    except OSError as error:
        raise UserError(
            f"{key}={location} cannot be looked at ({_reason(error)}). Check the path and that you "
            "may read it."
        ) from error


def status_of(path: str | os.PathLike[str]) -> os.stat_result | None:
    """What is at a local path, None where nothing can be; is_file and the like hide failures.

    Raises:
      OSError: it cannot be looked at, or storage fails.
    """
    try:
        return os.stat(path)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENAMETOOLONG):
            return None
        raise


def is_file(path: str | os.PathLike[str]) -> bool:
    """Whether a local path is that of a file; raises as status_of."""
    status = status_of(path)
    return status is not None and stat.S_ISREG(status.st_mode)


def is_there(path: str) -> bool:
    """Whether a path is that of a file, local or a URL.

    Raises:
      OSError: it cannot be looked at, or storage fails.
      UserError: as file_system.
    """
    if not is_url(path):
        return is_file(local_path(path))
    system, name = file_system(path)
    return system.isfile(name)


def _listed(list_file: str, key: str) -> list[str]:
    with open_stream(list_file) as stream:
        content = stream.read()
    try:
        lines = [line.strip() for line in content.decode().splitlines()]
    except UnicodeDecodeError as error:
        raise UserError(
            f"{key}=@{list_file} is no text file ({error}). Name a file with one path per line."
        ) from error
    files = [line for line in lines if line and not line.startswith("#")]
    if not files:
        raise UserError(f"{key}=@{list_file} lists no file. Write one name per line into it.")
    for file in files:
        if not is_url(file) and not is_file(local_path(file)):
            raise UserError(f"{key}=@{list_file} lists {file}, which is no file. Correct the list.")
    return files


def _expand_braces(pattern: str) -> list[str]:
    parts = _BRACES.split(pattern)
    # split() gives text and contents of braces in turn.
    choices = [_choices(part) if number % 2 else [part] for number, part in enumerate(parts)]
    return ["".join(choice) for choice in itertools.product(*choices)]


def _choices(inside: str) -> list[str]:
    numbers = _NUMBERS.fullmatch(inside)
    if not numbers:
        return inside.split(",")
    first, last = numbers.groups()
    width = len(first) if first.startswith("0") or len(first) == len(last) else 0
    return [f"{number:0{width}d}" for number in range(int(first), int(last) + 1)]


def _matches(name: str, key: str) -> list[str]:
    if is_url(name):
        return _remote_matches(name, key)
    name = local_path(name)
    status = status_of(name)
    if status is not None and stat.S_ISDIR(status.st_mode):
        found = [
            os.path.join(folder, file)
            for folder, folders, files in os.walk(name, onerror=_raise)
            for file in files
            if not _hidden(os.path.relpath(os.path.join(folder, file), name))
        ]
        if not found:
            raise UserError(f"{key}={name} is a folder without files. Name one that holds data.")
        return sorted(found, key=natural_key)
    if status is not None:
        return [name]
    return sorted(filter(is_file, glob.glob(name, recursive=True)), key=natural_key)


def _raise(error: OSError) -> None:
    raise error


def _hidden(relative: str) -> bool:
    return any(part.startswith(".") for part in relative.replace(os.sep, "/").split("/"))


def _remote_matches(url: str, key: str) -> list[str]:
    system, path = file_system(url)
    if glob.has_magic(path):
        found = [name for name, entry in system.glob(path, detail=True).items() if _is_file(entry)]
    elif system.isfile(path):
        found = [path]
    elif system.isdir(path):
        found = [
            name
            for name in system.find(path)
            if not _hidden(name[len(path) :].lstrip("/")) and not name.endswith("/")
        ]
        if not found:
            raise UserError(f"{key}={url} is a folder without files. Name one that holds data.")
    else:
        found = []
    return [system.unstrip_protocol(name) for name in sorted(found, key=natural_key)]


def _is_file(entry: dict[str, Any]) -> bool:
    return entry["type"] == "file"


def file_system(url: str) -> tuple[Any, str]:
    """fsspec's file system of a URL, and the path in it.

    Raises:
      UserError: no such protocol, or its package is missing.
    """
    protocol = url.split("://")[0]
    if protocol in ("gs", "gcs"):
        prepare_clients(url)
    try:
        return fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise UserError(f"{url} needs a package that is not installed ({error}).") from error
    except ValueError as error:
        raise UserError(
            f"{url}: {protocol}:// is no kind of address that fsspec knows ({error}). Use a local "
            "path or gs://."
        ) from error


def open_stream(path: str) -> BinaryIO:
    """A file open for reading from the start, local or a URL.

    Raises:
      OSError: it cannot be opened.
      UserError: as file_system.
    """
    if not is_url(path):
        return open(local_path(path), "rb")
    system, name = file_system(path)
    return cast(BinaryIO, system.open(name, "rb"))


class _Descriptor:
    """An open file, closed when nobody uses it any more."""

    def __init__(self, path: str):
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    # The system's function is kept: at the interpreter's end the module may be gone before us.
    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if hasattr(self, "number"):
            close(self.number)


_open: collections.OrderedDict[str, _Descriptor] = collections.OrderedDict()
_lock = threading.Lock()


def _descriptor(path: str) -> _Descriptor:
    """The open file of a path; the ones that were not used for longest are let go."""
    with _lock:
        if path in _open:
            _open.move_to_end(path)
            return _open[path]
    # Not under the lock: storage that hangs would keep it from those who read other files.
    opened = _Descriptor(path)
    let_go = []
    with _lock:
        let_go.append(_open.get(path))
        _open[path] = opened
        while len(_open) > _MOST_OPEN:
            let_go.append(_open.popitem(last=False))
    return opened


def _let_go(path: str) -> None:
    """Makes the next read of a local file open what is there then."""
    with _lock:
        closed = _open.pop(path, None)
    del closed  # closing may hang as well


def version(path: str) -> tuple[int, str]:
    """Size of a file in bytes, and what else changes when its contents do (a time or a tag).

    Reads after this see the file that is there now, also where another one was open before.

    Raises:
      UnreadableFile: it is missing, not readable, or its storage fails.
      UserError: it is a folder, or as file_system.
    """
    try:
        if not is_url(path):
            _let_go(local_path(path))
            status = os.stat(local_path(path))
            if os.path.isdir(local_path(path)):
                raise UserError(f"{path} is a folder where a file is expected. Name the file.")
            return status.st_size, str(status.st_mtime_ns)
        system, name = file_system(path)
        entry = system.info(name)
    except Exception as error:
        # The libraries behind URLs raise errors of their own, which have no base in common.
        if _is_mistake(error) or not (is_url(path) or isinstance(error, OSError)):
            raise
        raise UnreadableFile(
            f"{path} cannot be read ({_reason(error)}). Check the path and that you may read it.",
            path,
        ) from error
    tags = (entry.get(tag) for tag in ("etag", "ETag", "generation", "mtime", "updated", "created"))
    return int(entry["size"]), str(next(filter(None, tags), ""))


def _is_mistake(error: Exception) -> bool:
    """Whether an error has its message already; that of a bucket is one of storage as well."""
    return isinstance(error, UserError) and not isinstance(error, OSError)


def forget(files: Sequence[str]) -> None:
    """Makes the next look at files see what is there then, not what was listed or open before."""
    for file in files:
        if not is_url(file):
            _let_go(local_path(file))
    for file in {file.split("://")[0]: file for file in files if is_url(file)}.values():
        file_system(file)[0].invalidate_cache()


def versions(files: Sequence[str]) -> list[tuple[int, str]]:
    """The version of each file; those behind URLs are asked for at the same time."""
    return _at_once(version, files)


def sizes_now(files: Sequence[str]) -> list[int | None]:
    """The size of each file, None of one that cannot be looked at; asked for as by versions."""
    return _at_once(_size_now, files)


def _size_now(file: str) -> int | None:
    try:
        return version(file)[0]
    except UnreadableFile:
        return None


def _at_once(look: Callable[[str], _Found], files: Sequence[str]) -> list[_Found]:
    if not any(map(is_url, files)):
        return [look(file) for file in files]
    with ThreadPoolExecutor(_REQUESTS_AT_ONCE) as threads:
        return list(threads.map(look, files))


class ReadableFile(abc.ABC):
    """A file that is read at any place: from several threads, and pickled without what is open.

    Attributes:
      path: as errors name it.
    """

    def __init__(self, path: str):
        self.path = path

    @functools.cached_property
    def size(self) -> int:
        """Bytes, looked up once.

        Raises:
          UserError: it is missing, a folder or not readable.
        """
        return version(self.path)[0]

    @abc.abstractmethod
    def read_many(self, places: Sequence[tuple[int, int]]) -> list[bytes]:
        """The bytes of several places (offset, length).

        Raises:
          BadRecord: the file is gone, may not be read, or ends before the end of a place.
        """

    def read(self, offset: int, length: int) -> bytes:
        """`length` bytes from `offset` on; raises BadRecord as read_many."""
        return self.read_many([(offset, length)])[0]

    def _short(self, offset: int, length: int, found: int) -> BadRecord:
        return BadRecord(
            self.path,
            offset,
            f"the file ends after {found} of {length} bytes: it was cut short",
            may_heal=True,
        )

    def _unreadable(self, offset: int, error: Exception) -> BadRecord:
        reason = f"the file cannot be read ({_reason(error)})"
        return BadRecord(self.path, offset, reason, may_heal=True)


class LocalFile(ReadableFile):
    """A file of this machine.

    Reads by place instead of mapping: reading beyond the end of a file that was cut short is then
    an error, where a map would end the process.
    """

    def read_many(self, places: Sequence[tuple[int, int]]) -> list[bytes]:
        name = local_path(self.path)
        contents = []
        for offset, length in places:
            try:
                # Held while reading, so that letting go of it elsewhere does not close it.
                descriptor = _descriptor(name)
                content = os.pread(descriptor.number, length, offset)
                while len(content) < length:
                    at = offset + len(content)
                    more = os.pread(descriptor.number, length - len(content), at)
                    if not more:
                        raise self._short(offset, length, len(content))
                    content += more
            except OSError as error:
                raise self._unreadable(offset, error) from error
            contents.append(content)
        return contents


class RemoteFile(ReadableFile):
    """A file behind a URL; the places of one call are fetched at the same time."""

    def read_many(self, places: Sequence[tuple[int, int]]) -> list[bytes]:
        starts = [offset for offset, _ in places]
        ends = [offset + length for offset, length in places]
        try:
            system, name = file_system(self.path)
            contents = system.cat_ranges([name] * len(places), starts, ends, on_error="return")
        except Exception as error:  # of the library behind the URL, see version()
            if _is_mistake(error):
                raise
            raise self._unreadable(min(starts, default=0), error) from error
        for (offset, length), content in zip(places, contents, strict=True):
            if isinstance(content, Exception):
                raise self._unreadable(offset, content) from content
            if len(content) != length:
                raise self._short(offset, length, len(content))
        return contents


def open_file(path: str) -> ReadableFile:
    """A file for reading at any place. Nothing is opened before the first read."""
    return RemoteFile(path) if is_url(path) else LocalFile(path)


class Blocks:
    """The contents of a file as something to slice from its start to its end.

    Reads large blocks, so that a scan of many small pieces makes few requests.
    """

    def __init__(self, file: ReadableFile):
        self._file = file
        self._start = 0
        self._block = b""

    def __len__(self) -> int:
        return self._file.size

    def __getitem__(self, place: slice) -> bytes:
        start, stop, step = place.indices(len(self))
        assert step == 1, step
        if start < self._start or stop > self._start + len(self._block):
            length = min(max(stop - start, _BLOCK_BYTES), len(self) - start)
            self._block = self._file.read(start, length)
            self._start = start
        return self._block[start - self._start : stop - self._start]


def _reason(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__


def names_below(files: Sequence[str]) -> Iterator[str]:
    """Each file's name below the folder that all of them share."""
    if not files:
        return
    folders = [file.split("/")[:-1] for file in files]
    shared = 0
    for parts in zip(*folders, strict=False):
        if len(set(parts)) > 1:
            break
        shared += 1
    yield from ("/".join(file.split("/")[shared:]) for file in files)


def absolute(path: str) -> str:
    """A path that means the same in every process."""
    return path if is_url(path) else os.path.abspath(local_path(path))


def fingerprint(files: Sequence[str], contents: list) -> str:
    """Hex digest of names and sizes of files, the same wherever they lie, and of `contents`."""
    states = zip(names_below(files), versions(files), strict=True)
    sizes = [[name, size] for name, (size, _) in states]
    return hashlib.sha256(json.dumps([sizes, contents]).encode()).hexdigest()[:16]
