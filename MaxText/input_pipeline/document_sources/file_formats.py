"""What a file holds and how it is compressed, told by its name."""

import enum
import re
from typing import NamedTuple


class Format(enum.Enum):
    """How documents lie in a file once it is decompressed."""

    TEXT = "plain text"
    LINES = "one document per line"
    ROWS = "one JSON value per line"
    JSON = "JSON values, one per line or in a list"
    COUNTED = "documents with their lengths"
    TAR = "tar archive"
    ZIP = "zip archive"
    PARQUET = "parquet"
    ARROW = "arrow"
    ARRAY_RECORD = "ArrayRecord"
    TFRECORD = "TFRecord"


class Kind(NamedTuple):
    """Format and compression: "", "gz", "zst", "xz" or "bz2"."""

    format: Format
    compression: str = ""


PLAIN = Kind(Format.TEXT)

_FORMATS = {
    ".txt": Format.TEXT,
    ".text": Format.TEXT,
    ".md": Format.TEXT,
    ".rst": Format.TEXT,
    ".jsonl": Format.ROWS,
    ".ndjson": Format.ROWS,
    ".json": Format.JSON,
    ".tar": Format.TAR,
    ".zip": Format.ZIP,
    ".parquet": Format.PARQUET,
    ".arrow": Format.ARROW,
    ".array_record": Format.ARRAY_RECORD,
    ".arrayrecord": Format.ARRAY_RECORD,
    ".tfrecord": Format.TFRECORD,
    ".tfrecords": Format.TFRECORD,
}
_COMPRESSIONS = {".gz": "gz", ".zst": "zst", ".zstd": "zst", ".xz": "xz", ".bz2": "bz2"}
_TAR_ENDINGS = {".tgz": "gz", ".txz": "xz", ".tbz2": "bz2", ".tzst": "zst"}

# OpenWebText's parts are tar archives that are not called so.
_OPENWEBTEXT_PART = re.compile(r"urlsf_subset.*_data\.xz")
# Records are often numbered after the ending: x.tfrecord-00000-of-00010, pile.tfrecord.b500.
_NUMBERED = re.compile(r"(\.(?:tfrecords?|array_?record))(?:-\d+-of-\d+|\.b\d+)$")

SEEKING = frozenset({Format.ZIP, Format.PARQUET, Format.ARROW, Format.ARRAY_RECORD})
"""Formats that are read in several places at once, so never as a stream."""

NOT_TEXT = frozenset(
    (
        *(".bin", ".h5", ".idx", ".model", ".npy", ".npz", ".pickle", ".pkl", ".pt", ".pth"),
        *(".safetensors", ".doc", ".docx", ".pdf", ".gif", ".jpeg", ".jpg", ".png"),
        *(".7z", ".rar"),
    )
)
"""Endings of files that are certainly no text."""

READ_ENDINGS = (
    ".txt .md .rst .text .jsonl .json .tar .zip .parquet .arrow .array_record .tfrecord .dat.zst, "
    "or text, json and tar with .gz .zst .xz .bz2"
)
"""What is read, for messages."""


def recognise(name: str) -> Kind | None:
    """The kind of a file with one of the endings that are read, None of any other.

    Args:
      name: of a file or of a member of an archive; folders before it do not matter.
    """
    name = name.rsplit("/", 1)[-1].lower()
    if _OPENWEBTEXT_PART.fullmatch(name):
        return Kind(Format.TAR, "xz")
    stem, compression = name, ""
    for ending, found in _COMPRESSIONS.items():
        if name.endswith(ending):
            stem, compression = name.removesuffix(ending), found
    for ending, found in _TAR_ENDINGS.items():
        if name.endswith(ending):
            return Kind(Format.TAR, found)
    stem = _NUMBERED.sub(r"\1", stem)
    if stem.endswith(".dat") and compression == "zst":
        return Kind(Format.COUNTED, compression)
    for ending, format in _FORMATS.items():
        if stem.endswith(ending):
            return Kind(format, compression)
    if compression == "gz" and "." not in stem:
        return Kind(Format.LINES, compression)
    return None


def kind_of(name: str) -> Kind:
    """The kind of any file: unknown endings are plain text, compressed or not."""
    known = recognise(name)
    if known is not None:
        return known
    for ending, compression in _COMPRESSIONS.items():
        if name.lower().endswith(ending):
            return Kind(Format.TEXT, compression)
    return PLAIN


def kind_of_member(archive: str, member: str) -> Kind:
    """The kind of a member of an archive; in a .jsonl.zst.tar they need no endings."""
    if archive.lower().endswith(".jsonl.zst.tar"):
        return recognise(member) or Kind(Format.ROWS, "zst")
    return kind_of(member)
