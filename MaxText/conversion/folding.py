"""Folds multipliers of a parametrization (muP) into weights, for formats without them.

A family of Hugging Face has no factor of branches, scores or logits, unless Granite's keys. The
same function has other weights: outputs of branches, queries, the final norm and the token table
are multiplied, where the architecture allows it. A multiplier that no weight can take stays a key
of the model, which the family has or refuses.
"""

import re

from MaxText.config import schema
from MaxText.config.model_sections import ModelConfig
from MaxText.conversion.hf_export import FoldedWeights
from MaxText.conversion.weight_source import WeightSource

_BRANCH_OUTPUTS = re.compile(
    r"self_attention/out/(values/)?(kernel|bias)"
    r"|mlp/(shared_experts/)?wo/(kernel|bias)|mlp/values/(kernel|bias)|mlp/experts/wo(_bias)?"
)
_POST_NORMS = re.compile(r"post_(self_attention|mlp)_layer_norm/(scale|bias)")
_QUERIES = re.compile(r"self_attention/query/(values/)?(kernel|bias)")
_QUERY_NORMS = re.compile(r"self_attention/query_norm/(scale|bias)")


def fold_multipliers(weights: WeightSource) -> tuple[WeightSource, str]:
    """Returns equivalent weights of a model in standard form, and a line to report it.

    Returns the weights unchanged and an empty line if the model is in standard form already.

    Args:
      weights: Of any model.
    """
    model = weights.config.model
    if model.is_standard:
        return weights, ""
    multiplied = model.with_multipliers
    model_values = model.values_by_key()
    keys = {
        name: value
        for name, value in multiplied.values_by_key().items()
        if value != model_values[name]
    }
    factors: dict[str, float] = {}
    if _fold_branches(weights, multiplied, factors):
        keys.pop("residual_multiplier", None)
    if _fold_scores(weights, multiplied, factors):
        keys.pop("attention_scale", None)
        keys["layer_kinds"] = model.block.layer_kinds
    if _fold_logits(weights, multiplied, factors):
        keys.pop("logits_scaling", None)
        keys.pop("embedding_multiplier", None)
    config = schema.unflatten(schema.flatten(weights.config) | keys)
    return FoldedWeights(weights, config, factors), (
        f"The layout has no parametrization={model.parametrization.parametrization}: its factors "
        f"are multiplied into {len(factors)} weights, which keeps the function"
    )


def _multiply(factors: dict[str, float], name: str, factor: float) -> None:
    """Multiplies the factor of one weight."""
    factors[name] = factors.get(name, 1.0) * factor


def _fold_branches(
    weights: WeightSource, multiplied: ModelConfig, factors: dict[str, float]
) -> bool:
    """Adds the factor of residual branches to their last weights; returns whether it can."""
    block = multiplied.block
    factor = block.residual_multiplier / weights.config.model.block.residual_multiplier
    pattern = _BRANCH_OUTPUTS
    if block.norm_placement != "pre":
        if block.normalization_zero_centered or not block.block_norm_parametric:
            return False
        pattern = _POST_NORMS
    for name in weights.model.parameters:
        if factor != 1.0 and pattern.search(name):
            _multiply(factors, name, factor)
    return True


def _fold_scores(weights: WeightSource, multiplied: ModelConfig, factors: dict[str, float]) -> bool:
    """Adds the factor of scores to queries; returns whether it can."""
    attention = multiplied.attention
    pattern = _QUERIES
    if attention.use_qk_norm:
        if multiplied.block.normalization_zero_centered or not attention.qk_norm_with_scale:
            return False
        pattern = _QUERY_NORMS
    for name in weights.model.parameters:
        layers = weights.model.placed(name)[1]
        if layers is None or not pattern.search(name):
            continue
        layer = weights.config.model.layers[layers[0]]
        scale = multiplied.layers[layers[0]].config.attention.attention_scale
        own_scale = layer.config.attention.attention_scale
        if scale != own_scale:
            default = layer.dimensions.head_dim**-0.5
            _multiply(factors, name, (scale or default) / (own_scale or default))
    return True


def _fold_logits(weights: WeightSource, multiplied: ModelConfig, factors: dict[str, float]) -> bool:
    """Adds the factors of the embedding and of logits to table and final norm.

    Returns whether it can.
    """
    head = multiplied.head
    model = weights.config.model
    embedding = multiplied.embedding.embedding_multiplier / model.embedding.embedding_multiplier
    logits = model.head.logits_scaling / head.logits_scaling
    if embedding == logits == 1.0:
        return True
    if not head.final_norm_parametric or multiplied.block.normalization_zero_centered:
        return False
    norm = [name for name in weights.model.parameters if name.startswith("decoder_norm/")]
    if not norm:
        return False
    _multiply(factors, "token_embedder/embedding", embedding)
    for name in norm:  # logits of a tied head have the factor of the table, too
        _multiply(factors, name, logits / (embedding if head.logits_via_embedding else 1.0))
    return True
