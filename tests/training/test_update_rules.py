"""Weights that a rule updates in place of the optimizer: the correction bias of experts."""

import dataclasses
from typing import NamedTuple

import jax
import numpy as np
import pytest

from MaxText.config.schema import Config
from MaxText.config.training_sections import GuardConfig
from MaxText.evaluation.validation import ObjectiveTotals, make_eval_step
from MaxText.layers.assembly.model import Model
from MaxText.layers.batch import Batch
from MaxText.layers.feed_forward.moe import BalanceLoad
from MaxText.training import spike_guard
from MaxText.training.metric_names import as_scalars
from MaxText.training.state import TrainState
from MaxText.training.step import make_train_step
from tests.small_models import made_for_training, random_batch, tiny_config, trainer

RATE = np.float32(0.01)
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_mlp_dim": 8,
    "vocab_size": 16,
    "base_num_decoder_layers": 2,
    "routed_score_func": "sigmoid",
    "load_balance_loss_weight": 0.0,
    "routed_bias": True,
    "routed_bias_update_rate": float(RATE),
    "adam_weight_decay": 0.1,
}
METRICS = {"moe_max_load_ratio", "moe_router_entropy", "moe_dropped"}


def biases(state):
    """Those of all layers, [L, E]."""
    return np.asarray(state.params["layers"]["mlp"]["gate_correction_bias"])


def trained(state, step, batches):
    """The state after a step on each batch, and the metrics of each."""
    metrics = []
    for batch in batches:
        state, numbers = step(state, batch)
        metrics.append(as_scalars(jax.device_get(numbers)))
    return state, metrics


def test_the_rule():
    load_LE = np.float32([[2, 0, 4], [1, 1, 1]])
    expected = [[0, 0.5, -0.5], [0, 0, 0]]
    np.testing.assert_array_equal(BalanceLoad(0.5)(np.zeros((2, 3)), load_LE), expected)


class Balanced(NamedTuple):
    config: Config
    first: TrainState
    batches: list[Batch]
    after_two: TrainState
    last: TrainState
    metrics: list[dict[str, float]]


@pytest.fixture(scope="module")
def balanced():
    """A run of one step on each batch."""
    config = tiny_config(**EXPERTS)
    _, state, step = trainer(config, log_layer_metrics=True)
    batches = [random_batch(config, 4, seed, documents=True) for seed in range(20)]
    after_two, first_metrics = trained(state, step, batches[:2])
    last, metrics = trained(after_two, step, batches[2:])
    return Balanced(config, state, batches, after_two, last, first_metrics + metrics)


def test_the_bias_balances_the_load(balanced):
    metrics = balanced.metrics
    steps_LE = biases(balanced.last) / RATE
    np.testing.assert_allclose(steps_LE, np.round(steps_LE), atol=1e-4)  # no decay, no optimizer
    assert np.abs(steps_LE).max(axis=1).min() > 5

    fixed = tiny_config(**EXPERTS | {"routed_bias_update_rate": 0.0})
    last, without = trained(balanced.first, trainer(fixed)[2], balanced.batches)
    assert not biases(last).any()

    def imbalance(metrics):
        return np.mean([numbers["moe_max_load_ratio"] - 1 for numbers in metrics[-5:]])

    assert imbalance(metrics) < 0.8 * imbalance(without)  # the rest is the noise of small batches
    # The first steps are the same, and no norm knows the bias or its load.
    norms = {name for name in without[0] if name.endswith("norm")}
    assert norms == {"grad_norm", "update_norm", "param_norm"}
    for name in norms:
        assert metrics[0][name] == pytest.approx(without[0][name], rel=1e-6)
    of_layers = [metrics[0][f"grad_norm/layer_{layer}"] for layer in range(2)]
    assert np.linalg.norm(of_layers) < metrics[0]["grad_norm"]
    assert metrics[0].keys() >= METRICS
    of_experts = {name for name in without[0] if name.startswith("moe_")}
    assert not of_experts - METRICS - {"moe_lb_loss"}


def test_no_optimizer_has_the_bias(balanced):
    leaves = jax.tree_util.tree_leaves_with_path(balanced.first.opt_state)
    paths = [str(path) for path, _ in leaves]
    assert not any("gate_correction_bias" in path for path in paths)


def test_microbatches_and_unrolled_layers_give_the_same_bias(balanced):
    """And a skipped step leaves it as it is."""
    batches = balanced.batches
    config = tiny_config(**EXPERTS, scan_layers=False, remat_policy="full")
    guard = GuardConfig()
    model = Model(config.model)
    schedule, optimizer, _ = made_for_training(config, model)
    step = jax.jit(make_train_step(model, optimizer, schedule, num_microbatches=2, guard=guard))
    state = dataclasses.replace(balanced.first, guard=spike_guard.initial_state(guard))
    after, _ = trained(state, step, batches[:2])
    np.testing.assert_array_equal(biases(after), biases(balanced.after_two))
    damaged = dataclasses.replace(batches[2], loss_mask_BT=np.nan * batches[2].loss_mask_BT)
    skipped, metrics = trained(after, step, [damaged])
    assert metrics[0]["skipped"] == 1
    np.testing.assert_array_equal(biases(skipped), biases(after))


def test_a_bias_that_is_not_to_be_trained_stays(balanced):
    params = balanced.first.params
    config = tiny_config(
        **EXPERTS, opt_type="sgd", trainable_parameters_mask=["self_attention/query"]
    )
    _, optimizer, _ = made_for_training(config, Model(config.model))
    gradients = balanced.last.params  # any numbers that differ
    updates, _ = optimizer.update(gradients, optimizer.init(params), params)
    assert updates["layers"]["self_attention"]["query"]["kernel"].any()
    assert not updates["layers"]["mlp"]["gate_correction_bias"].any()


def test_evaluation_reports_metrics(balanced):
    step = jax.jit(make_eval_step(Model(balanced.config.model)))
    sums = jax.tree.map(float, step(balanced.first.params, balanced.batches[0]))
    parts = ObjectiveTotals.from_sums(sums).parts
    assert parts.keys() == METRICS
    assert parts["moe_dropped"] == 0
    assert 1 < parts["moe_max_load_ratio"] < 8
    assert 1 < parts["moe_router_entropy"] < np.log(8)
