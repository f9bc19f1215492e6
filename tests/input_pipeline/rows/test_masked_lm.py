import numpy as np
import pytest

from MaxText.configuration.data_sections import Masking
from MaxText.errors import UserError
from MaxText.input_pipeline.rows.masked_lm import MaskedLanguageModel

VOCAB_SIZE = 1000
EOS, MASK, CLS, PAD = 0, 1, 2, 3
ORDINARY = 4  # first id that is no special one


def model(vocab_size: int = VOCAB_SIZE, special_ids=(EOS, CLS, PAD), **keys) -> MaskedLanguageModel:
    masking = Masking(mlm_training=True, **{"mlm_mask_id": MASK, **keys})
    return MaskedLanguageModel(masking, vocab_size, special_ids=special_ids)


def random_rows(num_rows: int, length: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Rows of one document each, without special ids or filling."""
    shape = (num_rows, length)
    tokens = np.random.default_rng(seed).integers(ORDINARY, VOCAB_SIZE, shape, np.int32)
    return {
        "tokens": tokens,
        "weights": np.ones(shape, np.float32),
        "positions": np.tile(np.arange(length, dtype=np.int32), (num_rows, 1)),
        "segments": np.ones(shape, np.int32),
    }


@pytest.fixture(scope="module")
def million() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Rows of 1,024,000 tokens that may all be hidden, before and after."""
    rows = random_rows(1000, 1024)
    return rows, model().apply(rows, np.arange(1000), seed=5)


def test_shares_of_a_million_tokens(million):
    rows, masked = million
    chosen = masked["weights"] > 0
    assert chosen.mean() == pytest.approx(0.15, abs=0.002)
    before, after = rows["tokens"][chosen], masked["tokens"][chosen]
    is_mask, is_same = after == MASK, after == before
    assert is_mask.mean() == pytest.approx(0.8, abs=0.004)
    assert is_same.mean() == pytest.approx(0.1, abs=0.004)
    assert (~is_mask & ~is_same).mean() == pytest.approx(0.1, abs=0.004)


def test_tokens_that_are_not_chosen_and_targets_are_the_originals(million):
    rows, masked = million
    chosen = masked["weights"] > 0
    np.testing.assert_array_equal(masked["tokens"][~chosen], rows["tokens"][~chosen])
    np.testing.assert_array_equal(masked["targets"], rows["tokens"])
    np.testing.assert_array_equal(masked["positions"], rows["positions"])
    np.testing.assert_array_equal(masked["segments"], rows["segments"])
    assert set(np.unique(masked["weights"])) == {0.0, 1.0}
    assert {name: array.dtype for name, array in masked.items()} == {
        "tokens": np.int32,
        "targets": np.int32,
        "weights": np.float32,
        "positions": np.int32,
        "segments": np.int32,
    }


def test_random_ids_are_uniform_over_the_ordinary_ids(million):
    rows, masked = million
    drawn = (masked["tokens"] != rows["tokens"]) & (masked["tokens"] != MASK)
    counts = np.bincount(masked["tokens"][drawn], minlength=VOCAB_SIZE)
    assert counts[:ORDINARY].sum() == 0
    expected = counts.sum() / (VOCAB_SIZE - ORDINARY)
    # Chi-squared with 995 degrees of freedom: mean 995, deviation 45.
    chi_squared = ((counts[ORDINARY:] - expected) ** 2 / expected).sum()
    assert chi_squared == pytest.approx(995, abs=5 * 45)


def test_choices_are_independent_of_place_row_and_neighbours(million):
    _, masked = million
    chosen = masked["weights"].astype(np.float64)
    # Means over 1000 and 1024 places: 6 standard deviations of .15 * .85.
    assert np.abs(chosen.mean(axis=0) - 0.15).max() < 6 * (0.1275 / 1000) ** 0.5
    assert np.abs(chosen.mean(axis=1) - 0.15).max() < 6 * (0.1275 / 1024) ** 0.5
    for neighbours in (chosen[:, 1:] * chosen[:, :-1], chosen[1:] * chosen[:-1]):
        assert neighbours.mean() == pytest.approx(0.0225, abs=0.001)


@pytest.mark.parametrize("ignored", [(), (50, 51, 52)])
def test_special_and_ignored_ids_are_never_hidden(ignored):
    rng = np.random.default_rng(1)
    rows = random_rows(100, 200)
    special = np.array([EOS, MASK, CLS, PAD, *ignored], np.int32)
    places = rng.random(rows["tokens"].shape) < 0.5
    rows["tokens"][places] = rng.choice(special, places.sum())
    keys = {"mlm_cls_token_id": CLS, "mlm_mask_ignore_ids": ignored, "mlm_mask_prob": 1.0}
    masked = model(**keys).apply(rows, np.arange(100), seed=0)
    chosen = masked["weights"] > 0
    np.testing.assert_array_equal(chosen, ~np.isin(masked["targets"], special))
    np.testing.assert_array_equal(masked["tokens"][~chosen], masked["targets"][~chosen])
    drawn = masked["tokens"][chosen]
    assert not np.isin(drawn[drawn != MASK], special).any()


def test_filling_is_never_hidden():
    # The filling id is an ordinary one here: only segments tell.
    rows = random_rows(2, 6)
    rows["segments"] = np.array([[1, 1, 2, 2, 0, 0], [0] * 6], np.int32)
    masked = model(mlm_mask_prob=1.0).apply(rows, np.arange(2), seed=0)
    np.testing.assert_array_equal(masked["weights"], [[1, 1, 1, 1, 0, 0], [0] * 6])


def test_filling_without_segments_is_what_no_weight_speaks_of():
    # Rows as windows without document mask leave them: the last token of a text has no next
    # token, so weight 0, but is a target.
    tokens = random_rows(2, 6)["tokens"]
    weights = np.array([[1, 1, 1, 0, 0, 0], [0] * 6], np.float32)
    masked = model(mlm_mask_prob=1.0).apply(
        {"tokens": tokens, "weights": weights}, np.arange(2), seed=0
    )
    np.testing.assert_array_equal(masked["weights"], [[1, 1, 1, 1, 0, 0], [0] * 6])
    assert set(masked) == {"tokens", "targets", "weights"}


def test_a_row_depends_on_seed_and_run_row_only():
    rows = random_rows(8, 64)
    run_rows = np.array([0, 1, 2, 3, 10**12, 10**12 + 1, 5, 4])
    whole = model().apply(rows, run_rows, seed=7)
    order = [5, 2, 7, 0]
    some = model().apply({k: v[order] for k, v in rows.items()}, run_rows[order], seed=7)
    for name, array in some.items():
        np.testing.assert_array_equal(array, whole[name][order])


def test_hosts_together_make_the_batch_of_one_host():
    rows = random_rows(12, 32)
    run_rows = np.arange(24, 36)
    whole = model().apply(rows, run_rows, seed=3)
    for hosts in (2, 3, 4):
        parts = [
            model().apply({k: v[piece] for k, v in rows.items()}, run_rows[piece], seed=3)
            for piece in np.split(np.arange(12), hosts)
        ]
        for name, array in whole.items():
            np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), array)


@pytest.mark.parametrize(
    "other", [{"seed": 4, "run_row": 9}, {"seed": 3, "run_row": 10}], ids=["seed", "row"]
)
def test_another_seed_or_run_row_hides_other_tokens(other):
    rows = random_rows(1, 1000)
    first = model().apply(rows, np.array([9]), seed=3)["weights"] > 0
    second = model().apply(rows, np.array([other["run_row"]]), seed=other["seed"])["weights"] > 0
    # Independent choices agree on .15 * .15 of the places.
    assert (first & second).mean() == pytest.approx(0.0225, abs=0.02)


def test_the_choice_for_one_seed_and_row_stays_what_it_is():
    # A resumed run after an update of this program must hide the same tokens.
    rows = {"tokens": np.arange(10, 34, dtype=np.int32)[None], "weights": np.ones((1, 24))}
    masked = model(mlm_mask_prob=0.5, mlm_random_token_prob=0.3).apply(
        rows, np.array([123_456_789_012]), seed=42
    )
    places = np.flatnonzero(masked["weights"][0])
    assert places.tolist() == [3, 7, 9, 12, 13, 18, 23]
    assert masked["tokens"][0, places].tolist() == [347, 762, *[MASK] * 5]


def test_the_rows_given_are_left_as_they_are():
    rows = random_rows(4, 16)
    copies = {name: array.copy() for name, array in rows.items()}
    for cls in (-1, CLS):
        masked = model(mlm_cls_token_id=cls, mlm_mask_prob=1.0).apply(rows, np.arange(4), seed=0)
        for array in masked.values():
            array[:] = -1
    for name, array in rows.items():
        np.testing.assert_array_equal(array, copies[name])


@pytest.mark.parametrize(
    ("same", "random", "expected"), [(0, 0, "mask"), (1, 0, "same"), (0, 1, "random")]
)
def test_shares_of_0_and_1(same, random, expected):
    rows = random_rows(10, 100)
    masked = model(mlm_mask_prob=1.0, mlm_same_token_prob=same, mlm_random_token_prob=random).apply(
        rows, np.arange(10), seed=0
    )
    assert masked["weights"].all()
    if expected == "mask":
        assert (masked["tokens"] == MASK).all()
    elif expected == "same":
        np.testing.assert_array_equal(masked["tokens"], rows["tokens"])
    else:
        assert (masked["tokens"] != MASK).all()
        assert (masked["tokens"] == rows["tokens"]).mean() < 0.02


def test_cls_comes_first_and_belongs_to_the_first_segment():
    rows = {
        "tokens": np.array([[10, 11, 12, 20, 21], [30, 31, EOS, EOS, EOS]], np.int32),
        "weights": np.ones((2, 5), np.float32),
        "positions": np.array([[0, 1, 2, 0, 1], [0, 1, 0, 0, 0]], np.int32),
        "segments": np.array([[1, 1, 1, 2, 2], [1, 1, 0, 0, 0]], np.int32),
    }
    masked = model(mlm_cls_token_id=CLS, mlm_mask_prob=1.0).apply(rows, np.arange(2), seed=0)
    np.testing.assert_array_equal(
        masked["targets"], [[CLS, 10, 11, 12, 20], [CLS, 30, 31, EOS, EOS]]
    )
    np.testing.assert_array_equal(masked["weights"], [[0, 1, 1, 1, 1], [0, 1, 1, 0, 0]])
    np.testing.assert_array_equal(masked["positions"], [[0, 1, 2, 3, 0], [0, 1, 2, 0, 0]])
    np.testing.assert_array_equal(masked["segments"], [[1, 1, 1, 1, 2], [1, 1, 1, 0, 0]])
    assert (masked["tokens"][:, 0] == CLS).all()


def test_windows_shorter_by_one_lose_no_token_to_cls():
    rows = random_rows(3, 7)
    with_cls = model(mlm_cls_token_id=CLS)
    assert (model().num_added_tokens, with_cls.num_added_tokens) == (0, 1)
    masked = with_cls.apply(rows, np.arange(3), seed=0, length=8)
    np.testing.assert_array_equal(masked["targets"][:, 1:], rows["tokens"])
    np.testing.assert_array_equal(masked["positions"], np.tile(np.arange(8), (3, 1)))


def test_a_row_without_text_gets_no_cls():
    rows = {"tokens": np.full((1, 4), PAD, np.int32), "weights": np.zeros((1, 4), np.float32)}
    masked = model(mlm_cls_token_id=CLS, mlm_mask_prob=1.0).apply(rows, np.arange(1), seed=0)
    np.testing.assert_array_equal(masked["tokens"], rows["tokens"])
    assert not masked["weights"].any()


def test_a_row_in_which_nothing_is_chosen_has_no_weight():
    rows = random_rows(50, 3)
    masked = model(mlm_mask_prob=0.01).apply(rows, np.arange(50), seed=0)
    without = ~masked["weights"].any(axis=1)
    assert without.sum() > 40
    np.testing.assert_array_equal(masked["tokens"][without], rows["tokens"][without])


def test_the_tokenizers_mask_is_taken_where_none_is_set():
    rows = random_rows(1, 50)
    keys = {"mlm_mask_prob": 1.0, "mlm_same_token_prob": 0, "mlm_random_token_prob": 0}
    for mask_id, expected in ((-1, 77), (MASK, MASK)):
        masking = Masking(mlm_training=True, mlm_mask_id=mask_id, **keys)
        masked = MaskedLanguageModel(masking, VOCAB_SIZE, tokenizer_mask_id=77).apply(
            rows, np.arange(1), seed=0
        )
        hidden = masked["tokens"][rows["tokens"] != 77]
        assert (hidden == expected).all()


def test_a_special_id_outside_the_table_is_no_mistake():
    # GPT-Neo pads with 50257 beside a table of 50257 rows.
    rows = random_rows(1, 50)
    masked = model(special_ids=(VOCAB_SIZE,), mlm_mask_prob=1.0).apply(rows, np.arange(1), seed=0)
    assert masked["weights"].all()


@pytest.mark.parametrize(
    ("keys", "vocab_size", "message"),
    [
        ({"mlm_mask_id": -1}, VOCAB_SIZE, "mlm_mask_id=-1 takes the mask of the tokenizer"),
        ({"mlm_mask_id": 1000}, VOCAB_SIZE, "mlm_mask_id names id 1000, and ids are 0 to 999"),
        ({"mlm_cls_token_id": 1000}, VOCAB_SIZE, "mlm_cls_token_id names id 1000"),
        ({"mlm_mask_ignore_ids": (5, -2)}, VOCAB_SIZE, "mlm_mask_ignore_ids names id -2"),
        (
            {"mlm_same_token_prob": 0.6, "mlm_random_token_prob": 0.5},
            VOCAB_SIZE,
            "sum to 1.1",
        ),
        ({}, 4, "mlm_random_token_prob=0.1 needs ids to draw from, and all 4 ids"),
    ],
)
def test_keys_that_make_no_sense(keys, vocab_size, message):
    with pytest.raises(UserError, match=message):
        model(vocab_size, **keys)


def test_ids_are_checked_against_the_vocabulary():
    rows = random_rows(1, 4)
    rows["tokens"][0, 2] = VOCAB_SIZE
    with pytest.raises(IndexError):
        model().apply(rows, np.arange(1), seed=0)
