"""MUDDFormer and MUDDPythia (Xiao et al. 2025) as released.

The aggregation after layer i, from 0, is dense_bs.i and dynamic_dense.i there and
connections/after/{i + 1} here. The first layer has one norm for queries, keys and values, which all
read the embedding; later layers have three. Rotary dimensions pair by halves, as here.
"""

from MaxText.conversion import family as hf

_LAYER = "layers.{layer}."
_PARAMS = "layers/"
_NORM = "pre_self_attention_layer_norm"
_CONNECTION = "connections/after/{layer+1}/"


_ROWS = (
    hf.row("tok_embeddings.weight", "token_embedder/embedding", "V D", "V D"),
    *hf.norm(f"{_LAYER}attention_norm", _PARAMS + _NORM),
    *hf.norm(f"{_LAYER}attention_norms.0", f"{_PARAMS}{_NORM}_q"),
    *hf.norm(f"{_LAYER}attention_norms.1", f"{_PARAMS}{_NORM}_k"),
    *hf.norm(f"{_LAYER}attention_norms.2", f"{_PARAMS}{_NORM}_v"),
    *hf.attention(f"{_LAYER}attention.", "wq wk wv wo", kv="K"),
    hf.row(f"{_LAYER}attention.q_norm.weight", f"{hf.ATTENTION}query_norm/scale", "H", "H"),
    hf.row(f"{_LAYER}attention.k_norm.weight", f"{hf.ATTENTION}key_norm/scale", "H", "H"),
    *hf.norm(f"{_LAYER}ffn_norm", f"{_PARAMS}pre_mlp_layer_norm"),
)
_CONNECTIONS = (
    hf.row("dense_bs.{layer}", f"{_CONNECTION}static", "C L", "C L"),
    hf.row("dynamic_dense.{layer}.w1.weight", f"{_CONNECTION}wi/kernel", "W D", "D W"),
    hf.row("dynamic_dense.{layer}.w2.weight", f"{_CONNECTION}wo/kernel", "(C L) W", "W C L"),
    *hf.norm("norm", "decoder_norm"),
    hf.row("output.weight", "logits_dense/kernel", "V D", "D V"),
)
_GATED = (
    *hf.projection(f"{_LAYER}feed_forward.w1", f"{_PARAMS}mlp/wi_0", "F D", "D F"),
    *hf.projection(f"{_LAYER}feed_forward.w3", f"{_PARAMS}mlp/wi_1", "F D", "D F"),
    *hf.projection(f"{_LAYER}feed_forward.w2", f"{_PARAMS}mlp/wo", "D F", "F D"),
)
_PLAIN = (
    *hf.projection(f"{_LAYER}feed_forward.w1", f"{_PARAMS}mlp/wi", "F D", "D F"),
    *hf.projection(f"{_LAYER}feed_forward.w2", f"{_PARAMS}mlp/wo", "D F", "F D"),
)

_ALL_GLOBAL = "Every layer attends to all earlier tokens here."
_ALL_SUMS = "Their program computes sums of all four ways with both kinds of weights."
_NO_SUMS = "Without sums their program fuses queries, keys and values, which has no table."
_OWN_NORMS = "Queries, keys and values that read different sums have norms of their own here."


def _settings(epsilon: float, width: hf.Default, expands: bool) -> tuple[hf.ConfigMapping, ...]:
    """Returns the settings of one of the two programs.

    Args:
      epsilon: The default of `norm_eps`.
      width: The default of `intermediate_size`, as in ConfigMapping.
      expands: The default of `expand_last` and `round64`.
    """
    return (
        hf.mapped("vocab_size", "vocab_size"),
        hf.mapped("block_size", "max_target_length", default=2048),
        hf.mapped("dim", "base_emb_dim"),
        hf.mapped("n_layer", "base_num_decoder_layers"),
        hf.mapped("n_head", "base_num_query_heads"),
        # The family has no grouped-query attention.
        hf.write_only("n_local_heads", "base_num_kv_heads", hf.copy_of("n_head"), unset=-1),
        hf.write_only("head_dim", "head_dim", hf.divided_by("dim", "n_head")),
        hf.mapped("intermediate_size", "base_mlp_dim", default=width),
        hf.mapped("norm_eps", "normalization_layer_epsilon", default=epsilon),
        hf.mapped("rope_base", "rope_max_timescale", default=10_000.0),
        hf.mapped("use_qk_norm", "use_qk_norm", default=False, values=hf.BOOLEANS),
        hf.constant("dense", True, default=True, hint=_NO_SUMS),
        hf.constant("dynamic_dense", True, default=True, hint=_ALL_SUMS),
        # An older version of the program calls the residual stream m.
        hf.constant("dense_type", "qkvr", "qkvm", default="qkvr", hint=_ALL_SUMS),
        hf.constant("sepln", True, default=True, hint=_OWN_NORMS),
        hf.mapped(
            "expand_last", "dynamic_dense_last_layer_expand", expands, ((True, 4), (False, 1))
        ),
        hf.mapped(
            "round64", "dynamic_dense_hidden_round", expands, ((True, "reference"), (False, "none"))
        ),
        hf.constant("tie_word_embeddings", False, default=False),
        # Affects only how aggregations are computed.
        hf.constant("stack_hidden", False, True, default=False),
    )


def _family(
    architecture: str,
    rope_table_dtype: str,
    settings: tuple[hf.ConfigMapping, ...],
    mlp: hf.Rows,
) -> hf.Family:
    name = architecture.lower()
    return hf.Family(
        model_type=name,
        architecture=architecture,
        decoder_block=name,
        choices={"rope_table_dtype": rope_table_dtype},
        settings=settings,
        rows=(*_ROWS, *mlp, *_CONNECTIONS),
        head="output.weight",
        ignored=(".kv_cache.k_cache", ".kv_cache.v_cache", "layer_cache.layer_cache"),
        in_transformers=False,
        auto_map={
            "AutoConfig": f"configuration_{name}.{architecture}Config",
            "AutoModelForCausalLM": f"modeling_{name}.{architecture}",
        },
        code=f"Caiyun-AI/{architecture}-2.8B",
    )


MUDDFORMER = _family(
    "MUDDFormer",
    "bfloat16",
    # 8/3 of the width, rounded up to a multiple of 256.
    _settings(1e-6, lambda config: -(-int(2 * 4 * config["dim"] / 3) // 256) * 256, expands=False),
    _GATED,
)

MUDDPYTHIA = _family(
    "MUDDPythia",
    "float16",
    (
        *_settings(1e-5, hf.REQUIRED, expands=True),
        hf.mapped("rotary_pct", "rotary_pct", default=0.25),
        hf.mapped("use_parallel_residual", "block_arrangement", default=True, values=hf.PARALLEL),
        hf.mapped("use_linear_bias", "ffn_bias", default=True, values=hf.BOOLEANS),
        hf.supported("window_size", None, hint=_ALL_GLOBAL),
        hf.supported("window_type", None, hint=_ALL_GLOBAL),
    ),
    _PLAIN,
)
