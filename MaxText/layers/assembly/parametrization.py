"""Classes and initial scales of weights from two abstract models (muP).

A parametrization scales hyper-parameters of each weight with the growth of its input and output
dimensions from a base model, at which they were tuned. No table of names says how: the model is
built twice without values, at its own sizes and at those of `base_shape`, with as many layers, so
that weights have the same names. The ratios of their dimensions are all that the rules read:

    r_in, r_out   ratios of the products of input and of output dimensions; r_in is 1 for weights
                  that are no matrices (layers/params.py: num_input_dims)

The norms of a matrix and of its update have to grow like sqrt(r_out / r_in), so that activations
and their changes stay as large (Yang et al. 2023, arXiv 2310.17813, condition 1). Initial standard
deviations are multiplied by r_in^-1/2, those of logits by 1/r_in, which makes them shrink (Yang et
al. 2022, arXiv 2203.03466, table 8). training/multipliers.py has the rules of optimizers, and
`ModelConfig.with_multipliers` those of activations.
"""

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

from MaxText.config.model_sections import ModelConfig
from MaxText.errors import UserError
from MaxText.parallelism.logical_sharding import ParamSpec

# table: rows of vectors, chosen by token or position. vector: gains, biases, scalars, and all that
# is added or multiplied. hidden: matrices. readout: matrices to a fixed number of logits.
WeightClass = Literal["table", "vector", "hidden", "readout"]

_ROW_AXES = ("vocab", "position")
_WIDTH_AXES = ("embed", "mlp", "slots")  # of dimensions that are contracted where they are inputs
_REMEDY = (
    "\n  What to do: declare it by Dense, or by MaxText.layers.params.param with num_input_dims, "
    "or set parametrization=standard"
)


class DepthFactors(NamedTuple):
    """Factors of the depth rule, of L layers, L_base at base_shape, exponent a.

    Dey et al. 2025 (CompleteP, arXiv 2505.01618), table 1.
    """

    branch: float = 1.0  # (L / L_base)^-a: multiplier of residual branches
    rate: float = 1.0  # (L / L_base)^(a - 1): factor of learning rates in them


def depth_factors(config: ModelConfig) -> DepthFactors:
    """Returns the factors of a model's depth rule; 1 without one."""
    a = config.parametrization.depth_exponent
    ratio = config.depth_ratio
    return DepthFactors(branch=ratio**-a, rate=ratio ** (a - 1))


def _class_of(spec: ParamSpec) -> WeightClass:
    """Returns the class of a weight."""
    if spec.num_input_dims:
        return "readout" if spec.is_readout else "hidden"
    return "table" if any(axis in _ROW_AXES for axis in spec.logical_axes) else "vector"


def init_multiplier(spec: ParamSpec) -> float:
    """Returns the factor of a weight's initial standard deviation at base_shape."""
    return {"hidden": spec.r_in**-0.5, "readout": 1.0 / spec.r_in}.get(spec.weight_class, 1.0)


def with_ratios(
    parameters: Mapping[str, ParamSpec], base: Mapping[str, ParamSpec], depth: DepthFactors
) -> dict[str, ParamSpec]:
    """Returns parameters with their class, and the ratios of their sizes to those at base_shape.

    Args:
      parameters: Of the model, by name.
      base: Of the model at base_shape, with as many layers.
      depth: Factors of weights of residual branches.

    Raises:
      UserError: A weight has no class, or is narrower than at base_shape. The message names it.
    """
    if missing := sorted(parameters.keys() ^ base.keys()):
        where = "this model" if missing[0] in parameters else "base_shape"
        raise UserError(
            f"base_shape makes another model: only {where} has the weight {missing[0]}\n"
            "  What to do: set sizes in base_shape, and leave all else as it is"
        )
    return {name: _with_ratios(name, spec, base[name], depth) for name, spec in parameters.items()}


def _with_ratios(name: str, spec: ParamSpec, base: ParamSpec, depth: DepthFactors) -> ParamSpec:
    """Returns one parameter with its class and ratios; see `with_ratios`."""
    shapes = f"{list(spec.shape)}, at base_shape {list(base.shape)}"
    if len(spec.shape) != len(base.shape):
        raise UserError(f"the weight {name} has other dimensions: {shapes}{_REMEDY}")
    if any(size < base_size for size, base_size in zip(spec.shape, base.shape, strict=True)):
        raise UserError(
            f"base_shape is wider than the model: the weight {name} is {shapes}\n"
            "  What to do: make base_shape the smaller one; a model can be its own base"
        )
    r_in = math.prod(spec.input_dims) / math.prod(base.input_dims)
    r_out = math.prod(spec.output_dims) / math.prod(base.output_dims)
    weight_class = _class_of(spec)
    if weight_class == "vector" and _looks_like_matrix(spec, base):
        raise UserError(
            f"the weight {name} has no class: it grows in two dimensions, {shapes}, and declares "
            f"none as its inputs{_REMEDY}"
        )
    if spec.num_input_dims and r_in > 1 and spec.init_std is None:
        raise UserError(
            f"the weight {name} has no class: the standard deviation of its initializer is unknown"
            "\n  What to do: draw it by one of Init.initializers or MaxText.layers.params.normal, "
            "or set parametrization=standard"
        )
    in_branch = spec.owner == "layers"
    return spec._replace(
        weight_class=weight_class,
        r_in=r_in,
        r_out=r_out,
        branch_factor=depth.branch if in_branch else 1.0,
        branch_rate=depth.rate if in_branch else 1.0,
    )


def _looks_like_matrix(spec: ParamSpec, base: ParamSpec) -> bool:
    """Returns whether a weight without inputs is drawn randomly, and grows in two dimensions."""
    pairs = zip(spec.logical_axes, spec.shape, base.shape, strict=True)
    growing = [axis for axis, size, base_size in pairs if size > base_size]
    return spec.init_std != 0 and len(growing) > 1 and any(axis in _WIDTH_AXES for axis in growing)


def init_factors(
    parameters: Mapping[str, ParamSpec], base: Mapping[str, ParamSpec]
) -> dict[str, float]:
    """Returns by what to multiply freshly drawn weights, by name; without factors of 1.

    A weight is drawn with the standard deviation that its initializer has for its own shape. The
    rules are about that of base_shape, which a scheme may or may not make depend on the width.

    Args:
      parameters: With ratios.
      base: Of the model at base_shape.
    """
    factors = {}
    for name, spec in parameters.items():
        base_std = base[name].init_std
        if not spec.init_std or not base_std:  # constants, and vectors of unknown distributions
            continue
        factor = base_std * init_multiplier(spec) / spec.init_std
        if not math.isclose(factor, 1.0, rel_tol=1e-12):
            factors[name] = factor
    return factors
