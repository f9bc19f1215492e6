"""GPT-2, GPT-Neo, GPT-NeoX and Pythia.

GPT-2 (Radford et al. 2019) stores projections as [inputs, outputs]. GPT-Neo (Black et al. 2021) has
unscaled queries and local attention layers. GPT-NeoX (Black et al. 2022) and Pythia (Biderman et
al. 2023) group the fused projection by head: head, then query, key, value.
"""

from MaxText.config.values import TypedValue
from MaxText.conversion import family as hf
from MaxText.conversion.families import rotary
from MaxText.conversion.rotary_config import RotaryDefaults

_LAYER = "transformer.h.{layer}."  # of GPT-2 and GPT-Neo
_NEOX_LAYER = "gpt_neox.layers.{layer}."
_QUERY_KEY_VALUE = f"{hf.ATTENTION}query {hf.ATTENTION}key {hf.ATTENTION}value"

_ACTIVATIONS = hf.activations("gelu_new gelu_pytorch_tanh gelu relu silu")

_AROUND_LAYERS = (
    hf.row("transformer.wte.weight", "token_embedder/embedding", "V D", "V D"),
    hf.row("transformer.wpe.weight", "position_embedder/embedding", "P D", "P D"),
    *hf.norm(_LAYER + "ln_1", "layers/pre_self_attention_layer_norm"),
    *hf.norm(_LAYER + "ln_2", "layers/pre_mlp_layer_norm"),
    *hf.norm("transformer.ln_f", "decoder_norm"),
    hf.row("lm_head.weight", "logits_dense/kernel", "V D", "D V"),
)

GPT2 = hf.Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    decoder_block="gpt2",
    settings=(
        hf.mapped("vocab_size", "vocab_size"),
        hf.mapped("n_positions", "trainable_position_size max_target_length"),
        hf.mapped("n_embd", "base_emb_dim"),
        hf.mapped("n_layer", "base_num_decoder_layers"),
        hf.mapped("n_head", "base_num_query_heads base_num_kv_heads"),
        hf.family_default("head_dim", hf.divided_by("n_embd", "n_head")),
        hf.mapped("n_inner", "base_mlp_dim", default=hf.scaled_by(4, "n_embd")),
        hf.mapped("layer_norm_epsilon", "normalization_layer_epsilon", default=1e-5),
        hf.mapped("activation_function", "mlp_activations", "gelu_new", _ACTIVATIONS),
        hf.mapped("tie_word_embeddings", "logits_via_embedding", default=True, values=hf.BOOLEANS),
        hf.supported("scale_attn_weights", True),
        hf.supported("scale_attn_by_inverse_layer_idx", False),
        hf.supported("add_cross_attention", False),
        # Affects only the order of scaling and conversion to float32, which is always done here.
        hf.supported("reorder_and_upcast_attn", False, True),
    ),
    rows=(
        *_AROUND_LAYERS,
        *hf.projection(_LAYER + "attn.c_attn", _QUERY_KEY_VALUE, "D (J N H)", "D N H"),
        *hf.projection(_LAYER + "attn.c_proj", hf.ATTENTION + "out", "(N H) D", "N H D"),
        *hf.projection(_LAYER + "mlp.c_fc", "layers/mlp/wi", "D F", "D F"),
        *hf.projection(_LAYER + "mlp.c_proj", "layers/mlp/wo", "F D", "F D"),
    ),
    prefix="transformer.",
    ignored=(".attn.bias", ".attn.masked_bias"),
)


def _kinds(types: hf.HFValue) -> TypedValue:
    """Expands [[[global, local], 2]]; returns REQUIRED for anything else."""
    try:
        kinds = [kind for pattern, times in types for _ in range(times) for kind in pattern]
        return kinds if set(kinds) <= {"global", "local"} else hf.REQUIRED
    except (TypeError, ValueError):
        return hf.REQUIRED


def _read_types(value: hf.HFValue, config: hf.HFConfig) -> TypedValue:
    kinds = _kinds(value)
    if kinds is hf.REQUIRED or len(kinds) != config.get("num_layers"):
        return hf.REQUIRED
    return tuple((tuple(pattern), times) for pattern, times in value)


def _write_types(values: hf.KeyValues) -> hf.HFValue:
    types = values["attention_types"] or ((("global",), values["base_num_decoder_layers"]),)
    kinds = _kinds(types)
    return kinds if kinds is hf.REQUIRED else [[list(pattern), n] for pattern, n in types]


def _read_layers(value: hf.HFValue, config: hf.HFConfig) -> TypedValue:
    types = config["attention_types"]
    return _read_types(types, config) if value == _kinds(types) else hf.REQUIRED


def _window_of_no_layer(config: hf.HFConfig) -> hf.HFValue:
    """Returns the window if no layer is local; unused windows are refused."""
    kinds = _kinds(config["attention_types"])
    is_used = kinds is hf.REQUIRED or "local" in kinds
    return hf.REQUIRED if is_used else config["window_size"]


GPT_NEO = hf.Family(
    model_type="gpt_neo",
    architecture="GPTNeoForCausalLM",
    decoder_block="gpt_neo",
    settings=(
        hf.mapped("vocab_size", "vocab_size"),
        hf.mapped("max_position_embeddings", "trainable_position_size max_target_length", 2048),
        hf.mapped("hidden_size", "base_emb_dim"),
        hf.mapped("num_layers num_hidden_layers", "base_num_decoder_layers"),
        hf.mapped("num_heads num_attention_heads", "base_num_query_heads base_num_kv_heads"),
        hf.family_default("head_dim", hf.divided_by("hidden_size", "num_heads")),
        hf.mapped("intermediate_size", "base_mlp_dim", default=hf.scaled_by(4, "hidden_size")),
        hf.mapped("layer_norm_epsilon", "normalization_layer_epsilon", default=1e-5),
        hf.mapped("activation_function", "mlp_activations", "gelu_new", _ACTIVATIONS),
        hf.ConfigMapping(
            ("attention_types",),
            ("attention_types",),
            lambda config: [[["global", "local"], config["num_layers"] // 2]],
            hint="Layers are global or local, as many as num_layers says.",
            read=_read_types,
            write=_write_types,
        ),
        hf.ConfigMapping(
            ("attention_layers",),
            ("attention_types",),
            lambda config: _kinds(config["attention_types"]),
            hint="It differs from attention_types.",
            read=_read_layers,
            write=lambda values: _kinds(_write_types(values)),
        ),
        hf.mapped("window_size", "sliding_window_size", default=256, implied=_window_of_no_layer),
        hf.mapped("tie_word_embeddings", "logits_via_embedding", default=True, values=hf.BOOLEANS),
    ),
    rows=(
        *_AROUND_LAYERS,
        *hf.attention(_LAYER + "attn.attention.", "q_proj k_proj v_proj out_proj"),
        *hf.projection(_LAYER + "mlp.c_fc", "layers/mlp/wi", "F D", "D F"),
        *hf.projection(_LAYER + "mlp.c_proj", "layers/mlp/wo", "D F", "F D"),
    ),
    prefix="transformer.",
    ignored=(".attention.bias", ".attention.masked_bias"),
)


_NEOX_ACTIVATIONS = hf.activations("gelu gelu_new gelu_fast gelu_pytorch_tanh relu")

GPT_NEOX = hf.Family(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    decoder_block="gpt_neox",
    settings=(
        hf.mapped("vocab_size", "vocab_size"),
        hf.mapped("max_position_embeddings", "max_target_length", default=2048),
        hf.mapped("hidden_size", "base_emb_dim"),
        hf.mapped("num_hidden_layers", "base_num_decoder_layers"),
        hf.mapped("num_attention_heads", "base_num_query_heads base_num_kv_heads"),
        hf.family_default("head_dim", hf.divided_by("hidden_size", "num_attention_heads")),
        hf.mapped("intermediate_size", "base_mlp_dim"),
        hf.mapped("layer_norm_eps", "normalization_layer_epsilon", default=1e-5),
        hf.mapped("hidden_act", "mlp_activations", default="gelu", values=_NEOX_ACTIVATIONS),
        hf.mapped("use_parallel_residual", "block_arrangement", default=True, values=hf.PARALLEL),
        hf.mapped("attention_bias", "qkv_bias proj_bias", default=True, values=hf.BOOLEANS),
        hf.mapped("tie_word_embeddings", "logits_via_embedding", default=False, values=hf.BOOLEANS),
        *rotary.settings(fraction_types=rotary.ALL_TYPES),
    ),
    rows=(
        hf.row("gpt_neox.embed_in.weight", "token_embedder/embedding", "V D", "V D"),
        *hf.norm(_NEOX_LAYER + "input_layernorm", "layers/pre_self_attention_layer_norm"),
        *hf.projection(
            _NEOX_LAYER + "attention.query_key_value", _QUERY_KEY_VALUE, "(N J H) D", "D N H"
        ),
        *hf.projection(_NEOX_LAYER + "attention.dense", hf.ATTENTION + "out", "D (N H)", "N H D"),
        *hf.norm(_NEOX_LAYER + "post_attention_layernorm", "layers/pre_mlp_layer_norm"),
        *hf.projection(_NEOX_LAYER + "mlp.dense_h_to_4h", "layers/mlp/wi", "F D", "D F"),
        *hf.projection(_NEOX_LAYER + "mlp.dense_4h_to_h", "layers/mlp/wo", "D F", "F D"),
        *hf.norm("gpt_neox.final_layer_norm", "decoder_norm"),
        hf.row("embed_out.weight", "logits_dense/kernel", "V D", "D V", ("lm_head.weight",)),
    ),
    prefix="gpt_neox.",
    head="embed_out.weight",
    ignored=(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
    rotary=RotaryDefaults(
        fraction=0.25,
        theta_names=("rotary_emb_base",),
        fraction_names=("rotary_pct",),
    ),
)
