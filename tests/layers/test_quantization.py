"""Quantized matmuls: close to the plain ones, and only where the rules put them."""

import collections
import functools
import math
import re

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from MaxText.errors import UserError
from MaxText.layers.assembly.model import Model
from MaxText.layers.dense import dot_general
from MaxText.layers.quantization import QuantizedDot
from MaxText.training.objective import loss_sums
from tests.small_models import random_batch, tiny_config

ERROR = {"int8": (0, 0.02), "fp8": (0, 0.08), "float32": (-1, 1e-6)}  # of the norm, exclusive
SHAPES = {
    "linear": (((2,), (0,)), ((), ()), (4, 16, 64), (64, 32)),
    "heads": (((2, 3), (1, 0)), ((), ()), (4, 16, 4, 16), (16, 4, 32)),
    "two inputs": (((2, 3), (0, 1)), ((), ()), (4, 16, 4, 16), (4, 16, 32)),
    "tied head": (((2,), (1,)), ((), ()), (4, 16, 32), (64, 32)),
    "experts": (((3,), (1,)), ((1,), (0,)), (2, 8, 5, 64), (8, 64, 32)),
    "batch dimensions in the middle": (((0,), (2,)), ((1,), (1,)), (64, 3, 5), (7, 3, 64)),
}


@pytest.mark.parametrize(
    ("kind", "name"),
    [*(("int8", name) for name in SHAPES), ("fp8", "linear"), ("fp8", "experts")]
    + [("float32", name) for name in ("linear", "two inputs", "tied head")],
)
def test_product_and_gradients_are_close(kind, name):
    contracted, batch, a_shape, b_shape = SHAPES[name]
    keys = jax.random.split(jax.random.key(0), 3)
    a, b = jax.random.normal(keys[0], a_shape), jax.random.normal(keys[1], b_shape)

    @functools.partial(jax.jit, static_argnums=0)
    def results(dot):
        product, vjp = jax.vjp(lambda a, b: dot(a, b, (contracted, batch)), a, b)
        return product, *vjp(jax.random.normal(keys[2], product.shape))

    dot = dot_general if kind == "float32" else QuantizedDot(kind)
    for actual, plain in zip(results(dot), results(jax.lax.dot_general), strict=True):
        assert (actual.shape, actual.dtype) == (plain.shape, plain.dtype)
        low, high = ERROR[kind]
        assert low < jnp.linalg.norm(actual - plain) / jnp.linalg.norm(plain) < high


def flops_by_dtype(jaxpr) -> collections.Counter:
    """FLOPs of matmuls by dtype of the first operand."""
    counts = collections.Counter()
    for equation in jaxpr.eqns:
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            counts += flops_by_dtype(inner)
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            a = equation.invars[0].aval
            size = math.prod(equation.outvars[0].aval.shape)
            counts[str(a.dtype)] += 2 * size * math.prod(a.shape[axis] for axis in contracted)
    return counts


RECURRENT = {
    "base_num_decoder_layers": 3,
    "layer_pattern": "GKM",
    "layer_kinds": {
        "G": {"mixer": "gated_delta_net", "linear_num_key_heads": 2},
        "K": {"mixer": "kda"},
        "M": {"mixer": "mamba2"},
    },
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_chunk_size": 4,
    "mamba_d_head": 8,
    "mamba_d_state": 6,
    "mamba_chunk_size": 4,
}
# Convolutions are no matrix products. What sets decays and write strengths is not quantized.
NOT_QUANTIZED = re.compile(r"layers/.*/(\w*_conv|beta|decay|decay_down|dt_proj)/kernel")


@pytest.mark.parametrize(
    ("architecture", "keys"),
    [("llama2", {}), ("gpt_neox", {}), ("tokenformer", {}), ("llama2", RECURRENT)],
    ids=["llama2", "gpt_neox", "tokenformer", "recurrent mixers"],
)
def test_all_three_products_of_every_layer_weight_run_in_int8(architecture, keys):
    config = tiny_config(architecture, scan_layers=False, quantization="int8", **keys)
    model, batch = Model(config.model), random_batch(config, 2)

    def loss(params):
        return loss_sums(model.merge(params), batch, config.model.objective).total

    counts = flops_by_dtype(jax.make_jaxpr(jax.grad(loss))(model.abstract).jaxpr)
    weights = sum(
        info.size
        for name, info in model.parameters.items()
        if name.startswith("layers") and name.endswith("kernel") and not NOT_QUANTIZED.match(name)
    )
    assert counts["int8"] == 3 * 2 * batch.tokens_BT.size * weights


def test_rules_choose_by_path_and_the_first_match_wins():
    rules = [["mlp/experts", ""], [".*/out", "fp8"], [".*/(out|value)", ""]]
    config = tiny_config(
        num_experts=4, scan_layers=False, quantization="int8", quantization_rules=rules
    )
    model = Model(config.model)
    decoder = model.merge(model.abstract)
    kinds = {
        "/".join(map(str, path)).removeprefix("layers/"): getattr(dot, "kind", "")
        for path, module in nnx.iter_modules(decoder)
        if (dot := getattr(module, "dot_general", None))
    }
    assert kinds == {
        "self_attention/query": "int8",
        "self_attention/key": "int8",
        "self_attention/value": "",
        "self_attention/out": "fp8",
        "mlp/experts": "",
        "mlp/gate": "",
        "head/logits_dense": "",
    }


def test_a_rule_without_a_module_is_refused():
    with pytest.raises(UserError, match=r"(?s)'mlp/w' matches no .*mlp/wi_0"):
        Model(tiny_config(quantization_rules=[["mlp/w", "int8"]]).model)


def test_experts_are_quantized_too():
    config = tiny_config(num_experts=4, capacity_factor=1.0, quantization="int8")
    model, batch = Model(config.model), random_batch(config, 2)
    params = jax.jit(model.initialize)(jax.random.key(0))
    plain = Model(tiny_config(num_experts=4, capacity_factor=1.0).model)
    actual, reference = (
        loss_sums(each.merge(params), batch, config.model.objective).total
        for each in (model, plain)
    )
    assert actual != reference
    np.testing.assert_allclose(actual, reference, rtol=1e-2)
