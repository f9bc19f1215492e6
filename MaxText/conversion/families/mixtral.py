"""Mixtral (Jiang et al. 2024): Mistral's layer with experts in place of its feed-forward.

Tensors are named as in the published files, one for each expert. transformers 5 stacks experts in
memory and writes and reads these names.
"""

from typing import Any

from MaxText.conversion.families import windows
from MaxText.conversion.families.llama import PARTS, ROWS, SETTINGS
from MaxText.conversion.families.rotary_scaling import ROTARY_SCALING
from MaxText.conversion.family import REQUIRED, Family, Setting, only, ratio, row, same

_EXPERT = "model.layers.{layer}.block_sparse_moe.experts.{expert}."


def _several(theirs: str, ours: str, default: int, remedy: str) -> Setting:
    """A number that is at least 2."""

    def possible(value: Any) -> Any:
        return value if type(value) is int and value > 1 else REQUIRED

    names = tuple(theirs.split())
    return Setting(
        names, (ours,), default, remedy=remedy,
        read=lambda value, config: possible(value), write=lambda values: possible(values[ours]),
    )  # fmt: skip


_DEFAULTS = (
    same("num_key_value_heads", "base_num_kv_heads", default=8),
    same("rms_norm_eps", "normalization_layer_epsilon", default=1e-5),
    same("rope_theta", "rope_max_timescale", default=1e6),
)
_OTHERS = {setting.name for setting in _DEFAULTS}
_VARIES = ("attention_types", "num_experts")

MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    decoder_block="llama2",
    parts={
        **{name: value for name, value in PARTS.items() if name not in _VARIES},
        "use_qk_norm": False,
        "qkv_bias": False,
        "proj_bias": False,
        "ffn_bias": False,
        "moe_layers": None,
        "moe_mlp_dim": -1,
        "moe_activations": None,
        "eval_capacity_factor": -1.0,
        "moe_second_policy_eval": "all",
    },
    settings=(
        *(setting for setting in SETTINGS if setting.name not in _OTHERS),
        *_DEFAULTS,
        same("max_position_embeddings", "max_target_length", default=131_072),
        same("head_dim", "head_dim", default=ratio("hidden_size", "num_attention_heads")),
        _several(
            "num_local_experts num_experts", "num_experts", 8, "One expert is an ordinary Mistral."
        ),
        _several(
            "num_experts_per_tok", "num_experts_per_tok", 2,
            "The gate of a single expert is its probability here, and 1 there.",
        ),
        same("router_aux_loss_coef", "load_balance_loss_weight", default=0.001),
        only("router_jitter_noise", 0.0),
        *windows.window(None),
        *ROTARY_SCALING,
    ),
    rows=(
        *(row for row in ROWS if ".mlp." not in row.theirs),
        row("model.layers.{layer}.block_sparse_moe.gate.weight", "layers/mlp/gate/kernel",
            "E D", "D E"),
        row(_EXPERT + "w1.weight", "layers/mlp/experts/wi_0", "F D", "D F"),
        row(_EXPERT + "w3.weight", "layers/mlp/experts/wi_1", "F D", "D F"),
        row(_EXPERT + "w2.weight", "layers/mlp/experts/wo", "D F", "F D"),
    ),
    prefix="model.",
    ignored=(".rotary_emb.inv_freq",),
    window=windows.NAME,
)  # fmt: skip
