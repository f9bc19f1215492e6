"""Logits, loss and every gradient against Hugging Face's implementations (tests/golden/)."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.configuration import model_sections as sections
from MaxText.input_pipeline.batch import Batch
from MaxText.layers.model import Model
from MaxText.training.objective import loss_sums
from tests.layers import hugging_face

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"


def gpt2_section(config: dict) -> sections.Model:
    return sections.Model(
        shape=sections.Shape(
            base_emb_dim=config["n_embd"],
            base_num_query_heads=config["n_head"],
            base_num_kv_heads=config["n_head"],
            head_dim=-1,
            base_mlp_dim=4 * config["n_embd"],
            base_num_decoder_layers=config["n_layer"],
            vocab_size=config["vocab_size"],
            max_target_length=config["n_positions"],
        ),
        block=sections.Block(normalization_type="layer_norm"),
        position=sections.Position(position_embedding="learned"),
        attention=sections.Attention(qkv_bias=True, proj_bias=True),
        feed_forward=sections.FeedForward(mlp_activations=("gelu",), ffn_bias=True),
        head=sections.Head(logits_via_embedding=True, normalize_embedding_logits=False),
    )


def llama_section(config: dict) -> sections.Model:
    return sections.Model(
        shape=sections.Shape(
            base_emb_dim=config["hidden_size"],
            base_num_query_heads=config["num_attention_heads"],
            base_num_kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            base_mlp_dim=config["intermediate_size"],
            base_num_decoder_layers=config["num_hidden_layers"],
            vocab_size=config["vocab_size"],
        ),
    )


def llama31_section(config: dict) -> sections.Model:
    scaling = config["rope_scaling"]
    position = sections.Position(
        rope_max_timescale=config["rope_theta"],
        rope_type="llama3.1",
        rope_factor=scaling["factor"],
        original_max_position_embeddings=scaling["original_max_position_embeddings"],
        low_freq_factor=scaling["low_freq_factor"],
        high_freq_factor=scaling["high_freq_factor"],
    )
    return llama_section(config).model_copy(update={"position": position})


def gemma_section(config: dict) -> sections.Model:
    return llama_section(config).model_copy(
        update={
            "embedding": sections.Embedding(scale_embedding=True),
            "block": sections.Block(
                normalization_zero_centered=True, normalization_layer_epsilon=1e-6
            ),
            "feed_forward": sections.FeedForward(mlp_activations=("gelu", "linear")),
            "head": sections.Head(logits_via_embedding=True, normalize_embedding_logits=False),
        }
    )


def gptneox_section(config: dict) -> sections.Model:
    return sections.Model(
        shape=sections.Shape(
            base_emb_dim=config["hidden_size"],
            base_num_query_heads=config["num_attention_heads"],
            base_num_kv_heads=config["num_attention_heads"],
            head_dim=-1,
            base_mlp_dim=config["intermediate_size"],
            base_num_decoder_layers=config["num_hidden_layers"],
            vocab_size=config["vocab_size"],
        ),
        block=sections.Block(block_arrangement="parallel", normalization_type="layer_norm"),
        position=sections.Position(rotary_pct=0.25),
        attention=sections.Attention(qkv_bias=True, proj_bias=True),
        feed_forward=sections.FeedForward(mlp_activations=("gelu_erf",), ffn_bias=True),
    )


CASES = {
    "gpt2": ("gpt2_tiny_a", gpt2_section),
    "llama": ("llama_tiny_a", llama_section),
    "gptneox": ("gptneox_tiny_a", gptneox_section),
    "llama31": ("llama31_tiny_a", llama31_section),
    "gemma": ("gemma_tiny_a", gemma_section),
}


def load(family: str):
    name, section_of = CASES[family]
    config = json.loads((GOLDEN / family / f"{name}.json").read_text())["hf_config"]
    arrays = dict(np.load(GOLDEN / family / f"{name}.npz"))
    section = section_of(config).model_copy(
        update={"numerics": sections.Numerics(dtype="float32", matmul_precision="highest")}
    )

    def imported(prefix: str, missing: str | None = None) -> dict:
        weights = {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}
        return hugging_face.parameters(weights, config)

    return section, arrays, imported("param/"), imported("grad/")


def batch_of(arrays: dict) -> Batch:
    tokens = jnp.asarray(arrays["input_ids"])
    targets = jnp.roll(tokens, -1, axis=1)
    weights = jnp.ones(tokens.shape).at[:, -1].set(0.0)
    return Batch(tokens, targets, weights)


@pytest.mark.parametrize("family", CASES)
@pytest.mark.parametrize(
    ("scan", "policy", "block_size", "chunks"),
    [(True, "full", 8, 1), (False, "none", 128, 3)],
)
def test_matches_reference(family, scan, policy, block_size, chunks):
    section, arrays, params, golden_gradients = load(family)
    attention = section.attention.model_copy(update={"attention_block_size": block_size})
    memory = sections.Memory(scan_layers=scan, remat_policy=policy)
    model = Model(section.model_copy(update={"attention": attention, "memory": memory}))
    assert jax.tree.map(np.shape, params) == jax.tree.map(np.shape, model.abstract)
    batch = batch_of(arrays)
    objective = sections.Objective(num_vocab_tiling=chunks)

    @jax.jit
    def run(params):
        def loss(params):
            decoder = model.merge(params)
            total = loss_sums(decoder, batch, objective).total
            return total / batch.weights_BT.sum(), decoder.logits(decoder.hidden(batch)[0])

        return jax.value_and_grad(loss, has_aux=True)(params)

    (loss, logits), gradients = run(params)
    np.testing.assert_allclose(logits, arrays["logits"], rtol=0, atol=5e-5)
    np.testing.assert_allclose(loss, arrays["loss"], rtol=1e-4)

    # "Relative to the largest element of each array" is meant for the reference's fused
    # query-key-value array; a key bias alone has gradient zero (softmax ignores shifts).
    attention_gradients = golden_gradients["layers"]["self_attention"]

    def compare(path, ours, golden):
        keys = [entry.key for entry in path]
        fused = [golden]
        if keys[-2] in ("query", "key", "value"):
            fused = [attention_gradients[name][keys[-1]] for name in ("query", "key", "value")]
        largest = max(np.abs(array).max() for array in fused)
        np.testing.assert_allclose(ours / largest, golden / largest, atol=1e-4, err_msg=str(keys))

    jax.tree_util.tree_map_with_path(compare, gradients, golden_gradients)
