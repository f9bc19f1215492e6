"""Decoding step by step against the forward pass, for options that meet in few architectures."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.layers.assembly.model import Model
from MaxText.layers.batch import Batch
from tests.small_models import random_params, tiny_config

LENGTH, PROMPT, LENGTHS = 12, 7, [7, 2, 5]


def kinds(*names):
    return {"attention_types": [[list(names), 1]], "base_num_decoder_layers": len(names)}


@pytest.mark.parametrize(
    ("block", "keys"),
    [
        (
            "gpt_neo",
            kinds("global", "local")
            | {"num_mem_kv": 3, "sliding_window_size": 4}
            | {"position_embedding": "alibi", "base_num_kv_heads": 4},
        ),
        (
            "llama2",
            kinds("local", "global")
            | {"attn_logits_soft_cap": 2.0, "rotary_pct": 0.5}
            | {"use_qk_norm": True, "sliding_window_size": 3, "num_mem_kv": 2},
        ),
    ],
    ids=["memories, ALiBi", "soft cap, part rotary, memories"],
)
def test_each_token_has_the_logits_of_the_whole_sequence(block, keys):
    """Prompts of several lengths; what stands in the padding must not matter."""
    config = tiny_config(block, scan_layers=False, matmul_precision="highest", **keys)
    model = Model(config.model)
    params = random_params(model, 0.2)
    tokens_BT = jnp.asarray(np.random.default_rng(0).integers(1, 64, (3, LENGTH)), jnp.int32)

    @jax.jit
    def whole(params):
        decoder = model.merge(params)
        ones = jnp.ones(tokens_BT.shape, jnp.float32)
        return decoder(Batch(tokens_BT=tokens_BT, targets_BT=tokens_BT, loss_mask_BT=ones))

    @jax.jit
    def prefill(params):
        decoder, lengths_B = model.merge(params), jnp.asarray(LENGTHS)
        is_prompt_BT = jnp.arange(PROMPT) < lengths_B[:, None]
        padded_BT = jnp.where(is_prompt_BT, tokens_BT[:, :PROMPT], 63)
        h_BTD, states = decoder.prefill(padded_BT, lengths_B, capacity=LENGTH)
        return decoder.logits(h_BTD, states[-1]), states

    @jax.jit
    def decode_step(params, states, positions_B1):
        decoder = model.merge(params)
        new_B1 = jnp.take_along_axis(tokens_BT, positions_B1, axis=1)
        h_B1D, states = decoder.decode_step(new_B1, positions_B1, states)
        return decoder.logits(h_B1D, states[-1], positions_B1)[:, 0], states

    expected = np.asarray(whole(params))
    assert np.abs(expected).max() > 0.5
    logits_BTV, states = prefill(params)
    for row, length in enumerate(LENGTHS):
        np.testing.assert_allclose(logits_BTV[row, :length], expected[row, :length], atol=1e-4)
    for step in range(LENGTH - PROMPT):
        positions = np.array(LENGTHS) + step
        logits_BV, states = decode_step(params, states, jnp.asarray(positions)[:, None])
        np.testing.assert_allclose(
            logits_BV, expected[np.arange(3), positions], atol=1e-4, err_msg=f"step {step}"
        )
