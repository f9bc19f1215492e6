"""The head: a bias of its own, and a norm chosen apart from those of the blocks."""

import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.configuration.loading import configure
from MaxText.conversion.weights import nested
from MaxText.input_pipeline.batch import Batch
from MaxText.layers.model import Model

SIZES = {
    "base_emb_dim": 8, "base_num_query_heads": 2, "base_num_kv_heads": 2, "head_dim": 4,
    "base_mlp_dim": 16, "base_num_decoder_layers": 2, "vocab_size": 32, "max_target_length": 8,
    "dataset_type": "synthetic", "dtype": "float32", "attention": "dot_product",
    "scan_layers": False, "remat_policy": "none",
}  # fmt: skip


def built(**keys):
    return Model(configure(**SIZES, **keys).model)


def drawn(model):
    """Every parameter at random, also those that begin at 0 or 1."""
    rng = np.random.default_rng(0)
    return {
        name: jnp.asarray(rng.normal(size=parameter.shape), jnp.float32)
        for name, parameter in model.parameters.items()
    }


def logits(model, parameters):
    tokens = jnp.arange(8)[None] % 32
    return model.merge(nested(parameters))(Batch(tokens, tokens, jnp.ones((1, 8))))


def test_the_bias_is_added_to_each_logit():
    with_bias = built(logits_bias=True)
    without = built()
    assert with_bias.parameters.keys() - without.parameters.keys() == {"logits_dense/bias"}
    parameters = drawn(with_bias)
    bias = parameters.pop("logits_dense/bias")
    plain = logits(without, parameters)
    biased = logits(with_bias, parameters | {"logits_dense/bias": bias})
    np.testing.assert_allclose(biased, plain + bias, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("final", "names"),
    [
        ("auto", {"decoder_norm/scale": (1,)}),
        ("layer_norm", {"decoder_norm/scale": (8,), "decoder_norm/bias": (8,)}),
        ("rms_norm", {"decoder_norm/scale": (8,)}),
    ],
)
def test_the_final_norm_may_be_another_than_those_of_the_blocks(final, names):
    model = built(normalization_type="scale_norm_centered", final_normalization_type=final)
    shapes = {name: parameter.shape for name, parameter in model.parameters.items()}
    assert {name: shapes[name] for name in shapes if name.startswith("decoder_norm")} == names
    of_blocks = {shapes[name] for name in shapes if "pre_mlp_layer_norm" in name}
    assert {shape[-1] for shape in of_blocks} == {1}


def test_gpt_neos_layer_norm_behind_scale_norms():
    """The blocks are as before; the last norm has a mean, a scale and a bias (models.py, norm)."""
    parts = {"normalization_type": "scale_norm_centered", "logits_via_embedding": False}
    model = built(final_normalization_type="layer_norm", **parts)
    body = built(final_norm=False, **parts)
    parameters = drawn(model)
    scale, bias = (parameters[f"decoder_norm/{name}"] for name in ("scale", "bias"))
    kernel = parameters["logits_dense/kernel"]
    of_body = {name: value for name, value in parameters.items() if name in body.parameters}
    hidden_BTD = logits(body, of_body | {"logits_dense/kernel": kernel}) @ jnp.linalg.pinv(kernel)
    centered = hidden_BTD - hidden_BTD.mean(-1, keepdims=True)
    variance = jnp.square(centered).mean(-1, keepdims=True)
    epsilon = model.section.block.normalization_layer_epsilon
    expected = (centered / jnp.sqrt(variance + epsilon) * scale + bias) @ kernel
    np.testing.assert_allclose(logits(model, parameters), expected, rtol=2e-3, atol=2e-3)
