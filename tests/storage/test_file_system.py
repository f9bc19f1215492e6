"""What programs see of a bucket: its files, its failures, and nothing that is out of date."""

import errno
import pickle
import sys

import fsspec
import pytest

from MaxText.errors import storage_error_line, storage_failure
from MaxText.storage.errors import ObjectStoreError
from MaxText.storage.paths import COMMIT_MARK, parse_path
from tests.refusals import refused
from tests.storage.emulator import Fault

pytestmark = pytest.mark.usefixtures("clients")


def test_files_and_folders_also_of_others(bucket, emulator):
    folder = parse_path(f"{bucket}/run", "base_output_directory")
    folder.mkdir(parents=True, exist_ok=True)
    assert not (folder / "a").exists()
    (folder / "a").write_text("one")
    (folder / "b" / "c").write_bytes(bytes(range(256)) * 40_000)  # in several pieces
    assert (folder / "b" / "c").read_bytes() == bytes(range(256)) * 40_000
    system, path = fsspec.core.url_to_fs(f"{bucket}/run/a")
    assert pickle.loads(pickle.dumps(system)).cat_file(path) == b"one"  # as in other processes
    assert (folder.is_dir(), folder.is_file()) == (True, False)
    assert sorted(path.name for path in folder.iterdir()) == ["a", "b"]
    (folder / "a").rename(folder / "d")
    (folder / "b").rename(folder / "e")
    assert sorted(path.name for path in folder.iterdir()) == ["d", "e"]
    emulator.write(f"{bucket}/run/f", b"two")  # as TensorStore or another host
    assert sorted(path.name for path in folder.iterdir()) == ["d", "e", "f"]
    assert (folder / "f").exists()
    folder.rmtree()
    assert not folder.exists()


@pytest.mark.parametrize("status", [503, 429, 0, -1])
def test_a_failure_that_passes_is_not_seen(bucket, emulator, no_waits, status):
    file = parse_path(f"{bucket}/file", "x")
    with emulator.failing(Fault(status, times=2)):
        file.write_text("one")
    with emulator.failing(Fault(status, times=3)):
        assert file.read_text() == "one"
    with emulator.failing(Fault(503, "POST /upload", times=2, after=True)):
        file.write_text("two")
    assert file.read_text() == "two"


def test_a_bucket_that_does_not_answer_is_not_an_empty_one(bucket, emulator, no_waits):
    file = parse_path(f"{bucket}/folder/file", "x")
    file.write_text("one")
    with emulator.failing(Fault(503)):
        for ask in (
            file.exists,
            file.is_file,
            file.is_dir,
            file.parent.exists,
            file.parent.is_dir,
            lambda: [*file.parent.iterdir()],
            file.read_text,
            lambda: file.write_text("two"),
        ):
            with pytest.raises(ObjectStoreError, match="503") as caught:
                ask()
            assert caught.value.errno == errno.EIO
    assert file.read_text() == "one"


def test_a_bucket_that_refuses(bucket, emulator, no_waits):
    file = parse_path(f"{bucket}/folder/file", "x")
    with emulator.failing(Fault(403)):
        error = refused("folder/file", file.write_text, "one")
    failure = storage_failure(error)
    assert failure is not None
    assert "that right (the role roles/storage.objectUser" in storage_error_line(failure)
    assert isinstance(error, ObjectStoreError)
    assert error.errno == errno.EINVAL
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.errno) == (str(error), error.errno)


def test_other_storage_and_a_missing_package(monkeypatch):
    for path in ("s3://b/x", "hf://b/x", "nothing://b"):
        refused("base_output_directory", parse_path, path, "base_output_directory")
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    message = r"base_output_directory=gs://b/x needs .*jaxpretrain\[gcs\]"
    refused(message, parse_path, "gs://b/x", "base_output_directory")


def test_names_are_taken_to_the_letter(bucket):
    for name in ("run1", "run2", "run?"):
        parse_path(f"{bucket}/{name}/file", "x").write_text(name)
    parse_path(f"{bucket}/run?", "x").rmtree()
    assert {path.name for path in parse_path(bucket, "x").iterdir()} == {"run1", "run2"}


def test_of_a_step_the_mark_goes_first(bucket, emulator, no_waits):
    step = parse_path(f"{bucket}/run/3", "x")
    (step / COMMIT_MARK).write_text("")
    (step / "items" / "array").mkdir(parents=True)
    (step / "items" / "array" / "0").write_text("numbers")
    with emulator.failing(Fault(503, where="DELETE .*array")), pytest.raises(ObjectStoreError):
        step.rmtree()
    assert (step / "items" / "array" / "0").exists()
    assert not (step / COMMIT_MARK).exists()
