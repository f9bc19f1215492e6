"""Files of tokens, damaged at random: an error, or a record that is passed over; where a format has
checksums never other tokens than were written."""

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from MaxText.errors import UserError
from tests.hostile.files import damaged
from tests.input_pipeline import small_data
from tests.input_pipeline.token_store import token_files

VOCAB_SIZE = 3000
DOCUMENTS = token_files.documents(0, (40, 7, 19, 1, 64, 33, 12, 25, 50, 3), VOCAB_SIZE)
DAMAGES = 40


def _megatron(path: Path, documents: list[np.ndarray]) -> None:
    token_files.write_megatron(path.with_suffix(""), documents)


def _prepared(path: Path, documents: list[np.ndarray]) -> None:
    folder = path.parent if path.name == "manifest.json" else path.parent.parent
    file_format = "array_record" if path.suffix == ".array_record" else "bin"
    keys = {"vocab_size": VOCAB_SIZE, "file_format": file_format}
    small_data.write_data_set(folder, {"train": [*documents]}, **keys)


# Name of what is damaged, and how all of it is written. Parquet is written with checksums of its
# pages; what torch.save writes has those of zip. An index and a manifest have none, and must fit
# the data exactly.
_CHECKED = {
    "a.tfrecord": token_files.write_tfrecord,
    "a.tfrecord.gz": token_files.write_compressed_tfrecord,
    "a.array_record": token_files.write_array_record, "a.idx": _megatron,
    "train/tokens-00000.array_record": _prepared, "manifest.json": _prepared,
    "a.parquet": token_files.write_parquet, "torch.tar": token_files.write_torch_tar,
}  # fmt: skip
# Ids that were changed into other ids cannot be told from those that were written.
_UNCHECKED = {
    "a.bin": _megatron, "stream.arrow": token_files.write_arrow,
    "file.arrow": lambda path, documents: token_files.write_arrow(path, documents, False),
    "a.tar": token_files.write_tar, "train/tokens-00000.bin": _prepared,
}  # fmt: skip


def _read(folder: Path, cache: Path, skip: bool) -> tuple[list[np.ndarray | None], str]:
    """Documents, None for each that cannot be read, and what an error or a note says."""
    bad = "skip" if skip else "fail"
    found: list[np.ndarray | None] = []
    try:
        tokens = token_files.open_data(folder, cache, **{"bad_records.action": bad})
        offsets = tokens.store.document_offsets
    except UserError as error:
        return [], str(error)
    for start, stop in itertools.pairwise(offsets):
        try:
            found.append(tokens.store.read(np.array([start]), np.array([stop])))
        except UserError:
            found.append(None)
    return found, "; ".join(tokens.skipped)


def _damaged(tmp_path: Path, name: str, write: Callable[[Path, list[np.ndarray]], None]):
    """Folders with one damaged file each."""
    whole = tmp_path / "whole"
    if write is not _prepared:
        whole.mkdir()
    write(whole / name, DOCUMENTS)
    before = (whole / name).read_bytes()
    for number, (after, _) in enumerate(damaged(name, before, DAMAGES)):
        if after != before:
            folder = tmp_path / str(number)
            shutil.copytree(whole, folder)
            (folder / name).write_bytes(after)
            yield folder


@pytest.mark.parametrize("name", [*_CHECKED, *_UNCHECKED])
def test_damage_is_an_error_or_skips_documents(tmp_path, name):
    checked = name in _CHECKED
    written, noticed = {ids.tobytes() for ids in DOCUMENTS}, 0
    for number, folder in enumerate(_damaged(tmp_path, name, {**_CHECKED, **_UNCHECKED}[name])):
        skip = not checked or number % 2 == 0
        documents, error = _read(folder, tmp_path / "cache", skip)
        whole = [ids for ids in documents if ids is not None]
        for ids in whole:
            assert ids.tobytes() in written or not checked, folder
            assert ids.dtype == np.int32
            assert ids.min(initial=0) >= 0
        # Damage of what no program reads, such as padding, changes nothing.
        noticed += bool(error) or (checked and len(whole) < len(DOCUMENTS))
        if not skip and not error:
            assert len(documents) == len(DOCUMENTS), f"{folder}: no error for lost documents"
    # A file that is shorter or longer than it was is always noticed.
    assert noticed >= DAMAGES // (3 if checked else 4)
