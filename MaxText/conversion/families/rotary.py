"""Rotary parameters of config.json (`rope_parameters`), which most families share."""

from MaxText.conversion import family as hf
from MaxText.conversion.rotary_config import OBJECT

_PLAIN_YARN = "Sine and cosine are multiplied by 0.1 ln(factor) + 1 here, from factor alone."
_ROPE_TYPES = (("default",) * 2, ("llama3", "llama3.1"), ("linear",) * 2, ("yarn",) * 2)


def settings(kind: str = "", *, has_fraction: bool = False) -> tuple[hf.ConfigMapping, ...]:
    """Returns the settings of rotary positions, in the newer names.

    Args:
      kind: The layers that they are for, in families with an object for each kind of layer.
      has_fraction: Whether a head can be rotated in part; else only the whole head.
    """
    prefix = f"{OBJECT}.{kind}." if kind else f"{OBJECT}."
    kinds = (kind,) if kind else ()

    def mapped(name: str, key: str, default=hf.REQUIRED, values=None) -> hf.ConfigMapping:
        return hf.mapped(prefix + name, key, default, values, kinds=kinds)

    if has_fraction:
        fraction = mapped("partial_rotary_factor", "rotary_pct", default=1.0)
    else:
        fraction = hf.supported(f"{prefix}partial_rotary_factor", 1.0, kinds=kinds)
    return (
        mapped("rope_theta", "rope_max_timescale"),
        fraction,
        mapped("rope_type", "rope_type", default="default", values=_ROPE_TYPES),
        mapped("factor", "rope_factor"),
        mapped("original_max_position_embeddings", "original_max_position_embeddings"),
        mapped("low_freq_factor", "low_freq_factor"),
        mapped("high_freq_factor", "high_freq_factor"),
        mapped("beta_fast", "beta_fast", default=32.0),
        mapped("beta_slow", "beta_slow", default=1.0),
        *(
            hf.supported(prefix + name, None, hint=_PLAIN_YARN, kinds=kinds)
            for name in ("attention_factor", "mscale", "mscale_all_dim")
        ),
        hf.supported(
            f"{prefix}truncate",
            True,
            hint="The transition begins and ends at whole pairs.",
            kinds=kinds,
        ),
    )
