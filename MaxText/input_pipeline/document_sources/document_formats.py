"""Detects the layout and compression of a file from its name."""

import enum
import os
import re
from typing import NamedTuple


class Layout(enum.Enum):
    """Arrangement of documents in a decompressed file."""

    TEXT = "text"
    JSON_LINES = "jsonl"  # one value per line
    JSON = "json"  # the same, or one list
    TAR = "tar"
    PARQUET = "parquet"
    ARROW = "arrow"
    ARRAY_RECORD = "arrayrecord"
    TFRECORD = "tfrecord"
    STDLIB = "python_stdlib"  # skipped unless UTF-8


class FileFormat(NamedTuple):
    """Layout and compression: "", "gz", "zst", "xz" or "bz2"."""

    layout: Layout
    compression: str = ""


_LAYOUTS = {
    **dict.fromkeys((".txt", ".text", ".md", ".rst"), Layout.TEXT),
    **dict.fromkeys((".jsonl", ".ndjson"), Layout.JSON_LINES),
    ".json": Layout.JSON,
    **dict.fromkeys((".array_record", ".arrayrecord"), Layout.ARRAY_RECORD),
    **dict.fromkeys((".tfrecord", ".tfrecords"), Layout.TFRECORD),
    ".tar": Layout.TAR,
    ".parquet": Layout.PARQUET,
    ".arrow": Layout.ARROW,
}
_COMPRESSIONS = {".gz": "gz", ".zst": "zst", ".zstd": "zst", ".xz": "xz", ".bz2": "bz2"}

# OpenWebText's parts are tar archives without .tar in the name.
_OPENWEBTEXT_PART = re.compile(r"urlsf_subset.*_data\.xz")
# Numbers may follow the extension: x.tfrecord-00000-of-00010, pile.tfrecord.b500.
_NUMBERED = re.compile(r"(\.(?:tfrecords?|array_?record))(?:-\d+-of-\d+|\.b\d+)$")

JSON_LAYOUTS = {Layout.JSON_LINES, Layout.JSON}
TABLE_LAYOUTS = {Layout.PARQUET, Layout.ARROW}
RECORD_LAYOUTS = {Layout.ARRAY_RECORD, Layout.TFRECORD}

NOT_TEXT = {
    ".bin",
    ".h5",
    ".idx",
    ".model",
    ".npy",
    ".npz",
    ".pickle",
    ".pkl",
    ".pt",
    ".pth",
    ".safetensors",
    ".doc",
    ".docx",
    ".pdf",
    ".gif",
    ".jpeg",
    ".jpg",
    ".png",
    ".7z",
    ".rar",
    ".zip",
}
"""Endings of files that are certainly no text."""

READ_ENDINGS = (
    ".txt .md .rst .text .jsonl .json .tar .parquet .arrow .array_record .tfrecord, or text, json "
    "and tar with .gz .zst .xz .bz2"
)
"""What is read, for messages."""


def known_format(name: str) -> FileFormat | None:
    """Returns the format of a known extension, else None."""
    name = name.rsplit("/", 1)[-1].lower()
    if _OPENWEBTEXT_PART.fullmatch(name):
        return FileFormat(Layout.TAR, "xz")
    name = re.sub(r"\.t(gz|xz|bz2|zst)$", r".tar.\1", name)
    stem, ending = os.path.splitext(name)
    compression = _COMPRESSIONS.get(ending, "")
    stem, ending = os.path.splitext(_NUMBERED.sub(r"\1", stem if compression else name))
    if ending in _LAYOUTS:
        return FileFormat(_LAYOUTS[ending], compression)
    return None


def format_of(name: str) -> FileFormat:
    """Returns the format of any file; unknown extensions are plain text."""
    compression = _COMPRESSIONS.get(os.path.splitext(name)[1].lower(), "")
    return known_format(name) or FileFormat(Layout.TEXT, compression)
