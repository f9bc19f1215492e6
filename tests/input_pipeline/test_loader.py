"""Order, hosts, resuming, the end of the data, evaluation, and every refusal."""

import dataclasses
import itertools
import json
import re

import numpy as np
import pytest

from MaxText.configuration.data_sections import Data, Masking
from MaxText.errors import UserError
from MaxText.input_pipeline import batch_iterators, read_ahead
from MaxText.input_pipeline.batch import Batch
from MaxText.input_pipeline.loader import eval_loader, train_loader
from MaxText.input_pipeline.manifest import MANIFEST_NAME, describe, read_manifest
from MaxText.input_pipeline.rows.batch_plan import BatchPlan
from MaxText.input_pipeline.rows.window_order import WindowOrder
from MaxText.input_pipeline.streams.token_stream import TokenStream

from .small_data import VOCAB_SIZE, data_keys, numbered_documents, random_documents, write_data_set
from .streams import token_files

LENGTH = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "set"
    write_data_set(
        folder,
        {"train": random_documents(0, 200, 50), "validation": random_documents(1, 12, 50)},
    )
    return folder


def open_train(data, batch=8, host=0, hosts=1, start=0, length=LENGTH, vocab_size=VOCAB_SIZE):
    iterator = train_loader(
        data,
        plan=BatchPlan.constant(batch, length),
        vocab_size=vocab_size,
        process_index=host,
        process_count=hosts,
    )
    iterator.seek(start)
    return iterator


def open_eval(data, steps=-1, batch=8, host=0, hosts=1, vocab_size=VOCAB_SIZE):
    return eval_loader(
        data,
        eval_steps=steps,
        max_target_length=LENGTH,
        vocab_size=vocab_size,
        global_batch_size=batch,
        process_index=host,
        process_count=hosts,
    )


def take(iterator, count):
    batches = list(itertools.islice(iterator, count))
    if hasattr(iterator, "close"):
        iterator.close()
    return batches


def fields(batch: Batch) -> dict[str, np.ndarray]:
    values = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return {name: value for name, value in values.items() if value is not None}


def assert_same(first: Batch, second: Batch) -> None:
    assert fields(first).keys() == fields(second).keys()
    for name, value in fields(first).items():
        np.testing.assert_array_equal(value, fields(second)[name], err_msg=name)


def join(batches: list[Batch]) -> Batch:
    rows = [fields(batch) for batch in batches]
    return Batch(**{name: np.concatenate([row[name] for row in rows]) for name in rows[0]})


def test_types_and_shapes(folder):
    (batch,) = take(open_train(data_keys(folder)), 1)
    for name, value in fields(batch).items():
        assert isinstance(value, np.ndarray)
        assert value.shape == (8, LENGTH)
        assert value.dtype == (np.float32 if name == "weights_BT" else np.int32)
    (batch,) = take(open_train(data_keys(folder, attend_across_documents=True)), 1)
    assert batch.positions_BT is None
    assert batch.segments_BT is None


@pytest.mark.parametrize("keys", [{}, {"packing": False}, {"dataset_type": "synthetic"}])
@pytest.mark.parametrize("hosts", [2, 4])
def test_joined_hosts_see_the_batch_of_one_host(folder, keys, hosts):
    data = data_keys(folder, **keys)
    one = take(open_train(data), 12)
    parts = [take(open_train(data, host=host, hosts=hosts), 12) for host in range(hosts)]
    for step, batch in enumerate(one):
        assert_same(batch, join([part[step] for part in parts]))


@pytest.mark.parametrize("keys", [{}, {"packing": False, "num_epoch": 2}])
def test_each_window_once_per_epoch_and_another_order_in_the_next(tmp_path, keys):
    write_data_set(tmp_path / "d", {"train": numbered_documents([30] * 40)})
    data = data_keys(tmp_path / "d", **keys)
    epoch = 75 if data.packing else 80  # 1199 / 16, and 40 documents of 29 / 16
    first_ids = [int(batch.tokens_BT[0, 0]) for batch in take(open_train(data, 1), 2 * epoch)]
    first, second = first_ids[:epoch], first_ids[epoch:]
    assert len(set(first)) == epoch
    assert set(first) == set(second)
    assert first != second
    assert first != sorted(first)


def test_every_target_counts_once_per_epoch(tmp_path):
    documents = numbered_documents([1, 30, 17, 200, 3] * 8)
    write_data_set(tmp_path / "d", {"train": documents})
    iterator = open_train(data_keys(tmp_path / "d", num_epoch=1), batch=4)
    batches = list(iterator)
    assert len(batches) == iterator.num_steps
    counted = np.concatenate([batch.targets_BT[batch.weights_BT == 1] for batch in batches])
    expected = np.concatenate([document[1:] for document in documents])
    np.testing.assert_array_equal(np.sort(counted), expected)


def test_order_without_shuffling_is_the_stream(tmp_path):
    write_data_set(tmp_path / "d", {"train": numbered_documents([50, 50])})
    data = data_keys(tmp_path / "d", enable_data_shuffling=False, num_epoch=1)
    tokens = np.concatenate([batch.tokens_BT for batch in open_train(data, batch=2)])
    np.testing.assert_array_equal(tokens.ravel()[:100], np.arange(1, 101))


def test_seeds_give_different_orders_also_shifted_by_epochs():
    def epochs(seed):
        order = WindowOrder(50, seed, shuffle=True, num_epoch=-1)
        return [tuple(order[epoch * 50 + np.arange(50)].tolist()) for epoch in range(4)]

    seen = [epoch for seed in range(4) for epoch in epochs(seed)]
    assert len(set(seen)) == len(seen)
    assert all(sorted(epoch) == list(range(50)) for epoch in seen)


@pytest.mark.parametrize("num_windows", [1000, 10**6, 10**9, 4 * 10**9])
def test_rows_that_follow_each_other_are_spread_evenly(num_windows):
    steps, chi_squared = [], []
    for seed in range(40):
        order = WindowOrder(num_windows, seed, shuffle=True, num_epoch=-1)
        places = order[1000 * seed + np.arange(128)] / num_windows
        steps.append(np.abs(np.diff(places)).mean())
        counts = np.bincount((16 * places).astype(int), minlength=16)
        chi_squared.append(((counts - 8) ** 2 / 8).sum())
    assert abs(np.mean(steps) - 1 / 3) < 0.02
    assert np.mean(chi_squared) < 18  # 15 degrees of freedom: 15 +- 0.9


def test_the_order_of_a_seed_is_known():
    # Another version of Grain must not change it: a run would go on with other windows.
    order = WindowOrder(10, seed=7, shuffle=True, num_epoch=-1)
    assert order[np.arange(20)].tolist() == [
        5,
        4,
        0,
        2,
        6,
        8,
        3,
        7,
        1,
        9,
        1,
        4,
        0,
        6,
        5,
        8,
        2,
        9,
        3,
        7,
    ]
    order = WindowOrder(10**9, seed=7, shuffle=True, num_epoch=-1)
    assert order[10**12 + np.arange(3)].tolist() == [366132735, 681748578, 327301016]


def test_order_is_spread_evenly():
    # First tenth of the rows, over many epochs: windows of each tenth come equally often.
    order = WindowOrder(1000, seed=0, shuffle=True, num_epoch=-1)
    early = np.concatenate([order[epoch * 1000 + np.arange(100)] for epoch in range(40)])
    shares = np.bincount(early // 100, minlength=10) / early.size
    assert np.abs(shares - 0.1).max() < 0.03


@pytest.mark.parametrize("keys", [{}, {"dataset_type": "synthetic"}, {"num_epoch": 2}])
@pytest.mark.parametrize("stop", [1, 5, 40])
def test_resumed_run_equals_the_uninterrupted_one(folder, keys, stop):
    data = data_keys(folder, **keys)
    whole = take(open_train(data), stop + 10)
    before = open_train(data)
    take_before = list(itertools.islice(before, stop))
    position = json.loads(json.dumps(before.position))
    before.close()
    assert len(take_before) == position["step"] == stop
    after = open_train(data)
    after.resume(position)
    for batch, expected in zip(take(after, 10), whole[stop:], strict=True):
        assert_same(batch, expected)
    for batch, expected in zip(take(open_train(data, start=stop), 10), whole[stop:], strict=True):
        assert_same(batch, expected)


def test_the_end_of_the_data_after_another_batch_size(tmp_path):
    write_data_set(tmp_path / "d", {"train": numbered_documents([30] * 20)})  # 38 windows
    data = data_keys(tmp_path / "d", num_epoch=1)
    small = open_train(data, batch=4)
    take(small, 2)
    large = open_train(data, batch=8)
    assert large.num_steps == 5
    large.resume(small.position)
    assert large.num_steps == 6  # 8 samples in 2 steps, 30 in 4
    assert len(take(large, 100)) == 4
    at_the_end = large.position
    assert at_the_end["samples"] == 40
    smallest = open_train(data, batch=1)
    smallest.resume(at_the_end)
    assert take(smallest, 100) == []
    few_steps = open_train(data, batch=32)
    take(few_steps, 2)
    smallest.resume(few_steps.position)
    assert smallest.num_steps == 0
    assert take(smallest, 100) == []


def test_masking_may_not_begin_or_end_on_resume(folder):
    # With CLS windows are shorter by one token: other samples.
    options = {"plan": BatchPlan.constant(8, LENGTH), "vocab_size": VOCAB_SIZE}
    masking = Masking(mlm_training=True, mlm_mask_id=3, mlm_cls_token_id=4)
    masked = train_loader(data_keys(folder), masking=masking, **options)
    plain = train_loader(data_keys(folder), **options)
    for first, second in ((masked, plain), (plain, masked)):
        with pytest.raises(UserError, match="the mlm_ keys was"):
            second.resume(first.position)


def test_each_weight_of_a_mixture_is_part_of_the_position(folder):
    first, second = (
        open_train(Data(dataset_mix=((str(folder), 1.0), (str(folder), weight))))
        for weight in (0.12345678, 0.12345679)
    )
    with pytest.raises(UserError, match=r"the weights of the mixture was '1\.0 0\.12345678'"):
        second.resume(first.position)


def test_gpt_neox_order_ends_after_its_passes_and_lasts_while_they_are_as_many(tmp_path):
    (tmp_path / "d").mkdir()
    token_files.write_megatron(tmp_path / "d" / "c", token_files.documents(0, [30, 50, 41]))

    def opened(steps, **keys):
        data = data_keys(tmp_path / "d", megatron_order="gpt_neox", **keys)
        plan = BatchPlan.constant(1, 12)
        return train_loader(data, plan=plan, vocab_size=VOCAB_SIZE, num_steps=steps)

    for passes in (1, 2):
        iterator = opened(35, num_epoch=passes)
        assert iterator.num_steps == 10 * passes  # 121 tokens are 1 + 10 x 12, 242 1 + 20 x 12 + 1
        assert len(take(iterator, 100)) == 10 * passes
    # 31 to 40 samples take four passes, the 41st a fifth.
    position = opened(35).position
    opened(40).resume(position)
    with pytest.raises(UserError, match="the way rows are cut"):
        opened(41).resume(position)


def test_filling_outside_the_vocabulary_is_not_written(tmp_path):
    manifest = write_data_set(tmp_path / "d", {"train": numbered_documents([20, 20])})
    tokenizer = manifest.tokenizer.model_copy(update={"pad_id": 41})
    changed = manifest.model_copy(update={"tokenizer": tokenizer})
    (tmp_path / "d" / MANIFEST_NAME).write_text(changed.to_json())
    for vocab_size, filler in ((42, 41), (41, 0)):
        data = data_keys(tmp_path / "d", num_epoch=1, enable_data_shuffling=False)
        batch = list(open_train(data, batch=3, vocab_size=vocab_size))[-1]
        assert batch.tokens_BT[2].tolist() == [*range(33, 41)] + [filler] * 8


def test_labels_beyond_the_vocabulary_are_refused(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="parquet files need it")
    labels = pyarrow.array([[6, 7, -100], [9, 70, -100]], pyarrow.list_(pyarrow.int64()))
    ids = [np.array([5, 6, 7]), np.array([8, 9, 0])]
    token_files.write_parquet(tmp_path / "x.parquet", ids, labels=labels)
    data = data_keys(tmp_path / "x.parquet", data_cache_dir=str(tmp_path / "cache"))
    assert len(take(open_train(data, batch=2, vocab_size=71), 1)) == 1
    with pytest.raises(UserError, match="vocab_size=70 is too small: id 70 occurs"):
        take(open_train(data, batch=2, vocab_size=70), 1)
    neox = data.model_copy(update={"megatron_order": "gpt_neox"})
    with pytest.raises(UserError, match="has labels, whose rows are read as they are"):
        open_train(neox, batch=2)


@pytest.mark.parametrize(
    ("sizes", "packing", "says"),
    [
        ([9, 9, 9], True, "padding: 50.0% of the positions of .*whatever packing says. Set max_"),
        ([9, 9, 9], False, "padding: 50.0% of the positions of .*packing=true packs documents"),
        ([17, 17, 17], True, ""),
        ([9, 30, 5], True, ""),
    ],
)
def test_padding_is_reported(sizes, packing, says, tmp_path):
    path = tmp_path / "train.tfrecord"
    token_files.write_tfrecord(path, numbered_documents(sizes))
    data = data_keys(path, packing=packing, data_cache_dir=str(tmp_path / "cache"))
    description = open_train(data, batch=1).description
    assert re.search(says, description)
    assert ("padding:" in description) == bool(says)


def test_a_bad_record_that_is_met_again_counts_once(tmp_path):
    path = tmp_path / "train.tfrecord"
    token_files.write_tfrecord(path, [np.arange(1, 30), np.arange(30, 90), np.arange(90, 99)])
    content = bytearray(path.read_bytes())
    content[content.index(bytes(range(40, 50)))] ^= 1
    path.write_bytes(content)
    batches = eval_loader(
        data_keys(
            path,
            eval_split="train",
            on_bad_record="skip",
            max_bad_records=2,
            data_cache_dir=str(tmp_path / "cache"),
        ),
        eval_steps=-1,
        max_target_length=LENGTH,
        vocab_size=VOCAB_SIZE,
        global_batch_size=2,
        show=lambda line: None,
    )
    for _ in range(3):
        # Records of 29 and 9 ids; the other one is two rows.
        assert sum(float(batch.weights_BT.sum()) for batch in batches) == 28 + 8
        assert batches.bad_records.count == 1


def test_host_count_may_change_on_resume(folder):
    data = data_keys(folder)
    whole = take(open_train(data), 6)
    position = open_train(data, host=1, hosts=2, start=3).position
    parts = []
    for host in range(4):
        part = open_train(data, host=host, hosts=4)
        part.resume(position)
        parts.append(take(part, 3))
    for index, batch in enumerate(whole[3:]):
        assert_same(batch, join([part[index] for part in parts]))


def test_seek_far_reads_no_skipped_data(folder, monkeypatch):
    reads = []
    ranges = TokenStream.ranges
    monkeypatch.setattr(
        TokenStream, "ranges", lambda self, places: reads.append(places) or ranges(self, places)
    )
    iterator = open_train(data_keys(folder))
    next(iterator)
    iterator.close()
    reads.clear()
    iterator.seek(10**6)
    assert reads == []
    far = next(iterator)
    iterator.close()
    # The one that was taken, and those that are ready or on their way.
    assert len(reads) <= 1 + read_ahead.BATCHES_READY
    assert iterator.position["step"] == 10**6 + 1
    again = open_train(data_keys(folder), start=10**6)
    assert_same(far, take(again, 1)[0])


def test_last_batch_is_filled_with_rows_of_weight_zero(tmp_path):
    write_data_set(tmp_path / "d", {"train": numbered_documents([LENGTH * 5 + 1])})
    data = data_keys(tmp_path / "d", num_epoch=1)
    batches = list(open_train(data, batch=4))
    assert len(batches) == 2
    assert batches[1].weights_BT.sum(axis=1).tolist() == [LENGTH, 0, 0, 0]
    second_host = list(open_train(data, batch=4, host=1, hosts=2))
    assert [batch.weights_BT.sum() for batch in second_host] == [2 * LENGTH, 0]
    iterator = open_train(data, batch=4, start=2)
    with pytest.raises(StopIteration):
        next(iterator)
    with pytest.raises(StopIteration):
        next(iterator)


def test_batches_run_over_the_end_of_an_epoch(tmp_path):
    write_data_set(tmp_path / "d", {"train": numbered_documents([LENGTH * 5 + 1])})
    batches = list(open_train(data_keys(tmp_path / "d", num_epoch=3), batch=4))
    assert len(batches) == 4
    assert sum(batch.weights_BT.sum() for batch in batches) == 15 * LENGTH


def test_number_of_steps_is_known_when_there_is_an_end(folder):
    assert open_train(data_keys(folder)).num_steps is None
    assert open_train(data_keys("", dataset_type="synthetic")).num_steps is None
    ending = open_train(data_keys(folder, num_epoch=1))
    assert ending.num_steps == len(list(ending))


def test_reused_batch_is_the_first_at_any_step(folder):
    (first,) = take(open_train(data_keys(folder)), 1)
    iterator = open_train(data_keys(folder, reuse_example_batch=True), start=7)
    for batch in take(iterator, 3):
        assert_same(batch, first)
    assert iterator.position["step"] == 10


def test_synthetic_is_a_function_of_seed_and_step():
    def batch(seed, step):
        data = data_keys("", dataset_type="synthetic", data_shuffle_seed=seed)
        return take(open_train(data, start=step, vocab_size=97), 1)[0]

    assert_same(batch(0, 5), batch(0, 5))
    for other in (batch(0, 6), batch(1, 5)):
        assert (other.tokens_BT != batch(0, 5).tokens_BT).any()
    tokens = batch(0, 5)
    assert tokens.tokens_BT.min() >= 0
    assert tokens.tokens_BT.max() < 97
    np.testing.assert_array_equal(tokens.targets_BT[:, :-1], tokens.tokens_BT[:, 1:])
    assert tokens.weights_BT.all()
    assert tokens.positions_BT is None
    assert tokens.segments_BT is None


def test_evaluation_covers_the_split_once_each_time(folder):
    manifest = read_manifest(str(folder))
    split = manifest.splits["validation"]
    evaluation = open_eval(data_keys(folder))
    first, second = list(evaluation), list(evaluation)
    assert len(first) == len(evaluation) > 1
    for batch, again in zip(first, second, strict=True):
        assert_same(batch, again)
    assert sum(batch.weights_BT.sum() for batch in first) == split.num_tokens - split.num_documents
    assert len(list(open_eval(data_keys(folder), steps=1))) == 1
    parts = [list(open_eval(data_keys(folder), host=host, hosts=2)) for host in range(2)]
    for step, batch in enumerate(first):
        assert_same(batch, join([part[step] for part in parts]))


def test_synthetic_evaluation_differs_from_training():
    data = data_keys("", dataset_type="synthetic")
    (batch,) = list(open_eval(data, steps=1))
    assert (batch.tokens_BT != take(open_train(data), 1)[0].tokens_BT).any()
    assert len(open_eval(data)) == 10  # without eval_steps, as random tokens never end


@pytest.mark.parametrize(
    ("name", "value"),
    [("data_set", "0123"), ("seed", 5), ("cut", "other"), ("max_target_length", 32)],
)
def test_position_of_other_data_is_refused(folder, name, value):
    iterator = open_train(data_keys(folder))
    position = iterator.position | {name: value}
    with pytest.raises(UserError) as caught:
        iterator.resume(position)
    assert repr(value) in str(caught.value)
    assert repr(iterator.position[name]) in str(caught.value)
    assert batch_iterators._KEY_OF[name] in str(caught.value)


def test_fingerprint_follows_contents_not_place(tmp_path):
    documents = random_documents(0, 20, 30)
    first = write_data_set(tmp_path / "a", {"train": documents})
    second = write_data_set(tmp_path / "b", {"train": documents})
    moved = write_data_set(tmp_path / "c", {"train": [np.concatenate(documents)]})
    assert first.fingerprint == second.fingerprint
    assert first.fingerprint != moved.fingerprint


def test_refusals_name_the_numbers(folder, tmp_path):
    data = data_keys(folder)
    manifest = read_manifest(str(folder))
    largest = manifest.splits["train"].largest_id
    tokens = manifest.splits["train"].num_tokens
    with pytest.raises(UserError, match=f"vocab_size=100 .*{largest}"):
        open_train(data, vocab_size=100)
    open_train(data, vocab_size=largest + 1)
    with pytest.raises(UserError, match=f"{tokens} tokens.*{tokens + 5}"):
        open_train(data, length=tokens + 4)
    open_train(data, length=tokens - 1)
    with pytest.raises(UserError, match=r"train_split=other.*train, validation"):
        open_train(data_keys(folder, train_split="other"))
    with pytest.raises(UserError, match=r"eval_split=other.*train, validation"):
        open_eval(data_keys(folder, eval_split="other"))
    with pytest.raises(UserError, match=r"8 sequences.*3 hosts"):
        open_train(data, hosts=3)
    with pytest.raises(UserError, match="num_epoch=0"):
        open_train(data_keys(folder, num_epoch=0))
    with pytest.raises(UserError, match="eval_steps=0"):
        open_eval(data, steps=0)
    write_data_set(tmp_path / "single", {"train": numbered_documents([1])})
    with pytest.raises(UserError, match="nothing to predict"):
        open_train(data_keys(tmp_path / "single"))


def test_unusable_folders_say_what_to_do(folder, tmp_path):
    with pytest.raises(UserError, match=r"dataset_path is not set.*prepare_data.py"):
        open_train(data_keys(""))
    with pytest.raises(UserError, match=r"absent: no such file"):
        open_train(data_keys(tmp_path / "absent"))
    with pytest.raises(UserError, match=r"a folder without files"):
        open_train(data_keys(tmp_path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("MaxText.buckets.paths._has_client", lambda: False)
        with pytest.raises(UserError, match=r"MaxText\[gcs\]"):
            open_train(data_keys("gs://bucket/data"))
    manifest = json.loads((folder / MANIFEST_NAME).read_text())
    for change, message in [
        ({"schema_version": 99}, "schema_version 99"),
        ({"dtype": "float32"}, "damaged"),
        ({"splits": {"../train": manifest["splits"]["train"]}}, "damaged"),
    ]:
        (tmp_path / MANIFEST_NAME).write_text(json.dumps(manifest | change))
        with pytest.raises(UserError, match=message):
            open_train(data_keys(tmp_path))
    (tmp_path / MANIFEST_NAME).write_text("{")
    with pytest.raises(UserError, match="damaged"):
        open_train(data_keys(tmp_path))


def test_description_gives_the_numbers(folder):
    manifest = read_manifest(str(folder))
    text = describe(manifest)
    assert f"{manifest.splits['train'].num_tokens:,} tokens, 200 documents" in text
    assert "3.00 bytes/token" in text
    assert "nats/token" in text


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_reader_processes_give_the_same_batches(folder, workers):
    expected = take(open_train(data_keys(folder)), 12)
    iterator = open_train(data_keys(folder, grain_worker_count=workers))
    for batch, reference in zip(take(iterator, 12), expected, strict=True):
        assert_same(batch, reference)
    iterator.seek(5)
    for batch, reference in zip(take(iterator, 7), expected[5:], strict=True):
        assert_same(batch, reference)
