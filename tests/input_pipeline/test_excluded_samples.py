"""Excluded samples: resume, rollback, hosts, and the end of the data."""

import itertools
import json

import numpy as np
import pytest

from MaxText.input_pipeline.sequences.batch_schedule import BatchSchedule, ScheduleStage
from tests.input_pipeline.faults import failing_reads
from tests.input_pipeline.small_data import (
    LENGTH,
    assert_same,
    data_keys,
    join,
    numbered_documents,
    open_train,
    quiet,
    random_documents,
    take,
    write_data_set,
)

PLAN = BatchSchedule(
    (ScheduleStage(0, 4, 16), ScheduleStage(5, 8, 8), ScheduleStage(12, 8, 16)),
    sequence_length=LENGTH,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "set"
    write_data_set(folder, {"train": random_documents(0, 120, 50)})
    return folder


def opened(folder, host=0, hosts=1, schedule=PLAN, log=quiet, **keys):
    return open_train(data_keys(folder, **keys), host=host, hosts=hosts, schedule=schedule, log=log)


@pytest.mark.parametrize("keys", [{}, {"dataset_type": "synthetic"}])
def test_excluding_during_the_run_equals_excluding_from_the_start(folder, keys):
    excluded = ((40, 56), (70, 83), (80, 91))
    expected = take(opened(folder, excluded_samples=excluded, **keys), 16)
    options = keys | {"data_retry.delay": 0.0}
    read = []
    for host, hosts in ((0, 1), (0, 2), (1, 2)):
        run = opened(folder, host, hosts, **options)
        batches = list(itertools.islice(run, 6))
        run.exclude(70, 91)
        run.exclude(40, 56)
        # What is excluded stays so where the data are opened again.
        with failing_reads(0 if keys else 1, from_step=6):
            read.append(batches + take(run, 10))
        assert bool(run.retries.drain()) == (not keys)
    assert_same(read[0], expected)
    assert_same([join(rows) for rows in zip(*read[1:], strict=True)], expected)
    assert (take(opened(folder, **keys), 16)[15].tokens_BT != expected[15].tokens_BT).any()


def test_the_samples_that_are_left_are_read(folder):
    plan = BatchSchedule.constant(1, LENGTH)
    plain = take(opened(folder, schedule=plan), 12)
    lines = []
    excluded = ((2, 4), (7, 10))
    iterator = opened(folder, schedule=plan, excluded_samples=excluded, log=lines.append)
    assert "2 to 3, 7 to 9" in lines[-1]
    left = [0, 1, 4, 5, 6, 10, 11]
    assert_same(take(iterator, 7), [plain[sample] for sample in left])
    assert [iterator.source.order_range(step) for step in (1, 2, 5)] == [(1, 2), (4, 5), (10, 11)]
    assert iterator.source.origins(5) == opened(folder, schedule=plan).source.origins(10)


def test_the_position_holds_the_excluded_samples(folder):
    run = opened(folder)
    early = json.loads(json.dumps(run.get_state()))
    whole = list(itertools.islice(run, 3))
    run.exclude(30, 44)
    assert not run.exclude(31, 40)
    whole += itertools.islice(run, 6)
    position = json.loads(json.dumps(run.get_state()))
    assert position["excluded"] == [[30, 44]]
    whole += take(run, 8)
    lines = []
    again = opened(folder, log=lines.append)
    lines.clear()
    again.set_state(position)
    assert_same(take(again, 8), whole[9:])
    assert lines == []
    again.set_state(early)
    assert "30 to 43" in lines[0]
    assert_same(take(again, 17), whole)


def test_excluded_samples_of_key_and_checkpoint_add_up(folder):
    run = opened(folder)
    next(run)
    run.exclude(100, 120)
    position = run.get_state()
    run.close()
    expected = opened(folder, excluded_samples=((90, 120),))
    expected.seek(1)
    lines = []
    resumed = opened(folder, excluded_samples=((0, 3), (90, 105)), log=lines.append)
    resumed.set_state(position)
    assert "90 to 119" in lines[-1]
    assert_same(take(resumed, 16), take(expected, 16))
    # What was read before it was excluded is not excluded.
    assert resumed.get_state()["excluded"] == [[90, 120]]


@pytest.mark.parametrize("exclude_first", [True, False])
def test_rollback_and_excluding_may_come_in_any_order(folder, exclude_first):
    run = opened(folder)
    batches = list(itertools.islice(run, 4))
    saved = run.get_state()
    list(itertools.islice(run, 6))
    # Steps 5 and 6 of the ten are suspected, and one sample that was read before the checkpoint.
    first, end = run.source.order_range(5)[0], run.source.order_range(6)[1]
    if not exclude_first:
        run.set_state(saved)
    run.exclude(15, 16)
    run.exclude(first, end)
    if exclude_first:
        assert run.get_state()["excluded"] == []  # nothing was excluded so far
        run.set_state(saved)
    assert run.get_state()["samples"] == 16
    assert run.get_state()["excluded"] == [[first, end]]
    expected = take(opened(folder, excluded_samples=((first, end),)), 12)
    assert_same([*batches, *take(run, 8)], expected)


def test_the_data_end_earlier(tmp_path):
    write_data_set(tmp_path / "d", {"train": numbered_documents([30] * 20)})  # 38 windows
    run = opened(tmp_path / "d", schedule=BatchSchedule.constant(4, LENGTH), num_epoch=1)
    assert run.num_steps == 10
    batches = list(itertools.islice(run, 2))
    run.exclude(4, 17)  # 8 to 16 are still to be read
    assert run.num_steps == 8  # 38 - 9 samples
    run.exclude(36, 1000)
    assert run.num_steps == 7  # 38 - 9 - 2
    batches += take(run, 100)
    assert len(batches) == 7
    one_by_one = opened(tmp_path / "d", schedule=BatchSchedule.constant(1, LENGTH), num_epoch=1)
    plain = list(one_by_one)
    one_by_one.set_state(run.get_state())
    assert take(one_by_one, 10) == []
    left = [*range(8), *range(17, 36)]
    read, expected = join(batches), join([plain[sample] for sample in left])
    np.testing.assert_array_equal(read.tokens_BT[: len(left)], expected.tokens_BT)
    assert not read.loss_mask_BT[len(left) :].any()
