"""Probes: records by their definitions, and batches whose targets are their labels."""

import itertools
from typing import Any

import numpy as np
import pytest
import scipy.stats

from MaxText.config.loading import load_config
from MaxText.config.problems import ConfigurationError
from MaxText.conformance.checks import SOURCE_CHECKS, find_problem
from MaxText.conformance.source_checks import SourceSubject
from MaxText.input_pipeline import probes
from MaxText.input_pipeline.loader import make_eval_iterator, make_train_iterator
from MaxText.input_pipeline.sequences.batch_schedule import BatchSchedule


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize("seed", range(5))
def test_mqar(seed):
    record = probes.mqar(generator(seed), num_pairs=6, vocab_size=40, length=30)
    tokens = record.tokens.tolist()
    value_of = dict(zip(tokens[0:12:2], tokens[1:12:2], strict=True))
    assert len(value_of) == 6
    assert set(value_of) <= set(range(1, 20))
    assert len(set(value_of.values())) == 6
    assert set(value_of.values()) <= set(range(20, 40))
    [queries] = np.nonzero(record.labels >= 0)
    assert len(queries) == 6
    assert (queries >= 12).all()
    assert (queries % 2 == 0).all()
    assert sorted(tokens[query] for query in queries) == sorted(value_of)
    assert [record.labels[query] for query in queries] == [value_of[tokens[q]] for q in queries]


def test_queries_of_mqar_follow_the_power_law():
    gaps = np.concatenate(
        [
            (np.flatnonzero(probes.mqar(generator(seed), 1, 40, 34).labels >= 0) - 2) // 2
            for seed in range(4000)
        ]
    )
    expected = np.arange(1, 17) ** -0.99
    expected /= expected.sum()
    counted = np.bincount(gaps, minlength=16) / len(gaps)
    assert np.abs(counted - expected).max() < 0.03


@pytest.mark.parametrize("seed", range(5))
def test_copy(seed):
    record = probes.copy(generator(seed), max_letters=7)
    tokens = record.tokens.tolist()
    separator = tokens.index(27)
    letters = tokens[:separator]
    assert 1 <= len(letters) <= 7
    assert all(1 <= letter <= 26 for letter in letters)
    assert tokens[separator + 1 :] == letters
    assert record.labels.tolist() == [-1] * separator + [*letters, 27]


@pytest.mark.parametrize("seed", range(5))
def test_induction(seed):
    record = probes.induction(generator(seed), num_tokens=9, vocab_size=6)
    tokens = record.tokens.tolist()
    first, second = (index for index, token in enumerate(tokens) if token == 1)
    assert second == 9
    assert record.labels.tolist() == [-1] * 9 + [tokens[first + 1]]
    assert set(tokens) <= set(range(1, 6))


def test_parity_is_the_sum_modulo_2():
    record = probes.group_products(generator(), 50, "parity")
    assert (record.labels == 1 + np.cumsum(record.tokens - 1) % 2).all()


@pytest.mark.parametrize(("group", "order"), [("s3", 6), ("a5", 60), ("s5", 120)])
def test_group_products(group, order):
    table = probes.group_table(group)
    elements = np.arange(order)
    assert table.shape == (order, order)
    assert (table[0] == elements).all()
    assert (table[:, 0] == elements).all()
    # A group: rows and columns are permutations, and products are associative.
    assert (np.sort(table, axis=0) == elements[:, None]).all()
    assert (np.sort(table, axis=1) == elements).all()
    a, b, c = generator().integers(order, size=(3, 200))
    assert (table[table[a, b], c] == table[a, table[b, c]]).all()
    assert (table != table.T).any()  # the order of the elements matters
    record = probes.group_products(generator(), 20, group)
    product = 0
    for element, label in zip(record.tokens - 1, record.labels - 1, strict=True):
        product = table[product, element]
        assert label == product


@pytest.mark.parametrize(("group", "num_things"), [("s3", 3), ("a5", 5), ("s5", 5)])
def test_labels_are_products_of_permutation_matrices(group, num_things):
    identity = np.eye(num_things, dtype=int)
    matrices = [identity[list(images)] for images in itertools.permutations(range(num_things))]
    if group == "a5":
        matrices = [matrix for matrix in matrices if round(np.linalg.det(matrix)) == 1]
    record = probes.group_products(generator(3), 40, group)
    assert record.labels is not None
    product = identity
    for token, label in zip(record.tokens, record.labels, strict=True):
        product = product @ matrices[token - 1]
        assert (product == matrices[label - 1]).all()


def test_lengths_positions_and_elements_are_uniform():
    """By Pearson's test, which a correct generator fails for one seed of 10,000."""
    copies = [probes.copy(generator(seed), 20) for seed in range(2000)]
    records = [probes.induction(generator(seed), 20, 6) for seed in range(2000)]
    elements = probes.group_products(generator(), 20_000, "a5")
    assert elements.labels is not None
    counts = {
        "letters of copy": np.bincount([(len(r.tokens) - 1) // 2 - 1 for r in copies]),
        "positions of the marker": np.bincount([r.tokens.tolist().index(1) for r in records]),
        "elements": np.bincount(elements.tokens - 1),
        "products": np.bincount(elements.labels - 1),
    }
    sizes = {name: len(count) for name, count in counts.items()}
    assert sizes == {
        "letters of copy": 20,
        "positions of the marker": 19,  # a successor precedes the second marker
        "elements": 60,
        "products": 60,
    }
    p_values = {name: scipy.stats.chisquare(count).pvalue for name, count in counts.items()}
    assert min(p_values.values()) > 1e-4, p_values


def probe_config(**keys: Any):
    return load_config(
        dataset_type="probe", vocab_size=64, max_target_length=32, eval_steps=2, steps=4, **keys
    )


def test_targets_of_a_batch_are_labels():
    config = probe_config(probe="copy", probe_size=10, probe_test_size=15)
    batches = make_train_iterator(config, BatchSchedule.constant(4, 32), log=lambda line: None)
    [batch] = itertools.islice(batches, 1)
    batches.close()
    for tokens, targets, mask in zip(
        batch.tokens_BT, batch.targets_BT, batch.loss_mask_BT, strict=True
    ):
        separator = tokens.tolist().index(27)
        letters = tokens[:separator].tolist()
        assert np.flatnonzero(mask).tolist() == list(range(separator, 2 * separator + 1))
        assert targets[mask > 0].tolist() == [*letters, 27]


def test_evaluation_has_a_size_of_its_own():
    config = probe_config(probe="parity", probe_size=5, probe_test_size=20)
    evaluation = make_eval_iterator(config, 4, log=lambda line: None)
    [batch] = itertools.islice(iter(evaluation), 1)
    assert (batch.loss_mask_BT.sum(1) == 20).all()


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"probe": "mqar", "probe_size": 9}, "takes 36 tokens, and max_target_length=32"),
        ({"probe": "s5"}, "needs 121 ids, and vocab_size=64"),
        ({"probe": "copy", "probe_size": 4, "probe_test_size": 16}, "takes 33 tokens"),
    ],
)
def test_what_does_not_fit_is_refused(keys, reason):
    with pytest.raises(ConfigurationError, match=reason):
        probe_config(**keys)


def test_probes_pass_the_checks_of_data_sources():
    subject = SourceSubject(probe_config(probe="mqar", probe_size=4))
    problems = {check.name: find_problem(check, subject) for check in SOURCE_CHECKS}
    assert not any(problems.values()), problems
