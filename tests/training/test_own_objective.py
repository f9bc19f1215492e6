"""A head and an objective of a user's module: checked, trained and decoded like built-in ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.config.problems import ConfigurationError
from MaxText.conformance.checks import CHECKS
from MaxText.conformance.subject import LENGTH, SIZES, Subject
from MaxText.cost.flops import count_flops
from MaxText.errors import UserError
from MaxText.evaluation.validation import evaluate, make_eval_step
from MaxText.inference.engine import Engine
from MaxText.inference.sampling import SamplingParams
from MaxText.layers.assembly.model import Model
from MaxText.parallelism.mesh import make_sharding_plan
from MaxText.training import objective, spike_guard
from MaxText.training.assembly import setup_train
from MaxText.training.metric_names import is_loss
from MaxText.training.objective import is_in_nats
from tests.small_models import (
    assert_close,
    made_for_training,
    random_batch,
    tiny_config,
    trainer,
)

MINE = """
import jax.numpy as jnp
from MaxText.config.keys import Section, key
from MaxText.layers.dense import Dense
from MaxText.layers.part import Head, register
from MaxText.training.objective import cross_entropy


class HeadKeys(Section):
    "Low rank."
    head_rank: int = key(4, "Width between the two matrices.", ge=1)


@register("head", "low_rank", keys=HeadKeys)
class LowRank(Head):
    "Two matrices."

    def __init__(self, config, init, rngs):
        D, V, R = init.dimensions.emb_dim, init.dimensions.vocab_size, config.head_rank
        kernel = init.initializers.kernel
        self.down = Dense((D,), (R,), ("embed", None), kernel, init, rngs)
        self.up = Dense((R,), (V,), (None, "vocab"), kernel, init, rngs)

    def __call__(self, h_BTD, table, state, positions_BT):
        return self.up(self.down(h_BTD)).astype(jnp.float32)

    @classmethod
    def problem(cls, config, dimensions):
        if config.head_rank > dimensions.emb_dim:
            return f"head_rank={config.head_rank} is not a low rank"


class ObjectiveKeys(Section):
    "Focal loss."
    focal_gamma: float = key(2.0, "How little likely targets count.", ge=0)


@register("objective", "focal", keys=ObjectiveKeys)
def focal(config, logits_BTV, targets_BT):
    "Lin et al. 2017."
    losses_BT, log_z_BT = cross_entropy(logits_BTV, targets_BT)
    return {"focal_loss": (1 - jnp.exp(-losses_BT)) ** config.focal_gamma * losses_BT}, log_z_BT
"""
KEYS = {
    "import_modules": ["mine.py"],
    "head_type": "low_rank",
    "loss_type": "focal",
    "head_rank": 3,
    "focal_gamma": 1.0,
    "num_vocab_tiling": 2,
}


@pytest.fixture(autouse=True)
def module(tmp_path, own_modules):
    """The file mine.py in the current folder."""
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path / "mine.py"


def test_they_conform_and_decode():
    subject = Subject(
        lambda **more: tiny_config(**SIZES | KEYS | {"base_num_decoder_layers": 1} | more)
    )
    model = subject.models[0]
    for check in CHECKS:
        if check.name in ("causality", "documents", "gradients", "decode state", "FLOPs"):
            assert check.problem(subject) is None, check.name
    weights = {name: info.size for name, info in model.parameters.items() if "layers" not in name}
    assert weights == {
        "decoder_norm/scale": 16,
        "head/down/kernel": 16 * 3,
        "head/up/kernel": 3 * 32,
        "token_embedder/embedding": 32 * 16,
    }
    rows = {part.name: part for part in count_flops(model, LENGTH).parts}
    assert (rows["head"].parameters, rows["head"].flops) == (16 * 3 + 3 * 32, 2 * (16 * 3 + 3 * 32))

    sharding = make_sharding_plan(subject.config.mesh, jax.devices()[:1])
    engine = Engine(model, subject.params, sharding, SamplingParams(temperature=0))
    sequences, first = engine.prefill([[1, 2, 3]], [(0, 0)], [0], seed=0, expected_length=8)
    _, second = engine.step(sequences)
    ids = [1, 2, 3, int(first.tokens_B[0])]
    batch = random_batch(subject.config, 1)
    tokens_BT = batch.tokens_BT.at[0, :4].set(np.array(ids))
    logits_TV = np.asarray(
        model.merge(subject.params)(type(batch)(tokens_BT, tokens_BT, batch.loss_mask_BT))
    )[0]
    assert logits_TV[2:4].argmax(-1).tolist() == [ids[3], int(second.tokens_B[0])]


def test_the_objective_is_what_training_minimizes():
    config = tiny_config(**KEYS | {"steps": 2})
    assert not is_in_nats(Model(config.model))
    assert is_in_nats(Model(tiny_config().model))
    model, state, step = trainer(config)
    initial = state.params
    batch = random_batch(config, 2)
    sums = jax.jit(make_eval_step(model))(state.params, batch)
    logits = np.asarray(jax.jit(lambda params: model.merge(params)(batch))(state.params), float)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    log_p = np.take_along_axis(log_p, np.asarray(batch.targets_BT)[..., None], -1)[..., 0]
    expected = np.average((1 - np.exp(log_p)) * -log_p, weights=np.asarray(batch.loss_mask_BT))
    losses = []
    for _ in range(2):
        state, metrics = step(state, batch)
        losses.append(metrics)
    np.testing.assert_allclose(losses[0]["focal_loss"], expected, rtol=1e-5)
    assert losses[1]["loss"] < losses[0]["loss"] == losses[0]["focal_loss"]
    # A cross entropy beside it, which is not minimized.
    nats = np.average(-log_p, weights=np.asarray(batch.loss_mask_BT))
    np.testing.assert_allclose(losses[0]["lm_loss"], nats, rtol=1e-5)
    report = evaluate(jax.jit(make_eval_step(model)), initial, [batch, batch], step=0)
    np.testing.assert_allclose(report.loss, expected, rtol=1e-5)
    np.testing.assert_allclose(report.lm_loss, nats, rtol=1e-5)
    assert f"loss={expected:.3f}, lm_loss={nats:.3f}, perplexity=" in report.line()
    row = report.row()
    np.testing.assert_allclose([row["eval/avg_loss"], row["eval/lm_loss"]], [expected, nats], 1e-5)
    assert "log_z" in losses[0]
    np.testing.assert_allclose(sums["loss/focal_loss"] / sums["total_weights"], expected, rtol=1e-5)


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_the_cross_entropy_beside_an_objective_changes_no_gradient(num_microbatches, monkeypatch):
    config = tiny_config(**KEYS | {"num_vocab_tiling": 1})
    batch = random_batch(config, 4)
    _, state, step = trainer(config, num_microbatches)
    after, metrics = step(state, batch)
    monkeypatch.setattr(
        objective, "cross_entropy", lambda logits, targets: (jnp.zeros(targets.shape), None)
    )
    _, state, step = trainer(config, num_microbatches)
    without, others = step(state, batch)
    assert metrics["lm_loss"] > others["lm_loss"] == 0
    assert metrics["loss"] == pytest.approx(float(others["loss"]), rel=1e-6)
    assert_close(after.params, without.params, atol=1e-6)


def test_every_metric_is_a_loss_or_known_to_be_none():
    config = tiny_config(
        num_experts=2, router_z_loss_weight=0.01, z_loss_multiplier=0.01, num_experts_per_tok=1
    )
    _, _, initialize = made_for_training(config, Model(config.model), config.guard)
    _, _, step = trainer(config, guard=config.guard, log_layer_metrics=True)
    state = jax.jit(initialize)(jax.random.key(0))
    metrics = jax.eval_shape(step, state, random_batch(config, 2))[1]
    losses = {name for name in metrics if is_loss(name)}
    of_experts = {"moe_max_load_ratio", "moe_min_load_ratio", "moe_router_entropy", "moe_dropped"}
    of_layers = of_experts | {"attention_entropy", "attention_max_logit"}
    assert losses == {"loss", "lm_loss", "z_loss", "moe_lb_loss", "moe_z_loss"} | of_layers
    assert set(metrics) > spike_guard.METRICS


def test_what_is_refused(module):
    with pytest.raises(
        ConfigurationError, match="head_type=low_rank: head_rank=40 is not a low rank"
    ):
        tiny_config(**KEYS | {"head_rank": 40})
    pattern = {"layer_pattern": "A", "layer_kinds": {"A": {"head_rank": 2}}}
    with pytest.raises(ConfigurationError, match="A: head_rank is not a key of a layer's parts"):
        tiny_config(**KEYS | pattern)
    for old, new, words in (
        (", log_z_BT\n", "\n", r"objective focal \(.*mine.py:\d+\) returned {focal_loss: float32"),
        ("config.focal_gamma * losses_BT}", "2}, 0 * losses_BT.sum(), #", "objective focal"),
    ):
        module.write_text(MINE.replace(old, new))
        config = tiny_config(**KEYS)
        sharding = make_sharding_plan(config.mesh, jax.devices()[:1])
        with pytest.raises(UserError, match=words):
            setup_train(config, sharding)
    module.write_text(MINE.replace("(Head)", "").replace("problem", "other"))
    with pytest.raises(ConfigurationError, match=r"LowRank \(.*mine.py:\d+\) is not derived"):
        tiny_config(**KEYS)


def test_head_type_chooses_head_qk_as_well():
    names = [
        list(Model(tiny_config(**keys).model).parameters)
        for keys in ({"head_qk": True}, {"head_type": "head_qk"}, {"head_type": "linear"}, {})
    ]
    assert names[0] == names[1]
    assert names[2] == names[3] == [name for name in names[0] if "head_qk" not in name]
