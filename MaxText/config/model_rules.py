"""Impossible combinations of the model's keys, one small function each."""

import inspect
from collections.abc import Sequence
from typing import get_args

from MaxText.config.axis_rules import NETWORKS, size_key
from MaxText.config.layer_plan import letters
from MaxText.config.layer_sections import (
    ATTENTION_MIXERS,
    DELTA_MIXERS,
    RECURRENT_MIXERS,
    SOFTMAX_MIXERS,
    KimiDeltaAttentionConfig,
    LatentAttentionConfig,
    Mamba2Config,
    MoEConfig,
    NotElementwise,
    RecurrentConfig,
)
from MaxText.config.model_sections import LayerConfig
from MaxText.config.problems import ConfigIssue, InvalidCombinationError
from MaxText.config.registry import KINDS, Registration, registration, registrations
from MaxText.config.rule import rule
from MaxText.config.schema import Config

# ---- Sizes


@rule("base_num_query_heads", "base_num_kv_heads")
def _kv_heads_divide_query_heads(config: Config) -> ConfigIssue | None:
    shape = config.model.shape
    if shape.base_num_query_heads % shape.base_num_kv_heads == 0:
        return None
    return ConfigIssue(
        message=f"base_num_query_heads={shape.base_num_query_heads} is not a multiple of "
        f"base_num_kv_heads={shape.base_num_kv_heads}",
        keys=("base_num_query_heads", "base_num_kv_heads"),
    )


@rule("head_dim", "base_emb_dim", "base_num_query_heads")
def _heads_divide_width(config: Config) -> ConfigIssue | None:
    dimensions = config.model.shape.dimensions
    emb_dim = dimensions.emb_dim
    num_heads = dimensions.num_query_heads
    if config.model.shape.head_dim != -1 or emb_dim % num_heads == 0:
        return None
    return ConfigIssue(
        message=f"head_dim=-1 is emb_dim / query heads, but {emb_dim} / {num_heads} is not an "
        "integer",
        keys=("head_dim",),
    )


_SIZE_OF_HEADS = ("head_dim", "base_emb_dim", "base_num_query_heads")


@rule("rotary_pct", "rope_type", *_SIZE_OF_HEADS, "position_embedding")
def _rotary_rotates_pairs(config: Config) -> ConfigIssue | None:
    position = config.model.position
    head_dim = config.model.shape.dimensions.head_dim
    if position.position_embedding != "rotary" or head_dim < 1:
        return None
    if config.model.block.mixer == "latent_attention":  # has a width of its own, and a rule
        return None
    num_rotated = int(head_dim * position.rotary_pct)
    if position.rope_type == "proportional" and head_dim % 2 == 0:
        num_rotated -= num_rotated % 2  # pairs span the whole head
    if num_rotated >= 2 and num_rotated % 2 == 0:
        return None
    return ConfigIssue(
        message=f"rotary rotates pairs of dimensions, but head_dim {head_dim} * rotary_pct "
        f"{position.rotary_pct:g} gives {num_rotated}, not an even number from 2",
        keys=("head_dim", "rotary_pct"),
    )


@rule(
    "rope_type",
    "position_embedding",
    "low_freq_factor",
    "high_freq_factor",
    "beta_slow",
    "beta_fast",
)
def _rotary_bands_are_ordered(config: Config) -> ConfigIssue | None:
    position = config.model.position
    if position.rope_type == "llama3.1":
        low_key = "low_freq_factor"
        high_key = "high_freq_factor"
    elif position.rope_type == "yarn":
        low_key = "beta_slow"
        high_key = "beta_fast"
    else:
        return None
    low = getattr(position, low_key)
    high = getattr(position, high_key)
    # With yarn both may turn equally often (Kimi K2): its transition is then one pair wide.
    is_transition = low < high or (low == high and position.rope_type == "yarn")
    if position.position_embedding != "rotary" or is_transition:
        return None
    return ConfigIssue(
        message=f"{low_key}={low:g} must be below {high_key}={high:g}: "
        "frequencies between the two are interpolated",
        keys=(low_key, high_key),
    )


@rule(
    "rope_type",
    "rope_short_factors",
    "rope_long_factors",
    "rope_attention_factor",
    "original_max_position_embeddings",
    "rotary_pct",
    *_SIZE_OF_HEADS,
    "position_embedding",
)
def _longrope_divides_each_pair(config: Config) -> ConfigIssue | None:
    position = config.model.position
    if position.position_embedding != "rotary" or position.rope_type != "longrope":
        return None
    width = config.model.shape.dimensions.head_dim
    if config.model.block.mixer == "latent_attention":
        width = config.model.attention.latent_attention.qk_rope_head_dim
    num_pairs = int(width * position.rotary_pct) // 2
    for name in ("rope_short_factors", "rope_long_factors"):
        factors = getattr(position, name)
        if len(factors) != num_pairs:
            return ConfigIssue(
                message=f"{name}: rope_type=longrope needs a number for each of the {num_pairs} "
                f"pairs of rotary dimensions, and {len(factors)} are given",
                keys=(name, "rope_type"),
            )
        if min(factors) <= 0:
            return ConfigIssue(
                message=f"{name}: {min(factors):g} is not above 0, and frequencies are divided by "
                "it",
                keys=(name,),
            )
    if position.rope_attention_factor is None and position.original_max_position_embeddings == 1:
        return ConfigIssue(
            message="rope_attention_factor=null divides by the logarithm of "
            "original_max_position_embeddings=1, which is 0",
            keys=("rope_attention_factor", "original_max_position_embeddings"),
        )
    return None


@rule("global_parameter_scale")
def _scale_is_a_power_of_two(config: Config) -> ConfigIssue | None:
    scale = config.model.shape.global_parameter_scale
    if scale & (scale - 1) == 0:
        return None
    return ConfigIssue(
        message=f"global_parameter_scale={scale} is not a power of two (1, 2, 4, ...)",
        keys=("global_parameter_scale",),
    )


@rule("trainable_position_size", "max_target_length")
def _learned_positions_suffice(config: Config) -> ConfigIssue | None:
    position = config.model.position
    num_positions = position.trainable_position_size
    length = config.model.shape.max_target_length
    if position.position_embedding != "learned" or num_positions == -1 or num_positions >= length:
        return None
    return ConfigIssue(
        message=f"trainable_position_size={num_positions} is less than max_target_length={length}",
        keys=("trainable_position_size", "max_target_length"),
    )


@rule("hidden_size_per_layer_input", "mlp_activations")
def _per_layer_inputs_have_a_gate(config: Config) -> ConfigIssue | None:
    embedding = config.model.embedding
    activations = config.model.feed_forward.mlp_activations[:1]
    if not embedding.hidden_size_per_layer_input or not set(activations) & set(
        get_args(NotElementwise)
    ):
        return None
    return ConfigIssue(
        message=f"hidden_size_per_layer_input: its gate has the first of mlp_activations, and "
        f"{activations[0]} is not elementwise",
        keys=("mlp_activations", "hidden_size_per_layer_input"),
    )


@rule("vocab_size_per_layer_input", "hidden_size_per_layer_input", "vocab_size")
def _per_layer_inputs_have_all_ids(config: Config) -> ConfigIssue | None:
    embedding = config.model.embedding
    num_rows = embedding.vocab_size_per_layer_input
    vocab_size = config.model.shape.vocab_size
    if not embedding.hidden_size_per_layer_input or num_rows == -1 or num_rows >= vocab_size:
        return None
    return ConfigIssue(
        message=f"vocab_size_per_layer_input={num_rows} is less than vocab_size={vocab_size}",
        keys=("vocab_size_per_layer_input", "vocab_size"),
    )


@rule("mlp_activations")
def _mlp_has_an_activation(config: Config) -> ConfigIssue | None:
    if config.model.feed_forward.mlp_activations:
        return None
    return ConfigIssue(
        message="mlp_activations: the list is empty; name at least one, for example [gelu]",
        keys=("mlp_activations",),
    )


def undivided_lengths(
    name: str, divisor: int, config: Config, keys: Sequence[str] = ()
) -> ConfigIssue | None:
    """Returns the issue of a number that does not divide a sequence length of the run.

    Args:
      name: How the message calls the number.
      divisor: The number.
      config: The configuration with max_target_length and sequence_length_stages.
      keys: The keys that set the number.
    """
    lengths = [("max_target_length", config.model.shape.max_target_length)]
    for _, length in config.batch.sequence_length_stages:
        # A stage of the full length is that key's.
        is_full = length == config.model.shape.max_target_length
        lengths.append(("max_target_length" if is_full else "sequence_length_stages", length))
    for length_key, length in lengths:
        if length % divisor:
            return ConfigIssue(
                message=f"{name}={divisor} does not divide {length}, of {length_key}",
                keys=(*keys, length_key),
            )
    return None


@rule("num_vocab_tiling", "max_target_length", "sequence_length_stages")
def _loss_chunks_divide_sequences(config: Config) -> ConfigIssue | None:
    num_chunks = config.model.objective.num_vocab_tiling
    return undivided_lengths("num_vocab_tiling", num_chunks, config, ["num_vocab_tiling"])


@rule("zoom_dims.qkv", "zoom_dims.proj", "zoom_dims.ffn")
def _zooms_have_roots(config: Config) -> ConfigIssue | None:
    for projection, zoom in config.model.pattention.zoom_dims:
        if -1 < zoom < 0:
            return ConfigIssue(
                message=f"zoom_dims.{projection}={zoom:g} has no square root; use 0 or more, or "
                "-1 for zoom_dim",
                keys=(f"zoom_dims.{projection}",),
            )
    return None


@rule("head_dim", "attention_projections", "base_emb_dim", "base_num_query_heads")
def _heads_of_slots_fill_the_width(config: Config) -> ConfigIssue | None:
    dimensions = config.model.shape.dimensions
    head_dims = dimensions.num_query_heads * dimensions.head_dim
    is_dense = config.model.attention.attention_projections == "dense"
    if is_dense or config.model.shape.head_dim == -1 or head_dims == dimensions.emb_dim:
        return None
    return ConfigIssue(
        message=f"attention_projections=pattention: {dimensions.num_query_heads} query heads of "
        f"{dimensions.head_dim} are {head_dims} dimensions, and the width is {dimensions.emb_dim}; "
        "slots are as wide as the model",
        remedies=("head_dim=-1 (emb_dim / query heads)",),
        keys=("attention_projections", "head_dim"),
    )


@rule("dynamic_mlp_dim", "mlp_dim_multiple", "base_mlp_dim", "base_num_decoder_layers")
def _dynamic_widths_are_positive(config: Config) -> ConfigIssue | None:
    feed_forward = config.model.feed_forward
    dimensions = config.model.shape.dimensions
    if not feed_forward.dynamic_mlp_dim or feed_forward.feed_forward_type != "mlp":
        return None
    if dimensions.num_layers < 2:
        return ConfigIssue(
            message="dynamic_mlp_dim=true moves width between layers, and there is only one",
            keys=("dynamic_mlp_dim",),
        )
    if min(feed_forward.mlp_dims(dimensions)) >= 1:
        return None
    return ConfigIssue(
        message=f"dynamic_mlp_dim=true: half of base_mlp_dim ({dimensions.mlp_dim}), the width of "
        f"the first layer, is rounded to 0 by mlp_dim_multiple={feed_forward.mlp_dim_multiple}",
        remedies=(f"mlp_dim_multiple={max(dimensions.mlp_dim // 8, 1)}",),
        keys=("dynamic_mlp_dim", "base_mlp_dim", "mlp_dim_multiple"),
    )


# ---- Layers: their kinds, parts and connections


@rule("scan_layers", "dense_conn", "connection_type")
def _layers_can_be_scanned(config: Config) -> ConfigIssue | None:
    model = config.model
    reason = model.scan_unsupported_reason
    if model.memory.scan_layers is not True or reason is None:
        return None
    is_auto = model.block.connection_type == "auto"
    return ConfigIssue(
        message=f"scan_layers=true: {reason}",
        remedies=("scan_layers=auto",),
        keys=("scan_layers", "dense_conn" if is_auto else "connection_type"),
    )


@rule("layer_pattern", "layer_kinds", "base_num_decoder_layers")
def _layer_pattern_fits(config: Config) -> ConfigIssue | None:
    """Letters of the pattern have a kind, and kinds change only what a layer can have."""
    model = config.model
    if not model.block.layer_pattern:
        return None
    try:
        used_letters = letters(model.block.layer_pattern, model.shape.dimensions.num_layers)
    except InvalidCombinationError as error:
        return error.issue
    kinds = model.block.layer_kinds.as_dict()
    if unknown := sorted(set(used_letters) - set(kinds)):
        return ConfigIssue(
            message=f"layer_pattern: layer_kinds has no letter {unknown[0]}, only "
            f"{', '.join(kinds)}",
            keys=("layer_pattern", "layer_kinds"),
        )
    if model.attention.attention_types and any("mixer" in keys for keys in kinds.values()):
        return ConfigIssue(
            message="layer_pattern: attention_types also sets the mixers of layers; set one of "
            "them",
            keys=("layer_pattern",),
        )
    for letter, keys in kinds.items():
        position = keys.get("position_embedding", "none")
        if position not in ("none", "rotary", model.position.position_embedding):
            return ConfigIssue(
                message=f"layer_kinds: {letter}: position_embedding: a layer can only have rotary "
                "positions, none, or those of the model",
                keys=("layer_kinds",),
            )
    return None


@rule(
    "mixer",
    "feed_forward_type",
    "position_embedding",
    "connection_type",
    "head_type",
    "loss_type",
    "dense_streams",
)
def _parts_accept_their_keys(config: Config) -> ConfigIssue | None:
    for layer in config.model.distinct_layers:
        model = layer.config
        for kind, base_class, name in (
            ("mixer", "layers.part.Mixer", model.block.mixer),
            ("feed_forward", "layers.part.FeedForward", model.feed_forward.feed_forward_type),
            ("position", "layers.part.Position", model.position.position_embedding),
            ("connection", "layers.part.Connection", model.connection),
            ("head", "layers.part.Head", model.head.name),
        ):
            registered = registration(kind, name)
            if registered.checks_itself and (issue := _part_issue(registered, base_class, layer)):
                return issue
    registered = registration("objective", config.model.objective.name)
    if not registered.checks_itself:
        return None
    if not isinstance(registered.load(), type):
        return _function_issue(registered)
    whole_model = LayerConfig(config.model, config.model.shape.dimensions)
    return _part_issue(registered, "training.model_objective.Objective", whole_model)


def _function_issue(registered: Registration) -> ConfigIssue | None:
    """Returns the issue of an objective that does not take the arguments of one, or None."""
    objective = registered.load()
    signature = inspect.signature(objective)
    try:
        signature.bind("config", "logits_BTV", "targets_BT")
    except TypeError:
        return ConfigIssue(
            message=f"loss_type={registered.name}: {objective.__name__}{signature} "
            f"({registered.location}) has to take (config, logits_BTV, targets_BT)",
            remedies=(
                "a class derived from MaxText.training.model_objective.Objective, for an objective "
                "that reads more than logits and targets",
            ),
            keys=("loss_type",),
        )
    return None


def _part_issue(
    registered: Registration, base_class: str, layer: LayerConfig
) -> ConfigIssue | None:
    """Returns the issue of a registered part in a layer, or None.

    Args:
      registered: The part.
      base_class: The class in MaxText from which it has to be derived.
      layer: Keys and sizes of the layer.
    """
    part = registered.load()
    key = KINDS[registered.kind]
    if not hasattr(part, "problem"):
        return ConfigIssue(
            message=f"{key}={registered.name}: {part.__name__} ({registered.location}) is not "
            f"derived from MaxText.{base_class}",
            keys=(key,),
        )
    # A part writes its remedies in further lines, so that it needs no import for them.
    if text := part.problem(part.config_of(layer), layer.dimensions):
        message, *remedies = text.splitlines()
        return ConfigIssue(
            message=f"{key}={registered.name}: {message}", remedies=tuple(remedies), keys=(key,)
        )
    mixes_inputs = layer.config.dense_connections.mixes_attention_inputs
    if registered.kind == "mixer" and mixes_inputs and not part.has_separate_inputs:
        return ConfigIssue(
            message=f"mixer={registered.name} has one input, and dense_conn=true makes several",
            remedies=("dense_streams=[r]",),
            keys=("mixer", "dense_streams"),
        )
    return None


@rule("mtp_num_layers", "loss_type", "causal", "hidden_size_per_layer_input")
def _further_tokens_can_be_predicted(config: Config) -> ConfigIssue | None:
    objective = config.model.objective
    if objective.name != "multi_token_prediction":
        return None
    if objective.mtp_num_layers == 0:
        return ConfigIssue(
            message="loss_type=multi_token_prediction predicts mtp_num_layers=0 further tokens",
            remedies=("mtp_num_layers=1", "loss_type=cross_entropy"),
            keys=("loss_type", "mtp_num_layers"),
        )
    if not config.model.attention.causal:
        return ConfigIssue(
            message=f"mtp_num_layers={objective.mtp_num_layers} predicts tokens that "
            "causal=false lets each position attend to",
            remedies=("causal=true", "mtp_num_layers=0"),
            keys=("mtp_num_layers", "causal"),
        )
    width = config.model.embedding.hidden_size_per_layer_input
    if width > 0:
        return ConfigIssue(
            message=f"mtp_num_layers={objective.mtp_num_layers} adds layers, and "
            f"hidden_size_per_layer_input={width} has embeddings only for those of the model",
            remedies=("hidden_size_per_layer_input=0", "mtp_num_layers=0"),
            keys=("mtp_num_layers", "hidden_size_per_layer_input"),
        )
    return None


@rule("connection_type", "dense_conn")
def _dense_connections_are_chosen_once(config: Config) -> ConfigIssue | None:
    connection_type = config.model.block.connection_type
    is_dense = config.model.dense_connections.dense_conn
    if connection_type == "dense" and not is_dense:
        return ConfigIssue(
            message="connection_type=dense needs dense_conn=true",
            keys=("connection_type", "dense_conn"),
        )
    if is_dense and connection_type not in ("auto", "dense"):
        return ConfigIssue(
            message=f"dense_conn=true and connection_type={connection_type} exclude each other",
            keys=("dense_conn", "connection_type"),
        )
    return None


@rule("mixer", programs=("decode",))
def _mixers_decode(config: Config) -> ConfigIssue | None:
    for name in sorted(config.model.all_mixers):
        registered = registration("mixer", name)
        if registered.checks_itself and not registered.load().decodes():
            return ConfigIssue(
                message=f"mixer={name} has no decode state: give {registered.load().__name__} the "
                f"methods prefill and decode_step ({registered.location})",
                keys=("mixer",),
            )
    return None


@rule("attention_types", "base_num_decoder_layers")
def _attention_types_name_all_layers(config: Config) -> ConfigIssue | None:
    attention_types = config.model.attention.attention_types
    num_layers = config.model.shape.dimensions.num_layers
    if any(times < 1 or not pattern for pattern, times in attention_types):
        return ConfigIssue(
            message="attention_types: each entry is a pattern of one or more kinds and a count of "
            "1 or more",
            keys=("attention_types",),
        )
    num_named = sum(len(pattern) * times for pattern, times in attention_types)
    if not attention_types or num_named == num_layers:
        return None
    return ConfigIssue(
        message=f"attention_types names {num_named} layers, and base_num_decoder_layers gives "
        f"{num_layers}",
        keys=("attention_types", "base_num_decoder_layers"),
    )


# Key of mixers -> the mixers that read it, one of which has to be there.
_READ_BY: dict[str, tuple[str, ...]] = {
    "sliding_window_size": ("local_attention",),
    "linear_attention.chunk": ("linear_attention",),
    "linear_attention.epsilon": ("linear_attention",),
    "num_mem_kv": ("attention",),
    "gpt_neo_none_attention_bug": ("none",),
    "attention_scale": SOFTMAX_MIXERS,
    "attn_logits_soft_cap": SOFTMAX_MIXERS,
    "attention_sinks": SOFTMAX_MIXERS,
    "attention_output_gate": (*ATTENTION_MIXERS, "latent_attention"),
    **dict.fromkeys(LatentAttentionConfig.model_fields, ("latent_attention",)),
    **dict.fromkeys(
        (name for name in RecurrentConfig.model_fields if name not in ("kda", "mamba2")),
        DELTA_MIXERS,
    ),
    "linear_num_key_heads": ("gated_delta_net",),
    **dict.fromkeys(KimiDeltaAttentionConfig.model_fields, ("kda",)),
    **dict.fromkeys(Mamba2Config.model_fields, ("mamba2",)),
}


# Those that a part with an `attend` of its own does not read. It may read the scale.
_READ_BY_SOFTMAX = ("attn_logits_soft_cap", "attention_sinks", "num_mem_kv")


@rule(*_READ_BY, "attention_types", finds_unused=True)
def _keys_are_read_by_a_mixer(config: Config) -> ConfigIssue | None:
    sections = (config.model.attention, config.model.recurrent)
    mixers = config.model.all_mixers
    with_bases = mixers.union(*map(_base_mixers, mixers))
    with_softmax = {name for name in mixers if not _replaces_softmax(name)}
    softmax_with_bases = with_softmax.union(*map(_base_mixers, with_softmax))
    values = {}
    defaults = {}
    for section in sections:
        values |= section.values_by_key()
        defaults |= type(section)().values_by_key()
    for name, readers in _READ_BY.items():
        if values[name] == defaults[name]:
            continue
        # A part that replaces the softmax may still read the scale, or have the gate.
        reading_mixers = softmax_with_bases if name in _READ_BY_SOFTMAX else with_bases
        if not reading_mixers.intersection(readers):
            return ConfigIssue(
                message=f"{name} is for layers with mixer {' or '.join(readers)}, and all layers "
                f"have {', '.join(sorted(mixers))}",
                keys=(name,),
            )
    return None


@rule("mixer", "causal", "dense_conn", "dense_streams")
def _recurrent_mixers_go_from_token_to_token(config: Config) -> ConfigIssue | None:
    model = config.model
    recurrent = sorted(model.all_mixers.intersection(RECURRENT_MIXERS))
    if not recurrent:
        return None
    if not model.attention.causal:
        return ConfigIssue(
            message=f"mixer={recurrent[0]} reads earlier tokens only, but causal=false",
            keys=("mixer", "causal"),
        )
    if model.dense_connections.mixes_attention_inputs:
        return ConfigIssue(
            message=f"mixer={recurrent[0]} has one input, and dense_conn=true makes several",
            remedies=("dense_streams=[r]",),
            keys=("mixer", "dense_streams"),
        )
    return None


@rule("linear_num_key_heads", "linear_num_value_heads", "mixer")
def _keys_serve_the_same_number_of_values(config: Config) -> ConfigIssue | None:
    for layer in config.model.distinct_layers:
        keys = layer.config.recurrent
        is_grouped = layer.config.block.mixer == "gated_delta_net"
        if is_grouped and keys.linear_num_value_heads % keys.linear_num_key_heads:
            return ConfigIssue(
                message=f"linear_num_value_heads={keys.linear_num_value_heads} is not a multiple "
                f"of linear_num_key_heads={keys.linear_num_key_heads}",
                keys=("linear_num_value_heads", "linear_num_key_heads"),
            )
    return None


@rule("time_step_limit", "time_step_min", "time_step_max")
def _time_steps_are_ordered(config: Config) -> ConfigIssue | None:
    keys = config.model.recurrent.mamba2
    limits = keys.time_step_limit
    if limits and (len(limits) != 2 or not 0 <= limits[0] < limits[1]):
        return ConfigIssue(
            message="time_step_limit: the smallest and the largest time step, or an empty list",
            keys=("time_step_limit",),
        )
    if keys.time_step_min > keys.time_step_max:
        return ConfigIssue(
            message=f"time_step_min={keys.time_step_min:g} is more than "
            f"time_step_max={keys.time_step_max:g}",
            keys=("time_step_min", "time_step_max"),
        )
    return None


@rule("ssm_multipliers", "mlp_multipliers")
def _multipliers_are_complete(config: Config) -> ConfigIssue | None:
    lists = (
        ("ssm_multipliers", config.model.recurrent.mamba2.ssm_multipliers, "z, x, B, C and dt"),
        ("mlp_multipliers", config.model.feed_forward.mlp_multipliers, "the gate and the output"),
    )
    for name, factors, places in lists:
        num_places = places.count(",") + 2
        if factors and len(factors) != num_places:
            return ConfigIssue(
                message=f"{name}: a factor for each of {places} is needed, and {len(factors)} are "
                "given",
                keys=(name,),
            )
    return None


# The following go through the layers with their own keys. They name no key that layer_kinds gives a
# letter, and so are not checked once more with its keys in place of the model's.


@rule("layer_pattern", "base_emb_dim")
def _mamba2_has_whole_groups_of_heads(config: Config) -> ConfigIssue | None:
    for layer in config.model.distinct_layers:
        block = layer.config.block
        if "mamba2" not in (block.mixer, block.parallel_mixer):
            continue
        keys = layer.config.recurrent.mamba2
        num_heads = keys.num_heads(layer.dimensions.emb_dim)
        width = keys.mamba_expand * layer.dimensions.emb_dim
        if keys.mamba_n_heads == -1 and width % keys.mamba_d_head:
            return ConfigIssue(
                message="mamba_n_heads=-1 is mamba_expand * emb_dim / mamba_d_head, but "
                f"{width} / {keys.mamba_d_head} is not an integer",
                keys=("mamba_n_heads", "mamba_d_head"),
            )
        if num_heads % keys.mamba_n_groups:
            return ConfigIssue(
                message=f"mamba_n_groups={keys.mamba_n_groups} does not divide the {num_heads} "
                "heads of mixer=mamba2",
                keys=("mamba_n_groups", "mamba_n_heads"),
            )
    return None


@rule("layer_pattern", "dense_conn")
def _mixers_can_be_parallel(config: Config) -> ConfigIssue | None:
    for layer in config.model.distinct_layers:
        block = layer.config.block
        beside = f"parallel_mixer={block.parallel_mixer}"
        if block.parallel_mixer == "none":
            continue
        of_attention = {*ATTENTION_MIXERS, *SOFTMAX_MIXERS}
        if of_attention.isdisjoint({block.mixer, *_base_mixers(block.mixer)}):
            return ConfigIssue(
                message=f"{beside} is beside attention, and a layer has mixer={block.mixer}",
                keys=("parallel_mixer", "mixer"),
            )
        second = {block.parallel_mixer, *_base_mixers(block.parallel_mixer)}
        if not second.isdisjoint(SOFTMAX_MIXERS):
            return ConfigIssue(
                message=f"{beside}: the second mixer is one without softmax, such as mamba2",
                keys=("parallel_mixer",),
            )
        if layer.config.dense_connections.mixes_attention_inputs:
            return ConfigIssue(
                message=f"{beside} has one input, and dense_conn=true makes several",
                remedies=("dense_streams=[r]",),
                keys=("parallel_mixer", "dense_streams"),
            )
    return None


@rule("layer_pattern", "attention_types")
def _layers_have_a_part(config: Config) -> ConfigIssue | None:
    for layer in config.model.distinct_layers:
        block = layer.config.block
        if layer.config.feed_forward.feed_forward_type != "none":
            continue
        if block.mixer == "none":
            return ConfigIssue(
                message="a layer has mixer=none and feed_forward_type=none, and so no part",
                keys=("feed_forward_type", "mixer"),
            )
        if block.use_macaron:
            return ConfigIssue(
                message="use_macaron=true halves feed-forwards, and feed_forward_type=none has "
                "none",
                keys=("use_macaron", "feed_forward_type"),
            )
    return None


@rule("mixer", "attention_projections", "dense_conn", "dense_streams")
def _latent_attention_has_projections_of_its_own(config: Config) -> ConfigIssue | None:
    model = config.model
    if "latent_attention" not in model.mixers:
        return None
    if model.attention.attention_projections != "dense":
        return ConfigIssue(
            message="mixer=latent_attention projects through vectors of its ranks, and "
            f"attention_projections={model.attention.attention_projections} has no such form",
            remedies=("attention_projections=dense",),
            keys=("mixer", "attention_projections"),
        )
    if model.dense_connections.mixes_attention_inputs:
        return ConfigIssue(
            message="mixer=latent_attention has one input, and dense_conn=true makes several",
            remedies=("dense_streams=[r]",),
            keys=("mixer", "dense_streams"),
        )
    return None


@rule("qk_rope_head_dim", "rotary_pct", "rope_type", "position_embedding", "mixer")
def _latent_attention_rotates_pairs(config: Config) -> ConfigIssue | None:
    for layer in config.model.distinct_layers:
        position = layer.config.position
        is_rotated = position.position_embedding == "rotary"
        if layer.config.block.mixer != "latent_attention" or not is_rotated:
            continue
        width = layer.config.attention.latent_attention.qk_rope_head_dim
        num_rotated = int(width * position.rotary_pct)
        if width % 2 or num_rotated < 2 or num_rotated % 2:
            return ConfigIssue(
                message=f"rotary rotates pairs of dimensions, but qk_rope_head_dim {width} * "
                f"rotary_pct {position.rotary_pct:g} gives {num_rotated}, not an even number from "
                "2",
                keys=("qk_rope_head_dim", "rotary_pct"),
            )
    return None


@rule("mixer", "use_qk_norm", "use_v_norm", "share_kv_projections", finds_unused=True)
def _latent_attention_has_norms_of_its_own(config: Config) -> ConfigIssue | None:
    attention = config.model.attention
    if set(config.model.mixers) - {"none"} != {"latent_attention"}:
        return None
    for name in ("use_qk_norm", "use_v_norm", "share_kv_projections"):
        if getattr(attention, name):
            return ConfigIssue(
                message=f"{name}=true is for queries, keys and values of other mixers; "
                "mixer=latent_attention normalizes the vectors that it projects them from",
                keys=(name, "mixer"),
            )
    return None


@rule("position_embedding", "attention_types", finds_unused=True)
def _alibi_is_read_by_a_softmax(config: Config) -> ConfigIssue | None:
    mixers = set(config.model.mixers) - {"none"}
    is_alibi = config.model.position.position_embedding == "alibi"
    is_refused = "linear_attention" in mixers  # by the rule below
    if not mixers or not is_alibi or is_refused or not all(map(_replaces_softmax, mixers)):
        return None
    return ConfigIssue(
        message="position_embedding=alibi lowers scores before a softmax, which mixer="
        f"{', '.join(sorted(mixers))} does not compute",
        keys=("position_embedding",),
    )


@rule("dropout_rates.attention", "dropout_rate", "attention_types", finds_unused=True)
def _attention_dropout_is_read_by_a_softmax(config: Config) -> ConfigIssue | None:
    mixers = set(config.model.mixers) - {"none"}
    rate = config.model.dropout.dropout_rates.attention
    if not mixers or not rate or not all(map(_replaces_softmax, mixers)):
        return None
    return ConfigIssue(
        message=f"dropout_rates.attention={rate:g} drops probabilities of a softmax, which mixer="
        f"{', '.join(sorted(mixers))} does not compute",
        keys=("dropout_rates.attention",),
    )


def _replaces_softmax(name: str) -> bool:
    """Returns whether a mixer is derived from attention and has an `attend` of its own."""
    if name in ("linear_attention", *RECURRENT_MIXERS):
        return True
    has_softmax = getattr(registration("mixer", name).target, "has_softmax", True)
    return not has_softmax and bool(_base_mixers(name).intersection(ATTENTION_MIXERS))


def _base_mixers(name: str) -> set[str]:
    """Returns the registered mixers from whose classes a mixer is derived, itself included."""
    classes = getattr(registration("mixer", name).target, "__mro__", ())
    mixers = [registered for registered in registrations() if registered.kind == "mixer"]
    return {mixer.name for mixer in mixers if any(map(mixer.is_of, classes))}


@rule("position_embedding", "attention_types")
def _linear_attention_has_no_scores(config: Config) -> ConfigIssue | None:
    model = config.model
    has_scores = "linear_attention" not in model.mixers
    if has_scores or model.position.position_embedding != "alibi":
        return None
    return ConfigIssue(
        message="position_embedding=alibi biases attention scores, and linear attention has none",
        keys=("position_embedding",),
    )


@rule("axial_pos_shape", "position_embedding", "max_target_length")
def _axial_positions_suffice(config: Config) -> ConfigIssue | None:
    shape = config.model.position.axial_pos_shape
    length = config.model.shape.max_target_length
    if config.model.position.position_embedding != "axial":
        return None
    if len(shape) != 2 or min(shape) < 1:
        num_columns = max(int(length**0.5), 1)
        num_rows = -(-length // num_columns)
        return ConfigIssue(
            message="axial_pos_shape: two numbers whose product is max_target_length or more",
            remedies=(f"axial_pos_shape=[{num_rows}, {num_columns}]",),
            keys=("axial_pos_shape", "max_target_length"),
        )
    num_rows, num_columns = shape
    if num_rows * num_columns >= length:
        return None
    return ConfigIssue(
        message=f"axial_pos_shape: {num_rows} * {num_columns} are {num_rows * num_columns} "
        f"positions, fewer than max_target_length={length}",
        keys=("axial_pos_shape", "max_target_length"),
    )


@rule("use_rezero", "normalization_type", finds_unused=True)
def _rezero_has_no_scale_norm(config: Config) -> ConfigIssue | None:
    block = config.model.block
    if not block.use_rezero or not block.normalization_type.startswith("scale_norm"):
        return None
    return ConfigIssue(
        message="use_rezero=true has no norms before branches, so normalization_type="
        f"{block.normalization_type} has no effect on them",
        keys=("use_rezero", "normalization_type"),
    )


@rule("use_rezero", "parallel_residual_shared_norm")
def _rezero_shares_no_norm(config: Config) -> ConfigIssue | None:
    block = config.model.block
    shares_norm = block.block_arrangement == "parallel" and block.parallel_residual_shared_norm
    if not block.use_rezero or not shares_norm:
        return None
    return ConfigIssue(
        message="parallel_residual_shared_norm=true: use_rezero=true has no norm to share",
        keys=("parallel_residual_shared_norm", "use_rezero"),
    )


@rule("norm_placement", "use_rezero", "use_macaron", "parallel_residual_shared_norm")
def _norms_can_be_placed(config: Config) -> ConfigIssue | None:
    """Norms of branch outputs fit the arrangement of the layer."""
    block = config.model.block
    placement = f"norm_placement={block.norm_placement}"
    shares_norm = block.block_arrangement == "parallel" and block.parallel_residual_shared_norm
    if block.norm_placement == "pre":
        return None
    if block.use_rezero:
        key = "use_rezero"
        reason = "use_rezero=true has no norms"
    elif block.use_macaron:
        key = "use_macaron"
        reason = "use_macaron=true halves the output of a feed-forward, which a norm would undo"
    elif shares_norm and block.norm_placement == "post":
        key = "parallel_residual_shared_norm"
        reason = "there is no norm before the branches to share"
    else:
        return None
    return ConfigIssue(
        message=f"{placement}: {reason}",
        remedies=(f"{key}=false", "norm_placement=pre"),
        keys=("norm_placement", key),
    )


@rule("use_macaron", "parallel_residual_shared_norm", "static_sgu", "dense_streams")
def _attention_can_have_several_inputs(config: Config) -> ConfigIssue | None:
    model = config.model
    block = model.block
    if not model.dense_connections.mixes_attention_inputs:
        return None
    if block.use_macaron:
        key = "use_macaron"
        reason = "use_macaron=true puts a feed-forward before attention"
    elif block.block_arrangement == "parallel" and block.parallel_residual_shared_norm:
        key = "parallel_residual_shared_norm"
        reason = "parallel_residual_shared_norm=true has one norm before attention"
    elif model.attention.static_sgu:
        key = "static_sgu"
        reason = "static_sgu=true splits the one input of attention"
    else:
        return None
    return ConfigIssue(
        message=f"{reason}, but dense_conn=true gives queries, keys and values inputs of their own",
        remedies=("dense_streams=[r]",),
        keys=(key, "dense_streams"),
    )


@rule("share_kv_projections", "dense_streams")
def _shared_projections_have_one_input(config: Config) -> ConfigIssue | None:
    dense = config.model.dense_connections
    has_separate_inputs = dense.dense_conn and not {"k", "v"}.isdisjoint(dense.dense_streams)
    if not config.model.attention.share_kv_projections or not has_separate_inputs:
        return None
    return ConfigIssue(
        message="share_kv_projections=true: keys and values are one product, but dense_conn=true "
        "gives them inputs of their own",
        remedies=("dense_streams=[q, r]", "share_kv_projections=false"),
        keys=("share_kv_projections", "dense_streams"),
    )


@rule("use_macaron", "feed_forward_type", "decoder_block")
def _macaron_is_an_mlp(config: Config) -> ConfigIssue | None:
    model = config.model
    if not model.block.use_macaron or model.feed_forward.feed_forward_type != "pattention":
        return None
    return ConfigIssue(
        message="use_macaron=true: the first half is an MLP, and feed_forward_type=pattention has "
        "none",
        keys=("use_macaron", "feed_forward_type"),
    )


@rule(
    "share_layer_params",
    "dynamic_mlp_dim",
    "attention_types",
    "moe_layers",
    "first_num_dense_layers",
    "interleave_moe_layer_step",
    "dense_first_layer_norms",
)
def _shared_layers_are_alike(config: Config) -> ConfigIssue | None:
    """Layers that share parameters have parameters of the same shapes."""
    model = config.model
    if not model.block.share_layer_params:
        return None
    mixers = set(model.mixers)
    dense = model.dense_connections
    # Attention mixers have the same parameters, except the learned keys of global attention.
    same_params = mixers <= set(ATTENTION_MIXERS) and not model.attention.num_mem_kv
    num_experts = {layer.config.mixture_of_experts.num_experts for layer in model.layers}
    other_key = ""
    if model.feed_forward.dynamic_mlp_dim:
        reason = "with dynamic_mlp_dim=true layers have different widths"
        other_key = "dynamic_mlp_dim"
    elif len(mixers) > 1 and not same_params:
        reason = f"layers with mixers {', '.join(sorted(mixers))} have different parameters"
    elif len({layer.dimensions for layer in model.layers}) > 1:
        reason = "layer_kinds gives layers different sizes"
    elif len(num_experts) > 1:
        other_key = _key_of_expert_layers(model.mixture_of_experts)
        reason = f"{other_key} gives some layers experts and others none"
    elif dense.mixes_attention_inputs and dense.dense_first_layer_norms == "one":
        reason = "dense_first_layer_norms=one gives layer 1 fewer norms"
        other_key = "dense_first_layer_norms"
    else:
        return None
    return ConfigIssue(
        message=f"share_layer_params=true: {reason}",
        keys=("share_layer_params", other_key) if other_key else ("share_layer_params",),
    )


def _key_of_expert_layers(experts: MoEConfig) -> str:
    """Returns the key that says which layers have experts."""
    if experts.moe_layers is not None:
        return "moe_layers"
    return (
        "first_num_dense_layers" if experts.first_num_dense_layers else "interleave_moe_layer_step"
    )


@rule("static_sgu", "base_emb_dim")
def _static_sgu_splits_the_width(config: Config) -> ConfigIssue | None:
    attention = config.model.attention
    emb_dim = config.model.shape.dimensions.emb_dim
    if not attention.static_sgu:
        return None
    if emb_dim % 2:
        message = f"static_sgu=true halves the width, and {emb_dim} is not even"
    elif attention.attention_projections == "pattention":
        message = (
            "static_sgu=true needs attention_projections=dense: slots are as wide as the model"
        )
    elif not attention.causal:
        message = "static_sgu=true sums over earlier tokens, but causal=false"
    else:
        return None
    return ConfigIssue(message=message, keys=("static_sgu",))


@rule("causal", "head_type", "head_qk", "mlm_training")
def _head_qk_is_causal(config: Config) -> ConfigIssue | None:
    if config.model.head.name != "head_qk" or config.model.attention.causal:
        return None
    return ConfigIssue(
        message="head_qk=true points back at earlier tokens, but causal=false",
        keys=("head_qk", "causal"),
    )


# ---- Experts


_EXPERT_KEYS = ("feed_forward_type", "mlp_activations", *MoEConfig.model_fields)


@rule(*_EXPERT_KEYS)
def _expert_keys_fit(config: Config) -> ConfigIssue | None:
    if config.model.mixture_of_experts.num_experts == 1:
        return None
    return _routing_issue(config) or _expert_layers_issue(config)


def _routing_issue(config: Config) -> ConfigIssue | None:
    """Returns what is wrong with the way tokens reach experts, or None."""
    experts = config.model.mixture_of_experts
    num_layers = config.model.shape.dimensions.num_layers
    if experts.num_experts_per_tok > experts.num_experts:
        return ConfigIssue(
            message=f"num_experts_per_tok={experts.num_experts_per_tok} is more than there are "
            f"experts ({experts.num_experts})",
            keys=("num_experts_per_tok",),
        )
    issue = _routing_groups_issue(experts)
    if issue is not None:
        return issue
    beyond = [layer for layer in experts.moe_layers or () if not 0 <= layer < num_layers]
    if beyond:
        return ConfigIssue(
            message=f"moe_layers: layers are counted from 0 to {num_layers - 1}, so {beyond[0]} is "
            "none",
            keys=("moe_layers",),
        )
    for name in ("capacity_factor", "eval_capacity_factor"):
        if -1 < getattr(experts, name) <= 0:
            return ConfigIssue(
                message=f"{name}: use a number above 0, or -1 for as many tokens as come",
                keys=(name,),
            )
    group_size = experts.moe_group_size
    issue = undivided_lengths("moe_group_size", group_size, config) if group_size != -1 else None
    if issue is None:
        return None
    return ConfigIssue(message=issue.message, keys=("moe_group_size",))


def _routing_groups_issue(experts: MoEConfig) -> ConfigIssue | None:
    """Returns why experts cannot be chosen from groups, or None."""
    num_groups = experts.n_routing_groups
    if num_groups == -1:
        return None
    group_size, remainder = divmod(experts.num_experts, num_groups)
    if remainder:
        return ConfigIssue(
            message=f"n_routing_groups={num_groups} does not divide "
            f"num_experts={experts.num_experts}",
            keys=("n_routing_groups", "num_experts"),
        )
    num_chosen = num_groups if experts.topk_routing_group == -1 else experts.topk_routing_group
    if num_chosen > num_groups:
        return ConfigIssue(
            message=f"topk_routing_group={num_chosen} is more than n_routing_groups={num_groups}",
            keys=("topk_routing_group", "n_routing_groups"),
        )
    if num_chosen * group_size < experts.num_experts_per_tok:
        return ConfigIssue(
            message=f"topk_routing_group={num_chosen} groups of {group_size} experts are fewer "
            f"than num_experts_per_tok={experts.num_experts_per_tok} experts",
            keys=("topk_routing_group", "num_experts_per_tok"),
        )
    if group_size == 1 and experts.routing_group_score == "top2_sum":
        return ConfigIssue(
            message="routing_group_score=top2_sum: a group has a single expert "
            f"(n_routing_groups={num_groups}, num_experts={experts.num_experts})",
            remedies=("routing_group_score=max",),
            keys=("routing_group_score", "n_routing_groups"),
        )
    return None


def _expert_layers_issue(config: Config) -> ConfigIssue | None:
    """Returns why no layer, or none of its feed-forwards, can have experts, or None."""
    experts = config.model.mixture_of_experts
    feed_forward = config.model.feed_forward
    if experts.moe_layers == ():
        return ConfigIssue(
            message="moe_layers: the list is empty, so no layer has experts",
            remedies=("num_experts=1",),
            keys=("moe_layers", "num_experts"),
        )
    num_layers = config.model.shape.dimensions.num_layers
    if not any(map(experts.has_experts, range(num_layers))):
        return ConfigIssue(
            message=f"first_num_dense_layers={experts.first_num_dense_layers} and "
            f"interleave_moe_layer_step={experts.interleave_moe_layer_step} leave none of the "
            f"{num_layers} layers with experts",
            remedies=("num_experts=1",),
            keys=("first_num_dense_layers", "interleave_moe_layer_step", "num_experts"),
        )
    if experts.moe_activations is None:
        for name in set(feed_forward.mlp_activations) & set(get_args(NotElementwise)):
            return ConfigIssue(
                message=f"mlp_activations: {name} is not elementwise, as experts require",
                remedies=("moe_activations=[gelu]",),
                keys=("mlp_activations", "moe_activations"),
            )
    if feed_forward.feed_forward_type == "pattention":
        return ConfigIssue(
            message="num_experts: experts are MLPs; with feed_forward_type=pattention there is "
            "none",
            keys=("num_experts", "feed_forward_type"),
        )
    return None


_EXPERT_AXIS_SIZES = tuple(size_key("expert", network) for network in NETWORKS)


@rule("num_experts", "capacity_factor", *_EXPERT_AXIS_SIZES)
def _experts_fill_the_expert_axis(config: Config) -> ConfigIssue | None:
    experts = config.model.mixture_of_experts
    if experts.num_experts == 1:
        return None  # the axis splits the batch alone
    num_devices = 1
    for name in _EXPERT_AXIS_SIZES:
        size = getattr(config.mesh, name)
        if size in (0, 1):
            continue
        # What -1 fills is known where the devices are.
        num_devices *= max(size, 1)
        if experts.num_experts % num_devices:
            return ConfigIssue(
                message=f"{name}={size} does not divide num_experts={experts.num_experts}",
                keys=(name, "num_experts"),
            )
        if experts.capacity_factor < 0 or experts.eval_capacity_factor < 0:
            return ConfigIssue(
                message=f"{name}: experts on several devices need capacity_factor and "
                "eval_capacity_factor above 0",
                remedies=("capacity_factor=1.25 eval_capacity_factor=2",),
                keys=(name, "capacity_factor"),
            )
    return None


# ---- Dense connections


@rule("dense_dynamic", "dense_static")
def _dense_sums_have_weights(config: Config) -> ConfigIssue | None:
    dense = config.model.dense_connections
    if not dense.dense_conn or dense.dense_dynamic or dense.dense_static:
        return None
    return ConfigIssue(
        message="dense_dynamic=false and dense_static=false: sums need weights; set one of them to "
        "true",
        keys=("dense_dynamic", "dense_static"),
    )


@rule("dense_streams", "mudd_postnorm")
def _dense_streams_are_distinct(config: Config) -> ConfigIssue | None:
    dense = config.model.dense_connections
    streams = dense.dense_streams
    if not dense.dense_conn:
        return None
    if not streams:
        return ConfigIssue(
            message="dense_streams: the list is empty; name at least one of q, k, v, r",
            keys=("dense_streams",),
        )
    if len(set(streams)) != len(streams):
        return ConfigIssue(
            message=f"dense_streams: {', '.join(streams)} names a stream twice",
            keys=("dense_streams",),
        )
    if dense.mudd_postnorm == "residual" and "r" not in streams:
        return ConfigIssue(
            message="mudd_postnorm=residual: dense_streams has no stream r to normalize",
            keys=("mudd_postnorm", "dense_streams"),
        )
    return None


@rule(
    "dense_target_layers",
    "dense_selection.outputs",
    "dense_period",
    "dense_sparsity",
    "base_num_decoder_layers",
)
def _dense_layers_exist(config: Config) -> ConfigIssue | None:
    """Periods, targets and sources of dense connections are within the model's layers."""
    dense = config.model.dense_connections
    num_layers = config.model.shape.dimensions.num_layers
    if not dense.dense_conn:
        return None
    if dense.dense_period > num_layers:
        return ConfigIssue(
            message=f"dense_period={dense.dense_period} is more than there are layers "
            f"({num_layers})",
            keys=("dense_period",),
        )
    targets = dense.dense_target_layers
    beyond = [layer for layer in targets or () if not 1 <= layer <= num_layers]
    if beyond or targets == ():
        reason = f"{beyond[0]} is none of them" if beyond else "the list is empty"
        return ConfigIssue(
            message=f"dense_target_layers: layers are counted from 1 to {num_layers}; {reason}",
            keys=("dense_target_layers",),
        )
    outputs = dense.dense_selection.outputs
    beyond = [source for source in outputs if not 0 <= source <= num_layers]
    if dense.dense_sparsity == "list" and (beyond or not outputs):
        reason = f"{beyond[0]} is neither" if beyond else "the list is empty"
        return ConfigIssue(
            message="dense_selection.outputs: 0 is the embedding, 1 to "
            f"{num_layers} are outputs; {reason}",
            keys=("dense_selection.outputs",),
        )
    return None
