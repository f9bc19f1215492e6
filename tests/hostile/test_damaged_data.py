"""Files of tokens, damaged at random: an error, or a record that is passed over; where a format has
checksums never other tokens than were written.

What formats without checksums cannot show is said by `_UNCHECKED`.
"""

import dataclasses
import gzip
import itertools
import random
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
from tests.hostile.files import tar_archive, torch_file
from tests.input_pipeline import small_data
from tests.input_pipeline.streams import token_files

VOCAB_SIZE = 3000
SIZES = (40, 7, 19, 1, 64, 33, 12, 25, 50, 3)
DOCUMENTS = token_files.documents(0, SIZES, VOCAB_SIZE)
DAMAGES = 24


def _flip(content: bytearray, rng: random.Random) -> bytes:
    for _ in range(rng.choice((1, 1, 2, 8))):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    return bytes(content)


def _cut(content: bytearray, rng: random.Random) -> bytes:
    return bytes(content[: rng.randrange(len(content))])


def _zero(content: bytearray, rng: random.Random) -> bytes:
    start = rng.randrange(len(content))
    stop = min(len(content), start + rng.randrange(1, 200))
    content[start:stop] = bytes(stop - start)
    return bytes(content)


def _repeat(content: bytearray, rng: random.Random) -> bytes:
    start = rng.randrange(len(content))
    stop = min(len(content), start + rng.randrange(1, 200))
    return bytes(content[:stop] + content[start:])


KINDS: tuple[Callable[[bytearray, random.Random], bytes], ...] = (_flip, _cut, _zero, _repeat)


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
    whole.mkdir()
    if name.startswith(("train/", "manifest")):
        whole.rmdir()
    write(whole)
    rng = random.Random(name)
    for number in range(DAMAGES):
        folder = tmp_path / str(number)
        shutil.copytree(whole, folder)
        before = (whole / name).read_bytes()
        after = KINDS[number % len(KINDS)](bytearray(before), rng)
        (folder / name).write_bytes(after)
        if after != before:
            yield folder


@pytest.mark.parametrize("skip", [False, True], ids=["fail", "skip"])
@pytest.mark.parametrize("name", _CHECKED)
def test_checksums_let_no_other_tokens_through(tmp_path, name, skip):
    written = {ids.tobytes() for ids in DOCUMENTS}
    noticed = 0
    for folder in _damaged(tmp_path, name, _CHECKED[name]):
        found = _read(folder, tmp_path / "cache", skip)
        whole = [ids for ids in found.documents if ids is not None]
        assert {ids.tobytes() for ids in whole} <= written, folder
        # Damage of what nobody reads, such as padding, changes nothing.
        noticed += bool(found.error) or len(whole) < len(DOCUMENTS)
        if not skip and not found.error and len(found.documents) != len(DOCUMENTS):
            pytest.fail(f"{folder}: documents are missing, and nobody says so")
    assert noticed >= DAMAGES // 3


@pytest.mark.parametrize("name", _UNCHECKED)
def test_without_checksums_damage_is_an_error_or_other_ids(tmp_path, name):
    noticed = 0
    for folder in _damaged(tmp_path, name, _UNCHECKED[name]):
        found = _read(folder, tmp_path / "cache", skip=True)
        noticed += bool(found.error)
        for ids in found.documents:
            assert ids is None or (ids.dtype == np.int32 and ids.min(initial=0) >= 0)
    # A file that is shorter or longer than it was is always noticed.
    assert noticed >= DAMAGES // 4


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
    with pytest.raises(UserError, match="vocab_size=3000 is too small: id"):
        list(itertools.islice(batches, 8))
    batches.close()
