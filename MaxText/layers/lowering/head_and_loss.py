"""The head and the loss on TPU: when logits and their gradients leave memory.

Legend: B sequences, T tokens, D emb_dim, V vocab_size.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from MaxText.layers.lowering.gradient_barriers import barrier_gradients
from MaxText.parallelism.logical_sharding import platform


def target_logits(
    logits_BTV: jax.Array, targets_BT: jax.Array, log_normalizer_BT: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the logit of each target [B, T], and `log_normalizer_BT`.

    On TPU a gather reads float32 logits from memory, as a copy. So the target's logit is a masked
    sum over the vocabulary there, which has the same bits. XLA may postpone this sum, and keep the
    logits through the backward pass: a barrier joins it to the normalizer.
    """
    if platform() != "tpu":
        logits_BT1 = jnp.take_along_axis(logits_BTV, targets_BT[..., None], axis=-1)
        return logits_BT1[..., 0], log_normalizer_BT
    is_target_BTV = jnp.arange(logits_BTV.shape[-1]) == targets_BT[..., None]
    target_logits_BT = jnp.sum(jnp.where(is_target_BTV, logits_BTV, 0.0), axis=-1)
    return jax.lax.optimization_barrier((target_logits_BT, log_normalizer_BT))


def head_gradients_first(
    h_BTD: jax.Array, head: nnx.Module, token_embedder: nnx.Module
) -> jax.Array:
    """Returns h_BTD; on TPU its gradient waits for those of the head's parameters.

    XLA otherwise computes them after the backward pass of the layers, and keeps the gradient of
    the logits until then: 1 of 12 GB for a 7B model (benchmarks/compiled.py). The barrier is on
    gradients alone, so call this before the head reads anything.

    Args:
      h_BTD: Hidden states that the head reads.
      head: Its parameters are replaced, in place, by those that pass the barrier.
      token_embedder: The same; a tied head reads its table.
    """
    if platform() != "tpu":
        return h_BTD
    parts = (head, token_embedder)
    weights, h_BTD = barrier_gradients(([nnx.state(part) for part in parts], h_BTD))
    for part, values in zip(parts, weights, strict=True):
        nnx.update(part, values)
    return h_BTD
