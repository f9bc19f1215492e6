"""Combinations of the model's keys that cannot work."""

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
    if config.model.memory.scan_layers is not True:
        return None
    if config.model.dense_connections.dense_conn:
        return "scan_layers=true: with dense_conn=true each layer reads another number of outputs"
    if not config.model.layers_are_alike:
        return "scan_layers=true: with dynamic_mlp_dim=true no two layers have the same width"
    return None


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
    Rule(("num_vocab_tiling", "max_target_length"), _loss_chunks),
    Rule((*_SLOT_NUMBERS, *_ZOOMS), _slots),
    Rule(
        ("head_dim", "base_emb_dim", "base_num_query_heads", "attention_projections"),
        _heads_of_slots,
    ),
    Rule(("drop_path_schedule", "drop_path"), _drop_path),
    Rule(
        ("dynamic_mlp_dim", "base_mlp_dim", "mlp_dim_multiple", "base_num_decoder_layers"),
        _mlp_dims,
    ),
    Rule(("scan_layers", "dense_conn", "dynamic_mlp_dim"), _scan),
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
