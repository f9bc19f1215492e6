"""Token tables whose rows are scaled when they are looked up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.layers.model import Model
from tests.small_models import random_batch, tiny_config


def small(**keys):
    return tiny_config(base_num_decoder_layers=1, **keys)


def run(config, params, batch):
    model = Model(config.model)
    decoder = model.merge(params)
    return decoder.logits(decoder.hidden(batch)[0])


@pytest.mark.parametrize("tied", [False, True])
def test_scaled_embeddings_scale_what_is_read_and_not_the_head(tied):
    keys = {"logits_via_embedding": tied, "position_embedding": "learned"}
    if tied:
        keys["normalize_embedding_logits"] = False
    plain, scaled = small(**keys), small(**keys, scale_embedding=True)
    batch = random_batch(plain, rows=2)
    params = jax.jit(Model(plain.model).initialize)(jax.random.key(0))
    table = params["token_embedder"]["embedding"]
    larger = params | {"token_embedder": {"embedding": table * 32**0.5}}
    found, wanted = run(scaled, params, batch), run(plain, larger, batch)
    if tied:
        wanted = wanted / 32**0.5
    np.testing.assert_allclose(found, wanted, atol=2e-5)


def test_the_scale_is_rounded_to_the_format_of_activations():
    config = small(scale_embedding=True, base_emb_dim=3072, base_mlp_dim=8, dtype="bfloat16")
    model = Model(config.model)
    params = jax.jit(model.initialize)(jax.random.key(0))
    embed = model.merge(params).token_embedder
    ids = jnp.arange(4)[None]
    rows = params["token_embedder"]["embedding"][:4].astype(jnp.bfloat16)
    assert embed(ids).dtype == jnp.bfloat16
    wanted = rows * jnp.bfloat16(55.5)  # sqrt(3072) = 55.43
    np.testing.assert_array_equal(embed(ids)[0], wanted)
