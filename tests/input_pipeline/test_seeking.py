"""A reader that jumps in the middle of its work: the batches are those of the step."""

import itertools
import json

import pytest

from MaxText.input_pipeline.sequences.batch_schedule import BatchSchedule, ScheduleStage
from tests.input_pipeline.small_data import (
    LENGTH,
    assert_same,
    data_keys,
    join,
    open_train,
    random_documents,
    take,
    write_data_set,
)

STEPS = 14
GROWING = BatchSchedule((ScheduleStage(0, 2, LENGTH), ScheduleStage(6, 4, LENGTH)), LENGTH)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "set"
    write_data_set(folder, {"train": random_documents(0, 120, 50)})
    return folder


@pytest.mark.parametrize("keys", [{}, {"dataset_type": "synthetic"}, {"packing": False}])
def test_the_next_batch_is_that_of_the_step(folder, keys):
    def opened(host=0, hosts=1):
        return open_train(data_keys(folder, **keys), host=host, hosts=hosts, schedule=GROWING)

    expected = take(opened(), STEPS)
    run, saved = opened(), {}
    for step in range(STEPS):
        saved[step] = json.loads(json.dumps(run.get_state()))
        assert saved[step]["step"] == step
        assert saved[step]["samples"] == GROWING.sequences_before(step)
        next(run)
    # Without closing it in between: back, forward, to the same step, to the next one.
    for step in (3, 9, 9, 10, 0, 12, 5):
        run.seek(step)
        assert run.get_state() == saved[step]
        assert_same(list(itertools.islice(run, 2)), expected[step : step + 2])
    for step in (8, 2, 11, 4):
        run.set_state(saved[step])
        assert run.get_state() == saved[step]
        assert_same(list(itertools.islice(run, 2)), expected[step : step + 2])
    run.close()
    parts = [opened(host, 2) for host in range(2)]
    for part in parts:
        next(part)
        part.set_state(saved[7])
    batches = [list(itertools.islice(part, 3)) for part in parts]
    assert_same([join(rows) for rows in zip(*batches, strict=True)], expected[7:10])
    for part in parts:
        part.close()


def test_a_position_of_another_batch_size_goes_on_with_the_next_sample(folder):
    plan = BatchSchedule.constant(2, LENGTH)
    one_by_one = open_train(data_keys(folder), schedule=BatchSchedule.constant(1, LENGTH))
    samples = take(one_by_one, 30)
    run = open_train(data_keys(folder), schedule=plan)
    list(itertools.islice(run, 5))
    saved = run.get_state()
    wider = open_train(data_keys(folder), schedule=BatchSchedule.constant(4, LENGTH))
    list(itertools.islice(wider, 3))  # has read ahead when it is moved
    wider.set_state(saved)
    (batch, following) = itertools.islice(wider, 2)
    assert_same([batch], [join(samples[10:14])])
    assert_same([following], [join(samples[14:18])])
    # Then to a step of this run from its start: by its own batch size.
    wider.seek(3)
    assert_same([next(wider)], [join(samples[12:16])])
    for iterator in (run, wider):
        iterator.close()
