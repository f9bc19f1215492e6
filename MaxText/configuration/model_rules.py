"""Combinations of the model's keys that cannot work."""

from typing import get_args

from MaxText.configuration import layer_kinds
from MaxText.configuration.layer_sections import (
    ATTENTION_MIXERS,
    SOFTMAX_MIXERS,
    MixtureOfExperts,
    NotElementwise,
)
from MaxText.configuration.registry import KINDS, registration
from MaxText.configuration.rule import Rule
from MaxText.configuration.schema import Config


def _kv_heads(config: Config) -> str | None:
    query, kv = config.model.shape.base_num_query_heads, config.model.shape.base_num_kv_heads
    if query % kv:
        return f"base_num_query_heads={query} is not a multiple of base_num_kv_heads={kv}"
    return None


def _head_dim(config: Config) -> str | None:
    shape = config.model.shape
    if shape.head_dim == 0:
        return "head_dim: 0 is not possible; use 1 or more, or -1 for emb_dim / query heads"
    emb, heads = shape.dimensions.emb_dim, shape.dimensions.num_query_heads
    if shape.head_dim == -1 and emb % heads:
        return (
            f"head_dim=-1 divides the width by the query heads, but {emb} / {heads} is no integer"
        )
    return None


def _rotary(config: Config) -> str | None:
    position, dimensions = config.model.position, config.model.shape.dimensions
    if position.position_embedding != "rotary" or dimensions.head_dim < 1:
        return None
    turned = int(dimensions.head_dim * position.rotary_pct)
    if turned < 2 or turned % 2:
        return (
            f"rotary turns pairs of dimensions, but head_dim {dimensions.head_dim} * rotary_pct "
            f"{position.rotary_pct:g} gives {turned}, not an even number from 2"
        )
    return None


def _rotary_bands(config: Config) -> str | None:
    position = config.model.position
    if position.position_embedding != "rotary":
        return None
    low, high = {
        "llama3.1": ("low_freq_factor", "high_freq_factor"),
        "yarn": ("beta_slow", "beta_fast"),
    }.get(position.rope_type, ("", ""))
    if low and getattr(position, low) >= getattr(position, high):
        return (
            f"{low}={getattr(position, low):g} must be below {high}={getattr(position, high):g}: "
            "frequencies between the two are divided in part"
        )
    return None


def _scale(config: Config) -> str | None:
    scale = config.model.shape.global_parameter_scale
    if scale & (scale - 1):
        return f"global_parameter_scale={scale} is not a power of two (1, 2, 4, ...)"
    return None


def _learned_positions(config: Config) -> str | None:
    position, length = config.model.position, config.model.shape.max_target_length
    rows = position.trainable_position_size
    if position.position_embedding == "learned" and rows != -1 and rows < length:
        return (
            f"trainable_position_size={rows} has no row for every place of a window of "
            f"max_target_length={length} tokens"
        )
    return None


def _activations(config: Config) -> str | None:
    if not config.model.feed_forward.mlp_activations:
        return "mlp_activations: the list is empty; name at least one, for example [gelu]"
    return None


def _loss_chunks(config: Config) -> str | None:
    chunks = config.model.objective.num_vocab_tiling
    length = config.model.shape.max_target_length
    if length % chunks:
        return f"num_vocab_tiling={chunks} does not divide max_target_length={length}"
    for _, stage in config.batch.sequence_length_stages:
        if stage % chunks:
            return f"num_vocab_tiling={chunks} does not divide {stage}, of sequence_length_stages"
    return None


_SLOT_NUMBERS = ("slot_num", "qkv_slot_num", "proj_slot_num", "ffn_slot_num")
_ZOOMS = ("qkv_zoom_dim", "proj_zoom_dim", "ffn_zoom_dim")


def _slots(config: Config) -> str | None:
    for name in _SLOT_NUMBERS:
        if getattr(config.model.pattention, name) == 0:
            what = "emb_dim" if name == "slot_num" else "what slot_num says"
            return f"{name}: 0 is not possible; use 1 or more, or -1 for {what}"
    for name in _ZOOMS:
        zoom = getattr(config.model.pattention, name)
        if -1 < zoom < 0:
            return f"{name}={zoom:g} has no root; use 0 or more, or -1 for what zoom_dim says"
    return None


def _heads_of_slots(config: Config) -> str | None:
    if config.model.attention.attention_projections == "dense":
        return None
    size = config.model.shape.dimensions
    heads = size.num_query_heads * size.head_dim
    if config.model.shape.head_dim in (-1, 0) or heads == size.emb_dim:
        return None
    return (
        f"attention_projections=pattention: {size.num_query_heads} query heads of {size.head_dim} "
        f"are {heads} dimensions, and the width is {size.emb_dim}; slots are as wide as the model\n"
        "head_dim=-1 (emb_dim / query heads)"
    )


def _drop_path(config: Config) -> str | None:
    dropout = config.model.dropout
    if dropout.drop_path_schedule == "linear" and dropout.drop_path == 0:
        return (
            "drop_path_schedule=linear: there is nothing to ramp up to with drop_path=0\n"
            "drop_path_schedule=constant"
        )
    return None


def _mlp_dims(config: Config) -> str | None:
    own = config.model.feed_forward
    if not own.dynamic_mlp_dim or own.feed_forward_type != "mlp":
        return None
    dimensions = config.model.shape.dimensions
    if dimensions.num_layers < 2:
        return "dynamic_mlp_dim=true moves width between layers, and there is only one"
    widths = own.mlp_dims(dimensions)
    if min(widths) < 1:
        return (
            f"dynamic_mlp_dim=true: half of base_mlp_dim ({dimensions.mlp_dim}), the width of the "
            f"first layer, is rounded to 0 by mlp_dim_multiple={own.mlp_dim_multiple}\n"
            f"mlp_dim_multiple={max(dimensions.mlp_dim // 8, 1)}"
        )
    return None


def _scan(config: Config) -> str | None:
    refused = config.model.scan_refused
    if config.model.memory.scan_layers is not True or refused is None:
        return None
    return f"scan_layers=true: {refused}"


def _dense_weights(config: Config) -> str | None:
    dense = config.model.dense_connections
    if not dense.dense_conn or dense.dense_dynamic or dense.dense_static:
        return None
    return (
        "dense_dynamic=false and dense_static=false leave sums without weights; one of them has to "
        "be true"
    )


def _dense_ways(config: Config) -> str | None:
    dense = config.model.dense_connections
    if not dense.dense_conn:
        return None
    if not dense.dense_ways:
        return "dense_ways: the list is empty; name at least one of q, k, v, r"
    if len(set(dense.dense_ways)) != len(dense.dense_ways):
        return f"dense_ways: {', '.join(dense.dense_ways)} names a way twice"
    if dense.mudd_postnorm == "residual" and "r" not in dense.dense_ways:
        return "mudd_postnorm=residual: dense_ways has no way r that could be normalised"
    return None


def _dense_places(config: Config) -> str | None:
    dense, num_layers = config.model.dense_connections, config.model.shape.dimensions.num_layers
    if not dense.dense_conn:
        return None
    if dense.dense_period > num_layers:
        return f"dense_period={dense.dense_period} is more than there are layers ({num_layers})"
    after = dense.dense_after_layers
    if after is not None:
        beyond = [layer for layer in after if not 1 <= layer <= num_layers]
        if beyond or not after:
            what = f"{beyond[0]} is none of them" if beyond else "the list is empty"
            return f"dense_after_layers: layers are counted from 1 to {num_layers}; {what}"
    beyond = [source for source in dense.dense_source_list if not 0 <= source <= num_layers]
    if dense.dense_sources == "list" and (beyond or not dense.dense_source_list):
        what = f"{beyond[0]} is neither" if beyond else "the list is empty"
        return f"dense_source_list: 0 is the embedding, 1 to {num_layers} are outputs; {what}"
    return None


def _layer_pattern(config: Config) -> str | None:
    block, num_layers = config.model.block, config.model.shape.dimensions.num_layers
    if not block.layer_pattern:
        return None
    try:
        found = layer_kinds.letters(block.layer_pattern, num_layers)
    except ValueError as error:
        return str(error)
    known = [letter for letter, _ in block.layer_kinds]
    if unknown := sorted(set(found) - set(known)):
        return f"layer_pattern: layer_kinds has no letter {unknown[0]}, only {', '.join(known)}"
    if config.model.attention.attention_types and any(
        name == "mixer" for _, keys in block.layer_kinds for name, _ in keys
    ):
        return "layer_pattern: attention_types chooses the mixers of layers as well"
    for letter, keys in block.layer_kinds:
        position = dict(keys).get("position_embedding", "none")
        if position not in ("none", config.model.position.position_embedding):
            return (
                f"layer_kinds: {letter}: position_embedding: a layer can only leave out the "
                "model's rotary positions (none)"
            )
    return None


def _parts(config: Config) -> str | None:
    """What parts of other modules refuse themselves."""
    for layer in dict.fromkeys(config.model.layers):
        section = layer.section
        for kind, name in (
            ("mixer", section.block.mixer),
            ("feed_forward", section.feed_forward.feed_forward_type),
        ):
            registered = registration(kind, name)
            if registered.is_built_in:
                continue  # rules above
            part = registered.load()
            if not hasattr(part, "problem"):
                base = "Mixer" if kind == "mixer" else "FeedForward"
                return (
                    f"{KINDS[kind]}={name}: {part.__name__} ({registered.place}) is not derived "
                    f"from MaxText.layers.part.{base}"
                )
            if found := part.problem(part.keys_of(layer), layer.dimensions):
                return f"{KINDS[kind]}={name}: {found}"
            mixes = section.dense_connections.mixes_attention_inputs
            if kind == "mixer" and mixes and not part.has_separate_inputs:
                return (
                    f"mixer={name} has one input, and dense_conn=true makes several\ndense_ways=[r]"
                )
    return None


def _no_decode_state(config: Config) -> str | None:
    for name in dict.fromkeys(config.model.mixers):
        registered = registration("mixer", name)
        if not registered.is_built_in and not registered.load().decodes():
            return (
                f"mixer={name} has no decode state: give {registered.load().__name__} the methods "
                f"prefill and decode_step ({registered.place})"
            )
    return None


def _attention_types(config: Config) -> str | None:
    section, num_layers = config.model.attention, config.model.shape.dimensions.num_layers
    if any(times < 1 or not pattern for pattern, times in section.attention_types):
        return (
            "attention_types: pairs of a pattern, which names a kind or more, and 1 or more times"
        )
    given = section.num_kinds
    if section.attention_types and given != num_layers:
        return (
            f"attention_types names {given} layers, and base_num_decoder_layers gives {num_layers}"
        )
    return None


# Key -> the mixers that read it, one of which has to be there.
_READ_BY: dict[str, tuple[str, ...]] = {
    "sliding_window_size": ("local_attention",),
    "linear_attention_chunk": ("linear_attention",),
    "linear_attention_epsilon": ("linear_attention",),
    "num_mem_kv": ("attention",),
    "none_doubles_residual": ("none",),
    "attention_scale": SOFTMAX_MIXERS,
    "attn_logits_soft_cap": SOFTMAX_MIXERS,
}


def _read_by_no_layer(config: Config) -> str | None:
    section, mixers = config.model.attention, set(config.model.mixers)
    for name, readers in _READ_BY.items():
        default = type(section).model_fields[name].default
        if getattr(section, name) != default and not mixers.intersection(readers):
            found = ", ".join(sorted(mixers))
            return (
                f"{name} is for layers with mixer {' or '.join(readers)}, and all layers have "
                f"{found}"
            )
    return None


def _linear(config: Config) -> str | None:
    mixers, position = config.model.mixers, config.model.position
    if "linear_attention" in mixers and position.position_embedding == "alibi":
        return "position_embedding=alibi lowers scores, and linear attention has none"
    return None


def _axial(config: Config) -> str | None:
    position, length = config.model.position, config.model.shape.max_target_length
    if position.position_embedding != "axial":
        return None
    shape = position.axial_pos_shape
    if len(shape) != 2 or min(shape) < 1:
        near = max(int(length**0.5), 1)
        return (
            "axial_pos_shape: two numbers whose product is max_target_length or more\n"
            f"axial_pos_shape=[{-(-length // near)}, {near}]"
        )
    if shape[0] * shape[1] < length:
        return (
            f"axial_pos_shape: {shape[0]} * {shape[1]} are {shape[0] * shape[1]} positions, fewer "
            f"than max_target_length={length}"
        )
    return None


def _no_block_norms(config: Config) -> str | None:
    block = config.model.block
    if not block.use_rezero:
        return None
    if block.normalization_type.startswith("scale_norm"):
        return (
            f"use_rezero=true leaves norms before parts out, normalization_type="
            f"{block.normalization_type} chooses one for them"
        )
    if not block.block_norm_parametric:
        return "use_rezero=true leaves norms before parts out; block_norm_parametric has no effect"
    return None


def _rezero(config: Config) -> str | None:
    block = config.model.block
    if not block.use_rezero:
        return None
    if block.block_arrangement == "parallel" and block.parallel_residual_shared_norm:
        return "parallel_residual_shared_norm=true: use_rezero=true leaves no norm to share"
    return None


def _inputs_of_parts(config: Config) -> str | None:
    model = config.model
    if not model.dense_connections.mixes_attention_inputs:
        return None
    if model.block.use_macaron:
        what = "use_macaron=true puts a feed-forward before attention"
    elif model.block.block_arrangement == "parallel" and model.block.parallel_residual_shared_norm:
        what = "parallel_residual_shared_norm=true has one norm before attention"
    elif model.attention.static_sgu:
        what = "static_sgu=true splits the one input of attention"
    else:
        return None
    return (
        f"{what}, but dense_conn=true gives queries, keys and values inputs of their own\n"
        "dense_ways=[r]"
    )


def _macaron_slots(config: Config) -> str | None:
    model = config.model
    if model.block.use_macaron and model.feed_forward.feed_forward_type == "pattention":
        return (
            "use_macaron=true: the first half is an MLP, and feed_forward_type=pattention has none"
        )
    return None


def _shared(config: Config) -> str | None:
    model = config.model
    if not model.block.share_parameters:
        return None
    mixers = set(model.mixers)
    if model.feed_forward.dynamic_mlp_dim:
        return "share_parameters=true: with dynamic_mlp_dim=true layers have different widths"
    alike = mixers <= set(ATTENTION_MIXERS) and not model.attention.num_mem_kv
    if len(mixers) > 1 and not alike:
        found = ", ".join(sorted(mixers))
        return f"share_parameters=true: layers with mixers {found} have different parameters"
    if len({layer.section.mixture_of_experts.num_experts for layer in model.layers}) > 1:
        return "share_parameters=true: moe_layers gives some layers experts and others none"
    dense = model.dense_connections
    if dense.mixes_attention_inputs and dense.dense_first_norms == "one":
        return "share_parameters=true: with dense_first_norms=one the first layer has fewer norms"
    return None


def _static_sgu(config: Config) -> str | None:
    model = config.model
    if not model.attention.static_sgu:
        return None
    if model.shape.dimensions.emb_dim % 2:
        return f"static_sgu=true halves the width, and {model.shape.dimensions.emb_dim} is not even"
    if model.attention.attention_projections == "pattention":
        return "static_sgu=true needs attention_projections=dense: slots are as wide as the model"
    if not model.attention.causal:
        return "static_sgu=true sums over earlier tokens, but causal=false"
    return None


def _head_qk(config: Config) -> str | None:
    if config.model.head.head_qk and not config.model.attention.causal:
        return "head_qk=true points back at earlier tokens, but causal=false"
    return None


def _no_experts(config: Config) -> str | None:
    section = config.model.mixture_of_experts
    for name, field in type(section).model_fields.items():
        if section.num_experts == 1 and getattr(section, name) != field.default:
            return f"{name} is for layers with experts, and num_experts=1 has none"
    return None


def _experts(config: Config) -> str | None:
    section, num_layers = config.model.mixture_of_experts, config.model.shape.dimensions.num_layers
    if section.num_experts == 1:
        return None
    if section.num_experts_per_tok > section.num_experts:
        return (
            f"num_experts_per_tok={section.num_experts_per_tok} is more than there are experts "
            f"({section.num_experts})"
        )
    beyond = [i for i in section.moe_layers or () if not 0 <= i < num_layers]
    if beyond:
        return f"moe_layers: layers are counted from 0 to {num_layers - 1}, so {beyond[0]} is none"
    for name in ("capacity_factor", "eval_capacity_factor"):
        if -1 < getattr(section, name) <= 0:
            return f"{name}: use a number above 0, or -1 for as many tokens as come"
    if section.moe_mlp_dim == 0 or section.moe_group_size == 0:
        name = "moe_mlp_dim" if section.moe_mlp_dim == 0 else "moe_group_size"
        return f"{name}: 0 is not possible; use 1 or more, or -1"
    group, length = section.moe_group_size, config.model.shape.max_target_length
    if group != -1 and length % group:
        return f"moe_group_size={group} does not divide max_target_length={length}"
    for _, stage in config.batch.sequence_length_stages:
        if group != -1 and stage % group:
            return f"moe_group_size={group} does not divide {stage}, of sequence_length_stages"
    if section.moe_layers == ():
        return "moe_layers: the list is empty, so no layer has experts\nnum_experts=1"
    inherited = config.model.feed_forward.mlp_activations
    if section.num_experts > 1 and section.moe_activations is None:
        for name in set(inherited) & set(get_args(NotElementwise)):
            return (
                f"mlp_activations: {name} is no function of one number, which those of experts "
                "are\nmoe_activations=[gelu]"
            )
    if section.num_experts > 1 and config.model.feed_forward.feed_forward_type == "pattention":
        return "num_experts: experts are MLPs; with feed_forward_type=pattention there is none"
    return None


def _expert_axis(config: Config) -> str | None:
    section = config.model.mixture_of_experts
    # What -1 fills is known where the devices are.
    devices = 1
    for name in ("ici_expert_parallelism", "dcn_expert_parallelism"):
        size = getattr(config.mesh, name)
        # Without experts the axis splits the batch alone.
        if size in (0, 1) or section.num_experts == 1:
            continue
        devices *= max(size, 1)
        if section.num_experts % devices:
            return f"{name}={size} does not divide num_experts={section.num_experts}"
        if section.capacity_factor < 0 or section.eval_capacity_factor < 0:
            return (
                f"{name}: experts on several devices need capacity_factor and "
                "eval_capacity_factor above 0\ncapacity_factor=1.25 eval_capacity_factor=2"
            )
    return None


MODEL_RULES: tuple[Rule, ...] = (
    Rule(("base_num_query_heads", "base_num_kv_heads"), _kv_heads),
    Rule(("head_dim", "base_emb_dim", "base_num_query_heads"), _head_dim),
    Rule(("head_dim", "rotary_pct", "base_emb_dim", "base_num_query_heads"), _rotary),
    Rule(
        ("rope_type", "low_freq_factor", "high_freq_factor", "beta_slow", "beta_fast"),
        _rotary_bands,
    ),
    Rule(("global_parameter_scale",), _scale),
    Rule(("trainable_position_size", "max_target_length"), _learned_positions),
    Rule(("mlp_activations",), _activations),
    Rule(("num_vocab_tiling", "max_target_length", "sequence_length_stages"), _loss_chunks),
    Rule((*_SLOT_NUMBERS, *_ZOOMS), _slots),
    Rule(
        ("head_dim", "base_emb_dim", "base_num_query_heads", "attention_projections"),
        _heads_of_slots,
    ),
    Rule(("drop_path_schedule", "drop_path"), _drop_path, is_idle=True),
    Rule(
        ("dynamic_mlp_dim", "base_mlp_dim", "mlp_dim_multiple", "base_num_decoder_layers"),
        _mlp_dims,
    ),
    Rule(("scan_layers", "dense_conn"), _scan),
    Rule(("layer_pattern", "layer_kinds", "base_num_decoder_layers"), _layer_pattern),
    Rule(("mixer", "feed_forward_type", "dense_ways"), _parts),
    Rule(("mixer",), _no_decode_state, programs=("decode",)),
    Rule(("attention_types", "base_num_decoder_layers"), _attention_types),
    Rule((*_READ_BY, "attention_types"), _read_by_no_layer, is_idle=True),
    Rule(("position_embedding", "attention_types"), _linear),
    Rule(("axial_pos_shape", "position_embedding", "max_target_length"), _axial),
    Rule(
        (
            "use_rezero",
            "normalization_type",
            "block_norm_parametric",
            "parallel_residual_shared_norm",
        ),
        _rezero,
    ),
    Rule(
        ("use_rezero", "normalization_type", "block_norm_parametric"),
        _no_block_norms,
        is_idle=True,
    ),
    Rule(
        ("use_macaron", "parallel_residual_shared_norm", "static_sgu", "dense_ways"),
        _inputs_of_parts,
    ),
    Rule(
        (
            "share_parameters",
            "dynamic_mlp_dim",
            "attention_types",
            "moe_layers",
            "dense_first_norms",
        ),
        _shared,
    ),
    Rule(("use_macaron", "feed_forward_type", "decoder_block"), _macaron_slots),
    Rule(("static_sgu", "base_emb_dim"), _static_sgu),
    Rule((*MixtureOfExperts.model_fields, "feed_forward_type", "mlp_activations"), _experts),
    Rule(tuple(MixtureOfExperts.model_fields), _no_experts, is_idle=True),
    Rule(
        ("ici_expert_parallelism", "dcn_expert_parallelism", "num_experts", "capacity_factor"),
        _expert_axis,
    ),
    Rule(("head_qk", "causal", "mlm_training"), _head_qk),
    Rule(("dense_dynamic", "dense_static"), _dense_weights),
    Rule(("dense_ways", "mudd_postnorm"), _dense_ways),
    Rule(
        (
            "dense_after_layers",
            "dense_sources",
            "dense_source_list",
            "dense_period",
            "base_num_decoder_layers",
        ),
        _dense_places,
    ),
)
