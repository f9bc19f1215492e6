"""Ways to break the files of a run while it reads them, and to restore them."""

import contextlib
from pathlib import Path

import pytest

from MaxText.input_pipeline.sequences.batch_source import BatchSource
from MaxText.storage.errors import FileReadError
from tests.input_pipeline.small_data import data_keys, open_train, quiet, random_documents, take
from tests.input_pipeline.token_store import token_files

DOCUMENTS = random_documents(3, 60, 40)
# All that is read in place; other records are imported at the first use.
IN_PLACE = ("prepared_bin", "megatron")
KINDS = (*IN_PLACE, "prepared_array_record", "tfrecord", "array_record", "tar", "parquet")


def write(kind: str, folder: Path) -> list[Path]:
    """Writes DOCUMENTS in three parts; returns the files that hold their ids."""
    return token_files.write(kind, folder, [DOCUMENTS[i : i + 20] for i in (0, 20, 40)])


@pytest.fixture(name="kept")
def kept_files(tmp_path, request):
    """A data set of the kind that the test names, its files, and the keys that read it."""
    files = write(request.param, tmp_path / "set")
    keys = {"data_cache_dir": str(tmp_path / "cache"), "data_retry.delay": 0.0}
    return tmp_path / "set", files, keys


def opened(folder, keys, log=quiet, batch=2, **options):
    return open_train(data_keys(folder, **keys), batch, log=log, **options)


def undisturbed(folder, keys, count=20):
    return take(opened(folder, keys), count)


class Repair:
    """Takes the lines of a run, and calls `repair` at the n-th one about a failed try."""

    def __init__(self, repair, at: int = 1):
        self.lines: list[str] = []
        self._repair, self._at = repair, at

    def __call__(self, line: str) -> None:
        self.lines.append(line)
        if " Try " in line and sum(" Try " in line for line in self.lines) == self._at:
            self._repair()


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


@contextlib.contextmanager
def failing_reads(count: int, from_step: int = 0, then=lambda: None, path: str = ""):
    """The next reads of these steps call `then` and raise an I/O error, of a file if named."""
    read, failures = BatchSource.__getitem__, iter([True] * count)

    def fail(self, step):
        if step >= from_step and next(failures, False):
            then()
            if path:
                raise FileReadError(f"{path} cannot be read (Input/output error)")
            raise OSError(5, "Input/output error")
        return read(self, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BatchSource, "__getitem__", fail)
        yield
