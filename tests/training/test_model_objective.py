"""Objectives that read the model: outputs of layers, own weights, losses with own weights."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.config.problems import ConfigurationError
from MaxText.conformance.checks import CHECKS
from MaxText.conformance.subject import SIZES, Subject
from MaxText.cost.flops import count_flops
from MaxText.errors import UserError
from MaxText.evaluation.validation import evaluate, make_eval_step
from MaxText.layers.assembly.model import Model
from MaxText.layers.capture import capturing
from MaxText.parallelism.mesh import make_sharding_plan
from MaxText.training.assembly import setup_train
from MaxText.training.objective import is_in_nats
from tests.small_models import assert_close, random_batch, random_params, tiny_config, trainer

# A loss per token with its own weight, one per sequence, and a weight of its own.
MINE = """
import jax.numpy as jnp
from MaxText.layers.params import constant, param
from MaxText.layers.part import register
from MaxText.training.model_objective import Objective, ObjectiveSums, logits_of
from MaxText.training.objective import cross_entropy


def has_targets(batch):
    return (batch.loss_mask_BT.sum(1) > 0).astype(jnp.float32)


@register("objective", "mine")
class Mine(Objective):
    "The square of hidden states, and the worst token of each sequence."

    def __init__(self, config, init, rngs):
        D = init.dimensions.emb_dim
        self.scale = param(rngs, (D,), ("embed",), constant(2.0), dtype=init.weight_dtype)

    def read_layers(self):
        return (1,)

    @classmethod
    def weights(cls, config, batch):
        return {"square": jnp.float32(batch.tokens_BT.size), "worst": has_targets(batch).sum()}

    def __call__(self, decoder, batch, h_BTD, context):
        def worst_of_chunk(logits, targets_BT, mask_BT):
            losses_BT, _ = cross_entropy(logits(), targets_BT)
            return losses_BT * mask_BT

        logits = logits_of(decoder, batch, h_BTD)
        worst_BT = context.in_chunks(worst_of_chunk, logits, batch.targets_BT, batch.loss_mask_BT)
        square_BT = jnp.mean(jnp.square(self.scale[...] * context.layer_outputs[1]), -1)
        return ObjectiveSums(
            losses={"square": square_BT.sum(), "worst": worst_BT.max(1).sum()},
            metrics={"training": jnp.float32(context.training) * batch.loss_mask_BT.sum()},
        )
"""
KEYS = {"import_modules": ["mine.py"], "loss_type": "mine"}


@pytest.fixture(autouse=True)
def module(tmp_path, own_modules):
    """The file mine.py in the current folder."""
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path / "mine.py"


def uneven_batch(config, rows):
    """The first sequences have few targets, the last one has none."""
    batch = random_batch(config, rows)
    mask_BT = np.array(batch.loss_mask_BT)
    mask_BT[: rows // 2, 3:] = 0
    mask_BT[-1] = 0
    return dataclasses.replace(batch, loss_mask_BT=jnp.asarray(mask_BT))


def by_hand(model, params, batch):
    """(mean of the squares, mean of the worst losses, cross entropy), in float64."""

    def forward(params):
        with capturing(["layers/1/output"]) as captured:
            logits = model.merge(params)(batch)
        return logits, captured.values["layers/1/output"]

    logits, output = (np.asarray(x, float) for x in jax.jit(forward)(params))
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    targets = np.asarray(batch.targets_BT)[..., None]
    mask = np.asarray(batch.loss_mask_BT)
    losses = -np.take_along_axis(log_p, targets, -1)[..., 0] * mask
    square = np.square(np.asarray(params["objective"]["scale"]) * output).mean()
    return square, losses.max(1).sum() / (mask.sum(1) > 0).sum(), losses.sum() / mask.sum()


@pytest.mark.parametrize(
    "keys",
    [
        {"scan_layers": False, "num_vocab_tiling": 2},
        {"scan_layers": True, "remat_policy": "full"},
        {
            "scan_layers": True,
            "layer_pattern": "A*A",
            "layer_kinds": {"A": {"rope_max_timescale": 7}, "*": {}},
        },
    ],
    ids=["unrolled", "scanned", "in a prefix"],
)
def test_losses_and_gradients_by_hand(keys):
    config = tiny_config(**KEYS | keys, opt_type="sgd", learning_rate=1.0)
    _, state, step = trainer(config, num_microbatches=4)
    unrolled = tiny_config(**KEYS | keys | {"scan_layers": False, "remat_policy": "none"})
    batch = uneven_batch(config, 8)
    expected = by_hand(Model(unrolled.model), state.params, batch)
    after, metrics = step(state, batch)
    found = [metrics[name] for name in ("square", "worst", "lm_loss")]
    np.testing.assert_allclose(found, expected, rtol=2e-5)
    np.testing.assert_allclose(metrics["loss"], sum(expected[:2]), rtol=2e-5)
    assert metrics["training"] == pytest.approx(1)
    # Without microbatches, the same gradients.
    _, state, whole_step = trainer(config)
    whole, whole_metrics = whole_step(state, batch)
    assert_close(after.params, whole.params, 2e-5)
    np.testing.assert_allclose(metrics["grad_norm"], whole_metrics["grad_norm"], rtol=1e-5)


def test_an_evaluation_has_the_weights_of_all_batches():
    config = tiny_config(**KEYS)
    model = Model(config.model)
    params = random_params(model, 0.2)
    batch = uneven_batch(config, 8)
    parts = [jax.tree.map(lambda x, rows=rows: x[rows], batch) for rows in (np.s_[:6], np.s_[6:])]
    report = evaluate(jax.jit(make_eval_step(model)), params, parts, step=0)
    unrolled = Model(tiny_config(**KEYS | {"scan_layers": False}).model)
    square, worst, nats = by_hand(unrolled, params, batch)
    row = report.row()
    np.testing.assert_allclose(
        [row["eval/square"], row["eval/worst"], row["eval/lm_loss"], row["eval/avg_loss"]],
        [square, worst, nats, square + worst],
        rtol=2e-5,
    )
    assert row["eval/training"] == 0


def test_its_weights_are_trained_and_its_flops_counted():
    subject = Subject(lambda **more: tiny_config(**SIZES | KEYS | more))
    model = subject.models[0]
    assert model.parameters["objective/scale"].shape == (16,)
    assert not is_in_nats(model)
    for check in CHECKS:
        if check.name in ("gradients", "scan and remat", "FLOPs"):
            assert check.problem(subject) is None, check.name
    rows = {part.name: part for part in count_flops(model, 12).parts}
    assert rows["objective"].parameters == 16
    # The program computes lm_loss, by a pass of the head that the MFU does not count.
    head = rows["head"].hardware_flops
    assert (rows["lm_loss"].flops, rows["lm_loss"].hardware_flops) == (0, head)


def test_a_read_layer_takes_one_hidden_state_however_deep_the_model_is():
    def temporaries(num_layers, **keys):
        config = tiny_config(
            base_num_decoder_layers=num_layers, remat_policy="full", max_target_length=256, **keys
        )
        _, state, step = trainer(config)
        batch = random_batch(config, 16)
        compiled = step.lower(state, batch).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    hidden_bytes = 16 * 256 * 32 * 4
    added = [temporaries(depth, **KEYS) - temporaries(depth) for depth in (4, 12)]
    assert added[1] - added[0] < 2 * hidden_bytes, [x / hidden_bytes for x in added]


FUNCTION = """
import jax.numpy as jnp
from MaxText.layers.part import Mixer, register
from MaxText.training.model_objective import Objective, ObjectiveSums


@register("objective", "mine")
def mine(config, logits_BTV, targets_BT):
    return {NAME: logits_BTV[..., 10]}, None
"""
RETURNS = "return ObjectiveSums("
REFUSED = [
    (FUNCTION.replace("NAME", "'grad_norm'"), "mine .* returned 'grad_norm', the name of another"),
    (FUNCTION.replace("NAME", "'loss'"), "returned 'loss', the name of another metric"),
    (FUNCTION.replace("NAME", "'a/b'"), "returned 'a/b', which contains a slash"),
    (
        FUNCTION.replace("NAME", "'x'").replace(", targets_BT", ""),
        r"loss_type=mine: mine\(config, logits_BTV\) \(.*mine.py:7\) has to take \(config, logits_"
        "BTV, targets_BT",
    ),
    (MINE.replace("(Objective)", ""), r"Mine \(.*\) is not derived .*model_objective.Objective"),
    (MINE.replace("return (1,)", "return (3,)"), "layer 3 cannot be read: there are 0 to 2"),
    (MINE.replace(RETURNS, "return dict("), r"__call__ returned {losses: {square: float32\[\]"),
    (MINE.replace("square_BT.sum()", "square_BT"), r"__call__ returned ObjectiveSums\(.*\[1, 16\]"),
    (MINE.replace('"worst": has_t', '"lm_loss": has_t'), r"weights returned .* without lm_loss"),
    (MINE.replace('metrics={"training"', 'metrics={"worst"'), "'worst' as a loss and as a metric"),
]


@pytest.mark.parametrize(("source", "words"), REFUSED, ids=[str(x) for x in range(len(REFUSED))])
def test_what_is_refused(source, words, module):
    module.write_text(source)
    with pytest.raises((UserError, ConfigurationError), match=f"(?s){words}"):
        setup_train(
            config := tiny_config(**KEYS), make_sharding_plan(config.mesh, jax.devices()[:1])
        )


@pytest.mark.parametrize(("kind", "value"), [("loss", "one"), ("metric", "Metric(one, one)")])
def test_a_scalar_of_a_layer_may_not_have_the_name_of_a_metric(module, kind, value):
    mixer = f"""
from MaxText.layers.part import Metric

@register("mixer", "mine")
class MyMixer(Mixer):
    def __call__(self, x_BTD, context):
        one = jnp.float32(1)
        return x_BTD, {{"update_norm": {value}}}
"""
    module.write_text(FUNCTION.replace("NAME", "'x'") + mixer)
    config = tiny_config(import_modules=["mine.py"], mixer="mine")
    with pytest.raises(UserError, match=f"a layer returned the {kind} 'update_norm', the name of"):
        setup_train(config, make_sharding_plan(config.mesh, jax.devices()[:1]))


def test_a_function_gets_logits_of_the_whole_vocabulary(module):
    """Its names come from a trace, in which logit 10 exists."""
    module.write_text(FUNCTION.replace("NAME", "'lm_loss' if logits_BTV.shape[-1] == 64 else 'x'"))
    assert is_in_nats(Model(tiny_config(**KEYS).model))
    assert not is_in_nats(Model(tiny_config(**KEYS, vocab_size=32).model))
