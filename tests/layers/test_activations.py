"""Activation functions against their formulas in double precision."""

from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.config.layer_sections import Activation, NotElementwise
from MaxText.layers.assembly.model import Model
from MaxText.layers.context import ForwardContext
from MaxText.layers.feed_forward.activations import ACTIVATIONS, LEARNED, OVER_FEATURES, rrelu
from tests.small_models import random_params, tiny_config

X = np.concatenate([np.linspace(-6, 6, 25), [-30.0, 30.0]])
SIGMOID = 1 / (1 + np.exp(-X))
SOFTPLUS = np.log1p(np.exp(X))
BELOW = np.expm1(np.minimum(X, 0))
SINH = np.log(X + np.sqrt(1 + X**2))
LN2 = np.log(2)  # softplus of 0, the first value of numbers that are positive


def leaky(slope):
    return np.where(X > 0, X, slope * X)


FORMULAS = {
    "gelu": 0.5 * X * (1 + np.tanh(np.sqrt(2 / np.pi) * (X + 0.044715 * X**3))),
    "relu": np.maximum(X, 0),
    "sigmoid": SIGMOID,
    "tanh": np.tanh(X),
    "selu": 1.0507009873554805 * np.where(X > 0, X, 1.6732632423543772 * BELOW),
    "elu": np.where(X > 0, X, BELOW),
    "abs": np.abs(X),
    "sin": np.sin(X),
    "cos": np.cos(X),
    "sign": np.sign(X),
    "silu": X * SIGMOID,
    "softplus": SOFTPLUS,
    "lrelu001": leaky(0.01),
    "lrelu020": leaky(0.2),
    "id": X,
    "triangle_relax": np.sin(X) - np.sin(3 * X) / 9 + np.sin(5 * X) / 25 - np.sin(7 * X) / 49,
    "square_relax": np.cos(X) - np.cos(3 * X) / 3 + np.cos(5 * X) / 5 - np.cos(7 * X) / 7,
    "spike": 1 / (1 + X**2),
    "spike2": np.exp(-(X**2)),
    "tanhshrink": X - np.tanh(X),
    "softsign": X / (np.abs(X) + 1),
    "softmax": np.exp(X) / np.exp(X).sum(),
    "logsoftmax": X - np.log(np.exp(X).sum()),
    "bipolarsigmoid": 2 * SIGMOID - 1,
    "rrelu": leaky((1 / 8 + 1 / 3) / 2),
    "elish": np.where(X > 0, X, np.exp(X) - 1) * SIGMOID,
    # models/activations.py of GPT-Neo: x / (1 + e^x), and (e^x - 1) * sigmoid(x).
    "elish_gpt_neo": np.where(
        X > 0, X / (1 + np.exp(np.minimum(X, 80))), (np.exp(X) - 1) * SIGMOID
    ),
    "quick_gelu": X / (1 + np.exp(-1.702 * X)),
    "linear_plus_one": X + 1,
    "arcsinh": SINH,
    "maxsig": np.maximum(X, SIGMOID),
    "cosid": np.cos(X) - X,
    "minsin": np.minimum(X, np.sin(X)),
    "maxtanh": np.maximum(X, np.tanh(X)),
    "mish": X * np.tanh(SOFTPLUS),
    "tanhexp": X * np.tanh(np.exp(X)),
    "lisht": X * np.tanh(X),
    "seagull": np.log(1 + X**2),
    "snake": X + np.sin(X) ** 2,
    "roottanh": (X**2 + 1) ** (1 / 3) * np.tanh(X),
    "softplusmone": SOFTPLUS - 1,
    # With their first values.
    "aria": X / (LN2 + np.exp(-X) ** (1 / (1 + LN2))),
    "prelu": leaky(0.2),
    "parcsinh": np.log(X * (1 + LN2) + np.sqrt(1 + (X * (1 + LN2)) ** 2)),
    "psoftplus": SOFTPLUS,
    "xielu": 0.8 * np.where(X > 0, X**2, np.exp(X) - 1 - X) + 0.5 * X,
    "proottanh": (np.abs(X) ** (2 + LN2) + 1 + LN2) ** (1 / (3 + LN2)) * np.tanh(X),
}
FUNCTIONS = (
    ACTIVATIONS
    | OVER_FEATURES
    | {"rrelu": lambda x: rrelu(x, None)}
    | {
        name: lambda x, function=function, numbers=numbers: function(x, **numbers)
        for name, (function, numbers) in LEARNED.items()
    }
)


def test_formulas_and_gradients():
    """Of the functions, and of the numbers that some of them learn."""

    @jax.jit
    def run(x):
        outputs = {}
        for name, function in FUNCTIONS.items():
            value, back = jax.vjp(function, x)
            outputs[name] = value, back(jnp.ones_like(x))[0]
        learned = {
            name: jax.grad(lambda numbers, f=function: f(x, **numbers) @ jnp.arange(x.size))(
                numbers
            )
            for name, (function, numbers) in LEARNED.items()
        }
        return outputs, learned

    outputs, learned = run(jnp.asarray(X, jnp.float32))
    assert FORMULAS.keys() <= outputs.keys()
    for name, (value, gradient) in outputs.items():
        assert np.isfinite([value, gradient]).all(), name
        # float32 keeps 1 + x^2 and e^-30 to about 1e-6 of the largest term.
        wanted = FORMULAS.get(name, value)
        np.testing.assert_allclose(value, wanted, rtol=2e-5, atol=2e-6, err_msg=name)
    for name, gradients in learned.items():
        assert all(np.isfinite(gradient) and gradient for gradient in gradients.values()), name


def test_every_activation_of_the_schema_exists():
    assert set(get_args(Activation)) == set(ACTIVATIONS)
    assert set(get_args(NotElementwise)) == FUNCTIONS.keys() - ACTIVATIONS.keys()
    assert FUNCTIONS.keys() - ACTIVATIONS.keys() < FORMULAS.keys()


@pytest.mark.parametrize("num_experts", [1, 2])
def test_inputs_of_activations_are_clamped(num_experts):
    """The GLU of gpt-oss: min(g, c) sigmoid(1.702 min(g, c)) (clip(u, -c, c) + 1)."""
    limit = 0.4
    config = tiny_config(
        mlp_activations=["quick_gelu", "linear_plus_one"],
        mlp_activations_limit=limit,
        num_experts=num_experts,
        share_layer_params=True,
    )
    model = Model(config.model)
    params = random_params(model)
    decoder = model.merge(jax.tree.map(lambda leaf: leaf[0], params))
    mlp = decoder.layers.mlp
    x = np.random.default_rng(0).normal(size=(1, 8, 32)).astype(np.float32)
    experts = mlp.experts if num_experts > 1 else mlp

    def kernel(name, expert):
        weights = getattr(experts, name)
        return np.float64(weights[...][expert] if num_experts > 1 else weights.kernel[...])

    def output(expert):
        gate = np.minimum(x @ kernel("wi_0", expert), limit)
        up = np.clip(x @ kernel("wi_1", expert), -limit, limit)
        return gate / (1 + np.exp(-1.702 * gate)) * (up + 1) @ kernel("wo", expert)

    expected = output(0)
    if num_experts > 1:
        p = np.asarray(jax.nn.softmax(mlp.gate(x)))
        outputs = np.stack([output(expert) for expert in range(num_experts)])
        best = p.argmax(-1)
        expected = p.max(-1)[..., None] * np.where(best[..., None] == 0, *outputs)
    found = mlp(jnp.asarray(x), ForwardContext().for_layer(0))[0]
    np.testing.assert_allclose(found, expected, atol=2e-5 * np.abs(expected).max())


def test_random_slopes_are_even_between_an_eighth_and_a_third():
    x = jnp.full(20_000, -1.0)
    slopes = -np.asarray(rrelu(x, jax.random.key(0)))
    assert 1 / 8 <= slopes.min() <= slopes.max() <= 1 / 3
    np.testing.assert_allclose(slopes.mean(), 11 / 48, rtol=0.01)
    np.testing.assert_allclose(slopes.std(), (1 / 3 - 1 / 8) / 12**0.5, rtol=0.02)
    assert (rrelu(-x, jax.random.key(0)) == 1).all()


def test_random_slopes_in_training_only():
    config = tiny_config(mlp_activations=["rrelu"], share_layer_params=True)
    assert config.model.is_random
    model = Model(config.model)
    params = jax.tree.map(lambda leaf: jnp.ones(leaf.shape[1:]), model.abstract)
    mlp = model.merge(params).layers.mlp
    x = jnp.full((1, 4, 32), -1.0)
    one, other = jax.random.split(jax.random.key(0))
    fixed, first, second = (
        np.asarray(mlp(x, ForwardContext(dropout_key=key, training=training).for_layer(0))[0])
        for key, training in ((one, False), (one, True), (other, True))
    )
    assert np.unique(fixed).size == 1
    assert ((first != second) & (first != fixed)).all()


def test_learned_numbers_are_parameters_of_each_layer():
    names = sorted(LEARNED)
    parameters = Model(tiny_config(mlp_activations=names).model).parameters
    found = {name: info.shape for name, info in parameters.items() if "activation" in name}
    assert found == {
        f"layers/mlp/activation_{i}/{number}": (3,)
        for i, name in enumerate(names)
        for number in LEARNED[name][1]
    }
    single = Model(tiny_config(mlp_activations=["prelu"]).model).parameters
    assert "layers/mlp/activation/slope" in single
