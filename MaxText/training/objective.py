"""The causal language-model loss, over the whole sequence at once or in chunks of it.

Legend: B sequences, T tokens, D emb_dim, V vocab_size, C chunks.
"""

import jax
import jax.numpy as jnp

from MaxText.configuration.model_sections import Objective
from MaxText.input_pipeline.batch import Batch
from MaxText.layers.decoder import Decoder


@jax.custom_vjp
def cross_entropy(logits_BTV: jax.Array, targets_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """-log softmax(logits)[target] and log of the normaliser, each float32 [B, T].

    Written with its own gradient, softmax(logits) - onehot(target), so that the backward pass is
    one sweep over [B, T, V]: no scatter, no one-hot array, nothing kept but the logits.
    """
    return _cross_entropy_forward(logits_BTV, targets_BT)[0]


def _cross_entropy_forward(logits_BTV, targets_BT):
    log_normalizer_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
    target_logits_BT = jnp.take_along_axis(logits_BTV, targets_BT[..., None], axis=-1)[..., 0]
    outputs = log_normalizer_BT - target_logits_BT, log_normalizer_BT
    return outputs, (logits_BTV, targets_BT, log_normalizer_BT)


def _cross_entropy_backward(kept, gradients):
    logits_BTV, targets_BT, log_normalizer_BT = kept
    of_loss_BT, of_normalizer_BT = gradients
    probabilities_BTV = jnp.exp(logits_BTV - log_normalizer_BT[..., None])
    is_target_BTV = jnp.arange(logits_BTV.shape[-1]) == targets_BT[..., None]
    gradient_BTV = probabilities_BTV * (of_loss_BT + of_normalizer_BT)[..., None]
    return gradient_BTV - jnp.where(is_target_BTV, of_loss_BT[..., None], 0.0), None


cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


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
