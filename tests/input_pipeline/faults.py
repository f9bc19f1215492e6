"""Ways to break the files of a run while it reads them, and to mend them again."""

import contextlib
import time
from pathlib import Path

import numpy as np
import pytest

from MaxText.input_pipeline.loader import train_loader
from MaxText.input_pipeline.rows.batch_plan import BatchPlan
from MaxText.input_pipeline.rows.row_batches import RowBatches

from .small_data import VOCAB_SIZE, data_keys, random_documents, write_data_set
from .streams import token_files
from .test_loader import LENGTH, assert_same, take

DOCUMENTS = random_documents(3, 60, 40)
KINDS = ("array_record", "bin", "tfrecord", "megatron", "webdataset", "records", "parquet")


def write(kind: str, folder: Path) -> list[Path]:
    """Writes DOCUMENTS; returns the files that hold their ids."""
    if kind in ("array_record", "bin"):
        write_data_set(folder, {"train": DOCUMENTS}, file_format=kind)
        return sorted([*folder.glob("train/tokens*")])
    folder.mkdir()
    if kind == "megatron":
        token_files.write_megatron(folder / "ids", DOCUMENTS)
        return [folder / "ids.bin"]
    name, write_one = {
        "tfrecord": ("ids{}.tfrecord", token_files.write_tfrecord),
        "webdataset": ("ids{}.tar", token_files.write_tar),
        "records": ("ids{}.array_record", token_files.write_array_record),
        "parquet": ("ids{}.parquet", token_files.write_parquet),
    }[kind]
    if kind == "parquet":
        pytest.importorskip("pyarrow", reason="parquet files need it")
    files = [folder / name.format(number) for number in range(3)]
    for number, file in enumerate(files):
        write_one(file, DOCUMENTS[20 * number : 20 * number + 20])
    return files


@pytest.fixture(name="kept")
def kept_files(tmp_path, request):
    """A data set of the kind that the test names, its files, and the keys that read it."""
    files = write(request.param, tmp_path / "set")
    keys = {"data_cache_dir": str(tmp_path / "cache"), "data_retry_seconds": 0.0}
    return tmp_path / "set", files, keys


def opened(folder, keys, show=lambda line: None, batch=2, **options):
    return train_loader(
        data_keys(folder, **keys),
        plan=BatchPlan.constant(batch, LENGTH),
        vocab_size=VOCAB_SIZE,
        show=show,
        **options,
    )


def undisturbed(folder, keys, count=20):
    return take(opened(folder, keys), count)


def assert_undisturbed(batches, expected):
    for batch, reference in zip(batches, expected, strict=True):
        assert_same(batch, reference)


def settle(iterator) -> None:
    """Waits until what reads ahead has nothing to do: damage then meets no read under way."""
    slots = iterator._reader._ahead._slots
    while slots._to_read < slots._to_take + 4 or len(slots._ready) < 4:
        time.sleep(0.01)


class Mend:
    """Takes the lines of a run, and mends the damage at one that says a read failed."""

    def __init__(self, mend, at: int = 1):
        self.lines: list[str] = []
        self._mend, self._at = mend, at

    def __call__(self, line: str) -> None:
        self.lines.append(line)
        if sum("could not be read" in line for line in self.lines) == self._at:
            self._mend()
            self._at = -1


def moved(files):
    """Moves files away; returns what puts them back."""
    for file in files:
        file.rename(f"{file}.away")
    return lambda: [Path(f"{file}.away").rename(file) for file in files]


def changed(files, change):
    """Changes the contents of files in place; returns what puts them back."""
    whole = {file: file.read_bytes() for file in files}
    for file, content in whole.items():
        file.write_bytes(change(content))
    return lambda: [file.write_bytes(content) for file, content in whole.items()]


def broken(content: bytes) -> bytes:
    """Each run of 16 bytes with one bit turned."""
    ids = np.frombuffer(content, np.uint8).copy()
    ids[len(ids) // 8 : -len(ids) // 4 : 16] ^= 1
    return ids.tobytes()


@contextlib.contextmanager
def failing_reads(count: int):
    """The next batches are errors of the system."""
    read, failures = RowBatches.__getitem__, iter([True] * count)

    def fail(self, step):
        if next(failures, False):
            raise OSError(5, "Input/output error")
        return read(self, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RowBatches, "__getitem__", fail)
        yield


def assert_same_or_lost(batches, expected) -> int:
    """Rows without weight; the others are those expected."""
    lost = 0
    for batch, reference in zip(batches, expected, strict=True):
        counted = batch.weights_BT.any(axis=1)
        lost += int((~counted).sum())
        for name in ("tokens_BT", "targets_BT", "weights_BT", "positions_BT", "segments_BT"):
            rows, others = getattr(batch, name), getattr(reference, name)
            np.testing.assert_array_equal(rows[counted], others[counted])
    return lost
