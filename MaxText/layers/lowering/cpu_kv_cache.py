"""The layout of a KV cache that XLA on CPU updates in place."""

import jax


def drop_batch_of_one(slots_BKSH: jax.Array) -> jax.Array:
    """Returns cache slots without their batch dimension if it is 1: [K, S, H].

    Works around: with a batch dimension of 1, XLA on CPU copies all slots twice per decoding step.
    Measured: these copies take a third of the time of reading a small model.

    Args:
      slots_BKSH: Keys or values of all sequences.

    Returns:
      [K, S, H] for one sequence, else `slots_BKSH`. Readers tell them apart by the number of
      dimensions.
    """
    return slots_BKSH[0] if len(slots_BKSH) == 1 else slots_BKSH
