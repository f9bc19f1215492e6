"""Dense connections: they begin as nothing, all of them learn, and they sum what they say."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from MaxText.configuration.dense_connections_section import DenseConnections
from MaxText.layers.connections import product_of_normalized
from MaxText.layers.decoder import Decoder
from MaxText.layers.model import Model
from MaxText.layers.stack import rematerialized
from MaxText.layers.weights import ShapesOnly
from MaxText.training.objective import loss_sums
from MaxText.training.optimizer import per_parameter
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
BLOCKS = {
    "llama2": {},
    "gpt_neox": {},
    "gpt2": {},
    "tokenformer": {"slot_num": 8},
}
DENSE = {"dense_conn": True, "dense_mixing": "sum"}
WIDTHS = {"dynamic_mlp_dim": True, "mlp_dim_multiple": 16}
PREPOST = {"mudd_prenorm": True, "mudd_postnorm": "residual"}
FORMS = {
    "sums": {},
    "sums, one norm first": {"dense_first_norms": "one"},
    "norms before and after": PREPOST,
    "norms before, and after on all ways": PREPOST | {"mudd_postnorm": "all"},
    "fixed weights alone": {"dense_dynamic": False},
    "weights of the token alone": {"dense_static": False, "dense_activation": "silu"},
    "the stream alone": {"dense_ways": ["r"]},
    "keys and values alone": {"dense_ways": ["v", "k"]},
    "some sources after some layers": {
        "dense_sources": "list", "dense_source_list": [0, 2], "dense_after_layers": [2],
        "base_num_decoder_layers": 3,
    },
}  # fmt: skip
CASES = {
    **{form: ("llama2", keys) for form, keys in FORMS.items()},
    "gpt2": ("gpt2", {}),
    "gpt_neox, norms before and after": ("gpt_neox", PREPOST),
    "tokenformer": ("tokenformer", {}),
    "widths that differ": ("llama2", WIDTHS | {"dense_first_norms": "one"}),
}


@functools.cache
def compiled(block, keys):
    """(model, compiled parameters -> (logits, gradients of the loss)) of given keys."""
    config = tiny_config(block, **(SIZES | BLOCKS[block] | dict(keys)))
    model, batch = Model(config.model), random_batch(config, rows=2)

    @jax.jit
    def run(parameters):
        def loss(parameters):
            module = model.merge(parameters)
            total = loss_sums(module, batch, config.model.objective).total
            return total / batch.weights_BT.sum(), module.logits(module.hidden(batch)[0])

        (_, logits), gradients = jax.value_and_grad(loss, has_aux=True)(parameters)
        return logits, gradients

    return model, run


def built(block, keys):
    """As `compiled`; lists may be keys' values."""
    return compiled(
        block, tuple((k, tuple(v) if isinstance(v, list) else v) for k, v in keys.items())
    )


def named(tree):
    """Name -> array."""
    return {
        "/".join(entry.key for entry in path): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def without_connections(dense, plain):
    """The parameters of a plain model, from those of one with dense connections."""
    num_layers = plain.section.shape.dimensions.num_layers

    def taken(name):
        norms = [name] if NORM not in name else [name, name.replace(NORM, f"{NORM}_q")]
        found = [dense[one] for one in norms if one in dense]
        if found:
            return found[0]
        layers = [name.replace("layers/", f"layers/{i}/", 1) for i in range(num_layers)]
        return np.stack([taken(one) for one in layers])

    return per_parameter(plain.parameters, taken)


@pytest.fixture(scope="module", params=some_quick(CASES, 3))
def case(request):
    """(model with dense connections, its compiled function, fresh parameters, keys, block)."""
    block, keys = CASES[request.param]
    model, run = built(block, DENSE | keys)
    return model, run, model.initialize(jax.random.key(3)), keys, block


def test_a_fresh_model_is_the_one_without_connections(case):
    model, run, parameters, keys, block = case
    plain, run_plain = built(block, {k: v for k, v in keys.items() if k in SIZES | WIDTHS})
    assert any(name.startswith("connections/") for name in model.parameters)
    assert not any(name.startswith("connections/") for name in plain.parameters)
    logits, _ = run(parameters)
    expected, _ = run_plain(without_connections(named(parameters), plain))
    np.testing.assert_array_equal(logits, expected)


def test_every_connection_learns(case):
    """The second of the products that make weights at once, the first when that one has moved."""
    _, run, parameters, keys, _ = case
    _, first = run(parameters)
    stands_still = {
        name for name, gradient in named(first["connections"]).items() if not np.any(gradient)
    }
    # What acts through a second product, through a sum, or on one, that are still 0.
    behind = ("wi/kernel", "/norm/scale", "source_norm/scale") + (
        ("post_norms",) if keys.get("mudd_postnorm") else ()
    )
    assert all(any(part in name for part in behind) for name in stands_still)
    moved = jax.tree.map(lambda p, g: p - g, parameters, first)
    _, second = run(moved)
    for name, gradient in named(second["connections"]).items():
        if name.endswith(("static", "wo/kernel")):
            # Each source of each way.
            gradient = np.abs(gradient).max(axis=tuple(range(gradient.ndim - 2)))
        elif name == "source_norm/scale":
            gradient = np.abs(gradient).max(axis=-1)
        assert np.all(gradient), name


def sources_by_definition(depth, keys):
    kind = keys["dense_sources"]
    wanted = []
    for source in range(depth + 1):
        if kind == "all" or source == depth:
            wanted.append(source)
        elif kind == "dilated":  # Pagliardini et al. 2024, section 3.2: j = i modulo k
            if source % keys["dense_dilation"] == depth % keys["dense_dilation"]:
                wanted.append(source)
        elif kind == "window":
            if source == 0 or depth - source < keys["dense_window"]:
                wanted.append(source)
        elif source in keys["dense_source_list"]:
            wanted.append(source)
    return tuple(wanted)


@pytest.mark.parametrize(
    "keys",
    [
        {"dense_sources": "all"},
        *({"dense_sources": "dilated", "dense_dilation": k} for k in (1, 2, 3, 7)),
        *({"dense_sources": "window", "dense_window": n} for n in (1, 2, 5, 40)),
        {"dense_sources": "list", "dense_source_list": (0, 3, 4)},
        {"dense_sources": "list", "dense_source_list": (6, 1)},
    ],
    ids=str,
)
def test_sources_by_definition(keys):
    section = DenseConnections(dense_conn=True, **keys)
    for depth in range(1, 25):
        assert section.sources(depth) == sources_by_definition(depth, keys)


@pytest.mark.parametrize(
    ("keys", "places"),
    [
        ({}, {1, 2, 3, 4, 5, 6}),
        ({"dense_period": 2}, {2, 4, 6}),
        ({"dense_period": 4}, {4}),
        ({"dense_after_layers": (1, 5)}, {1, 5}),
        ({"dense_conn": False}, set()),
    ],
    ids=str,
)
def test_places_of_sums(keys, places):
    section = DenseConnections(**({"dense_conn": True} | keys))
    assert {depth for depth in range(1, 7) if section.stands_after(depth)} == places


def test_a_model_has_the_sums_that_its_keys_name():
    """2 x 2 of six layers: three sums, each of its own output and of every second one before."""
    config = tiny_config(
        "denseformer", base_num_decoder_layers=6, scan_layers=False, dense_ways=["q", "r"],
        dense_sources="dilated", dense_dilation=2, dense_period=2, dense_mixing="sum",
    )  # fmt: skip
    shapes = {
        name: info.shape
        for name, info in Model(config.model).parameters.items()
        if name.startswith("connections/")
    }
    assert shapes == {
        "connections/after/2/static": (2, 2),
        "connections/after/4/static": (2, 3),
        "connections/after/6/static": (1, 4),
    }


@pytest.mark.parametrize(
    ("keys", "left"),
    [
        # From the last sum on, as long as there are more sources to be left than ways.
        ({"dense_ways": ["q", "r"]}, {8: 7, 6: 5, 4: 3}),
        ({"dense_ways": ["q", "k", "v", "r"]}, {8: 7, 6: 5}),
        ({"dense_sources": "dilated", "dense_dilation": 2, "dense_period": 2}, {8: 6, 4: 2}),
        # Where the sum before has other sources, it cannot.
        ({"dense_sources": "dilated", "dense_dilation": 2}, {}),
        ({"dense_sources": "window", "dense_window": 3}, {3: 2}),
        ({"dense_after_layers": [4, 8]}, {8: 4}),
    ],
    ids=str,
)
def test_sums_that_leave_gradients_to_the_one_before(keys, left):
    config = tiny_config(
        "llama2", **(SIZES | DENSE | {"base_num_decoder_layers": 8, "dense_ways": ["r"]} | keys)
    )
    decoder: Any = Decoder(config.model, ShapesOnly())
    sums = decoder.connections.after
    found = {int(depth): one.left_to for depth, one in sums.items() if one.left_to is not None}
    assert found == left
    assert {int(depth) for depth, one in sums.items() if one.num_later_ways} == set(left.values())


def test_product_of_normalized():
    numbers = np.random.default_rng(0)
    x_BTD, kernel_DK, goal_BTK = (
        numbers.normal(size=shape).astype(np.float32) for shape in ((2, 3, 32), (32, 5), (2, 3, 5))
    )
    epsilon = 0.5  # large, so that it is seen

    def plain(x_BTD, kernel_DK):
        mean_square = jnp.mean(x_BTD**2, axis=-1, keepdims=True)
        normed_BTD = x_BTD / jnp.sqrt(mean_square + epsilon)
        return jnp.einsum("btd,dk->btk", normed_BTD, kernel_DK, precision="highest")

    def ours(x_BTD, kernel_DK):
        return product_of_normalized(x_BTD, kernel_DK, epsilon, "highest")

    def run(function):
        def loss(x_BTD, kernel_DK):
            return jnp.sum(jnp.sin(function(x_BTD, kernel_DK)) * goal_BTK)

        return function(x_BTD, kernel_DK), jax.grad(loss, (0, 1))(x_BTD, kernel_DK)

    for mine, other in zip(*map(jax.tree.leaves, (run(ours), run(plain))), strict=True):
        np.testing.assert_allclose(mine, other, atol=2e-6 * np.abs(other).max())


def random_parameters(model):
    """Numbers around what a fresh model has, so that no weight of a sum is 0."""
    parameters = model.initialize(jax.random.key(0))
    leaves, structure = jax.tree.flatten(parameters)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    moved = [
        leaf + 0.1 * jax.random.normal(key, leaf.shape)
        for leaf, key in zip(leaves, keys, strict=True)
    ]
    return jax.tree.unflatten(structure, moved)


@functools.cache
def written_plainly(form):
    """Parameters, and logits and gradients of sums one by one, all of whose values are kept."""
    model, run = built("llama2", DENSE | WIDTHS | FORMS[form])
    parameters = random_parameters(model)
    return parameters, run(parameters)


@pytest.mark.parametrize("form", some_quick(["sums, one norm first", "norms before and after"], 2))
@pytest.mark.parametrize(
    "keys",
    [
        {"remat_policy": "full", "dense_kept_sums": 1},
        {"remat_policy": "minimal", "dense_mixing": "einsum"},
    ],
    ids=str,
)
def test_neither_forms_nor_memory_policies_change_the_result(form, keys):
    parameters, expected = written_plainly(form)
    _, run = built("llama2", DENSE | WIDTHS | FORMS[form] | keys)
    logits, gradients = run(parameters)
    np.testing.assert_allclose(logits, expected[0], atol=1e-5)
    wanted = named(expected[1])
    for name, gradient in named(gradients).items():
        largest = np.abs(wanted[name]).max()
        np.testing.assert_allclose(gradient / largest, wanted[name] / largest, atol=2e-5)


def dense_config(**keys):
    return tiny_config("muddformer", **(SIZES | DENSE | WIDTHS | keys))


def operations(jaxpr, name):
    """How often an operation stands in a traced program, with all that it contains."""
    number = 0
    for equation in jaxpr.eqns:
        number += equation.primitive.name == name
        number += sum(operations(inner, name) for inner in jaxprs_in_params(equation.params))
    return number


@pytest.mark.parametrize(("kept", "again"), [(0, 2), (1, 1), (5, 0)])
def test_sums_that_are_made_again(kept, again):
    """Of three sums, that after the last layer is read outside of layers."""
    config = dense_config(
        base_num_decoder_layers=3, remat_policy="full", dense_mixing="kernel", dense_kept_sums=kept,
    )  # fmt: skip
    model, batch = Model(config.model), random_batch(config, rows=2)

    def loss(parameters):
        return loss_sums(model.merge(parameters), batch, config.model.objective).total

    parameters = jax.eval_shape(model.initialize, jax.random.key(0))
    traced = jax.make_jaxpr(jax.grad(loss))(parameters)
    assert operations(traced.jaxpr, "pallas_call") == 3 + again + 3


@pytest.mark.parametrize("policy", ["full", "minimal", "qkv_proj_offloaded"])
def test_the_product_that_weights_come_from_is_not_made_again(policy):
    @functools.partial(rematerialized, policy=policy, in_scan=False)
    def layer(x_BTD, kernel_DK):
        return jnp.sin(product_of_normalized(x_BTD, kernel_DK, 1e-6, None))

    def loss(x_BTD, kernel_DK):
        return jnp.sum(layer(x_BTD, kernel_DK))

    traced = jax.make_jaxpr(jax.grad(loss, (0, 1)))(jnp.ones((2, 3, 8)), jnp.ones((8, 4)))
    assert operations(traced.jaxpr, "dot_general") == 3  # itself, and the gradients of both
    assert operations(traced.jaxpr, "rsqrt") == 1


def test_a_masked_language_model_sees_later_tokens():
    model = Model(dense_config(mlm_training=True).model)
    parameters = model.initialize(jax.random.key(0))
    batch = random_batch(dense_config(), rows=1)

    @jax.jit
    def hidden(parameters, tokens_BT):
        return model.merge(parameters).hidden(dataclasses.replace(batch, tokens_BT=tokens_BT))[0]

    other = batch.tokens_BT.at[0, -1].add(1) % 64
    change = hidden(parameters, other) - hidden(parameters, batch.tokens_BT)
    assert np.all(np.any(change, axis=-1))


@pytest.mark.parametrize(
    "keys",
    some_quick(
        [
            {"opt_type": "adamw", "dropout_rate": 0.2, "drop_path": 0.3, "remat_policy": "full"},
            {"opt_type": "muon"},
            {"opt_type": "adafactor"},
        ],
        3,
    ),
    ids=lambda keys: keys["opt_type"],
)
def test_every_part_moves(keys):
    """At the second step; at the first some gradients are 0, which no rule may divide by."""
    config = dense_config(
        adam_weight_decay=0.0, lr_schedule_type="constant", gradient_clipping_threshold=0.5, **keys
    )
    _, state, step = trainer(config)
    batch = random_batch(config, rows=4)
    first, metrics = step(state, batch)
    second, _ = step(first, batch)
    before, after = named(state.params), named(second.params)
    for name in before:
        assert np.all(np.isfinite(after[name])), name
        assert np.any(after[name] != before[name]), name
    if "dropout_rate" in keys:
        later = type(state)(state.step + 1, state.params, state.opt_state)
        assert step(state, batch)[1]["loss"] == metrics["loss"] != step(later, batch)[1]["loss"]
