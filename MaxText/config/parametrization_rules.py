"""Impossible combinations of keys of a parametrization (muP), one small function each."""

import dataclasses
import math
from collections.abc import Iterator

from MaxText.config.model_sections import DEPTH_PARAMETRIZATIONS, ModelConfig
from MaxText.config.problems import ConfigIssue
from MaxText.config.rule import RULES, rule
from MaxText.config.schema import Config

# opt_type of training/multipliers.py, which says how learning rates depend on sizes.
OPTIMIZERS_WITH_RULE = (
    "adafactor",
    "adamh",
    "adamw",
    "lion",
    "muon",
    "muonh",
    "normuon",
    "optax",
    "sgd",
)
# optax_name of opt_type=optax whose updates have entries of size 1, whatever gradients are.
ADAM_LIKE_OF_OPTAX = ("adam", "ademamix", "adopt", "amsgrad", "lion", "radam")
FIXED_NORM_OPTIMIZERS = ("muonh", "adamh")  # for parametrization=hyperp
_DEPTH_SCALED_INITS = ("gpt2", "neox", "wang")  # weight_init with a factor of depth of its own
_PARAMETRIZATION = ("parametrization", "base_shape")
# Sizes before global_parameter_scale, which Dimensions has after it.
_SCALED_SIZES = (
    "base_emb_dim",
    "base_mlp_dim",
    "base_num_query_heads",
    "base_num_kv_heads",
    "base_num_decoder_layers",
)


@rule("parametrization", "base_shape", programs=("train", "train_compile", "plan"))
def _base_shape_is_given(config: Config) -> ConfigIssue | None:
    model = config.model
    is_scaled = model.shape.global_parameter_scale > 1
    if model.is_standard or model.parametrization.base_shape or is_scaled:
        return None
    return ConfigIssue(
        message=f"parametrization={model.parametrization.parametrization} has no base_shape: the "
        "sizes of the model at which hyper-parameters were tuned",
        remedies=(
            "base_shape={base_emb_dim: 256, base_mlp_dim: 1024, base_num_query_heads: 4, "
            "base_num_kv_heads: 4}, those of your small model",
        ),
        keys=_PARAMETRIZATION,
    )


@rule("base_shape", "parametrization", "base_emb_dim", "base_mlp_dim")
def _base_shape_is_narrower(config: Config) -> ConfigIssue | None:
    model = config.model
    if model.is_standard:
        return None
    values = model.values_by_key()
    dimensions = model.shape.dimensions._asdict()
    base_dimensions = model.at_base_shape.shape.dimensions._asdict()
    wider = {
        name: (base_size, dimensions[name])
        for name, base_size in base_dimensions.items()
        if base_size > dimensions[name]
    }
    for name, base_size in model.parametrization.base_shape:
        size = values[name]
        if name in _SCALED_SIZES or not isinstance(size, int) or size == -1:
            continue
        if base_size > size:
            wider[name] = (base_size, size)
    if not wider:
        return None
    name, (base_size, size) = next(iter(wider.items()))
    return ConfigIssue(
        message=f"base_shape is wider than the model: {name} {base_size} > {size}",
        remedies=("base_shape of the smaller model; a model can be its own base",),
        keys=_PARAMETRIZATION,
    )


@rule("base_shape", "parametrization", "base_num_decoder_layers")
def _depth_has_a_rule(config: Config) -> ConfigIssue | None:
    model = config.model
    num_layers = model.shape.dimensions.num_layers
    if model.parametrization.parametrization != "mup" or model.num_base_layers == num_layers:
        return None
    return ConfigIssue(
        message=f"parametrization=mup has no rule for depth, and base_shape has "
        f"{model.num_base_layers} layers (base_num_decoder_layers) where the model has "
        f"{num_layers}",
        remedies=(
            "parametrization=completep",
            f"base_num_decoder_layers={num_layers} in base_shape, if rates were tuned there",
        ),
        keys=_PARAMETRIZATION,
    )


@rule("parametrization", "weight_init", "init_scale_by.depth")
def _one_rule_for_depth(config: Config) -> ConfigIssue | None:
    parametrization = config.model.parametrization.parametrization
    initialization = config.model.initialization
    if parametrization not in DEPTH_PARAMETRIZATIONS:
        return None
    if initialization.weight_init in _DEPTH_SCALED_INITS:
        scheme = f"weight_init={initialization.weight_init}"
        remedy = "weight_init=fan_in, or weight_init=normal with the same init_std"
    elif initialization.init_scale_by.depth:
        scheme, remedy = "init_scale_by.depth=true", "init_scale_by.depth=false"
    else:
        return None
    return ConfigIssue(
        message=f"parametrization={parametrization} multiplies residual branches by a power of the "
        f"depth, and {scheme} makes their output weights smaller with depth, too",
        remedies=(remedy, "parametrization=mup, which scales with width alone"),
        keys=("parametrization", "weight_init"),
    )


@rule(
    "parametrization", "base_shape", "connection_type", "dense_conn", "hidden_size_per_layer_input"
)
def _depth_rule_is_known(config: Config) -> ConfigIssue | None:
    model = config.model
    if model.depth_ratio == 1:
        return None
    if model.connection != "residual":
        reason = f"layers connected by {model.connection} have none that is published"
    elif model.embedding.hidden_size_per_layer_input:
        reason = "the branches of hidden_size_per_layer_input have none"
    else:
        return None
    return ConfigIssue(
        message=f"parametrization={model.parametrization.parametrization}: a depth rule, of "
        f"{model.num_base_layers} to {model.shape.dimensions.num_layers} layers, is about residual "
        f"branches; {reason}",
        remedies=(
            "parametrization=mup, and as many layers in base_shape",
            f"base_num_decoder_layers={model.shape.dimensions.num_layers} in base_shape",
        ),
        keys=_PARAMETRIZATION,
    )


def _expert_facts(model: ModelConfig) -> dict[str, float]:
    """Returns what has to be equal at base_shape for experts to transfer, by its name."""
    experts = model.mixture_of_experts
    dimensions = model.shape.dimensions
    return {
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.num_experts_per_tok,
        "shared_experts": experts.shared_experts,
        "expert width / emb_dim": experts.width(dimensions.mlp_dim) / dimensions.emb_dim,
    }


@rule("base_shape", "parametrization", "num_experts", "num_experts_per_tok", "moe_mlp_dim")
def _experts_have_the_same_ratios(config: Config) -> ConfigIssue | None:
    model = config.model
    if model.is_standard or model.mixture_of_experts.num_experts == 1:
        return None
    base_facts = _expert_facts(model.at_base_shape)
    for name, value in _expert_facts(model).items():
        if not math.isclose(value, base_facts[name], rel_tol=0.05):
            return ConfigIssue(
                message=f"base_shape has experts of other ratios: {name} is {base_facts[name]:g} "
                f"there and {value:g} in the model; rates do not transfer over it",
                remedies=(f"sizes in base_shape with {name} = {value:g}",),
                keys=("base_shape", "parametrization"),
            )
    return None


@rule("parametrization", "opt_type", "optax_name")
def _optimizer_has_a_rule(config: Config) -> ConfigIssue | None:
    model = config.model
    parametrization = model.parametrization.parametrization
    opt_type = config.optimizer.opt_type
    if model.is_standard:
        return None
    if parametrization == "hyperp" and opt_type not in FIXED_NORM_OPTIMIZERS:
        return ConfigIssue(
            message="parametrization=hyperp is about weights of fixed norm, and "
            f"opt_type={opt_type} changes norms",
            remedies=(
                *(f"opt_type={name}" for name in FIXED_NORM_OPTIMIZERS),
                "parametrization=completep",
            ),
            keys=("parametrization", "opt_type"),
        )
    is_optax = opt_type == "optax"
    if opt_type in OPTIMIZERS_WITH_RULE and not is_optax:
        return None
    if is_optax and config.optimizer.optax_name in ADAM_LIKE_OF_OPTAX:
        return None
    name = f"optax_name={config.optimizer.optax_name}" if is_optax else f"opt_type={opt_type}"
    reason = ""
    if opt_type == "soap":
        # With gradients of rank 1, Adam in the eigenbasis has one entry of size 1, and Muon's rule
        # would hold; with as many directions as the matrix is wide, all entries have it, as Adam's.
        reason = (
            "; the spectral norm of its updates is between that of Muon's and of Adam's, by the "
            "rank of the gradients"
        )
    return ConfigIssue(
        message=f"{name}: no rule says how its learning rate depends on the sizes of "
        f"the model (parametrization={parametrization}){reason}",
        remedies=(
            f"opt_type, one of {', '.join(OPTIMIZERS_WITH_RULE)}",
            "parametrization=standard, and a sweep of the learning rate at each size",
        ),
        keys=("opt_type", "parametrization"),
    )


def broken_at_base_shape(config: Config) -> Iterator[ConfigIssue]:
    """Yields the issues of rules that the sizes of base_shape break."""
    if config.model.is_standard:
        return
    sizes = {name for name, _ in config.model.parametrization.base_shape}
    base_config = config.model_copy(update={"model": config.model.at_base_shape})
    for combination in RULES:
        concerns_all = not (combination.finds_unused or combination.programs)
        if not concerns_all or not sizes.intersection(combination.keys):
            continue
        if issue := combination.check(base_config):
            message = f"base_shape: {issue.message}"
            yield dataclasses.replace(issue, message=message, keys=("base_shape",))
