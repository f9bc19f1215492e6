"""Concatenation of blocks of tokens whose compilation is fast on CPU."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp


def concatenate_tokens(blocks_BTNH: Sequence[jax.Array]) -> jax.Array:
    """Returns blocks [B, T, N, H] concatenated over T.

    Works around: XLA for CPU takes long to compile a concatenation of transposed blocks, which the
    outputs of attention are. Concatenated with heads before tokens, the transposes cancel.

    Args:
      blocks_BTNH: Consecutive blocks of tokens. A single block is returned as it is.
    """
    if len(blocks_BTNH) == 1:
        return blocks_BTNH[0]
    by_head = [block.swapaxes(1, 2) for block in blocks_BTNH]
    return jnp.concatenate(by_head, axis=2).swapaxes(1, 2)
