"""Matrices among the parameters, for optimizers that treat a matrix as a whole.

Legend: N matrices of a parameter (layers times experts), I inputs, O outputs.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec

from MaxText.parallelism.logical_sharding import ParamSpec, current_sharding, split_axes
from MaxText.training.optimizers.parameter_trees import ParamSpecs, map_param_names

_STACKED = ("layers", "exp")  # logical axes of separate matrices


class MatrixShape(NamedTuple):
    """A parameter as matrices [N, I, O]."""

    num_stacked_dims: int  # leading dimensions whose product is N
    num_input_dims: int  # dimensions after them whose product is I
    num_matrices: int  # N
    inputs: int  # I
    outputs: int  # O

    def flatten(self, x: jax.Array) -> jax.Array:
        """Reshapes an array like the parameter, or like a shard of it, to [N, I, O]."""
        first_output = self.num_stacked_dims + self.num_input_dims
        return x.reshape(
            math.prod(x.shape[: self.num_stacked_dims]),
            math.prod(x.shape[self.num_stacked_dims : first_output]),
            math.prod(x.shape[first_output:]),
        )

    @property
    def input_axes(self) -> tuple[int, ...]:
        """The dimensions of the parameter that are inputs."""
        return tuple(range(self.num_stacked_dims, self.num_stacked_dims + self.num_input_dims))


def matrix_shape(spec: ParamSpec) -> MatrixShape | None:
    """Returns a parameter's matrices; None for one that Adam trains.

    Adam trains tables, norms, biases and the head (Jordan et al. 2024), and the second product of
    dense connections: in a 4-layer MUDDFormer, Muon there ended at a higher validation loss.
    """
    is_unsharded = not any(spec.logical_axes)
    if not spec.num_input_dims or "vocab" in spec.logical_axes or is_unsharded:
        return None
    return _as_matrices(spec)


def head_shape(spec: ParamSpec) -> MatrixShape | None:
    """Returns the matrix of an untied head; None for other parameters."""
    is_head = bool(spec.num_input_dims) and "vocab" in spec.logical_axes
    return _as_matrices(spec) if is_head else None


def _as_matrices(spec: ParamSpec) -> MatrixShape:
    """Returns the matrices of a parameter with input dimensions."""
    num_stacked_dims = sum(name in _STACKED for name in spec.logical_axes)
    first_output = num_stacked_dims + spec.num_input_dims
    return MatrixShape(
        num_stacked_dims=num_stacked_dims,
        num_input_dims=spec.num_input_dims,
        num_matrices=math.prod(spec.shape[:num_stacked_dims]),
        inputs=math.prod(spec.shape[num_stacked_dims:first_output]),
        outputs=math.prod(spec.shape[first_output:]),
    )


def matrices_of(parameters: ParamSpecs) -> dict[str, MatrixShape]:
    """Returns the matrices of each parameter that has some, by name."""
    shapes = {name: matrix_shape(spec) for name, spec in parameters.items()}
    return {name: shape for name, shape in shapes.items() if shape is not None}


def partition_matrices(
    parameters: ParamSpecs,
    for_matrices: optax.GradientTransformation,
    for_others: optax.GradientTransformation,
) -> optax.GradientTransformation:
    """Applies one transform to the parameters of `matrices_of`, and another one to the rest."""
    matrices = matrices_of(parameters)
    labels = map_param_names(parameters, lambda name: "matrix" if name in matrices else "other")
    return optax.partition({"matrix": for_matrices, "other": for_others}, labels)


def on_whole_matrices(
    function: Callable[[jax.Array], jax.Array], x: jax.Array, spec: ParamSpec
) -> jax.Array:
    """Returns `function` of a parameter's matrices [N, I, O], each on one device if possible.

    On a mesh, `x` is sharded within its matrices. A constraint moves mesh axes from there to layers
    and experts, which costs an all-to-all of 1/devices of the bytes that gathering costs, and a
    second one moves them back. Where axes do not divide the layers, they stay within the matrices,
    and the products of `function` communicate.

    Args:
      function: Of float32 [N, I, O], elementwise in N.
      x: An array like the parameter.
      spec: Of the parameter.
    """
    shape = _as_matrices(spec)
    sharding = current_sharding(spec.logical_axes, spec.shape)
    if sharding is None:
        return function(shape.flatten(x)).reshape(x.shape)
    by_matrix = _sharded_over_matrices(sharding, spec, shape.num_stacked_dims)
    x = jax.lax.with_sharding_constraint(x, by_matrix)
    result = function(shape.flatten(x)).reshape(x.shape)
    return jax.lax.with_sharding_constraint(
        jax.lax.with_sharding_constraint(result, by_matrix), sharding
    )


def _sharded_over_matrices(
    sharding: NamedSharding, spec: ParamSpec, num_stacked_dims: int
) -> NamedSharding:
    """Moves mesh axes of a sharding from the dimensions of matrices to those that count them.

    An axis moves to the first dimension that it divides, after the axes that are there already.
    """
    mesh = sharding.mesh
    axes_of_dims = [list(split_axes(sharding, dim)) for dim in range(len(spec.shape))]
    for axes in axes_of_dims[num_stacked_dims:]:
        for axis in tuple(axes):
            for stacked_dim in range(num_stacked_dims):
                joined = [*axes_of_dims[stacked_dim], axis]
                if spec.shape[stacked_dim] % math.prod(mesh.shape[name] for name in joined) == 0:
                    axes_of_dims[stacked_dim] = joined
                    axes.remove(axis)
                    break
    return NamedSharding(mesh, PartitionSpec(*(tuple(axes) or None for axes in axes_of_dims)))
