"""Weights with the multipliers of a parametrization folded in compute the same function."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

from MaxText.conversion.folding import fold_multipliers
from MaxText.conversion.weight_source import WeightSource
from MaxText.layers.assembly.model import Model
from tests.small_models import random_batch, random_params, some_quick, tiny_config

BASE = {"base_emb_dim": 16, "base_num_query_heads": 4, "head_dim": 4, "base_num_decoder_layers": 1}
COMPLETEP = {"parametrization": "completep", "weight_init": "normal", "base_num_decoder_layers": 2}
CASES = [
    ("gpt2", {"logits_via_embedding": True, "normalize_embedding_logits": False}),
    ("llama2", {"use_qk_norm": True, "scale_embedding": True, "logits_via_embedding": True}),
    ("tokenformer", {"slot_num": 32}),
    (
        "gpt_neox",
        {"norm_placement": "sandwich", "block_arrangement": "sequential", "rotary_pct": 1.0},
    ),
    ("llama2", {"num_experts": 2, "shared_experts": 1, "base_mlp_dim": 32, "moe_mlp_dim": 32}),
]


class Weights(WeightSource):
    """Random weights of a model."""

    def __init__(self, config):
        super().__init__(config)
        # Not all of one size: a factor in the wrong place has to show.
        params = random_params(self.model, scale=0.3)
        self.arrays = traverse_util.flatten_dict(params, sep="/")
        self.formats = {name: np.dtype("float32") for name in self.arrays}

    def read(self, name):
        return np.asarray(self.arrays[name])


def logits_of(weights, batch):
    model = Model(weights.config.model)
    flat = {name: jnp.asarray(weights.read(name)) for name in model.parameters}
    params = traverse_util.unflatten_dict(flat, sep="/")
    return jax.jit(lambda params: model.merge(params)(batch))(params)


@pytest.mark.parametrize(("family", "keys"), some_quick(CASES, 3))
def test_function_is_kept(family, keys):
    base = dict(BASE) if "num_experts" not in keys else BASE | {"base_emb_dim": 32}
    config = tiny_config(family, base_shape=base, **COMPLETEP, **keys)
    weights = Weights(config)
    folded, note = fold_multipliers(weights)
    model = folded.config.model
    assert model.is_standard
    assert "completep" in note
    unfolded = config.model.with_values({"parametrization": "standard", "base_shape": ()})
    assert model.values_by_key() == unfolded.values_by_key()  # all is in the weights
    batch = random_batch(config, 1)
    expected = logits_of(weights, batch)
    np.testing.assert_allclose(logits_of(folded, batch), expected, rtol=2e-4, atol=2e-5)


def test_what_no_weight_can_take_stays_a_key():
    config = tiny_config(
        base_shape=BASE, norm_placement="post", block_norm_parametric=False, **COMPLETEP
    )
    folded, _ = fold_multipliers(Weights(config))
    assert folded.config.model.block.residual_multiplier == 0.5
    standard = tiny_config()
    weights = Weights(standard)
    assert fold_multipliers(weights) == (weights, "")
