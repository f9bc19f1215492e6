"""Decay masks, overrides per name, frozen parameters, clipping, and the update rules."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from MaxText.layers.assembly.model import Model
from MaxText.parallelism.logical_sharding import ParamSpec
from MaxText.training.optimizer import make_optimizer
from MaxText.training.optimizers.parameter_trees import map_param_names
from MaxText.training.schedule import learning_rate_schedule
from tests.growth.growing import by_name
from tests.small_models import tiny_config

RATE = 0.01
PLAIN = {"lr_schedule_type": "constant", "gradient_clipping_threshold": 0.0, "learning_rate": RATE}
MUDD = {"block": "muddformer", "scan_layers": False, "mlp_dim_multiple": 8}


@functools.cache
def parameters_of(section):
    return Model(section).parameters


def optimizer_of(block="llama2", only=None, **keys):
    """The optimizer and the parameters of a model, or one of them."""
    config = tiny_config(block, **PLAIN | keys)
    parameters = parameters_of(config.model)
    if only:
        parameters = {only: parameters[only]}
    schedule = learning_rate_schedule(config.schedule)
    return make_optimizer(config.optimizer, schedule, parameters), parameters


def steps_of(gradients, **keys):
    """(Updates by name for each gradient, state), for parameters of value 2.

    Args:
      gradients: one value for all elements, or a function from a shape.
    """
    optimizer, parameters = optimizer_of(**keys)
    params = map_param_names(parameters, lambda name: jnp.full(parameters[name].shape, 2.0))
    update, state, found = jax.jit(optimizer.update), optimizer.init(params), []
    for gradient in gradients:
        make = gradient if callable(gradient) else functools.partial(jnp.full, fill_value=gradient)
        given = map_param_names(parameters, lambda name: make(parameters[name].shape))  # noqa: B023
        updates, state = update(given, state, params)
        found.append(by_name(updates))
    return found, state


def updates_of(gradient=1.0, **keys):
    return steps_of([gradient], **keys)[0][0]


def test_decay_mask_and_overrides_by_name():
    for update in updates_of(adam_weight_decay=0.5).values():
        np.testing.assert_allclose(update, -RATE * (1 + 0.5 * 2), rtol=1e-5)
    updates = updates_of(
        **MUDD,
        adam_weight_decay=0.5,
        adamw_mask=["scale", "static"],
        # The first match wins, also over the mask.
        weight_decay_overrides=[["layers/0/mlp", 0.25], ["layers/0", 0.75], ["3/wi|1/.*_k", 0.0]],
        learning_rate_overrides=[["^connections/", 0.1], ["after/2", 7.0], ["/0/.*query", 3.0]],
    )
    expected = {
        "connections/after/2/static": -RATE * 0.1,
        "connections/after/3/wi/kernel": -RATE * 0.1,
        "connections/after/3/wo/kernel": -RATE * 0.1 * 2,
        "layers/0/mlp/wo/kernel": -RATE * 1.5,
        "layers/0/self_attention/out/kernel": -RATE * 2.5,
        "layers/0/self_attention/query/kernel": -RATE * 3 * 2.5,
        "layers/0/pre_mlp_layer_norm/scale": -RATE * 2.5,
        "layers/2/mlp/wo/kernel": -RATE * 2,
        "layers/1/pre_self_attention_layer_norm_q/scale": -RATE,
    }
    for name, value in expected.items():
        np.testing.assert_allclose(updates[name], value, rtol=1e-5, err_msg=name)


def test_frozen_parameters_do_not_move():
    updates = updates_of(trainable_parameters_mask=["self_attention"])
    moved = {name for name, update in updates.items() if np.any(update)}
    assert moved == {name for name in updates if "self_attention" in name}
    with pytest.raises(ValueError, match="trainable_parameters_mask"):
        updates_of(trainable_parameters_mask=["no_such_parameter"])


def test_clipping_by_norm_and_by_value():
    keys = {"opt_type": "sgd", "momentum": 0.0, "nesterov": False, "adam_weight_decay": 0.0}
    by_norm = updates_of(3.0, gradient_clipping_threshold=1.0, **keys)
    by_value = updates_of(
        3.0, gradient_clipping_threshold=0.5, gradient_clipping_type="value", **keys
    )
    size = sum(update.size for update in by_norm.values())
    for name in by_norm:
        np.testing.assert_allclose(by_norm[name], -RATE / np.sqrt(size), rtol=1e-4)
        np.testing.assert_allclose(by_value[name], -RATE * 0.5, rtol=1e-5)


def test_switches_keep_the_paths_of_the_optimizer_state():
    """Else a resumed run whose clipping or decay changed could not read its checkpoint."""

    def structure(**keys):
        optimizer, parameters = optimizer_of(**keys)
        params = map_param_names(parameters, lambda name: jnp.zeros(()))
        return jax.tree.structure(jax.eval_shape(optimizer.init, params))

    plain = structure()
    assert plain == structure(gradient_clipping_threshold=1.0)
    assert plain == structure(adam_weight_decay=0.0)
    assert plain == structure(learning_rate_overrides=[["mlp", 0.5]])
    assert plain == structure(adam_bias_correction=False)


def clipped(gradient, threshold=0.0, kind="global_norm"):
    if threshold and kind == "global_norm":
        return gradient * min(1.0, threshold / np.sqrt((gradient**2).sum()))
    return np.clip(gradient, -threshold, threshold) if threshold else gradient


def adam(gradients, b1=0.7, b2=0.9, eps=0.05, eps_root=0.02, corrected=True, nesterov=False):
    """Kingma and Ba 2015, algorithm 1; with nesterov Dozat 2016."""
    m = v = 0.0
    for count, gradient in enumerate(gradients, 1):
        m, v = b1 * m + (1 - b1) * gradient, b2 * v + (1 - b2) * gradient**2
        first, second = (m / (1 - b1**count), v / (1 - b2**count)) if corrected else (m, v)
        if nesterov:
            first = b1 * m / (1 - b1 ** (count + 1)) + (1 - b1) * gradient / (1 - b1**count)
        yield first / (np.sqrt(second + eps_root) + eps)


def lion(gradients, b1=0.7, b2=0.9):
    """Chen et al. 2023, algorithm 2."""
    m = 0.0
    for gradient in gradients:
        yield np.sign(b1 * m + (1 - b1) * gradient)
        m = b2 * m + (1 - b2) * gradient


def sgd(gradients, momentum=0.5, nesterov=False):
    trace = 0.0
    for gradient in gradients:
        trace = momentum * trace + gradient
        yield momentum * trace + gradient if nesterov else trace


def muon(gradients, beta=0.8, eps=0.05, nesterov=False):
    """Jordan et al. 2024, of each matrix [inputs, outputs], with the size of Liu et al. 2025."""
    m = 0.0
    for count, gradient in enumerate(gradients, 1):
        m = beta * m + (1 - beta) * gradient
        x = m / (1 - beta**count)
        if nesterov:
            x = beta * m / (1 - beta ** (count + 1)) + (1 - beta) * gradient / (1 - beta**count)
        x = x / (np.sqrt((x**2).sum((-2, -1), keepdims=True)) + eps)
        for _ in range(5):
            gram = x @ x.swapaxes(-2, -1)
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        yield x * 0.2 * np.sqrt(max(x.shape[-2:]))


ADAM = {"adam_b1": 0.7, "adam_b2": 0.9, "adam_eps": 0.05, "adam_eps_root": 0.02}
MUON = ADAM | {"opt_type": "muon", "muon_beta": 0.8, "nesterov": False}
WO, NORM, HEAD = "layers/mlp/wo/kernel", "decoder_norm/scale", "logits_dense/kernel"


@pytest.mark.parametrize(
    ("rule", "keys", "name", "clipping"),
    [
        (adam, {}, WO, ()),
        (adam, {}, NORM, (0.5,)),
        (adam, {}, NORM, (0.5, "value")),
        (functools.partial(adam, corrected=False), {"adam_bias_correction": False}, NORM, ()),
        (lion, {"opt_type": "lion"}, WO, (0.5, "value")),
        (sgd, {"opt_type": "sgd", "momentum": 0.5, "nesterov": False}, NORM, (0.5,)),
        (muon, MUON, WO, ()),
        (functools.partial(muon, nesterov=True), MUON | {"nesterov": True}, WO, (0.5, "value")),
        (adam, MUON, NORM, ()),
        (functools.partial(adam, nesterov=True), MUON | {"nesterov": True}, HEAD, ()),
    ],
)
def test_updates_are_those_of_the_papers(rule, keys, name, clipping):
    """Gradients that differ by element and step, clipped before the moments see them."""
    shape = parameters_of(tiny_config("llama2", **PLAIN).model)[name].shape
    draw = np.random.default_rng(0).normal
    gradients = [scale * draw(size=shape) for scale in (1.0, 3.0, 0.2, 1.0)]
    linear = {"lr_schedule_type": "linear", "adam_weight_decay": 0.1}
    names = ("gradient_clipping_threshold", "gradient_clipping_type")
    options = dict(zip(names, clipping, strict=False))
    keys = ADAM | linear | options | keys
    given = [lambda _, gradient=gradient: jnp.float32(gradient) for gradient in gradients]
    found, _ = steps_of(given, only=name, **keys)
    schedule = learning_rate_schedule(tiny_config(**PLAIN | linear).schedule)
    directions = rule([clipped(gradient, *clipping) for gradient in gradients])
    for step, (updates, direction) in enumerate(zip(found, directions, strict=True)):
        expected = -float(schedule(step)) * (direction + 0.1 * 2)
        np.testing.assert_allclose(updates[name], expected, rtol=1e-3, atol=2e-5 * RATE)


@pytest.mark.parametrize("opt_type", ["adamw", "lion", "muon"])
def test_the_first_moment_has_its_format(opt_type):
    for dtype, keys in (("float32", {}), ("bfloat16", {"mu_dtype": "bfloat16"})):
        optimizer, parameters = optimizer_of(opt_type=opt_type, **keys)
        params = map_param_names(parameters, lambda name: jnp.zeros(parameters[name].shape))  # noqa: B023
        leaves = jax.tree_util.tree_leaves_with_path(jax.eval_shape(optimizer.init, params))
        dtypes = {}
        for path, leaf in leaves:
            for moment in ("mu", "nu"):
                if f".{moment}[" in jax.tree_util.keystr(path):
                    dtypes.setdefault(moment, set()).add(str(leaf.dtype))
        assert dtypes["mu"] == {dtype}
        assert dtypes.get("nu", {"float32"}) == {"float32"}


def test_lion_and_momentum_by_hand():
    keys = {"only": "layers/mlp/wo/kernel", "adam_weight_decay": 0.0}
    (signs,) = updates_of(-3.0, opt_type="lion", **keys).values()
    np.testing.assert_allclose(signs, RATE, rtol=1e-5)
    for nesterov, expected in ((False, [1, 0.5 - 2]), (True, [1.5, 0.25 - 3])):
        found, _ = steps_of([1.0, -2.0], opt_type="sgd", momentum=0.5, nesterov=nesterov, **keys)
        for updates, value in zip(found, expected, strict=True):
            (update,) = updates.values()
            np.testing.assert_allclose(update, -RATE * value, rtol=1e-5)


def test_muon_orthogonalizes_each_matrix_and_leaves_the_rest_to_adam():
    def random(shape):
        return jax.random.normal(jax.random.key(sum(shape)), shape)

    updates = updates_of(random, opt_type="muon", adam_weight_decay=0.0, num_experts=2)
    for name, shape in (
        ("layers/self_attention/query/kernel", (32, 32)),
        ("layers/self_attention/out/kernel", (32, 32)),
        ("layers/mlp/experts/wi_0", (32, 64)),  # of each layer and expert
    ):
        size = RATE * 0.2 * np.sqrt(max(shape))  # Adam's usual size, for such a matrix
        matrices = updates[name].reshape(-1, *shape)
        assert len(matrices) == (6 if "experts" in name else 3)
        for matrix in matrices:
            values = np.linalg.svd(matrix / size, compute_uv=False)
            assert values.max() < 1.3
            assert values.min() > 0.2
    # Adam with Nesterov's look-ahead: each element of the first update has one and the same size.
    connections = updates_of(random, **MUDD, opt_type="muon", adam_weight_decay=0.0)
    for found, name in (
        (updates, "token_embedder/embedding"),
        (updates, "logits_dense/kernel"),
        (connections, "connections/after/2/static"),
        (connections, "connections/after/2/wo/kernel"),
    ):
        np.testing.assert_allclose(np.abs(found[name]), np.abs(found[name]).mean(), rtol=1e-3)
    assert np.ptp(np.abs(connections["connections/after/2/wi/kernel"])) > 0.1 * RATE


def test_adam_without_bias_correction_by_hand():
    """GPT-Neo: m / (sqrt(v) + eps) + decay * parameter."""
    name, gradients = "layers/mlp/wo/kernel", [0.5, -1.0, 0.25]
    keys = {"only": name, "learning_rate": 1.0, "adam_weight_decay": 0.1}
    found, _ = steps_of(gradients, adam_bias_correction=False, adam_b1=0.9, adam_b2=0.95, **keys)
    m = v = 0.0
    for gradient, updates in zip(gradients, found, strict=True):
        m, v = 0.9 * m + 0.1 * gradient, 0.95 * v + 0.05 * gradient**2
        np.testing.assert_allclose(updates[name], -(m / (v**0.5 + 1e-8) + 0.1 * 2), rtol=1e-5)
    corrected = updates_of(gradients[0], **keys)
    np.testing.assert_allclose(corrected[name] + 0.2, -1, rtol=1e-5)


def test_adafactor_has_its_keys_and_follows_the_schedule():
    """Against optax.adafactor, whose learning rate is a schedule here too."""
    name, linear = "logits_dense/kernel", {"lr_schedule_type": "linear", "learning_rate": 0.1}
    gradients = [functools.partial(jax.random.normal, jax.random.key(step)) for step in range(3)]
    keys = {"only": name, "opt_type": "adafactor", "adam_weight_decay": 0.0}
    own = {"adafactor.decay_exponent": 0.7, "adafactor.epsilon_gradient": 1e-6}
    own |= {"adafactor.clipping_threshold": 0.5, "adafactor.min_dim_size_to_factor": 8}
    found, state = steps_of(gradients, **keys, **own, **linear)
    schedule = learning_rate_schedule(tiny_config(**linear).schedule)
    library = optax.adafactor(
        schedule, min_dim_size_to_factor=8, decay_rate=0.7, eps=1e-6, clipping_threshold=0.5
    )
    params = jnp.full(found[0][name].shape, 2.0)
    # The factors are a row and a column in place of the matrix.
    assert params.size not in {leaf.size for leaf in jax.tree.leaves(state)}
    state = library.init(params)
    for gradient, updates in zip(gradients, found, strict=True):
        expected, state = library.update(gradient(params.shape), state, params)
        np.testing.assert_allclose(updates[name], expected, rtol=1e-5)
    # Updates are as large as the parameter or as this, or a mean over them.
    for more, expected in (
        ({}, [2, -2]),
        ({"adafactor.epsilon_parameter": 5.0}, [5, -5]),
        ({"adafactor.momentum": 0.9}, [0.1 * 2, 0.09 * 2 - 0.1 * 2]),
    ):
        found, _ = steps_of([1.0, -1.0], **keys, **more)
        for updates, value in zip(found, expected, strict=True):
            np.testing.assert_allclose(updates[name], -RATE * value, rtol=1e-4)


# --- Layers, stacked or not -----------------------------------------------------------------------

LAYER_SCALES = (1.0, 3.0, 0.3, 10.0)  # unlike on purpose: a statistic over all would show
# Of one layer: a matrix, a kernel of heads, experts, a norm, and norms' single scales.
LAYER_SPECS = {
    "mlp/wo/kernel": ParamSpec((12, 8), jnp.float32, ("mlp", "embed"), 1),
    "self_attention/query/kernel": ParamSpec((8, 4, 2), jnp.float32, ("embed", "heads", None), 1),
    "mlp/experts/wi_0": ParamSpec((2, 8, 12), jnp.float32, ("exp", "embed", "mlp"), 1),
    "norm/scale": ParamSpec((8,), jnp.float32, ("norm",), 0),
    "scale_norm/scale": ParamSpec((1,), jnp.float32, ("norm",), 0),
}


def layer_arrays(seed):
    """An array for each layer and parameter, by layer and name."""
    draw = np.random.default_rng(seed).normal
    return [
        {name: np.float32(scale * draw(size=spec.shape)) for name, spec in LAYER_SPECS.items()}
        for scale in LAYER_SCALES
    ]


def updates_of_layers(layers, gradients, *, stacked, **keys):
    """The updates of each layer for several gradients, with parameters that move."""
    options: dict[str, Any] = PLAIN | {"adam_weight_decay": 0.0} | keys
    config = tiny_config(**options)
    stack_axis = ("layers",) if stacked else ()
    prefixes = ["layers/"] if stacked else [f"layers/{i}/" for i in range(len(layers))]
    specs = {
        prefix + name: spec._replace(
            shape=(len(layers),) * stacked + spec.shape, logical_axes=stack_axis + spec.logical_axes
        )
        for prefix in prefixes
        for name, spec in LAYER_SPECS.items()
    }

    def stored(arrays):
        if stacked:
            values = {
                f"layers/{name}": np.stack([layer[name] for layer in arrays])
                for name in LAYER_SPECS
            }
        else:
            values = {
                f"layers/{i}/{name}": layer[name]
                for i, layer in enumerate(arrays)
                for name in LAYER_SPECS
            }
        return map_param_names(specs, lambda name: jnp.asarray(values[name]))

    schedule = learning_rate_schedule(config.schedule)
    optimizer = make_optimizer(config.optimizer, schedule, specs)
    params = stored(layers)
    state, update, found = optimizer.init(params), jax.jit(optimizer.update), []
    for gradient in gradients:
        updates, state = update(stored(gradient), state, params)
        params = optax.apply_updates(params, updates)
        named = by_name(updates)
        found.append(
            [
                {
                    name: named[f"layers/{name}"][i] if stacked else named[f"layers/{i}/{name}"]
                    for name in LAYER_SPECS
                }
                for i in range(len(layers))
            ]
        )
    return found


def adafactor_by_the_paper(parameter, gradients, min_size):
    """Updates of one parameter (Shazeer and Stern 2018, algorithms 4 and 5), in float64."""
    parameter, moment, updates = np.float64(parameter), None, []
    factored = parameter.ndim >= 2 and sorted(parameter.shape)[-2] >= min_size
    *_, columns, rows = np.argsort(parameter.shape) if factored else (None, None)
    for step, gradient in enumerate(gradients, start=1):
        decay = 1 - step**-0.8
        square = np.float64(gradient) ** 2 + 1e-30
        if factored:
            now = [square.mean(axis, keepdims=True) for axis in (rows, columns)]
        else:
            now = [square]
        if moment is None:
            moment = [np.zeros_like(one) for one in now]
        moment = [decay * old + (1 - decay) * new for old, new in zip(moment, now, strict=True)]
        second = moment[0]
        if factored:
            second = moment[0] * moment[1] / moment[0].mean(columns, keepdims=True)
        update = gradient / np.sqrt(second)
        update /= max(1.0, np.sqrt(np.mean(update**2)))
        update *= -RATE * max(1e-3, np.sqrt(np.mean(parameter**2)))
        parameter = parameter + update
        updates.append(update)
    return updates


@pytest.mark.parametrize("min_size", [4, 128])
def test_adafactor_of_stacked_layers_is_that_of_each(min_size):
    layers, gradients = layer_arrays(0), [layer_arrays(seed) for seed in range(1, 6)]
    keys = {"opt_type": "adafactor", "adafactor.min_dim_size_to_factor": min_size}
    found = {
        stacked: updates_of_layers(layers, gradients, stacked=stacked, **keys)
        for stacked in (False, True)
    }
    for i, layer in enumerate(layers):
        for name, parameter in layer.items():
            expected = adafactor_by_the_paper(
                parameter, [gradient[i][name] for gradient in gradients], min_size
            )
            for step, update in enumerate(expected):
                for updates in found.values():
                    np.testing.assert_allclose(updates[step][i][name], update, rtol=2e-5, atol=1e-8)


@pytest.mark.parametrize("opt_type", ["adamw", "lion", "sgd", "muon"])
def test_updates_of_stacked_layers_are_those_of_each(opt_type):
    layers, gradients = layer_arrays(0), [layer_arrays(seed) for seed in range(1, 4)]
    keys = {"opt_type": opt_type}
    separate = updates_of_layers(layers, gradients, stacked=False, **keys)
    together = updates_of_layers(layers, gradients, stacked=True, **keys)
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-7),
        separate,
        together,
    )
