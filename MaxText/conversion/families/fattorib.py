"""fattorib/transformer: its PyTorch state dict and its Flax tree.

The PyTorch program uses LayerNorm epsilon 1e-5 and exact gelu; the JAX program that trains uses
1e-6 and tanh. The weights come from the JAX program, so config.json says so.
"""

from MaxText.conversion import family as hf

_LAYER = "blocks.{layer}."
_NORM = "layers/pre_self_attention_layer_norm"


FATTORIB = hf.Family(
    model_type="fattorib",
    architecture="FattoribTransformer",
    decoder_block="fattorib",
    settings=(
        # As in conf/model_config.yaml.
        hf.mapped("vocab_size", "vocab_size"),
        hf.mapped("block_size num_ctx", "max_target_length trainable_position_size"),
        hf.mapped("embedding_dim", "base_emb_dim"),
        hf.mapped("N", "base_num_decoder_layers"),
        hf.mapped("num_head", "base_num_query_heads base_num_kv_heads"),
        hf.family_default("head_dim", hf.divided_by("embedding_dim", "num_head")),
        hf.family_default("base_mlp_dim", hf.scaled_by(4, "embedding_dim")),
        hf.mapped("layer_norm_epsilon", "normalization_layer_epsilon", default=1e-6),
        hf.mapped("alibi_attn", "position_embedding", True, ((True, "alibi"), (False, "learned"))),
        hf.mapped("fused_residuals", "block_arrangement", False, hf.PARALLEL),
    ),
    rows=(
        hf.row("wte.weight", "token_embedder/embedding", "V D", "V D"),
        hf.row("wpe.weight", "position_embedder/embedding", "P D", "P D"),
        hf.row(_LAYER + "ln1.weight", _NORM + "/scale", "D", "D", (_LAYER + "ln.weight",)),
        hf.row(_LAYER + "ln1.bias", _NORM + "/bias", "D", "D", (_LAYER + "ln.bias",)),
        *hf.norm(_LAYER + "ln2", "layers/pre_mlp_layer_norm"),
        *hf.attention(_LAYER + "attn.", "query key value fc_resid"),
        *hf.projection(_LAYER + "mlp.fc1", "layers/mlp/wi", "F D", "D F"),
        *hf.projection(_LAYER + "mlp.fc_resid", "layers/mlp/wo", "D F", "F D"),
        *hf.norm("norm", "decoder_norm"),
        hf.row("lm_head.weight", "logits_dense/kernel", "V D", "D V"),
    ),
    ignored=(".attn.mask", ".attn.slopes"),
    in_transformers=False,
)

_BLOCK = "TransformerBlock_{layer}/"
_ENDS = ("/kernel", "/bias")
_CORE = f"{_BLOCK}CausalAttention_0/"
_MLP = f"{_BLOCK}MLPBlock_0/"
_ENDS_OF_NORM = ("/scale", "/bias")
FLAX_ROWS = (
    hf.row("wte/embedding", "token_embedder/embedding", "V D", "V D"),
    hf.row("wpe/embedding", "position_embedder/embedding", "P D", "P D"),
    *hf.norm(_BLOCK + "LayerNorm_0", _NORM, _ENDS_OF_NORM),
    *hf.norm(_BLOCK + "LayerNorm_1", "layers/pre_mlp_layer_norm", _ENDS_OF_NORM),
    *hf.projection(_CORE + "query_proj", hf.ATTENTION + "query", "D (N H)", "D N H", _ENDS),
    *hf.projection(_CORE + "key_proj", hf.ATTENTION + "key", "D (N H)", "D N H", _ENDS),
    *hf.projection(_CORE + "value_proj", hf.ATTENTION + "value", "D (N H)", "D N H", _ENDS),
    *hf.projection(_CORE + "residual_out", hf.ATTENTION + "out", "(N H) D", "N H D", _ENDS),
    *hf.projection(_MLP + "fc_in", "layers/mlp/wi", "D F", "D F", _ENDS),
    *hf.projection(_MLP + "fc_residual", "layers/mlp/wo", "F D", "F D", _ENDS),
    *hf.norm("LayerNorm_0", "decoder_norm", _ENDS_OF_NORM),
    hf.row("head_q/kernel", "head_qk/query/kernel", "D Q", "D Q"),
    hf.row("head_k/kernel", "head_qk/key/kernel", "D Q", "D Q"),
)
