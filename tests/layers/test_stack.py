"""Walks over layers: what is done for the TPU's compiler leaves results as they are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from MaxText.config.layer_plan import plan_layers
from MaxText.layers.assembly import layer_loops, stack
from MaxText.layers.assembly.model import Model
from MaxText.layers.lowering import unrolled_layers
from MaxText.layers.params import param
from tests.small_models import assert_close, random_batch, tiny_config

NUM_LAYERS, D = 3, 4


def normal(key, shape, num_input_dims, dtype):
    return jax.random.normal(key, shape, dtype)


class Layer(nnx.Module):
    """tanh(x W + b)."""

    def __init__(self, rngs, width=D):
        def drawn(*shape):
            return param(rngs, shape, (None,) * len(shape), normal, dtype=jnp.dtype("float32"))

        self.w, self.b, self.unread = drawn(D, D), drawn(D), drawn(width)

    def __call__(self, x):
        return jnp.tanh(x @ self.w[...] + self.b[...])


def loss_of(alike, shared, reads_all, sequential):
    """Weights, and a function of them and of x; with `reads_all` each layer reads all outputs."""
    kinds = range(NUM_LAYERS) if not alike else [0] * NUM_LAYERS
    layers, blueprint = stack.stack(
        lambda index, rngs: Layer(rngs, D + kinds[index]),
        plan_layers(kinds),
        nnx.Rngs(0),
        shared=shared,
    )
    assert blueprint.is_stacked == alike
    graphdef, weights = nnx.split(layers)

    def apply(layer, outputs, index, state):
        y = layer(sum(outputs) if reads_all else outputs[-1])
        return (*outputs, y) if reads_all else (y,), {"squares": jnp.sum(y * y)}, None

    def loss(weights, x):
        layers = nnx.merge(graphdef, weights)
        outputs, scalars, _ = layer_loops.apply_unrolled(
            layers, blueprint, (x,), apply, policy="full", sequential=sequential
        )
        return jnp.sum(jnp.sin(outputs[-1])) + scalars["squares"]

    return nnx.to_pure_dict(weights), loss


@pytest.mark.parametrize(
    ("alike", "shared", "reads_all"),
    [(True, False, False), (False, False, True), (True, True, True)],
    ids=["alike", "apart, all outputs read", "shared, all outputs read"],
)
def test_on_tpu_a_layer_waits_for_the_gradients_of_the_one_after_it(
    alike, shared, reads_all, monkeypatch
):
    weights, loss = loss_of(alike, shared, reads_all, sequential=True)
    x = jnp.linspace(-1, 1, 2 * D).reshape(2, D)
    gradients = jax.value_and_grad(loss, argnums=(0, 1))
    expected, found = {}, {}
    for results, platform in ((expected, "cpu"), (found, "tpu")):
        monkeypatch.setattr(unrolled_layers, "platform", lambda platform=platform: platform)
        traced = jax.jit(lambda *given: gradients(*given)).trace(weights, x)
        results["barriers"] = [
            sorted({v.aval.shape[-2:] for v in equation.invars})
            for equation in traced.jaxpr.eqns
            if equation.primitive.name == "optimization_barrier"
        ]
        results["values"] = traced.lower().compile()(weights, x)
    assert expected["barriers"] == ([[(1 if shared else NUM_LAYERS,)]] if alike else [])  # indices
    assert len(found["barriers"]) == NUM_LAYERS
    # Each holds gradients of weights next to those of hidden states.
    assert all({(D, D), x.shape} <= set(shapes) for shapes in found["barriers"])
    assert_close(found["values"], expected["values"], 1e-7)
    _, loss = loss_of(alike, shared, reads_all, sequential=False)
    assert "optimization_barrier" not in str(jax.make_jaxpr(jax.grad(loss))(weights, x))


@pytest.mark.parametrize("stacked", [pytest.param(True, marks=pytest.mark.slow), False])
def test_layers_are_numbered_through_a_pattern(stacked):
    # A prefix of one layer, twice a cycle of three of two kinds, a suffix of one.
    kinds = [0, 1, 1, 2, 1, 1, 2, 3]
    layers, blueprint = stack.stack(
        lambda index, rngs: Layer(rngs, D if stacked else D + kinds[index]),
        plan_layers(kinds),
        nnx.Rngs(0),
    )
    assert (blueprint.plan, blueprint.is_stacked) == ((8, 1, (2, 1), 2), stacked)

    def apply(layer, x, index):
        width = layer.unread.shape[0] - D
        number = jnp.asarray(index, jnp.float32)
        return layer(x) + 0.1 * number, {"widths": width * number, "numbers": number**2}

    def apply_one(layer, outputs, index, state):
        y, scalars = apply(layer, outputs[-1], index)
        return (y,), scalars, state

    x = jnp.zeros((1, 1, D))
    y, scalars = layer_loops.apply_scanned(layers, blueprint, x, apply, "full")
    unrolled, unrolled_scalars, _ = layer_loops.apply_unrolled(layers, blueprint, (x,), apply_one)
    np.testing.assert_allclose(y, unrolled[-1], rtol=1e-6)
    assert scalars == unrolled_scalars
    assert scalars["numbers"] == sum(i**2 for i in range(8))
    assert scalars["widths"] == (0 if stacked else sum(i * kind for i, kind in enumerate(kinds)))
    together = blueprint.join(blueprint.layer_weights(stack.weights_dict(layers)))
    jax.tree.map(np.testing.assert_array_equal, together, stack.weights_dict(layers))


@given(st.text("AB", max_size=4), st.text("ABC", min_size=1, max_size=4), st.integers(1, 5))
def test_a_plan_covers_every_layer_once(prefix, cycle, repeats):
    kinds = prefix + cycle * repeats
    plan = plan_layers(kinds)
    assert (plan.repeats > 1) == (plan.cycle > 0)
    assert [i for i in range(len(kinds)) if plan.cycled(i) is None] == list(plan.singles())
    for index, kind in enumerate(kinds):
        if (place := plan.cycled(index)) is not None:
            assert kind == kinds[plan.layers_of(place[0])[0]]
            assert plan.layers_of(place[0])[place[1]] == index
    assert len({plan.path(index) for index in range(len(kinds))}) == len(kinds)


def lines_of_program(num_layers, **keys):
    config = tiny_config(base_num_decoder_layers=num_layers, **keys)
    model, batch = Model(config.model), random_batch(config, 2)

    def loss(params):
        return jnp.sum(model.merge(params)(batch) ** 2)

    return jax.jit(jax.grad(loss)).lower(model.abstract).as_text().count("\n")


@pytest.mark.parametrize(
    "keys",
    [
        {
            "layer_pattern": "GGG*",
            "layer_kinds": {"G": {"mixer": "gated_delta_net"}, "*": {}},
        },
        pytest.param(
            {"layer_pattern": "DE", "layer_kinds": {"D": {}, "E": {"num_experts": 4}}},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["hybrid", "experts in every second layer"],
)
def test_programs_of_patterns_do_not_grow_with_depth(keys):
    few, many = (lines_of_program(n, remat_policy="full", **keys) for n in (8, 48))
    assert many <= 1.1 * few
