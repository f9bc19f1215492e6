"""Every activation of GPT-Neo's list against its formula in double precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.layers.activations import ACTIVATIONS, LEARNED, OVER_FEATURES, rrelu
from MaxText.layers.model import Model
from tests.small_models import random_batch, tiny_config, trainer

X = np.concatenate([np.linspace(-6, 6, 25), [-30.0, 30.0]])
SIGMOID = 1 / (1 + np.exp(-X))
SOFTPLUS = np.log1p(np.exp(X))
SINH = np.log(X + np.sqrt(1 + X**2))
LN2 = np.log(2)  # softplus of 0, the first value of numbers that are positive


def leaky(slope):
    return np.where(X > 0, X, slope * X)


def gelu():
    return 0.5 * X * (1 + np.tanh(np.sqrt(2 / np.pi) * (X + 0.044715 * X**3)))


def selu():
    return 1.0507009873554805 * np.where(X > 0, X, 1.6732632423543772 * np.expm1(np.minimum(X, 0)))


FORMULAS = {
    "gelu": gelu(),
    "relu": np.maximum(X, 0),
    "sigmoid": SIGMOID,
    "tanh": np.tanh(X),
    "selu": selu(),
    "elu": np.where(X > 0, X, np.expm1(np.minimum(X, 0))),
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
    "proottanh": (np.abs(X) ** (2 + LN2) + 1 + LN2) ** (1 / (3 + LN2)) * np.tanh(X),
}


def function_of(name):
    if name in LEARNED:
        function, first_values = LEARNED[name]
        return lambda x: function(x, **{key: jnp.float32(v) for key, v in first_values.items()})
    if name == "rrelu":
        return lambda x: rrelu(x, None)
    return ACTIVATIONS.get(name) or OVER_FEATURES[name]


def test_formulas_and_finite_gradients():
    wrong = []
    x = jnp.asarray(X, jnp.float32)
    for name, expected in FORMULAS.items():
        value, back = jax.vjp(function_of(name), x)
        # float32 keeps 1 + x^2 and e^-30 to about 1e-6 of the largest term.
        if not np.allclose(value, expected, rtol=2e-5, atol=2e-6):
            wrong.append((name, np.abs(value - expected).max()))
        if not np.isfinite(back(jnp.ones_like(x))[0]).all():
            wrong.append((name, "gradient"))
    assert not wrong


def test_the_list_has_all_that_learn_or_see_all_features():
    assert {*LEARNED, *OVER_FEATURES, "rrelu"} < set(FORMULAS)


def test_elish_is_the_papers():
    """GPT-Neo's x / (1 + e^x) above 0 falls to 0 where x sigmoid(x) goes to x."""
    assert ACTIVATIONS["elish"](jnp.float32(20.0)) == pytest.approx(20.0, rel=1e-6)


def test_random_slopes_are_even_between_an_eighth_and_a_third():
    x = jnp.full(20_000, -1.0)
    slopes = -np.asarray(rrelu(x, jax.random.key(0)))
    assert slopes.min() >= 1 / 8
    assert slopes.max() <= 1 / 3
    np.testing.assert_allclose(slopes.mean(), 11 / 48, rtol=0.01)
    np.testing.assert_allclose(slopes.std(), (1 / 3 - 1 / 8) / 12**0.5, rtol=0.02)
    assert (rrelu(-x, jax.random.key(0)) == 1).all()


def test_learned_numbers_have_names_and_are_trained():
    names = sorted(LEARNED)
    config = tiny_config(mlp_activations=names, base_num_decoder_layers=2)
    added = {
        f"layers/mlp/activation_{i}/{number}"
        for i, name in enumerate(names)
        for number in LEARNED[name][1]
    }
    parameters = Model(config.model).parameters
    assert {name for name in parameters if "activation" in name} == added
    assert all(parameters[name].shape == (2,) for name in added)  # one for each layer
    single = Model(tiny_config(mlp_activations=["prelu"]).model).parameters
    assert "layers/mlp/activation/slope" in single

    _, state, step = trainer(config)
    after, metrics = step(state, random_batch(config, rows=4))
    assert np.isfinite(metrics["loss"])
    before, moved = (x.params["layers"]["mlp"] for x in (state, after))
    for i, name in enumerate(names):
        for number, first in LEARNED[name][1].items():
            np.testing.assert_allclose(before[f"activation_{i}"][number], first)
            assert (moved[f"activation_{i}"][number] != first).all(), (name, number)


def test_random_slopes_in_training_only():
    config = tiny_config(mlp_activations=["rrelu"], base_num_decoder_layers=1)
    assert config.model.is_random
    model, state, step = trainer(config)
    batch = random_batch(config, rows=2)
    losses = [float(step(state, batch)[1]["loss"]) for _ in range(2)]
    later = type(state)(state.step + 1, state.params, state.opt_state)
    losses.append(float(step(later, batch)[1]["loss"]))
    assert losses[0] == losses[1] != losses[2]
    logits = jax.jit(lambda params: model.merge(params)(batch))
    np.testing.assert_array_equal(logits(state.params), logits(state.params))
