"""The text that a data set is made from: files, folders, patterns, or Python's own library.

Documents are streamed in an order that depends on names only, never on the machine. Imports no
jax.
"""

import glob
import gzip
import io
import json
import os
import platform
import sysconfig
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO, cast

from MaxText.errors import UserError

STDLIB = "python_stdlib"

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".text")
ROW_SUFFIXES = (".jsonl", ".json")
_PACKED_SUFFIXES = (".bz2", ".tar", ".tgz", ".xz", ".zip", ".zst")
_BINARY_SUFFIXES = (".arrow", ".bin", ".docx", ".npy", ".npz", ".parquet", ".pdf", ".pickle")

# A plain file longer than this becomes several documents, cut at line ends: it bounds memory and
# lets all cores work on one big file. 1 MiB is some 250 thousand tokens, far beyond a window.
LONGEST_TEXT = 2**20
# How far a cut may look for the end of the line; a file without line ends is cut there.
_LONGEST_LINE = 2**16

# Folders of the standard library that hold other people's packages or nothing to read.
_NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class SourceFile:
    """A file to read, and whether one that is not UTF-8 is an error or left out."""

    path: Path
    skip_undecodable: bool = False

    @property
    def suffix(self) -> str:
        """Last suffix in lower case, without .gz."""
        suffixes = [suffix.lower() for suffix in self.path.suffixes]
        if suffixes and suffixes[-1] == ".gz":
            suffixes.pop()
        return suffixes[-1] if suffixes else ""


@dataclass(frozen=True)
class TextSource:
    """A corpus.

    Attributes:
      description: in words, without places on this machine.
      files: in the order they are read, none twice.
      text_field: field of a jsonl row that holds the text.
    """

    description: str
    files: tuple[SourceFile, ...]
    text_field: str

    def documents(self, skipped: Counter[str] | None = None) -> Iterator[str]:
        """Reads all documents, one at a time.

        Args:
          skipped: counts what is left out, by reason.

        Yields:
          Texts with at least one character that is no white space.

        Raises:
          UserError: a file cannot be read or decoded; a row is no JSON object or lacks the field.
        """
        skipped = Counter() if skipped is None else skipped
        for file in self.files:
            for text in self._texts(file, skipped):
                if text.strip():
                    yield text
                else:
                    skipped["empty"] += 1

    def _texts(self, file: SourceFile, skipped: Counter[str]) -> Iterator[str]:
        try:
            if file.skip_undecodable:
                try:
                    yield file.path.read_bytes().decode("utf-8-sig")
                except UnicodeDecodeError:
                    skipped["not UTF-8"] += 1
            elif file.suffix in ROW_SUFFIXES:
                with _open(file.path, binary=True) as lines:
                    yield from self._rows(file.path, lines)
            else:
                with _open(file.path, binary=False) as text:
                    while piece := text.read(LONGEST_TEXT):
                        if len(piece) == LONGEST_TEXT:
                            piece += text.readline(_LONGEST_LINE)
                        yield piece
        except UnicodeDecodeError as error:
            byte = error.object[error.start]
            raise UserError(
                f"{file.path} is not UTF-8 text (byte 0x{byte:02x}: {error.reason}). Convert it "
                "(iconv -t UTF-8) or leave it out of prepare_source."
            ) from error
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise UserError(f"{file.path} is not a whole gzip file: {error}") from error
        except OSError as error:
            raise UserError(f"{file.path} cannot be read: {error.strerror}") from error

    def _rows(self, path: Path, lines: IO) -> Iterator[str]:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            place = f"{path}:{number}"
            try:
                row = json.loads(line.decode("utf-8-sig"))
            except UnicodeDecodeError as error:
                raise UserError(f"{place} is not UTF-8 text ({error.reason}).") from error
            except ValueError as error:
                raise UserError(
                    f"{place} is not JSON ({error}). Each line of a .jsonl or .json file must be "
                    f'one object, for example {{"{self.text_field}": "..."}}.'
                ) from error
            if not isinstance(row, dict):
                raise UserError(
                    f"{place} is a JSON {type(row).__name__}, not an object. Each line must be one "
                    f'object, for example {{"{self.text_field}": "..."}}.'
                )
            text = row.get(self.text_field)
            if not isinstance(text, str):
                strings = [name for name, value in row.items() if isinstance(value, str)]
                raise UserError(
                    f"{place} has no text in field {self.text_field!r}; fields with text: "
                    f"{', '.join(strings) or 'none'}. Set text_field to one of them."
                )
            # JSON can name half of a surrogate pair, which no encoding of text can hold.
            yield text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _open(path: Path, binary: bool) -> IO:
    # newline="" keeps line ends as they are: bytes per token count what was written.
    opener = gzip.open if path.suffix.lower() == ".gz" else open
    content = cast(BinaryIO, opener(path, "rb"))
    return content if binary else io.TextIOWrapper(content, encoding="utf-8-sig", newline="")


def open_source(prepare_source: str, text_field: str) -> TextSource:
    """Finds the files that `prepare_source` names; reads none.

    Args:
      prepare_source: files, folders, patterns or `python_stdlib`, comma separated.
      text_field: field of a jsonl row that holds the text.

    Raises:
      UserError: nothing is named, or a name stands for no file that can be read.
    """
    entries = [entry.strip() for entry in prepare_source.split(",") if entry.strip()]
    if not entries:
        raise UserError(
            "prepare_source is not set: give files, folders or patterns of text "
            f"({_suffixes()}), comma separated, or {STDLIB}."
        )
    files: dict[str, SourceFile] = {}
    for entry in entries:
        for file in _find(entry):
            files.setdefault(os.path.realpath(file.path), file)
    names = [
        f"Python {platform.python_version()} standard library" if entry == STDLIB else entry
        for entry in entries
    ]
    return TextSource(", ".join(names), tuple(files.values()), text_field)


def _find(entry: str) -> list[SourceFile]:
    if entry == STDLIB:
        return [SourceFile(path, skip_undecodable=True) for path in _stdlib_files(stdlib_root())]
    if "://" in entry:
        raise UserError(
            f"prepare_source={entry}: only local files are read. Copy it to this machine first "
            "(gcloud storage cp -r, or wget)."
        )
    path = Path(entry).expanduser()
    if path.is_dir():
        return _folder_files(path, entry)
    if path.is_file():
        return [_readable(path)]
    matches = sorted(glob.glob(str(path), recursive=True)) if glob.has_magic(entry) else []
    files = []
    for match in map(Path, matches):
        if match.is_file():
            files.append(_readable(match))
    if not files:
        problem = "matches no file" if glob.has_magic(entry) else "no such file or folder"
        raise UserError(f"prepare_source={entry}: {problem} (seen from {Path.cwd()}).")
    return files


def _folder_files(folder: Path, entry: str) -> list[SourceFile]:
    files = map(SourceFile, _walk(folder, skipped_folders=set()))
    files = [file for file in files if file.suffix in TEXT_SUFFIXES + ROW_SUFFIXES]
    if not files:
        raise UserError(
            f"prepare_source={entry}: the folder holds no file that ends in {_suffixes()}. To read "
            f"other plain text, give a pattern, for example {entry.rstrip('/')}/**/*.py"
        )
    return files


def _suffixes() -> str:
    return " ".join(TEXT_SUFFIXES + ROW_SUFFIXES) + ", or these with .gz"


def _readable(path: Path) -> SourceFile:
    file = SourceFile(path)
    if file.suffix in _PACKED_SUFFIXES + _BINARY_SUFFIXES:
        raise UserError(
            f"{path}: {file.suffix} files are not read. Convert it to plain text or to .jsonl "
            "(one object with the text per line), which may be compressed as .gz."
        )
    return file


def _walk(folder: Path, skipped_folders: set[str]) -> list[Path]:
    """Files below `folder` without hidden ones, ordered by their names relative to it."""
    found = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [
            name for name in folders if not name.startswith(".") and name not in skipped_folders
        ]
        found += [Path(parent, name) for name in names if not name.startswith(".")]
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


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
            f"prepare_source={STDLIB}: this interpreter has no source files in {root}. Give a "
            "folder of text instead."
        )
    return files
