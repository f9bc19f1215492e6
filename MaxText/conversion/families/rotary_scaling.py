"""`rope_scaling` of config.json: how rotary frequencies are changed for longer texts.

Newer versions of transformers write the same object as `rope_parameters`, with rope_theta in it.
"""

from MaxText.conversion.family import Setting, like, only, same

_PLAIN_YARN = "Sine and cosine are multiplied by 0.1 ln(factor) + 1 here, from factor alone."

# After the setting of the length in a family's settings, which is a default here.
ROTARY_SCALING: tuple[Setting, ...] = (
    same(
        "rope_scaling.rope_type",
        "rope_type",
        default="default",
        values=(
            ("default", "default"),
            ("llama3", "llama3.1"),
            ("linear", "linear"),
            ("yarn", "yarn"),
        ),
    ),
    same("rope_scaling.factor", "rope_factor"),
    same(
        "rope_scaling.original_max_position_embeddings original_max_position_embeddings",
        "original_max_position_embeddings",
        default=like("max_position_embeddings"),
    ),
    same("rope_scaling.low_freq_factor", "low_freq_factor"),
    same("rope_scaling.high_freq_factor", "high_freq_factor"),
    same("rope_scaling.beta_fast", "beta_fast", default=32.0),
    same("rope_scaling.beta_slow", "beta_slow", default=1.0),
    only("rope_scaling.attention_factor", None, remedy=_PLAIN_YARN),
    only("rope_scaling.mscale", None, remedy=_PLAIN_YARN),
    only("rope_scaling.mscale_all_dim", None, remedy=_PLAIN_YARN),
    only("rope_scaling.truncate", True, remedy="The transition begins and ends at whole pairs."),
)
