"""The example objectives against their formulas, on one device and on meshes."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

import MaxText as mt
from MaxText.checkpointing import checkpoint_files
from MaxText.checkpointing.checkpoint_reader import read_tree
from MaxText.checkpointing.compatibility import checkpoint_metadata
from MaxText.checkpointing.manager import CheckpointManager
from MaxText.config.schema import flatten
from MaxText.config.training_sections import CheckpointingConfig
from MaxText.cost.flops import count_flops
from MaxText.errors import UserError
from MaxText.evaluation.validation import evaluate, make_eval_step
from MaxText.layers.assembly.model import Model
from MaxText.layers.capture import capturing
from MaxText.parallelism.mesh import make_sharding_plan
from MaxText.training.model_objective import read_frozen_params
from tests.house.sources import REPOSITORY
from tests.multi_device.same_results import MIXED, train
from tests.small_models import TINY, random_batch, tiny_config, trainer

DISTILLATION = {
    "import_modules": [str(REPOSITORY / "examples" / "distillation.py")],
    "loss_type": "distillation",
    "teacher_weight": 0.25,
    "teacher_temperature": 2.0,
}
HIDDEN = {
    "import_modules": [str(REPOSITORY / "examples" / "hidden_layer_loss.py")],
    "loss_type": "hidden_layer",
    "probed_layer": 0,
}
TEACHER = {"base_num_decoder_layers": 4, "base_mlp_dim": 48}


@pytest.fixture
def teacher(tmp_path, own_modules):
    """A checkpoint of a model with random weights."""
    config = tiny_config(**TEACHER)
    _, state, _ = trainer(config)
    state = dataclasses.replace(state, step=jnp.int32(3))
    checkpoints = CheckpointManager(tmp_path / "teacher" / "checkpoints", CheckpointingConfig())
    checkpoints.save(2, state, {"step": 3}, checkpoint_metadata(flatten(config), state.params))
    checkpoints.wait()
    return str(tmp_path / "teacher")


def log_probabilities(model, params, batch, temperature=1.0):
    logits = jax.jit(lambda params, batch: model.merge(params)(batch))(params, batch)
    return scipy.special.log_softmax(np.asarray(logits, float) / temperature, axis=-1)


@pytest.mark.parametrize("keys", [{}, {"num_vocab_tiling": 4}], ids=["whole", "in chunks"])
def test_distillation_by_hand(keys, teacher):
    config = tiny_config(**DISTILLATION | keys, teacher_path=teacher)
    model, state, step = trainer(config, num_microbatches=2)
    sharding = make_sharding_plan(config.mesh, jax.devices()[:1])
    frozen = read_frozen_params(config.model, sharding)
    batch = random_batch(config, 4, documents=True)
    mask = np.asarray(batch.loss_mask_BT)

    teacher_model = Model(tiny_config(**TEACHER).model)
    log_p = log_probabilities(teacher_model, frozen["teacher"], batch, 2.0)
    log_q = log_probabilities(model, state.params, batch, 2.0)
    divergence = np.average((np.exp(log_p) * (log_p - log_q)).sum(-1), weights=mask)
    log_q = log_probabilities(model, state.params, batch)
    targets = np.asarray(batch.targets_BT)[..., None]
    nats = np.average(-np.take_along_axis(log_q, targets, -1)[..., 0], weights=mask)

    _, metrics = step(state, batch, frozen)
    names = ("text_loss", "teacher_loss", "teacher_divergence", "lm_loss", "loss")
    text, from_teacher = 0.75 * nats, 0.25 * 4 * divergence
    expected = [text, from_teacher, divergence, nats, text + from_teacher]
    np.testing.assert_allclose([metrics[name] for name in names], expected, rtol=2e-5)
    report = evaluate(
        lambda params, batch: jax.jit(make_eval_step(model))(params, batch, frozen),
        state.params,
        [batch],
        step=0,
    )
    np.testing.assert_allclose([report.loss, report.lm_loss], expected[:1:-1][:2], rtol=2e-5)

    rows = {part.name: part for part in count_flops(model, 16).parts}
    assert rows["teacher"].flops == count_flops(teacher_model, 16).forward
    assert rows["teacher"].training == rows["teacher"].flops  # no backward pass
    with pytest.raises(ValueError, match="frozen models without parameters: teacher"):
        step(state, batch)


@pytest.mark.slow
def test_a_student_learns_from_a_trained_teacher(tmp_path, own_modules):
    """Its checkpoints hold no teacher, and others read them without one."""
    keys = TINY | {
        "base_output_directory": str(tmp_path),
        "steps": 30,
        "eval_interval": 15,
        "eval_steps": 1,
        "per_device_batch_size": 4,
        "enable_tensorboard": False,
    }
    folder = mt.train(mt.load_config(**keys | TEACHER, run_name="teacher"))
    student = keys | DISTILLATION | {"teacher_path": str(folder / "checkpoints" / "29")}
    config = mt.load_config(**student, run_name="whole")
    whole = mt.train(config)
    columns = mt.metrics(whole)
    divergences = columns["learning/teacher_divergence"]
    assert divergences[-1] < divergences[0]
    assert np.isfinite(columns["eval/teacher_divergence"][-1])
    tree, _ = read_tree(checkpoint_files.resolve_checkpoint(str(whole), "whole"))
    assert "objective" not in tree["params"]
    assert not any("teacher" in str(path) for path, _ in jax.tree.leaves_with_path(tree))
    run = mt.load(str(whole), loss_type="cross_entropy")
    with_teacher = mt.load(str(whole))
    batches = list(itertools.islice(mt.batches(config, "eval"), 1))
    assert run.loss(batches) == pytest.approx(columns["eval/lm_loss"][-1], rel=1e-4)
    assert with_teacher.loss(batches) == pytest.approx(columns["eval/avg_loss"][-1], rel=1e-4)


def test_a_teacher_that_cannot_be_used(teacher):
    with pytest.raises(UserError, match="teacher_path is not set"):
        tiny_config(**DISTILLATION)
    config = tiny_config(**DISTILLATION, teacher_path=f"{teacher}/nowhere")
    sharding = make_sharding_plan(config.mesh, jax.devices()[:1])
    with pytest.raises(UserError, match=r"teacher_path=.*nowhere"):
        read_frozen_params(config.model, sharding)
    config = tiny_config(**DISTILLATION, teacher_path=teacher, vocab_size=32)
    _, state, step = trainer(config)
    frozen = read_frozen_params(config.model, sharding)
    with pytest.raises(UserError, match="the teacher has vocab_size=64, and the student 32"):
        jax.eval_shape(step, state, random_batch(config, 2), frozen)


def test_the_loss_of_a_hidden_layer_by_hand(own_modules):
    config = tiny_config(**HIDDEN)
    _, state, step = trainer(config)
    batch = random_batch(config, 4)
    unrolled = Model(tiny_config(**HIDDEN, scan_layers=False).model)

    def output(params):
        with capturing(["layers/0/output"]) as captured:
            unrolled.merge(params)(batch)
        return captured.values["layers/0/output"]

    h = np.asarray(jax.jit(output)(state.params), float)
    normed = h / np.sqrt(np.square(h).mean(-1, keepdims=True) + 1e-6)
    logits = normed @ np.asarray(state.params["objective"]["probe"]["kernel"])
    targets, mask = np.asarray(batch.targets_BT), np.asarray(batch.loss_mask_BT)
    log_p = scipy.special.log_softmax(logits, axis=-1)
    nats = -np.take_along_axis(log_p, targets[..., None], -1)[..., 0]
    _, metrics = step(state, batch)
    expected = [
        0.3 * np.average(nats, weights=mask),
        np.average(logits.argmax(-1) == targets, weights=mask),
    ]
    found = [metrics["probe_loss"], metrics["probe_accuracy"]]
    np.testing.assert_allclose(found, expected, rtol=2e-5)
    np.testing.assert_allclose(metrics["loss"], metrics["lm_loss"] + found[0], rtol=1e-6)


def test_weights_of_an_objective_are_no_part_of_the_model(tmp_path, own_modules):
    """Others read a checkpoint without them, and a run that begins from others draws its own."""
    keys = TINY | {
        "base_output_directory": str(tmp_path),
        "base_num_decoder_layers": 1,
        "steps": 1,
        "per_device_batch_size": 2,
        "enable_tensorboard": False,
    }
    plain = mt.train(mt.load_config(**keys, run_name="plain"))
    tuned = mt.train(
        mt.load_config(**keys | HIDDEN, run_name="tuned", load_parameters_path=str(plain))
    )
    assert "objective" in mt.load(str(tuned)).params
    ids = np.arange(16)
    run = mt.load(str(tuned), loss_type="cross_entropy")
    assert "objective" not in run.params
    np.testing.assert_array_equal(run.logits(ids), mt.load(str(tuned)).logits(ids))
    with pytest.raises(UserError, match="has no weights of the objective hidden_layer"):
        mt.load(str(plain), **HIDDEN)


@pytest.mark.multi_device
@pytest.mark.parametrize(
    "mesh",
    [MIXED, {"ici_pipeline_parallelism": 2, "ici_fsdp_parallelism": 2, "ici_data_parallelism": 2}],
    ids=["mixed", "pipeline"],
)
@pytest.mark.parametrize("keys", [DISTILLATION, HIDDEN], ids=["distillation", "hidden layer"])
def test_the_same_losses_on_eight_devices(keys, mesh, teacher):
    if keys is DISTILLATION:
        keys = keys | {"teacher_path": teacher}
    expected, _ = train(jax.devices()[:1], **keys)
    numbers, _ = train(jax.devices(), **keys, **mesh)
    np.testing.assert_allclose(numbers, expected, rtol=1e-5)


@pytest.mark.multi_device
def test_a_teacher_that_does_not_fit_the_stages(teacher):
    keys = DISTILLATION | {"base_num_decoder_layers": 8, "ici_pipeline_parallelism": 8}
    config = tiny_config(**keys, teacher_path=teacher)
    sharding = make_sharding_plan(config.mesh, jax.devices(), config.model.pipeline)
    with pytest.raises(UserError, match=r"(?s)teacher \(teacher_path=.*not fit its 8 pipeline st"):
        read_frozen_params(config.model, sharding)
