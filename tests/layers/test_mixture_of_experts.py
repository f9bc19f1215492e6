"""Experts against plain definitions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.layers.context import Context
from MaxText.layers.model import Model
from MaxText.training.objective import loss_sums, num_tokens
from tests.small_models import random_batch, tiny_config, trainer

WRITTEN_OUT = {"scan_layers": False}


@functools.cache
def case(**keys):
    config = tiny_config("llama2", num_experts=4, num_experts_per_tok=2, **keys)
    model = Model(config.model)
    params = jax.jit(model.initialize)(jax.random.key(3))
    # A router that decides: gates are far apart.
    gate = params["layers"]["mlp"]["gate"]
    gate["kernel"] = 8 * gate["kernel"]
    return config, model, params


def layer_of(model, params):
    """The first layer's experts, and its weights as NumPy arrays."""
    first = jax.tree.map(lambda leaf: leaf[0], params["layers"])
    module = model.merge({**params, "layers": first}).layers.mlp
    return module, jax.tree.map(lambda x: np.asarray(x, np.float64), first["mlp"])


def silu(x):
    return x / (1 + np.exp(-x))


def by_hand(weights, x_SD, capacity=None, kept=None):
    """Token by token: first choices of all tokens take places before second ones."""
    scores = x_SD @ weights["gate"]["kernel"]
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    order = np.argsort(-p, axis=-1)[:, :2]
    gates = np.take_along_axis(p, order, 1)
    gates /= gates.sum(-1, keepdims=True)
    room = np.full(p.shape[1], len(x_SD) if capacity is None else capacity)
    y, drops = np.zeros_like(x_SD), 0
    experts = weights["experts"]
    for choice in range(2):
        for token, x in enumerate(x_SD):
            if kept is not None and not kept[token]:
                continue
            expert = order[token, choice]
            if room[expert] == 0:
                drops += 1
                continue
            room[expert] -= 1
            hidden = silu(x @ experts["wi_0"][expert]) * (x @ experts["wi_1"][expert])
            y[token] += gates[token, choice] * (hidden @ experts["wo"][expert])
    return y, drops


@pytest.mark.parametrize("factor", [-1.0, 0.5, 1.25])
def test_tokens_visit_their_experts(factor):
    _, model, params = case(capacity_factor=factor)
    module, weights = layer_of(model, params)
    x = np.random.default_rng(0).normal(size=(3, 16, 32)).astype(np.float32)
    segments = np.ones((3, 16), np.int32)
    segments[:, 13:] = 0  # padding takes no places
    context = Context(training=True, segments_BT=jnp.asarray(segments))
    with jax.default_matmul_precision("highest"):
        y, scalars = module(jnp.asarray(x), context)
    capacity = None if factor < 0 else int(16 * factor / 4)
    found = [by_hand(weights, row, capacity, segments[0] > 0) for row in x.astype(np.float64)]
    np.testing.assert_allclose(y, [row for row, _ in found], atol=1e-5)
    drops = sum(count for _, count in found)
    assert (drops > 0) == (factor > 0)
    # E sum_e f_e P_e of each row, over the tokens that are there.
    total = 0.0
    for row in x.astype(np.float64):
        scores = row[:13] @ weights["gate"]["kernel"]
        p = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
        first = np.bincount(p.argmax(-1), minlength=4) / 13
        total += 13 * 4 * (first * p.mean(0)).sum()
    np.testing.assert_allclose(scalars["moe_lb_loss"], 0.01 * total, rtol=1e-4)


def test_outside_of_training_no_token_is_left_out():
    _, model, params = case(capacity_factor=0.25)
    module, weights = layer_of(model, params)
    x = np.random.default_rng(0).normal(size=(1, 16, 32)).astype(np.float32)
    y, _ = module(jnp.asarray(x), Context())
    np.testing.assert_allclose(y[0], by_hand(weights, x[0].astype(np.float64))[0], atol=1e-4)


def test_scored_tokens_do_not_depend_on_padding():
    _, model, params = case(eval_capacity_factor=0.5)
    module, _ = layer_of(model, params)
    x = np.random.default_rng(0).normal(size=(1, 16, 32)).astype(np.float32)
    whole, short = (
        module(jnp.asarray(part), Context(drops_tokens=False))[0] for part in (x, x[:, :9])
    )
    np.testing.assert_allclose(whole[:, :9], short, atol=1e-5)
    dropped = module(jnp.asarray(x), Context())[0]
    assert np.abs(dropped - whole).max() > 1e-3


def test_an_even_router_has_load_balance_one():
    _, model, params = case()
    module, _ = layer_of(model, params)
    module.gate.kernel = jnp.zeros_like(module.gate.kernel[...])
    _, scalars = module(jnp.ones((1, 16, 32)), Context())
    # Every p is 1/4, and the share of first choices does not matter then.
    np.testing.assert_allclose(scalars["moe_lb_loss"], 0.01 * 16, rtol=1e-6)


def test_loss_does_not_depend_on_microbatches():
    keys = {"capacity_factor": 1.0, "router_z_loss_weight": 0.01}
    losses = {}
    for num in (1, 2, 4):
        config = tiny_config("llama2", num_experts=4, num_experts_per_tok=2, **keys)
        _, state, step = trainer(config, num)
        batch = random_batch(config, 4, documents=True)
        state, metrics = step(state, batch)
        losses[num] = {k: float(v) for k, v in metrics.items()}
    assert losses[1]["moe_lb_loss"] > 0
    assert losses[1]["moe_z_loss"] > 0
    total = sum(losses[1][name] for name in ("lm_loss", "z_loss", "moe_lb_loss", "moe_z_loss"))
    np.testing.assert_allclose(losses[1]["loss"], total, rtol=1e-6)
    for num in (2, 4):
        for name, value in losses[1].items():
            np.testing.assert_allclose(losses[num][name], value, rtol=2e-5, err_msg=name)


def test_policies_of_the_second_expert():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 16, 32)), jnp.float32)
    outputs = {}
    for policy in ("all", "none", "threshold", "random"):
        _, model, params = case(moe_second_policy=policy, moe_second_threshold=0.3)
        module, _ = layer_of(model, params)
        context = Context(training=True, dropout_key=jax.random.key(0))
        outputs[policy] = np.asarray(module(x, context)[0])
    changed = {policy: np.abs(y - outputs["all"]).max(-1) > 1e-6 for policy, y in outputs.items()}
    assert changed["none"].mean() > 0.9  # a gate may be all but 1 by itself
    for policy in ("threshold", "random"):
        assert 0 < changed[policy].sum() < changed["none"].sum()


def test_chosen_layers_have_experts():
    config = tiny_config("gpt2", base_num_kv_heads=4, num_experts=2, moe_layers=[1], **WRITTEN_OUT)
    model = Model(config.model)
    with_experts = {name.split("/")[1] for name in model.parameters if "experts" in name}
    assert with_experts == {"1"}
    params = jax.jit(model.initialize)(jax.random.key(0))
    batch = random_batch(config, 2)
    sums = jax.jit(
        lambda params: loss_sums(model.merge(params), batch, config.model.objective, training=True)
    )(params)
    assert np.isfinite(sums.total)
    assert sums.over_tokens["moe_lb_loss"] > 0
    assert num_tokens(batch) == 2 * 16


def test_every_expert_learns():
    config, model, params = case()
    batch = random_batch(config, 4)

    @jax.jit
    def gradient(params):
        def loss(params):
            sums = loss_sums(model.merge(params), batch, config.model.objective, training=True)
            return sum(sums.means(jnp.float32(1), jnp.float32(1)).values())

        return jax.grad(loss)(params)

    mlp = gradient(params)["layers"]["mlp"]
    for leaf in (mlp["gate"]["kernel"], *mlp["experts"].values()):
        assert np.isfinite(leaf).all()
    assert (np.abs(mlp["experts"]["wo"]).sum((2, 3)) > 0).all()
    assert np.abs(mlp["gate"]["kernel"]).max() > 0
