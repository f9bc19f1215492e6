"""Mistral (Jiang et al. 2023), Mixtral (Jiang et al. 2024) and Ministral 3 (Mistral AI 2025).

Mistral's first version has a sliding window in all layers. Mixtral has experts, named as in the
published files, which transformers 5 still reads and writes. Ministral 3 multiplies queries by a
factor that grows with the position. `mistral3` is a multimodal model around Mistral or Ministral 3.
"""

from MaxText.conversion import family as hf
from MaxText.conversion.families import rotary, windows
from MaxText.conversion.families.llama import LAYER, PRE_NORMS, attention, descendant, rows
from MaxText.conversion.rotary_config import OBJECT, RotaryDefaults

_EXPERT = LAYER + "block_sparse_moe.experts.{expert}."
_EXPERTS = (
    hf.row(LAYER + "block_sparse_moe.gate.weight", "layers/mlp/gate/kernel", "E D", "D E"),
    hf.row(_EXPERT + "w1.weight", "layers/mlp/experts/wi_0", "F D", "D F"),
    hf.row(_EXPERT + "w3.weight", "layers/mlp/experts/wi_1", "F D", "D F"),
    hf.row(_EXPERT + "w2.weight", "layers/mlp/experts/wo", "D F", "F D"),
)
_BIASES = ("attention_bias", "mlp_bias")


def _two_or_more(hf_names: str, key: str, default: int, hint: str) -> hf.ConfigMapping:
    return hf.ConfigMapping(
        tuple(hf_names.split()),
        (key,),
        default,
        hint=hint,
        read=lambda value, config: hf.whole_number(value, at_least=2),
        write=lambda values: hf.whole_number(values[key], at_least=2),
    )


MISTRAL = descendant(
    "MistralForCausalLM",
    windows.of_local_layers(4096),
    without=_BIASES,
    defaults={"num_key_value_heads": 8, "max_position_embeddings": 131_072},
    decoder_block="mistral",
    layers=windows.of_all_layers(4096),
    wrappers=("mistral3",),
)

MIXTRAL = descendant(
    "MixtralForCausalLM",
    _two_or_more(
        "num_local_experts num_experts", "num_experts", 8, "One expert is an ordinary Mistral."
    ),
    _two_or_more(
        "num_experts_per_tok",
        "num_experts_per_tok",
        2,
        "The gate of a single expert is its probability here, and 1 there.",
    ),
    hf.mapped("router_aux_loss_coef", "load_balance_loss_weight", default=0.001),
    hf.supported("router_jitter_noise", 0.0),
    windows.of_local_layers(None),
    choices={
        "moe_layers": None,
        "moe_mlp_dim": -1,
        "moe_activations": None,
        "norm_topk_prob": True,
        "eval_capacity_factor": -1.0,
        "moe_second.policy_eval": "all",
    },
    without=_BIASES,
    defaults={
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
    },
    rows=rows(PRE_NORMS, attention(), _EXPERTS),
    layers=windows.of_all_layers(None),
    rotary=RotaryDefaults(theta=1e6),
)

_ORIGINAL_LENGTH = f"{OBJECT}.original_max_position_embeddings"

MINISTRAL3 = descendant(
    "Ministral3ForCausalLM",
    windows.of_local_layers(None),
    *rotary.settings(),
    hf.mapped(f"{OBJECT}.llama_4_scaling_beta", "temperature_tuning_beta"),
    # The class divides positions by it, whatever the factor is.
    hf.ConfigMapping(
        (_ORIGINAL_LENGTH,),
        default=hf.copy_of("max_position_embeddings"),
        read=lambda value, config: None,
        write=lambda values: values["original_max_position_embeddings"],
    ),
    without=_BIASES,
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 262_144,
    },
    decoder_block="ministral3",
    layers=windows.of_all_layers(None),
    rotary=RotaryDefaults(
        parameters={
            "rope_type": "yarn",
            "rope_theta": 1_000_000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16_384,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale_all_dim": 1.0,
            "mscale": 1.0,
            "llama_4_scaling_beta": 0.1,
        }
    ),
    wrappers=("mistral3",),
)
