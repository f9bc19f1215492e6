"""TokenFormer (Wang et al. 2024), as stored by its PyTorch program.

Covers the published Pile models, TokenFormer-150M to 1.5B. Tensors are numbered by pipeline module:
0 is the embedding, 1 and the one after the layers reshape, then comes the final norm. Layer norms
have no parameters, and the head is tied. Key slots are rows there and columns here.
"""

from MaxText.conversion import family as hf

_LAYER = "sequential.{layer+2}."


def _slots(hf_name: str, params: str, letter: str) -> hf.Rows:
    """Returns rows of key and value slots; `letter` is their layout letter."""
    return (
        hf.row(
            f"{_LAYER}{hf_name}.key_param_tokens",
            f"layers/{params}/keys/kernel",
            f"{letter} D",
            f"D {letter}",
        ),
        hf.row(
            f"{_LAYER}{hf_name}.value_param_tokens",
            f"layers/{params}/values/kernel",
            f"{letter} D",
            f"{letter} D",
        ),
    )


TOKENFORMER = hf.Family(
    model_type="tokenformer",
    architecture="TokenFormerForCausalLM",
    decoder_block="tokenformer_pytorch",
    settings=(
        # Missing in the published files: GPT-NeoX-20B's tokenizer, padded to a multiple of 128.
        hf.mapped("vocab_size padded_vocab_size", "vocab_size", default=50_304),
        hf.mapped("num_layers", "base_num_decoder_layers"),
        hf.mapped("hidden_size", "base_emb_dim"),
        hf.mapped("num_attention_heads", "base_num_query_heads base_num_kv_heads"),
        hf.family_default("head_dim", hf.divided_by("hidden_size", "num_attention_heads")),
        hf.mapped("qkv_slot_num", "slot_num"),
        hf.mapped("proj_slot_num", "proj_slot_num", implied=hf.copy_of("qkv_slot_num")),
        hf.mapped("ffn_slot_num", "ffn_slot_num", implied=hf.scaled_by(4, "qkv_slot_num")),
        hf.mapped(
            "norm_activation_type",
            "normalize_type",
            values=tuple((name, name) for name in ("l2_norm_gelu", "gelu_l2_norm", "softmax")),
        ),
        hf.mapped("max_position_embeddings", "max_target_length", default=hf.copy_of("seq_length")),
        hf.mapped("seq_length", "max_target_length", default=hf.copy_of("max_position_embeddings")),
        hf.constant("pos_emb", "rotary"),
        hf.mapped("rotary_pct", "rotary_pct"),
        hf.mapped("rotary_emb_base", "rope_max_timescale", default=10_000.0),
        hf.constant("norm", "layernorm_nonparam"),
        hf.constant("final_norm", "layernorm"),
        hf.mapped("layernorm_epsilon", "normalization_layer_epsilon", default=1e-5),
        hf.constant("no_weight_tying", False, default=False),
        hf.supported("sliding_window_width", None),
        hf.supported("use_mup", False),
    ),
    rows=(
        hf.row("sequential.0.word_embeddings.weight", "token_embedder/embedding", "V D", "V D"),
        *_slots("attention.query", "self_attention/query", "Q"),
        *_slots("attention.key", "self_attention/key", "Q"),
        *_slots("attention.value", "self_attention/value", "Q"),
        *_slots("attention.proj", "self_attention/out", "O"),
        *_slots("mlp", "mlp", "S"),
        *hf.norm("sequential.{num_layers+3}.norm", "decoder_norm"),
    ),
    prefix="sequential.",
    in_transformers=False,
)
