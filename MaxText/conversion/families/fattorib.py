"""fattorib/transformer: its PyTorch state dict and its Flax tree.

The PyTorch program uses LayerNorm epsilon 1e-5 and exact gelu; the JAX program that trains uses
1e-6 and tanh. The weights come from the JAX program, so config.json says so.
"""

from MaxText.conversion.family import (
    ATTENTION,
    PARALLEL,
    Family,
    attention,
    divided_by,
    family_default,
    mapped,
    norm,
    projection,
    row,
    scaled_by,
)

_LAYER = "blocks.{layer}."
_NORM = "layers/pre_self_attention_layer_norm"


FATTORIB = Family(
    model_type="fattorib",
    architecture="FattoribTransformer",
    decoder_block="fattorib",
    settings=(
        # As in conf/model_config.yaml.
        mapped("vocab_size", "vocab_size"),
        mapped("block_size num_ctx", "max_target_length trainable_position_size"),
        mapped("embedding_dim", "base_emb_dim"),
        mapped("N", "base_num_decoder_layers"),
        mapped("num_head", "base_num_query_heads base_num_kv_heads"),
        family_default("head_dim", divided_by("embedding_dim", "num_head")),
        family_default("base_mlp_dim", scaled_by(4, "embedding_dim")),
        mapped("layer_norm_epsilon", "normalization_layer_epsilon", default=1e-6),
        mapped("alibi_attn", "position_embedding", True, ((True, "alibi"), (False, "learned"))),
        mapped("fused_residuals", "block_arrangement", False, PARALLEL),
    ),
    rows=(
        row("wte.weight", "token_embedder/embedding", "V D", "V D"),
        row("wpe.weight", "position_embedder/embedding", "P D", "P D"),
        row(_LAYER + "ln1.weight", _NORM + "/scale", "D", "D", (_LAYER + "ln.weight",)),
        row(_LAYER + "ln1.bias", _NORM + "/bias", "D", "D", (_LAYER + "ln.bias",)),
        *norm(_LAYER + "ln2", "layers/pre_mlp_layer_norm"),
        *attention(_LAYER + "attn.", "query key value fc_resid"),
        *projection(_LAYER + "mlp.fc1", "layers/mlp/wi", "F D", "D F"),
        *projection(_LAYER + "mlp.fc_resid", "layers/mlp/wo", "D F", "F D"),
        *norm("norm", "decoder_norm"),
        row("lm_head.weight", "logits_dense/kernel", "V D", "D V"),
    ),
    prefix="",
    ignored=(".attn.mask", ".attn.slopes"),
    in_transformers=False,
)

_BLOCK, _ENDS = "TransformerBlock_{layer}/", ("/kernel", "/bias")
_CORE, _MLP = f"{_BLOCK}CausalAttention_0/", f"{_BLOCK}MLPBlock_0/"
_ENDS_OF_NORM = ("/scale", "/bias")
FLAX_ROWS = (
    row("wte/embedding", "token_embedder/embedding", "V D", "V D"),
    row("wpe/embedding", "position_embedder/embedding", "P D", "P D"),
    *norm(_BLOCK + "LayerNorm_0", _NORM, _ENDS_OF_NORM),
    *norm(_BLOCK + "LayerNorm_1", "layers/pre_mlp_layer_norm", _ENDS_OF_NORM),
    *projection(_CORE + "query_proj", ATTENTION + "query", "D (N H)", "D N H", _ENDS),
    *projection(_CORE + "key_proj", ATTENTION + "key", "D (N H)", "D N H", _ENDS),
    *projection(_CORE + "value_proj", ATTENTION + "value", "D (N H)", "D N H", _ENDS),
    *projection(_CORE + "residual_out", ATTENTION + "out", "(N H) D", "N H D", _ENDS),
    *projection(_MLP + "fc_in", "layers/mlp/wi", "D F", "D F", _ENDS),
    *projection(_MLP + "fc_residual", "layers/mlp/wo", "F D", "F D", _ENDS),
    *norm("LayerNorm_0", "decoder_norm", _ENDS_OF_NORM),
    row("head_q/kernel", "head_qk/query/kernel", "D Q", "D Q"),
    row("head_k/kernel", "head_qk/key/kernel", "D Q", "D Q"),
)
