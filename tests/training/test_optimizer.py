"""Decay masks, overrides per name, frozen parameters, clipping, and Muon's matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from MaxText.layers.model import Model
from MaxText.training.optimizer import make_optimizer, per_parameter
from MaxText.training.schedule import learning_rate_schedule
from tests.small_models import tiny_config

RATE = 0.01


def updates_of(gradient=1.0, block="llama2", **keys):
    """Name -> update of each parameter (value 2) after one step with gradients of one value."""
    keys = {"lr_schedule_type": "constant", "gradient_clipping_threshold": 0.0} | keys
    config = tiny_config(block, learning_rate=RATE, **keys)
    parameters = Model(config.model).parameters
    optimizer = make_optimizer(
        config.optimizer, learning_rate_schedule(config.schedule), parameters
    )
    params = per_parameter(parameters, lambda name: jnp.full(parameters[name].shape, 2.0))
    gradients = jax.tree.map(lambda p: jnp.full(p.shape, gradient), params)
    updates, _ = jax.jit(optimizer.update)(gradients, optimizer.init(params), params)
    return {
        "/".join(entry.key for entry in path): np.asarray(update)
        for path, update in jax.tree_util.tree_leaves_with_path(updates)
    }


def test_adamw_decays_everything_by_default():
    for update in updates_of(adam_weight_decay=0.5).values():
        np.testing.assert_allclose(update, -RATE * (1 + 0.5 * 2), rtol=1e-5)


def test_decay_mask_and_overrides_by_name():
    updates = updates_of(
        adam_weight_decay=0.5,
        adamw_mask=["scale"],
        weight_decay_overrides=[["mlp/wo", 0.25]],
        learning_rate_overrides=[["logits_dense", 0.1]],
    )
    expected = {
        "decoder_norm/scale": -RATE,
        "layers/mlp/wo/kernel": -RATE * 1.5,
        "layers/mlp/wi_0/kernel": -RATE * 2,
        "logits_dense/kernel": -RATE * 0.1 * 2,
    }
    for name, value in expected.items():
        np.testing.assert_allclose(updates[name], value, rtol=1e-5, err_msg=name)


def test_names_of_dense_connections_and_of_layers_that_differ():
    mudd = {"block": "muddformer", "scan_layers": False, "mlp_dim_multiple": 8}
    updates = updates_of(
        **mudd,
        adam_weight_decay=0.5,
        adamw_mask=["scale", "static"],
        weight_decay_overrides=[["layers/0/mlp", 0.25]],
        learning_rate_overrides=[["^connections/", 0.1]],
    )
    expected = {
        "connections/after/2/static": -RATE * 0.1,
        "connections/after/3/wi/kernel": -RATE * 0.1 * 2,
        "layers/0/mlp/wo/kernel": -RATE * 1.5,
        "layers/2/mlp/wo/kernel": -RATE * 2,
        "layers/1/pre_self_attention_layer_norm_q/scale": -RATE,
    }
    for name, value in expected.items():
        np.testing.assert_allclose(updates[name], value, rtol=1e-5, err_msg=name)
    alone = updates_of(**mudd, trainable_parameters_mask=["^connections/"])
    assert {name for name, update in alone.items() if np.any(update)} == {
        name for name in alone if name.startswith("connections/")
    }


def test_frozen_parameters_do_not_move():
    updates = updates_of(trainable_parameters_mask=["self_attention"])
    moved = {name for name, update in updates.items() if np.any(update)}
    assert moved == {name for name in updates if "self_attention" in name}


def test_a_mask_that_matches_nothing_is_an_error():
    with pytest.raises(ValueError, match="matches none"):
        updates_of(trainable_parameters_mask=["no_such_parameter"])


def test_clipping_by_norm_and_by_value():
    config = tiny_config()
    size = sum(info.size for info in Model(config.model).parameters.values())
    plain = {"opt_type": "sgd", "momentum": 0.0, "nesterov": False, "adam_weight_decay": 0.0}
    by_norm = updates_of(3.0, gradient_clipping_threshold=1.0, **plain)
    by_value = updates_of(
        3.0, gradient_clipping_threshold=0.5, gradient_clipping_type="value", **plain
    )
    for name in by_norm:
        np.testing.assert_allclose(by_norm[name], -RATE / np.sqrt(size), rtol=1e-4)
        np.testing.assert_allclose(by_value[name], -RATE * 0.5, rtol=1e-5)


def test_switches_keep_the_places_of_the_optimizer_state():
    """Else a resumed run whose clipping or decay changed could not read its checkpoint."""
    config = tiny_config()
    parameters = Model(config.model).parameters

    def structure(**keys):
        config = tiny_config(**keys)
        optimizer = make_optimizer(
            config.optimizer, learning_rate_schedule(config.schedule), parameters
        )
        return jax.tree.structure(jax.eval_shape(optimizer.init, Model(config.model).abstract))

    plain = structure()
    assert plain == structure(gradient_clipping_threshold=0.0)
    assert plain == structure(adam_weight_decay=0.0)
    assert plain == structure(learning_rate_overrides=[["mlp", 0.5]])


def test_muon_orthogonalises_each_layers_matrix_and_leaves_the_rest_to_adam():
    config = tiny_config(
        opt_type="muon", adam_weight_decay=0.0, learning_rate=RATE, lr_schedule_type="constant",
        gradient_clipping_threshold=0.0,
    )  # fmt: skip
    model = Model(config.model)
    optimizer = make_optimizer(
        config.optimizer, learning_rate_schedule(config.schedule), model.parameters
    )
    params = model.initialize(jax.random.key(0))
    gradients = jax.tree.map(lambda p: jax.random.normal(jax.random.key(p.size), p.shape), params)
    updates, _ = jax.jit(optimizer.update)(gradients, optimizer.init(params), params)
    attention = updates["layers"]["self_attention"]
    size = RATE * 0.2 * np.sqrt(32)  # Adam's usual size, for a matrix of 32 x 32
    for layer in np.asarray(attention["query"]["kernel"]):
        values = np.linalg.svd(layer.reshape(32, 32) / size, compute_uv=False)
        assert values.max() < 1.3
        assert values.min() > 0.2
    out = np.asarray(attention["out"]["kernel"])[0].reshape(32, 32)
    assert np.linalg.svd(out / size, compute_uv=False).max() < 1.3
    # Adam with Nesterov's look-ahead: each element of the first update has one and the same size.
    for table in (updates["token_embedder"]["embedding"], updates["logits_dense"]["kernel"]):
        np.testing.assert_allclose(np.abs(table), np.abs(table).mean(), rtol=1e-3)


def steps_of(gradients, **keys):
    """Updates of every step, for parameters of value 2 and gradients [step] of one value each."""
    keys = {"lr_schedule_type": "constant", "gradient_clipping_threshold": 0.0} | keys
    config = tiny_config(learning_rate=1.0, **keys)
    parameters = Model(config.model).parameters
    optimizer = make_optimizer(
        config.optimizer, learning_rate_schedule(config.schedule), parameters
    )
    params = per_parameter(parameters, lambda name: jnp.full(parameters[name].shape, 2.0))
    update, state, found = jax.jit(optimizer.update), optimizer.init(params), []
    for gradient in gradients:
        given = jax.tree.map(lambda p: jnp.full(p.shape, gradient), params)  # noqa: B023
        updates, state = update(given, state, params)
        found.append(np.asarray(updates["layers"]["mlp"]["wo"]["kernel"]))
    return found, state


def test_adam_without_bias_correction_by_hand():
    """GPT-Neo: m / (sqrt(v) + eps) + decay * parameter."""
    gradients = [0.5, -1.0, 0.25]
    found, state = steps_of(
        gradients, adam_bias_correction=False, adam_b1=0.9, adam_b2=0.95, adam_weight_decay=0.1
    )
    m = v = 0.0
    for gradient, update in zip(gradients, found, strict=True):
        m, v = 0.9 * m + 0.1 * gradient, 0.95 * v + 0.05 * gradient**2
        np.testing.assert_allclose(update, -(m / (v**0.5 + 1e-8) + 0.1 * 2), rtol=1e-5)
    # The first step is (1 - b1) / sqrt(1 - b2) long, and 1 with the correction.
    np.testing.assert_allclose(found[0] + 0.2, -0.1 / 0.05**0.5, rtol=1e-5)
    corrected, same = steps_of(gradients[:1], adam_weight_decay=0.1)
    np.testing.assert_allclose(corrected[0] + 0.2, -1, rtol=1e-5)
    assert jax.tree.structure(state) == jax.tree.structure(same)


@pytest.mark.parametrize("factored", [True, False])
def test_adafactor_has_its_keys_and_follows_the_schedule(factored):
    """Against optax.adafactor, whose learning rate is a schedule here too."""
    config = tiny_config(
        opt_type="adafactor",
        adafactor_decay_exponent=0.7,
        adafactor_epsilon_gradient=1e-6,
        adafactor_clipping_threshold=0.5,
        adafactor_min_dim_size_to_factor=8 if factored else 128,
        adam_weight_decay=0.0,
        gradient_clipping_threshold=0.0,
        lr_schedule_type="linear",
        learning_rate=0.1,
    )
    parameters = {
        name: info
        for name, info in Model(config.model).parameters.items()
        if name == "logits_dense/kernel"
    }
    schedule = learning_rate_schedule(config.schedule)
    ours = make_optimizer(config.optimizer, schedule, parameters)
    theirs = optax.adafactor(
        schedule, min_dim_size_to_factor=8 if factored else 128, decay_rate=0.7, eps=1e-6,
        clipping_threshold=0.5,
    )  # fmt: skip
    shape = parameters["logits_dense/kernel"].shape
    params = per_parameter(parameters, lambda name: jax.random.normal(jax.random.key(0), shape))
    states = [ours.init(params), theirs.init(params)]
    # The factors are a row and a column in place of the matrix.
    sizes = {leaf.size for leaf in jax.tree.leaves(states[0])}
    assert (params["logits_dense"]["kernel"].size in sizes) != factored
    sizes = []
    for step in range(3):
        gradients = jax.tree.map(
            lambda p: jax.random.normal(jax.random.key(step), p.shape),  # noqa: B023
            params,
        )
        updates = []
        for place, rule in enumerate((ours, theirs)):
            update, states[place] = rule.update(gradients, states[place], params)
            updates.append(np.asarray(update["logits_dense"]["kernel"]))
        np.testing.assert_allclose(*updates, rtol=1e-5)
        sizes.append(np.abs(updates[0]).max())
    assert sizes[0] > 0


def test_adafactor_keeps_a_mean_over_updates():
    keys = {"opt_type": "adafactor", "adam_weight_decay": 0.0}
    plain, _ = steps_of([1.0, -1.0], **keys)
    mean, _ = steps_of([1.0, -1.0], adafactor_momentum=0.9, **keys)
    np.testing.assert_allclose(mean[0], 0.1 * plain[0], rtol=1e-5)
    np.testing.assert_allclose(mean[1], 0.1 * plain[1] + 0.09 * plain[0], rtol=1e-5, atol=1e-6)


def test_adafactor_takes_small_parameters_as_larger():
    keys = {"opt_type": "adafactor", "adam_weight_decay": 0.0}
    usual, _ = steps_of([1.0], **keys)
    np.testing.assert_allclose(usual[0], -2.0, rtol=1e-5)  # as large as the parameter
    bounded, _ = steps_of([1.0], adafactor_epsilon_parameter=5.0, **keys)
    np.testing.assert_allclose(bounded[0], -5.0, rtol=1e-5)


def test_muon_trains_the_first_product_of_dense_connections_and_adam_the_second():
    config = tiny_config("muddformer", opt_type="muon", scan_layers=False, mlp_dim_multiple=8)
    parameters = Model(config.model).parameters
    optimizer = make_optimizer(
        config.optimizer, learning_rate_schedule(config.schedule), parameters
    )
    state = jax.eval_shape(optimizer.init, Model(config.model).abstract)
    # Second moments are Adam's alone.
    paths = jax.tree_util.tree_leaves_with_path(state)
    names = ["/".join(str(getattr(part, "key", getattr(part, "name", "")))
                      for part in path) for path, _ in paths]  # fmt: skip
    of_adam = {name.partition("nu/")[2] for name in names if "nu/" in name}
    of_muon = set(parameters) - of_adam
    assert {name.rpartition("/")[0].rpartition("/")[2] for name in of_muon} == {
        "wi", "query", "key", "value", "out", "wi_0", "wi_1", "wo",
    }  # fmt: skip
    for depth in (1, 2, 3):
        assert f"connections/after/{depth}/wi/kernel" in of_muon
        assert f"connections/after/{depth}/wo/kernel" in of_adam
        assert f"connections/after/{depth}/static" in of_adam
        assert f"layers/{depth - 1}/mlp/wo/kernel" in of_muon
