"""TokenFormer (Wang et al. 2024), as stored by its PyTorch program.

Covers the published Pile models, TokenFormer-150M to 1.5B. Tensors are numbered by pipeline module:
0 is the embedding, 1 and the one after the layers reshape, then comes the final norm. Layer norms
have no parameters, and the head is tied. Key slots are rows there and columns here.
"""

from MaxText.conversion.family import (
    Family,
    WeightMapping,
    constant,
    copy_of,
    divided_by,
    family_default,
    mapped,
    norm,
    row,
    scaled_by,
    supported,
)

_LAYER = "sequential.{layer+2}."


def _slots(hf_name: str, params: str, letter: str) -> tuple[WeightMapping, ...]:
    """Returns rows of key and value slots; `letter` is their layout letter."""
    return (
        row(f"{_LAYER}{hf_name}.key_param_tokens", f"layers/{params}/keys/kernel",
            f"{letter} D", f"D {letter}"),
        row(f"{_LAYER}{hf_name}.value_param_tokens", f"layers/{params}/values/kernel",
            f"{letter} D", f"{letter} D"),
    )  # fmt: skip


ROWS = (
    row("sequential.0.word_embeddings.weight", "token_embedder/embedding", "V D", "V D"),
    *_slots("attention.query", "self_attention/query", "Q"),
    *_slots("attention.key", "self_attention/key", "Q"),
    *_slots("attention.value", "self_attention/value", "Q"),
    *_slots("attention.proj", "self_attention/out", "O"),
    *_slots("mlp", "mlp", "S"),
    *norm("sequential.{num_layers+3}.norm", "decoder_norm"),
)

TOKENFORMER = Family(
    model_type="tokenformer",
    architecture="TokenFormerForCausalLM",
    decoder_block="tokenformer_pytorch",
    settings=(
        # Missing in the published files: GPT-NeoX-20B's tokenizer, padded to a multiple of 128.
        mapped("vocab_size padded_vocab_size", "vocab_size", default=50_304),
        mapped("num_layers", "base_num_decoder_layers"),
        mapped("hidden_size", "base_emb_dim"),
        mapped("num_attention_heads", "base_num_query_heads base_num_kv_heads"),
        family_default("head_dim", divided_by("hidden_size", "num_attention_heads")),
        mapped("qkv_slot_num", "slot_num"),
        mapped("proj_slot_num", "proj_slot_num", implied=copy_of("qkv_slot_num")),
        mapped("ffn_slot_num", "ffn_slot_num", implied=scaled_by(4, "qkv_slot_num")),
        mapped(
            "norm_activation_type",
            "normalize_type",
            values=tuple((name, name) for name in ("l2_norm_gelu", "gelu_l2_norm", "softmax")),
        ),
        mapped("max_position_embeddings", "max_target_length", default=copy_of("seq_length")),
        mapped("seq_length", "max_target_length", default=copy_of("max_position_embeddings")),
        constant("pos_emb", "rotary"),
        mapped("rotary_pct", "rotary_pct"),
        mapped("rotary_emb_base", "rope_max_timescale", default=10_000.0),
        constant("norm", "layernorm_nonparam"),
        constant("final_norm", "layernorm"),
        mapped("layernorm_epsilon", "normalization_layer_epsilon", default=1e-5),
        constant("no_weight_tying", False, default=False),
        supported("sliding_window_width", None),
        supported("use_mup", False),
    ),
    rows=ROWS,
    prefix="sequential.",
    in_transformers=False,
)
