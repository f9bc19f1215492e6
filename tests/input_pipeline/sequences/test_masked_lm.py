"""Masked language modelling: which tokens are hidden, by what, and what is never hidden."""

import numpy as np
import pytest

from MaxText.config.data_sections import MaskingConfig
from MaxText.input_pipeline.sequences.masked_lm import MLMMasking
from tests.refusals import refused

VOCAB_SIZE = 1000
EOS, MASK, CLS, PAD = 0, 1, 2, 3
ORDINARY = 4  # first id after the special ones


def model(vocab_size=VOCAB_SIZE, special_ids=(EOS, CLS, PAD), mask_id=None, **keys):
    masking = MaskingConfig(mlm_training=True, **{"mlm.mask_id": MASK, **keys})
    return MLMMasking(masking, vocab_size, mask_id, special_ids)


def random_rows(num_rows: int, length: int) -> dict[str, np.ndarray]:
    """Rows of one document each, without special ids or padding."""
    shape = (num_rows, length)
    return {
        "tokens": np.random.default_rng(0).integers(ORDINARY, VOCAB_SIZE, shape, np.int32),
        "weights": np.ones(shape, np.float32),
        "positions": np.tile(np.arange(length, dtype=np.int32), (num_rows, 1)),
        "segments": np.ones(shape, np.int32),
    }


def test_shares_of_a_million_tokens():
    rows = random_rows(1000, 1024)  # which may all be hidden
    masked = model().apply(rows, np.arange(1000), seed=5)
    chosen = masked["weights"] > 0
    assert chosen.mean() == pytest.approx(0.15, abs=0.002)
    np.testing.assert_array_equal(masked["tokens"][~chosen], rows["tokens"][~chosen])
    np.testing.assert_array_equal(masked["targets"], rows["tokens"])
    for name in ("positions", "segments"):
        np.testing.assert_array_equal(masked[name], rows[name])
    assert {name: array.dtype for name, array in masked.items()} == {
        **dict.fromkeys(("tokens", "targets", "positions", "segments"), np.int32),
        "weights": np.float32,
    }
    assert set(np.unique(masked["weights"])) == {0.0, 1.0}
    before, after = rows["tokens"][chosen], masked["tokens"][chosen]
    is_mask, is_same = after == MASK, after == before
    assert is_mask.mean() == pytest.approx(0.8, abs=0.004)
    assert is_same.mean() == pytest.approx(0.1, abs=0.004)
    assert (~is_mask & ~is_same).mean() == pytest.approx(0.1, abs=0.004)
    # Random ids are uniform over the ordinary ones.
    counts = np.bincount(after[~is_mask & ~is_same], minlength=VOCAB_SIZE)
    assert counts[:ORDINARY].sum() == 0
    expected = counts.sum() / (VOCAB_SIZE - ORDINARY)
    # Chi-squared with 995 degrees of freedom: mean 995, deviation 45.
    assert ((counts[ORDINARY:] - expected) ** 2 / expected).sum() == pytest.approx(995, abs=5 * 45)


@pytest.mark.parametrize("ignored", [(), (50, 51, 52)])
def test_special_and_ignored_ids_are_never_hidden(ignored):
    rng = np.random.default_rng(1)
    rows = random_rows(100, 200)
    special = np.array([EOS, MASK, CLS, PAD, *ignored], np.int32)
    places = rng.random(rows["tokens"].shape) < 0.5
    rows["tokens"][places] = rng.choice(special, places.sum())
    keys = {"mlm.cls_token_id": CLS, "mlm.mask_ignore_ids": ignored, "mlm.mask_prob": 1.0}
    masked = model(**keys).apply(rows, np.arange(100), seed=0)
    chosen = masked["weights"] > 0
    np.testing.assert_array_equal(chosen, ~np.isin(masked["targets"], special))
    np.testing.assert_array_equal(masked["tokens"][~chosen], masked["targets"][~chosen])
    drawn = masked["tokens"][chosen]
    assert not np.isin(drawn[drawn != MASK], special).any()


@pytest.mark.parametrize(
    ("name", "values"),
    [
        # The pad id is an ordinary one here: only segments tell.
        ("segments", [[1, 1, 2, 2, 0, 0], [0] * 6]),
        # Without segments, weights do: the last token of a text has no next one, but is a target.
        ("weights", [[1, 1, 1, 0, 0, 0], [0] * 6]),
    ],
)
def test_padding_is_never_hidden(name, values):
    rows = random_rows(2, 6) | {name: np.array(values)}
    if name == "weights":
        del rows["segments"], rows["positions"]
    masked = model(**{"mlm.mask_prob": 1.0}).apply(rows, np.arange(2), seed=0)
    np.testing.assert_array_equal(masked["weights"], [[1, 1, 1, 1, 0, 0], [0] * 6])
    assert masked.keys() == rows.keys() | {"targets"}


def test_a_row_depends_on_seed_and_its_number_only():
    rows = random_rows(8, 64)
    copies = {name: array.copy() for name, array in rows.items()}
    numbers = np.array([0, 1, 2, 3, 10**12, 10**12 + 1, 5, 4])
    whole = model().apply(rows, numbers, seed=7)
    order = [5, 2, 7, 0]
    some = model().apply({k: v[order] for k, v in rows.items()}, numbers[order], seed=7)
    for name, array in some.items():
        np.testing.assert_array_equal(array, whole[name][order])
    same = {name: np.repeat(values[:1], 20, axis=0) for name, values in rows.items()}
    for chosen in (
        model().apply(same, np.arange(20), seed=7)["weights"] > 0,
        np.stack([model().apply(same, np.zeros(20), seed=s)["weights"][0] > 0 for s in range(20)]),
    ):
        # Independent choices agree on .15 * .15 of the places.
        assert (chosen[1:] & chosen[:-1]).mean() == pytest.approx(0.0225, abs=0.02)
    # The rows given are left as they are.
    with_cls = model(**{"mlm.cls_token_id": CLS}).apply(rows, numbers, 0)
    for array in (*whole.values(), *with_cls.values()):
        array[:] = -1
    for name, array in rows.items():
        np.testing.assert_array_equal(array, copies[name])


@pytest.mark.parametrize(("same", "random"), [(0, 0), (1, 0), (0, 1)])
def test_shares_of_0_and_1(same, random):
    rows = random_rows(10, 100)
    keys = {"mlm.same_token_prob": same, "mlm.random_token_prob": random, "mlm.mask_prob": 1.0}
    masked = model(**keys).apply(rows, np.arange(10), seed=0)
    assert masked["weights"].all()
    assert (masked["tokens"] == MASK).mean() == 1 - same - random
    assert same <= (masked["tokens"] == rows["tokens"]).mean() < same + 0.02


def test_cls_comes_first_and_belongs_to_the_first_segment():
    rows = {
        "tokens": np.array([[10, 11, 12, 20, 21], [30, 31, EOS, EOS, EOS]], np.int32),
        "weights": np.ones((2, 5), np.float32),
        "positions": np.array([[0, 1, 2, 0, 1], [0, 1, 0, 0, 0]], np.int32),
        "segments": np.array([[1, 1, 1, 2, 2], [1, 1, 0, 0, 0]], np.int32),
    }
    all_hidden = model(**{"mlm.cls_token_id": CLS, "mlm.mask_prob": 1.0})
    masked = all_hidden.apply(rows, np.arange(2), seed=0)
    assert masked["targets"].tolist() == [[CLS, 10, 11, 12, 20], [CLS, 30, 31, EOS, EOS]]
    assert masked["weights"].tolist() == [[0, 1, 1, 1, 1], [0, 1, 1, 0, 0]]
    assert masked["positions"].tolist() == [[0, 1, 2, 3, 0], [0, 1, 2, 0, 0]]
    assert masked["segments"].tolist() == [[1, 1, 1, 1, 2], [1, 1, 1, 0, 0]]
    assert (masked["tokens"][:, 0] == CLS).all()
    # Windows that are shorter by one lose no token to it.
    longer = model(**{"mlm.cls_token_id": CLS}).apply(rows, np.arange(2), seed=0, length=6)
    np.testing.assert_array_equal(longer["targets"][:, 1:], rows["tokens"])
    # A row without text gets none.
    rows = {"tokens": np.full((1, 4), PAD, np.int32), "weights": np.zeros((1, 4), np.float32)}
    masked = all_hidden.apply(rows, np.arange(1), seed=0)
    np.testing.assert_array_equal(masked["tokens"], rows["tokens"])
    assert not masked["weights"].any()


@pytest.mark.parametrize(("key", "expected"), [(-1, 77), (MASK, MASK)])
def test_the_mask_of_the_tokenizer_is_the_default(key, expected):
    rows = random_rows(1, 50)
    keys = {"mlm.mask_prob": 1.0, "mlm.same_token_prob": 0, "mlm.random_token_prob": 0}
    # A special id may lie outside the table: GPT-Neo pads with 50257 next to 50257 rows.
    masking = model(special_ids=(VOCAB_SIZE,), mask_id=77, **{"mlm.mask_id": key}, **keys)
    masked = masking.apply(rows, np.arange(1), seed=0)
    assert (masked["tokens"][rows["tokens"] != 77] == expected).all()


@pytest.mark.parametrize(
    ("keys", "vocab_size", "named"),
    [
        ({"mlm.mask_id": -1}, VOCAB_SIZE, "mlm.mask_id=-1"),
        ({"mlm.mask_id": 1000}, VOCAB_SIZE, "mlm.mask_id .*1000.*0 to 999"),
        ({"mlm.cls_token_id": 1000}, VOCAB_SIZE, "mlm.cls_token_id .*1000"),
        ({"mlm.mask_ignore_ids": (5, -2)}, VOCAB_SIZE, "mlm.mask_ignore_ids .*-2"),
    ],
)
def test_mistakes(keys, vocab_size, named):
    refused(named, model, vocab_size, **keys)
