"""MuonH and AdamH: steps relative to a matrix's norm, which stays as it is.

Legend: N matrices of a parameter (layers times experts), I inputs, O outputs.
"""

import jax
import jax.numpy as jnp
import optax

from MaxText.config.registry import register
from MaxText.config.training_sections import OptimizerConfig
from MaxText.training.optimizers.elementwise import scale_by_adam
from MaxText.training.optimizers.matrices import (
    MatrixShape,
    head_shape,
    matrices_of,
    partition_matrices,
)
from MaxText.training.optimizers.muon import matrix_norms, scale_by_orthogonalization
from MaxText.training.optimizers.parameter_trees import ParamSpecs, map_with_names

_HYPERBALL = ("adamh", "muonh")
_TINY = 1e-30  # keeps a direction of zeros from becoming NaN


@register("optimizer", "muonh")
def muonh(config: OptimizerConfig, parameters: ParamSpecs) -> optax.GradientTransformation:
    """MuonH (Wen et al. 2026, Hyperball, arXiv 2606.16899): directions of Muon, AdamH for the head.

    Vectors and tables are trained by Adam.
    """
    directions = partition_matrices(
        parameters, scale_by_orthogonalization(config, parameters), scale_by_adam(config)
    )
    return optax.chain(directions, _scale_to_parameter_norm(config, parameters))


@register("optimizer", "adamh")
def adamh(config: OptimizerConfig, parameters: ParamSpecs) -> optax.GradientTransformation:
    """AdamH (Wen et al. 2026, Hyperball, arXiv 2606.16899): directions of Adam.

    Vectors and tables are trained by Adam.
    """
    return optax.chain(scale_by_adam(config), _scale_to_parameter_norm(config, parameters))


def matrices_of_constant_norm(
    config: OptimizerConfig, parameters: ParamSpecs
) -> dict[str, MatrixShape]:
    """Returns the parameters whose matrices keep their norms, which have no weight decay, by name.

    Those of `matrices_of` and the head with MuonH and AdamH; none with other optimizers.
    """
    if config.opt_type not in _HYPERBALL:
        return {}
    heads = {name: head_shape(spec) for name, spec in parameters.items()}
    return matrices_of(parameters) | {
        name: shape for name, shape in heads.items() if shape is not None
    }


def _scale_to_parameter_norm(
    config: OptimizerConfig, parameters: ParamSpecs
) -> optax.GradientTransformation:
    """Scales directions of matrices to the norms of these: norm(W) u / norm(u)."""
    shapes = matrices_of_constant_norm(config, parameters)

    def scale(name: str, direction: jax.Array, parameter: jax.Array) -> jax.Array:
        if name not in shapes:
            return direction
        direction_NIO = shapes[name].flatten(direction)
        norms = matrix_norms(shapes[name].flatten(parameter))
        scaled_NIO = direction_NIO * (norms / (matrix_norms(direction_NIO) + _TINY))
        return scaled_NIO.reshape(direction.shape)

    return optax.stateless(lambda updates, params: map_with_names(scale, updates, params))


def keep_norms(config: OptimizerConfig, parameters: ParamSpecs) -> optax.GradientTransformation:
    """Returns the last link of a chain, after which matrices have the norms that they had.

    A matrix W with the update d becomes norm(W) (W + d) / norm(W + d). A matrix of zeros has no
    direction to keep, and stays.

    Args:
      config: opt_type; the link changes nothing for other optimizers.
      parameters: By name.
    """
    shapes = matrices_of_constant_norm(config, parameters)

    def project(name: str, update: jax.Array, parameter: jax.Array) -> jax.Array:
        if name not in shapes:
            return update
        old_NIO = shapes[name].flatten(parameter).astype(jnp.float32)
        new_NIO = old_NIO + shapes[name].flatten(update)
        projected_NIO = new_NIO * (matrix_norms(old_NIO) / (matrix_norms(new_NIO) + _TINY))
        return (projected_NIO - old_NIO).reshape(update.shape).astype(update.dtype)

    return optax.stateless(lambda updates, params: map_with_names(project, updates, params))
