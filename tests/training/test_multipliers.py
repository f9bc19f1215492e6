"""Multipliers of learning rate, epsilon and weight decay against published rows and plain Adam."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from MaxText.config.parametrization_rules import OPTIMIZERS_WITH_RULE
from MaxText.config.training_sections import OptimizerConfig
from MaxText.errors import UserError
from MaxText.parallelism.logical_sharding import ParamSpec
from MaxText.training import multipliers
from MaxText.training.optimizer import make_optimizer

M = 4.0  # width over base width


def spec(shape, axes, num_input_dims, weight_class, r_in, r_out, **depth):
    return ParamSpec(
        shape,
        jnp.dtype("float32"),
        axes,
        num_input_dims,
        weight_class=weight_class,
        r_in=r_in,
        r_out=r_out,
        **depth,
    )


DEPTH = {"branch_factor": 1 / 8, "branch_rate": 1.0}  # 8 times as deep, exponent 1
WEIGHTS = {
    "table": spec((32, 64), ("vocab", "embed"), 0, "table", 1.0, M),
    "hidden": spec((64, 128), ("embed", "mlp"), 1, "hidden", M, M, **DEPTH),
    "head": spec((64, 32), ("embed", "vocab"), 1, "readout", M, 1.0),
    "gain": spec((64,), ("norm",), 0, "vector", 1.0, M, **DEPTH),
    "qk_gain": spec((8,), ("norm",), 0, "vector", 1.0, 1.0, **DEPTH),
    "key": spec((64, 2, 8), ("embed", "kv_heads", "kv"), 1, "hidden", M, 1.0),
}


def of(opt_type, attribute, **keys):
    config = OptimizerConfig(opt_type=opt_type, **keys)
    return {
        name: getattr(multiplier, attribute)
        for name, multiplier in multipliers.weight_multipliers(config, WEIGHTS).items()
    }


def test_published_rates():
    """Adam and SGD: Yang et al. 2022, table 3, with the width as M."""
    adam = of("adamw", "learning_rate")
    assert adam == {
        "table": 1,
        "hidden": 1 / M,
        "head": 1 / M,
        "gain": 1,
        "qk_gain": 1,
        "key": 1 / M,
    }
    assert of("lion", "learning_rate") == adam
    sgd = of("sgd", "learning_rate")
    assert (sgd["table"], sgd["head"], sgd["key"]) == (M, 1 / M, 1 / M)
    assert sgd["hidden"] == 8  # 1 with width, and gradients of branches are 1/8


def test_published_epsilons_and_decay():
    """Complete(d)P, arXiv 2512.22382: 1/M of what feeds the width; in branches by depth, too."""
    epsilons = of("adamw", "epsilon")
    assert epsilons["table"] == 1 / M
    assert epsilons["hidden"] == epsilons["gain"] == 1 / M / 8
    assert epsilons["head"] == 1
    assert epsilons["qk_gain"] == 1 / 8
    rates = of("adamw", "learning_rate")
    decays = of("adamw", "weight_decay")
    assert all(rates[name] * decays[name] == 1 for name in WEIGHTS)


@pytest.mark.parametrize("scale", ["consistent_rms", "original", "spectral"])
@pytest.mark.parametrize("name", ["hidden", "key", "out"])
def test_rates_of_orthogonal_updates(name, scale):
    """The spectral norm of an update of one rate grows as sqrt(r_out / r_in)."""
    out = spec((2, 8, 64), ("kv_heads", "kv", "embed"), 2, "hidden", 1.0, M)
    weight = out if name == "out" else WEIGHTS[name]
    inputs, outputs = np.prod(weight.input_dims), np.prod(weight.output_dims)
    norm = {
        "consistent_rms": lambda i, o: 0.2 * np.sqrt(max(i, o)),  # all singular values are equal
        "original": lambda i, o: np.sqrt(max(1, o / i)),
        "spectral": lambda i, o: np.sqrt(o / i),
    }[scale]
    growth = norm(inputs, outputs) / norm(inputs / weight.r_in, outputs / weight.r_out)
    config = OptimizerConfig(opt_type="muon", muon_scale=scale)
    rate = multipliers.weight_multipliers(config, {"w": weight})["w"].learning_rate
    np.testing.assert_allclose(rate * growth, np.sqrt(weight.r_out / weight.r_in))


def test_rates_of_matrix_optimizers():
    muon = of("muon", "learning_rate")
    assert muon == of("normuon", "learning_rate")
    assert (muon["hidden"], muon["head"], muon["gain"]) == (M**-0.5, 1 / M, 1)
    assert of("muon", "epsilon")["hidden"] == 1
    # Steps relative to the norm of the weight: HyperP, arXiv 2603.28743, and of Adam's directions.
    muonh, adamh = of("muonh", "learning_rate"), of("adamh", "learning_rate")
    assert (muonh["hidden"], muonh["key"], muonh["head"], muonh["table"]) == (1, M**-0.5, 1, 1)
    assert (adamh["hidden"], adamh["head"], adamh["gain"]) == (M**-0.5, 1, 1)
    assert of("adafactor", "learning_rate")["hidden"] == M**-0.5


def test_learning_rates_in_branches_of_another_exponent():
    halved = WEIGHTS["hidden"]._replace(branch_factor=8**-0.5, branch_rate=8**-0.5)
    config = OptimizerConfig(opt_type="adamw")
    (multiplier,) = multipliers.weight_multipliers(config, {"w": halved}).values()
    np.testing.assert_allclose(multiplier.learning_rate, 8**-0.5 / M)


def test_all_rules_are_known_to_the_configuration():
    for name in OPTIMIZERS_WITH_RULE:
        of(name, "learning_rate", optax_name="adopt")
    with pytest.raises(UserError, match="opt_type=other: no rule"):
        of("other", "learning_rate")
    unknown = OptimizerConfig(opt_type="other")
    plain = {"w": WEIGHTS["hidden"]._replace(weight_class="")}
    assert multipliers.weight_multipliers(unknown, plain)["w"] == (1, 1, 1)


@pytest.mark.parametrize("num_steps", [3])
def test_updates_are_those_of_adam_with_own_rate_epsilon_and_decay(num_steps):
    config = OptimizerConfig(adam_eps=0.3, gradient_clipping_threshold=0, adam_weight_decay=0.1)
    optimizer = make_optimizer(config, optax.constant_schedule(0.01), WEIGHTS)
    draw = np.random.default_rng(0).normal
    params = {name: draw(size=weight.shape) for name, weight in WEIGHTS.items()}
    gradients = [
        {name: draw(size=weight.shape) for name, weight in WEIGHTS.items()}
        for _ in range(num_steps)
    ]
    actual = jax.tree.map(jnp.asarray, params)
    state = optimizer.init(actual)
    for gradient in gradients:
        updates, state = optimizer.update(jax.tree.map(jnp.asarray, gradient), state, actual)
        actual = optax.apply_updates(actual, updates)
    rates = of("adamw", "learning_rate")
    epsilons = of("adamw", "epsilon")
    for name, weight in WEIGHTS.items():
        p, m, v = params[name], 0.0, 0.0
        decay = 0.0 if weight.weight_class == "vector" else 0.1 / rates[name]
        for step, gradient in enumerate(gradients, start=1):
            g = gradient[name]
            m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g**2
            direction = m / (1 - 0.9**step)
            direction /= np.sqrt(v / (1 - 0.95**step)) + 0.3 * epsilons[name]
            p = p - 0.01 * rates[name] * (direction + decay * p)
        np.testing.assert_allclose(actual[name], p, rtol=1e-5, atol=1e-6)


def test_both_forms_of_a_readout_take_equal_steps():
    """Logits of W / M with (std 1, rate 1) are those of W with (std 1 / M, rate 1 / M)."""
    draw = np.random.default_rng(0).normal
    h_BD = jnp.asarray(draw(size=(8, 64)))
    targets_B = jnp.arange(8)
    weight = jnp.asarray(draw(size=(64, 32)), jnp.float32)

    def trained(kernel, factor, rate):
        def loss(kernel):
            logits = factor * h_BD @ kernel
            return optax.softmax_cross_entropy_with_integer_labels(logits, targets_B).mean()

        adam = optax.adam(rate, eps=1e-12)
        state = adam.init(kernel)
        for _ in range(3):
            updates, state = adam.update(jax.grad(loss)(kernel), state)
            kernel = optax.apply_updates(kernel, updates)
        return factor * h_BD @ kernel

    multiplied = trained(weight, 1 / M, 0.1)
    absorbed = trained(weight / M, 1.0, 0.1 * of("adamw", "learning_rate")["head"])
    np.testing.assert_allclose(multiplied, absorbed, rtol=1e-4, atol=1e-5)
