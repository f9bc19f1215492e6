"""Decode state that grows. That cached decoding equals the full forward pass is tested for every
architecture in tests/layers/test_conformance.py."""

import jax
import numpy as np
import pytest

from MaxText.inference.engine import Engine
from MaxText.inference.sampling import SamplingParams
from MaxText.layers.assembly.model import Model
from MaxText.parallelism.mesh import make_sharding_plan
from tests.small_models import noisy_params, tiny_config

ALL_KINDS = {
    "attention_types": [[["none", "global", "local", "linear"], 1]],
    "base_num_decoder_layers": 4,
    "scan_layers": False,
    "sliding_window_size": 6,
    "num_mem_kv": 2,
    "static_sgu": True,
    "static_sgu_kernel": 5,
    "head_qk": True,
    "head_qk_dim": 8,
}


@pytest.mark.parametrize(
    ("keys", "grows"),
    [
        ({"base_num_decoder_layers": 1}, True),
        pytest.param(ALL_KINDS, True, marks=pytest.mark.slow),
        pytest.param({"attention_types": [[["linear"], 3]]}, False, marks=pytest.mark.slow),
    ],
    ids=["global", "all kinds", "linear"],
)
def test_decode_state_that_grows_generates_the_same_tokens(monkeypatch, keys, grows):
    monkeypatch.setattr("MaxText.inference.engine.SMALLEST_CAPACITY", 8)
    monkeypatch.setattr("MaxText.inference.engine.SMALLEST_PROMPT", 4)
    config = tiny_config("llama2", max_target_length=64, **keys)
    model = Model(config.model)
    params = noisy_params(model, 0.05)
    sharding = make_sharding_plan(config.mesh, jax.devices()[:1])
    engine = Engine(model, params, sharding, SamplingParams(temperature=0))

    def capacities_of(sequences):
        capacities = {getattr(state, "capacity", None) for state in sequences.cache}
        return capacities - {None}

    def run(expected_length):
        sequences, drawn = engine.prefill(
            [[1, 2, 3], [4]], [(0, 0), (1, 0)], [0, 0], seed=0, expected_length=expected_length
        )
        tokens = [np.asarray(drawn.tokens_B)]
        capacities = capacities_of(sequences)
        for length in range(4, 40):
            sequences = engine.ensure_cache_capacity(sequences, length)
            sequences, drawn = engine.step(sequences)
            capacities |= capacities_of(sequences)
            tokens.append(np.asarray(drawn.tokens_B))
        return np.array(tokens), capacities

    grown, capacities = run(expected_length=4)
    allocated_at_once, final_capacity = run(expected_length=64)
    assert (capacities, final_capacity) == (
        {8, 32, 64} if grows else set(),
        {64} if grows else set(),
    )
    np.testing.assert_array_equal(grown, allocated_at_once)
    assert len(np.unique(grown)) > 3
