"""Runs that leave samples out: resuming, going back, hosts, mixtures, the end of the data."""

import itertools
import json

import numpy as np
import pytest

from MaxText.configuration.data_sections import Masking
from MaxText.errors import UserError
from MaxText.input_pipeline.loader import train_loader
from MaxText.input_pipeline.rows.batch_plan import BatchPlan, Stage

from .small_data import VOCAB_SIZE, data_keys, numbered_documents, random_documents, write_data_set
from .test_loader import LENGTH, assert_same, fields, join, take

HOLES = ((40, 56), (70, 83), (80, 91))
PLAN = BatchPlan((Stage(0, 4, 16), Stage(5, 8, 8), Stage(12, 8, 16)), window=LENGTH)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "set"
    write_data_set(folder, {"train": random_documents(0, 120, 50)})
    return folder


def opened(data, host=0, hosts=1, plan=PLAN, lines=None, **options):
    show = (lambda line: None) if lines is None else lines.append
    return train_loader(
        data,
        plan=plan,
        vocab_size=VOCAB_SIZE,
        process_index=host,
        process_count=hosts,
        show=show,
        **options,
    )


@pytest.mark.parametrize(
    ("keys", "masking"),
    [
        ({}, Masking()),
        ({"dataset_type": "synthetic"}, Masking()),
        ({"packing": False}, Masking()),
        ({"grain_packing_type": "first_fit"}, Masking()),
        ({}, Masking(mlm_training=True, mlm_mask_id=3)),
        ("mixture", Masking()),
    ],
)
def test_a_hole_made_on_the_way_equals_one_from_the_start(folder, tmp_path, keys, masking):
    if keys == "mixture":
        keys = {"dataset_mix": ((str(folder), 3.0), (str(folder), 1.0)), "dataset_path": ""}
    keys = {"dataset_path": str(folder), "data_cache_dir": str(tmp_path), **keys}
    data = data_keys(**{"folder": keys.pop("dataset_path"), **keys})
    always = opened(data.model_copy(update={"excluded_samples": HOLES}), masking=masking)
    expected = take(always, 16)
    plain = take(opened(data, masking=masking), 16)
    late = opened(data, masking=masking)
    batches = list(itertools.islice(late, 6))
    late.exclude(70, 91)
    late.exclude(40, 56)
    batches += take(late, 10)
    for batch, reference in zip(batches, expected, strict=True):
        assert_same(batch, reference)
    assert (plain[15].tokens_BT != expected[15].tokens_BT).any()
    for hosts in (2, 4):
        parts = [opened(data, host, hosts, masking=masking) for host in range(hosts)]
        for part in parts:
            part.exclude(70, 91)
            part.exclude(40, 56)
            part.seek(9)
        joined = [join(list(rows)) for rows in zip(*(take(p, 3) for p in parts), strict=True)]
        for batch, reference in zip(joined, expected[9:12], strict=True):
            assert_same(batch, reference)


def test_rows_are_those_of_the_samples_that_are_left(folder):
    plan = BatchPlan.constant(1, LENGTH)
    plain = take(opened(data_keys(folder), plan=plan), 12)
    data = data_keys(folder, excluded_samples=((2, 4), (7, 10)))
    iterator = opened(data, plan=plan)
    assert "2 to 3, 7 to 9" in iterator.description
    for batch, sample in zip(take(iterator, 7), [0, 1, 4, 5, 6, 10, 11], strict=True):
        assert_same(batch, plain[sample])
    assert [iterator.sample_range(step) for step in (1, 2, 5)] == [(1, 2), (4, 5), (10, 11)]
    assert iterator.origin(5) == opened(data_keys(folder), plan=plan).origin(10)


def test_resuming_knows_the_holes(folder):
    data = data_keys(folder)
    run = opened(data)
    early = json.loads(json.dumps(run.position))
    whole = list(itertools.islice(run, 3))
    run.exclude(30, 44)
    whole += itertools.islice(run, 6)
    position = json.loads(json.dumps(run.position))
    assert position["excluded"] == [[30, 44]]
    whole += take(run, 8)
    again = opened(data, lines=(lines := []))
    again.resume(position)
    for batch, reference in zip(take(again, 8), whole[9:], strict=True):
        assert_same(batch, reference)
    # All of it lies behind: nothing to say.
    assert lines == []
    again.resume(early)
    assert lines == ["Samples of the training data that are left out: 30 to 43. "
                     "The checkpoint had: none."]  # fmt: skip
    for batch, reference in zip(take(again, 17), whole, strict=True):
        assert_same(batch, reference)


def test_the_key_adds_to_what_the_checkpoint_has(folder):
    run = opened(data_keys(folder))
    next(run)
    run.exclude(100, 120)
    position = run.position
    run.close()
    expected = opened(data_keys(folder, excluded_samples=((90, 120),)))
    expected.seek(1)
    lines = []
    resumed = opened(data_keys(folder, excluded_samples=((0, 3), (90, 105))), lines=lines)
    resumed.resume(position)
    assert lines == ["Samples of the training data that are left out: 90 to 119. "
                     "The checkpoint had: 100 to 119."]  # fmt: skip
    for batch, reference in zip(take(resumed, 16), take(expected, 16), strict=True):
        assert_same(batch, reference)
    # What was read before it began to be left out is not left out.
    assert resumed.position["excluded"] == [[90, 120]]


@pytest.mark.parametrize("exclude_first", [True, False])
def test_going_back_and_leaving_out_may_come_in_any_order(folder, exclude_first):
    run = opened(data_keys(folder))
    take_first = list(itertools.islice(run, 4))
    saved = run.position
    list(itertools.islice(run, 6))
    # Steps 5 and 6 of the ten are suspected, and one sample that was read before the checkpoint.
    first, end = run.sample_range(5)[0], run.sample_range(6)[1]
    if exclude_first:
        run.exclude(15, 16)
        run.exclude(first, end)
        assert run.position["excluded"] == []  # nothing was left out so far
        run.resume(saved)
    else:
        run.resume(saved)
        run.exclude(15, 16)
        run.exclude(first, end)
    assert run.position["samples"] == 16
    assert run.position["excluded"] == [[first, end]]
    reference = opened(data_keys(folder, excluded_samples=((first, end),)))
    expected = take(reference, 12)
    for batch, other in zip([*take_first, *take(run, 8)], expected, strict=True):
        assert_same(batch, other)


def test_a_hole_around_the_position_leaves_out_what_is_not_read_yet(folder):
    plan = BatchPlan.constant(4, LENGTH)
    run = opened(data_keys(folder), plan=plan)
    list(itertools.islice(run, 3))
    run.exclude(8, 20)
    assert run.position["excluded"] == [[12, 20]]
    assert run.sample_range(2) == (8, 12)
    assert run.sample_range(3) == (20, 24)
    following = opened(data_keys(folder), plan=plan)
    following.seek(5)
    assert_same(take(run, 1)[0], take(following, 1)[0])


def test_the_data_end_earlier(tmp_path):
    write_data_set(tmp_path / "d", {"train": numbered_documents([30] * 20)})  # 38 windows
    plan = BatchPlan.constant(4, LENGTH)
    data = data_keys(tmp_path / "d", num_epoch=1)
    run = opened(data, plan=plan)
    assert run.num_steps == 10
    batches = list(itertools.islice(run, 2))
    run.exclude(4, 17)  # 8 to 16 are still to be read
    assert run.num_steps == 8  # 38 - 9 samples
    run.exclude(36, 1000)
    assert run.num_steps == 7  # 38 - 9 - 2
    batches += take(run, 100)
    assert len(batches) == 7
    resumed = opened(data, plan=BatchPlan.constant(1, LENGTH))
    resumed.resume(run.position)
    assert take(resumed, 10) == []
    plain = take(opened(data, plan=BatchPlan.constant(1, LENGTH)), 38)
    left = [*range(8), *range(17, 36)]
    expected = np.concatenate([plain[sample].tokens_BT for sample in left])
    tokens = np.concatenate([batch.tokens_BT for batch in batches])
    np.testing.assert_array_equal(tokens[: len(left)], expected)
    assert not fields(batches[-1])["weights_BT"][len(left) - 24 :].any()


def test_ranges_that_are_none_are_refused(folder):
    with pytest.raises(UserError, match=r"excluded_samples: \[5, 5\] is no range"):
        opened(data_keys(folder, excluded_samples=((5, 5),)))
    with pytest.raises(UserError, match=r"excluded_samples: \[9, 4\] is no range"):
        opened(data_keys(folder)).exclude(9, 4)
