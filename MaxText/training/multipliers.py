"""Multipliers of learning rate, epsilon and weight decay of each weight (muP).

Under a parametrization other than standard, hyper-parameters are those of a base model, and each
weight multiplies them by powers of its ratios r_in and r_out (layers/assembly/parametrization.py).
A matrix whose update has the spectral norm sqrt(out / in) changes its outputs by as much at every
width (Yang et al. 2023, arXiv 2310.17813, condition 1). What the rate has to make up for depends on
how large the optimizer's own updates are:

    adamw, lion       entries of size 1: 1 / r_in (Yang et al. 2022, table 3)
    sgd               entries of the size of gradients, 1 / r_out: r_out / r_in
    adafactor, adamh  entries relative to the weight's: that of Adam over the initial scale
    muon, normuon     orthogonal matrices times a function of their shape (muon_scale)
    muonh             orthogonal matrices of the norm of the weight

A gradient with respect to an entry of a vector of width N is about 1 / N, so epsilon, which is
compared with gradients, is multiplied by 1 / r_out, and inside residual branches by their
multiplier. Weight decay is multiplied by the learning rate; its multiplier is the inverse of that
of the rate, so that the product stays (Kosson et al. 2025, arXiv 2510.19093).
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import optax

from MaxText.config.schema import Config, all_keys
from MaxText.config.training_sections import OptimizerConfig
from MaxText.config.values import to_yaml
from MaxText.errors import UserError
from MaxText.formatting import format_table
from MaxText.layers.assembly.parametrization import init_multiplier
from MaxText.parallelism.logical_sharding import ParamSpec
from MaxText.training.backend_defaults import abstract_model
from MaxText.training.optimizers.muon import _muon_dimensions
from MaxText.training.optimizers.parameter_trees import ParamSpecs, map_param_names


class WeightMultipliers(NamedTuple):
    """By what a weight multiplies hyper-parameters; 1 in standard form."""

    learning_rate: float = 1.0
    epsilon: float = 1.0
    weight_decay: float = 1.0


RateRule = Callable[[OptimizerConfig, ParamSpec], float]


def _adam_rate(config: OptimizerConfig, spec: ParamSpec) -> float:
    """Returns the multiplier of updates whose entries have size 1."""
    return 1.0 / spec.r_in


def _sgd_rate(config: OptimizerConfig, spec: ParamSpec) -> float:
    """Returns the multiplier of updates as large as gradients, also for the depth rule.

    A branch's gradients have its multiplier as a factor.
    """
    return spec.r_out / spec.r_in / spec.branch_factor


def _relative_rate(config: OptimizerConfig, spec: ParamSpec) -> float:
    """Returns the multiplier of updates whose entries are relative to those of the weight."""
    return 1.0 / spec.r_in / init_multiplier(spec)


def _spectral_rate(factor: Callable[[float, float], float], spec: ParamSpec) -> float:
    """Returns the multiplier of orthogonal matrices times a function of their shape.

    Args:
      factor: (inputs, outputs) -> the spectral norm of the update.
      spec: Of the matrix.
    """
    inputs = math.prod(spec.input_dims)
    outputs = math.prod(spec.output_dims)
    growth = factor(inputs, outputs) / factor(inputs / spec.r_in, outputs / spec.r_out)
    return math.sqrt(spec.r_out / spec.r_in) / growth


def _muon_rate(config: OptimizerConfig, spec: ParamSpec) -> float:
    """Returns the multiplier of Muon's updates, of RMS 0.2 at all shapes."""
    return _spectral_rate(lambda inputs, outputs: math.sqrt(max(inputs, outputs)), spec)


# Of the matrices of an optimizer that trains others by Adam.
_RATES_OF_MATRICES: Mapping[str, RateRule] = {"muon": _muon_rate}
_RATES: Mapping[str, RateRule] = {
    "adamw": _adam_rate,
    "lion": _adam_rate,
    "sgd": _sgd_rate,
    "adafactor": _relative_rate,
}


def weight_multipliers(
    config: OptimizerConfig, parameters: ParamSpecs
) -> dict[str, WeightMultipliers]:
    """Returns the multipliers of each weight, by name.

    Args:
      config: Of the optimizer.
      parameters: By name, with ratios unless the model is in standard form.

    Raises:
      UserError: The optimizer has no rule.
    """
    return {name: _multipliers(config, spec) for name, spec in parameters.items()}


def _multipliers(config: OptimizerConfig, spec: ParamSpec) -> WeightMultipliers:
    """Returns the multipliers of one weight."""
    if not spec.weight_class:
        return WeightMultipliers()
    name = config.opt_type
    is_matrix = name in _RATES_OF_MATRICES and _muon_dimensions(spec) is not None
    rule = _RATES_OF_MATRICES[name] if is_matrix else _RATES.get(name)
    if rule is None and name in _RATES_OF_MATRICES:
        rule = _adam_rate
    if rule is None:
        raise UserError(
            f"opt_type={name}: no rule says how its learning rate depends on the width\n"
            f"  What to do: set opt_type to one of {', '.join(sorted(_RATES | _RATES_OF_MATRICES))}"
            ", or parametrization=standard and sweep the learning rate at each size"
        )
    rate = rule(config, spec) * spec.branch_rate
    has_epsilon = name != "sgd" and not is_matrix
    return WeightMultipliers(
        learning_rate=rate,
        epsilon=spec.branch_factor / spec.r_out if has_epsilon else 1.0,
        weight_decay=1.0 / rate,
    )


def with_epsilons(
    transform: optax.GradientTransformation,
    multipliers: Mapping[str, WeightMultipliers],
    parameters: ParamSpecs,
) -> optax.GradientTransformation:
    """Returns an optimizer whose epsilon is multiplied weight by weight, with the same state.

    Optax has one epsilon for all. Its updates do not change if gradients and epsilon are multiplied
    by one number, so the gradients are divided by the multipliers.

    Args:
      transform: An optimizer with updates that do not depend on the scale of gradients.
      multipliers: By name.
      parameters: By name.
    """
    if all(multiplier.epsilon == 1.0 for multiplier in multipliers.values()):
        return transform
    factors = map_param_names(parameters, lambda name: 1.0 / multipliers[name].epsilon)

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        """Returns the updates of the transform for the gradients times their factors."""
        scaled = jax.tree.map(lambda gradient, factor: gradient * factor, updates, factors)
        return transform.update(scaled, state, params)

    return optax.GradientTransformation(transform.init, update)


def multiplier_table(config: OptimizerConfig, parameters: ParamSpecs) -> str:
    """Returns a table of the class and the multipliers of each weight; "" in standard form.

    Weights of several layers that are alike share a row.

    Args:
      config: Of the optimizer.
      parameters: By name.
    """
    if not any(spec.weight_class for spec in parameters.values()):
        return ""
    rows: dict[tuple[str, ...], None] = {}
    for name, multipliers in weight_multipliers(config, parameters).items():
        spec = parameters[name]
        pattern = "/".join("*" if part.isdigit() else part for part in name.split("/"))
        numbers = (spec.r_in, spec.r_out, init_multiplier(spec), *multipliers)
        decays = numbers if spec.weight_class != "vector" else (*numbers[:-1], 0.0)
        rows[pattern, spec.weight_class, *(f"{number:.3g}" for number in decays)] = None
    header = ["weight", "class", "r_in", "r_out", "init std", "rate", "epsilon", "decay"]
    return format_table(header, [list(row) for row in rows], right=range(2, len(header)))


def describe_parametrization(config: Config) -> str:
    """Returns what a parametrization changes: keys of the model, and multipliers of weights.

    Args:
      config: Of the run.
    """
    model = config.model
    if model.is_standard:
        return "  nothing is multiplied\n"
    before = model.values_by_key()
    after = model.with_multipliers.values_by_key()
    # That the result is in standard form is how it is expressed, and no effect.
    effects = [name for name in after if all_keys()[name].section[1] != "parametrization"]
    lines = [
        f"  the model has {name}={to_yaml(after[name])} in place of {to_yaml(before[name])}"
        for name in effects
        if after[name] != before[name]
    ]
    lines.append("  of the values at base_shape each weight has these multiples:")
    table = multiplier_table(config.optimizer, abstract_model(model).parameters)
    return "\n".join([*lines, table, ""])
