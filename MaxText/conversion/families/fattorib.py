"""fattorib/transformer: its PyTorch state dict as a family, and the names of its Flax tree.

Its PyTorch program has LayerNorm's epsilon 1e-5 and the exact gelu, the JAX program that trains has
1e-6 and the tanh form. The weights are those of the JAX program, so that is what config.json says.
"""

from MaxText.conversion.family import (
    SHARED_PARTS,
    Family,
    Row,
    computed,
    multiple,
    ratio,
    row,
    same,
)

_LAYER, _ATTENTION = "blocks.{layer}.", "layers/self_attention/"


def _norm(theirs: str, ours: str, older: str = "") -> tuple[Row, ...]:
    """Scale and bias of LayerNorm."""
    return tuple(
        row(f"{theirs}.{kind}", f"{ours}/{name}", "D", "D", (f"{older}.{kind}",) if older else ())
        for kind, name in (("weight", "scale"), ("bias", "bias"))
    )


def _projection(theirs: str, ours: str, theirs_axes: str, ours_axes: str) -> tuple[Row, ...]:
    """A product and its bias."""
    outputs = theirs_axes[: theirs_axes.index(")") + 1] if theirs_axes[0] == "(" else theirs_axes[0]
    return (
        row(f"{_LAYER}{theirs}.weight", f"layers/{ours}/kernel", theirs_axes, ours_axes),
        row(f"{_LAYER}{theirs}.bias", f"layers/{ours}/bias", outputs, outputs.strip("()")),
    )


FATTORIB = Family(
    model_type="fattorib",
    architecture="FattoribTransformer",
    decoder_block="fattorib",
    parts={
        **SHARED_PARTS,
        "parallel_residual_shared_norm": True,
        "normalization_type": "layer_norm",
        "normalization_bias": True,
        "alibi_max_bias": 8.0,
        "mlp_activations": ("gelu",),
        "qkv_bias": True,
        "proj_bias": True,
        "ffn_bias": True,
        "use_qk_norm": False,
        "logits_via_embedding": True,
    },
    settings=(
        # As in conf/model_config.yaml.
        same("vocab_size", "vocab_size"),
        same("block_size num_ctx", "max_target_length trainable_position_size"),
        same("embedding_dim", "base_emb_dim"),
        same("N", "base_num_decoder_layers"),
        same("num_head", "base_num_query_heads base_num_kv_heads"),
        computed("head_dim", ratio("embedding_dim", "num_head")),
        computed("base_mlp_dim", multiple(4, "embedding_dim")),
        same("layer_norm_epsilon", "normalization_layer_epsilon", default=1e-6),
        same(
            "alibi_attn", "position_embedding", True, ((True, "alibi"), (False, "learned"))
        ),
        same(
            "fused_residuals", "block_arrangement", False,
            ((True, "parallel"), (False, "sequential")),
        ),
    ),
    rows=(
        row("wte.weight", "token_embedder/embedding", "V D", "V D"),
        row("wpe.weight", "position_embedder/embedding", "P D", "P D"),
        *_norm(_LAYER + "ln1", "layers/pre_self_attention_layer_norm", _LAYER + "ln"),
        *_norm(_LAYER + "ln2", "layers/pre_mlp_layer_norm"),
        *_projection("attn.query", "self_attention/query", "(N H) D", "D N H"),
        *_projection("attn.key", "self_attention/key", "(N H) D", "D N H"),
        *_projection("attn.value", "self_attention/value", "(N H) D", "D N H"),
        *_projection("attn.fc_resid", "self_attention/out", "D (N H)", "N H D"),
        *_projection("mlp.fc1", "mlp/wi", "F D", "D F"),
        *_projection("mlp.fc_resid", "mlp/wo", "D F", "F D"),
        *_norm("norm", "decoder_norm"),
        row("lm_head.weight", "logits_dense/kernel", "V D", "D V"),
    ),
    prefix="",
    ignored=(".attn.mask", ".attn.slopes"),
    in_transformers=False,
)  # fmt: skip

_BLOCK = "TransformerBlock_{layer}/"


def _flax(theirs: str, ours: str, theirs_axes: str, ours_axes: str) -> tuple[Row, ...]:
    """A Dense of the tree: [inputs, outputs] and its bias."""
    outputs = theirs_axes.partition(" ")[2] if theirs_axes[0] != "(" else theirs_axes[-1]
    return (
        row(f"{_BLOCK}{theirs}/kernel", f"layers/{ours}/kernel", theirs_axes, ours_axes),
        row(f"{_BLOCK}{theirs}/bias", f"layers/{ours}/bias", outputs, outputs.strip("()")),
    )


def _flax_norm(theirs: str, ours: str) -> tuple[Row, ...]:
    return tuple(row(f"{theirs}/{kind}", f"{ours}/{kind}", "D", "D") for kind in ("scale", "bias"))


_CORE = "CausalAttention_0/"
FLAX_ROWS = (
    row("wte/embedding", "token_embedder/embedding", "V D", "V D"),
    row("wpe/embedding", "position_embedder/embedding", "P D", "P D"),
    *_flax_norm(_BLOCK + "LayerNorm_0", "layers/pre_self_attention_layer_norm"),
    *_flax_norm(_BLOCK + "LayerNorm_1", "layers/pre_mlp_layer_norm"),
    *_flax(_CORE + "query_proj", "self_attention/query", "D (N H)", "D N H"),
    *_flax(_CORE + "key_proj", "self_attention/key", "D (N H)", "D N H"),
    *_flax(_CORE + "value_proj", "self_attention/value", "D (N H)", "D N H"),
    *_flax(_CORE + "residual_out", "self_attention/out", "(N H) D", "N H D"),
    *_flax("MLPBlock_0/fc_in", "mlp/wi", "D F", "D F"),
    *_flax("MLPBlock_0/fc_residual", "mlp/wo", "F D", "F D"),
    *_flax_norm("LayerNorm_0", "decoder_norm"),
    row("head_q/kernel", "head_qk/query/kernel", "D Q", "D Q"),
    row("head_k/kernel", "head_qk/key/kernel", "D Q", "D Q"),
)
