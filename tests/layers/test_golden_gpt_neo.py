"""GPT-Neo against Hugging Face's model and against its own mesh-tensorflow program.

The READMEs of tests/golden/gptneo and gptneo_meshtf say what the arrays are.
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
from MaxText.layers.model import Model
from MaxText.training.objective import loss_sums
from tests.small_models import some_quick

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
MESH_CASES = ("linear", "local5", "rotary", "macaron", "rezero", "axial", "memkv")
NORMS = {"norm_1": "pre_self_attention_layer_norm", "norm_2": "pre_mlp_layer_norm"}


def stacked(flat: dict[tuple[int | None, str], np.ndarray], num_layers: int) -> dict:
    """Parameters by (layer or None, path), with layers on a first dimension."""
    paths = {path for layer, path in flat if layer is not None}
    ours = {path: value for (layer, path), value in flat.items() if layer is None}
    for path in paths:
        ours[f"layers/{path}"] = np.stack([flat[i, path] for i in range(num_layers)])
    return jax.tree.map(jnp.asarray, nested(ours))


def from_mesh_tensorflow(theirs: dict[str, np.ndarray], num_heads: int) -> dict:
    """By (layer or None, path of ours)."""
    ours = {}
    for name, value in theirs.items():
        path = name.removeprefix("gpt2/").split("/")
        if not path[0].startswith("h") or not path[0][1:].isdigit():
            key = {
                "wte": "token_embedder/embedding",
                "wpe": "position_embedder/embedding",
                "axial_wpe_1": "position_embedder/first/embedding",
                "axial_wpe_2": "position_embedder/second/embedding",
                "ln_f/g": "decoder_norm/scale",
                "ln_f/b": "decoder_norm/bias",
            }["/".join(path)]
            ours[None, key] = value
            continue
        layer, rest = int(path[0][1:]), path[1:]
        leaf = rest[-1]
        if rest[0] in NORMS:
            key = f"{NORMS[rest[0]]}/{ {'g': 'scale', 'b': 'bias'}[leaf] }"
        elif leaf in ("mem_k", "mem_v"):
            key = "self_attention/" + {"mem_k": "memory_key", "mem_v": "memory_value"}[leaf]
        elif rest[0] == "attn" and leaf in ("q", "k", "v"):
            which = {"q": "query", "k": "key", "v": "value"}[leaf]
            key, value = f"self_attention/{which}/kernel", value.reshape(len(value), num_heads, -1)
        elif leaf == "o":
            key = "self_attention/out/kernel"
            value = value.reshape(num_heads, -1, value.shape[-1])
        elif leaf == "o_b":
            key = "self_attention/out/bias"
        elif rest[0] in ("norm_rezero_1", "norm_rezero_2"):
            key = {"1": "attention_gate/scale", "2": "mlp_gate/scale"}[rest[0][-1]]
        else:
            part = "macaron_mlp" if "macaron" in name else "mlp"
            key = f"{part}/{ {'c_fc': 'wi', 'c_proj': 'wo'}[rest[-2]] }/{leaf}"
        ours[layer, key] = value
    return ours


def from_hugging_face(theirs: dict[str, np.ndarray], num_heads: int) -> dict:
    """By (layer or None, path of ours); matrices are (out, in) there."""
    ours = {}
    for name, value in theirs.items():
        *path, leaf = name.removeprefix("transformer.").split(".")
        kind = {"weight": "scale", "bias": "bias"}[leaf]
        if path[0] == "lm_head":
            continue  # the tied table
        if path[0] != "h":
            key = {
                "wte": "token_embedder/embedding",
                "wpe": "position_embedder/embedding",
                "ln_f": f"decoder_norm/{kind}",
            }[path[0]]
            ours[None, key] = value
            continue
        layer, part = int(path[1]), path[-1]
        if part in ("ln_1", "ln_2"):
            key = f"{NORMS[part.replace('ln', 'norm')]}/{kind}"
        elif part in ("c_fc", "c_proj"):
            key = f"mlp/{ {'c_fc': 'wi', 'c_proj': 'wo'}[part] }/"
            key, value = key + {"weight": "kernel", "bias": "bias"}[leaf], value.T
        elif part == "out_proj":
            key = "self_attention/out/" + {"weight": "kernel", "bias": "bias"}[leaf]
            if leaf == "weight":
                value = value.T.reshape(num_heads, -1, len(value))
        else:
            which = {"q_proj": "query", "k_proj": "key", "v_proj": "value"}[part]
            key = f"self_attention/{which}/kernel"
            value = value.T.reshape(value.shape[1], num_heads, -1)
        ours[layer, key] = value
    return ours


def model_of(scan: bool, theirs: dict, length: int, **keys) -> Model:
    """Our model of one of their configurations."""
    config = configure(
        decoder_block="gpt_neo",
        base_emb_dim=theirs["n_embd"],
        base_num_query_heads=theirs["n_head"],
        base_num_kv_heads=theirs["n_head"],
        head_dim=-1,
        base_mlp_dim=4 * theirs["n_embd"],
        base_num_decoder_layers=theirs["n_layer"],
        vocab_size=theirs["n_vocab"],
        max_target_length=length,
        dtype="float32",
        matmul_precision="highest",
        dataset_type="synthetic",
        scan_layers=scan,
        remat_policy="full" if scan else "none",
        **keys,
    )
    return Model(config.model)


def mesh_keys(theirs: dict) -> dict:
    """Their options as keys of ours."""
    keys = {}
    kinds = theirs["attention_types"]
    if set(kinds) != {"global"}:
        keys["attention_types"] = [[kinds, 1]]
    if "local" in kinds:
        keys["sliding_window_size"] = theirs["local_attention_radius"]
    if theirs.get("axial_pos_emb"):
        keys |= {"position_embedding": "axial", "axial_pos_shape": theirs["axial_pos_emb"]}
    if theirs.get("rotary_emb"):
        keys["position_embedding"] = "rotary"
    if theirs["num_mem_kv"]:
        keys["num_mem_kv"] = theirs["num_mem_kv"]
    if theirs.get("rezero"):
        keys["use_rezero"] = True
    if theirs.get("macaron"):
        keys |= {"use_macaron": True, "macaron_prenorm": False}
    if "linear" in kinds:
        keys |= {"linear_attention_chunk": 7}
    return keys


@pytest.mark.parametrize("scan", some_quick([True, False], 2))
@pytest.mark.parametrize("case", MESH_CASES)
def test_mesh_tensorflow(case, scan):
    arrays = dict(np.load(GOLDEN / "gptneo_meshtf" / f"{case}.npz"))
    theirs = json.loads((GOLDEN / "gptneo_meshtf" / f"{case}.json").read_text())["params"]
    tokens = arrays["input_ids"]
    model = model_of(scan, theirs, tokens.shape[1], **mesh_keys(theirs), z_loss_multiplier=1e-4)
    given = {n.removeprefix("param/"): v for n, v in arrays.items() if n.startswith("param/")}
    params = stacked(from_mesh_tensorflow(given, theirs["n_head"]), theirs["n_layer"])
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, model.abstract)
    weights = np.ones(tokens.shape, np.float32)
    batch = Batch(jnp.asarray(tokens), jnp.asarray(arrays["labels"]), jnp.asarray(weights))

    @jax.jit
    def run(params):
        module = model.merge(params)
        total = loss_sums(module, batch, model.section.objective).total
        return module.logits(module.hidden(batch)[0]), total / tokens.size

    logits, loss = run(params)
    np.testing.assert_allclose(logits, arrays["logits"], atol=5e-5)
    np.testing.assert_allclose(loss, arrays["loss"], rtol=1e-5)


def test_hugging_face():
    arrays = dict(np.load(GOLDEN / "gptneo" / "gptneo_tiny_a.npz"))
    theirs = json.loads((GOLDEN / "gptneo" / "gptneo_tiny_a.json").read_text())["hf_config"]
    sizes = {
        "n_embd": theirs["hidden_size"],
        "n_head": theirs["num_heads"],
        "n_layer": theirs["num_layers"],
        "n_vocab": theirs["vocab_size"],
    }
    tokens = arrays["input_ids"]
    model = model_of(
        True,
        sizes,
        tokens.shape[1],
        trainable_position_size=theirs["max_position_embeddings"],
        attention_types=theirs["attention_types"],
        sliding_window_size=theirs["window_size"],
    )

    def ours(folder: str) -> dict:
        given = {n.removeprefix(folder): v for n, v in arrays.items() if n.startswith(folder)}
        return stacked(from_hugging_face(given, sizes["n_head"]), sizes["n_layer"])

    weights = np.ones(tokens.shape, np.float32)
    weights[:, -1] = 0.0
    batch = Batch(*map(jnp.asarray, (tokens, np.roll(tokens, -1, axis=1), weights)))

    @jax.jit
    def run(params):
        def loss(params):
            module = model.merge(params)
            total = loss_sums(module, batch, model.section.objective).total
            return total / weights.sum()

        module = model.merge(params)
        return module.logits(module.hidden(batch)[0]), *jax.value_and_grad(loss)(params)

    logits, loss, gradients = run(ours("param/"))
    np.testing.assert_allclose(logits, arrays["logits"], atol=5e-5)
    np.testing.assert_allclose(loss, arrays["loss"], rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4 * np.abs(b).max()),
        gradients,
        ours("grad/"),
    )
