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
from MaxText.formatting import pluralize
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
from MaxText.storage import file_access
from MaxText.storage.file_access import FileInfo

STDLIB = Layout.STDLIB.value

_KEY = "prepare_source"

# Standard library folders with third-party packages or nothing to read.
_NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__"}

_STATE = "state.json"  # lists the files of a saved Hugging Face dataset

# Next to tables and records, these files are metadata.
_TABLE_METADATA = {
    *(_STATE, "dataset_dict.json", "dataset_info.json", "dataset_infos.json"),
    *("features.json", "export.json", "readme.md"),
    "records_manifest.json",
}
# Next to files of rows, plain text with these names describes the data.
_ROW_METADATA = re.compile(
    r"(readme|licen[cs]e|copying|notice|citation|authors|changelog|datasheet|dataset_?card)"
    r"([-_.].*)?"
)
_MAX_NAMED_FILES = 5  # in a note

# Cached results that `datasets` writes next to a saved dataset.
_CACHED = re.compile(r"(.*/)?cache-[^/]*\.arrow")

# Each folder that prepare_data.py writes has one of these files, with these fields.
_PREPARED_MARKERS = {
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
        """Returns the range of all documents of a file, whose format its name tells."""
        return cls(SourceFile(path, path, -1, format_of(path)))

    @property
    def num_bytes(self) -> int:
        """Size of the range on disk."""
        stop = self.file.size if self.stop is None else self.stop
        return stop - self.start

    @property
    def name(self) -> str:
        """Name of the file, for `TextDocument.file`."""
        if self.file.format.layout in JSON_LAYOUTS and self.start > 0:
            return f"{self.file.name} from byte {self.start}"
        return self.file.name

    def partition(self, count: int) -> range:
        """Returns which of `count` equal parts of the file start in the range.

        For files of a known number of records. Ranges that partition the file give each part
        exactly once.
        """
        size = self.file.size
        first = -(-self.start * count // size) if self.start else 0
        stop = count if self.stop is None else -(-self.stop * count // size)
        return range(first, stop)


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

    Args:
      entry: A file, folder, pattern (with *, **, ?, [], {a,b} or {000..127}), URL, @FILE with one
        name per line, or `python_stdlib`.
      notes: Collects messages on files that are not read, or not as their neighbors are.

    Raises:
      UserError: The entry matches no readable file.
    """
    if entry == STDLIB:
        return _stdlib_files(stdlib_root())
    files = file_access.list_files(entry, _KEY)
    is_folder = file_access.path_type(entry) == "directory"
    if is_folder and not file_access.is_url(entry):
        folder = file_access.local_path(entry)
        manifest = _read_object(Path(folder) / "manifest.json")
        if manifest.keys() >= _PREPARED_MARKERS["manifest.json"]:
            raise UserError(
                f"{_KEY}={entry} is a prepared data set. Train on it with dataset_path={entry}."
            )
        names = [Path(os.path.relpath(file.path, folder)).as_posix() for file in files]
    else:
        names = [*file_access.relative_names([file.path for file in files])]
    files_by_name = dict(zip(names, files, strict=True))
    if is_folder:
        return _folder_files(entry, files_by_name, notes)
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


def _is_prepared(folder: Path) -> bool:
    """Returns whether prepare_data.py wrote a folder."""
    return any(
        fields <= _read_object(folder / name).keys() for name, fields in _PREPARED_MARKERS.items()
    )


def _read_object(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file; empty if there is none."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _leftovers(folder: Path, names: Iterable[str]) -> set[str]:
    """Returns the .arrow files that are not in the list of their saved Hugging Face dataset.

    A dataset saved again with fewer shards leaves the others behind. Raises UserError if a listed
    file is missing.
    """
    arrow_names = {name for name in names if name.endswith(".arrow")}
    leftovers: set[str] = set()
    for parent in {os.path.dirname(name) for name in arrow_names}:
        data_files = _read_object(folder / parent / _STATE).get("_data_files")
        if not isinstance(data_files, list):
            continue
        listed_names = {
            str(PurePosixPath(parent, str(file.get("filename")))) for file in data_files
        }
        missing = sorted(listed_names - arrow_names)
        if missing:
            raise UserError(
                f"{folder / parent / _STATE} lists {missing[0]}, which is missing. Save the "
                "data set again."
            )
        names_in_parent = {name for name in arrow_names if os.path.dirname(name) == parent}
        leftovers |= names_in_parent - listed_names
    return leftovers


def _list_names(names: Iterable[str]) -> str:
    """Names a few of some files, with their number if there are more."""
    sorted_names = sorted(map(printable, names), key=file_access.natural_key)
    listed = ", ".join(sorted_names[:_MAX_NAMED_FILES])
    num_more = len(sorted_names) - _MAX_NAMED_FILES
    return f"{listed} and {num_more:,} more" if num_more > 0 else listed


def _note_other_kinds(entry: str, formats: dict[str, FileFormat], notes: list[str]) -> None:
    """Adds a note on plain text among files of rows, which becomes documents too."""
    texts = [name for name, file_format in formats.items() if file_format.layout is Layout.TEXT]
    num_others = len(formats) - len(texts)
    if texts and num_others:
        notes.append(
            f"note: {entry}: {pluralize(len(texts), 'file')} of plain text among "
            f"{pluralize(num_others, 'file')} of rows, read as documents too: {_list_names(texts)}"
        )


def _folder_files(
    entry: str, files_by_name: dict[str, FileInfo], notes: list[str]
) -> list[SourceFile]:
    """Returns files of a folder with a known extension, in natural order.

    `notes` collects messages on files that are not read. Raises UserError if there is none to read.
    """
    if not file_access.is_url(entry):
        files_by_name = _without_outputs(Path(file_access.local_path(entry)), files_by_name)
    formats: dict[str, FileFormat] = {}
    unknown_names: list[str] = []
    for name in files_by_name:
        if _CACHED.fullmatch(name):
            continue
        file_format = known_format(name)
        if file_format is None:
            unknown_names.append(name)
        else:
            formats[name] = file_format
    metadata_names = _metadata_files(formats)
    chosen_formats = {name: formats[name] for name in formats if name not in metadata_names}
    if metadata_names:
        notes.append(
            f"note: {entry}: {pluralize(len(metadata_names), 'file')} about the data not read: "
            f"{_list_names(metadata_names)}"
        )
    read_paths = {*file_access.real_paths([files_by_name[name].path for name in chosen_formats])}
    unknown_paths = file_access.real_paths([files_by_name[name].path for name in unknown_names])
    # Targets of links that are read, as in the cache of the hub, are not named.
    unread_names = [
        name
        for name, path in zip(unknown_names, unknown_paths, strict=True)
        if path not in read_paths
    ]
    if unread_names:
        notes.append(
            f"note: {entry}: {pluralize(len(unread_names), 'file')} with other endings not read: "
            f"{_list_names(unread_names)} (a pattern reads them as plain text)"
        )
    _note_other_kinds(entry, chosen_formats, notes)
    if not chosen_formats:
        raise UserError(
            f"{_KEY}={entry}: the folder holds no file that ends in {READ_ENDINGS}. To read other "
            f"plain text, give a pattern, for example '{_KEY}={entry}/**/*.py'."
        )
    sorted_names = sorted(chosen_formats, key=file_access.natural_key)
    return [_source_file(files_by_name[name], name) for name in sorted_names]


def _without_outputs(folder: Path, files_by_name: dict[str, FileInfo]) -> dict[str, FileInfo]:
    """Leaves out subfolders that prepare_data.py wrote, and leftovers of saved datasets."""
    subfolders = {parent for name in files_by_name for parent in PurePosixPath(name).parents[:-1]}
    prepared_prefixes = tuple(f"{name}/" for name in subfolders if _is_prepared(folder / name))
    names = {name for name in files_by_name if not name.startswith(prepared_prefixes)}
    names -= _leftovers(folder, names)
    return {name: file for name, file in files_by_name.items() if name in names}


def _metadata_files(formats: dict[str, FileFormat]) -> set[str]:
    """Returns the files of a folder that describe its data, by their names."""
    base_names = {name: os.path.basename(name).lower() for name in formats}
    layouts = {file_format.layout for file_format in formats.values()}
    metadata_names: set[str] = set()
    if layouts & (TABLE_LAYOUTS | RECORD_LAYOUTS):
        metadata_names |= {name for name in formats if base_names[name] in _TABLE_METADATA}
    texts = {name for name in formats if formats[name].layout is Layout.TEXT}
    # With more text than that, a README is a document like any other.
    describes_rows = all(_ROW_METADATA.fullmatch(base_names[name]) for name in texts)
    if len(texts) < len(formats) and describes_rows:
        metadata_names |= texts
    return metadata_names


def stdlib_root() -> Path:
    """Returns the folder of the standard library of the running interpreter."""
    return Path(sysconfig.get_paths()["stdlib"])


def _stdlib_files(root: Path) -> list[SourceFile]:
    """Returns the Python files of the standard library, in order of names."""
    names = []
    for parent, folders, files in os.walk(root):
        # os.walk enters the folders that stay in this list.
        folders[:] = [name for name in folders if name[0] != "." and name not in _NOT_STDLIB]
        relative_parent = Path(parent).relative_to(root)
        for name in files:
            if re.fullmatch(r"[^.].*\.py", name):
                names.append((relative_parent / name).as_posix())
    # Build settings contain paths of the build machine.
    names = sorted(name for name in names if not name.startswith(("config-", "_sysconfigdata")))
    if not names:
        raise UserError(
            f"{_KEY}={STDLIB}: this interpreter has no source files in {root}. Give a folder of "
            "text instead."
        )
    sources = []
    for name in names:
        path = f"{root}/{name}"
        sources.append(SourceFile(path, name, os.path.getsize(path), FileFormat(Layout.STDLIB)))
    return sources
