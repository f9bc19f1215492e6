"""A head and an objective of a user's module: checked, trained and decoded like built-in ones."""

import jax
import numpy as np
import pytest

from MaxText.config.problems import ConfigurationError
from MaxText.cost.flops import count_flops
from MaxText.errors import UserError
from MaxText.evaluation.validation import make_eval_step
from MaxText.experiments import conformance
from MaxText.experiments.conformance import LENGTH, SIZES, Subject
from MaxText.inference.engine import Engine
from MaxText.inference.sampling import SamplingParams
from MaxText.layers.model import Model
from MaxText.parallelism.mesh import make_sharding_plan
from MaxText.training.assembly import setup_train
from MaxText.training.objective import is_in_nats
from tests.small_models import random_batch, tiny_config, trainer

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
    "import_modules": ["mine.py"], "head_type": "low_rank", "loss_type": "focal", "head_rank": 3,
    "focal_gamma": 1.0, "num_vocab_tiling": 2,
}  # fmt: skip


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
    for check in conformance.CHECKS:
        if check.name in ("causality", "documents", "gradients", "decode state", "FLOPs"):
            assert check.problem(subject) is None, check.name
    weights = {name: info.size for name, info in model.parameters.items() if "layers" not in name}
    assert weights == {
        "decoder_norm/scale": 16, "head/down/kernel": 16 * 3, "head/up/kernel": 3 * 32,
        "token_embedder/embedding": 32 * 16,
    }  # fmt: skip
    rows = {part.name: part for part in count_flops(model, LENGTH).parts}
    assert (rows["head"].parameters, rows["head"].flops) == (16 * 3 + 3 * 32, 2 * (16 * 3 + 3 * 32))

    sharding = make_sharding_plan(subject.config.mesh, jax.devices()[:1])
    engine = Engine(model, subject.params, sharding, SamplingParams(temperature=0))
    sequences, first = engine.prefill([[1, 2, 3]], [(0, 0)], [0], seed=0, room=8)
    _, second = engine.step(sequences)
    ids = [1, 2, 3, int(first.tokens_B[0])]
    batch = random_batch(subject.config, 1)
    tokens_BT = batch.tokens_BT.at[0, :4].set(np.array(ids))
    logits_TV = np.asarray(model.merge(subject.params)(
        type(batch)(tokens_BT, tokens_BT, batch.loss_mask_BT)))[0]  # fmt: skip
    assert logits_TV[2:4].argmax(-1).tolist() == [ids[3], int(second.tokens_B[0])]


def test_the_objective_is_what_training_minimizes():
    config = tiny_config(**KEYS | {"steps": 2})
    assert not is_in_nats(config.model.objective)
    assert is_in_nats(tiny_config().model.objective)
    model, state, step = trainer(config)
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
    assert "log_z" in losses[0]
    np.testing.assert_allclose(sums["focal_loss"] / sums["total_weights"], expected, rtol=1e-5)


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
