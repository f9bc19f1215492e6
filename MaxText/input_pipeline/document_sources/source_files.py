"""Which files `prepare_source` stands for: files, folders, patterns, URLs, saved data sets.

Of a local folder all files below it are read whose endings are known. Left out are hidden ones and
the sub-folders that prepare_data.py wrote (they hold its manifest.json, records.json or
export.json), so that what is made out of a folder may lie in it.
The order depends on names only, never on the machine.
"""

import glob
import json
import os
import stat
import sysconfig
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from MaxText.errors import UserError
from MaxText.input_pipeline import storage
from MaxText.input_pipeline.document_sources.file_formats import (
    NOT_TEXT,
    PLAIN,
    READ_ENDINGS,
    SEEKING,
    Format,
    Kind,
    kind_of,
    recognise,
)
from MaxText.input_pipeline.document_sources.json_rows import token_ids

STDLIB = "python_stdlib"

_KEY = "prepare_source"

# Folders of the standard library that hold other people's packages or nothing to read.
_NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__"}

# A folder that the Hugging Face datasets library saved says here which arrow files it has, in
# order. Other arrow files in it are results that the library kept for itself.
_STATE = "state.json"
_KEPT_RESULT = "cache-"

# Beside tables and records these are about them, and no text of the corpus.
_TABLES = {Format.ARROW, Format.PARQUET, Format.ARRAY_RECORD, Format.TFRECORD}
_ABOUT_TABLES = {
    _STATE,
    "dataset_dict.json",
    "dataset_info.json",
    "dataset_infos.json",
    "export.json",
    "features.json",
    "readme.md",
}


# What prepare_data.py puts into the folders that it makes, and fields by which it is told from
# files of other programs of that name. Those of the first two hold token ids.
_MADE_OF_IDS = {
    "manifest.json": {"schema_version", "tokenizer", "splits"},
    "records.json": {"schema_version", "data_set", "tokenizer_sha256"},
}
_MADE = {**_MADE_OF_IDS, "export.json": {"schema_version", "keys", "units_sha256"}}


@dataclass(frozen=True)
class SourceFile:
    """A file to read.

    Attributes:
      path: local path or URL.
      name: of the file below the folder or pattern that it was found by.
      size: bytes on disk, 0 where that is not known before reading.
      kind: what it holds.
      skip_undecodable: leave it out when it is not UTF-8, where that is otherwise an error.
    """

    path: str
    name: str
    size: int
    kind: Kind
    skip_undecodable: bool = False


def split_entries(prepare_source: str) -> list[str]:
    """The entries of a comma separated list; commas inside {braces} do not separate.

    Raises:
      UserError: there is none.
    """
    entries, begun = [], ""
    for part in prepare_source.split(","):
        begun += part
        if begun.count("{") > begun.count("}"):
            begun += ","
        else:
            entries.append(begun.strip())
            begun = ""
    entries = [entry for entry in [*entries, begun.strip()] if entry]
    if not entries:
        raise UserError(
            f"{_KEY} is not set: give files, folders, patterns or URLs of text ({READ_ENDINGS}), "
            f"comma separated, or {STDLIB}."
        )
    return entries


def find_files(entry: str) -> list[SourceFile]:
    """The files of one entry, in order; reads none of them.

    Args:
      entry: a file, folder, pattern (with *, **, ?, [], {a,b} or {000..127}), URL, @FILE with one
        name per line, or `python_stdlib`.

    Raises:
      UserError: it stands for no file that can be read.
    """
    try:
        if entry == STDLIB:
            root = stdlib_root()
            return [
                SourceFile(str(path), name, path.stat().st_size, PLAIN, skip_undecodable=True)
                for path, name in ((path, _below(path, root)) for path in _stdlib_files(root))
            ]
        if storage.is_url(entry):
            return _remote_files(entry)
        path = Path(storage.local_path(entry))
        if path.is_dir():
            return _folder_files(path, entry)
        if not (path.exists() or glob.has_magic(entry) or entry.startswith("@") or "{" in entry):
            raise UserError(f"{_KEY}={entry}: no such file or folder (seen from {Path.cwd()}).")
        paths = storage.list_files(entry, _KEY)
        return [_source_file(path, name) for path, name in _named(paths)]
    except OSError as error:
        place = error.filename or entry
        raise UserError(
            f"{_KEY}={entry}: {place} cannot be read: {error.strerror or error}."
        ) from error


def _named(paths: list[str]) -> list[tuple[str, str]]:
    return list(zip(paths, storage.names_below(paths), strict=True))


def _source_file(path: str, name: str) -> SourceFile:
    """A file that was named, or matches a pattern: any ending but those of no text."""
    kind = kind_of(name)
    ending = os.path.splitext(name)[1].lower()
    if ending in NOT_TEXT:
        raise UserError(
            f"{path}: {ending} files are not read. Convert it to plain text or to .jsonl (one "
            "object with the text per line), which may be compressed (.gz .zst .xz .bz2)."
        )
    if kind.format in SEEKING and kind.compression:
        raise UserError(
            f"{path}: {kind.format.value} files are not read when they are compressed as a whole. "
            "Unpack it first."
        )
    if storage.is_url(path):
        return SourceFile(path, name, _remote_size(path), kind)
    path = storage.local_path(path)
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        raise UserError(
            f"{path} is no plain file, and what it gives cannot be read twice. Copy what it holds "
            "to a file and name that, or leave it out of prepare_source."
        )
    # Of a name that is not UTF-8 Python keeps the bytes, which cannot be shown or stored.
    name = os.fsencode(name).decode(errors="replace")
    return SourceFile(path, name, found.st_size, kind)


def _remote_size(url: str) -> int:
    system, name = storage.file_system(url)
    return system.info(name).get("size") or 0


def _remote_files(entry: str) -> list[SourceFile]:
    """Files of a URL; of a folder those with an ending that is read."""
    named = _named(storage.list_files(entry, _KEY))
    system, name = storage.file_system(entry)
    if not glob.has_magic(entry) and "{" not in entry and system.isdir(name):
        named = [pair for pair in _readable(named) if not _is_kept_result(pair[1])]
        if not named:
            raise _nothing_to_read(entry, [])
    return [_source_file(path, name) for path, name in named]


def _readable(named: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Those of (path, name) with an ending that is read, and not about tables beside them."""
    kinds = {name: kind for _, name in named if (kind := recognise(name))}
    hidden = _ABOUT_TABLES if any(kind.format in _TABLES for kind in kinds.values()) else set()
    return [
        (path, name)
        for path, name in named
        if name in kinds and os.path.basename(name).lower() not in hidden
    ]


def _is_kept_result(name: str) -> bool:
    return os.path.basename(name).startswith(_KEPT_RESULT) and name.endswith(".arrow")


def _nothing_to_read(entry: str, found: list[str]) -> UserError:
    """The error for a folder, with a pattern that suits the names `found` below it."""
    endings = Counter(os.path.splitext(name)[1] for name in found)
    unreadable = bool(endings) and all(each.lower() in NOT_TEXT for each in endings)
    if not unreadable:
        endings = {each: count for each, count in endings.items() if each.lower() not in NOT_TEXT}
    # The commonest ending, of equally common ones the first by name.
    ending = min(endings, key=lambda each: (-endings[each], each), default=".py")
    folders = "**/" if any("/" in name or ending for name in found) else ""
    pattern = f"{entry.rstrip('/')}/{folders if found else '**/'}*{ending}"
    remedy = f"To read other plain text, give a pattern, for example '{_KEY}={pattern}'."
    if unreadable:
        remedy = "Convert them to plain text or to .jsonl, one object with the text per line."
    return UserError(
        f"{_KEY}={entry}: the folder holds no file that ends in {READ_ENDINGS}. {remedy}"
    )


def _is_made(folder: str, fields_by_name: Mapping[str, set[str]]) -> bool:
    """Whether prepare_data.py made a folder, by one of its files with these fields."""
    for name, fields in fields_by_name.items():
        try:
            content = json.loads(Path(folder, name).read_bytes())
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(content, dict) and fields <= content.keys():
            return True
    return False


def _folder_files(folder: Path, entry: str) -> list[SourceFile]:
    """Files of a local folder with an ending that is read, in natural order of their names."""
    if _is_made(str(folder), _MADE_OF_IDS):
        raise token_ids(f"{_KEY}={entry}", str(folder), "what prepare_data.py made of text")
    found = _walk(folder, skipped_folders=set(), skip_made=True)
    saved = {}
    for path in found:
        if path.name == _STATE and (files := _saved_files(path)) is not None:
            saved[path.parent] = files
    named = [
        (str(path), _below(path, folder))
        for path in found
        if path.suffix != ".arrow"
        or (path in saved[path.parent] if path.parent in saved else not _is_kept_result(path.name))
    ]
    places = {str(path): place for files in saved.values() for place, path in enumerate(files)}
    named = _readable(named)
    if not named:
        raise _nothing_to_read(entry, [_below(path, folder) for path in found])
    # Saved arrow files keep the order that their folder states.
    named.sort(
        key=lambda pair: (
            storage.natural_key(os.path.dirname(pair[1]) if pair[0] in places else pair[1]),
            places.get(pair[0], -1),
        )
    )
    return [_source_file(path, name) for path, name in named]


def _saved_files(state: Path) -> list[Path] | None:
    """The arrow files that a state.json of the datasets library lists; None if it is another's.

    Raises:
      UserError: one is missing, or rows were chosen out of them.
    """
    try:
        content = json.loads(state.read_bytes())
        names = [file["filename"] for file in content["_data_files"]]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    if content.get("_indices_data_files"):
        raise UserError(
            f"{state} chooses rows out of its arrow files. Save the data set again after "
            "flatten_indices()."
        )
    files = []
    for name in names:
        # A name that leads elsewhere would read files that are not in this folder.
        if not isinstance(name, str) or name != os.path.basename(name) or name in ("", ".", ".."):
            raise UserError(f"{state} lists {name!r}, which is no plain file name. Save it again.")
        files.append(state.parent / name)
        if not files[-1].is_file():
            raise UserError(f"{state} lists {name}, which is missing beside it. Copy it again.")
    return files


def _below(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix()


def _walk(folder: Path, skipped_folders: set[str], skip_made: bool = False) -> list[Path]:
    """Files below `folder` without hidden ones, ordered by their names relative to it.

    Args:
      skipped_folders: names of sub-folders that are left out.
      skip_made: leave out those that prepare_data.py made, too.
    """

    def stop(error: OSError) -> None:
        raise error

    found = []
    for parent, folders, names in os.walk(folder, onerror=stop):
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".")
            and name not in skipped_folders
            and not (skip_made and _is_made(os.path.join(parent, name), _MADE))
        ]
        found += [Path(parent, name) for name in names if not name.startswith(".")]
    return sorted(found, key=lambda path: _below(path, folder))


def stdlib_root() -> Path:
    """Folder of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def _stdlib_files(root: Path) -> list[Path]:
    def written_by_people(path: Path) -> bool:
        # The build's own settings name folders of the machine that built Python.
        first = path.relative_to(root).parts[0]
        return path.suffix == ".py" and not first.startswith(("config-", "_sysconfigdata"))

    files = [path for path in _walk(root, _NOT_STDLIB) if written_by_people(path)]
    if not files:
        raise UserError(
            f"{_KEY}={STDLIB}: this interpreter has no source files in {root}. Give a folder of "
            "text instead."
        )
    return files
