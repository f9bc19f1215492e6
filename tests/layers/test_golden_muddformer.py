"""MUDDFormer and MUDDPythia against their PyTorch programs, and the pre/post-norm form against the
JAX one. tests/golden/muddformer/README.md says what the arrays are and how they were made.
"""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.configuration.loading import configure
from MaxText.conversion.weights import nested
from MaxText.input_pipeline.batch import Batch
from MaxText.layers.context import Context
from MaxText.layers.decoder import Decoder
from MaxText.layers.model import Model
from MaxText.training.objective import loss_sums
from tests.layers.muddformer_names import from_jax, from_pytorch

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "muddformer"
CASES = {
    "muddformer_l4_d32": "muddformer",
    "muddpythia_l3_d48": "muddpythia",
    "muddllama_prepost_l4_d32": "muddformer_prepost",
}


class Golden:
    """One case: its arrays, our configuration of it and its parameters under our names."""

    def __init__(self, case: str):
        self.arrays = dict(np.load(GOLDEN / f"{case}.npz"))
        self.facts = json.loads((GOLDEN / f"{case}.json").read_text())
        theirs = self.facts["config"]
        self.released = CASES[case] != "muddformer_prepost"
        keys = {
            "rope_table_dtype": self.facts.get("rope_table_rounding", "float32"),
            "base_mlp_dim": theirs.get("intermediate_size", theirs.get("mlp_dim")),
            "base_num_decoder_layers": theirs["n_layer"],
            "base_emb_dim": theirs["dim"],
            "vocab_size": theirs["vocab_size"],
            "normalization_layer_epsilon": theirs["norm_eps"],
        }
        for name in ("base_num_query_heads", "base_num_kv_heads"):
            keys[name] = theirs["n_head"]
        self.config = configure(
            decoder_block=CASES[case],
            head_dim=-1,
            max_target_length=self.arrays["tokens"].shape[1],
            dtype="float32",
            scan_layers=False,
            remat_policy="full",
            matmul_precision="highest",
            dataset_type="synthetic",
            dense_mixing="sum",
            **keys,
        )
        self.model = Model(self.config.model)
        self.num_layers, self.num_heads = theirs["n_layer"], theirs["n_head"]
        tolerance = self.facts["suggested_tolerance"]
        self.near = {"atol": tolerance["atol"], "rtol": tolerance["rtol"]}
        self.parameters = jax.tree.map(jnp.asarray, nested(self.ours("param")))

    def ours(self, folder: str) -> dict[str, np.ndarray]:
        """A folder of arrays named as parameters, under our names."""
        theirs = {
            name.removeprefix(f"{folder}/"): value
            for name, value in self.arrays.items()
            if name.startswith(f"{folder}/")
        }
        if self.released:
            return from_pytorch(theirs, self.num_heads)
        return from_jax(theirs)

    @property
    def batch(self) -> Batch:
        tokens = self.arrays["tokens"]
        weights = np.ones(tokens.shape, np.float32)
        weights[:, -1] = 0.0
        return Batch(*map(jnp.asarray, (tokens, np.roll(tokens, -1, axis=1), weights)))

    def walked(self, module: Decoder):
        """Hidden states of the embedding and of every layer."""
        tokens_BT = self.batch.tokens_BT
        positions_BT = jnp.arange(tokens_BT.shape[1])[None]
        context = Context(rotary=module._rotary(positions_BT))
        x_BTD = module._embed(tokens_BT, positions_BT, context)
        return module._written_out(x_BTD, context, None, "none").outputs


@pytest.fixture(scope="module", params=CASES)
def golden(request):
    return Golden(request.param)


def test_parameters_are_theirs(golden):
    flat = {
        "/".join(entry.key for entry in path): leaf.shape
        for path, leaf in jax.tree_util.tree_leaves_with_path(golden.parameters)
    }
    assert flat == {name: info.shape for name, info in golden.model.parameters.items()}
    assert golden.model.num_parameters == golden.facts["parameter_count"]


def test_logits_hidden_states_and_sums(golden):
    @jax.jit
    def run(parameters):
        module = golden.model.merge(parameters)
        sources = golden.walked(module)
        mixed = [
            module.connections(depth, sources[: depth + 1], {})[0]
            for depth in range(1, golden.num_layers + 1)
        ]
        logits = module.logits(module.hidden(golden.batch)[0])
        return logits, [source.x_BTD for source in sources], mixed

    logits, hidden, mixed = run(golden.parameters)
    np.testing.assert_allclose(logits, golden.arrays["logits"], **golden.near)
    for index, x_BTD in enumerate(hidden):
        np.testing.assert_allclose(x_BTD, golden.arrays[f"hidden/{index}"], **golden.near)
    for index, inputs in enumerate(mixed):
        theirs = golden.arrays[f"mix/{index}"]
        ours = np.stack(inputs) if len(theirs) == 4 else np.stack([inputs.r])
        np.testing.assert_allclose(ours, theirs, **golden.near)


def test_table_that_is_not_rounded(golden):
    if not golden.released:
        pytest.skip("the JAX program does not round it")
    section = golden.config.model
    position = section.position.model_copy(update={"rope_table_dtype": "float32"})
    model = Model(section.model_copy(update={"position": position}))

    @jax.jit
    def run(parameters):
        module = model.merge(parameters)
        return module.logits(module.hidden(golden.batch)[0])

    logits = run(golden.parameters)
    np.testing.assert_allclose(logits, golden.arrays["logits_unrounded_rope"], **golden.near)
    # Rounding has an effect, so the other test can fail.
    assert np.abs(logits - golden.arrays["logits"]).max() > 1e-4


def test_loss_and_gradients(golden):
    @jax.jit
    def run(parameters):
        def loss(parameters):
            module, section = golden.model.merge(parameters), golden.config.model.objective
            total = loss_sums(module, golden.batch, section).total
            return total / golden.batch.weights_BT.sum()

        return jax.value_and_grad(loss)(parameters)

    loss, gradients = run(golden.parameters)
    np.testing.assert_allclose(loss, golden.arrays["loss"], rtol=1e-5)
    ours = {
        "/".join(entry.key for entry in path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(gradients)
    }
    for name, theirs in golden.ours("grad").items():
        scale = np.abs(theirs).max()
        np.testing.assert_allclose(ours[name], theirs, atol=2e-5 * scale, rtol=2e-4, err_msg=name)
