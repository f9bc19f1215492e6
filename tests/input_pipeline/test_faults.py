"""Files that vanish, break or hang while a run reads them, and come back."""

import itertools
import multiprocessing
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import fsspec
import pytest

from MaxText.configuration.data_sections import Masking
from MaxText.errors import UserError
from MaxText.input_pipeline.loader import eval_loader
from MaxText.input_pipeline.retrying import Incidents, Retrying, SteadyReader

from .faults import (
    DOCUMENTS,
    KINDS,
    Mend,
    assert_undisturbed,
    changed,
    failing_reads,
    kept_files,  # noqa: F401
    moved,
    opened,
    settle,
    undisturbed,
)
from .small_data import VOCAB_SIZE, data_keys
from .streams import token_files
from .test_loader import LENGTH, join, take


@pytest.mark.parametrize("kept", KINDS, indirect=True)
@pytest.mark.parametrize("fault", ["gone", "cut"])
def test_files_that_come_back_cost_nothing_but_time(kept, fault):
    folder, files, keys = kept
    expected = undisturbed(folder, keys)
    mended = threading.Event()

    def mend():
        restore()
        mended.set()

    show = Mend(mend, at=2)
    iterator = opened(folder, keys, show)
    if fault == "gone":
        restore = moved(files)
    else:
        restore = changed(files, lambda content: content[: len(content) // 3])
    batches = take(iterator, 20)
    assert_undisturbed(batches, expected)
    assert mended.is_set()
    messages = iterator.incidents.drain()
    assert len(messages) == 3
    assert messages[0].startswith("Step 0 of the training data could not be read: ")
    assert "Try 2 of 6 in 0 s, from files opened anew." in messages[0]
    assert messages[2].startswith("Step 0 of the training data was read at try 3, whole, after ")
    assert [line for line in show.lines if "Step 0" in line] == messages
    assert iterator.incidents.drain() == []


@pytest.mark.parametrize("kept", ["array_record", "tfrecord", "webdataset"], indirect=True)
def test_the_step_that_failed_in_mid_run_is_the_next_one(kept):
    folder, files, keys = kept
    expected = undisturbed(folder, keys, 30)
    show = Mend(lambda: restore())
    iterator = opened(folder, keys, show)
    batches = list(itertools.islice(iterator, 3))
    settle(iterator)
    restore = changed(files, lambda content: content[:50])
    batches += take(iterator, 27)
    assert_undisturbed(batches, expected)
    incidents = iterator.incidents.drain()
    # Cut short, so that it may come back: as many tries as there are.
    assert "Try 2 of 6" in incidents[0]
    steps = {int(line.split()[1]) for line in incidents}
    assert len(steps) == 1
    assert min(steps) > 3


@pytest.mark.parametrize("kept", ["tfrecord"], indirect=True)
def test_one_host_reads_again_alone(kept):
    folder, files, keys = kept
    expected = undisturbed(folder, keys)
    second = take(opened(folder, keys, process_index=1, process_count=2), 20)
    show = Mend(lambda: restore())
    first = opened(folder, keys, show, process_index=0, process_count=2)
    restore = moved(files)
    joined = [join([a, b]) for a, b in zip(take(first, 20), second, strict=True)]
    assert_undisturbed(joined, expected)
    assert first.incidents.drain()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("kept", ["tfrecord"], indirect=True)
def test_a_file_that_may_not_be_read_for_a_while(kept):
    folder, files, keys = kept
    expected = undisturbed(folder, keys)
    show = Mend(lambda: [file.chmod(0o644) for file in files])
    iterator = opened(folder, keys, show)
    for file in files:
        file.chmod(0)
    assert_undisturbed(take(iterator, 20), expected)
    assert iterator.incidents.drain()


@pytest.mark.parametrize("kept", ["tfrecord"], indirect=True)
def test_a_read_that_hangs_is_left_behind(kept):
    folder, files, keys = kept
    expected = undisturbed(folder, keys)
    away = folder.parent / "away"
    stuck = [file.with_suffix(".stuck") for file in files]

    def mend():
        for file, pipe in zip(files, stuck, strict=True):
            file.rename(pipe)
            (away / file.name).rename(file)

    show = Mend(mend)
    keys = keys | {"data_read_timeout": 1.0, "data_read_retries": 60}
    iterator = opened(folder, keys, show)
    away.mkdir()
    for file in files:
        file.rename(away / file.name)
        os.mkfifo(file)  # opening it waits for somebody who writes
    batches = take(iterator, 20)
    assert_undisturbed(batches, expected)
    assert "no batch came within 1 s" in iterator.incidents.drain()[0]
    for pipe in stuck:
        os.close(os.open(pipe, os.O_RDWR))


def test_a_hang_that_does_not_end_is_an_error():
    release = threading.Event()

    class Stuck:
        skip_bad = False

        def __len__(self):
            return 10

        def __getitem__(self, step):
            release.wait()
            return {}

    reader = SteadyReader(
        Stuck(),  # pyright: ignore[reportArgumentType]
        [],
        what="training data",
        incidents=Incidents(lambda line: None),
        retrying=Retrying(retries=0, timeout=0.2),
    )
    with pytest.raises(UserError, match=r"after 1 try .* within 0\.2 s\. .*data_read_timeout"):
        reader.read(4)
    release.set()


@pytest.mark.parametrize("error", [KeyError("ours"), UserError("an id is too large")])
def test_what_is_no_fault_of_storage_is_raised_at_once(error):
    class Wrong:
        skip_bad = False
        reads = 0

        def __len__(self):
            return 1

        def __getitem__(self, step):
            self.reads += 1
            raise error

    source = Wrong()
    reader = SteadyReader(
        source,  # pyright: ignore[reportArgumentType]
        [],
        what="training data",
        incidents=Incidents(lambda line: None),
        retrying=Retrying(retries=5),
    )
    with pytest.raises(type(error)) as caught:
        reader.read(0)
    assert caught.value is error
    assert source.reads == 1


@pytest.mark.parametrize(
    ("kept", "keys", "masking"),
    [
        ("bin", {}, Masking()),
        ("array_record", {"packing": False}, Masking()),
        ("tfrecord", {"grain_packing_type": "best_fit"}, Masking()),
        ("bin", {"mix": "documents_random"}, Masking()),
        ("array_record", {"mix": "chunks"}, Masking()),
        ("megatron", {"megatron_order": "gpt_neox"}, Masking()),
        ("tfrecord", {}, Masking(mlm_training=True, mlm_mask_id=3)),
    ],
    indirect=["kept"],
)
def test_everything_that_reads_can_be_opened_anew(kept, keys, masking):
    folder, _, options = kept
    keys = dict(keys) | options
    if sampling := keys.pop("mix", ""):
        keys["dataset_mix"] = ((str(folder), 2, sampling, 0.7), (str(folder), 1, "chunks", 0.3))
        folder = ""
    expected = take(opened(folder, keys, masking=masking), 20)
    iterator = opened(folder, keys, masking=masking)
    batches = list(itertools.islice(iterator, 2))
    settle(iterator)
    with failing_reads(2):
        batches += take(iterator, 18)
    assert_undisturbed(batches, expected)
    (failed, *_) = iterator.incidents.drain()
    assert "Input/output error" in failed


@pytest.mark.parametrize("kept", ["tfrecord"], indirect=True)
def test_storage_behind_a_url(kept):
    folder, files, keys = kept
    system = fsspec.filesystem("memory")
    system.put(str(folder), "/faults", recursive=True)
    url = "memory://faults"
    expected = undisturbed(folder, keys)

    class HttpError(Exception):
        """As gcsfs has one, without a base that says what it is."""

    def fail(*arguments, **options):
        raise HttpError("503, Service Unavailable")

    with pytest.MonkeyPatch.context() as patch:
        iterator = opened(url, keys, Mend(patch.undo))
        patch.setattr(type(system), "cat_ranges", fail)
        assert_undisturbed(take(iterator, 20), expected)
        assert "503, Service Unavailable" in iterator.incidents.drain()[0]

    content = {file.name: system.cat_file(f"/faults/{file.name}") for file in files}

    def put_back():
        for name, stored in content.items():
            system.pipe_file(f"/faults/{name}", stored)

    iterator = opened(url, keys, Mend(put_back))
    for name in content:
        system.rm_file(f"/faults/{name}")
    assert_undisturbed(take(iterator, 20), expected)
    assert iterator.incidents.drain()
    system.rm("/faults", recursive=True)


@pytest.mark.parametrize("kept", ["array_record"], indirect=True)
def test_evaluation_reads_again_too(kept):
    folder, files, keys = kept

    def batches(show):
        return eval_loader(
            data_keys(folder, eval_split="train", **keys),
            eval_steps=-1,
            max_target_length=LENGTH,
            vocab_size=VOCAB_SIZE,
            global_batch_size=4,
            show=show,
        )

    expected = list(batches(lambda line: None))
    evaluation = batches(Mend(lambda: restore()))
    restore = moved(files)
    assert_undisturbed(list(evaluation), expected)
    assert evaluation.incidents.drain()[0].startswith("Step 0 of the evaluation data could not")
    assert_undisturbed(list(evaluation), expected)
    assert evaluation.incidents.drain() == []


@pytest.mark.parametrize("kept", ["tfrecord"], indirect=True)
def test_holes_and_position_survive_a_failed_read(kept):
    folder, files, keys = kept
    expected = undisturbed(folder, keys | {"excluded_samples": ((8, 15), (20, 23))})
    iterator = opened(folder, keys | {"excluded_samples": ((20, 23),)}, Mend(lambda: restore()))
    batches = list(itertools.islice(iterator, 4))
    iterator.exclude(8, 15)
    settled = iterator.position
    restore = changed(files, lambda content: content[:50])
    batches += take(iterator, 16)
    assert_undisturbed(batches, expected)
    assert iterator.incidents.drain()
    assert settled["excluded"] == iterator.position["excluded"] == [[8, 15], [20, 23]]


def test_waits_double_up_to_a_minute():
    retrying = Retrying(retries=9, seconds=1.5)
    waits = [retrying.wait(failures) for failures in range(1, 10)]
    assert waits == [1.5, 3, 6, 12, 24, 48, 60, 60, 60]
    assert Retrying(retries=5000, seconds=1).wait(5000) == 60


@pytest.mark.slow
@pytest.mark.parametrize("kept", ["array_record"], indirect=True)
@pytest.mark.parametrize("workers", [1, 2])
def test_reader_processes(kept, workers):
    folder, files, keys = kept
    expected = undisturbed(folder, keys, 40)
    show = Mend(lambda: restore())
    iterator = opened(folder, keys | {"grain_worker_count": workers}, show)
    restore = moved(files)
    batches = list(itertools.islice(iterator, 5))
    assert "Step 0" in iterator.incidents.drain()[0]
    for process in multiprocessing.active_children():
        process.kill()
    batches += take(iterator, 35)
    assert_undisturbed(batches, expected)
    assert "a reader process was lost" in iterator.incidents.drain()[0]


@pytest.mark.slow
def test_a_program_ends_though_a_read_hangs(tmp_path):
    token_files.write_tfrecord(tmp_path / "a.tfrecord", DOCUMENTS)
    program = f"""
        import os, sys
        from MaxText.configuration.data_sections import Data
        from MaxText.errors import UserError
        from MaxText.input_pipeline.loader import train_loader
        from MaxText.input_pipeline.rows.batch_plan import BatchPlan
        path = {str(tmp_path / "a.tfrecord")!r}
        data = Data(dataset_path=path, data_read_timeout=0.5, data_read_retries=0,
                    data_cache_dir={str(tmp_path / "cache")!r})
        batches = train_loader(data, plan=BatchPlan.constant(2, 16), vocab_size=50000)
        os.remove(path)
        os.mkfifo(path)
        try:
            next(batches)
        except UserError as error:
            batches.close()
            print(error)
            sys.exit(2)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert (done.returncode, done.stderr) == (2, "")
    assert "no batch came within 0.5 s" in done.stdout
