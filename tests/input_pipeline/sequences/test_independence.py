"""What must not repeat: orders of groups, random rows, masks and places of different draws."""

import itertools

import numpy as np

from MaxText.config.data_sections import MaskingConfig
from MaxText.input_pipeline.sequences.order import (
    EVAL_STREAM,
    TRAIN_STREAM,
    OrderedSequences,
    SyntheticSequences,
)
from MaxText.input_pipeline.sequences.random_bits import random_bits
from tests.input_pipeline.small_data import (
    data_keys,
    open_train,
    random_documents,
    take,
    write_data_set,
)


def test_groups_of_equal_size_and_their_epochs_have_orders_of_their_own():
    size, groups = 30, np.array([0, 30, 60, 75, 75, 90])
    orders = {}
    for seed in range(2):
        order = OrderedSequences(range(90), seed, shuffle=True, num_epoch=2, groups=groups)
        numbers = [order.sequence_index(number) for number in range(180)]
        for epoch, (first, end) in itertools.product(range(2), itertools.pairwise(groups.tolist())):
            windows = numbers[90 * epoch + first : 90 * epoch + end]
            # Within its group each window once, and groups one after the other.
            assert sorted(windows) == list(range(first, end))
            if end - first == size:
                orders[seed, epoch, first] = tuple(window - first for window in windows)
    assert len(orders) == 8
    assert len(set(orders.values())) == 8


def test_random_rows_have_no_stretch_in_common():
    """Not even shifted: each row, stream and seed has random numbers of its own."""
    stretches = []
    for seed, stream in itertools.product((0, 1, 2**32), (TRAIN_STREAM, EVAL_STREAM)):
        rows = SyntheticSequences(32, 50_000, seed, stream)
        batch = rows.read(np.array([0, 1, 2, 3, 4, 8, 2**32, 2**40]))
        ids = np.concatenate([batch["tokens"], batch["targets"][:, -1:]], axis=1)
        assert (batch["targets"] == ids[:, 1:]).all()
        stretches += [tuple(row[start : start + 3]) for row in ids for start in range(31)]
    assert len(set(stretches)) == len(stretches)


def test_random_words_differ_by_seed_and_number_and_have_even_bits():
    words = np.concatenate([random_bits(seed, np.arange(2000)) for seed in (0, 1, 2)])
    assert len(np.unique(words)) == len(words)
    bits = np.unpackbits(words.view(np.uint8)).reshape(len(words), 64)
    assert np.abs(bits.mean(axis=0) - 0.5).max() < 0.04


def test_masks_follow_the_seed_and_the_row(tmp_path):
    write_data_set(tmp_path / "d", {"train": random_documents(0, 60, 50)})
    masking = MaskingConfig(mlm_training=True, **{"mlm.mask_id": 3})

    def masked(seed):
        keys = data_keys(tmp_path / "d", data_shuffle_seed=seed, enable_data_shuffling=False)
        batches = take(open_train(keys, batch=4, masking=masking), 4)
        return np.concatenate([batch.loss_mask_BT for batch in batches]) > 0

    first, other = masked(0), masked(1)
    assert (masked(0) == first).all()
    # Some of few tokens may be masked alike by chance.
    assert (first != other).any(axis=1).mean() > 0.8
    assert len({tuple(row) for row in np.concatenate([first, other])}) > 1.8 * len(first)
