"""Initial weights of a seed: each part's depend on no other part, so that runs can be paired."""

import jax
import numpy as np
import pytest

from MaxText.conformance.comparison import arrays_by_name
from MaxText.layers.assembly.model import Model
from tests.small_models import tiny_config

BASELINE = {"base_num_decoder_layers": 2, "decoder_block": "llama2", "enable_dropout": False}


def initial_weights(**keys):
    config = tiny_config(**BASELINE | keys)
    return arrays_by_name(Model(config.model).initialize(jax.random.key(3)))


@pytest.fixture(scope="module")
def baseline():
    return initial_weights()


@pytest.mark.parametrize(
    ("keys", "redrawn"),
    [
        ({"use_qk_norm": True}, ""),  # gains are constants
        ({"qkv_bias": True}, ""),
        ({"mixer": "linear_attention"}, "self_attention"),
        ({"mlp_activations": ["gelu"]}, "mlp"),
        ({"position_embedding": "learned"}, ""),
        ({"dense_conn": True, "scan_layers": False}, ""),
    ],
)
def test_other_parts_start_with_the_same_weights(keys, redrawn, baseline):
    weights = initial_weights(**keys)
    common = [name for name in baseline if name in weights]
    differing = {name for name in common if not np.array_equal(baseline[name], weights[name])}
    assert len(common) > len(baseline) / 2
    assert all(redrawn and redrawn in name for name in differing), sorted(differing)


def test_weights_differ_from_each_other_and_between_seeds(baseline):
    config = tiny_config(**BASELINE)
    others = arrays_by_name(Model(config.model).initialize(jax.random.key(4)))
    drawn = {name: array for name, array in baseline.items() if np.std(array) > 0}
    assert len(drawn) > len(baseline) / 2
    values = set()
    for name, array in drawn.items():
        assert not np.array_equal(array, others[name])
        values |= {float(array.flat[0]), float(others[name].flat[0])}
    assert len(values) == 2 * len(drawn)
