"""The train step: accumulation, memory policies, dropout, padding, number formats."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.layers.entmax import entmax_loss
from MaxText.layers.model import Model
from MaxText.parallelism.constraints import split_rows
from MaxText.training.objective import cross_entropy, loss_sums
from MaxText.training.step import make_eval_step
from tests.small_models import random_batch, some_quick, tiny_config, trainer


def assert_close(left, right, tolerance):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=tolerance), left, right
    )


def gradients_of(config, batch):
    model = Model(config.model)
    params = jax.jit(model.initialize)(jax.random.key(1))

    def loss(params):
        return loss_sums(model.merge(params), batch, config.model.objective).total

    return jax.jit(jax.value_and_grad(loss))(params)


# Adam's first step is the sign of a gradient, also of one that is nothing but rounding, as some of
# entmax are: most ids have none.
@pytest.mark.parametrize(
    "keys", [{"z_loss_multiplier": 1e-3}, {"loss_type": "entmax", "opt_type": "sgd"}]
)
def test_accumulated_microbatches_equal_the_big_batch(keys):
    config = tiny_config(**keys)
    batch = random_batch(config, rows=8)
    _, state, whole = trainer(config)
    _, _, parts = trainer(config, num_microbatches=4)
    state_whole, metrics_whole = whole(state, batch)
    state_parts, metrics_parts = parts(state, batch)
    assert metrics_whole.keys() == metrics_parts.keys()
    assert_close(metrics_whole, metrics_parts, 1e-5)
    assert_close(state_whole.params, state_parts.params, 1e-5)


def test_microbatches_partition_the_rows():
    rows = jnp.arange(12).reshape(12, 1)
    parts = split_rows(rows, 3)
    assert parts.shape == (3, 4, 1)
    assert sorted(np.ravel(parts).tolist()) == list(range(12))


# Policies, and whether layers are scanned: three are enough for that form.
POLICIES = [
    ("full", True), ("minimal", True), ("qkv_proj_offloaded", True),
    ("minimal", False), ("minimal_with_context", False), ("minimal_offloaded", False),
    ("full", False), ("save_dot_except_mlp", False), ("save_dot_except_mlpwi", False),
    ("qkv_proj_offloaded", False), ("save_qkv_proj", False), ("save_out_proj", False),
]  # fmt: skip


@pytest.mark.parametrize(("policy", "scan"), some_quick(POLICIES, 3))
def test_memory_policies_do_not_change_the_result(policy, scan):
    batch = random_batch(tiny_config(), rows=2)
    shorter = {"base_num_decoder_layers": 2}
    loss, gradients = gradients_of(tiny_config(**shorter), batch)
    other = gradients_of(tiny_config(scan_layers=scan, remat_policy=policy, **shorter), batch)
    assert_close((loss, gradients), other, 2e-5)


def test_kept_values_differ_between_policies():
    """A policy that named values no part marks would silently be `full`."""
    batch = random_batch(tiny_config(), rows=2)

    def saved_residuals(policy):
        config = tiny_config(remat_policy=policy, scan_layers=False, base_num_decoder_layers=1)
        model = Model(config.model)
        params = model.initialize(jax.random.key(0))
        _, vjp = jax.vjp(
            lambda params: loss_sums(model.merge(params), batch, config.model.objective).total,
            params,
        )
        return len(jax.tree.leaves(vjp))

    counts = [
        saved_residuals(policy)
        for policy in ("full", "save_out_proj", "save_qkv_proj", "save_dot_except_mlp", "minimal")
    ]
    assert counts == sorted(set(counts)), counts


@pytest.mark.parametrize("keys", [{"z_loss_multiplier": 1e-2}, {"loss_type": "entmax"}])
def test_loss_in_chunks_equals_loss_at_once(keys):
    batch = random_batch(tiny_config(), rows=2)
    at_once = gradients_of(tiny_config(**keys), batch)
    chunked = gradients_of(tiny_config(num_vocab_tiling=4, **keys), batch)
    assert_close(at_once, chunked, 2e-5)


def test_loss_of_entmax_is_that_of_the_logits():
    config = tiny_config(loss_type="entmax", entmax_alpha=1.5)
    model, state, step = trainer(config)
    batch = random_batch(config, rows=2)
    _, metrics = step(state, batch)
    losses_BT = entmax_loss(model.merge(state.params)(batch), batch.targets_BT, 1.5)
    expected = jnp.sum(losses_BT * batch.weights_BT) / jnp.sum(batch.weights_BT)
    np.testing.assert_allclose(metrics["entmax_loss"], expected, rtol=1e-5)
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)
    assert not {"lm_loss", "z_loss"} & set(metrics)


def test_entmax_with_alpha_one_is_cross_entropy():
    batch = random_batch(tiny_config(), rows=2)
    entmax = gradients_of(tiny_config(loss_type="entmax", entmax_alpha=1), batch)
    assert_close(gradients_of(tiny_config(), batch), entmax, 0)


def test_each_microbatch_drops_out_other_values():
    """Rows that are equal give different losses, those of the keys of their places."""
    config = tiny_config(residual_dropout_rate=0.5, base_num_decoder_layers=1)
    model, state, step = trainer(config, num_microbatches=2)
    one = random_batch(config, rows=1)
    both = jax.tree.map(lambda x: jnp.concatenate([x, x]), one)
    of_step = jax.random.fold_in(jax.random.key(0), state.step)

    @jax.jit
    def loss(place):
        key = jax.random.fold_in(of_step, place)
        decoder, objective = model.merge(state.params), config.model.objective
        return loss_sums(decoder, one, objective, key, training=True).total

    losses = [float(loss(place)) / float(one.weights_BT.sum()) for place in range(2)]
    assert abs(losses[0] - losses[1]) > 1e-3
    np.testing.assert_allclose(step(state, both)[1]["loss"], np.mean(losses), rtol=1e-5)


@pytest.mark.parametrize("chunks", [1, 4])
def test_correct_targets_are_counted_by_weight(chunks):
    config = tiny_config(num_vocab_tiling=chunks, base_num_decoder_layers=1)
    model, state, _ = trainer(config)
    batch = random_batch(config, rows=4)
    likeliest_BT = np.argmax(model.merge(state.params)(batch), axis=-1)
    # Every third target is what the model says.
    is_hit_BT = np.arange(likeliest_BT.size).reshape(likeliest_BT.shape) % 3 == 0
    missed_BT = (likeliest_BT + 1) % config.model.shape.vocab_size
    targets_BT = np.where(is_hit_BT, likeliest_BT, missed_BT).astype(np.int32)
    batch = dataclasses.replace(batch, targets_BT=jnp.asarray(targets_BT))
    sums = jax.jit(make_eval_step(model, count_correct=True))(state.params, batch)
    expected = float(np.asarray(batch.weights_BT)[is_hit_BT].sum())
    assert 5 < expected < float(sums["total_weights"]) / 2
    assert sums["correct"] == expected


def test_cross_entropy_and_its_gradient():
    logits = jax.random.normal(jax.random.key(0), (2, 3, 11)) * 4
    targets = jax.random.randint(jax.random.key(1), (2, 3), 0, 11)

    def plain(logits):
        log_normalizer = jnp.log(jnp.sum(jnp.exp(logits), -1))
        picked = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
        return log_normalizer - picked, log_normalizer

    def total(function, logits):
        losses, log_normalizer = function(logits)
        return jnp.sum(losses * 1.5) + jnp.sum(jnp.square(log_normalizer))

    ours = jax.value_and_grad(lambda x: total(lambda y: cross_entropy(y, targets), x))(logits)
    assert_close(ours, jax.value_and_grad(lambda x: total(plain, x))(logits), 1e-5)


def test_z_loss_is_the_weighted_square_of_the_log_normaliser():
    config = tiny_config(z_loss_multiplier=0.1)
    model, state, _ = trainer(config)
    batch = random_batch(config, rows=2)
    sums = loss_sums(model.merge(state.params), batch, config.model.objective).over_targets
    decoder = model.merge(state.params)
    logits = np.asarray(decoder.logits(decoder.hidden(batch)[0]), np.float64)
    log_normalizer = np.log(np.exp(logits).sum(-1))
    expected = 0.1 * (np.square(log_normalizer) * np.asarray(batch.weights_BT)).sum()
    np.testing.assert_allclose(sums["z_loss"], expected, rtol=1e-5)


def test_a_batch_of_padding_changes_nothing_by_its_loss():
    config = tiny_config(adam_weight_decay=0.0)
    _, state, step = trainer(config)
    batch = random_batch(config, rows=2)
    empty = type(batch)(batch.tokens_BT, batch.targets_BT, jnp.zeros_like(batch.weights_BT))
    after, metrics = step(state, empty)
    assert metrics["loss"] == 0
    assert metrics["grad_norm"] == 0
    assert_close(after.params, state.params, 0)


@pytest.mark.parametrize("place", some_quick(["embedding", "attention", "residual"], 2))
def test_dropout_at_each_place(place):
    config = tiny_config(**{f"{place}_dropout_rate": 0.5}, base_num_decoder_layers=1)
    model, state, step = trainer(config)
    plain = trainer(tiny_config(base_num_decoder_layers=1))[2]
    batch = random_batch(config, rows=2)
    dropped, again, none = (f(state, batch)[1]["loss"] for f in (step, step, plain))
    assert dropped == again  # a pure function of seed and step
    assert dropped != none
    later = type(state)(state.step + 1, state.params, state.opt_state)
    assert step(later, batch)[1]["loss"] != dropped
    evaluated = jax.jit(make_eval_step(model))(state.params, batch)
    np.testing.assert_allclose(evaluated["lm_loss"] / evaluated["total_weights"], none, rtol=1e-6)


def test_dropout_switch():
    config = tiny_config(dropout_rate=0.5, enable_dropout=False)
    assert [config.model.dropout.rate(place) for place in ("embedding", "residual")] == [0, 0]
    assert tiny_config(dropout_rate=0.5).model.dropout.rate("attention") == 0.5


def test_bfloat16_activations_stay_close_and_keep_float32_state():
    batch = random_batch(tiny_config(), rows=4)
    config = tiny_config(dtype="bfloat16")
    model, state, step = trainer(config)
    state, metrics = step(state, batch)
    exact = trainer(tiny_config())[2](trainer(tiny_config())[1], batch)[1]
    np.testing.assert_allclose(metrics["loss"], exact["loss"], rtol=2e-2)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}
    assert model.merge(state.params).hidden(batch)[0].dtype == jnp.bfloat16


@pytest.mark.parametrize("opt_type", some_quick(["adamw", "adafactor", "lion", "muon", "sgd"], 2))
def test_every_update_rule_learns(opt_type):
    rates = {"lion": 1e-3, "sgd": 0.3, "adafactor": 0.1}
    config = tiny_config(
        opt_type=opt_type,
        learning_rate=rates.get(opt_type, 1e-2),
        lr_schedule_type="constant",
        base_num_decoder_layers=1,
        adam_weight_decay=0.0,
    )
    _, state, step = trainer(config)
    batch = random_batch(config, rows=4)
    losses = []
    for _ in range(30):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.8 * losses[0], losses
