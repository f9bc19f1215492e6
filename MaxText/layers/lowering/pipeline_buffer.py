"""The buffer of microbatches that wait at a pipeline stage."""

import jax
import jax.numpy as jnp


@jax.custom_vjp
def replace_slot(waiting_SMbT: jax.Array, arrived_SbT: jax.Array, slot: jax.Array) -> jax.Array:
    """Returns the waiting microbatches with one slot replaced, for every backend.

    In the backward pass the gradient of the slot is read and then cleared. XLA would read it after
    it is cleared, from a copy of all slots. A barrier makes it read first.

    Args:
      waiting_SMbT: Inputs of each stage S, one for each of M microbatches [b, T, ...].
      arrived_SbT: Outputs of the stages before them.
      slot: Index of the microbatch.
    """
    return jax.lax.dynamic_update_index_in_dim(waiting_SMbT, arrived_SbT, slot, 1)


def take_slot(waiting_SMbT: jax.Array, slot: jax.Array | int) -> jax.Array:
    """Returns one microbatch of each stage, [S, b, T, ...]."""
    return jax.lax.dynamic_index_in_dim(waiting_SMbT, slot, 1, keepdims=False)


def _replace_slot_forward(
    waiting_SMbT: jax.Array, arrived_SbT: jax.Array, slot: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the new buffer; the residual is the index of the slot."""
    return replace_slot(waiting_SMbT, arrived_SbT, slot), slot


def _replace_slot_backward(slot: jax.Array, gradient_SMbT: jax.Array):
    """Returns the buffer's gradient without that of the slot, and that of the slot."""
    grad_arrived_SbT, gradient_SMbT = jax.lax.optimization_barrier(
        (take_slot(gradient_SMbT, slot), gradient_SMbT)
    )
    cleared_SbT = jnp.zeros_like(grad_arrived_SbT)
    grad_waiting_SMbT = jax.lax.dynamic_update_index_in_dim(gradient_SMbT, cleared_SbT, slot, 1)
    return grad_waiting_SMbT, grad_arrived_SbT, None


replace_slot.defvjp(_replace_slot_forward, _replace_slot_backward)
