"""Resolves `prepare_source`: files, patterns, URLs, saved datasets.

Of a local folder, all files with known extensions are read, except hidden ones and subfolders that
prepare_data.py wrote, so results may be written inside it. The order depends on names only.
"""

import json
import os
import re
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from MaxText.errors import UserError
from MaxText.input_pipeline.document_sources.document_formats import (
    JSON_LAYOUTS,
    NOT_TEXT,
    READ_ENDINGS,
    RECORD_LAYOUTS,
    TABLE_LAYOUTS,
    FileFormat,
    Layout,
    format_of,
    known_format,
)
from MaxText.pluralize import pluralize
from MaxText.storage import file_access
from MaxText.storage.file_access import FileInfo

STDLIB = Layout.STDLIB.value

_KEY = "prepare_source"

# Standard library folders with third-party packages or nothing to read.
_NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__"}

_STATE = "state.json"  # lists the files of a saved Hugging Face dataset

# Next to tables and records, these files are metadata.
_ABOUT_TABLES = {
    *(_STATE, "dataset_dict.json", "dataset_info.json", "dataset_infos.json"),
    *("features.json", "export.json", "readme.md"),
    *("records_manifest.json", "prepared_from.json"),  # the second of earlier versions
}
# Next to files of rows, plain text with these names describes the data.
_ABOUT_ROWS = re.compile(
    r"(readme|licen[cs]e|copying|notice|citation|authors|changelog|datasheet|dataset_?card)"
    r"([-_.].*)?"
)
_MAX_NAMED_FILES = 5  # in a note

# Cached results that `datasets` writes next to a saved dataset.
_CACHED = re.compile(r"(.*/)?cache-[^/]*\.arrow")

# Each folder that prepare_data.py writes has one of these, with these fields.
_MADE = {
    "manifest.json": {"schema_version", "tokenizer", "splits"},
    "records.json": {"schema_version", "tokenizer_sha256"},
    "export.json": {"schema_version", "tokenizer_sha256"},
}


@dataclass(frozen=True)
class SourceFile:
    """A file to read."""

    path: str
    name: str  # relative to the folder or pattern that it was found by
    size: int  # bytes on disk; -1 if unknown
    format: FileFormat


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

    def partition(self, count: int) -> range:
        """Returns the equal parts of the file with a start in the range.

        Ranges that partition the file give each part exactly once.
        """
        size = self.file.size
        first = -(-self.start * count // size) if self.start else 0
        return range(first, count if self.stop is None else -(-self.stop * count // size))


def split_entries(prepare_source: str) -> list[str]:
    """Splits a comma separated list, keeping commas of existing names and inside {braces}."""
    entries = file_access.split_list(prepare_source, ",")
    if not entries:
        raise UserError(
            f"{_KEY} is not set: give files, folders, patterns or URLs of text ({READ_ENDINGS}), "
            f"comma separated, or {STDLIB}."
        )
    return entries


def resolve_files(entry: str, notes: list[str]) -> list[SourceFile]:
    """Returns the files of one entry, in order, without reading them.

    An entry is a file, folder, pattern (with *, **, ?, [], {a,b} or {000..127}), URL, @FILE with
    one name per line, or `python_stdlib`. `notes` collects messages on files that are not read, or
    not as their neighbors are. Raises UserError if it matches no readable file.
    """
    if entry == STDLIB:
        return _stdlib_files(stdlib_root())
    files = file_access.list_files(entry, _KEY)
    is_folder = file_access.path_type(entry) == "directory"
    if is_folder and not file_access.is_url(entry):
        folder = file_access.local_path(entry)
        if _MADE["manifest.json"] <= _fields(Path(folder) / "manifest.json").keys():
            raise UserError(
                f"{_KEY}={entry} is a prepared data set. Train on it with dataset_path={entry}."
            )
        names = [Path(os.path.relpath(file.path, folder)).as_posix() for file in files]
    else:
        names = [*file_access.relative_names([file.path for file in files])]
    found = dict(zip(names, files, strict=True))
    if is_folder:
        return _folder_files(entry, found, notes)
    sources = [*map(_source_file, files, names)]
    _note_other_kinds(entry, {source.name: source.format for source in sources}, notes)
    return sources


def _source_file(file: FileInfo, name: str) -> SourceFile:
    """Returns a named or matched file: any extension but NOT_TEXT."""
    file_format = format_of(name)
    ending = os.path.splitext(name)[1].lower()
    if ending in NOT_TEXT:
        raise UserError(
            f"{file.path}: {ending} files are not read. Convert it to plain text or to .jsonl (one "
            "object with the text per line), which may be compressed (.gz .zst .xz .bz2)."
        )
    return SourceFile(file.path, printable(name), file.size, file_format)


def printable(name: str) -> str:
    """Returns a name without the surrogate escapes of bytes that are not UTF-8.

    They can be neither printed nor stored.
    """
    return os.fsencode(name).decode(errors="replace")


def _is_made(folder: Path) -> bool:
    return any(fields <= _fields(folder / name).keys() for name, fields in _MADE.items())


def _fields(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _leftovers(folder: Path, found: Iterable[str]) -> set[str]:
    """Returns .arrow files missing from lists of saved Hugging Face datasets."""
    arrow = [name for name in found if name.endswith(".arrow")]
    leftovers = set()
    for parent in {os.path.dirname(name) for name in arrow}:
        listed = _fields(folder / parent / _STATE).get("_data_files")
        if isinstance(listed, list):
            names = {str(PurePosixPath(parent, str(file.get("filename")))) for file in listed}
            if missing := sorted(names - set(arrow)):
                raise UserError(
                    f"{folder / parent / _STATE} lists {missing[0]}, which is missing. Save the "
                    "data set again."
                )
            leftovers |= {n for n in arrow if os.path.dirname(n) == parent and n not in names}
    return leftovers


def _named(names: Iterable[str]) -> str:
    """Names a few of some files, with their number if there are more."""
    in_order = sorted(map(printable, names), key=file_access.natural_key)
    shown = ", ".join(in_order[:_MAX_NAMED_FILES])
    num_more = len(in_order) - _MAX_NAMED_FILES
    return f"{shown} and {num_more:,} more" if num_more > 0 else shown


def _note_other_kinds(entry: str, formats: dict[str, FileFormat], notes: list[str]) -> None:
    """Adds a note on plain text among files of rows, which becomes documents too."""
    texts = [name for name, file_format in formats.items() if file_format.layout is Layout.TEXT]
    num_others = len(formats) - len(texts)
    if texts and num_others:
        notes.append(
            f"note: {entry}: {pluralize(len(texts), 'file')} of plain text among "
            f"{pluralize(num_others, 'file')} of rows, read as documents too: {_named(texts)}"
        )


def _folder_files(entry: str, found: dict[str, FileInfo], notes: list[str]) -> list[SourceFile]:
    """Returns files of a folder with a known extension, in natural order."""
    if not file_access.is_url(entry):
        folder = Path(file_access.local_path(entry))
        below = {parent for name in found for parent in PurePosixPath(name).parents[:-1]}
        made = tuple(f"{name}/" for name in below if _is_made(folder / name))
        found = {name: file for name, file in found.items() if not name.startswith(made)}
        found = {name: found[name] for name in found.keys() - _leftovers(folder, found)}
    known = {name: known_format(name) for name in found if not _CACHED.fullmatch(name)}
    formats = {name: file_format for name, file_format in known.items() if file_format}
    about = _about_data(formats)
    chosen = {name: formats[name] for name in formats if name not in about}
    if about:
        notes.append(
            f"note: {entry}: {pluralize(len(about), 'file')} about the data not read: "
            f"{_named(about)}"
        )
    read = {*file_access.real_paths([found[name].path for name in chosen])}
    others = [name for name, file_format in known.items() if not file_format]
    other_paths = file_access.real_paths([found[name].path for name in others])
    # Targets of links that are read, as in the cache of the hub, are no other files.
    unknown = [name for name, path in zip(others, other_paths, strict=True) if path not in read]
    if unknown:
        notes.append(
            f"note: {entry}: {pluralize(len(unknown), 'file')} with other endings not read: "
            f"{_named(unknown)} (a pattern reads them as plain text)"
        )
    _note_other_kinds(entry, chosen, notes)
    if not chosen:
        raise UserError(
            f"{_KEY}={entry}: the folder holds no file that ends in {READ_ENDINGS}. To read other "
            f"plain text, give a pattern, for example '{_KEY}={entry}/**/*.py'."
        )
    return [_source_file(found[name], name) for name in sorted(chosen, key=file_access.natural_key)]


def _about_data(formats: dict[str, FileFormat]) -> set[str]:
    """Returns the files of a folder that describe its data, by their names."""
    base_names = {name: os.path.basename(name).lower() for name in formats}
    layouts = {file_format.layout for file_format in formats.values()}
    about: set[str] = set()
    if layouts & (TABLE_LAYOUTS | RECORD_LAYOUTS):
        about |= {name for name, base_name in base_names.items() if base_name in _ABOUT_TABLES}
    texts = {name for name in formats if formats[name].layout is Layout.TEXT}
    # With more text than that, a README is a document like any other.
    if len(texts) < len(formats) and all(_ABOUT_ROWS.fullmatch(base_names[name]) for name in texts):
        about |= texts
    return about


def stdlib_root() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _stdlib_files(root: Path) -> list[SourceFile]:
    names = []
    for parent, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name[0] != "." and name not in _NOT_STDLIB]
        below = Path(parent).relative_to(root)
        names += [(below / name).as_posix() for name in files if re.fullmatch(r"[^.].*\.py", name)]
    # Build settings contain paths of the build machine.
    names = sorted(name for name in names if not name.startswith(("config-", "_sysconfigdata")))
    if not names:
        raise UserError(
            f"{_KEY}={STDLIB}: this interpreter has no source files in {root}. Give a folder of "
            "text instead."
        )
    return [
        SourceFile(path, name, os.path.getsize(path), FileFormat(Layout.STDLIB))
        for path, name in ((f"{root}/{name}", name) for name in names)
    ]
