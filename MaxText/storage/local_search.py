"""Finds local files below a folder or by a pattern, through symbolic links.

A link counts as what it points to: a file, or a folder to search. No link is a danger: a folder
that several names lead to is searched once, and one that contains the searched folder (a link to
`..` or `/`) is not searched at all.
"""

import errno
import os
import re
import stat
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fsspec.utils import glob_translate

# What `stat` says of a link without a target, and of one that leads to itself.
_BROKEN = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)


class LocalFile(NamedTuple):
    """A regular file, or a link that leads nowhere.

    Attributes:
      path: Its path, as found: links are not resolved.
      status: Size and times of the file, or of the file that a link points to. None for a link
        that leads nowhere.
    """

    path: str
    status: os.stat_result | None


class _Folder(NamedTuple):
    """A folder to search, and whether its path ends in a link."""

    path: str
    is_link: bool
    identity: tuple[int, int]


def existing_prefix(path: str) -> str:
    """Returns the longest part of an absolute path, up to a slash, that exists as written.

    What it holds is a name, whatever its characters: of `v[1]/*.txt` it is `v[1]/` if there is such
    a folder, and the path itself if there is such a file.
    """
    if os.path.exists(path):
        return path
    end = path.rfind("/")
    while end >= 0:
        prefix = path[: end + 1]
        if os.path.isdir(prefix):
            return prefix
        end = path.rfind("/", 0, end)
    return ""


def files_in_folder(folder: str) -> list[LocalFile]:
    """Returns the files directly in a folder; none if it does not exist."""
    files, _ = _list_folder(folder)
    return files


def files_below(folder: str) -> Iterator[LocalFile]:
    """Yields the files below a folder, except hidden ones and those of hidden folders.

    Raises OSError for a folder that may not be read, as its files would be missing silently.
    """
    for subfolder in _folders_below([_open_folder(folder)], include_hidden=False):
        for file in files_in_folder(subfolder.path):
            if not is_hidden(file.path):
                yield file


def files_matching(pattern: str) -> Iterator[LocalFile]:
    """Yields the files that match an absolute pattern with *, ?, [] and **, in any order.

    A part of the pattern that exists as it is written is a name and no pattern. Names that begin
    with a dot match only if the last part of the pattern does. Raises ValueError for an invalid
    pattern, and OSError for a folder that may not be read.
    """
    prefix = existing_prefix(pattern)
    *folder_parts, file_part = pattern[len(prefix) :].split("/")
    if file_part == "**":
        folder_parts = [*folder_parts, "**"]
        file_part = "*"
    expression = re.compile(glob_translate(file_part))
    folders = [_open_folder(prefix)]
    for part in folder_parts:
        folders = _matching_folders(folders, part)
    for folder in folders:
        for file in files_in_folder(folder.path):
            name = os.path.basename(file.path)
            if expression.match(name) and (file_part.startswith(".") or not is_hidden(name)):
                yield file


def is_hidden(path: str) -> bool:
    """Returns whether a file's name begins with a dot."""
    return os.path.basename(path).startswith(".")


def _open_folder(path: str) -> _Folder:
    status = os.stat(path)
    return _Folder(path, False, (status.st_dev, status.st_ino))


def _matching_folders(folders: Sequence[_Folder], part: str) -> list[_Folder]:
    """Returns the folders that one part of a pattern leads to, each once."""
    if part == "**":
        return list(_folders_below(folders, include_hidden=True))
    expression = re.compile(glob_translate(part))
    matching: list[_Folder] = []
    for folder in folders:
        literal_folder = os.path.join(folder.path, part)
        if os.path.isdir(literal_folder):
            matching.append(_open_folder(literal_folder))
            continue
        _, subfolders = _list_folder(folder.path)
        matching += [
            subfolder
            for subfolder in subfolders
            if expression.match(os.path.basename(subfolder.path))
        ]
    # What is below a folder does not depend on the name by which it was reached.
    links_last = sorted(matching, key=lambda folder: (folder.is_link, folder.path))
    first_by_identity = {folder.identity: folder for folder in reversed(links_last)}
    return list(first_by_identity.values())


def _folders_below(folders: Sequence[_Folder], include_hidden: bool) -> Iterator[_Folder]:
    """Yields folders and the folders below them, each once, whatever links lead to it.

    Folders come before links to them, so that a file is found under its own name.
    """
    if not folders:
        return
    searched: set[tuple[int, int]] = set()
    containing = set.intersection(*(_containing_folders(folder.path) for folder in folders))
    waiting = list(folders)
    links: list[_Folder] = []
    while waiting or links:
        if not waiting:
            links.sort(key=lambda link: link.path, reverse=True)
            waiting.append(links.pop())
        current = waiting.pop()
        if current.identity in searched or current.identity in containing:
            continue
        searched.add(current.identity)
        yield current
        _, subfolders = _list_folder(current.path)
        for subfolder in subfolders:
            if include_hidden or not is_hidden(subfolder.path):
                (links if subfolder.is_link else waiting).append(subfolder)


def _containing_folders(folder: str) -> set[tuple[int, int]]:
    """Returns the identities of the folders that a folder lies in."""
    identities = set()
    parent = os.path.realpath(folder)
    while parent != os.path.dirname(parent):
        parent = os.path.dirname(parent)
        status = os.stat(parent)
        identities.add((status.st_dev, status.st_ino))
    return identities


def _list_folder(folder: str) -> tuple[list[LocalFile], list[_Folder]]:
    """Returns the files and the folders directly in a folder, with links followed."""
    files: list[LocalFile] = []
    folders: list[_Folder] = []
    try:
        entries = list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return files, folders
    for entry in entries:
        try:
            status = entry.stat()
        except OSError as error:
            if error.errno not in _BROKEN:
                raise
            if entry.is_symlink():  # else it was deleted meanwhile
                files.append(LocalFile(entry.path, None))
            continue
        if stat.S_ISDIR(status.st_mode):
            identity = (status.st_dev, status.st_ino)
            folders.append(_Folder(entry.path, entry.is_symlink(), identity))
        elif stat.S_ISREG(status.st_mode):
            files.append(LocalFile(entry.path, status))
    return files, folders
