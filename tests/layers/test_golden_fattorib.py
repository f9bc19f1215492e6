"""fattorib/transformer's options against its own code. See tests/golden/fattorib/README.md."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.configuration.loading import configure
from MaxText.input_pipeline.batch import Batch
from MaxText.layers.model import Model
from MaxText.training.objective import loss_sums
from tests.layers.test_golden_gpt_neo import stacked

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "fattorib"
CASES = {
    "alibi_fused_h4": {},
    "sgu_headqk_sequential_h4": {
        "position_embedding": "learned",
        "block_arrangement": "sequential",
        "parallel_residual_shared_norm": False,
        "static_sgu": True,
        "static_sgu_kernel": 4,
        "head_qk": True,
        "head_qk_dim": 256,
    },
}
PARTS = {
    "LayerNorm_0": "pre_self_attention_layer_norm",
    "LayerNorm_1": "pre_mlp_layer_norm",
    "query_proj": "self_attention/query",
    "key_proj": "self_attention/key",
    "value_proj": "self_attention/value",
    "residual_out": "self_attention/out",
    "fc_in": "mlp/wi",
    "fc_residual": "mlp/wo",
}


def from_theirs(theirs, num_heads):
    """By (layer or None, path of ours)."""
    ours = {}
    for name, value in theirs.items():
        path = name.split("/")
        if not path[0].startswith("TransformerBlock_"):
            part = {
                "wte": "token_embedder",
                "wpe": "position_embedder",
                "LayerNorm_0": "decoder_norm",
                "head_q": "head_qk/query",
                "head_k": "head_qk/key",
            }[path[0]]
            ours[None, f"{part}/{path[1]}"] = value
            continue
        part, leaf = PARTS[path[-2]], path[-1]
        if part.startswith("self_attention/"):
            if part.endswith("out"):
                value = value.reshape(num_heads, -1, value.shape[-1]) if value.ndim == 2 else value
            else:
                value = value.reshape(*value.shape[:-1], num_heads, -1)
        ours[int(path[0].rpartition("_")[2]), f"{part}/{leaf}"] = value
    return ours


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("case", CASES)
def test_fattorib(case, chunks):
    arrays = dict(np.load(GOLDEN / f"{case}.npz"))
    theirs = json.loads((GOLDEN / f"{case}.json").read_text())["config"]
    tokens, heads = arrays["tokens"], theirs["num_head"]
    width = theirs["embedding_dim"] // (2 if theirs.get("use_static_sgu") else 1)
    config = configure(
        decoder_block="fattorib",
        base_emb_dim=theirs["embedding_dim"],
        base_num_query_heads=heads,
        base_num_kv_heads=heads,
        head_dim=width // heads,
        base_mlp_dim=4 * theirs["embedding_dim"],
        base_num_decoder_layers=theirs["N"],
        vocab_size=theirs["vocab_size"],
        max_target_length=tokens.shape[1],
        num_vocab_tiling=chunks,
        dtype="float32",
        matmul_precision="highest",
        dataset_type="synthetic",
        scan_layers=True,
        remat_policy="none",
        **CASES[case],
    )
    model = Model(config.model)

    def ours(folder):
        given = {n.removeprefix(folder): v for n, v in arrays.items() if n.startswith(folder)}
        return stacked(from_theirs(given, heads), theirs["N"])

    params = ours("params/")
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, model.abstract)
    weights = np.ones(tokens.shape, np.float32)
    weights[:, -1] = 0
    batch = Batch(*map(jnp.asarray, (tokens, np.roll(tokens, -1, axis=1), weights)))

    @jax.jit
    def run(params):
        def loss(params):
            total = loss_sums(model.merge(params), batch, model.section.objective).total
            return total / weights.sum()

        return model.merge(params)(batch), *jax.value_and_grad(loss)(params)

    logits, loss, gradients = run(params)
    np.testing.assert_allclose(logits, arrays["logits_f64"], atol=1e-4)
    np.testing.assert_allclose(loss, arrays["loss"], atol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-3),
        gradients,
        ours("grads/"),
    )
