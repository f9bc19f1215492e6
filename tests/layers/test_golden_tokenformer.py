"""TokenFormer against its own programs: the JAX one (jax_a, jax_b) and the PyTorch one (torch_a).

tests/golden/tokenformer/README.md says what the arrays are and how they were made.
"""

import json
import pathlib
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.configuration.layer_sections import Pattention
from MaxText.configuration.loading import configure
from MaxText.configuration.schema import Config
from MaxText.input_pipeline.batch import Batch
from MaxText.layers.connections import Inputs
from MaxText.layers.context import Context
from MaxText.layers.model import Model
from MaxText.layers.pattention import theta
from MaxText.layers.rotary import rotary_table
from MaxText.training.objective import loss_sums
from MaxText.training.optimizer import make_optimizer
from MaxText.training.schedule import learning_rate_schedule
from MaxText.training.state import TrainState
from MaxText.training.step import make_train_step
from tests.layers.tokenformer_names import from_jax, from_pytorch, with_prefix
from tests.small_models import some_quick

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "tokenformer"
JAX_CASES, CASES = ("jax_a", "jax_b"), ("jax_a", "jax_b", "torch_a")
# How the same numbers are computed.
WAYS = {
    "scanned": {"scan_layers": True, "remat_policy": "full"},
    "written out, in blocks": {
        "scan_layers": False,
        "remat_policy": "minimal",
        "attention": "blocked",
        "attention_block_size": 5,
    },
}
# Keys of the JAX program that mean nothing here, or that the bundle says.
NOT_OURS = ("param_scan_axis", "use_untrainable_positional_embedding", "trainable_position_size")


def config_of(case: str, **keys: Any) -> Config:
    """Their configuration in our keys; nearly all of the JAX program's have the same name."""
    theirs = json.loads((GOLDEN / f"{case}.json").read_text())["config"]
    if case in JAX_CASES:
        ours = {name: value for name, value in theirs.items() if name not in NOT_OURS}
        ours["learning_rate_final_fraction"] = ours.pop("cosine_learning_rate_final_fraction")
        ours["decoder_block"] = "tokenformer"
    else:
        ours = {
            "decoder_block": "tokenformer_pytorch",
            "base_emb_dim": theirs["hidden_size"],
            "base_num_query_heads": theirs["num_attention_heads"],
            "base_num_kv_heads": theirs["num_attention_heads"],
            "base_num_decoder_layers": theirs["num_layers"],
            "head_dim": -1,
            "vocab_size": theirs["padded_vocab_size"],
            "max_target_length": theirs["seq_length"],
            "normalize_type": theirs["norm_activation_type"],
            "rotary_pct": theirs["rotary_pct"],
            **{name: theirs[name] for name in ("qkv_slot_num", "proj_slot_num", "ffn_slot_num")},
            "dtype": "float32",
            "scan_layers": True,
        }
    ours |= {"remat_policy": "none", "matmul_precision": "highest", "dataset_type": "synthetic"}
    ours |= keys
    if not ours.get("logits_via_embedding", True):
        del ours["normalize_embedding_logits"]
    return configure(**ours)


class Golden:
    """One case: its arrays, and its parameters under our names."""

    def __init__(self, case: str):
        self.arrays = dict(np.load(GOLDEN / f"{case}.npz"))
        self._in_jax = case in JAX_CASES

    def parameters(self, folder: str) -> dict:
        """Of a folder of arrays that are named as parameters."""
        if self._in_jax:
            return from_jax(with_prefix(self.arrays, f"{folder}/params/"))
        return from_pytorch(with_prefix(self.arrays, f"{folder}/"))

    @property
    def logits(self) -> np.ndarray:
        """With the table as it is: the JAX program rounds it to bfloat16."""
        exact = self.arrays.get("small/logits_exact_embedding")
        return self.arrays["small/logits"] if exact is None else exact

    @property
    def batch(self) -> Batch:
        arrays = self.arrays
        if not self._in_jax:
            parts = (arrays["tokens"], arrays["labels"], arrays["loss_mask"])
            return Batch(*map(jnp.asarray, parts))
        parts = [arrays[f"batch/{name}"] for name in ("inputs", "targets")]
        weights = (arrays["batch/targets_segmentation"] != 0).astype(np.float32)
        places = [arrays[f"batch/inputs_{name}"] for name in ("position", "segmentation")]
        return Batch(*map(jnp.asarray, (*parts, weights, *places)))


@pytest.fixture(scope="module", params=CASES)
def case(request):
    return request.param, Golden(request.param)


@pytest.fixture(scope="module", params=JAX_CASES)
def jax_case(request):
    return request.param, Golden(request.param)


def relative(ours: Any, theirs: Any) -> float:
    """Largest difference over the largest element."""
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    assert ours.shape == theirs.shape
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


# For losses and gradients the JAX program rounds the table of its tied head; its logits without
# the rounding are in small/logits_exact_embedding.
ROUNDED = {name: {"logits_embedding_dtype": "bfloat16"} for name in JAX_CASES}


def test_logits(case):
    name, golden = case
    model = Model(config_of(name).model)
    params = golden.parameters("params_small")
    assert jax.tree.map(np.shape, params) == jax.tree.map(np.shape, model.abstract)

    @jax.jit
    def run(params, batch):
        decoder = model.merge(params)
        return decoder.logits(decoder.hidden(batch)[0])

    assert relative(run(params, golden.batch), golden.logits) < 1e-5


@pytest.mark.parametrize("way", some_quick(WAYS, 3))
def test_loss_and_gradients(case, way):
    name, golden = case
    model = Model(config_of(name, **WAYS[way], **ROUNDED.get(name, {})).model)

    @jax.jit
    def run(params, batch):
        def loss(params):
            return loss_sums(model.merge(params), batch, model.section.objective).total / (
                batch.weights_BT.sum()
            )

        return jax.value_and_grad(loss)(params)

    loss, gradients = run(golden.parameters("params_small"), golden.batch)
    np.testing.assert_allclose(loss, golden.arrays["small/loss"], rtol=1e-6)
    theirs = golden.parameters("grads_small")
    if name == "jax_b":
        # Softmax ignores what a bias adds to all keys: both gradients are rounding.
        for tree in (gradients, theirs):
            assert (
                np.abs(tree["layers"]["self_attention"]["key"]["values"].pop("bias")).max() < 1e-7
            )
    difference = jax.tree.map(relative, gradients, theirs)
    assert max(jax.tree.leaves(difference)) < 1e-4, difference


def test_four_train_steps(jax_case):
    name, golden = jax_case
    config = config_of(name, **ROUNDED[name])
    model = Model(config.model)
    schedule = learning_rate_schedule(config.schedule)
    optimizer = make_optimizer(config.optimizer, schedule, model.parameters)
    step = jax.jit(make_train_step(model, optimizer, schedule, num_microbatches=1, dropout_seed=0))
    params = jax.tree.map(jnp.asarray, golden.parameters("params_small"))
    state = TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))
    arrays = golden.arrays
    for number in range(4):
        state, metrics = step(state, golden.batch)
        for ours, theirs in (
            ("learning_rate", "learning_rate"),
            ("loss", "loss"),
            ("grad_norm", "raw_grad_norm"),
            ("param_norm", "param_norm"),
        ):
            expected = arrays[f"train/{theirs}"][number]
            np.testing.assert_allclose(metrics[ours], expected, rtol=1e-5, err_msg=ours)
    after, gradients = map(golden.parameters, ("params_after_4_steps", "grads_small"))
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(gradients))
    compared, moved = 0, 0.0
    for ours, theirs, before, gradient in zip(
        *map(jax.tree.leaves, (state.params, after, params, gradients)), strict=True
    ):
        # Adam makes a step of full size out of any gradient, also of one that is only rounding.
        counts = np.abs(gradient) > 1e-5 * largest
        np.testing.assert_allclose(ours[counts], theirs[counts], rtol=1e-5, atol=2e-6)
        compared += counts.sum()
        moved = max(moved, np.abs(theirs - before).max())
    assert compared > 0.95 * model.num_parameters  # the rest: rows of tokens that do not occur
    assert moved > 1e-3


def test_every_layer(case):
    """What each part of each layer hands on, one after another."""
    name, golden = case
    config = config_of(name)
    model, arrays = Model(config.model), golden.arrays
    params = golden.parameters("params_small")
    batch, size = golden.batch, config.model.shape.dimensions
    turned = None
    if name == "torch_a":
        places_BT = jnp.arange(batch.tokens_BT.shape[1])[None]
        turned = rotary_table(places_BT, size.head_dim // 4, config.model.position)
    context = Context(segments_BT=batch.segments_BT, rotary=turned)
    decoder = model.merge(params)
    x_BTD = decoder.token_embedder(batch.tokens_BT)
    for index in range(size.num_layers):
        weights = jax.tree.map(lambda leaf: leaf[index], params["layers"])  # noqa: B023
        layer = model.merge({**params, "layers": weights}).layers
        h_BTD = layer.pre_self_attention_layer_norm(x_BTD)
        found = {
            "prenorm_out": h_BTD,
            "attention_out": layer.self_attention((h_BTD, h_BTD, h_BTD), context)[0],
        }
        for part in ("query", "key", "value"):
            projected = getattr(layer.self_attention, part)(h_BTD)
            found[f"{part}_pattention"] = projected.reshape(h_BTD.shape)
        x_BTD, _, _ = layer(Inputs.all(x_BTD), context)
        found["out"] = x_BTD
        compared = {k: v for k, v in found.items() if f"small/layer{index}_{k}" in arrays}
        assert len(compared) == (3 if name in JAX_CASES else 5)
        for what, ours in compared.items():
            assert relative(ours, arrays[f"small/layer{index}_{what}"]) < 1e-5, (index, what)
    last = "decoder_norm_out" if name in JAX_CASES else "final_norm_out"
    assert relative(decoder.decoder_norm(x_BTD), arrays[f"small/{last}"]) < 1e-5


def test_bfloat16_activations(jax_case):
    # Sums over slots are float32 here and were bfloat16 there, so only the rounding is alike.
    name, golden = jax_case
    model = Model(config_of(name, dtype="bfloat16").model)
    decoder = model.merge(golden.parameters("params_small"))
    logits = decoder.logits(decoder.hidden(golden.batch)[0])
    exact, theirs = golden.logits, golden.arrays["small/logits_bf16_activations"]
    assert relative(logits, exact) < 0.03
    # Not further from the truth than theirs.
    assert np.abs(logits - exact).mean() < 1.2 * np.abs(theirs - exact).mean()


@pytest.mark.parametrize("kind", get_args(Pattention.model_fields["normalize_type"].annotation))
@pytest.mark.parametrize(("factor", "zoom"), [(1.0, 0.0), (0.7, 9.0)])
def test_score_normalisations_of_the_jax_program(jax_case, kind, factor, zoom):
    arrays = jax_case[1].arrays
    scores = arrays["norm_fn/x"]
    section = Pattention(
        slot_num=scores.shape[-1], normalize_type=kind, zoom_dim=zoom, qkv_scale_factor=factor
    )
    ours = theta(section, "qkv", 8)(jnp.asarray(scores))
    assert relative(ours, arrays[f"norm_fn/{kind}/scale{factor}_zoom{zoom}"]) < 1e-5


@pytest.mark.parametrize("kind", ["softmax", "gelu_l2_norm", "l2_norm_gelu"])
def test_score_normalisations_of_the_pytorch_program(kind):
    arrays = Golden("torch_a").arrays
    scores = arrays["norm_fn/x"]
    section = Pattention(
        slot_num=scores.shape[-1],
        normalize_type=kind,
        gelu_approximate=False,
        score_norm_epsilon=0.0,
    )
    ours = theta(section, "qkv", 8)(jnp.asarray(scores))
    assert relative(ours, arrays[f"norm_fn/{kind}"]) < 1e-5
