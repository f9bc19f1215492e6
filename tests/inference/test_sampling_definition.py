"""Distributions of several settings at once, id by id, in float64."""

import jax
import numpy as np
import pytest

from MaxText.inference.sampling import SamplingParams, probabilities

V, ROWS = 60, 6


def kept_prefix(p, order, mass):
    """The first ids of an order whose probabilities reach `mass`."""
    count = int(np.searchsorted(np.cumsum(p[order]), mass)) + 1
    return np.isin(np.arange(V), order[:count])


def entropy(p):
    return -sum(x * np.log(x) for x in p if x > 0)


def surprise(p):
    return np.array([abs(-np.log(x) - entropy(p)) if x > 0 else np.inf for x in p])


FILTERS = {
    "top_k": lambda p, k: p >= np.sort(p)[-k],
    "nucleus_p": lambda p, mass: kept_prefix(p, np.argsort(-p), mass),
    "min_p": lambda p, share: p >= share * p.max(),
    "typical_p": lambda p, mass: kept_prefix(p, np.argsort(surprise(p)), mass),
    "eta": lambda p, eta: (p >= min(eta, eta**0.5 * np.exp(-entropy(p)))) | (p == p.max()),
}


def by_definition(logits, seen, temperature=1.0, repetition_penalty=1.0, **settings):
    """Penalty, temperature, softmax, then the filters in this order, each normalized."""
    pushed = [
        (x / repetition_penalty if x > 0 else x * repetition_penalty) if is_generated else x
        for x, is_generated in zip(logits, seen, strict=True)
    ]
    p = np.exp((np.array(pushed) - max(pushed)) / temperature)
    p /= p.sum()
    for name, keep_mask in FILTERS.items():
        if name in settings:
            p = np.where(keep_mask(p, settings[name]), p, 0)
            p /= p.sum()
    return p


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1.7, "top_k": 9},
        {"temperature": 2.0, "top_k": 55, "repetition_penalty": 1.5},  # negative logits as well
        {"temperature": 0.6, "nucleus_p": 0.83},
        {"temperature": 1.9, "nucleus_p": 0.83},
        {"temperature": 1.4, "min_p": 0.07, "repetition_penalty": 1.6},
        {"temperature": 1.3, "typical_p": 0.62},
        {"temperature": 0.8, "eta": 0.05, "repetition_penalty": 0.7},
        {"top_k": 30, "nucleus_p": 0.9, "min_p": 0.05, "typical_p": 0.8, "eta": 0.1}
        | {"temperature": 1.5, "repetition_penalty": 1.2},
        {"nucleus_p": 0.7, "typical_p": 0.5, "temperature": 2.5},
    ],
    ids=str,
)
def test_distributions(settings):
    generator = np.random.default_rng(3)
    logits_BV = generator.normal(0, 2.0, (ROWS, V)).astype(np.float32)
    seen_BV = generator.random((ROWS, V)) < 0.3
    found_BV = np.asarray(
        jax.jit(lambda *x: probabilities(x[0], SamplingParams(**settings), x[1]))(
            logits_BV, seen_BV
        )
    )
    for p_V, logits, seen in zip(found_BV, np.float64(logits_BV), seen_BV, strict=True):
        expected = by_definition(logits, seen, **settings)
        assert np.flatnonzero(p_V).tolist() == np.flatnonzero(expected).tolist()
        np.testing.assert_allclose(p_V, expected, rtol=1e-4)
    assert 1 < (found_BV > 0).sum(1).mean() < V  # some are left out, and some stay
