"""SOAP: Adam in the eigenbasis of Shampoo's statistics.

Legend: N matrices of a parameter (layers times experts), I inputs, O outputs.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from MaxText.config.registry import register
from MaxText.config.training_sections import OptimizerConfig
from MaxText.training.optimizers.elementwise import scale_by_adam
from MaxText.training.optimizers.matrices import MatrixShape, matrices_of, partition_matrices
from MaxText.training.optimizers.parameter_trees import ParamSpecs, map_with_names


class SoapState(NamedTuple):
    """State of `_scale_by_soap`. A side that is too long has empty statistics and basis."""

    count: ArrayLike  # int32 scalar, updates so far
    mu: optax.Updates  # mean of the gradients, like the parameters
    nu: optax.Updates  # mean of the squared gradients in the basis, like the parameters
    input_statistics: optax.Updates  # mean of G G', [N, I, I] for each parameter
    output_statistics: optax.Updates  # mean of G' G, [N, O, O]
    input_basis: optax.Updates  # eigenvectors in columns, by falling eigenvalue, [N, I, I]
    output_basis: optax.Updates  # [N, O, O]


class _Moments(NamedTuple):
    """The state of one parameter, with matrices [N, I, O]."""

    mu_NIO: jax.Array
    nu_NIO: jax.Array
    input_statistics: jax.Array
    output_statistics: jax.Array
    input_basis: jax.Array
    output_basis: jax.Array


@register("optimizer", "soap")
def soap(config: OptimizerConfig, parameters: ParamSpecs) -> optax.GradientTransformation:
    """SOAP for matrices, Adam for the rest (Vyas et al. 2025).

    The first step of a matrix computes its basis and does not move it. The basis of a later step is
    that of the gradients before it.
    """
    return partition_matrices(parameters, _scale_by_soap(config, parameters), scale_by_adam(config))


def _scale_by_soap(config: OptimizerConfig, parameters: ParamSpecs) -> optax.GradientTransformation:
    """Returns SOAP's transform of the parameters with matrices (algorithm 3)."""
    shapes = matrices_of(parameters)
    b1 = config.adam_b1
    b2 = config.adam_b2

    def init(params: optax.Params) -> SoapState:
        def zero_sides(name: str, parameter: jax.Array, side: str) -> jax.Array:
            shape = shapes[name]
            size = basis_size(getattr(shape, side), config)
            return jnp.zeros((shape.num_matrices, size, size), jnp.float32)

        def for_inputs(name: str, parameter: jax.Array) -> jax.Array:
            return zero_sides(name, parameter, "inputs")

        def for_outputs(name: str, parameter: jax.Array) -> jax.Array:
            return zero_sides(name, parameter, "outputs")

        return SoapState(
            count=jnp.zeros((), jnp.int32),
            mu=optax.tree.zeros_like(params, dtype=config.mu_dtype or None),
            nu=optax.tree.zeros_like(params),
            input_statistics=map_with_names(for_inputs, params),
            output_statistics=map_with_names(for_outputs, params),
            input_basis=map_with_names(for_inputs, params),
            output_basis=map_with_names(for_outputs, params),
        )

    def update_one(
        shape: MatrixShape, gradient_NIO: jax.Array, moments: _Moments, count: ArrayLike
    ) -> tuple[jax.Array, _Moments]:
        """Returns the direction [N, I, O] of one parameter, and its new state."""
        mu_NIO = b1 * moments.mu_NIO + (1 - b1) * gradient_NIO
        rotated_NIO = _rotate(gradient_NIO, moments)
        nu_NIO = b2 * moments.nu_NIO + (1 - b2) * jnp.square(rotated_NIO)
        # The first step only fills the basis, so that moments count from the second one.
        num_updates = jnp.maximum(jnp.asarray(count, jnp.float32) - 1, 1)
        corrected_mu = _rotate(mu_NIO, moments) / (1 - b1**num_updates)
        corrected_nu = nu_NIO / (1 - b2**num_updates)
        adam_NIO = corrected_mu / (jnp.sqrt(corrected_nu + config.adam_eps_root) + config.adam_eps)
        is_first = jnp.asarray(count) == 1
        direction_NIO = jnp.where(is_first, 0.0, _rotate_back(adam_NIO, moments))
        moments = moments._replace(
            mu_NIO=jnp.where(is_first, 0.0, mu_NIO), nu_NIO=jnp.where(is_first, 0.0, nu_NIO)
        )
        return direction_NIO, _update_basis(config, gradient_NIO, moments, count)

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, SoapState]:
        assert isinstance(state, SoapState)
        count = optax.safe_increment(state.count)

        def of_one(
            name: str, gradient: jax.Array, *arrays: jax.Array
        ) -> tuple[jax.Array, _Moments]:
            shape = shapes[name]
            mu, nu, *sides = arrays
            gradient_NIO = shape.flatten(gradient).astype(jnp.float32)
            moments = _Moments(shape.flatten(mu).astype(jnp.float32), shape.flatten(nu), *sides)
            direction_NIO, moments = update_one(shape, gradient_NIO, moments, count)
            moments = moments._replace(
                mu_NIO=moments.mu_NIO.reshape(mu.shape).astype(mu.dtype),
                nu_NIO=moments.nu_NIO.reshape(nu.shape).astype(nu.dtype),
            )
            return direction_NIO.reshape(gradient.shape).astype(gradient.dtype), moments

        results = map_with_names(of_one, updates, *state[1:])
        structure = jax.tree.structure(updates)
        directions, moments = zip(*structure.flatten_up_to(results), strict=True)
        fields = (structure.unflatten(leaves) for leaves in zip(*moments, strict=True))
        return structure.unflatten(directions), SoapState(count, *fields)

    return optax.GradientTransformation(init, update)


def basis_size(size: int, config: OptimizerConfig) -> int:
    """Returns the size of a side's basis; 0 for one that is too long to have a basis."""
    return size if size <= config.soap.max_side else 0


def _rotate(x_NIO: jax.Array, moments: _Moments) -> jax.Array:
    """Returns matrices in the basis: Q_in' X Q_out."""
    if moments.input_basis.size:
        x_NIO = jnp.einsum("nij,nio->njo", moments.input_basis, x_NIO)
    if moments.output_basis.size:
        x_NIO = jnp.einsum("nio,nop->nip", x_NIO, moments.output_basis)
    return x_NIO


def _rotate_back(x_NIO: jax.Array, moments: _Moments) -> jax.Array:
    """Returns matrices of the basis in the original coordinates: Q_in X Q_out'."""
    if moments.input_basis.size:
        x_NIO = jnp.einsum("nij,njo->nio", moments.input_basis, x_NIO)
    if moments.output_basis.size:
        x_NIO = jnp.einsum("nip,nop->nio", x_NIO, moments.output_basis)
    return x_NIO


def _update_basis(
    config: OptimizerConfig, gradient_NIO: jax.Array, moments: _Moments, count: ArrayLike
) -> _Moments:
    """Adds a gradient to the statistics, and updates the basis if it is due.

    The first basis is an eigendecomposition. Later ones are a step of orthogonal iteration
    (algorithm 4), after which second moments are sorted as the eigenvalues.
    """
    beta = config.soap.beta
    num_updates = jnp.asarray(count) - 1
    is_first = num_updates == 0
    is_due = (num_updates > 0) & (num_updates % config.soap.frequency == 0)

    def update_side(
        statistics: jax.Array, basis: jax.Array, product: jax.Array, nu_NIO: jax.Array, axis: int
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        statistics = beta * statistics + (1 - beta) * product

        def first(basis: jax.Array, nu_NIO: jax.Array) -> tuple[jax.Array, jax.Array]:
            return jnp.flip(jnp.linalg.eigh(statistics)[1], axis=2), nu_NIO

        def iterate(basis: jax.Array, nu_NIO: jax.Array) -> tuple[jax.Array, jax.Array]:
            image = statistics @ basis
            eigenvalues = jnp.sum(basis * image, axis=1)
            order = jnp.argsort(eigenvalues, axis=1, descending=True)
            image = jnp.take_along_axis(image, order[:, None, :], axis=2)
            order = order[:, :, None] if axis == 1 else order[:, None, :]
            return jnp.linalg.qr(image)[0], jnp.take_along_axis(nu_NIO, order, axis=axis)

        def keep(basis: jax.Array, nu_NIO: jax.Array) -> tuple[jax.Array, jax.Array]:
            return basis, nu_NIO

        branch = jnp.where(is_first, 1, jnp.where(is_due, 2, 0))
        basis, nu_NIO = jax.lax.switch(branch, (keep, first, iterate), basis, nu_NIO)
        return statistics, basis, nu_NIO

    if moments.input_basis.size:
        product = jnp.einsum("nio,njo->nij", gradient_NIO, gradient_NIO)
        statistics, basis, nu_NIO = update_side(
            moments.input_statistics, moments.input_basis, product, moments.nu_NIO, axis=1
        )
        moments = moments._replace(input_statistics=statistics, input_basis=basis, nu_NIO=nu_NIO)
    if moments.output_basis.size:
        product = jnp.einsum("nio,nip->nop", gradient_NIO, gradient_NIO)
        statistics, basis, nu_NIO = update_side(
            moments.output_statistics, moments.output_basis, product, moments.nu_NIO, axis=2
        )
        moments = moments._replace(output_statistics=statistics, output_basis=basis, nu_NIO=nu_NIO)
    return moments
