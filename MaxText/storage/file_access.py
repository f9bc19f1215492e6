"""Reads files of datasets, on local disks and behind fsspec URLs such as gs://.

`list_files` expands what users write (files, folders, patterns, lists) to `FileInfo`s, and
`read_ranges` reads byte ranges of many files at once.
"""

import collections
import errno
import functools
import glob
import hashlib
import io
import itertools
import json
import math
import os
import re
import resource
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO, NamedTuple, cast

import fsspec
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from MaxText.errors import UserError
from MaxText.storage import local_search
from MaxText.storage.errors import FileReadError
from MaxText.storage.paths import natural_key, register_filesystems

_BRACES = re.compile(r"\{([^{}]*)\}")
_NUMBERS = re.compile(r"(\d+)\.\.(\d+)")
# Names that braces may stand for: larger data sets are named by a folder or a pattern.
_MAX_NAMES = 2**20
# Files kept open: a dataset may have thousands, and opening one for each read makes random reads
# several times slower. Half of what the process may open is left to the program.
_MAX_OPEN_FILES = max(128, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
_CONCURRENT_REQUESTS = 32
_IMPOSSIBLE_NAME = (errno.ELOOP, errno.ENAMETOOLONG)
# Attributes that change with a file's contents; they differ between file systems.
_TAGS = ("etag", "ETag", "generation", "mtime", "updated", "created")


class FileInfo(NamedTuple):
    """A listed file: path or URL, size in bytes, and a tag that changes with its contents.

    The tag is a modification time or an ETag; empty if the file system has none.
    """

    path: str
    size: int
    tag: str


def is_url(path: str) -> bool:
    """Returns whether a path must be read through fsspec (not file://)."""
    return "://" in path and not path.startswith("file://")


def local_path(path: str) -> str:
    """Returns a path for the operating system: without file://, with ~ expanded."""
    return os.path.expanduser(path.removeprefix("file://"))


def absolute(path: str) -> str:
    """Returns a path independent of the working directory."""
    return path if is_url(path) else os.path.abspath(local_path(path))


def file_system(path: str) -> tuple[Any, str]:
    """Returns fsspec's file system of a path or URL, and the path in it.

    Raises:
      UserError: The protocol is unknown, or its package is not installed.
    """
    if not is_url(path):
        return LocalFileSystem(), local_path(path)
    protocol = path.split("://")[0]
    if protocol in ("gs", "gcs"):
        register_filesystems(path)
    try:
        return fsspec.core.url_to_fs(path)
    except ImportError as error:
        raise UserError(f"{path} needs a package that is not installed ({error}).") from error
    except ValueError as error:
        raise UserError(
            f"{path}: {protocol}:// is not a protocol that fsspec knows ({error}). Use a local "
            "path or gs://."
        ) from error


def list_files(location: str, key: str) -> list[FileInfo]:
    """Returns the files of a location in natural order.

    Links count as what they point to. One that leads nowhere is a file of size 0, which cannot be
    opened.

    Args:
      location: A file; a folder (recursive, without hidden files); a pattern with *, ?, [] and **;
        or braces {000..127} or {a,b} or @FILE (one path or URL per line), which keep their order.
        Of a local location, the part that exists as it is written is a name, whatever its
        characters.
      key: Its configuration key, for messages.

    Raises:
      UserError: Nothing is there, a listed file is missing, or access fails.
    """
    if not location:
        raise UserError(f"{key} is empty. Name a file, a folder or a pattern.")
    try:
        is_list = location.startswith("@") and not path_type(location)
        names = _lines(location[1:], key) if is_list else _names(location)
        files = []
        for name, matching_files in zip(names, _matches(names, key, literal=is_list), strict=True):
            if not matching_files:
                if is_list:
                    raise UserError(
                        f"{key}={location} lists {name}, which is not a file. Correct it."
                    )
                part = "" if name == location else f" ({name})"
                raise UserError(
                    f"{key}={location}: no such file{part}. Check the path; a pattern is given in "
                    "quotes, and ** stands for folders of any depth."
                )
            files += matching_files
        return files
    except UserError:
        raise
    except (OSError, ValueError) as error:  # ValueError: invalid pattern
        raise UserError(
            f"{key}={location} cannot be looked at ({reason(error)}). Check the path and that you "
            "may read it."
        ) from error


def path_type(path: str | os.PathLike[str]) -> str:
    """Returns "file", "directory", "other", or "" if nothing is there."""
    entry = _look(*file_system(os.fspath(path)))
    return entry["type"] if entry else ""


def _look(system: AbstractFileSystem, path: str) -> dict[str, Any] | None:
    try:
        return system.info(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        is_impossible = isinstance(error, ValueError) or error.errno in _IMPOSSIBLE_NAME
        if is_impossible and not isinstance(error, UserError):
            return None
        raise


def _lines(list_file: str, key: str) -> list[str]:
    with open_stream(list_file) as stream:
        content = stream.read()
    try:
        lines = [line.strip() for line in content.decode().splitlines()]
    except UnicodeDecodeError as error:
        raise UserError(
            f"{key}=@{list_file} is not a text file ({error}). Name a file with one path per line."
        ) from error
    names = [line for line in lines if line and not line.startswith("#")]
    if not names:
        raise UserError(f"{key}=@{list_file} lists no file. Write one name per line into it.")
    return names


def existing_prefix(location: str) -> str:
    """Returns the part of a local location that exists as it is written; "" for a URL."""
    if is_url(location):
        return ""
    path = _absolute_local(location)
    missing_part = path[len(local_search.existing_prefix(path)) :]
    return location.removesuffix(missing_part) if location.endswith(missing_part) else ""


def split_list(text: str, separator: str, name_of: Callable[[str], str] = str) -> list[str]:
    """Splits a list of local paths, patterns and URLs that a user wrote on one line.

    A separator belongs to a name if a file or folder of that name exists, is within braces, or
    stands in brackets, as in `a[,]b*.txt`. White space around entries is removed, unless that
    would turn an existing name into a missing one.

    Args:
      text: The list.
      separator: One character between entries.
      name_of: Returns the name in an entry that may hold more, such as a weight.
    """
    if not is_url(text) and os.path.exists(local_path(text)):
        return [text]
    quoted = re.escape(separator)
    pieces = re.findall(rf"(?:\{{[^{{}}]*\}}|\[{quoted}\]|[^{quoted}])+", text)
    entries: list[str] = []
    while pieces:
        num_pieces = _pieces_of_name(pieces, separator, name_of)
        entry = separator.join(pieces[:num_pieces])
        pieces = pieces[num_pieces:]
        is_name = not is_url(entry) and os.path.exists(local_path(entry))
        stripped = entry.strip()
        if is_name and not os.path.exists(local_path(stripped)):
            stripped = entry
        if stripped:
            entries.append(stripped)
    return entries


def _pieces_of_name(pieces: Sequence[str], separator: str, name_of: Callable[[str], str]) -> int:
    """Returns how many pieces are one name, or one pattern below a folder of such a name."""
    first = pieces[0].lstrip()
    folder, _, beginning = _absolute_local(first).rpartition("/")
    if is_url(first) or not any(name.startswith(beginning + separator) for name in _listed(folder)):
        return 1
    for num_pieces in range(len(pieces), 1, -1):
        entry = separator.join([first, *pieces[1:num_pieces]]).rstrip()
        for name in (entry, name_of(entry)):
            if separator in name and separator not in name[len(existing_prefix(name)) :]:
                return num_pieces
    return 1


@functools.lru_cache(maxsize=1)
def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder or "/")
    except OSError:
        return []


def _names(location: str) -> list[str]:
    """Returns the names and patterns that the braces of a location stand for."""
    prefix = existing_prefix(location)
    return [prefix + name for name in _expand_braces(location[len(prefix) :])]


def _expand_braces(pattern: str) -> list[str]:
    parts = _BRACES.split(pattern)
    # split() alternates between text and the contents of braces.
    choices = [_choices(part) if number % 2 else [part] for number, part in enumerate(parts)]
    if math.prod(map(len, choices)) > _MAX_NAMES:
        raise ValueError(f"its braces stand for more than {_MAX_NAMES:,} names")
    return ["".join(choice) for choice in itertools.product(*choices)]


def _choices(inside: str) -> list[str]:
    numbers = _NUMBERS.fullmatch(inside)
    if not numbers:
        return inside.split(",")
    first, last = numbers.groups()
    if int(last) - int(first) >= _MAX_NAMES:
        raise ValueError(f"its braces stand for more than {_MAX_NAMES:,} names")
    width = len(first) if first.startswith("0") or len(first) == len(last) else 0
    return [f"{number:0{width}d}" for number in range(int(first), int(last) + 1)]


def _matches(names: Sequence[str], key: str, literal: bool) -> Iterator[list[FileInfo]]:
    match = functools.partial(_match, key=key, literal=literal)
    if not any(map(is_url, names)):
        yield from map(match, names)
        return
    num_in_folder = collections.Counter(name.rpartition("/")[0] for name in names if is_url(name))
    with ThreadPoolExecutor(_CONCURRENT_REQUESTS) as threads:
        # Lists a remote folder once instead of one request per name: there may be thousands.
        shared = [folder for folder, count in num_in_folder.items() if count > 1]
        listed = {file.path: [file] for files in threads.map(files_in, shared) for file in files}
        yield from threads.map(lambda name: listed.get(name) or match(name), names)


def files_in(folder: str) -> list[FileInfo]:
    """Returns the files directly in a folder; none if it does not exist."""
    if not is_url(folder):
        return [*map(_local_info, local_search.files_in_folder(_absolute_local(folder)))]
    system, path = file_system(folder)
    try:
        entries = system.ls(path, detail=True)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [_info(system, folder, entry) for entry in entries if _is_file(entry)]


def _match(name: str, key: str, literal: bool) -> list[FileInfo]:
    system, path = file_system(name)
    entry = None if is_url(name) and glob.has_magic(name) else _look(system, path)
    if entry is not None and entry["type"] != "directory":
        return [_info(system, name, entry)]
    if literal:
        return []
    if entry is None and not glob.has_magic(path):
        return []
    search = _search_url if is_url(name) else _search_local
    files = search(name, is_folder=entry is not None)
    if entry is not None and not files:
        raise UserError(f"{key}={name} is a folder without files. Name one that holds data.")
    return sorted(files, key=lambda file: natural_key(file.path))


def _search_local(name: str, is_folder: bool) -> list[FileInfo]:
    find = local_search.files_below if is_folder else local_search.files_matching
    return [*map(_local_info, find(_absolute_local(name)))]


def _search_url(name: str, is_folder: bool) -> list[FileInfo]:
    system, path = file_system(name)
    if is_folder:
        entries = {
            file_path: entry
            for file_path, entry in system.find(path, detail=True).items()
            if not re.search(r"(^|/)\.", os.path.relpath(file_path, path).replace(os.sep, "/"))
        }
    else:
        shows_hidden = path.rpartition("/")[2].startswith(".")
        entries = {
            path: entry
            for path, entry in system.glob(path, detail=True).items()
            if shows_hidden or not path.rpartition("/")[2].startswith(".")
        }
    return [_info(system, name, entry) for entry in entries.values() if _is_file(entry)]


def _absolute_local(name: str) -> str:
    # Not normalized: `link/..` is the folder above the target of the link.
    return os.path.join(os.getcwd(), local_path(name))


def _local_info(file: local_search.LocalFile) -> FileInfo:
    if file.status is None:
        return FileInfo(file.path, 0, "")
    return FileInfo(file.path, file.status.st_size, str(file.status.st_mtime))


def _is_file(entry: dict[str, Any]) -> bool:
    return entry["type"] == "file" and not entry["name"].endswith("/")


def _info(system: AbstractFileSystem, location: str, entry: dict[str, Any]) -> FileInfo:
    path = system.unstrip_protocol(entry["name"]) if is_url(location) else entry["name"]
    tag = next(filter(None, (entry.get(tag) for tag in _TAGS)), "")
    return FileInfo(path, int(entry["size"]), str(tag))


def real_paths(paths: Sequence[str]) -> list[str]:
    """Returns local paths without links, and URLs as they are."""
    real_folder = functools.cache(os.path.realpath)  # asks the system about every parent

    def real_path(path: str) -> str:
        folder, name = os.path.split(_absolute_local(path))
        path = os.path.join(real_folder(folder), name)
        return os.path.realpath(path) if os.path.islink(path) else path

    return [path if is_url(path) else real_path(path) for path in paths]


def without_repeated_links(files: Sequence[FileInfo]) -> list[FileInfo]:
    """Returns the files without links to others of them, in the same order.

    Of several links to one file, the first stays. A file that is listed twice under one path stays
    twice, as only a user can name it so.
    """
    targets = real_paths([file.path for file in files])
    links = [not is_url(file.path) and os.path.islink(file.path) for file in files]
    path_of_target = {
        target: file.path
        for file, target, is_link in zip(files, targets, links, strict=True)
        if not is_link
    }
    different: list[FileInfo] = []
    for file, target in zip(files, targets, strict=True):
        if path_of_target.setdefault(target, file.path) == file.path:
            different.append(file)
    return different


def file_info(path: str) -> FileInfo:
    """Returns size and tag of a file, under the path as given.

    Raises:
      UserError: The path is a folder, or the file cannot be read.
    """
    try:
        system, name = file_system(path)
        entry = system.info(name)
    except Exception as error:
        # fsspec clients raise errors without a common base class.
        if is_mistake(error) or not (is_url(path) or isinstance(error, OSError)):
            raise
        raise _unreadable(path, error) from error
    if entry["type"] == "directory":
        raise UserError(f"{path} is a folder where a file is expected. Name the file.")
    return _info(system, path, entry)._replace(path=path)


def file_infos(paths: Sequence[str]) -> list[FileInfo]:
    """Returns `file_info` of each path, concurrently."""
    size = 1 + len(paths) // (4 * _CONCURRENT_REQUESTS)  # a task costs more than a local file
    chunks = [paths[start : start + size] for start in range(0, len(paths), size)]
    with ThreadPoolExecutor(_CONCURRENT_REQUESTS) as threads:
        infos = threads.map(lambda chunk: [*map(file_info, chunk)], chunks)
        return [*itertools.chain.from_iterable(infos)]


def open_stream(path: str) -> BinaryIO:
    """Opens a local or remote file for reading; raises OSError or UserError."""
    system, name = file_system(path)
    return cast(BinaryIO, system.open(name, "rb")) if is_url(path) else open(name, "rb")


def is_mistake(error: Exception) -> bool:
    """Returns whether an error is the user's mistake, and no failure of storage."""
    return isinstance(error, UserError) and not isinstance(error, OSError)


def reason(error: Exception) -> str:
    """Returns a short description of an error: the system's, its message, or its type."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


def _unreadable(path: str, error: Exception) -> FileReadError:
    return FileReadError(
        f"{path} cannot be read ({reason(error)}). Check the path and that you may read it."
    )


class _Descriptor(io.FileIO):
    """An open file, closed with its last reference, as threads share it."""

    __del__ = io.FileIO.close  # FileIO's own warns about a file that was not closed explicitly


# Holds no lock while it opens a file: storage that hangs must not block readers of other files.
@functools.lru_cache(maxsize=_MAX_OPEN_FILES)
def _descriptor(path: str) -> _Descriptor:
    try:
        return _Descriptor(local_path(path), opener=os.open)
    except OSError as error:
        raise _unreadable(path, error) from error


def invalidate_cache(paths: Sequence[str]) -> None:
    """Closes all cached files, and drops cached listings of the file systems of `paths`."""
    _descriptor.cache_clear()
    for url in {path.split("://")[0]: path for path in paths if is_url(path)}.values():
        file_system(url)[0].invalidate_cache()


def read_ranges(paths: Sequence[str], offsets: Sequence[int], sizes: Sequence[int]) -> list[bytes]:
    """Returns byte ranges of files; remote ranges are read concurrently.

    Files are read and not memory-mapped, because access past the end of a truncated file would
    kill the process.

    Args:
      paths: The file of each range.
      offsets: First byte of each range.
      sizes: Bytes of each range.

    Raises:
      FileReadError: A file cannot be read, or is shorter than its range.
    """
    contents: list[bytes] = []
    remote: dict[str, list[int]] = {}
    for number, (path, offset, size) in enumerate(zip(paths, offsets, sizes, strict=True)):
        if is_url(path):
            remote.setdefault(path.split("://")[0], []).append(number)
            contents.append(b"")
            continue
        file = _descriptor(path)
        try:
            contents.append(_read_range(file, path, offset, size))
        except OSError as error:
            raise _unreadable(path, error) from error
    for numbers in remote.values():
        ranges = [(paths[number], offsets[number], sizes[number]) for number in numbers]
        for number, content in zip(numbers, _read_remote(ranges), strict=True):
            contents[number] = content
    return contents


def _read_range(file: _Descriptor, path: str, offset: int, size: int) -> bytes:
    content = os.pread(file.fileno(), size, offset)
    while len(content) < size:  # the system may return less than was requested
        end = offset + len(content)
        chunk = os.pread(file.fileno(), size - len(content), end)
        if not chunk:
            raise _truncated(path, end, missing=size - len(content))
        content += chunk
    return content


def _read_remote(ranges: Sequence[tuple[str, int, int]]) -> list[bytes]:
    """Returns ranges (path, offset, size) of files behind one protocol."""
    paths = [path for path, _, _ in ranges]
    begins = [offset for _, offset, _ in ranges]
    ends = [offset + size for _, offset, size in ranges]
    try:
        system, _ = file_system(paths[0])
        names = [*map(system._strip_protocol, paths)]
        contents = system.cat_ranges(names, begins, ends, on_error="return")
    except Exception as error:
        if is_mistake(error):
            raise
        raise _unreadable(paths[0], error) from error
    for (path, offset, size), content in zip(ranges, contents, strict=True):
        if isinstance(content, Exception):
            raise _unreadable(path, content) from content
        if len(content) < size:
            end = offset + len(content)
            raise _truncated(path, end, missing=size - len(content))
    return contents


def _truncated(path: str, size: int, missing: int) -> FileReadError:
    return FileReadError(
        f"{path} ends at byte {size:,}, where {missing:,} more were expected: it was truncated. "
        "Copy it again."
    )


def relative_names(files: Sequence[str]) -> Iterator[str]:
    """Yields the path of each file relative to the folder that all have in common."""
    paths = [file.split("/") for file in files]
    folders = zip(*(path[:-1] for path in paths), strict=False)
    shared = sum(1 for _ in itertools.takewhile(lambda names: len(set(names)) == 1, folders))
    yield from ("/".join(path[shared:]) for path in paths)


def fingerprint(files: Sequence[FileInfo], contents: list) -> str:
    """Returns a digest of files that does not depend on where they lie.

    Args:
      files: Their relative names and sizes count.
      contents: JSON values that describe what they hold, such as checksums of samples.
    """
    names = relative_names([file.path for file in files])
    sizes = [[name, file.size] for name, file in zip(names, files, strict=True)]
    return hashlib.sha256(json.dumps([sizes, contents]).encode()).hexdigest()[:16]
