"""Digits: float32 gradients against the same model in float64, and products on CPU."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.layers.assembly.model import Model
from MaxText.layers.attention.attention_core import AttentionSpec, dot_product_attention
from MaxText.layers.dense import dot_in_double, einsum
from MaxText.training.objective import loss_sums
from tests.growth.growing import by_name
from tests.layers.double_precision import compiled_in_float64, in_float64
from tests.small_models import noisy_params, random_batch, some_quick, tiny_config

HIGHEST = {"matmul_precision": "highest", "logits_dot_in_fp32": True, "max_target_length": 12}
# name -> (decoder_block, keys)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "TokenFormer, PyTorch": (
        "tokenformer_pytorch",
        {"normalize_type": "gelu_l2_norm", "qkv_slot_num": 20, "proj_slot_num": 12}
        | {"ffn_slot_num": 24, "base_num_kv_heads": 4},
    ),
    "Llama": ("llama2", {"use_qk_norm": True}),
    "MUDDFormer": (
        "muddformer",
        {"base_num_kv_heads": 4, "mlp_dim_multiple": 4, "scan_layers": False},
    ),
    "GPT-2": ("gpt2", {"base_num_kv_heads": 4}),
    "TokenFormer, JAX": ("tokenformer", {"slot_num": 12, "base_num_kv_heads": 4}),
    "fattorib": ("fattorib", {"base_num_kv_heads": 4}),
    "Gemma": ("gemma", {"attn_logits_soft_cap": 5.0}),
    "linear attention": (
        "llama2",
        {"attention_types": [[["linear", "global"], 1]], "base_num_decoder_layers": 2},
    ),
    "experts": ("llama2", {"num_experts": 2, "base_mlp_dim": 32}),
}
POLICIES = ("none", "minimal", "full")
# Rounding each parameter once moves float64 gradients; all operations of the model round, too.
# Measured over the families and policies here: 1 to 5 times as far.
ROUNDINGS = 10


def largest_error(found: Any, wanted: Any) -> float:
    """Returns the largest difference, in units of each array's largest element."""
    errors = [
        np.abs(np.float64(found[name]) - reference).max() / np.abs(reference).max()
        for name, reference in wanted.items()
        if np.abs(reference).max() > 1e-6  # below it a gradient is only rounding
    ]
    return max(errors)


@pytest.mark.parametrize("name", some_quick(FAMILIES, 5))
def test_gradients_are_as_exact_under_every_remat_policy(name):
    decoder_block, keys = FAMILIES[name]

    def gradients_of(policy):
        config = tiny_config(decoder_block, **HIGHEST | {"remat_policy": policy} | keys)
        model = Model(config.model)

        def gradients(params, batch):
            def loss(params):
                sums = loss_sums(model.merge(params), batch, config.model.objective)
                return sums.total / batch.loss_mask_BT.sum()

            return jax.grad(loss)(params)

        return config, model, gradients

    config, model, plain = gradients_of("none")
    params, batch = noisy_params(model, 0.1), random_batch(config, 2)
    exact = compiled_in_float64(plain, params, batch)
    wanted = by_name(exact(params, batch))
    draw = np.random.default_rng(0)
    rounded = jax.tree.map(
        lambda x: np.float64(x) * (1 + 2.0**-25 * draw.choice([-1, 1], x.shape)), params
    )
    bound = ROUNDINGS * largest_error(by_name(exact(rounded, batch)), wanted)
    assert 1e-7 < bound < 1e-3
    errors = {
        policy: largest_error(by_name(jax.jit(gradients_of(policy)[2])(params, batch)), wanted)
        for policy in POLICIES
    }
    assert max(errors.values()) < bound, (errors, bound)


CONTRACTIONS = {
    "matrix": ("ab,bc->ac", (3, 300), (300, 4)),
    "several dimensions": ("abc,bcde->ade", (3, 20, 15), (20, 15, 2, 3)),
    "crossed": ("abc,cbd->ad", (3, 20, 15), (15, 20, 2)),
    "batched": ("ibc,ibd->icd", (2, 300, 3), (2, 300, 4)),
    "no sum": ("ab,cd->abcd", (2, 3), (3, 2)),
}


@pytest.mark.parametrize("name", CONTRACTIONS)
def test_products_and_their_gradients_are_rounded_once(name):
    subscripts, *shapes = CONTRACTIONS[name]
    draw = np.random.default_rng(0).normal
    a, b = (np.float32(draw(size=shape)) for shape in shapes)
    cotangent = np.float32(draw(size=np.einsum(subscripts, a, b).shape))

    def products(dot, a, b, cotangent):
        product = functools.partial(jnp.einsum, subscripts, _dot_general=dot)

        def gradients(a, b):
            return jax.vjp(product, a, b)[1](cotangent)

        def of_gradients(a, b):
            return sum(jnp.sum(jnp.sin(x)) for x in gradients(a, b))

        return product(a, b), gradients(a, b), jax.grad(of_gradients, argnums=(0, 1))(a, b)

    plain = functools.partial(products, jax.lax.dot_general)
    exact = functools.partial(products, dot_in_double)
    wanted = in_float64(plain, a, b, cotangent)
    first, gradients, second = jax.jit(exact)(a, b, cotangent)
    half_ulp = 2.0**-24
    for found, reference in zip((first, *gradients), (wanted[0], *wanted[1]), strict=True):
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, reference, rtol=1.01 * half_ulp, atol=1e-9)
    for found, reference in zip(second, wanted[2], strict=True):  # of rounded gradients
        np.testing.assert_allclose(found, reference, rtol=1e-5, atol=1e-5)
    by_map = jax.vmap(exact, in_axes=(0, None, None))(a[None], b, cotangent)
    np.testing.assert_array_equal(by_map[0][0], first)


def test_only_the_highest_precision_on_cpu_adds_up_in_double():
    a = np.random.default_rng(0).normal(size=(4, 500)).astype(np.float32)
    exact = np.einsum("ab,cb->ac", *(np.float64(a),) * 2)

    def product(precision, a):
        return einsum("ab,cb->ac", a, a, precision)

    np.testing.assert_array_equal(
        jax.jit(product, static_argnums=0)("highest", a), np.float32(exact)
    )
    plain = str(jax.make_jaxpr(functools.partial(jnp.einsum, "ab,cb->ac"))(a, a))
    default = str(jax.make_jaxpr(functools.partial(product, "default"))(a))
    assert "f64" not in default
    assert default.count("dot_general") == plain.count("dot_general") == 1
    narrow = jax.make_jaxpr(functools.partial(product, "highest"))(a.astype(jnp.bfloat16))
    assert "f64" not in str(narrow)


@pytest.mark.parametrize("precision", ["default", "highest"])
def test_attention_that_sees_almost_one_key(precision):
    """The fast form may lose some digits of small gradients, the plain one may not."""
    draw = np.random.default_rng(0).normal
    q, k, v, cotangent = (np.float32(draw(size=(2, 16, 2, 8))) for _ in range(4))
    q = 20 * q
    spec = AttentionSpec(precision=precision)

    def gradients(q, k, v, cotangent):
        attention = functools.partial(dot_product_attention, spec=spec)
        return jax.vjp(attention, q, k, v)[1](cotangent)

    wanted = in_float64(gradients, q, k, v, cotangent)
    found = jax.jit(gradients)(q, k, v, cotangent)
    bound = 2e-5 if precision == "default" else 5e-6
    for gradient, reference in zip(found, wanted, strict=True):
        assert np.abs(gradient - reference).max() < bound * np.abs(reference).max()
