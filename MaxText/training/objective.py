"""The causal language-model loss, over the whole sequence at once or in chunks of it.

Legend: B sequences, T tokens, D emb_dim, V vocab_size, C chunks.
"""

import jax
import jax.numpy as jnp

from MaxText.configuration.model_sections import Objective
from MaxText.input_pipeline.batch import Batch
from MaxText.layers.decoder import Decoder


def cross_entropy(logits_BTV: jax.Array, targets_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """-log softmax(logits)[target] and log of the normaliser, each float32 [B, T].

    The target's logit is picked by a comparison that fuses into the sum: no one-hot array exists,
    its gradient is no scatter, and it works where the vocabulary is split over devices.
    """
    log_normalizer_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
    is_target = jnp.arange(logits_BTV.shape[-1]) == targets_BT[..., None]
    target_logits_BT = jnp.sum(jnp.where(is_target, logits_BTV, 0.0), axis=-1)
    return log_normalizer_BT - target_logits_BT, log_normalizer_BT


def loss_sums(
    decoder: Decoder, batch: Batch, section: Objective, dropout_key: jax.Array | None = None
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Weighted sums over the batch's targets; the caller divides by the sum of the weights.

    Returns:
      The sum to minimise, and {"lm_loss": sum of cross entropy, "z_loss": sum of
      z_loss_multiplier * log(Z)^2 (PaLM, section 5)}.
    """
    h_BTD, scalars = decoder.hidden(batch, dropout_key)

    def sums(h_BTD, targets_BT, weights_BT):
        losses_BT, log_normalizer_BT = cross_entropy(decoder.logits(h_BTD), targets_BT)
        z_losses_BT = section.z_loss_multiplier * jnp.square(log_normalizer_BT)
        return jnp.sum(losses_BT * weights_BT), jnp.sum(z_losses_BT * weights_BT)

    num_chunks = section.num_vocab_tiling
    if num_chunks == 1:
        lm_loss, z_loss = sums(h_BTD, batch.targets_BT, batch.weights_BT)
    else:

        def in_chunks(x_BT):
            batch_size, length = x_BT.shape[:2]
            x_BCT = x_BT.reshape(batch_size, num_chunks, length // num_chunks, *x_BT.shape[2:])
            return jnp.moveaxis(x_BCT, 1, 0)

        # The backward pass computes a chunk's logits again instead of keeping all of them.
        chunk_sums = jax.lax.map(
            lambda chunk: jax.checkpoint(sums)(*chunk),
            (in_chunks(h_BTD), in_chunks(batch.targets_BT), in_chunks(batch.weights_BT)),
        )
        lm_loss, z_loss = jax.tree.map(jnp.sum, chunk_sums)
    metrics = {"lm_loss": lm_loss, "z_loss": z_loss} | scalars
    return lm_loss + z_loss, metrics
