"""Weights that a rule updates in place of the optimizer: the correction bias of experts."""

import jax
import numpy as np

from MaxText.layers.feed_forward.moe import BalanceLoad
from tests.small_models import random_batch, tiny_config, trainer

RATE = 0.01
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_mlp_dim": 8,
    "base_mlp_dim": 16,
    "vocab_size": 16,
    "routed_score_func": "sigmoid",
    "load_balance_loss_weight": 0.0,
    "routed_bias": True,
    "routed_bias_update_rate": RATE,
    "adam_weight_decay": 0.1,
    "log_layer_norms": True,
}
NAME = "layers/mlp/gate_correction_bias"


def bias(state):
    return np.asarray(state.params["layers"]["mlp"]["gate_correction_bias"])


def after(state, step, batches):
    """The state after a step on each batch, and the metrics of each."""
    metrics = []
    for batch in batches:
        state, numbers = step(state, batch)
        metrics.append(jax.tree.map(float, numbers))
    return state, metrics


def test_rule_of_the_load():
    rule = BalanceLoad(rate=0.5)
    load_LE = np.float32([[2, 0, 4], [1, 1, 1]])
    expected = [[0, 0.5, -0.5], [0, 0, 0]]
    np.testing.assert_array_equal(rule(np.zeros((2, 3), np.float32), load_LE), expected)


def test_bias_balances_the_load():
    """It moves by the rate, in no optimizer and no norm, and makes the loads flatter."""
    config = tiny_config(**EXPERTS)
    _, state, step = trainer(config, log_layer_norms=True)
    assert not any("gate_correction_bias" in str(path) for path, _ in _leaves(state.opt_state))
    batches = [random_batch(config, 4, seed, documents=True) for seed in range(20)]
    first, metrics = after(state, step, batches[:1])
    assert set(np.unique(np.abs(bias(first)))) <= {np.float32(0), np.float32(RATE)}
    assert bias(first).any(axis=1).all()
    norms = np.array([metrics[0][f"grad_norm/layer_{layer}"] for layer in range(3)])
    assert metrics[0]["grad_norm"] >= np.sqrt(
        (norms**2).sum()
    )  # loads of 128 choices are not in it
    assert metrics[0]["grad_norm"] < 10
    assert not any("moe_load" in name for name in metrics[0])

    _, with_bias = after(state, step, batches)
    fixed = tiny_config(**EXPERTS | {"routed_bias_update_rate": 0.0})
    _, state, step = trainer(fixed)
    last, without = after(state, step, batches)
    assert not bias(last).any()
    ratio, fixed_ratio = (
        np.mean([numbers["moe_max_load_ratio"] for numbers in metrics[-5:]])
        for metrics in (with_bias, without)
    )
    assert ratio - 1 < 0.7 * (fixed_ratio - 1)


def _leaves(tree):
    return jax.tree_util.tree_leaves_with_path(tree)
