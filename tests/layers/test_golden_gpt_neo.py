"""GPT-Neo's options against its own mesh-tensorflow program (tests/golden/gptneo_meshtf/README.md).

The converter has no table for that program's checkpoints: its rows stand here.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.config.loading import load_config
from MaxText.conversion.families.gpt import GPT_NEO
from MaxText.conversion.family import row
from MaxText.conversion.hf_import import TensorMap
from MaxText.conversion.weight_source import unflatten
from MaxText.layers.assembly.model import Model
from MaxText.layers.batch import Batch
from MaxText.training.objective import loss_sums
from tests.conversion.golden_models import GOLDEN, below

LAYER = "h{layer}/"
FEED_FORWARDS = {"mlp": "mlp", "mlp_macaron": "macaron_mlp"}
ROWS = (
    row("wte", "token_embedder/embedding", "V D", "V D"),
    row("wpe", "position_embedder/embedding", "P D", "P D"),
    row("axial_wpe_1", "position_embedder/first/embedding", "P D", "P D"),
    row("axial_wpe_2", "position_embedder/second/embedding", "P D", "P D"),
    row("ln_f/g", "decoder_norm/scale", "D", "D"),
    row("ln_f/b", "decoder_norm/bias", "D", "D"),
    *(
        row(f"{LAYER}norm_{number}/{mtf_name}", f"layers/{norm}/{own_name}", "D", "D")
        for number, norm in ((1, "pre_self_attention_layer_norm"), (2, "pre_mlp_layer_norm"))
        for mtf_name, own_name in (("g", "scale"), ("b", "bias"))
    ),
    row(f"{LAYER}norm_rezero_1/g", "layers/attention_gate/scale", "", ""),
    row(f"{LAYER}norm_rezero_2/g", "layers/mlp_gate/scale", "", ""),
    row(f"{LAYER}attn/q", "layers/self_attention/query/kernel", "D (N H)", "D N H"),
    row(f"{LAYER}attn/k", "layers/self_attention/key/kernel", "D (N H)", "D N H"),
    row(f"{LAYER}attn/v", "layers/self_attention/value/kernel", "D (N H)", "D N H"),
    row(f"{LAYER}attn/o", "layers/self_attention/out/kernel", "(N H) D", "N H D"),
    row(f"{LAYER}attn/compute_output_bias/o_b", "layers/self_attention/out/bias", "D", "D"),
    row(f"{LAYER}attn/attention/mem_k", "layers/self_attention/memory_key", "P N H", "P N H"),
    row(f"{LAYER}attn/attention/mem_v", "layers/self_attention/memory_value", "P N H", "P N H"),
    *(
        row(
            f"{LAYER}{mtf_name}/conv1d_main/{product}/{leaf}",
            f"layers/{own_name}/{name}/{leaf}",
            *axes,
        )
        for mtf_name, own_name in FEED_FORWARDS.items()
        for product, name in (("c_fc", "wi"), ("c_proj", "wo"))
        for leaf, axes in (("kernel", ("D F", "D F")), ("bias", ("D", "D")))
    ),
)


def keys_of(options: dict) -> dict:
    """The options of GPT-Neo's program as keys of this project."""
    keys = {
        "base_emb_dim": options["n_embd"],
        "base_mlp_dim": 4 * options["n_embd"],
        "base_num_decoder_layers": options["n_layer"],
        "head_dim": -1,
        "vocab_size": options["n_vocab"],
        "max_target_length": options["n_ctx"],
        **dict.fromkeys(("base_num_query_heads", "base_num_kv_heads"), options["n_head"]),
    }
    kinds = options["attention_types"]
    if set(kinds) != {"global"}:
        keys["attention_types"] = [[kinds, 1]]
    if "local" in kinds:
        keys["sliding_window_size"] = options["local_attention_radius"]
    if "linear" in kinds:
        keys["linear_attention.chunk"] = 7
    if options.get("axial_pos_emb"):
        keys |= {"position_embedding": "axial", "axial_pos_shape": options["axial_pos_emb"]}
    if options.get("rotary_emb"):
        keys["position_embedding"] = "rotary"
    if options["num_mem_kv"]:
        keys["num_mem_kv"] = options["num_mem_kv"]
    if options.get("rezero"):
        keys["use_rezero"] = True
    if options.get("macaron"):
        keys |= {"use_macaron": True, "macaron_prenorm": False}
    return keys


@pytest.mark.parametrize(
    "case", ["linear", "local5", "rotary", "macaron", "rezero", "axial", "memkv"]
)
def test_mesh_tensorflow(case):
    path = GOLDEN / "gptneo_meshtf" / case
    with np.load(path.with_suffix(".npz")) as file:
        arrays = dict(file)
    options = json.loads(path.with_suffix(".json").read_text())["params"]
    config = load_config(
        decoder_block="gpt_neo",
        dtype="float32",
        matmul_precision="highest",
        scan_layers=True,
        remat_policy="full",
        dataset_type="synthetic",
        z_loss_multiplier=1e-4,
        **keys_of(options),
    )
    model = Model(config.model)
    table = TensorMap(GPT_NEO, model, ROWS)
    given = below(arrays, "param/gpt2/")
    assert given.keys() == {tensor.name for tensor in table.tensors}
    kind = np.dtype(np.float32)
    params = {name: table.array(name, kind, given.__getitem__) for name in model.parameters}
    tokens = jnp.asarray(arrays["input_ids"])
    batch = Batch(tokens, jnp.asarray(arrays["labels"]), jnp.ones(tokens.shape))

    @jax.jit
    def run(params):
        module = model.merge(params)
        total = loss_sums(module, batch, model.config.objective).total
        return module(batch), total / tokens.size

    logits, loss = run(unflatten(params))
    largest = np.abs(arrays["logits"]).max()
    np.testing.assert_allclose(logits, arrays["logits"], rtol=0, atol=2e-5 * largest)
    np.testing.assert_allclose(loss, arrays["loss"], rtol=5e-7)
