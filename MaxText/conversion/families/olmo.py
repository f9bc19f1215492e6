"""OLMo 2 (OLMo Team 2025, arXiv 2501.00656) and OLMo 3 (OLMo Team 2025).

Norms are those of branch outputs, and of queries and keys over all heads. OLMo 3 has windows, and
rotary parameters for each kind of layer: in published files `rope_scaling` is that of global ones.
"""

from MaxText.conversion.families import rotary, windows
from MaxText.conversion.families.llama import (
    GATED_MLP,
    JOINT_QK_NORMS,
    POST_NORMS,
    attention,
    descendant,
    rows,
)
from MaxText.conversion.layer_table import (
    GLOBAL,
    GLOBAL_KIND,
    LOCAL,
    LOCAL_KIND,
    LayerTable,
    every_nth_global,
    write_layer_types,
)
from MaxText.conversion.rotary_config import RotaryDefaults

_ROWS = rows(POST_NORMS, attention(), JOINT_QK_NORMS, GATED_MLP)

OLMO2 = descendant(
    "Olmo2ForCausalLM",
    without=("mlp_bias",),
    defaults={"rms_norm_eps": 1e-5},
    decoder_block="olmo2",
    rows=_ROWS,
)

OLMO3 = descendant(
    "Olmo3ForCausalLM",
    windows.of_local_layers(4096),
    *rotary.settings(LOCAL),
    *rotary.settings(GLOBAL),
    without=("mlp_bias", *(setting.name for setting in rotary.settings())),
    defaults={"rms_norm_eps": 1e-5},
    decoder_block="olmo3",
    rows=_ROWS,
    layers=LayerTable(
        (LOCAL_KIND, GLOBAL_KIND), every_nth_global("", default=4), write_layer_types
    ),
    rotary=RotaryDefaults(
        thetas_by_kind={LOCAL: 500_000.0, GLOBAL: 500_000.0},
        theta_names_by_kind={GLOBAL: "rope_theta"},
    ),
)
