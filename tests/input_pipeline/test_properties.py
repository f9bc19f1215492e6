"""What holds for every configuration: the batch of a step is a function of seed and step alone."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from MaxText.config.data_sections import MaskingConfig
from MaxText.input_pipeline.sequences.batch_schedule import BatchSchedule, ScheduleStage
from tests.input_pipeline.faults import failing_reads
from tests.input_pipeline.sequences.test_order import RANGES
from tests.input_pipeline.small_data import (
    LENGTH,
    assert_same,
    data_keys,
    join,
    numbered_documents,
    open_train,
    random_documents,
    take,
    write_data_set,
)
from tests.input_pipeline.token_store import token_files

PACKING = (
    {},
    {"packing": False},
    {"packing": False, "use_truncation": True},
    {"grain_packing_type": "first_fit"},
    {"grain_packing_type": "best_fit"},
)
SAMPLING = ("chunks", "documents_random", "documents_fixed")


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sets")
    write_data_set(folder / "a", {"train": random_documents(0, 90, 50)})
    write_data_set(folder / "b", {"train": random_documents(1, 50, 30)}, file_format="bin")
    parts = [random_documents(seed, 12, 60) for seed in (2, 3, 4)]
    token_files.write("tfrecord", folder / "c", parts)
    return folder


@st.composite
def runs(draw):
    keys = dict(draw(st.sampled_from(PACKING)))
    keys["cross_document_attention"] = draw(st.booleans())
    keys["enable_data_shuffling"] = draw(st.booleans())
    keys["data_shuffle_seed"] = draw(st.integers(0, 5))
    keys["zero_loss"] = draw(st.booleans())
    masked = {"mlm_training": True, "mlm.mask_id": 3, "mlm.cls_token_id": draw(st.integers(0, 4))}
    masking = MaskingConfig(**masked) if draw(st.booleans()) else MaskingConfig()
    kind = draw(st.sampled_from(("one", "one", "mixture", "synthetic")))
    if kind == "synthetic":
        return {"dataset_type": "synthetic"}, MaskingConfig()
    names = draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=3))
    if kind == "one":
        keys |= {"dataset_path": names[0], "iter_file_nums": draw(st.sampled_from((0, 0, 1, 2)))}
    else:
        weights = st.floats(0.1, 9)
        keys["data_mixture_weights"] = tuple(
            (name, draw(st.integers(1, 3)), draw(st.sampled_from(SAMPLING)), draw(weights))
            for name in names
        )
    return keys, masking


def run_keys(run, sets, cache, **more):
    """`data_keys` of a run, with the data sets' folders in place of their names."""
    keys = dict(run[0]) | {"data_cache_dir": str(cache)} | more
    keys["data_mixture_weights"] = tuple(
        (str(sets / n), *rest) for n, *rest in keys.get("data_mixture_weights", ())
    )
    name = keys.pop("dataset_path", "")
    return data_keys(sets / name if name else "", **keys)


EXCLUDED = st.lists(RANGES, max_size=3)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@settings(max_examples=25, deadline=None)
@given(runs(), EXCLUDED, st.integers(1, 3), st.integers(0, 12), st.sampled_from((1, 2, 4)))
def test_position_gives_the_same_batches_on_any_hosts(
    sets, cache, run, excluded, share, stop, hosts
):
    data = run_keys(run, sets, cache, excluded_samples=tuple(excluded), **{"data_retry.delay": 0.0})
    plan = BatchSchedule(
        (ScheduleStage(0, 4, 16), ScheduleStage(4, 4 * share, 8), ScheduleStage(9, 4, 16)),
        sequence_length=LENGTH,
    )
    options = {"schedule": plan, "masking": run[1]}
    whole = take(open_train(data, **options), stop + 3)
    # Host 1 of 2 wrote the position; any number of hosts resumes from it.
    before = open_train(data, host=1, hosts=2, **options)
    before.seek(stop)
    position = json.loads(json.dumps(before.get_state()))
    assert position["step"] == stop
    parts = []
    for host in range(hosts):
        part = open_train(data, host=host, hosts=hosts, **options)
        part.set_state(position)
        # Every reader of files can be opened again.
        failures = int("dataset_type" not in run[0])
        with failing_reads(failures, from_step=stop):
            parts.append(take(part, 3))
        assert "".join(part.retries.drain()).count("Input/output error") >= failures
    assert_same([join(rows) for rows in zip(*parts, strict=True)], whole[stop:])


@settings(max_examples=20, deadline=None)
@given(runs(), EXCLUDED, st.integers(1, 6), st.integers(1, 6), st.integers(0, 10**9))
def test_resume_with_another_batch_size_reads_the_next_samples(
    sets, cache, run, excluded, before, after, stop
):
    data = run_keys(run, sets, cache, excluded_samples=tuple(excluded))
    first = open_train(data, batch=before, masking=run[1])
    first.seek(stop)
    samples = open_train(data, batch=1, masking=run[1])
    samples.seek(stop * before)
    resumed = open_train(data, batch=after, masking=run[1])
    resumed.set_state(first.get_state())
    assert_same([join(take(resumed, 3))], [join(take(samples, 3 * after))])


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=8),
    st.sampled_from([keys for keys in PACKING if "use_truncation" not in keys]),
    st.sampled_from([2, 4, 8]),
    st.integers(1, 4),
    st.booleans(),
    st.sampled_from((True, False, False)),
    st.booleans(),
)
def test_each_target_counts_once_per_epoch_after_its_predecessor(
    tmp_path_factory, cache, sizes, packing, length, batch, staged, shuffle, attend
):
    # Not all of one size, which would make each a row of its own.
    documents = numbered_documents([1, length + 1, *sizes])
    folder = tmp_path_factory.mktemp("set")
    token_files.write_megatron(folder / "d", documents)
    plan = BatchSchedule.constant(batch, length)
    if staged:
        stages = (
            ScheduleStage(0, batch, length // 2),
            ScheduleStage(2, batch + 1, length),
            ScheduleStage(5, 1, length),
        )
        plan = BatchSchedule(stages, length)
    keys = {"enable_data_shuffling": shuffle, "cross_document_attention": attend, **packing}
    data = data_keys(folder, num_epoch=2, data_cache_dir=str(cache), **keys)
    batches = open_train(data, schedule=plan)
    read = list(batches)
    assert len(read) == batches.num_steps
    names = ("tokens_BT", "targets_BT", "loss_mask_BT")
    arrays = [np.concatenate([getattr(one, name).ravel() for one in read]) for name in names]
    tokens, targets, weights = arrays
    counted = weights == 1
    if attend and not packing:  # the documents are one sequence
        documents = [np.concatenate(documents)]
    expected = np.concatenate([document[1:] for document in documents])
    np.testing.assert_array_equal(np.sort(targets[counted]), np.repeat(expected, 2))
    np.testing.assert_array_equal(tokens[counted], targets[counted] - 1)
