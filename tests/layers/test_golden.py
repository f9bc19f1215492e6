"""Imported models against the programs that made them: logits, loss, gradients, train steps.

The READMEs of tests/golden say what the arrays are. The converter reads all parameters and
gradients, so these tests answer for a family and for its table together.
"""

from typing import NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from MaxText.config.layer_sections import PattentionConfig
from MaxText.config.loading import load
from MaxText.conversion.hf_import import HFWeights
from MaxText.layers.assembly.model import Model
from MaxText.layers.feed_forward.pattention import Theta
from MaxText.training.objective import loss_sums
from MaxText.training.state import TrainState
from MaxText.training.step import make_train_step
from tests.conversion.golden_models import (
    UNRECORDED,
    below,
    hugging_face,
    of_fattorib,
    of_muddformer,
    of_tokenformer,
)
from tests.conversion.running import EXACT, model_in_run, parameters_in_run, run
from tests.conversion.small_folders import same_bits
from tests.growth.growing import by_name
from tests.small_models import made_for_training, some_quick

# How the same numbers are computed.
SCANNED = ("scan_layers=true", "remat_policy=full", "attention_block_size=8")
UNROLLED = ("scan_layers=false", "remat_policy=none", "num_vocab_tiling=4")
IN_BLOCKS = (
    "scan_layers=false",
    "remat_policy=minimal",
    "attention=blocked",
    "attention_block_size=5",
)
DENSE = ("scan_layers=false", "remat_policy=none", "dense_aggregation_impl=sum")
TILED = ("scan_layers=true", "num_vocab_tiling=4")
BFLOAT16_TABLE = "logits_embedding_dtype=bfloat16"


class Near(NamedTuple):
    """How close numbers are: rtol, atol, and what is added to atol for each unit of the largest."""

    logits: tuple[float, float, float]
    loss: tuple[float, float, float]
    gradients: tuple[float, float, float]


# About four times what was measured, which is the rounding of float32 here and in the references.
# TokenFormer's PyTorch program multiplies queries and keys of length 5 sqrt(H), so that its
# softmax, and all before it, amplifies rounding.
TRANSFORMERS = Near(logits=(0, 0, 4e-6), loss=(5e-7, 0, 0), gradients=(0, 0, 1e-5))
# The gradients of transformers itself in float32 are up to 9e-6 from those in float64, and those
# here up to 2.1e-5 from the vectors, by the kind of CPU.
RECURRENT = Near(logits=(0, 0, 4e-6), loss=(5e-7, 0, 0), gradients=(0, 0, 5e-5))
MUDDFORMER = Near(logits=(0, 0, 4e-6), loss=(5e-7, 0, 0), gradients=(0, 0, 1e-5))
TOKENFORMER = Near(logits=(0, 0, 1e-5), loss=(5e-7, 0, 0), gradients=(0, 0, 2e-5))
FATTORIB = Near(logits=(0, 0, 1e-6), loss=(5e-7, 0, 0), gradients=(0, 0, 5e-6))
# The place of a golden model, how close it is, how it is computed.
WAYS = {
    "gpt2": (hugging_face, TRANSFORMERS, SCANNED),
    "gptneo": (hugging_face, TRANSFORMERS, SCANNED),
    "gptneox": (hugging_face, TRANSFORMERS, UNROLLED),
    "llama": (hugging_face, TRANSFORMERS, UNROLLED),
    "llama31": (hugging_face, TRANSFORMERS, SCANNED),
    "gemma": (hugging_face, TRANSFORMERS, UNROLLED),
    "muddformer_l4_d32": (of_muddformer, MUDDFORMER, DENSE),
    "muddpythia_l3_d48": (of_muddformer, MUDDFORMER, DENSE),
    "muddllama_prepost_l4_d32": (of_muddformer, MUDDFORMER, DENSE),
    "torch_a": (of_tokenformer, TOKENFORMER, SCANNED),
    "jax_a": (of_tokenformer, TOKENFORMER, IN_BLOCKS),
    "jax_b": (of_tokenformer, TOKENFORMER, SCANNED),
    "alibi_fused_h4": (of_fattorib, FATTORIB, SCANNED),
    "sgu_headqk_sequential_h4": (of_fattorib, FATTORIB, TILED),
}
# Below it a gradient is only rounding, such as that of a key's bias, which softmax ignores.
ROUNDING = 1e-6


def close(found, wanted, near, name=""):
    rtol, atol, of_largest = near
    atol += of_largest * np.abs(wanted).max()
    np.testing.assert_allclose(found, wanted, rtol=rtol, atol=atol, err_msg=name)


def close_gradients(found, wanted, near, rounded=()):
    """Where they were recorded.

    Args:
      found: Gradients by name, or as a tree.
      wanted: Those of the reference.
      near: How close they are.
      rounded: Names of parameters whose gradients both programs round to bfloat16.
    """
    found, wanted = by_name(found), by_name(wanted)
    assert found.keys() == wanted.keys()
    for name, reference in wanted.items():
        recorded = np.abs(reference) < UNRECORDED / 2
        if not recorded.any():
            continue
        if np.abs(reference[recorded]).max() < ROUNDING:
            assert np.abs(found[name][recorded]).max() < ROUNDING, name
        else:
            gradients = found[name][recorded]
            if name in rounded:
                gradients = without_flipped_roundings(gradients, reference[recorded], near)
            close(gradients, reference[recorded], near, name)


def without_flipped_roundings(found, reference, near):
    """Returns gradients, with the reference's where they were rounded to another bfloat16.

    A sum near the middle of two bfloat16 numbers goes to either, depending on the order in which a
    CPU adds float32. That moves an element by one unit of a bfloat16, and can happen to few.
    """
    distance = np.abs(found - reference)
    is_flipped = (distance > near[2] * np.abs(reference).max()) & (
        distance <= np.abs(reference) * 2.0**-8
    )
    assert is_flipped.mean() < 1e-3
    return np.where(is_flipped, reference, found)


# Covered also by test_dense_connections.py, test_rotary.py and test_pattention.py.
VARIANTS = ("muddpythia_l3_d48", "muddllama_prepost_l4_d32", "llama31", "jax_b")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in VARIANTS)) for name in WAYS]
)
def test_numbers_of_the_reference(name, tmp_path):
    read, near, way = WAYS[name]
    golden = read(name)
    reference, folder = tmp_path / "source", tmp_path / "run"
    golden.store(reference, golden.parameters)
    run(*golden.arguments, f"from={golden.source}:{reference}", f"to={folder}")
    model, params = model_in_run(folder, *way), parameters_in_run(folder)
    # The JAX program of TokenFormer rounds a tied table, here for the loss only.
    is_rounded = name in ("jax_a", "jax_b")
    trained = model_in_run(folder, *way, BFLOAT16_TABLE) if is_rounded else model

    @jax.jit
    def numbers(params, batch):
        def loss(params):
            total = loss_sums(trained.merge(params), batch, trained.config.objective).total
            return total / batch.loss_mask_BT.sum()

        return model.merge(params)(batch), *jax.value_and_grad(loss)(params)

    logits, loss, gradients = numbers(params, golden.batch)
    close(logits, golden.logits, near.logits)
    if "logits_unrounded_rope" in golden.arrays:  # MUDDFormer's PyTorch programs round it
        rounding = np.abs(golden.arrays["logits_unrounded_rope"] - golden.logits).max()
        assert np.abs(logits - golden.logits).max() < rounding / 10
    close(loss, golden.loss, near.loss)
    wanted = golden.converted(tmp_path / "gradients", golden.gradients)
    rounded = ("token_embedder/embedding",) if is_rounded else ()
    close_gradients(gradients, wanted, near.gradients, rounded)

    if golden.source != "hf":
        return
    run(f"from={folder}", f"to=hf:{tmp_path / 'out'}")
    tensors = golden.parameters
    exported = load_file(tmp_path / "out" / "model.safetensors")
    if name == "gptneox":
        exported["lm_head.weight"] = exported.pop("embed_out.weight")
    if golden.config_json.get("tie_word_embeddings"):
        tensors.pop("lm_head.weight", None)
    same_bits(exported, tensors)
    again, given = HFWeights(tmp_path / "out"), HFWeights(reference)
    assert (again.keys, again.family) == (given.keys, given.family)


# --- TokenFormer ----------------------------------------------------------------------------------


def config_of(golden, *keys):
    """For training."""
    more = ("scan_layers=true", "remat_policy=none", "dataset_type=synthetic")
    return load([*golden.arguments, *EXACT, *more, *keys]).config


@pytest.mark.parametrize("name", some_quick(["jax_a", "jax_b"], 2))
def test_four_train_steps(name, tmp_path):
    golden = of_tokenformer(name)
    config = config_of(golden, BFLOAT16_TABLE)
    model = Model(config.model)
    schedule, optimizer, _ = made_for_training(config, model)
    step = jax.jit(make_train_step(model, optimizer, schedule))
    params = golden.converted(tmp_path / "before", golden.parameters)
    state = TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))
    for number in range(4):
        state, metrics = step(state, golden.batch)
        for name in ("learning_rate", "loss", "grad_norm", "param_norm"):
            stored_name = "raw_grad_norm" if name == "grad_norm" else name
            expected = golden.arrays[f"train/{stored_name}"][number]
            np.testing.assert_allclose(metrics[name], expected, rtol=1e-5, err_msg=name)
    after = golden.converted(
        tmp_path / "after", below(golden.arrays, "params_after_4_steps/params/")
    )
    gradients = golden.converted(tmp_path / "gradients", golden.gradients)
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(gradients))
    compared, moved = 0, 0.0
    for actual, reference, before, gradient in zip(
        *map(jax.tree.leaves, (state.params, after, params, gradients)), strict=True
    ):
        # Adam makes a step of full size out of any gradient, also of one that is only rounding.
        counts = np.abs(gradient) > 1e-5 * largest
        np.testing.assert_allclose(actual[counts], reference[counts], rtol=1e-5, atol=2e-6)
        compared += counts.sum()
        moved = max(moved, np.abs(reference - before).max())
    assert compared > 0.95 * model.num_parameters  # the rest: rows of tokens that do not occur
    assert moved > 1e-3


@pytest.mark.parametrize("name", some_quick(["jax_a", "jax_b"], 2))
def test_bfloat16_activations(name, tmp_path):
    # Sums over slots are float32 here and were bfloat16 there, so only the rounding is alike.
    golden = of_tokenformer(name)
    params = golden.converted(tmp_path / "source", golden.parameters)
    found = Model(config_of(golden, "dtype=bfloat16").model).merge(params)(golden.batch)
    close(found, golden.logits, (0, 0, 0.03))
    # Not further from the truth than the reference.
    reference = golden.arrays["small/logits_bf16_activations"]
    reference, actual = (np.abs(logits - golden.logits).mean() for logits in (reference, found))
    assert actual < 1.2 * reference


@pytest.mark.parametrize("name", ["jax_a", "torch_a"])
def test_score_normalizations(name):
    arrays = of_tokenformer(name).arrays
    scores = jnp.asarray(arrays["norm_fn/x"])
    keys = {"slot_num": scores.shape[-1]}
    if name == "torch_a":
        keys |= {"gelu_approximate": False, "score_norm_epsilon": 0.0}
    sections = {}
    for kind in get_args(PattentionConfig.model_fields["normalize_type"].annotation):
        plain = {"normalize_type": kind, **keys}
        sections[kind] = PattentionConfig(**plain)
        for factor, zoom in ((1.0, 0.0), (0.7, 9.0)):
            section = PattentionConfig(zoom_dim=zoom, **{"scale_factors.qkv": factor}, **plain)
            sections[f"{kind}/scale{factor}_zoom{zoom}"] = section
    recorded = {what: section for what, section in sections.items() if f"norm_fn/{what}" in arrays}
    assert len(recorded) == len(below(arrays, "norm_fn/")) - 1

    @jax.jit
    def normalized(scores):
        return {what: Theta(section, "qkv", 8)(scores) for what, section in recorded.items()}

    for what, actual in normalized(scores).items():
        close(actual, arrays[f"norm_fn/{what}"], (0, 0, 1e-5), what)
