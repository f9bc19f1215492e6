"""GPT-NeoX (Black et al. 2022) and Pythia (Biderman et al. 2023).

The fused projection is grouped by head: head, then query, key, value.
"""

from MaxText.conversion.families.llama import ROTARY_SCALING
from MaxText.conversion.family import (
    BOOLEANS,
    PARALLEL,
    Family,
    computed,
    norm,
    projection,
    ratio,
    row,
    same,
)

_LAYER = "gpt_neox.layers.{layer}."
_ATTENTION = "layers/self_attention/"
_ACTIVATIONS = (
    ("gelu", ("gelu_erf",)),
    ("gelu_new", ("gelu",)),
    ("gelu_fast", ("gelu",)),
    ("gelu_pytorch_tanh", ("gelu",)),
    ("relu", ("relu",)),
)

GPT_NEOX = Family(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    decoder_block="gpt_neox",
    own={
        "normalization_type": "layer_norm",
        "normalization_bias": True,
        "position_embedding": "rotary",
        "ffn_bias": True,
        "use_qk_norm": False,
    },
    settings=(
        same("vocab_size", "vocab_size"),
        same("max_position_embeddings", "max_target_length", default=2048),
        same("hidden_size", "base_emb_dim"),
        same("num_hidden_layers", "base_num_decoder_layers"),
        same("num_attention_heads", "base_num_query_heads base_num_kv_heads"),
        computed("head_dim", ratio("hidden_size", "num_attention_heads")),
        same("intermediate_size", "base_mlp_dim"),
        same("layer_norm_eps", "normalization_layer_epsilon", default=1e-5),
        same("rotary_pct partial_rotary_factor", "rotary_pct", default=0.25),
        same("rotary_emb_base rope_theta", "rope_max_timescale", default=10_000.0),
        same("hidden_act", "mlp_activations", default="gelu", values=_ACTIVATIONS),
        same("use_parallel_residual", "block_arrangement", default=True, values=PARALLEL),
        same("attention_bias", "qkv_bias proj_bias", default=True, values=BOOLEANS),
        same("tie_word_embeddings", "logits_via_embedding", default=False, values=BOOLEANS),
        *ROTARY_SCALING,
    ),
    rows=(
        row("gpt_neox.embed_in.weight", "token_embedder/embedding", "V D", "V D"),
        *norm(_LAYER + "input_layernorm", "layers/pre_self_attention_layer_norm"),
        *projection(
            _LAYER + "attention.query_key_value",
            f"{_ATTENTION}query {_ATTENTION}key {_ATTENTION}value",
            "(N J H) D",
            "D N H",
        ),
        *projection(_LAYER + "attention.dense", _ATTENTION + "out", "D (N H)", "N H D"),
        *norm(_LAYER + "post_attention_layernorm", "layers/pre_mlp_layer_norm"),
        *projection(_LAYER + "mlp.dense_h_to_4h", "layers/mlp/wi", "F D", "D F"),
        *projection(_LAYER + "mlp.dense_4h_to_h", "layers/mlp/wo", "D F", "F D"),
        *norm("gpt_neox.final_layer_norm", "decoder_norm"),
        row("embed_out.weight", "logits_dense/kernel", "V D", "D V", older=("lm_head.weight",)),
    ),
    prefix="gpt_neox.",
    head="embed_out.weight",
    ignored=(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
)
