"""`open_corpus`: the text that `prepare_source` names, as units of work."""

import os
import platform
import re

from MaxText.input_pipeline import storage
from MaxText.input_pipeline.document_sources.corpus import Corpus
from MaxText.input_pipeline.document_sources.shards import UNIT_BYTES, cut_into_units
from MaxText.input_pipeline.document_sources.source_files import (
    STDLIB,
    SourceFile,
    find_files,
    split_entries,
)
from MaxText.input_pipeline.preparation.held_out import TEST, TRAIN, VALIDATION

_SPLIT_NAMES = {
    **dict.fromkeys(("train", "training"), TRAIN),
    **dict.fromkeys(("validation", "valid", "val", "dev", "eval"), VALIDATION),
    **dict.fromkeys(("test", "testing"), TEST),
}


def open_corpus(
    prepare_source: str, text_field: str, unit_bytes: int = UNIT_BYTES, *, max_bad_records: int = 0
) -> Corpus:
    """Finds the files that `prepare_source` names; reads none.

    Args:
      prepare_source: files, folders, patterns, URLs or `python_stdlib`, comma separated.
      text_field: field of a row or record that holds the text.
      unit_bytes: most bytes on disk of a unit, except where one file cannot be cut.
      max_bad_records: bad rows and files that are left out.

    Raises:
      UserError: nothing is named, or a name stands for no file that can be read.
    """
    entries = split_entries(prepare_source)
    files = _files(entries)
    splits = _splits(files)
    of_files = splits or [""] * len(files)
    units = cut_into_units(files, of_files, text_field, unit_bytes, max_bad_records)
    names = [
        f"Python {platform.python_version()} standard library" if entry == STDLIB else entry
        for entry in entries
    ]
    split_of = dict(zip(files, splits, strict=False))
    return Corpus(
        description=", ".join(names),
        num_files=len(files),
        units=units,
        splits=tuple(split_of[unit.parts[0].file] for unit in units) if splits else (),
    )


def _files(entries: list[str]) -> list[SourceFile]:
    """The files of all entries, none twice."""
    files: dict[str, SourceFile] = {}
    for entry in entries:
        for file in find_files(entry):
            is_local = not storage.is_url(file.path)
            files.setdefault(os.path.realpath(file.path) if is_local else file.path, file)
    return list(files.values())


def _splits(files: list[SourceFile]) -> list[str]:
    """The split of each file by its name, empty unless all have one and not all are training."""
    splits = [split for file in files if (split := _split_of(file.name))]
    if len(splits) < len(files) or set(splits) == {TRAIN}:
        return []
    return splits


def _split_of(name: str) -> str | None:
    """The split that a file's or its folder's name begins with, None where it names none."""
    for part in name.lower().split("/"):
        split = _SPLIT_NAMES.get(re.split(r"[-_.]", part)[0])
        if split:
            return split
    return None
