"""What attention hands to the implementation that the configuration names."""

import jax
import numpy as np
import pytest

from MaxText.layers.assembly.model import Model
from MaxText.layers.attention import attention
from MaxText.layers.attention.attention_core import dot_product_attention
from tests.small_models import random_batch, random_params, tiny_config


@pytest.mark.parametrize(
    "keys",
    [
        {"attn_logits_soft_cap": 2.0, "base_num_kv_heads": 1},
        {"attention_types": [[["local"], 1]], "sliding_window_size": 9, "attention_scale": 0.7},
        {"mixer": "latent_attention", "kv_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 24},
    ],
    ids=str,
)
def test_the_fused_kernel_gets_documents_windows_and_scores(keys, monkeypatch):
    """In place of the kernel, whose own tests are elsewhere, stands plain attention."""
    calls = []

    def kernel(q_BTNH, k_BSKH, v_BSKH, spec, sharding, *, segments_BT=None):
        calls.append(spec)
        return dot_product_attention(q_BTNH, k_BSKH, v_BSKH, spec, segments_BT=segments_BT)

    monkeypatch.setattr(attention, "flash_attention", kernel)
    logits = []
    for form in ("flash", "dot_product"):
        config = tiny_config(
            base_num_decoder_layers=1,
            max_target_length=128,
            attention=form,
            scan_layers=False,
            **keys,
        )
        model = Model(config.model)
        batch = random_batch(config, rows=2, documents=True)
        run = jax.jit(lambda params, model=model, batch=batch: model.merge(params)(batch))
        logits.append(run(random_params(model, 0.2)))
        assert len(calls) == 1  # by the first form only
    assert np.abs(logits[0]).max() > 0.5
    np.testing.assert_allclose(*logits, atol=1e-5)
