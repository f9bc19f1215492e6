"""Further families that differ from Llama by a part or two, with RMSNorm.

Arcee AFM (2025) and nanochat (Karpathy 2025) have ungated feed-forwards, ERNIE 4.5 (Baidu 2025) and
GLM-4 (2024) rotate adjacent dimensions, Phi-3 and Phi-4 (Abdin et al. 2024) and GLM-4 store fused
projections. SmolLM3 (2025) and EXAONE 4 (LG AI Research 2025) have layers without rotary positions.
Granite (IBM 2024) multiplies embedding, branches and scores and divides logits; where it has
experts, those of a layer are one tensor. Hunyuan (Tencent 2025) normalizes queries and keys after
rotary. Apertus (2025) has an activation with learned scalars. Seed-OSS (ByteDance 2025) has biases.
"""

from collections.abc import Sequence
from typing import Any

from MaxText.conversion import family as hf
from MaxText.conversion.families import expert_layers, rotary, windows
from MaxText.conversion.families.llama import (
    FUSED_ATTENTION,
    FUSED_MLP,
    GATED_MLP,
    LAYER,
    POST_ATTENTION,
    POST_MLP,
    POST_NORMS,
    PRE_ATTENTION,
    PRE_MLP,
    PRE_NORMS,
    UNGATED,
    activation,
    attention,
    biases,
    descendant,
    qk_norms,
    rows,
    tied_by_default,
    ungated_mlp,
)
from MaxText.conversion.layer_table import (
    GLOBAL,
    LOCAL,
    LayerKind,
    Layers,
    LayerTable,
    LayerTableError,
    every_nth_global,
    read_layer_types,
    read_list,
    write_layer_types,
)
from MaxText.conversion.rotary_config import RotaryDefaults

ARCEE = descendant(
    "ArceeForCausalLM",
    activation("relu2", values=UNGATED),
    defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
    decoder_block="arcee",
    rows=rows(PRE_NORMS, attention(), ungated_mlp()),
)

SEED_OSS = descendant(
    "SeedOssForCausalLM",
    biases("attention_bias", "qkv_bias", default=True),
    biases("attention_out_bias", "proj_bias"),
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 524_288,
    },
    model_type="seed_oss",
    decoder_block="seed_oss",
)

ERNIE4_5 = descendant(
    "Ernie4_5ForCausalLM",
    tied_by_default(),
    biases("use_bias", "qkv_bias proj_bias ffn_bias"),
    rotary.either_order(),
    without=("attention_bias", "mlp_bias"),
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
    },
    decoder_block="ernie4_5",
    rows=rows(PRE_NORMS, attention("adjacent"), GATED_MLP),
    rotary=RotaryDefaults(theta=500_000.0),
)

GLM4 = descendant(
    "Glm4ForCausalLM",
    biases("attention_bias", "qkv_bias", default=True),
    *rotary.settings(fraction_types=rotary.ALL_TYPES),
    rotary.either_order(),
    without=("mlp_bias",),
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1.5625e-07,
        "max_position_embeddings": 131_072,
    },
    decoder_block="glm4",
    rows=rows(
        hf.norm(LAYER + "input_layernorm", PRE_ATTENTION),
        hf.norm(LAYER + "post_self_attn_layernorm", POST_ATTENTION),
        hf.norm(LAYER + "post_attention_layernorm", PRE_MLP),
        hf.norm(LAYER + "post_mlp_layernorm", POST_MLP),
        attention("adjacent"),
        FUSED_MLP,
    ),
    rotary=RotaryDefaults(fraction=0.5),
)

PHI3 = descendant(
    "Phi3ForCausalLM",
    windows.of_local_layers(None),
    *rotary.settings(types=("default", "longrope"), fraction_types=rotary.ALL_TYPES),
    hf.ConfigMapping(
        ("original_max_position_embeddings",),
        ("original_max_position_embeddings",),
        4096,
        read=lambda value, config: value,
    ),
    without=("attention_bias", "mlp_bias"),
    defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
    decoder_block="phi3",
    rows=rows(PRE_NORMS, FUSED_ATTENTION, FUSED_MLP),
    layers=windows.of_all_layers(None),
    rotary=RotaryDefaults(
        fraction=1.0,
        original_length=4096,
        type_names={"su": "longrope", "yarn": "longrope"},
    ),
)

MULTIPLIERS = (
    hf.mapped("embedding_multiplier", "embedding_multiplier", default=1.0),
    hf.mapped("residual_multiplier", "residual_multiplier", default=1.0),
    hf.mapped("logits_scaling", "logits_scaling", default=1.0),
    hf.ConfigMapping(
        ("attention_multiplier",),
        ("attention_scale",),
        1.0,
        read=lambda value, config: value,
        write=lambda values: values["attention_scale"] or values["head_dim"] ** -0.5,
    ),
)
_SPARSE_MOE = LAYER + "block_sparse_moe."
_EXPERTS = "layers/mlp/experts/"
# Router and experts, each one tensor.
GRANITE_EXPERTS = (
    hf.row(_SPARSE_MOE + "router.layer.weight", "layers/mlp/gate/kernel", "E D", "D E"),
    hf.row(
        _SPARSE_MOE + "input_linear.weight",
        f"{_EXPERTS}wi_0 {_EXPERTS}wi_1",
        "E (J F) D",
        "E D F",
    ),
    hf.row(_SPARSE_MOE + "output_linear.weight", _EXPERTS + "wo", "E D F", "E F D"),
)

GRANITE = descendant("GraniteForCausalLM", *MULTIPLIERS, decoder_block="granite")

GRANITEMOE = descendant(
    "GraniteMoeForCausalLM",
    *MULTIPLIERS,
    expert_layers.number("num_local_experts num_experts", "num_experts", 8, at_least=2),
    expert_layers.number("num_experts_per_tok", "num_experts_per_tok", 2),
    expert_layers.balance_loss("router_aux_loss_coef", 0.001),
    without=("mlp_bias",),
    choices={"moe_mlp_dim": -1},
    decoder_block="granitemoe",
    rows=rows(PRE_NORMS, attention(), GRANITE_EXPERTS),
)

HUNYUAN_V1_DENSE = descendant(
    "HunYuanDenseV1ForCausalLM",
    without=("mlp_bias",),
    defaults={"rms_norm_eps": 1e-5},
    model_type="hunyuan_v1_dense",
    decoder_block="hunyuan_v1_dense",
    rows=rows(PRE_NORMS, attention(), qk_norms("query_layernorm key_layernorm"), GATED_MLP),
    rotary=RotaryDefaults(has_alpha=True),
)

NANOCHAT = descendant(
    "NanoChatForCausalLM",
    activation("relu2", values=UNGATED),
    hf.soft_cap("final_logit_softcapping", "final_logits_soft_cap", default=15.0),
    without=("mlp_bias",),
    decoder_block="nanochat",
    rows=rows(attention("reversed"), ungated_mlp("fc1 fc2")),
)

_XIELU = LAYER + "mlp.act_fn."

APERTUS = descendant(
    "ApertusForCausalLM",
    activation("xielu", values=hf.activations("xielu")),
    without=("mlp_bias",),
    defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 65_536},
    decoder_block="apertus",
    rows=rows(
        hf.norm(LAYER + "attention_layernorm", PRE_ATTENTION),
        hf.norm(LAYER + "feedforward_layernorm", PRE_MLP),
        attention(),
        qk_norms(),
        ungated_mlp(),
        (
            hf.row(_XIELU + "alpha_p", "layers/mlp/activation/alpha_p", "U", ""),
            hf.row(_XIELU + "alpha_n", "layers/mlp/activation/alpha_n", "U", ""),
        ),
    ),
    constants={_XIELU + "beta": 0.5, _XIELU + "eps": -1e-6},
    rotary=RotaryDefaults(
        theta=12_000_000.0,
        parameters={
            "rope_type": "llama3",
            "rope_theta": 12_000_000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    ),
)

_ROTARY = {"position_embedding": "rotary"}
_NO_ROTARY = {"position_embedding": "none"}
_LOCAL_ROTARY = LayerKind(LOCAL, "L", {"mixer": "local_attention", **_ROTARY})
_GLOBAL_ROTARY = LayerKind(f"{GLOBAL} with rotary", "G", {"mixer": "attention", **_ROTARY})
_GLOBAL_NO_ROTARY = LayerKind(GLOBAL, "N", {"mixer": "attention", **_NO_ROTARY})
_LOCAL_NO_ROTARY = LayerKind(
    f"{LOCAL} without rotary", "M", {"mixer": "local_attention", **_NO_ROTARY}
)

_NO_ROPE = "no_rope_layers"  # 1 for layers that have rotary positions
_SMOLLM3_KINDS = {
    (LOCAL, True): _LOCAL_ROTARY,
    (GLOBAL, True): _GLOBAL_ROTARY,
    (GLOBAL, False): _GLOBAL_NO_ROTARY,
    (LOCAL, False): _LOCAL_NO_ROTARY,
}


def _read_smollm3(layers: Layers) -> list[str]:
    config = layers.config
    interval = config.get("no_rope_layer_interval", 4)
    if type(interval) is not int or interval < 1:
        raise LayerTableError(f"no_rope_layer_interval={interval} is not a number of layers")
    every_nth = ((index + 1) % interval != 0 for index in range(layers.count))
    has_rotary = [bool(flag) for flag in read_list(layers, _NO_ROPE, every_nth)]
    has_window = bool(config.get("use_sliding_window", False)) and config.get(windows.NAME)
    default = (LOCAL if has_window and not rotates else GLOBAL for rotates in has_rotary)
    types = read_layer_types(layers, default)
    windows.check_window(layers, types, has_window=bool(has_window))
    return [_SMOLLM3_KINDS[kind].name for kind in zip(types, has_rotary, strict=True)]


def _write_smollm3(names: Sequence[str]) -> dict[str, Any]:
    kinds = {kind.name: facts for facts, kind in _SMOLLM3_KINDS.items()}
    types = [kinds[name][0] for name in names]
    return {
        **write_layer_types(types),
        _NO_ROPE: [int(kinds[name][1]) for name in names],
        "use_sliding_window": LOCAL in types,
    }


SMOLLM3 = descendant(
    "SmolLM3ForCausalLM",
    tied_by_default(),
    windows.of_local_layers(None, kinds=(_LOCAL_ROTARY.name, _LOCAL_NO_ROTARY.name)),
    defaults={"num_key_value_heads": 4, "max_position_embeddings": 32_768},
    decoder_block="smollm3",
    layers=LayerTable(tuple(_SMOLLM3_KINDS.values()), _read_smollm3, _write_smollm3),
    rotary=RotaryDefaults(theta=2_000_000.0),
)


def _read_exaone4(layers: Layers) -> list[str]:
    """Returns the kinds of layers: global ones have rotary positions only without windows."""
    if layers.config.get(windows.NAME, 4096) is not None:
        return every_nth_global("sliding_window_pattern", default=4)(layers)
    types = read_layer_types(layers, [GLOBAL] * layers.count)
    if LOCAL in types:
        raise LayerTableError(f"layer_types has {LOCAL}, but {windows.NAME} is null")
    return [_GLOBAL_ROTARY.name] * layers.count


def _write_exaone4(names: Sequence[str]) -> dict[str, Any]:
    if _GLOBAL_ROTARY.name not in names:
        return write_layer_types(names)
    if len(set(names)) > 1:
        raise LayerTableError(
            "global layers have rotary positions beside layers with a window or without positions"
        )
    return {**write_layer_types([GLOBAL] * len(names)), windows.NAME: None}


EXAONE4 = descendant(
    "Exaone4ForCausalLM",
    windows.of_local_layers(4096),
    without=("attention_bias", "mlp_bias"),
    defaults={"num_key_value_heads": 32, "rms_norm_eps": 1e-5},
    decoder_block="exaone4",
    rows=rows(POST_NORMS, attention(), qk_norms(), GATED_MLP),
    layers=LayerTable(
        (_LOCAL_ROTARY, _GLOBAL_NO_ROTARY, _GLOBAL_ROTARY), _read_exaone4, _write_exaone4
    ),
)
