"""Model files of MaxText: what their decoder_block stands for there, in keys of layers here.

In MaxText, `decoder_block: gemma3` also says which layers have a window, and keys such as
local_rope_max_timescale are those of some of these layers. Here, they are layer_pattern and
layer_kinds. `translate` rewrites the settings of one file. Blocks that need nothing of the kind,
and keys with one meaning everywhere, are not here but in maxtext_keys.yml.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from MaxText.config import values
from MaxText.config.config_files import Setting
from MaxText.config.values import InvalidValueError


class BlockKeys(NamedTuple):
    """The rewritten part of a model file.

    Attributes:
      settings: Keys here and their values.
      read: Keys of MaxText that `settings` stand for.
    """

    settings: dict[str, Any]
    read: tuple[str, ...]


class _File:
    """The values of a model file, by MaxText's keys."""

    def __init__(self, settings: Sequence[Setting]):
        self._values = {setting.name: setting.value for setting in settings}

    def text(self, name: str) -> str:
        """Returns a value as text; "" if it is not there."""
        return str(self._values.get(name, ""))

    def number(self, name: str, default: float) -> float:
        """Returns a number; InvalidValueError if it is none."""
        return values.convert(self._values.get(name, default), float)

    def count(self, name: str, default: int) -> int:
        """Returns an integer; InvalidValueError if it is none."""
        return values.convert(self._values.get(name, default), int)

    def has(self, name: str) -> bool:
        """Returns whether the file has a key."""
        return name in self._values

    def switch(self, name: str, default: bool) -> bool:
        """Returns a boolean; InvalidValueError if it is none."""
        return values.convert(self._values.get(name, default), bool)


def _cycled(cycle: str, num_layers: int) -> str:
    """Returns the layer_pattern of a cycle that may end with a part of itself."""
    suffix = cycle[: num_layers % len(cycle)]
    if num_layers < len(cycle):
        return suffix
    return f"({cycle}){suffix}" if suffix else cycle


def _kinds(
    local: Mapping[str, Any] | None = None, everywhere: Mapping[str, Any] | None = None
) -> dict[str, dict[str, Any]]:
    """Returns the kinds L, with a window, and G, without, with further keys of each."""
    return {
        "L": {"mixer": "local_attention", **(local or {})},
        "G": {"mixer": "attention", **(everywhere or {})},
    }


def _gemma2(file: _File) -> BlockKeys:
    """Layers are pairs in MaxText: one with a window, one without."""
    num_layers = 2 * file.count("base_num_decoder_layers", 16)
    settings = {"base_num_decoder_layers": num_layers, "layer_pattern": "LG"}
    if file.count("base_emb_dim", 0) == 4608:  # 27B: 4608 / 32 in place of the size of heads
        settings["attention_scale"] = 144**-0.5
    return BlockKeys(settings | {"layer_kinds": _kinds()}, ("base_num_decoder_layers",))


def _gemma3(file: _File) -> BlockKeys:
    """Five layers with a window and a rotary base of their own, then one without."""
    local = {"rope_max_timescale": file.number("local_rope_max_timescale", 10_000)}
    factor = file.number("rope_linear_scaling_factor", 1.0)
    scaled = {"rope_type": "linear", "rope_factor": factor} if factor != 1 else {}
    settings: dict[str, Any] = {
        "layer_pattern": _cycled("LLLLLG", file.count("base_num_decoder_layers", 16)),
        "layer_kinds": _kinds(local, scaled),
    }
    if file.count("base_emb_dim", 0) == 5376:  # 27B: 5376 / 32 in place of the size of heads
        settings["attention_scale"] = 168**-0.5
    return BlockKeys(settings, ("local_rope_max_timescale", "rope_linear_scaling_factor"))


def _gemma4(file: _File) -> BlockKeys:
    """As Gemma 3, with heads and rotary fractions of their own in layers without a window."""
    if file.count("num_experts", 1) > 1:
        return _refused("gemma4_moe")
    base = file.number("rope_max_timescale", 10_000)
    local = {"rope_max_timescale": file.number("local_rope_max_timescale", base)}
    head_dim = file.count("head_dim", 128)
    everywhere = {
        "rope_max_timescale": file.number("global_rope_max_timescale", base),
        "rope_type": "proportional",
        "rotary_pct": file.number("global_rope_proportion", 0.25),
        "head_dim": file.count("global_head_dim", head_dim),
        "base_num_kv_heads": file.count("global_num_kv_heads", file.count("base_num_kv_heads", 16)),
        "share_kv_projections": file.switch("share_kv_projections", False),
    }
    settings = {
        "layer_pattern": _cycled("LLLLLG", file.count("base_num_decoder_layers", 16)),
        "layer_kinds": _kinds(local, everywhere),
    }
    read = (
        "local_rope_max_timescale",
        "global_rope_max_timescale",
        "global_rope_proportion",
        "global_head_dim",
        "global_num_kv_heads",
        "share_kv_projections",
    )
    if file.number("local_rope_proportion", 1.0) == 1.0:
        read = (*read, "local_rope_proportion")
    return BlockKeys(settings, read)


def _olmo3(file: _File) -> BlockKeys:
    """Three layers with a window, then one without; their rotary positions are alike."""
    interval = file.count("inhomogeneous_layer_cycle_interval", 4)
    cycle = "L" * (interval - 1) + "G"
    settings: dict[str, Any] = {
        "layer_pattern": _cycled(cycle, file.count("base_num_decoder_layers", 16)),
        "layer_kinds": _kinds(),
    }
    read = ("inhomogeneous_layer_cycle_interval", "rope_attention_scaling")
    return BlockKeys(settings | _yarn_factor(file), read)


def _yarn_factor(file: _File) -> dict[str, Any]:
    """Returns the factor of sines and cosines, which rope_attention_scaling turns on."""
    is_off = not file.switch("rope_attention_scaling", False)
    return {"rope_attention_factor": 1.0} if file.text("rope_type") == "yarn" and is_off else {}


def _refused(block: str) -> BlockKeys:
    """Returns the keys of a model that is not here, by a name in absent_blocks."""
    return BlockKeys({"decoder_block": block}, ("decoder_block",))


def _deepseek(file: _File) -> BlockKeys:
    """V2 and V3, which the scores of experts tell apart; in MaxText groups are off by default.

    Adjacent dimensions of the rotary slice pair in MaxText. Halves are the same model with other
    initial weights.
    """
    if file.has("use_indexer") or file.has("mhc_expansion_rate"):
        return _refused("deepseek_sparse")
    if file.has("mesh_axes"):
        return _refused("deepseek_mesh")
    is_v3 = file.text("routed_score_func") == "sigmoid"
    settings: dict[str, Any] = {"decoder_block": "deepseek_v3" if is_v3 else "deepseek_v2"}
    settings["n_routing_groups"] = file.count("n_routing_groups", -1)
    return BlockKeys(
        settings | _yarn_factor(file),
        ("decoder_block", "n_routing_groups", "rope_interleave", "rope_attention_scaling"),
    )


def _gpt_oss(file: _File) -> BlockKeys:
    """A layer with a window, then one without; biases and activations have other names there."""
    settings: dict[str, Any] = {
        "layer_pattern": _cycled("LG", file.count("base_num_decoder_layers", 16)),
        "layer_kinds": _kinds(),
        "qkv_bias": file.switch("attention_bias", False),
        "proj_bias": file.switch("attention_bias", False),
        "router_bias": file.switch("routed_bias", False),
        "expert_bias": file.switch("mlp_bias", False),
    }
    read = [
        "inhomogeneous_layer_cycle_interval",
        "attention_bias",
        "routed_bias",
        "mlp_bias",
        "rope_attention_scaling",
    ]
    if file.text("mlp_activations") == str(["sigmoid", "linear"]):  # of x in x sigmoid(1.702 x)
        settings["mlp_activations"] = ("quick_gelu", "linear_plus_one")
        read.append("mlp_activations")
    return BlockKeys(settings | _yarn_factor(file), tuple(read))


def _qwen3_next(file: _File) -> BlockKeys:
    """Three layers of gated DeltaNet, then one of attention."""
    interval = file.count("inhomogeneous_layer_cycle_interval", 4)
    settings = {
        "layer_pattern": _cycled(
            "D" * (interval - 1) + "G", file.count("base_num_decoder_layers", 16)
        ),
        "layer_kinds": {"D": {"mixer": "gated_delta_net"}, "G": {"mixer": "attention"}},
    }
    return BlockKeys(settings, ("inhomogeneous_layer_cycle_interval",))


# What MaxText's files of Qwen3.5 say of images, and of positions of their rows and columns.
_OF_IMAGES = (
    "vision_encoder_block",
    "image_size_for_vit",
    "hidden_size_for_vit",
    "intermediate_size_for_vit",
    "num_attention_heads_for_vit",
    "num_hidden_layers_for_vit",
    "num_channels_for_vit",
    "patch_size_for_vit",
    "temporal_patch_size_for_vit",
    "spatial_merge_size_for_vit",
    "out_hidden_size_for_vit",
    "num_position_embeddings_for_vit",
    "deepstack_visual_indexes_for_vit",
    "rope_theta_for_vit",
    "use_mrope",
    "mrope_section",
)


def _qwen3_5(file: _File) -> BlockKeys:
    """The text model of Qwen3.5 with experts; a text has the same positions in MaxText."""
    if file.has("weight_block_size"):
        return _refused("qwen3_5_fp8")
    settings, read = _qwen3_next(file)
    return BlockKeys(
        {"decoder_block": "qwen3_5_moe", **settings}, ("decoder_block", *read, *_OF_IMAGES)
    )


def _qwen2(file: _File) -> BlockKeys:
    return BlockKeys({"qkv_bias": file.switch("attention_bias", False)}, ("attention_bias",))


def _gpt3(file: _File) -> BlockKeys:
    """A table of positions if it has a size."""
    has_table = file.count("trainable_position_size", -1) > 0
    return BlockKeys({"position_embedding": "learned" if has_table else "none"}, ())


# decoder_block -> (a key that only MaxText's files of this block have, its translation).
_BLOCKS: dict[str, tuple[str, Callable[[_File], BlockKeys]]] = {
    "deepseek": ("decoder_block", _deepseek),
    "gemma2": ("use_post_attn_norm", _gemma2),
    "gemma3": ("use_post_attn_norm", _gemma3),
    "gemma4": ("use_post_attn_norm", _gemma4),
    "gpt3": ("trainable_position_size", _gpt3),
    "gpt_oss": ("inhomogeneous_layer_cycle_interval", _gpt_oss),
    "olmo3": ("inhomogeneous_layer_cycle_interval", _olmo3),
    "qwen2": ("attention_bias", _qwen2),
    "qwen3_5": ("inhomogeneous_layer_cycle_interval", _qwen3_5),
    "qwen3_next": ("inhomogeneous_layer_cycle_interval", _qwen3_next),
}


def translate(settings: Sequence[Setting], notices: list[str]) -> list[Setting]:
    """Returns the settings of a file, in which keys of MaxText's block are keys of layers here.

    Other files are returned as they are, and so are ones with values of another type, which are
    reported later.

    Args:
      settings: Of one file, as they were written.
      notices: Gets a line about what was rewritten.
    """
    by_name = {setting.name: setting for setting in settings}
    block = by_name.get("decoder_block")
    marker, rewrite = _BLOCKS.get(str(block.value) if block else "", ("", None))
    if block is None or rewrite is None or marker not in by_name:
        return list(settings)
    try:
        block_keys = rewrite(_File(settings))
    except InvalidValueError:
        return list(settings)
    remaining = [setting for setting in settings if setting.name not in block_keys.read]
    remaining_names = {setting.name for setting in remaining}
    added = {
        name: value
        for name, value in block_keys.settings.items()
        if name not in remaining_names  # which the file sets as it is called here
    }
    for name, value in added.items():
        origin = dataclasses.replace(block.origin, raw=values.format_value(value))
        remaining.append(Setting(name=name, value=value, origin=origin, written=name))
    shown = ", ".join(f"{name}={values.to_yaml(value)}" for name, value in added.items())
    notices.append(f"note: decoder_block={block.value} in MaxText's form is {shown} here")
    return remaining
