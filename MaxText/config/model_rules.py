"""Impossible combinations of the model's keys."""

from collections.abc import Iterable
from typing import get_args

from MaxText.config.axis_rules import NETWORKS, size_key
from MaxText.config.layer_plan import letters
from MaxText.config.layer_sections import (
    ATTENTION_MIXERS,
    SOFTMAX_MIXERS,
    MoEConfig,
    NotElementwise,
)
from MaxText.config.registry import KINDS, registration, registrations
from MaxText.config.rule import rule


@rule()
def _kv_heads(base_num_query_heads, base_num_kv_heads):
    if base_num_query_heads % base_num_kv_heads:
        return f"{base_num_query_heads=} is not a multiple of {base_num_kv_heads=}"


@rule("base_emb_dim", "base_num_query_heads")
def _head_dim(head_dim, dimensions):
    emb = dimensions.emb_dim
    heads = dimensions.num_query_heads
    if head_dim == -1 and emb % heads:
        return f"head_dim=-1 is emb_dim / query heads, but {emb} / {heads} is not an integer"


@rule("head_dim", "base_emb_dim", "base_num_query_heads", "position_embedding")
def _rotary(rotary_pct, model, dimensions):
    if model.position.position_embedding != "rotary" or dimensions.head_dim < 1:
        return None
    turned = int(dimensions.head_dim * rotary_pct)
    if turned < 2 or turned % 2:
        return (
            f"rotary rotates pairs of dimensions, but head_dim {dimensions.head_dim} * rotary_pct "
            f"{rotary_pct:g} gives {turned}, not an even number from 2"
        )


@rule("position_embedding", "low_freq_factor", "high_freq_factor", "beta_slow", "beta_fast")
def _rotary_bands(rope_type, model, **bands):
    pairs = {
        "llama3.1": ("low_freq_factor", "high_freq_factor"),
        "yarn": ("beta_slow", "beta_fast"),
    }
    low, high = pairs.get(rope_type, ("", ""))
    if low and model.position.position_embedding == "rotary" and bands[low] >= bands[high]:
        return (
            f"{low}={bands[low]:g} must be below {high}={bands[high]:g}: "
            "frequencies between the two are interpolated"
        )


@rule()
def _scale(global_parameter_scale):
    if global_parameter_scale & (global_parameter_scale - 1):
        return f"{global_parameter_scale=} is not a power of two (1, 2, 4, ...)"


@rule()
def _learned_positions(trainable_position_size, max_target_length, model):
    is_learned = model.position.position_embedding == "learned"
    if is_learned and -1 != trainable_position_size < max_target_length:
        return f"{trainable_position_size=} is less than {max_target_length=}"


@rule()
def _activations(mlp_activations):
    if not mlp_activations:
        return "mlp_activations: the list is empty; name at least one, for example [gelu]"


def undivided(what: str, number: int, length: int, stages: Iterable) -> str | None:
    for one in (length, *(stage for _, stage in stages)):
        if one % number:
            whose = "max_target_length" if one == length else "sequence_length_stages"
            return f"{what}={number} does not divide {one}, of {whose}"


@rule()
def _loss_chunks(num_vocab_tiling, max_target_length, sequence_length_stages):
    sizes = num_vocab_tiling, max_target_length, sequence_length_stages
    return undivided("num_vocab_tiling", *sizes)


@rule()
def _zooms(zoom_dims):
    for place, zoom in zoom_dims:
        if -1 < zoom < 0:
            what = f"zoom_dims.{place}={zoom:g} has no square root"
            return f"{what}; use 0 or more, or -1 for zoom_dim"


@rule("base_emb_dim", "base_num_query_heads")
def _heads_of_slots(head_dim, attention_projections, dimensions):
    heads = dimensions.num_query_heads * dimensions.head_dim
    if attention_projections != "dense" and head_dim != -1 and heads != dimensions.emb_dim:
        return (
            f"attention_projections=pattention: {dimensions.num_query_heads} query heads of "
            f"{dimensions.head_dim} are {heads} dimensions, and the width is {dimensions.emb_dim}; "
            "slots are as wide as the model\nhead_dim=-1 (emb_dim / query heads)"
        )


@rule("base_mlp_dim", "base_num_decoder_layers")
def _mlp_dims(dynamic_mlp_dim, mlp_dim_multiple, model, dimensions):
    own = model.feed_forward
    if not dynamic_mlp_dim or own.feed_forward_type != "mlp":
        return None
    if dimensions.num_layers < 2:
        return "dynamic_mlp_dim=true moves width between layers, and there is only one"
    if min(own.mlp_dims(dimensions)) < 1:
        return (
            f"dynamic_mlp_dim=true: half of base_mlp_dim ({dimensions.mlp_dim}), the width of the "
            f"first layer, is rounded to 0 by {mlp_dim_multiple=}\n"
            f"mlp_dim_multiple={max(dimensions.mlp_dim // 8, 1)}"
        )


@rule("dense_conn", "connection_type")
def _scan(scan_layers, model):
    if scan_layers is True and model.scan_unsupported_reason is not None:
        return f"scan_layers=true: {model.scan_unsupported_reason}\nscan_layers=auto"


@rule()
def _layer_pattern(layer_pattern, layer_kinds, base_num_decoder_layers, model, dimensions):
    if not layer_pattern:
        return None
    try:
        found = letters(layer_pattern, dimensions.num_layers)
    except ValueError as error:
        return str(error)
    known = [letter for letter, _ in layer_kinds]
    if unknown := sorted(set(found) - set(known)):
        return f"layer_pattern: layer_kinds has no letter {unknown[0]}, only {', '.join(known)}"
    kinds = layer_kinds.as_dict()
    if model.attention.attention_types and any("mixer" in keys for keys in kinds.values()):
        return "layer_pattern: attention_types also sets the mixers of layers; set one of them"
    for letter, keys in kinds.items():
        position = keys.get("position_embedding", "none")
        if position not in ("none", "rotary", model.position.position_embedding):
            return (
                f"layer_kinds: {letter}: position_embedding: a layer can only have rotary "
                "positions, none, or those of the model"
            )


@rule("mixer", "feed_forward_type", "connection_type", "head_type", "dense_streams")
def _parts(model):
    for layer in dict.fromkeys(model.layers):
        config = layer.config
        for kind, base, name in (
            ("mixer", "Mixer", config.block.mixer),
            ("feed_forward", "FeedForward", config.feed_forward.feed_forward_type),
            ("position", "Position", config.position.position_embedding),
            ("connection", "Connection", config.connection),
            ("head", "Head", config.head.name),
        ):
            registered = registration(kind, name)
            if not registered.checks_itself:
                continue
            part = registered.load()
            if not hasattr(part, "problem"):
                return (
                    f"{KINDS[kind]}={name}: {part.__name__} ({registered.place}) is not derived "
                    f"from MaxText.layers.part.{base}"
                )
            if found := part.problem(part.config_of(layer), layer.dimensions):
                return f"{KINDS[kind]}={name}: {found}"
            mixes = config.dense_connections.mixes_attention_inputs
            if kind == "mixer" and mixes and not part.has_separate_inputs:
                return (
                    f"mixer={name} has one input, and dense_conn=true makes several\n"
                    "dense_streams=[r]"
                )


@rule("dense_conn")
def _dense_connection(connection_type, dense_conn):
    if connection_type == "dense" and not dense_conn:
        return "connection_type=dense needs dense_conn=true"
    if dense_conn and connection_type not in ("auto", "dense"):
        return f"dense_conn=true and {connection_type=!s} exclude each other"


@rule("mixer", programs="decode")
def _no_decode_state(model):
    for name in dict.fromkeys(model.mixers):
        registered = registration("mixer", name)
        if registered.checks_itself and not registered.load().decodes():
            return (
                f"mixer={name} has no decode state: give {registered.load().__name__} the methods "
                f"prefill and decode_step ({registered.place})"
            )


@rule("base_num_decoder_layers")
def _attention_types(attention_types, dimensions):
    if any(times < 1 or not pattern for pattern, times in attention_types):
        return (
            "attention_types: each entry is a pattern of one or more kinds and a count of 1 or more"
        )
    given = sum(len(pattern) * times for pattern, times in attention_types)
    num_layers = dimensions.num_layers
    if attention_types and given != num_layers:
        return (
            f"attention_types names {given} layers, and base_num_decoder_layers gives {num_layers}"
        )


# Key -> the mixers that read it, one of which has to be there.
_READ_BY: dict[str, tuple[str, ...]] = {
    "sliding_window_size": ("local_attention",),
    "linear_attention": ("linear_attention",),
    "num_mem_kv": ("attention",),
    "gpt_neo_none_attention_bug": ("none",),
    "attention_scale": SOFTMAX_MIXERS,
    "attn_logits_soft_cap": SOFTMAX_MIXERS,
}


@rule(*_READ_BY, "attention_types", finds_unused=True)
def _read_by_no_layer(model, **keys):
    section = model.attention
    mixers = set(model.mixers)
    with_bases = mixers.union(*map(_base_mixers, mixers))
    for name, readers in _READ_BY.items():
        default = type(section).model_fields[name].default
        if keys[name] != default and not with_bases.intersection(readers):
            found = ", ".join(sorted(mixers))
            return (
                f"{name} is for layers with mixer {' or '.join(readers)}, and all layers have "
                f"{found}"
            )


def _base_mixers(name: str) -> set[str]:
    bases = getattr(registration("mixer", name).target, "__mro__", ())
    mixers = [one for one in registrations() if one.kind == "mixer"]
    return {one.name for one in mixers if any(map(one.is_of, bases))}


@rule("attention_types")
def _linear(position_embedding, model):
    if "linear_attention" in model.mixers and position_embedding == "alibi":
        return "position_embedding=alibi biases attention scores, and linear attention has none"


@rule()
def _axial(axial_pos_shape, position_embedding, max_target_length):
    if position_embedding != "axial":
        return None
    if len(axial_pos_shape) != 2 or min(axial_pos_shape) < 1:
        near = max(int(max_target_length**0.5), 1)
        return (
            "axial_pos_shape: two numbers whose product is max_target_length or more\n"
            f"axial_pos_shape=[{-(-max_target_length // near)}, {near}]"
        )
    rows, columns = axial_pos_shape
    if rows * columns < max_target_length:
        return (
            f"axial_pos_shape: {rows} * {columns} are {rows * columns} positions, fewer "
            f"than {max_target_length=}"
        )


@rule(finds_unused=True)
def _no_block_norms(use_rezero, normalization_type):
    if use_rezero and normalization_type.startswith("scale_norm"):
        return (
            f"use_rezero=true has no norms before branches, so normalization_type="
            f"{normalization_type} has no effect on them"
        )


@rule()
def _rezero(use_rezero, parallel_residual_shared_norm, model):
    is_parallel = model.block.block_arrangement == "parallel"
    if use_rezero and is_parallel and parallel_residual_shared_norm:
        return "parallel_residual_shared_norm=true: use_rezero=true has no norm to share"


@rule("dense_streams")
def _inputs_of_parts(use_macaron, parallel_residual_shared_norm, static_sgu, model):
    if not model.dense_connections.mixes_attention_inputs:
        return None
    if use_macaron:
        what = "use_macaron=true puts a feed-forward before attention"
    elif model.block.block_arrangement == "parallel" and parallel_residual_shared_norm:
        what = "parallel_residual_shared_norm=true has one norm before attention"
    elif static_sgu:
        what = "static_sgu=true splits the one input of attention"
    else:
        return None
    return (
        f"{what}, but dense_conn=true gives queries, keys and values inputs of their own\n"
        "dense_streams=[r]"
    )


@rule("decoder_block")
def _macaron_slots(use_macaron, feed_forward_type):
    if use_macaron and feed_forward_type == "pattention":
        return (
            "use_macaron=true: the first half is an MLP, and feed_forward_type=pattention has none"
        )


@rule("attention_types", "moe_layers", "dense_first_layer_norms")
def _shared(share_layer_params, dynamic_mlp_dim, model):
    if not share_layer_params:
        return None
    mixers = set(model.mixers)
    dense = model.dense_connections
    if dynamic_mlp_dim:
        return "share_layer_params=true: with dynamic_mlp_dim=true layers have different widths"
    alike = mixers <= set(ATTENTION_MIXERS) and not model.attention.num_mem_kv
    if len(mixers) > 1 and not alike:
        found = ", ".join(sorted(mixers))
        return f"share_layer_params=true: layers with mixers {found} have different parameters"
    if len({layer.dimensions for layer in model.layers}) > 1:
        return "share_layer_params=true: layer_kinds gives layers different sizes"
    if len({layer.config.mixture_of_experts.num_experts for layer in model.layers}) > 1:
        return "share_layer_params=true: moe_layers gives some layers experts and others none"
    if dense.mixes_attention_inputs and dense.dense_first_layer_norms == "one":
        return "share_layer_params=true: dense_first_layer_norms=one gives layer 1 fewer norms"


@rule("base_emb_dim")
def _static_sgu(static_sgu, model, dimensions):
    if not static_sgu:
        return None
    if dimensions.emb_dim % 2:
        return f"static_sgu=true halves the width, and {dimensions.emb_dim} is not even"
    if model.attention.attention_projections == "pattention":
        return "static_sgu=true needs attention_projections=dense: slots are as wide as the model"
    if not model.attention.causal:
        return "static_sgu=true sums over earlier tokens, but causal=false"


@rule("head_type", "head_qk", "mlm_training")
def _head(causal, model):
    if model.head.name == "head_qk" and not causal:
        return "head_qk=true points back at earlier tokens, but causal=false"


@rule(*MoEConfig.model_fields)
def _experts(feed_forward_type, mlp_activations, config, dimensions):
    section = config.model.mixture_of_experts
    num_layers = dimensions.num_layers
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
    group = section.moe_group_size
    length = config.model.shape.max_target_length
    stages = config.batch.sequence_length_stages
    if group != -1 and (found := undivided("moe_group_size", group, length, stages)):
        return found
    if section.moe_layers == ():
        return "moe_layers: the list is empty, so no layer has experts\nnum_experts=1"
    if section.moe_activations is None:
        for name in set(mlp_activations) & set(get_args(NotElementwise)):
            return (
                f"mlp_activations: {name} is not elementwise, as experts require\n"
                "moe_activations=[gelu]"
            )
    if feed_forward_type == "pattention":
        return "num_experts: experts are MLPs; with feed_forward_type=pattention there is none"


@rule(*(size_key("expert", network) for network in NETWORKS))
def _expert_axis(num_experts, capacity_factor, model, **sizes):
    # What -1 fills is known where the devices are.
    devices = 1
    for name, size in sizes.items():
        # Without experts the axis splits the batch alone.
        if size in (0, 1) or num_experts == 1:
            continue
        devices *= max(size, 1)
        if num_experts % devices:
            return f"{name}={size} does not divide {num_experts=}"
        if capacity_factor < 0 or model.mixture_of_experts.eval_capacity_factor < 0:
            return (
                f"{name}: experts on several devices need capacity_factor and "
                "eval_capacity_factor above 0\ncapacity_factor=1.25 eval_capacity_factor=2"
            )


@rule()
def _dense_weights(dense_dynamic, dense_static, model):
    if model.dense_connections.dense_conn and not (dense_dynamic or dense_static):
        return (
            "dense_dynamic=false and dense_static=false: sums need weights; set one of them to true"
        )


@rule()
def _dense_streams(dense_streams, mudd_postnorm, model):
    if not model.dense_connections.dense_conn:
        return None
    if not dense_streams:
        return "dense_streams: the list is empty; name at least one of q, k, v, r"
    if len(set(dense_streams)) != len(dense_streams):
        return f"dense_streams: {', '.join(dense_streams)} names a stream twice"
    if mudd_postnorm == "residual" and "r" not in dense_streams:
        return "mudd_postnorm=residual: dense_streams has no stream r to normalize"


@rule("dense_sparsity", "base_num_decoder_layers")
def _dense_places(dense_target_layers, dense_selection, dense_period, model, dimensions):
    dense = model.dense_connections
    num_layers = dimensions.num_layers
    if not dense.dense_conn:
        return None
    if dense_period > num_layers:
        return f"{dense_period=} is more than there are layers ({num_layers})"
    beyond = [layer for layer in dense_target_layers or () if not 1 <= layer <= num_layers]
    if beyond or dense_target_layers == ():
        what = f"{beyond[0]} is none of them" if beyond else "the list is empty"
        return f"dense_target_layers: layers are counted from 1 to {num_layers}; {what}"
    beyond = [source for source in dense_selection.outputs if not 0 <= source <= num_layers]
    if dense.dense_sparsity == "list" and (beyond or not dense_selection.outputs):
        what = f"{beyond[0]} is neither" if beyond else "the list is empty"
        return f"dense_selection.outputs: 0 is the embedding, 1 to {num_layers} are outputs; {what}"
