"""Order, the end of the data, evaluation, mixtures, and what is refused."""

import json
import re
from unittest import mock

import numpy as np
import pyarrow
import pytest

from MaxText.config.data_sections import MaskingConfig, MegatronConfig
from MaxText.errors import UserError
from MaxText.input_pipeline import prefetch
from MaxText.input_pipeline.sequences.batch_schedule import BatchSchedule
from MaxText.input_pipeline.token_store.manifest import MANIFEST_NAME, read_manifest
from MaxText.input_pipeline.token_store.store import TokenStore
from tests.input_pipeline.faults import failing_reads
from tests.input_pipeline.small_data import (
    LENGTH,
    assert_same,
    data_keys,
    fields,
    join,
    numbered_documents,
    open_eval,
    open_train,
    random_documents,
    take,
    write_data_set,
)
from tests.input_pipeline.token_store import token_files
from tests.refusals import refused


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "set"
    splits = {"train": random_documents(0, 200, 50), "validation": random_documents(1, 12, 50)}
    write_data_set(folder, splits)
    return folder


@pytest.fixture
def numbered(tmp_path):
    """Five windows of LENGTH tokens, all ids different."""
    write_data_set(tmp_path / "n", {"train": numbered_documents([LENGTH * 5 + 1])})
    return tmp_path / "n"


def test_groups_of_files_are_read_in_order_and_shuffled_inside(tmp_path):
    parts = [[np.full(17, 10 * file + record) for record in range(6)] for file in range(4)]
    token_files.write("tfrecord", tmp_path, parts)
    keys = {"iter_file_nums": 2, "num_epoch": 2, "data_cache_dir": str(tmp_path / "cache")}
    ids = join(open_train(data_keys(tmp_path, **keys), 12)).tokens_BT[:, 0].reshape(4, 12)
    # Two epochs of two groups.
    for group in range(4):
        files = 2 * (group % 2) + np.arange(2)
        assert sorted(ids[group]) == sorted((10 * files[:, None] + np.arange(6)).ravel())
        assert ids[group].tolist() != sorted(ids[group])
    assert ids[0].tolist() != ids[2].tolist()


def test_without_shuffling_the_order_is_that_of_the_files(tmp_path):
    write_data_set(tmp_path / "d", {"train": numbered_documents([20, 20])})
    manifest = json.loads((tmp_path / "d" / MANIFEST_NAME).read_text())
    manifest["tokenizer"]["pad_id"] = 41
    (tmp_path / "d" / MANIFEST_NAME).write_text(json.dumps(manifest))
    # The pad id is written where the model has it.
    for vocab_size, pad_id in ((42, 41), (41, 0)):
        data = data_keys(tmp_path / "d", num_epoch=1, enable_data_shuffling=False)
        (batch,) = open_train(data, batch=3, vocab_size=vocab_size)
        assert batch.tokens_BT.ravel().tolist() == [*range(1, 41)] + [pad_id] * 8


def test_the_last_batch_is_padded_with_rows_of_weight_zero(numbered):
    data = data_keys(numbered, num_epoch=1)
    batches = list(open_train(data, batch=4))
    assert len(batches) == 2
    assert batches[1].loss_mask_BT.sum(axis=1).tolist() == [LENGTH, 0, 0, 0]
    second_host = list(open_train(data, batch=4, host=1, hosts=2))
    assert [batch.loss_mask_BT.sum() for batch in second_host] == [2 * LENGTH, 0]
    ended = open_train(data, batch=4)
    ended.seek(2)
    assert take(ended, 1) == take(ended, 1) == []
    # Batches cross the end of an epoch.
    batches = list(open_train(data_keys(numbered, num_epoch=3), batch=4))
    assert len(batches) == 4
    assert sum(batch.loss_mask_BT.sum() for batch in batches) == 15 * LENGTH


def test_num_steps_after_a_change_of_the_batch_size(tmp_path, folder):
    assert open_train(data_keys(folder)).num_steps is None
    assert open_train(data_keys("", dataset_type="synthetic")).num_steps is None
    write_data_set(tmp_path / "d", {"train": numbered_documents([30] * 20)})  # 38 windows
    data = data_keys(tmp_path / "d", num_epoch=1)
    small = open_train(data, batch=4)
    take(small, 2)
    large = open_train(data, batch=8)
    assert large.num_steps == 5
    large.set_state(small.get_state())
    assert large.num_steps == 6  # 8 samples in 2 steps, 30 in 4
    assert len(take(large, 100)) == 4
    assert large.get_state()["samples"] == 40
    smallest = open_train(data, batch=1)
    smallest.set_state(large.get_state())
    assert take(smallest, 100) == []
    few_steps = open_train(data, batch=32)
    take(few_steps, 2)
    smallest.set_state(few_steps.get_state())
    assert smallest.num_steps == 0
    assert take(smallest, 100) == []


CLS = MaskingConfig(mlm_training=True, **{"mlm.mask_id": 3, "mlm.cls_token_id": 4})


@pytest.mark.parametrize(
    ("keys", "options", "named"),
    [
        ({"data_shuffle_seed": 5}, {}, "data_shuffle_seed was 0 and is 5"),
        ({"packing": False}, {}, "packing"),
        ({"iter_file_nums": 1}, {}, "iter_file_nums"),
        ({"enable_data_shuffling": False}, {}, "enable_data_shuffling"),
        ({"train_split": "validation"}, {}, "train_split was 'train' and is 'validation'"),
        ({}, {"schedule": BatchSchedule.constant(8, 8)}, "max_target_length was 16 and is 8"),
        ({}, {"masking": CLS}, "mlm_"),
        ({"mix": True}, {}, "data_mixture_weights"),
    ],
)
def test_resume_of_other_data_is_refused(folder, keys, options, named):
    if "mix" in keys:
        keys = {"data_mixture_weights": ((str(folder), 1.0), (str(folder), 0.25))}
    plain, other = open_train(data_keys(folder)), open_train(data_keys(folder, **keys), **options)
    refused(named, other.set_state, plain.get_state())
    refused(named.split()[0], plain.set_state, other.get_state())
    other.set_state(other.get_state())


def test_resume_of_other_contents_or_weights_is_refused(folder, tmp_path):
    write_data_set(tmp_path / "d", {"train": random_documents(9, 200, 50)})
    for locations in ((folder, tmp_path / "d"), (tmp_path / "d", folder)):
        first, second = (open_train(data_keys(location)) for location in locations)
        refused(first.get_state()["data_set"], second.set_state, first.get_state())
    first, second = (
        open_train(data_keys("", data_mixture_weights=((str(folder), 1.0), (str(folder), weight))))
        for weight in (0.12345678, 0.12345679)
    )
    refused(r"'1\.0 0\.12345678'", second.set_state, first.get_state())


def test_gpt_neox_order_depends_on_the_number_of_epochs(tmp_path):
    (tmp_path / "d").mkdir()
    token_files.write_megatron(tmp_path / "d" / "c", token_files.documents(0, [30, 50, 41]))

    def opened(steps, **keys):
        keys |= {"megatron.order": "gpt_neox", "data_retry.delay": 0.0}
        data = data_keys(tmp_path / "d", **keys)
        return open_train(data, schedule=BatchSchedule.constant(1, 12), steps=steps)

    for epochs in (1, 2):
        iterator = opened(35, num_epoch=epochs)
        assert iterator.num_steps == 10 * epochs  # 121 tokens are 1 + 10 x 12, 242 1 + 20 x 12 + 1
        with failing_reads(1, from_step=4):
            assert len(take(iterator, 100)) == 10 * epochs
        assert "Input/output error" in iterator.retries.drain()[0]
    # 31 to 40 samples take four epochs, the 41st a fifth.
    position = opened(35).get_state()
    opened(40).set_state(position)
    refused("packing", opened(41).set_state, position)


def test_shares_of_a_mixture(tmp_path):
    paths = []
    for name, first, count in (("a", 1, 1), ("b", 100, 4)):
        paths.append(tmp_path / f"{name}.tfrecord")
        token_files.write_tfrecord(paths[-1], [np.arange(first, first + 17)] * 4 * count)
    a, b = map(str, paths)
    cache = {"data_cache_dir": str(tmp_path / "cache")}
    mix = {"data_mixture_weights": ((a, 1.0), (b, 1.0)), **cache}
    for keys, share in (
        ({"grain_train_files": f"{a},1;{b},3", **cache}, 1 / 4),
        (mix, 1 / 2),
        # They follow the sizes, 1 to 4, and at temperature 2 the roots of these.
        (mix | {"mixture_temperature": 1}, 1 / 5),
        (mix | {"mixture_temperature": 2}, 1 / 3),
    ):
        data = data_keys("", enable_data_shuffling=False, **keys)
        (batch,) = take(open_train(data, batch=120), 1)
        assert (batch.tokens_BT[:, 0] < 100).mean() == pytest.approx(share, abs=0.01)  # a row
    lines: list[str] = []
    open_train(data_keys("", **mix), steps=10, log=lines.append)
    numbers = re.findall(r"[\d.]+%|[\d.]+(?= passes)", "".join(lines))
    assert numbers == ["50.00%", "10.00", "50.00%", "2.50"]
    refused("num_epoch=1", open_train, data_keys("", num_epoch=1, **mix))


def test_labels_beyond_the_vocabulary_are_refused(tmp_path):
    labels = pyarrow.array([[6, 7, -100], [9, 70, -100]], pyarrow.list_(pyarrow.int64()))
    ids = [np.array([5, 6, 7]), np.array([8, 9, 0])]
    token_files.write_parquet(tmp_path / "x.parquet", ids, labels=labels)
    data = data_keys(tmp_path / "x.parquet", data_cache_dir=str(tmp_path / "cache"))
    assert len(take(open_train(data, batch=2, vocab_size=71), 1)) == 1
    refused(r"vocab_size=70 .*id 70", take, open_train(data, batch=2, vocab_size=70), 1)
    masking = MaskingConfig(mlm_training=True, **{"mlm.mask_id": 3})
    refused("labels", open_train, data, masking=masking)
    megatron = MegatronConfig(order="gpt_neox")
    refused("labels", open_train, data.model_copy(update={"megatron": megatron}))


@pytest.mark.parametrize(
    ("sizes", "packing", "said"),
    [
        # Records of one length are sequences only where they fill rows of this length.
        ([9, 9, 9], True, ""),
        ([9, 9, 9], False, "50.0% .*packing=true"),
        ([17, 17, 17], True, ""),
        ([9, 30, 5], True, ""),
    ],
)
def test_padding_is_reported(sizes, packing, said, tmp_path):
    path = tmp_path / "train.tfrecord"
    token_files.write_tfrecord(path, numbered_documents(sizes))
    cache = str(tmp_path / "cache")
    data, lines = data_keys(path, packing=packing, num_epoch=1, data_cache_dir=cache), []
    run = open_train(data, batch=1, log=lines.append)
    assert re.search(said, lines[-1])
    assert ("padding:" in lines[-1]) == bool(said)
    share = np.mean([batch.loss_mask_BT.mean() for batch in run])
    assert share == 0.5 if not packing else share > 0.6


def test_skipped_records_are_reported(tmp_path):
    path = tmp_path / "train.tfrecord"
    token_files.write_tfrecord(path, [np.arange(1, 30), np.arange(30, 90), np.arange(90, 99)])
    content = bytearray(path.read_bytes())
    content[content.index(bytes(range(40, 50)))] ^= 1
    path.write_bytes(content)
    keys = {"bad_records.action": "skip", "bad_records.maximum": 2, "eval_split": "train"}
    data = data_keys(path, data_cache_dir=str(tmp_path / "c"), **keys)
    batches = open_eval(data, batch=2)
    assert len(batches.skipped) == 1
    assert "train.tfrecord at byte" in batches.skipped[0]
    # Records of 29 and 9 ids are left, in each evaluation, and the bad one counts once.
    for _ in range(3):
        assert sum(float(batch.loss_mask_BT.sum()) for batch in batches) == 28 + 8
    assert len(batches.skipped) == 1


def test_a_far_step_reads_no_more_than_the_first(folder, monkeypatch):
    iterator = open_train(data_keys(folder))
    take(iterator, 1)
    spy = mock.Mock(side_effect=TokenStore.read)
    monkeypatch.setattr(TokenStore, "read", lambda *arguments: spy(*arguments))
    iterator.seek(10**6)
    spy.assert_not_called()
    take(iterator, 1)
    # The one that was taken, and those that are ready or in flight.
    assert spy.call_count <= 1 + prefetch.BATCHES_READY
    assert iterator.get_state()["step"] == 10**6 + 1


def test_reused_batch_is_the_first_at_any_step(folder):
    first = take(open_train(data_keys(folder)), 1)
    iterator = open_train(data_keys(folder, reuse_example_batch=True))
    iterator.seek(7)
    assert_same(take(iterator, 3), first * 3)
    assert iterator.get_state()["step"] == 10


def test_synthetic_tokens_are_a_function_of_seed_and_step():
    def batch(seed, step):
        data = data_keys("", dataset_type="synthetic", data_shuffle_seed=seed)
        iterator = open_train(data, vocab_size=97)
        iterator.seek(step)
        return next(iterator)

    evaluation = open_eval(data_keys("", dataset_type="synthetic"), vocab_size=97)
    assert len(evaluation) == 10  # without eval_steps, as random tokens never end
    batches = [batch(0, 5), batch(0, 6), batch(1, 5), batch(0, 0), next(iter(evaluation))]
    assert len({one.tokens_BT.tobytes() for one in batches}) == 5
    assert_same(batches[:1], [batch(0, 5)])
    assert 0 <= batches[0].tokens_BT.min() <= batches[0].tokens_BT.max() < 97
    for one in batches:
        np.testing.assert_array_equal(one.targets_BT[:, :-1], one.tokens_BT[:, 1:])
        assert one.loss_mask_BT.all()
        assert fields(one).keys() == {"tokens_BT", "targets_BT", "loss_mask_BT"}


def test_evaluation_reads_the_split_once_in_order_each_time(folder, numbered):
    split = read_manifest(str(folder)).splits["validation"]
    evaluation = open_eval(data_keys(folder))
    first = list(evaluation)
    assert len(first) == len(evaluation) > 1
    assert_same(evaluation, first)
    num_targets = split.num_tokens - split.num_documents
    assert sum(batch.loss_mask_BT.sum() for batch in first) == num_targets
    assert_same(open_eval(data_keys(folder), eval_steps=1), first[:1])
    parts = [open_eval(data_keys(folder), host=host, hosts=2) for host in range(2)]
    assert_same([join(rows) for rows in zip(*parts, strict=True)], first)
    # Several data sets, one after the other, with and without documents that share a row.
    several = f"{numbered};{numbered}"
    data = data_keys("", grain_eval_files=several, eval_split="train", packing=False)
    (batch,) = open_eval(data, batch=16)
    np.testing.assert_array_equal(batch.targets_BT[:5].ravel(), np.arange(2, 82))
    np.testing.assert_array_equal(batch.tokens_BT[5:10], batch.tokens_BT[:5])
    assert not batch.loss_mask_BT[10:].any()


def test_mistakes(folder, tmp_path, told):
    split = read_manifest(str(folder)).splits["train"]
    largest, tokens = split.max_token_id or 0, split.num_tokens
    (tmp_path / "empty").mkdir()
    write_data_set(tmp_path / "single", {"train": numbered_documents([1])})
    data = data_keys(folder)
    mistakes = [
        lambda: open_train(data, vocab_size=100),
        lambda: open_train(data, schedule=BatchSchedule.constant(8, tokens + 4)),
        lambda: open_train(data_keys(folder, train_split="other")),
        lambda: open_eval(data_keys(folder, eval_split="other")),
        lambda: open_train(data, hosts=3),
        lambda: open_train(data_keys(tmp_path / "single")),
        lambda: open_train(data_keys("")),
        lambda: open_train(data_keys(tmp_path / "absent")),
        lambda: open_train(data_keys(tmp_path / "empty")),
        lambda: open_train(data_keys("", grain_train_files="a,0")),
        lambda: open_train(data_keys(folder, excluded_samples=((5, 5),))),
    ]
    messages = []
    for mistake in mistakes:
        with pytest.raises(UserError) as caught:
            mistake()
        messages.append(str(caught.value).replace(str(folder), "<set>"))
    told("\n".join(messages))
    open_train(data, vocab_size=largest + 1)
    open_train(data, schedule=BatchSchedule.constant(8, tokens - 1))
