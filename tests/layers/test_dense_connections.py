"""Dense connections: they begin as nothing, all of them learn, and they sum what they say."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from MaxText.config.layer_sections import DenseConfig
from MaxText.layers.assembly.model import Model
from MaxText.layers.assembly.remat import apply_remat
from MaxText.layers.depth.connections import rms_norm_matmul
from MaxText.training.objective import loss_sums
from MaxText.training.optimizers.parameter_trees import map_param_names
from tests.growth.growing import by_name
from tests.small_models import random_batch, some_quick, tiny_config, trainer

NORM = "pre_self_attention_layer_norm"
SIZES = {
    "base_num_decoder_layers": 2,
    "base_num_kv_heads": 4,
    "base_mlp_dim": 32,
    "scan_layers": False,
    "max_target_length": 8,
    "weight_init": "fan_in",
}
DENSE = {"dense_conn": True, "dense_aggregation_impl": "sum"}
WIDTHS = {"dynamic_mlp_dim": True, "mlp_dim_multiple": 16}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "norms before, and after on all ways": (
        "gpt_neox",
        {"mudd_prenorm": True, "mudd_postnorm": "all", "dense_sparsity": "window"}
        | {"dense_selection.window": 1},
    ),
    "one norm first, widths": ("llama2", WIDTHS | {"dense_first_layer_norms": "one"}),
    "keys and values alone, weights of the token alone": (
        "gpt2",
        {"dense_streams": ("v", "k"), "dense_static": False, "dynamic_dense_act_cls": "silu"},
    ),
    "some sources after some layers": (
        "llama2",
        {"dense_sparsity": "list", "dense_selection.outputs": (0, 2), "dense_target_layers": (2,)}
        | {"base_num_decoder_layers": 3},
    ),
}


def built(block, keys):
    """(model, compiled parameters -> (logits, gradients of the loss)) of given keys."""
    config = tiny_config(block, **SIZES | keys)
    model, batch = Model(config.model), random_batch(config, rows=2)

    @jax.jit
    def run(parameters):
        def loss(parameters):
            module = model.merge(parameters)
            total = loss_sums(module, batch, config.model.objective).total
            return total / batch.loss_mask_BT.sum(), module.logits(module.hidden_states(batch)[0])

        (_, logits), gradients = jax.value_and_grad(loss, has_aux=True)(parameters)
        return logits, gradients

    return model, run


def without_connections(dense, plain):
    """The parameters of a plain model, from those of one with dense connections."""
    num_layers = plain.config.shape.dimensions.num_layers

    def taken(name):
        norms = [name] if NORM not in name else [name, name.replace(NORM, f"{NORM}_q")]
        found = [dense[one] for one in norms if one in dense]
        if found:
            return found[0]
        layers = [name.replace("layers/", f"layers/{i}/", 1) for i in range(num_layers)]
        return np.stack([taken(one) for one in layers])

    return map_param_names(plain.parameters, taken)


@pytest.mark.parametrize("name", some_quick(CASES, 6))
def test_a_fresh_model_is_the_one_without_connections_and_each_learns(name):
    """The second of the products that make weights at once, the first when that one has moved."""
    block, keys = CASES[name]
    model, run = built(block, DENSE | keys)
    parameters = jax.jit(model.initialize)(jax.random.key(3))
    logits, first = run(parameters)

    plain, run_plain = built(block, {k: v for k, v in keys.items() if k in SIZES | WIDTHS})
    assert any(name.startswith("connections/") for name in model.parameters)
    assert not any(name.startswith("connections/") for name in plain.parameters)
    expected, _ = run_plain(without_connections(by_name(parameters), plain))
    np.testing.assert_array_equal(logits, expected)

    gradients = by_name(first["connections"])
    stands_still = {name for name in gradients if not np.any(gradients[name])}
    # What acts through a second product, through a sum, or on one, that are still 0.
    behind = ("wi/kernel", "/norm/scale", "source_norm/scale") + (
        ("post_norms",) if keys.get("mudd_postnorm") else ()
    )
    assert all(any(part in name for part in behind) for name in stands_still)
    _, second = run(jax.tree.map(lambda p, g: p - g, parameters, first))
    for name, gradient in by_name(second["connections"]).items():
        if name.endswith(("static", "wo/kernel")):
            # Each source of each way.
            gradient = np.abs(gradient).max(axis=tuple(range(gradient.ndim - 2)))
        elif name == "source_norm/scale":
            gradient = np.abs(gradient).max(axis=-1)
        assert np.all(gradient), name


def sources_by_definition(depth, keys):
    is_wanted = {
        "all": lambda source, _: True,
        # Pagliardini et al. 2024, section 3.2: j = i modulo k.
        "dilated": lambda source, k: source % k == depth % k,
        "window": lambda source, n: source == 0 or depth - source < n,
        "list": lambda source, outputs: source in outputs,
    }[keys["dense_sparsity"]]
    given = [*keys.values()][-1]
    return tuple(s for s in range(depth + 1) if s == depth or is_wanted(s, given))


@pytest.mark.parametrize(
    "keys",
    [
        {"dense_sparsity": "all"},
        *({"dense_sparsity": "dilated", "dense_selection.dilation": k} for k in (1, 3)),
        *({"dense_sparsity": "window", "dense_selection.window": n} for n in (1, 5, 40)),
        {"dense_sparsity": "list", "dense_selection.outputs": (6, 1)},
    ],
    ids=str,
)
def test_sources_by_definition(keys):
    section = DenseConfig(dense_conn=True, **keys)
    for depth in range(1, 25):
        assert section.sources(depth) == sources_by_definition(depth, keys)


def test_a_model_has_the_sums_that_its_keys_name():
    """2 x 2 of six layers: three sums, each of its own output and of every second one before."""
    config = tiny_config(
        "denseformer",
        base_num_decoder_layers=6,
        scan_layers=False,
        dense_streams=["q", "r"],
        dense_sparsity="dilated",
        dense_selection={"dilation": 2},
        dense_period=2,
        dense_aggregation_impl="sum",
    )
    parameters = Model(config.model).parameters.items()
    assert {name: info.shape for name, info in parameters if "connections/" in name} == {
        "connections/after/2/static": (2, 2),
        "connections/after/4/static": (2, 3),
        "connections/after/6/static": (1, 4),
    }


def dense_config(**keys):
    return tiny_config("muddformer", **(SIZES | DENSE | WIDTHS | keys))


def operations(jaxpr, name):
    """How often an operation stands in a traced program, with all that it contains."""
    number = 0
    for equation in jaxpr.eqns:
        number += equation.primitive.name == name
        number += sum(operations(inner, name) for inner in jaxprs_in_params(equation.params))
    return number


@pytest.mark.parametrize(("kept", "again"), [(0, 2), (1, 1)])
def test_sums_that_are_made_again(kept, again):
    """Of three sums, that after the last layer is read outside of layers."""
    config = dense_config(
        base_num_decoder_layers=3,
        remat_policy="full",
        dense_aggregation_impl="kernel",
        dense_saved_aggregates=kept,
    )
    model, batch = Model(config.model), random_batch(config, rows=2)

    def loss(parameters):
        return loss_sums(model.merge(parameters), batch, config.model.objective).total

    parameters = jax.eval_shape(model.initialize, jax.random.key(0))
    traced = jax.make_jaxpr(jax.grad(loss))(parameters)
    assert operations(traced.jaxpr, "pallas_call") == 3 + again + 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        {"base_num_decoder_layers": 4, "dense_streams": ["k", "r"], "dense_saved_aggregates": 1},
        {"mudd_prenorm": True, "mudd_postnorm": "residual", "dense_sparsity": "dilated"},
        {"decoder_block": "muddpythia", "base_emb_dim": 128, "mlp_dim_multiple": 4},  # LayerNorm
    ],
    ids=str,
)
def test_a_model_by_kernel_is_that_by_sums(keys):
    """Rows of 16 tokens, so that kernels do the layers' norms."""
    given = {"base_num_decoder_layers": 3, "remat_policy": "full", "max_target_length": 16} | keys
    block = given.pop("decoder_block", "llama2")
    given |= {"dense_conn": True}
    model, run = built(block, given | {"dense_aggregation_impl": "sum"})
    parameters = jax.jit(model.initialize)(jax.random.key(3))
    numbers = np.random.default_rng(0)
    moved = jax.tree.map(lambda x: x + 0.03 * numbers.normal(size=x.shape).astype("f"), parameters)
    logits, gradients = run(moved)
    by_kernel, found = built(block, given | {"dense_aggregation_impl": "kernel"})[1](moved)
    np.testing.assert_allclose(by_kernel, logits, atol=1e-5)
    found = by_name(found)
    for name, gradient in by_name(gradients).items():
        largest = np.abs(gradient).max()
        np.testing.assert_allclose(
            found[name] / largest, gradient / largest, atol=2e-5, err_msg=name
        )


@pytest.mark.parametrize("policy", ["full", "minimal"])
def test_the_product_that_weights_come_from_is_not_made_again(policy):
    @functools.partial(apply_remat, policy=policy, in_scan=False)
    def layer(x_BTD, kernel_DK):
        return jnp.sin(rms_norm_matmul(x_BTD, kernel_DK, 1e-6, None))

    def loss(x_BTD, kernel_DK):
        return jnp.sum(layer(x_BTD, kernel_DK))

    traced = jax.make_jaxpr(jax.grad(loss, (0, 1)))(jnp.ones((2, 3, 8)), jnp.ones((8, 4)))
    assert operations(traced.jaxpr, "dot_general") == 3  # itself, and the gradients of both
    assert operations(traced.jaxpr, "rsqrt") == 1


@pytest.mark.slow
@pytest.mark.parametrize("opt_type", ["adafactor", "muon"])
def test_optimizers_do_not_divide_by_gradients_of_zero(opt_type):
    """Those of the first step; every part moves at the second one."""
    config = dense_config(
        adam_weight_decay=0.0,
        lr_schedule_type="constant",
        gradient_clipping_threshold=0.5,
        opt_type=opt_type,
    )
    _, state, step = trainer(config)
    batch = random_batch(config, rows=4)
    first, _ = step(state, batch)
    second, _ = step(first, batch)
    before, after = by_name(state.params), by_name(second.params)
    for name in before:
        assert np.all(np.isfinite(after[name])), name
        assert np.any(after[name] != before[name]), name
