"""The train step: losses, accumulation, memory policies, dropout, padding, number formats."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.cost import device_memory
from MaxText.errors import UserError
from MaxText.evaluation.validation import make_eval_step
from MaxText.input_pipeline.sequences.batch_schedule import BatchSchedule
from MaxText.layers.assembly.decoder import HiddenStates
from MaxText.layers.assembly.model import Model
from MaxText.layers.entmax import entmax_loss
from MaxText.layers.lowering import head_and_loss
from MaxText.parallelism import mesh
from MaxText.training.assembly import setup_train
from MaxText.training.objective import loss_sums
from tests.small_models import assert_close, random_batch, tiny_config, trainer

ONE_LAYER = {"base_num_decoder_layers": 1, "adam_weight_decay": 0.0}


# --- Losses -----------------------------------------------------------------------------------


class Linear:
    """In place of a decoder: its hidden states are given, its head is a matrix."""

    objective = None

    def __init__(self, params):
        self.h_BTD, self.kernel = params

    def read_layers(self, layers, batch, key, training, log_layer_metrics):
        return HiddenStates(self.h_BTD, {}, {})

    def head_state(self, h_BTD, batch):
        return None

    def logits(self, h_BTD, head_state, positions_BT):
        return h_BTD @ self.kernel


def plain_losses(logits_BTV, targets_BT, alpha):
    if alpha > 1:
        return {"entmax_loss": entmax_loss(logits_BTV, targets_BT, alpha)}
    log_z_BT = jnp.log(jnp.sum(jnp.exp(logits_BTV), -1))
    losses_BT = log_z_BT - jnp.take_along_axis(logits_BTV, targets_BT[..., None], -1)[..., 0]
    if alpha == 1:
        return {"entmax_loss": losses_BT}
    return {"lm_loss": losses_BT, "z_loss": 0.1 * jnp.square(log_z_BT), "log_z": log_z_BT}


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("alpha", [0, 1, 1.5])
def test_sums_of_losses_and_their_gradients(alpha, chunks):
    keys = {"loss_type": "entmax", "entmax_alpha": alpha} if alpha else {"z_loss_multiplier": 0.1}
    config = tiny_config(num_vocab_tiling=chunks, max_target_length=8, vocab_size=11, **keys)
    batch, draw = random_batch(config, rows=4), np.random.default_rng(0)
    params = tuple(jnp.float32(draw.normal(size=size)) for size in [(4, 8, 5), (5, 11)])
    # Every third target is what the model says.
    argmax_BT = np.argmax(params[0] @ params[1], axis=-1)
    is_hit_BT = np.arange(argmax_BT.size).reshape(argmax_BT.shape) % 3 == 0
    targets_BT = np.where(is_hit_BT, argmax_BT, (argmax_BT + 1) % 11).astype(np.int32)
    batch = dataclasses.replace(batch, targets_BT=jnp.asarray(targets_BT))

    def loss_by_hand(params):
        sums = loss_sums(Linear(params), batch, config.model.objective, count_correct=True)
        return sums.total, sums

    def plain(params):
        losses = plain_losses(params[0] @ params[1], batch.targets_BT, alpha)
        sums = {name: jnp.sum(loss * batch.loss_mask_BT) for name, loss in losses.items()}
        return sum(sums[name] for name in sums if name != "log_z"), sums

    (_, found), gradients = jax.value_and_grad(loss_by_hand, has_aux=True)(params)
    (_, expected), wanted = jax.value_and_grad(plain, has_aux=True)(params)
    log_z = expected.pop("log_z", None)
    assert_close(found.target_sums, expected, 2e-5)
    assert_close(gradients, wanted, 2e-5)
    if log_z is not None:
        np.testing.assert_allclose(found.log_z, log_z, rtol=1e-5)
    hits = float(np.asarray(batch.loss_mask_BT)[is_hit_BT].sum())
    assert found.correct == hits > 3


# --- One step ---------------------------------------------------------------------------------


def test_accumulated_microbatches_equal_the_big_batch():
    """Losses of routers are means over the tokens of the whole batch, too."""
    experts = {"num_experts": 2, "load_balance_loss_weight": 0.0, "router_z_loss_weight": 0.1}
    keys = ONE_LAYER | experts | {"opt_type": "sgd", "learning_rate": 1.0}
    config = tiny_config(z_loss_multiplier=1e-3, **keys)
    batch = random_batch(config, rows=8, documents=True)
    _, state, whole = trainer(config)
    _, _, parts = trainer(config, num_microbatches=4)
    state_whole, metrics_whole = whole(state, batch)
    state_parts, metrics_parts = parts(state, batch)
    assert metrics_whole.keys() == metrics_parts.keys()
    assert metrics_whole["moe_z_loss"] > 0.1
    for metrics in (metrics_whole, metrics_parts):
        metrics.pop("moe_max_load_ratio")  # of each microbatch alone
    assert_close(metrics_whole, metrics_parts, 1e-5)
    assert_close(state_whole.params, state_parts.params, 1e-5)


def test_padding_and_bfloat16():
    config = tiny_config(**ONE_LAYER)
    _, state, step = trainer(config)
    batch = random_batch(config, rows=2)
    # A batch of padding changes nothing by its loss.
    empty = dataclasses.replace(batch, loss_mask_BT=jnp.zeros_like(batch.loss_mask_BT))
    after, metrics = step(state, empty)
    assert metrics["loss"] == metrics["grad_norm"] == 0
    assert_close(after.params, state.params, 0)
    # Activations of bfloat16 stay close, and the state stays float32.
    model, _, halved = trainer(tiny_config(**ONE_LAYER, dtype="bfloat16"))
    sums = jax.jit(make_eval_step(model))(state.params, batch)
    exact = step(state, batch)[1]["loss"]
    np.testing.assert_allclose(sums["loss/lm_loss"] / sums["total_weights"], exact, rtol=2e-2)
    assert model.merge(state.params).hidden_states(batch)[0].dtype == jnp.bfloat16
    after, _ = jax.eval_shape(halved, state, batch)
    assert {leaf.dtype for leaf in jax.tree.leaves(after.params)} == {jnp.dtype("float32")}


# --- Memory policies --------------------------------------------------------------------------


def loss_of(policy, scan):
    config = tiny_config(remat_policy=policy, scan_layers=scan, base_num_decoder_layers=2)
    model, batch = Model(config.model), random_batch(config, rows=2)

    def loss(params):
        return loss_sums(model.merge(params), batch, config.model.objective).total

    return model, loss


@pytest.mark.parametrize(
    ("policy", "scan"),
    [
        pytest.param("full", True, marks=pytest.mark.slow),
        pytest.param("qkv_proj_offloaded", False, marks=pytest.mark.slow),
        pytest.param("minimal", True, marks=pytest.mark.slow),
        pytest.param("minimal_offloaded", False, marks=pytest.mark.slow),
    ],
)
def test_memory_policies_do_not_change_the_result(policy, scan):
    model, plain = loss_of("none", scan=True)
    _, other = loss_of(policy, scan)
    params = jax.jit(model.initialize)(jax.random.key(1))
    assert_close(*(jax.jit(jax.value_and_grad(f))(params) for f in (plain, other)), 2e-5)


def test_kept_values_differ_between_policies():
    """A policy that named values no part marks would silently be `full`."""

    def kept(policy):
        model, loss = loss_of(policy, scan=False)
        residuals = jax.eval_shape(lambda params: jax.vjp(loss, params)[1], model.abstract)
        return len(jax.tree.leaves(residuals))

    policies = ("full", "save_out_proj", "save_qkv_proj", "save_dot_except_mlp", "minimal")
    counts = [kept(policy) for policy in (*policies, "none")]
    assert counts == sorted(set(counts)), counts


@pytest.mark.parametrize("tied", [False, True])
def test_on_tpu_gradients_of_the_head_come_before_those_of_layers(tied, monkeypatch):
    config = tiny_config(logits_via_embedding=tied, base_num_decoder_layers=1)
    model, batch = Model(config.model), random_batch(config, rows=2)
    params = jax.jit(model.initialize)(jax.random.key(1))
    V, D = config.model.shape.vocab_size, config.model.shape.dimensions.emb_dim
    found = {}
    for platform in ("cpu", "tpu"):
        monkeypatch.setattr(head_and_loss, "platform", lambda platform=platform: platform)

        def loss(params):
            decoder, section = model.merge(params), config.model.objective
            return loss_sums(decoder, batch, section, training=True).total

        traced = jax.jit(jax.value_and_grad(loss)).trace(params)
        barriers = [
            {v.aval.shape for v in equation.invars}
            for equation in traced.jaxpr.eqns
            if equation.primitive.name == "optimization_barrier"
        ]
        found[platform] = traced.lower().compile()(params), barriers
    h_BTD = (*batch.tokens_BT.shape, D)
    assert found["cpu"][1] == []
    assert {h_BTD, (V, D) if tied else (D, V)} in found["tpu"][1]
    assert_close(found["tpu"][0], found["cpu"][0], 1e-6)


# --- Dropout ----------------------------------------------------------------------------------


def test_each_microbatch_drops_out_other_values():
    """Rows that are equal give different losses, those of the keys of their microbatches."""
    config = tiny_config(**{"dropout_rates.residual": 0.5}, base_num_decoder_layers=1)
    model, state, step = trainer(config, num_microbatches=2)
    one = random_batch(config, rows=1)
    both = jax.tree.map(lambda x: jnp.concatenate([x, x]), one)
    of_step = jax.random.fold_in(jax.random.key(0), state.step)

    @jax.jit
    def loss(index):
        key = jax.random.fold_in(of_step, index)
        decoder, objective = model.merge(state.params), config.model.objective
        return loss_sums(decoder, one, objective, key, training=True).total

    losses = [float(loss(index)) / float(one.loss_mask_BT.sum()) for index in range(2)]
    assert abs(losses[0] - losses[1]) > 1e-3
    dropped = step(state, both)[1]["loss"]
    np.testing.assert_allclose(dropped, np.mean(losses), rtol=1e-5)
    assert step(state, both)[1]["loss"] == dropped  # a pure function of seed and step
    later = dataclasses.replace(state, step=state.step + 1)
    assert step(later, both)[1]["loss"] != dropped


@pytest.mark.parametrize("place", ["embedding", "attention", "residual", "path"])
def test_dropout_at_each_place(place):
    keys = {"dropout_rate": 0.5, "drop_path": 0.5, "enable_dropout": False}
    assert tiny_config(**keys).model.dropout.rate(place) == 0
    key = "drop_path" if place == "path" else f"dropout_rates.{place}"
    config = tiny_config(**{key: 0.5}, base_num_decoder_layers=1)
    batch, model = random_batch(config, rows=2), Model(config.model)
    plain = Model(tiny_config(base_num_decoder_layers=1).model)
    params = jax.jit(model.initialize)(jax.random.key(1))

    def loss(model, key=None, training=False):
        return loss_sums(model.merge(params), batch, config.model.objective, key, training=training)

    dropped = jax.jit(lambda key: loss(model, key, training=True).total)
    keys = jax.random.split(jax.random.key(0))
    none, evaluated = jax.jit(lambda: (loss(plain).total, loss(model).total))()
    assert len({float(none), *(float(dropped(key)) for key in keys)}) == 3
    np.testing.assert_allclose(evaluated, none, rtol=1e-6)


# --- What cannot fit is refused before arrays are made ----------------------------------------


def test_the_state_its_gradients_and_one_activation_must_fit(monkeypatch):
    assert (device_memory.device_memory_bytes(jax.devices("cpu")[0]) or 0) > 2**28  # of the host
    config = tiny_config()
    sharding = mesh.make_sharding_plan(config.mesh, jax.devices()[:1], config.model.pipeline)
    built = setup_train(config, sharding)
    monkeypatch.setattr(jax, "local_device_count", lambda: 1)

    def check(memory, microbatches=1):
        monkeypatch.setattr(device_memory, "device_memory_bytes", lambda device: memory)
        device_memory.check_memory_lower_bound(
            built, BatchSchedule.constant(8, 16), 1, microbatches
        )

    parameters = 4 * built.model.num_parameters
    state = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(built.abstract_state))
    width = built.model.config.shape.dimensions.emb_dim * 4
    needed = state + parameters + 8 * 16 * width
    check(needed)
    with pytest.raises(UserError, match="GiB"):
        check(needed - 1)
    check(needed - 8 * 8 * width, microbatches=2)
    check(None)
