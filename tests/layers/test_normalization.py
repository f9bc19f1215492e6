"""Norms that are stored as their difference from 1."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.layers.model import Model
from MaxText.training.optimizer import make_optimizer, per_parameter
from tests.layers.test_parts import logits_of
from tests.small_models import random_batch, tiny_config

KINDS = [
    {"normalization_type": "rms_norm", "use_qk_norm": True},
    {"normalization_type": "layer_norm"},
]


def small(**keys):
    return tiny_config(base_num_decoder_layers=1, **keys)


def run(config, params, batch):
    model = Model(config.model)
    decoder = model.merge(params)
    return decoder.logits(decoder.hidden(batch)[0])


def scales(params):
    """Names and arrays of the factors of norms."""
    flat = jax.tree_util.tree_flatten_with_path(params)[0]
    return {jax.tree_util.keystr(path): x for path, x in flat if path[-1].key == "scale"}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind["normalization_type"])
def test_zero_centered_norms_start_as_the_others_do(kind):
    plain, centred = small(**kind), small(**kind, normalization_zero_centered=True)
    batch = random_batch(plain, rows=2)
    np.testing.assert_array_equal(logits_of(centred, batch), logits_of(plain, batch))
    params = jax.jit(Model(centred.model).initialize)(jax.random.key(0))
    assert len(scales(params)) == (5 if "use_qk_norm" in kind else 3)
    for name, scale in scales(params).items():
        assert not scale.any(), name


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind["normalization_type"])
def test_zero_centered_norms_multiply_by_one_more(kind):
    plain, centred = small(**kind), small(**kind, normalization_zero_centered=True)
    batch = random_batch(plain, rows=2)
    params = jax.jit(Model(plain.model).initialize)(jax.random.key(0))
    generator = np.random.default_rng(0)

    def change(path, x):
        noise = generator.normal(0, 0.3, x.shape).astype(np.float32)
        return x + noise if path[-1].key == "scale" else x

    params = jax.tree_util.tree_map_with_path(change, params)
    less = jax.tree_util.tree_map_with_path(
        lambda path, x: x - 1 if path[-1].key == "scale" else x, params
    )
    wanted = run(plain, params, batch)
    np.testing.assert_allclose(run(centred, less, batch), wanted, atol=1e-5)
    assert np.abs(run(centred, params, batch) - wanted).max() > 0.1


def test_a_small_difference_from_one_survives_bfloat16():
    config = small(normalization_zero_centered=True, dtype="bfloat16", weight_dtype="bfloat16")
    model = Model(config.model)
    params = jax.jit(model.initialize)(jax.random.key(0))
    # 1 + 2^-9 is 1 in bfloat16; 2^-9 is not 0.
    params["decoder_norm"]["scale"] += jnp.bfloat16(2**-9)
    norm = model.merge(params).decoder_norm
    x = jnp.tile(jnp.asarray([1.0, -1.0]), 16)
    np.testing.assert_allclose(norm(x), x * (1 + 2**-9), rtol=2e-5)


def test_weight_decay_pulls_a_zero_centered_norm_to_one():
    def decayed(centred):
        config = small(normalization_zero_centered=centred, adam_weight_decay=1.0)
        infos = Model(config.model).parameters
        norms = {name: info for name, info in infos.items() if name.endswith("/scale")}
        params = per_parameter(norms, lambda name: jnp.full(norms[name].shape, 1.5 - centred))
        optimizer = make_optimizer(config.optimizer, lambda step: 0.5, norms)

        @jax.jit
        def after_a_step(params):
            nothing = jax.tree.map(jnp.zeros_like, params)
            update, _ = optimizer.update(nothing, optimizer.init(params), params)
            return jax.tree.map(jnp.add, params, update)

        return scales(after_a_step(params))

    for name, factor in decayed(False).items():
        np.testing.assert_allclose(factor, 0.75, err_msg=name)
    for name, difference in decayed(True).items():
        np.testing.assert_allclose(1 + difference, 1.25, err_msg=name)
