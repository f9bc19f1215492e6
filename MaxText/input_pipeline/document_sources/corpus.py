"""The corpus that `prepare_source` names, divided into independent shards."""

import dataclasses
import os
import platform
import re

from MaxText.input_pipeline.document_sources.shards import SHARD_BYTES, Shard, cut_into_shards
from MaxText.input_pipeline.document_sources.source_files import (
    STDLIB,
    SourceFile,
    resolve_files,
    split_entries,
)
from MaxText.storage import file_access

# Prefixes of file and folder names.
_SPLIT_NAMES = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev", "eval"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}


@dataclasses.dataclass(frozen=True)
class Corpus:
    """All text of `prepare_source`."""

    description: str  # without machine-specific paths
    num_files: int
    shards: tuple[Shard, ...]  # in document order
    splits: tuple[str, ...] = ()  # one per shard; empty if the source has none


def open_corpus(
    prepare_source: str,
    text_field: str,
    shard_bytes: int = SHARD_BYTES,
    *,
    max_bad_records: int = 0,
) -> Corpus:
    """Finds the files of `prepare_source` without reading them.

    A shard has at most `shard_bytes` on disk, unless it is a file that cannot be split. Raises
    UserError without entries, or for one that matches no readable file.
    """
    entries = split_entries(prepare_source)
    found: dict[str, SourceFile] = {}  # without duplicates
    for file in (file for entry in entries for file in resolve_files(entry)):
        is_local = not file_access.is_url(file.path)
        found.setdefault(os.path.realpath(file.path) if is_local else file.path, file)
    files = [*found.values()]
    splits = _splits(files)
    of_files = splits or [""] * len(files)
    shards = cut_into_shards(files, of_files, text_field, shard_bytes, max_bad_records)
    split_of = dict(zip(files, of_files, strict=True))
    names = [
        f"Python {platform.python_version()} standard library" if entry == STDLIB else entry
        for entry in entries
    ]
    return Corpus(
        description=", ".join(names),
        num_files=len(files),
        shards=shards,
        splits=tuple(split_of[shard.ranges[0].file] for shard in shards) if splits else (),
    )


def _splits(files: list[SourceFile]) -> list[str]:
    """Returns the split of each file; empty unless all have one and not all are training."""
    splits = [split for file in files if (split := _split_of(file.name))]
    if len(splits) < len(files) or set(splits) == {"train"}:
        return []
    return splits


def _split_of(name: str) -> str | None:
    """Returns the split that a file or folder name starts with, or None."""
    for part in name.lower().split("/"):
        split = _SPLIT_NAMES.get(re.split(r"[-_.]", part)[0])
        if split:
            return split
    return None
