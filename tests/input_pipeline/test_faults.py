"""Reads that fail: retried until they succeed, skipped, or refused."""

import builtins
import errno
import itertools
import multiprocessing
import os
import re
import time

import pytest

from MaxText.errors import UserError
from MaxText.input_pipeline import prefetch
from tests.input_pipeline.faults import (
    IN_PLACE,
    KINDS,
    Repair,
    changed,
    failing_reads,
    kept_files,  # noqa: F401
    moved,
    opened,
    undisturbed,
)
from tests.input_pipeline.small_data import assert_same, data_keys, open_eval, take
from tests.refusals import refused


def of_kind(*kinds):
    return pytest.mark.parametrize("kept", kinds, indirect=True)


@of_kind(*IN_PLACE)
@pytest.mark.parametrize("fault", ["missing", "cut"])
def test_files_that_come_back_leave_the_batches_the_same(kept, fault):
    folder, files, keys = kept
    expected = undisturbed(folder, keys)
    log = Repair(lambda: restore(), at=2)
    iterator = opened(folder, keys, log)
    restore = moved(files)
    if fault == "cut":  # new files, so that one who keeps them open does not see the whole ones
        for file in files:
            content = file.with_name(f"{file.name}.away").read_bytes()
            file.write_bytes(content[: len(content) // 3])
    assert_same(take(iterator, 20), expected)
    messages = iterator.retries.drain()
    assert [line for line in log.lines if "Step 0" in line] == messages
    assert re.findall(r"Try (\d)", "".join(messages)) == ["2", "3"]
    assert iterator.retries.drain() == []


@of_kind("megatron")
def test_a_read_that_hangs_is_abandoned(kept, monkeypatch):
    monkeypatch.setattr(prefetch, "_SECONDS_TO_CLOSE", 0.05)
    folder, files, keys = kept
    expected = undisturbed(folder, keys)
    stuck = [folder.parent / f"{file.name}.stuck" for file in files]

    def repair():
        for file, pipe in zip(files, stuck, strict=True):
            file.rename(pipe)
        restore()

    keys = keys | {"data_retry.timeout": 0.3, "data_retry.attempts": 60}
    iterator = opened(folder, keys, Repair(repair))
    restore = moved(files)
    for file in files:
        os.mkfifo(file)  # opening it waits for a writer
    assert_same(take(iterator, 20), expected)
    assert "0.3 s" in iterator.retries.drain()[0]
    for pipe in stuck:
        os.close(os.open(pipe, os.O_RDWR))


@of_kind("prepared_bin")
@pytest.mark.parametrize("stop", [200, -1])
def test_a_mapped_file_that_is_cut(kept, stop):
    folder, _, keys = kept
    expected = undisturbed(folder, keys)
    iterator = opened(folder, keys, Repair(lambda: restore(), at=2))
    offsets = [folder / "train" / "document_offsets.npy"]
    restore = changed(offsets, lambda content: re.sub(rb"\d,\)", b",) ", content)[:stop])
    assert_same(take(iterator, 20), expected)
    assert re.findall("document_offsets.npy is damaged", "".join(iterator.retries.drain()))


@of_kind("prepared_bin")
def test_evaluation_retries_too(kept):
    folder, files, keys = kept
    data = data_keys(folder, eval_split="train", **keys)
    expected = list(open_eval(data, batch=4))
    evaluation = open_eval(data, batch=4, log=Repair(lambda: restore()))
    restore = moved(files)
    assert_same(evaluation, expected)
    assert "Step 0" in evaluation.retries.drain()[0]
    assert_same(evaluation, expected)
    assert evaluation.retries.drain() == []


@of_kind("megatron")
def test_a_missing_file_ends_the_run_after_all_tries(kept):
    folder, files, keys = kept
    log = Repair(lambda: None)
    iterator = opened(folder, keys | {"data_retry.attempts": 3}, log)
    restore = moved(files)
    refused(r"after 4 tries .*ids\.bin", next, iterator)
    assert sum(" Try " in line for line in log.lines) == 3
    # After the files are back the iterator goes on, and at the same step after another failure.
    restore()
    with failing_reads(1, from_step=9):
        assert_same(take(iterator, 20), undisturbed(folder, keys))


@of_kind("megatron", "prepared_bin")
def test_other_data_of_the_same_name_are_refused(kept):
    folder, files, keys = kept

    def replace():
        for file in files:
            content = file.read_bytes()
            file.unlink()  # so that one who keeps it open goes on reading the old one
            file.write_bytes(content[::-1])

    iterator = opened(folder, keys | {"data_retry.attempts": 2})
    with (
        failing_reads(1, from_step=4, then=replace, path=str(files[0])),
        pytest.raises(UserError, match=r"another batch|is damaged"),
    ):
        take(iterator, 20)


class Storage:
    """Counts looks at what lies below a folder, and lets some of them fail."""

    def __init__(self, folder, monkeypatch):
        self.calls, self.failing, self.number = 0, range(0), errno.EIO
        self._folder = str(folder)
        for place, name in (
            (os, "stat"),
            (os, "open"),
            (os, "scandir"),
            (os, "listdir"),
            (builtins, "open"),
        ):
            monkeypatch.setattr(place, name, self._counted(getattr(place, name)))

    def fail(self, calls, number=errno.EIO):
        """Lets these of the next calls fail, counted from 0."""
        self.calls, self.failing, self.number = 0, calls, number

    def _counted(self, real):
        def call(path, *arguments, **options):
            if str(path).startswith(self._folder):
                self.calls += 1
                if self.calls - 1 in self.failing:
                    raise OSError(self.number, os.strerror(self.number), str(path))
            return real(path, *arguments, **options)

        return call


@of_kind(*KINDS)
def test_any_failed_look_while_opening_is_retried(kept, monkeypatch):
    folder, _, keys = kept
    expected = undisturbed(folder, keys, 6)
    storage = Storage(folder, monkeypatch)
    keys = keys | {"bad_records.action": "skip"}  # which must not take it for damage
    position, retried = None, 0
    # At first none fails, so that what is expected is known.
    for failing in itertools.count(-1):
        cache = {"data_cache_dir": f"{keys['data_cache_dir']}{failing}"}
        storage.fail([failing])
        lines = []
        iterator = opened(folder, keys | cache, lines.append)
        position = position or (iterator.get_state(), iterator.tokenizer_folder)
        assert (iterator.get_state(), iterator.tokenizer_folder) == position
        if messages := iterator.retries.drain():
            retried += 1
            assert [str(folder) in line for line in messages] == [True]
            assert "Try 2 of 6" in messages[0]
            assert [line for line in lines if line in messages] == messages
        calls = storage.calls
        if failing % 8 == 0:
            storage.fail([])
            assert_same(take(iterator, 6), expected)
        if failing >= calls:
            break
    assert retried > 3


@of_kind("tfrecord")
def test_a_lasting_failure_while_opening_ends_the_run(kept, monkeypatch):
    folder, _, keys = kept
    Storage(folder, monkeypatch).fail(range(1000), errno.ESTALE)
    lines = []
    refused(f"{folder} .* 3 tries", opened, folder, keys | {"data_retry.attempts": 2}, lines.append)
    assert len(lines) == 2


@of_kind("tfrecord")
@pytest.mark.parametrize("fault", ["missing", "cut"])
def test_a_mistake_is_not_retried(kept, fault, monkeypatch):
    folder, files, keys = kept
    monkeypatch.setattr(time, "sleep", pytest.fail)
    if fault == "cut":
        changed(files[:1], lambda content: content[:50])
    else:
        moved(files)
        folder = folder / "nothing"
    lines = []
    refused(str(folder), opened, folder, keys, lines.append)
    assert not any(" Try " in line for line in lines)


@pytest.mark.slow
@of_kind("prepared_bin")
def test_reader_processes(kept):
    folder, files, keys = kept
    expected = undisturbed(folder, keys, 40)
    iterator = opened(folder, keys | {"grain_worker_count": 2}, Repair(lambda: restore()))
    restore = moved(files)
    batches = list(itertools.islice(iterator, 5))
    assert "Step 0" in iterator.retries.drain()[0]
    for process in multiprocessing.active_children():
        process.kill()
    batches += itertools.islice(iterator, 20)
    assert iterator.retries.drain()
    iterator.seek(30)
    batches[25:] = [*expected[25:30], *take(iterator, 10)]
    assert_same(batches, expected)
