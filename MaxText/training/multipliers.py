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

from MaxText.config.parametrization_rules import ADAM_LIKE_OF_OPTAX
from MaxText.config.schema import Config, all_keys
from MaxText.config.training_sections import OptimizerConfig
from MaxText.config.values import to_yaml
from MaxText.errors import UserError
from MaxText.formatting import format_table
from MaxText.layers.assembly.parametrization import init_multiplier
from MaxText.parallelism.logical_sharding import ParamSpec
from MaxText.training.backend_defaults import abstract_model
from MaxText.training.optimizers.matrices import MatrixShape, head_shape, matrix_shape
from MaxText.training.optimizers.muon import muon_factor
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


def _muon_rate(config: OptimizerConfig, spec: ParamSpec) -> float:
    """Returns the multiplier of orthogonal matrices times the factor of `muon_scale`."""
    shape = matrix_shape(spec)
    assert shape is not None
    growth = muon_factor(config, shape) / muon_factor(config, _base_shape(spec, shape))
    return math.sqrt(spec.r_out / spec.r_in) / growth


def _muonh_rate(config: OptimizerConfig, spec: ParamSpec) -> float:
    """Returns the multiplier of orthogonal matrices of the weight's Frobenius norm.

    Their spectral norm is sqrt(in out / min(in, out)) times the weight's RMS. 1 if both dimensions
    grow alike (HyperP, arXiv 2603.28743).
    """
    shape = matrix_shape(spec)
    assert shape is not None
    base = _base_shape(spec, shape)
    norm, base_norm = (math.sqrt(max(x.inputs, x.outputs)) for x in (shape, base))
    return math.sqrt(spec.r_out / spec.r_in) / (norm / base_norm * init_multiplier(spec))


def _base_shape(spec: ParamSpec, shape: MatrixShape) -> MatrixShape:
    """Returns the matrices of a parameter at base_shape."""
    return shape._replace(
        inputs=round(shape.inputs / spec.r_in), outputs=round(shape.outputs / spec.r_out)
    )


class _OptimizerRules(NamedTuple):
    """How the updates of an optimizer depend on sizes, for each of its kinds of weights."""

    others: RateRule
    matrices: RateRule | None = None  # of `matrix_shape`; None for that of others
    heads: RateRule | None = None  # of `head_shape`; None for that of others
    has_epsilon: bool = True  # that is compared with gradients, of all but `matrices`

    def of(self, spec: ParamSpec) -> tuple[RateRule, bool]:
        """Returns the rule of a weight, and whether its epsilon is compared with gradients."""
        if self.matrices is not None and matrix_shape(spec) is not None:
            return self.matrices, False
        if self.heads is not None and head_shape(spec) is not None:
            return self.heads, self.has_epsilon
        return self.others, self.has_epsilon


_RULES: Mapping[str, _OptimizerRules] = {
    "adafactor": _OptimizerRules(_relative_rate),
    "adamh": _OptimizerRules(_adam_rate, _relative_rate, _relative_rate),
    "adamw": _OptimizerRules(_adam_rate),
    "lion": _OptimizerRules(_adam_rate, has_epsilon=False),
    "muon": _OptimizerRules(_adam_rate, _muon_rate),
    "muonh": _OptimizerRules(_adam_rate, _muonh_rate, _relative_rate),
    "normuon": _OptimizerRules(_adam_rate, _muon_rate),
    "sgd": _OptimizerRules(_sgd_rate, has_epsilon=False),
}


def _rules_of(config: OptimizerConfig) -> _OptimizerRules | None:
    """Returns the rules of an optimizer; None if there are none."""
    if config.opt_type == "optax" and config.optax_name in ADAM_LIKE_OF_OPTAX:
        return _RULES["adamw"]
    return _RULES.get(config.opt_type)


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
    rules = _rules_of(config)
    if rules is None:
        raise UserError(
            f"opt_type={config.opt_type}: no rule says how its learning rate depends on the width\n"
            f"  What to do: set opt_type to one of {', '.join(sorted(_RULES))}, or "
            "parametrization=standard and sweep the learning rate at each size"
        )
    rule, has_epsilon = rules.of(spec)
    rate = rule(config, spec) * spec.branch_rate
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
    inner = optax.with_extra_args_support(transform)

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: jax.Array,
    ) -> tuple[optax.Updates, optax.OptState]:
        """Returns the updates of the transform for the gradients times their factors."""
        scaled = jax.tree.map(lambda gradient, factor: gradient * factor, updates, factors)
        return inner.update(scaled, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def multiplier_lines(config: OptimizerConfig, parameters: ParamSpecs) -> list[str]:
    """Returns a table of the class and the multipliers of each weight; none in standard form.

    Weights of several layers that are alike share a row.

    Args:
      config: Of the optimizer.
      parameters: By name.
    """
    if not any(spec.weight_class for spec in parameters.values()):
        return []
    rows: dict[tuple[str, ...], None] = {}
    for name, multipliers in weight_multipliers(config, parameters).items():
        spec = parameters[name]
        pattern = "/".join("*" if part.isdigit() else part for part in name.split("/"))
        numbers = (spec.r_in, spec.r_out, init_multiplier(spec), *multipliers)
        decays = numbers if spec.weight_class != "vector" else (*numbers[:-1], 0.0)
        rows[pattern, spec.weight_class, *(f"{number:.3g}" for number in decays)] = None
    header = ["weight", "class", "r_in", "r_out", "init std", "rate", "epsilon", "decay"]
    return format_table(header, list(rows), right=range(2, len(header))).splitlines()


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
    lines += multiplier_lines(config.optimizer, abstract_model(model).parameters)
    return "\n".join([*lines, ""])
