"""Scores of continuations against plain forward passes of one sequence."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from MaxText.errors import UserError
from MaxText.evaluation import scorers
from MaxText.evaluation.scorers import Scorer, padded_length
from MaxText.evaluation.scores import Continuation, rolling_windows
from tests.evaluation.small_trained import full_log_probabilities, tiny_trained
from tests.multi_device.same_results import MIXED

WINDOW = 16


@pytest.fixture(scope="module", params=["llama2", "gpt2"])
def trained(request):
    return tiny_trained(request.param)


def random_continuations(count, seed=0, longest=2 * WINDOW):
    """Contexts of 1 to `longest` ids, continuations of 1 to WINDOW."""
    generator = np.random.default_rng(seed)
    continuations = []
    for _ in range(count):
        size = (generator.integers(1, longest + 1), generator.integers(1, WINDOW + 1))
        continuations.append(Continuation(*(generator.integers(0, 64, n).tolist() for n in size)))
    return continuations


def expected(trained, continuation):
    context, ids = continuation
    log_p = full_log_probabilities(trained, [*context, *ids][-(WINDOW + 1) : -1])[-len(ids) :]
    total = log_p[np.arange(len(ids)), ids].sum()
    return total, bool((log_p.argmax(axis=-1) == ids).all())


def check(actual, expected):
    log_probabilities, greedy = zip(*expected, strict=True)
    scores = [score.log_probability for score in actual]
    np.testing.assert_allclose(scores, log_probabilities, rtol=1e-5, atol=1e-4)
    assert [score.is_greedy for score in actual] == [*greedy]


def test_every_score_is_that_of_a_plain_forward_pass(trained, monkeypatch):
    """Whether all logits are made at once or in chunks."""
    requests = random_continuations(23)
    # Contexts shorter than the window, whose greedy continuations are known.
    for length in (1, 3, 7):
        context = list(range(5, 5 + length))
        ids = []
        for _ in range(4):
            ids.append(int(full_log_probabilities(trained, [*context, *ids])[-1].argmax()))
        requests += [
            Continuation(context, ids),
            Continuation(context, [*ids[:3], (ids[3] + 1) % 64]),
        ]
    scores = Scorer(trained).score_continuations(requests)
    expected_scores = [expected(trained, request) for request in requests]
    check(scores, expected_scores)
    assert [score.is_greedy for score in scores[-6:]] == [True, False] * 3
    monkeypatch.setattr(scorers, "CHUNK_LOGITS", 128)
    check(Scorer(trained).score_continuations(requests), expected_scores)
    assert Scorer(trained).score_continuations([]) == []


@pytest.mark.parametrize("ids", [[], list(range(WINDOW + 1))])
def test_lengths_that_cannot_be_scored(trained, ids):
    with pytest.raises(UserError, match=rf"has {len(ids)} tokens.*max_target_length={WINDOW}"):
        Scorer(trained).score_continuations([Continuation([1], ids)])


def test_a_model_that_sees_both_sides_is_refused():
    trained = tiny_trained(mlm_training=True, mlm_mask_id=3)
    with pytest.raises(UserError, match="causal=false"):
        Scorer(trained)


@given(st.integers(0, 60), st.integers(1, 20))
def test_rolling_windows_score_each_id_once(count, window):
    ids = list(range(100, 100 + count))
    windows = rolling_windows(ids, 7, window)
    assert [i for _, scored in windows for i in scored] == ids
    for number, (context, scored) in enumerate(windows):
        assert 1 <= len(scored) <= window
        if number == 0:
            assert context == [7]
            continue
        # The model reads a full window of what comes before.
        first = ids.index(scored[0])
        assert len(context) + len(scored) - 1 == window
        assert context == ids[first - len(context) : first]


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_padding_is_less_than_half_and_stays_in_the_window(length, window):
    padded = padded_length(min(length, window), window)
    assert min(length, window) <= padded <= window
    assert padded <= max(1.5 * length, 16)


@pytest.mark.multi_device
def test_the_same_scores_on_eight_devices(monkeypatch):
    requests = random_continuations(40, seed=3)
    one_device = Scorer(tiny_trained(base_num_kv_heads=4)).score_continuations(requests)
    monkeypatch.setattr(scorers, "CHUNK_LOGITS", 256)
    keys = MIXED | {"base_num_kv_heads": 4, "per_device_batch_size": 1}
    many = Scorer(tiny_trained(devices=jax.devices(), **keys)).score_continuations(requests)
    check(many, [(score.log_probability, score.is_greedy) for score in one_device])
