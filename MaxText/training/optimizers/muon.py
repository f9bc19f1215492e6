"""Muon and NorMuon: orthogonalized momentum.

Legend: N matrices of a parameter (layers times experts), I inputs, O outputs.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from MaxText.config.registry import register
from MaxText.config.training_sections import OptimizerConfig
from MaxText.training.optimizers.elementwise import scale_by_adam
from MaxText.training.optimizers.matrices import (
    MatrixShape,
    matrices_of,
    on_whole_matrices,
    partition_matrices,
)
from MaxText.training.optimizers.parameter_trees import ParamSpecs, map_with_names

NUM_ITERATIONS = 5
# (a, b, c) of each iteration x -> a x + b (x x') x + c (x x')^2 x.
_COEFFICIENTS: dict[str, Sequence[tuple[float, float, float]]] = {
    # Jordan et al. 2024: the steepest slope at 0; singular values end between 0.7 and 1.2.
    "standard": [(3.4445, -4.7750, 2.0315)] * NUM_ITERATIONS,
    # Amsel et al. 2025 (Polar Express), with its safety factor: between 0.86 and 1.14.
    "polar_express": [
        (8.156554524902461, -22.48329292557795, 15.878769915207462),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    ],
}
# The first iteration of Polar Express must not meet singular values above 1.
_NORM_MARGIN = {"standard": 1.0, "polar_express": 1.01}
_NORMUON_EPSILON = 1e-10


class MomentumState(NamedTuple):
    """State of `scale_by_orthogonalization`; the same for all coefficients and scales."""

    count: ArrayLike  # int32 scalar, updates so far
    mu: optax.Updates  # mean of the gradients, like the parameters


class NeuronNormState(NamedTuple):
    """State of `scale_by_neuron_norm`."""

    # Mean square of each output's directions: like the parameters, inputs of size 1.
    nu: optax.Updates


@register("optimizer", "muon")
def muon(config: OptimizerConfig, parameters: ParamSpecs) -> optax.GradientTransformation:
    """Muon for matrices, Adam for the rest (Jordan et al. 2024).

    The momentum of a matrix is orthogonalized by Newton-Schulz iterations and scaled by
    `muon_scale`. `matrices_of` chooses the matrices.
    """
    return partition_matrices(
        parameters,
        optax.chain(
            scale_by_orthogonalization(config, parameters), _scale_by_shape(config, parameters)
        ),
        scale_by_adam(config, nesterov=config.nesterov),
    )


@register("optimizer", "normuon")
def normuon(config: OptimizerConfig, parameters: ParamSpecs) -> optax.GradientTransformation:
    """NorMuon (Li et al. 2025): Muon, with updates of all outputs of a matrix of equal size."""
    return partition_matrices(
        parameters,
        optax.chain(
            scale_by_orthogonalization(config, parameters),
            _scale_by_neuron_norm(config.normuon_beta2, parameters),
            _scale_by_shape(config, parameters),
        ),
        scale_by_adam(config, nesterov=config.nesterov),
    )


def scale_by_orthogonalization(
    config: OptimizerConfig, parameters: ParamSpecs
) -> optax.GradientTransformation:
    """Returns the transform of gradients to orthogonalized momentum, of singular values near 1.

    Args:
      config: muon_beta, muon_coefficients, nesterov and mu_dtype.
      parameters: By name; the transform is for those with matrices.
    """
    beta = config.muon_beta
    coefficients = config.muon_coefficients
    mu_dtype = config.mu_dtype or None

    def orthogonalize(name: str, momentum: jax.Array) -> jax.Array:
        def function(x_NIO: jax.Array) -> jax.Array:
            return newton_schulz(x_NIO, coefficients, config.adam_eps)

        if config.muon_use_all_to_all:
            return on_whole_matrices(function, momentum, parameters[name])
        return function(shapes[name].flatten(momentum)).reshape(momentum.shape)

    shapes = matrices_of(parameters)

    def init(params: optax.Params) -> MomentumState:
        mu = optax.tree.zeros_like(params, dtype=mu_dtype)
        return MomentumState(count=jnp.zeros((), jnp.int32), mu=mu)

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, MomentumState]:
        assert isinstance(state, MomentumState)
        mu = optax.tree.update_moment(updates, state.mu, beta, 1)
        count = optax.safe_increment(state.count)
        if config.nesterov:
            next_mu = optax.tree.bias_correction(mu, beta, optax.safe_increment(count))
            gradients = optax.tree.bias_correction(updates, beta, count)
            momentum = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, next_mu, gradients)
        else:
            momentum = optax.tree.bias_correction(mu, beta, count)
        directions = map_with_names(orthogonalize, momentum)
        return directions, MomentumState(count=count, mu=optax.tree.cast(mu, mu_dtype))

    return optax.GradientTransformation(init, update)


def newton_schulz(x_NIO: jax.Array, coefficients: str, epsilon: float) -> jax.Array:
    """Returns matrices with the singular vectors of `x_NIO` and singular values near 1.

    Args:
      x_NIO: Matrices [N, I, O].
      coefficients: A name of muon_coefficients.
      epsilon: Added to the norms by which matrices are divided at first.
    """

    def orthogonalize(x_IO: jax.Array) -> jax.Array:
        is_tall = x_IO.shape[0] > x_IO.shape[1]
        x = x_IO.T if is_tall else x_IO  # the smaller Gram matrix
        x /= _NORM_MARGIN[coefficients] * jnp.linalg.norm(x) + epsilon
        for a, b, c in _COEFFICIENTS[coefficients]:
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        return x.T if is_tall else x

    return jax.vmap(orthogonalize)(x_NIO)


def _scale_by_neuron_norm(beta: float, parameters: ParamSpecs) -> optax.GradientTransformation:
    """Divides directions by the root mean square of each output (NorMuon, algorithm 1).

    The norm of each matrix is kept.

    Args:
      beta: Decay rate of the mean squares.
      parameters: By name; the transform is for those with matrices.
    """
    shapes = matrices_of(parameters)

    def init(params: optax.Params) -> NeuronNormState:
        def zeros(name: str, parameter: jax.Array) -> jax.Array:
            square = jnp.square(parameter.astype(jnp.float32))
            return jnp.zeros_like(jnp.mean(square, shapes[name].input_axes, keepdims=True))

        return NeuronNormState(nu=map_with_names(zeros, params))

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, NeuronNormState]:
        assert isinstance(state, NeuronNormState)

        def new_mean_square(name: str, direction: jax.Array, nu: jax.Array) -> jax.Array:
            axes = shapes[name].input_axes
            squares = jnp.mean(jnp.square(direction.astype(jnp.float32)), axes, keepdims=True)
            return beta * nu + (1 - beta) * squares

        def normalize(name: str, direction: jax.Array, nu: jax.Array) -> jax.Array:
            normalized = direction / (jnp.sqrt(nu) + _NORMUON_EPSILON)
            old_NIO = shapes[name].flatten(direction)
            new_NIO = shapes[name].flatten(normalized)
            factor = matrix_norms(old_NIO) / (matrix_norms(new_NIO) + _NORMUON_EPSILON)
            return (new_NIO * factor).reshape(direction.shape).astype(direction.dtype)

        nu = map_with_names(new_mean_square, updates, state.nu)
        return map_with_names(normalize, updates, nu), NeuronNormState(nu=nu)

    return optax.GradientTransformation(init, update)


def matrix_norms(x_NIO: jax.Array) -> jax.Array:
    """Returns the Frobenius norm of each matrix, [N, 1, 1] in float32."""
    return jnp.sqrt(jnp.sum(jnp.square(x_NIO.astype(jnp.float32)), axis=(1, 2), keepdims=True))


def _scale_by_shape(
    config: OptimizerConfig, parameters: ParamSpecs
) -> optax.GradientTransformation:
    """Multiplies directions of singular values 1 by the factor of `muon_scale`."""
    shapes = matrices_of(parameters)

    def scale(name: str, direction: jax.Array) -> jax.Array:
        return muon_factor(config, shapes[name]) * direction

    return optax.stateless(lambda updates, _: map_with_names(scale, updates))


def muon_factor(config: OptimizerConfig, shape: MatrixShape) -> float:
    """Returns the factor of Muon's directions for a matrix of some shape.

    consistent_rms: Updates as large as Adam's, to share its learning rate (Liu et al. 2025,
    equation 4). original: Jordan et al. 2024. spectral: the same change of the output's root mean
    square at every shape (Bernstein 2025; Yang et al. 2023), so that learning rates transfer.
    """
    inputs, outputs = shape.inputs, shape.outputs
    if config.muon_scale == "spectral":
        return math.sqrt(outputs / inputs)
    if config.muon_scale == "original" or config.muon_consistent_rms is None:
        return math.sqrt(max(1.0, outputs / inputs))
    return config.muon_consistent_rms * math.sqrt(max(inputs, outputs))
