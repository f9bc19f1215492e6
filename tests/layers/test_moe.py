"""Experts against plain definitions."""

import functools

import jax
import numpy as np
import pytest
from scipy.special import softmax

from MaxText.layers.assembly.model import Model
from MaxText.layers.context import ForwardContext
from MaxText.training.objective import loss_sums
from tests.small_models import random_batch, random_params, tiny_config

WI = ("wi_0", "wi_1")  # kernels before the activations


def experts(**keys):
    """The experts of a layer, jitted with a context, and their weights in float64."""
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "base_num_decoder_layers": 1}
    config = tiny_config(**sizes | {"scan_layers": False} | keys)
    model = Model(config.model)
    params = random_params(model, 0.2, seed=3)
    first = jax.tree.map(lambda leaf: leaf[0], params["layers"])
    # A router that decides: gates are far apart.
    gate = first["mlp"]["gate"]
    gate["kernel"] = 8 * gate["kernel"]

    @functools.partial(jax.jit, static_argnames=("drops_tokens", "training"))
    def run(x, segments_BT=None, dropout_key=None, **flags):
        context = ForwardContext(segments_BT=segments_BT, dropout_key=dropout_key, **flags)
        with jax.default_matmul_precision("highest"):
            return model.merge({**params, "layers": first}).layers.mlp(x, context)

    return run, jax.tree.map(lambda x: np.asarray(x, np.float64), first["mlp"])


def test_biases_and_shared_experts():
    """Both dispatches agree with gpt-oss's and Qwen's terms, added token by token."""
    keys = {"router_bias": True, "expert_bias": True, "shared_experts": 2, "moe_mlp_dim": 24}
    keys |= {"shared_expert_gate": True, "shared_expert_mlp_dim": 12}
    x = tokens()
    for factor in (-1.0, 4.0):  # dropless, and a capacity that drops nothing
        run, weights = experts(capacity_factor=factor, **keys)
        shared = weights["shared_experts"]
        assert shared["wo"]["kernel"].shape == (24, 32)
        expected = []
        for x_D in x[0].astype(np.float64):
            logits = x_D @ weights["gate"]["kernel"] + weights["gate"]["bias"]
            chosen, gates = chosen_by_hand(logits, {"num_experts_per_tok": 2})
            y_D = gates @ [expert_by_hand(weights["experts"], expert, x_D) for expert in chosen]
            branches = [x_D @ shared[name]["kernel"] + shared[name]["bias"] for name in WI]
            shared_D = silu(branches[0]) * branches[1] @ shared["wo"]["kernel"]
            gate = 1 / (1 + np.exp(-x_D @ shared["gate"]["kernel"]))
            expected.append(y_D + gate * (shared_D + shared["wo"]["bias"]))
        np.testing.assert_allclose(run(x, training=True)[0][0], expected, atol=2e-5)


def tokens(rows=1, length=16):
    return np.random.default_rng(0).normal(size=(rows, length, 32)).astype(np.float32)


def silu(x):
    return x / (1 + np.exp(-x))


SCORES = {
    "softmax": lambda logits: softmax(logits),
    "sigmoid": lambda logits: 1 / (1 + np.exp(-logits)),
    "sqrtsoftplus": lambda logits: np.sqrt(np.log1p(np.exp(logits))),
    "topk_softmax": lambda logits: logits,
}


def chosen_by_hand(logits, keys, bias=0.0):
    """The experts of one token and their gates, from its logits in float64."""
    score_func = keys.get("routed_score_func", "softmax")
    scores = SCORES[score_func](logits)
    num_groups = keys.get("n_routing_groups", 1)
    groups = np.split(np.arange(len(scores)), num_groups)
    corrected = scores + bias  # for choices, not for gates
    best_two = [sorted(corrected[group])[-2:] for group in groups]
    score_of_group = max if keys.get("routing_group_score") == "max" else sum
    order = sorted(range(num_groups), key=lambda group: -score_of_group(best_two[group]))
    chosen_groups = order[: keys.get("topk_routing_group", num_groups)]
    allowed = [expert for group in chosen_groups for expert in groups[group]]
    experts = sorted(allowed, key=lambda expert: -corrected[expert])[: keys["num_experts_per_tok"]]
    gates = scores[experts]
    if score_func == "topk_softmax":
        gates = softmax(gates)
    if keys.get("norm_topk_prob", len(experts) > 1):
        gates = gates / gates.sum()
    return experts, gates * keys.get("routed_scaling_factor", 1.0)


V2 = {"n_routing_groups": 4, "topk_routing_group": 2, "routing_group_score": "max"}
V3 = {"routed_score_func": "sigmoid", "n_routing_groups": 4, "topk_routing_group": 2}
LLAMA4 = {
    "num_experts_per_tok": 1,
    "routed_score_func": "sigmoid",
    "apply_router_weight_on_input": True,
}
ROUTINGS = {
    "DeepSeek V2": {"norm_topk_prob": False, "routed_scaling_factor": 16.0} | V2,
    "DeepSeek V3": {"routed_scaling_factor": 2.5} | V3,
    "DeepSeek V3, corrected": {"routed_bias": True} | V3,
    "DeepSeek V4": {"routed_score_func": "sqrtsoftplus", "routed_scaling_factor": 1.5},
    "gpt-oss": {"routed_score_func": "topk_softmax"},
    "Llama 4": LLAMA4,
    "Llama 4 with a capacity": LLAMA4 | {"capacity_factor": 8.0},  # which drops nothing
    "Qwen without normalization": {"norm_topk_prob": False},
    "one expert, normalized": {"num_experts_per_tok": 1, "norm_topk_prob": True},
    "logits by groups": {"routed_score_func": "topk_softmax", "n_routing_groups": 2}
    | {"topk_routing_group": 1},
}


@pytest.mark.parametrize("name", ROUTINGS)
def test_routing(name):
    """Outputs and gradients are those of the definition in float64."""
    keys = {"num_experts": 8, "num_experts_per_tok": 3} | ROUTINGS[name]
    run, weights = experts(**keys)
    x = tokens()
    direction, cotangent = np.random.default_rng(1).normal(size=(2, *x.shape))
    weighted_sum = lambda x: (run(x, training=True)[0] * cotangent).sum()  # noqa: E731
    gradient = jax.grad(weighted_sum)(x)

    def definition(x_SD):
        outputs = []
        for x in x_SD:
            bias = weights.get("gate_correction_bias", 0.0)
            chosen, gates = chosen_by_hand(x @ weights["gate"]["kernel"], keys, bias)
            scales = gates if "apply_router_weight_on_input" in keys else np.ones_like(gates)
            of_experts = [
                expert_by_hand(weights["experts"], expert, scale * x)
                for expert, scale in zip(chosen, scales, strict=True)
            ]
            outputs.append((gates / scales) @ of_experts)
        return np.array(outputs)

    x_SD = x[0].astype(np.float64)
    expected = definition(x_SD)
    np.testing.assert_allclose(run(x)[0][0], expected, atol=1e-5 * np.abs(expected).max())
    step = 1e-6 * direction[0]
    change = definition(x_SD + step) - definition(x_SD - step)
    derivative = (change * cotangent[0]).sum() / 2e-6
    np.testing.assert_allclose((gradient * direction).sum(), derivative, rtol=1e-3)


@pytest.mark.parametrize("score_func", ["sigmoid", "sqrtsoftplus"])
def test_scores_of_tiny_probability_have_gradients(score_func):
    run, _ = experts(routed_score_func=score_func)
    gradient = jax.grad(lambda x: run(x, training=True)[0].sum())(1e4 * tokens())
    assert np.isfinite(gradient).all()


def expert_by_hand(experts, expert, x):
    """The output of one expert for one token."""
    branches = [x @ experts[name][expert] for name in WI]
    if "wo_bias" in experts:
        biases = [experts[f"{name}_bias"][expert] for name in WI]
        branches = [branch + bias for branch, bias in zip(branches, biases, strict=True)]
    y = silu(branches[0]) * branches[1] @ experts["wo"][expert]
    return y + experts["wo_bias"][expert] if "wo_bias" in experts else y


def by_hand(weights, x_SD, capacity=None, kept=None):
    """Token by token: first choices of all tokens take places before second ones."""
    p = softmax(x_SD @ weights["gate"]["kernel"], axis=-1)
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
            y[token] += gates[token, choice] * expert_by_hand(experts, expert, x)
    return y, drops


@pytest.mark.parametrize("factor", [-1.0, 0.5, 1.25])
def test_tokens_visit_their_experts(factor):
    run, weights = experts(capacity_factor=factor)
    x = tokens(3)
    segments = np.ones((3, 16), np.int32)
    segments[:, 13:] = 0  # padding takes no places
    y, scalars = run(x, segments, training=True)
    capacity = None if factor < 0 else int(16 * factor / 4)
    found = [by_hand(weights, row, capacity, segments[0] > 0) for row in x.astype(np.float64)]
    np.testing.assert_allclose(y, [row for row, _ in found], atol=1e-5)
    drops = sum(count for _, count in found)
    assert (drops > 0) == (factor > 0)
    # E sum_e f_e P_e of each row, over the tokens that are there.
    total = 0.0
    for row in x.astype(np.float64):
        p = softmax(row[:13] @ weights["gate"]["kernel"], axis=-1)
        first = np.bincount(p.argmax(-1), minlength=4) / 13
        total += 13 * 4 * (first * p.mean(0)).sum()
    np.testing.assert_allclose(scalars["moe_lb_loss"], 0.01 * total, rtol=1e-4)


def test_balance_of_all_choices():
    run, weights = experts(load_balance_choices="all", num_experts_per_tok=3)
    x = tokens()
    p = softmax(x[0].astype(np.float64) @ weights["gate"]["kernel"], axis=-1)
    chosen = np.argsort(-p, axis=-1)[:, :3]
    share = np.bincount(chosen.ravel(), minlength=4) / chosen.size
    losses = run(x, training=True)[1]
    expected = 0.01 * 16 * 4 * (share * p.mean(0)).sum()  # of 16 tokens
    np.testing.assert_allclose(losses["moe_lb_loss"], expected, rtol=1e-4)


def test_outside_of_training_no_token_is_dropped():
    run, weights = experts(capacity_factor=0.25)
    x = tokens()
    expected, _ = by_hand(weights, x[0].astype(np.float64))
    np.testing.assert_allclose(run(x)[0][0], expected, atol=1e-4)


def test_scored_tokens_do_not_depend_on_padding():
    run, _ = experts(eval_capacity_factor=0.5)
    x = tokens()
    full, short = (run(part, drops_tokens=False)[0] for part in (x, x[:, :9]))
    np.testing.assert_allclose(full[:, :9], short, atol=1e-5)
    assert np.abs(run(x)[0] - full).max() > 1e-3


def test_losses_of_a_batch_are_the_sums_of_those_of_microbatches():
    config = tiny_config(
        num_experts=4,
        num_experts_per_tok=2,
        base_num_decoder_layers=1,
        capacity_factor=1.0,
        router_z_loss_weight=0.01,
    )
    model, batch = Model(config.model), random_batch(config, 4, documents=True)

    @jax.jit
    def run(params, batch):
        return loss_sums(model.merge(params), batch, config.model.objective, training=True)

    params = random_params(model)
    halves = jax.tree.map(lambda x: x[:2], batch), jax.tree.map(lambda x: x[2:], batch)
    full, *halves = (run(params, part) for part in (batch, *halves))
    assert full.token_sums["moe_lb_loss"] > 0
    assert full.token_sums["moe_z_loss"] > 0
    # The largest load is that of a microbatch.
    sums = [sums._replace(layer_metrics=_without_loads(sums)) for sums in (full, *halves)]
    jax.tree.map(lambda x, a, b: np.testing.assert_allclose(x, a + b, rtol=2e-5), *sums)


def _without_loads(sums):
    return {name: x for name, x in sums.layer_metrics.items() if name != "moe_max_load_ratio"}


def test_second_derivatives_are_those_of_the_gradients():
    run, _ = experts(capacity_factor=1.25)
    squares = lambda x: (run(x, training=True)[0] ** 2).sum()  # noqa: E731
    x, v = tokens(), 0.01 * np.random.default_rng(1).normal(size=(1, 16, 32)).astype(np.float32)
    slope = jax.jit(jax.value_and_grad(lambda x: (jax.grad(squares)(x) * v).sum()))
    change = slope(x + v)[0] - slope(x - v)[0]
    np.testing.assert_allclose(change, 2 * (slope(x)[1] * v).sum(), rtol=0.02)


def test_policies_of_the_second_expert():
    x = tokens(2)
    outputs = {}
    for policy in ("all", "none", "threshold", "random"):
        run, _ = experts(moe_second={"policy": policy, "threshold": 0.3})
        outputs[policy] = run(x, dropout_key=jax.random.key(0), training=True)[0]
    changed = {policy: np.abs(y - outputs["all"]).max(-1) > 1e-6 for policy, y in outputs.items()}
    assert changed["none"].mean() > 0.9  # a gate may be all but 1 by itself
    for policy in ("threshold", "random"):
        assert 0 < changed[policy].sum() < changed["none"].sum()
