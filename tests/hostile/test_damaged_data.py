"""Files of tokens, damaged at random: an error, or a record that is passed over; where a format has
checksums never other tokens than were written.

What formats without checksums cannot show is said by `_UNCHECKED`.
"""

import dataclasses
import gzip
import itertools
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from MaxText.configuration.data_sections import Data, Preparation
from MaxText.errors import UserError
from MaxText.input_pipeline.loader import train_loader
from MaxText.input_pipeline.rows.batch_plan import BatchPlan
from MaxText.input_pipeline.streams.opening import open_token_data
from tests.hostile.files import damaged, tar_archive, torch_file
from tests.input_pipeline import small_data
from tests.input_pipeline.streams import token_files

VOCAB_SIZE = 3000
SIZES = (40, 7, 19, 1, 64, 33, 12, 25, 50, 3)
DOCUMENTS = token_files.documents(0, SIZES, VOCAB_SIZE)
DAMAGES = 40


def _tfrecord_gz(path: Path) -> None:
    plain = path.with_suffix("")
    token_files.write_tfrecord(plain, DOCUMENTS)
    path.write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()


def _tar_of_torch(path: Path) -> None:
    members = {
        f"s/{number:06d}.input_id.pth": torch_file(ids) for number, ids in enumerate(DOCUMENTS)
    }
    path.write_bytes(tar_archive(members))


def _prepared(path: Path, file_format: str) -> None:
    small_data.write_data_set(
        path,
        {"train": [*DOCUMENTS]},
        vocab_size=VOCAB_SIZE,
        file_format=file_format,  # pyright: ignore[reportArgumentType]
    )


# Name of what is damaged, and how all of it is written below a folder. Parquet is written with
# checksums of its pages; what torch.save writes has those of zip. An index and a manifest have
# none, and must fit the data exactly.
_CHECKED: dict[str, Callable[[Path], None]] = {
    "a.tfrecord": lambda folder: token_files.write_tfrecord(folder / "a.tfrecord", DOCUMENTS),
    "a.tfrecord.gz": lambda folder: _tfrecord_gz(folder / "a.tfrecord.gz"),
    "a.array_record": lambda folder: token_files.write_array_record(
        folder / "a.array_record", DOCUMENTS
    ),
    "train/tokens-00000-of-00001.array_record": lambda folder: _prepared(folder, "array_record"),
    "manifest.json": lambda folder: _prepared(folder, "bin"),
    "a.idx": lambda folder: token_files.write_megatron(folder / "a", DOCUMENTS),
    "a.parquet": lambda folder: token_files.write_parquet(folder / "a.parquet", DOCUMENTS),
    "torch.tar": lambda folder: _tar_of_torch(folder / "torch.tar"),
}
# Ids that were changed into other ids cannot be told from those that were written.
_UNCHECKED: dict[str, Callable[[Path], None]] = {
    "a.bin": lambda folder: token_files.write_megatron(folder / "a", DOCUMENTS),
    "stream.arrow": lambda folder: token_files.write_arrow(folder / "stream.arrow", DOCUMENTS),
    "file.arrow": lambda folder: token_files.write_arrow(folder / "file.arrow", DOCUMENTS, False),
    "a.tar": lambda folder: token_files.write_tar(folder / "a.tar", DOCUMENTS),
    "train/tokens-00000-of-00001.bin": lambda folder: _prepared(folder, "bin"),
}


@dataclasses.dataclass
class _Read:
    """What came out of a damaged data set: documents, None for each that cannot be read."""

    documents: list[np.ndarray | None]
    error: str = ""


def _read(folder: Path, cache: Path, skip: bool) -> _Read:
    data = Data(
        dataset_path=str(folder),
        data_cache_dir=str(cache),
        on_bad_record="skip" if skip else "fail",
    )
    try:
        tokens = open_token_data(
            str(folder),
            key="dataset_path",
            data=data,
            preparation=Preparation(),
            split="train",
            for_training=True,
            show=lambda line: None,
        )
        offsets = tokens.stream.document_offsets.tolist()
    except UserError as error:
        return _Read([], str(error))
    found: list[np.ndarray | None] = []
    for place in itertools.pairwise(offsets):
        try:
            found += tokens.stream.ranges([place])
        except UserError:
            found.append(None)
    return _Read(found)


def _damaged(tmp_path: Path, name: str, write: Callable[[Path], None]):
    """Folders with one damaged file each."""
    whole = tmp_path / "whole"
    if not name.startswith(("train/", "manifest")):
        whole.mkdir()
    write(whole)
    before = (whole / name).read_bytes()
    for number, (after, _) in enumerate(damaged(name, before, DAMAGES)):
        if after != before:
            folder = tmp_path / str(number)
            shutil.copytree(whole, folder)
            (folder / name).write_bytes(after)
            yield folder


@pytest.mark.parametrize("name", [*_CHECKED, *_UNCHECKED])
def test_damage_is_an_error_or_leaves_out_documents(tmp_path, name):
    checked = name in _CHECKED
    written = {ids.tobytes() for ids in DOCUMENTS}
    noticed = 0
    for number, folder in enumerate(_damaged(tmp_path, name, {**_CHECKED, **_UNCHECKED}[name])):
        skip = not checked or number % 2 == 0
        found = _read(folder, tmp_path / "cache", skip)
        whole = [ids for ids in found.documents if ids is not None]
        for ids in whole:
            assert ids.tobytes() in written or not checked, folder
            assert ids.dtype == np.int32
            assert ids.min(initial=0) >= 0
        # Damage of what nobody reads, such as padding, changes nothing.
        noticed += bool(found.error) or (checked and len(whole) < len(DOCUMENTS))
        if not skip and not found.error:
            assert len(found.documents) == len(DOCUMENTS), f"{folder}: no error for lost documents"
    # A file that is shorter or longer than it was is always noticed.
    assert noticed >= DAMAGES // (3 if checked else 4)


def test_ids_beyond_the_vocabulary_are_refused(tmp_path):
    token_files.write_megatron(tmp_path / "a", DOCUMENTS)
    content = bytearray((tmp_path / "a.bin").read_bytes())
    content[21] |= 0x80  # the upper half of id 10
    (tmp_path / "a.bin").write_bytes(content)
    batches = train_loader(
        Data(dataset_path=str(tmp_path), data_cache_dir=str(tmp_path / "cache")),
        plan=BatchPlan.constant(4, 16),
        vocab_size=VOCAB_SIZE,
        process_index=0,
        process_count=1,
    )
    with pytest.raises(UserError, match="vocab_size=3000"):
        list(itertools.islice(batches, 8))
    batches.close()
