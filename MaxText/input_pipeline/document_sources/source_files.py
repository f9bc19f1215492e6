"""Resolves `prepare_source`: files, patterns, URLs, saved datasets.

Of a local folder, all files with known extensions are read, except hidden ones and subfolders that
prepare_data.py wrote (with manifest.json, records.json or export.json), so results may be written
inside it. The order depends on names only.
"""

import glob
import json
import os
import stat
import sysconfig
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from MaxText.errors import UserError
from MaxText.input_pipeline.document_sources.byte_streams import open_bytes
from MaxText.input_pipeline.document_sources.document_formats import (
    JSON_LAYOUTS,
    NOT_TEXT,
    PLAIN_TEXT,
    READ_ENDINGS,
    RECORD_LAYOUTS,
    TABLE_LAYOUTS,
    FileFormat,
    check_not_compressed,
    format_of,
    known_format,
)
from MaxText.input_pipeline.document_sources.text_streams import token_ids_error
from MaxText.storage import file_access

STDLIB = "python_stdlib"

_KEY = "prepare_source"

# Standard library folders with third-party packages or nothing to read.
_NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__"}

# Lists the arrow files of a saved Hugging Face dataset in order; others are cached results.
_STATE = "state.json"
_KEPT_RESULT = "cache-"

# Next to tables and records, these files are metadata.
_ABOUT_TABLES = {
    *(_STATE, "dataset_dict.json", "dataset_info.json", "dataset_infos.json", "features.json"),
    *("export.json", "prepared_from.json", "readme.md"),
}

# Files that prepare_data.py writes, and fields that tell them from other programs' files.
_MADE_OF_IDS = {
    "manifest.json": {"schema_version", "tokenizer", "splits"},
    "records.json": {"schema_version", "data_set", "tokenizer_sha256"},
}
_MADE = {**_MADE_OF_IDS, "export.json": {"schema_version", "files"}}


@dataclass(frozen=True)
class SourceFile:
    """A file to read."""

    path: str
    name: str  # relative to the folder or pattern that it was found by
    size: int  # bytes on disk; -1 if unknown
    format: FileFormat
    skip_undecodable: bool = False  # skip non-UTF-8 files instead of raising


@dataclass(frozen=True)
class FileRange:
    """Documents starting in bytes [start, stop) of a file.

    JSON rows are numbered from the first line in the range (as `name` says), because counting
    earlier ones would mean reading them. All other numbers are relative to the file.
    """

    file: SourceFile
    start: int = 0
    stop: int | None = None

    @classmethod
    def whole(cls, path: str) -> "FileRange":
        return cls(SourceFile(path, path, -1, format_of(path)))

    @property
    def num_bytes(self) -> int:
        return (self.file.size if self.stop is None else self.stop) - self.start

    @property
    def name(self) -> str:
        """Name of the file, for `Document.file`."""
        counts_rows = self.file.format.layout in JSON_LAYOUTS and self.start > 0
        return f"{self.file.name} from byte {self.start}" if counts_rows else self.file.name

    def open(self) -> BinaryIO:
        """Opens the file. Raises UserError if its size changed."""
        return open_bytes(self.file.path, None if self.file.size < 0 else self.file.size)

    def partition(self, count: int) -> range:
        """Returns the equal parts of the file with a start in the range.

        Ranges that partition the file give each part exactly once.
        """
        size = self.file.size
        first = -(-self.start * count // size) if self.start else 0
        return range(first, count if self.stop is None else -(-self.stop * count // size))


def split_entries(prepare_source: str) -> list[str]:
    """Splits a comma separated list, keeping commas inside {braces}."""
    entries, partial = [], ""
    for part in prepare_source.split(","):
        partial += part
        if partial.count("{") > partial.count("}"):
            partial += ","
        else:
            entries.append(partial.strip())
            partial = ""
    entries = [entry for entry in [*entries, partial.strip()] if entry]
    if not entries:
        raise UserError(
            f"{_KEY} is not set: give files, folders, patterns or URLs of text ({READ_ENDINGS}), "
            f"comma separated, or {STDLIB}."
        )
    return entries


def resolve_files(entry: str) -> list[SourceFile]:
    """Returns the files of one entry, in order, without reading them.

    An entry is a file, folder, pattern (with *, **, ?, [], {a,b} or {000..127}), URL, @FILE with
    one name per line, or `python_stdlib`. Raises UserError if it matches no readable file.
    """
    try:
        if entry == STDLIB:
            return _stdlib_files(stdlib_root())
        if _is_folder(entry):
            return _folder_files(entry)
        is_there = file_access.is_url(entry) or os.path.exists(file_access.local_path(entry))
        if not (is_there or glob.has_magic(entry) or entry.startswith("@") or "{" in entry):
            raise UserError(f"{_KEY}={entry}: no such file or folder (seen from {Path.cwd()}).")
        return [_source_file(path, name) for name, path in _listed(entry).items()]
    except OSError as error:
        where = error.filename or entry
        raise UserError(
            f"{_KEY}={entry}: {where} cannot be read: {error.strerror or error}."
        ) from error


def _is_folder(entry: str) -> bool:
    if not file_access.is_url(entry):
        return Path(file_access.local_path(entry)).is_dir()
    system, name = file_access.file_system(entry)
    return not glob.has_magic(entry) and "{" not in entry and system.isdir(name)


def _listed(entry: str) -> dict[str, str]:
    paths = [file.path for file in file_access.list_files(entry, _KEY)]
    return dict(zip(file_access.relative_names(paths), paths, strict=True))


def _source_file(path: str, name: str) -> SourceFile:
    """Returns a named or matched file: any extension but NOT_TEXT."""
    file_format = format_of(name)
    ending = os.path.splitext(name)[1].lower()
    if ending in NOT_TEXT:
        raise UserError(
            f"{path}: {ending} files are not read. Convert it to plain text or to .jsonl (one "
            "object with the text per line), which may be compressed (.gz .zst .xz .bz2)."
        )
    check_not_compressed(path, file_format)
    if file_access.is_url(path):
        system, remote_path = file_access.file_system(path)
        return SourceFile(path, name, system.info(remote_path).get("size") or 0, file_format)
    path = file_access.local_path(path)
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        raise UserError(
            f"{path} is not a regular file, so it cannot be read twice. Copy its contents to a "
            "file and name that, or remove it from prepare_source."
        )
    # Surrogate escapes of a non-UTF-8 name cannot be printed or stored.
    name = os.fsencode(name).decode(errors="replace")
    return SourceFile(path, name, found.st_size, file_format)


def _nothing_to_read(entry: str, found: list[str]) -> UserError:
    """Returns the error for a folder, with a pattern for `found` names."""
    endings = Counter(os.path.splitext(name)[1] for name in found)
    unreadable = bool(endings) and all(each.lower() in NOT_TEXT for each in endings)
    if not unreadable:
        endings = {each: count for each, count in endings.items() if each.lower() not in NOT_TEXT}
    # The most common extension; ties are broken by name.
    ending = min(endings, key=lambda each: (-endings[each], each), default=".py")
    folders = "**/" if any("/" in name or ending for name in found) else ""
    pattern = f"{entry.rstrip('/')}/{folders if found else '**/'}*{ending}"
    remedy = f"To read other plain text, give a pattern, for example '{_KEY}={pattern}'."
    if unreadable:
        remedy = "Convert them to plain text or to .jsonl, one object with the text per line."
    return UserError(
        f"{_KEY}={entry}: the folder holds no file that ends in {READ_ENDINGS}. {remedy}"
    )


def _is_made(folder: Path, fields_by_name: Mapping[str, set[str]]) -> bool:
    """Returns whether prepare_data.py wrote a folder."""
    for name, fields in fields_by_name.items():
        try:
            content = json.loads((folder / name).read_bytes())
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(content, dict) and fields <= content.keys():
            return True
    return False


def _folder_files(entry: str) -> list[SourceFile]:
    """Returns files of a folder with a known extension, in natural order."""
    saved: dict[str, list[str]] = {}
    if file_access.is_url(entry):
        found = _listed(entry)
    else:
        folder = Path(file_access.local_path(entry))
        if _is_made(folder, _MADE_OF_IDS):
            found_ids = "the output of prepare_data.py"
            raise token_ids_error(f"{_KEY}={entry}", str(folder), found_ids)
        names = _walk(folder, lambda below: _is_made(below, _MADE))
        found = {name: str(folder / name) for name in names}
        for name, path in found.items():
            if os.path.basename(name) == _STATE and (files := _saved_files(Path(path))) is not None:
                saved[os.path.dirname(name)] = files

    def is_data(name: str) -> bool:
        parent, base = os.path.split(name)
        if not name.endswith(".arrow"):
            return True
        return base in saved[parent] if parent in saved else not base.startswith(_KEPT_RESULT)

    def order(name: str) -> tuple:
        parent, base = os.path.split(name)
        # Saved arrow files keep the order of their state.json.
        if base in saved.get(parent, ()):
            return file_access.natural_key(parent), saved[parent].index(base)
        return file_access.natural_key(name), -1

    formats = {name: known for name in found if is_data(name) and (known := known_format(name))}
    has_tables = any(known.layout in TABLE_LAYOUTS | RECORD_LAYOUTS for known in formats.values())
    hidden = _ABOUT_TABLES if has_tables else ()
    chosen = [name for name in formats if os.path.basename(name).lower() not in hidden]
    if not chosen:
        raise _nothing_to_read(entry, [*found])
    return [_source_file(found[name], name) for name in sorted(chosen, key=order)]


def _saved_files(state: Path) -> list[str] | None:
    """Returns the Arrow files of a `datasets` state.json, or None.

    Raises UserError if one is missing, or the dataset is a selection of rows.
    """
    try:
        content = json.loads(state.read_bytes())
        names = [file["filename"] for file in content["_data_files"]]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    if content.get("_indices_data_files"):
        raise UserError(
            f"{state} selects rows of its arrow files. Save the data set again after "
            "flatten_indices()."
        )
    for name in names:
        # Reject path traversal.
        if not isinstance(name, str) or name != os.path.basename(name) or name in ("", ".", ".."):
            raise UserError(f"{state} lists {name!r}, which is not a file name. Save it again.")
        if not (state.parent / name).is_file():
            raise UserError(f"{state} lists {name}, which is missing next to it. Copy it again.")
    return names


def _walk(folder: Path, is_skipped: Callable[[Path], bool]) -> list[str]:
    """Returns the visible files below `folder`, sorted."""

    def stop(error: OSError) -> None:
        raise error

    found = []
    for parent, folders, names in os.walk(folder, onerror=stop):
        below = Path(parent).relative_to(folder)
        folders[:] = [
            name for name in folders if name[0] != "." and not is_skipped(folder / below / name)
        ]
        found += [(below / name).as_posix() for name in names if name[0] != "."]
    return sorted(found)


def stdlib_root() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _stdlib_files(root: Path) -> list[SourceFile]:
    # Build settings contain paths of the build machine.
    names = [
        name
        for name in _walk(root, lambda below: below.name in _NOT_STDLIB)
        if name.endswith(".py") and not name.startswith(("config-", "_sysconfigdata"))
    ]
    if not names:
        raise UserError(
            f"{_KEY}={STDLIB}: this interpreter has no source files in {root}. Give a folder of "
            "text instead."
        )
    sizes = [(root / name).stat().st_size for name in names]
    return [
        SourceFile(str(root / name), name, size, PLAIN_TEXT, skip_undecodable=True)
        for name, size in zip(names, sizes, strict=True)
    ]
