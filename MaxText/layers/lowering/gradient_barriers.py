"""Optimization barriers on gradients: the order in which a backward pass is computed.

XLA chooses when to compute a weight gradient. If it postpones one, the operands of that gradient,
activations, stay in memory until then. A barrier makes everything that passes through it wait for
everything else that does.
"""

from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero

from MaxText.value_types import PyTree

# An array; or a SymbolicZero, where a backward pass asks for symbolic zeros.
Gradient = Any


def is_zero(gradient: Gradient) -> bool:
    """Returns whether a gradient is known to be zero while tracing (see `symbolic_zeros`)."""
    return isinstance(gradient, SymbolicZero)


def barrier(gradients: PyTree) -> PyTree:
    """Returns a tree of gradients that all wait for each other; None for a symbolic zero.

    None instead of an array of zeros, which would have to be computed to pass the barrier.
    """
    leaves, structure = jax.tree.flatten(gradients, is_leaf=is_zero)
    waiting = [gradient for gradient in leaves if not is_zero(gradient)]
    barriered = iter(jax.lax.optimization_barrier(waiting))
    return jax.tree.unflatten(
        structure, [None if is_zero(gradient) else next(barriered) for gradient in leaves]
    )


@jax.custom_vjp
def barrier_gradients(values: PyTree) -> PyTree:
    """Returns `values`; their gradients pass one optimization barrier.

    For any backend. The forward pass has no barrier.
    """
    return values


# With symbolic zeros, arguments are pairs (value, perturbed).
barrier_gradients.defvjp(
    lambda values: (jax.tree.map(lambda x: x.value, values), None),
    lambda _, gradients: (barrier(gradients),),
    symbolic_zeros=True,
)
