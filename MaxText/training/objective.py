"""Language-model losses, over the whole sequence or in chunks.

`loss_sums` is the forward pass of the train step and of the evaluation: hidden states, logits, and
the losses of the objective, summed over targets. Its callers divide.

Legend: B sequences, T tokens, D emb_dim, V vocab_size, C chunks of a sequence.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from MaxText.config.model_sections import ObjectiveConfig
from MaxText.config.registry import lookup, register
from MaxText.layers.assembly.decoder import Decoder
from MaxText.layers.batch import Batch
from MaxText.layers.entmax import entmax_loss
from MaxText.layers.lowering.head_and_loss import head_gradients_first, target_logits
from MaxText.layers.part import Scalars
from MaxText.layers.part_outputs import check

IN_NATS = "lm_loss"  # name of a loss that is a cross entropy, in nats
# Losses by name, and log(Z) or None; float32 [B, T] each.
LossesAndLogZ = tuple[dict[str, jax.Array], jax.Array | None]
# Of the cross entropy: logits [B, T, V], targets [B, T] and log Z [B, T].
_Residuals = tuple[jax.Array, jax.Array, jax.Array]


@jax.custom_vjp
def cross_entropy(logits_BTV: jax.Array, targets_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns -log softmax(logits)[target] and log Z, float32 [B, T] each.

    Has its own gradient, softmax(logits) - onehot(target), so that the backward pass is one sweep
    over [B, T, V]: no scatter, no one-hot array, only the logits are saved. The gradient of log Z
    is softmax(logits).
    """
    return _cross_entropy_forward(logits_BTV, targets_BT)[0]


def _cross_entropy_forward(
    logits_BTV: jax.Array, targets_BT: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], _Residuals]:
    """Returns the outputs of `cross_entropy`, and its residuals: logits, targets and log Z."""
    log_normalizer_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
    target_logits_BT, log_normalizer_BT = target_logits(logits_BTV, targets_BT, log_normalizer_BT)
    outputs = log_normalizer_BT - target_logits_BT, log_normalizer_BT
    return outputs, (logits_BTV, targets_BT, log_normalizer_BT)


def _cross_entropy_backward(
    residuals: _Residuals, gradients: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, None]:
    """Returns the gradient with respect to the logits [B, T, V]; None for the targets.

    With p = softmax(logits): d loss / d logits = p - onehot(target), d log Z / d logits = p.
    """
    logits_BTV, targets_BT, log_normalizer_BT = residuals
    grad_loss_BT, grad_log_normalizer_BT = gradients
    probabilities_BTV = jnp.exp(logits_BTV - log_normalizer_BT[..., None])
    is_target_BTV = jnp.arange(logits_BTV.shape[-1]) == targets_BT[..., None]
    grad_logits_BTV = probabilities_BTV * (grad_loss_BT + grad_log_normalizer_BT)[..., None]
    return grad_logits_BTV - jnp.where(is_target_BTV, grad_loss_BT[..., None], 0.0), None


cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


class LossSums(NamedTuple):
    """Sums over a batch, or over a part of one; float32 scalars.

    Weights are those of the targets, `Batch.loss_mask_BT`.
    """

    target_sums: Scalars  # weighted; to divide by the sum of the weights
    token_sums: Scalars  # losses of layers (routers); to divide by `num_tokens`
    correct: jax.Array | None = None  # weight of targets that are the (first) argmax, if counted
    log_z: jax.Array | None = None  # weighted sum of log(Z), which grows when logits drift
    # Weighted sum of the cross entropy in nats beside an objective that has none. Not minimized: it
    # compares models that are trained with different objectives.
    nats: jax.Array | None = None

    @property
    def total(self) -> jax.Array:
        """Sum of all losses at the targets."""
        return sum(self.target_sums.values())  # type: ignore[return-value]

    @property
    def in_nats(self) -> jax.Array:
        """Sum of weighted negative log-probabilities, or else the total."""
        return self.target_sums.get(IN_NATS, self.total)

    def means(self, weight: jax.Array, tokens: jax.Array) -> Scalars:
        """Returns every loss; their sum is minimized.

        Args:
          weight: Sum of the weights of the targets.
          tokens: From `num_tokens`.
        """
        return {name: value / weight for name, value in self.target_sums.items()} | {
            name: value / tokens for name, value in self.token_sums.items()
        }


def num_tokens(batch: Batch) -> jax.Array:
    """Returns the number of tokens in a batch without padding, at least 1."""
    if batch.segments_BT is None:
        return jnp.float32(batch.tokens_BT.size)
    return jnp.maximum(jnp.sum(batch.segments_BT > 0).astype(jnp.float32), 1.0)


@register("objective", "cross_entropy")
def cross_entropy_losses(
    config: ObjectiveConfig, logits_BTV: jax.Array, targets_BT: jax.Array
) -> LossesAndLogZ:
    """Returns cross entropy in nats, and z-loss (PaLM, section 5)."""
    losses_BT, log_z_BT = cross_entropy(logits_BTV, targets_BT)
    z_losses_BT = config.z_loss_multiplier * jnp.square(log_z_BT)
    return {IN_NATS: losses_BT, "z_loss": z_losses_BT}, log_z_BT


@register("objective", "entmax")
def entmax_losses(
    config: ObjectiveConfig, logits_BTV: jax.Array, targets_BT: jax.Array
) -> LossesAndLogZ:
    """Returns the alpha-entmax loss; alpha = 1 is softmax."""
    if config.entmax_alpha > 1:
        return {"entmax_loss": entmax_loss(logits_BTV, targets_BT, config.entmax_alpha)}, None
    losses_BT, log_z_BT = cross_entropy(logits_BTV, targets_BT)
    return {"entmax_loss": losses_BT}, log_z_BT


def per_token_losses(
    logits_BTV: jax.Array, targets_BT: jax.Array, config: ObjectiveConfig
) -> LossesAndLogZ:
    """Returns the losses of the registered objective at each target.

    An objective is a function of its own keys (else of `config`), float32 logits
    [B, T, V] and targets [B, T]. It returns losses by name, float32 [B, T] each, whose sum is
    minimized, and log(Z) [B, T] or None. A loss named lm_loss is a cross entropy in nats, so it has
    a perplexity. Beside an objective without one, `loss_sums` computes it from the logits. Names of
    other metrics of a step, such as grad_norm, are not free: that metric replaces the loss.

    T may be a chunk of the sequence (num_vocab_tiling), and `is_in_nats` traces the objective with
    logits [1, 1, 2], so the sizes come from the arrays and not from the configuration.
    """
    objective = lookup("objective", config.loss_type)
    outputs = objective(config.parts.of(objective) or config, logits_BTV, targets_BT)
    shapes = {jnp.shape(array) for array in jax.tree.leaves(outputs)}
    is_pair = isinstance(outputs, tuple) and len(outputs) == 2 and isinstance(outputs[0], dict)
    is_valid = is_pair and bool(outputs[0]) and shapes == {targets_BT.shape}
    expected = f"({{name: losses}}, log_z or None), each {list(targets_BT.shape)} as the targets"
    check(is_valid, objective, "", outputs, expected)
    return outputs


def is_in_nats(config: ObjectiveConfig) -> bool:
    """Returns whether a loss is in nats and has a perplexity.

    Traces the objective for the names of its losses, with a single token and a vocabulary of 2.
    """
    shapes = jax.ShapeDtypeStruct((1, 1, 2), jnp.float32), jax.ShapeDtypeStruct((1, 1), jnp.int32)
    losses, _ = jax.eval_shape(functools.partial(per_token_losses, config=config), *shapes)
    return IN_NATS in losses


class _HeadSums(NamedTuple):
    """Sums of what the head's logits give, over the tokens of a batch or of a chunk."""

    losses: Scalars  # by name, weighted
    correct: jax.Array | None  # as in LossSums
    log_z: jax.Array | None
    nats: jax.Array | None


def loss_sums(
    decoder: Decoder,
    batch: Batch,
    config: ObjectiveConfig,
    dropout_key: jax.Array | None = None,
    *,
    training: bool = False,
    count_correct: bool = False,
) -> LossSums:
    """Returns the losses as sums, to add up microbatches.

    With num_vocab_tiling, logits are computed for one chunk of the sequences' length at a time, and
    the backward pass recomputes them.

    Args:
      decoder: The model with its parameters (`Model.merge`).
      batch: Arrays [B, T].
      config: Of the objective.
      dropout_key: Random key of dropout and routing; None for none.
      training: Whether the model is trained, as opposed to evaluated.
      count_correct: Whether to count the targets that are the most probable token.
    """
    h_BTD, scalars = decoder.hidden_states(batch, dropout_key, training=training)
    if training:  # so that there are gradients, whose order matters on TPU
        h_BTD = head_gradients_first(h_BTD, decoder.head, decoder.token_embedder)
    head_state = decoder.head_state(h_BTD, batch)  # None unless the head reads other tokens
    # In the sequence, to tell a head its chunk. Those in `batch` are positions in the document.
    positions_BT = jnp.broadcast_to(jnp.arange(h_BTD.shape[1]), h_BTD.shape[:2])

    def head_sums(
        h_BTD: jax.Array, targets_BT: jax.Array, loss_mask_BT: jax.Array, positions_BT: jax.Array
    ) -> _HeadSums:
        """Returns sums over a chunk of tokens: h_BTD [b, t, D] and [b, t] of the others."""
        logits_BTV = decoder.logits(h_BTD, head_state, positions_BT)
        losses, log_z_BT = per_token_losses(logits_BTV, targets_BT, config)
        summed = {name: jnp.sum(loss_BT * loss_mask_BT) for name, loss_BT in losses.items()}
        log_z = None if log_z_BT is None else jnp.sum(log_z_BT * loss_mask_BT)
        nats = None
        if IN_NATS not in losses:
            nats_BT, _ = cross_entropy(jax.lax.stop_gradient(logits_BTV), targets_BT)
            nats = jnp.sum(nats_BT * loss_mask_BT)
        correct = None
        if count_correct:
            is_correct_BT = jnp.argmax(logits_BTV, axis=-1) == targets_BT
            correct = jnp.sum(is_correct_BT * loss_mask_BT)
        return _HeadSums(summed, correct, log_z, nats)

    tokens = (h_BTD, batch.targets_BT, batch.loss_mask_BT, positions_BT)
    if config.num_vocab_tiling == 1:
        sums = head_sums(*tokens)
    else:
        chunks = tuple(_split_length(x, config.num_vocab_tiling) for x in tokens)
        # The backward pass recomputes a chunk's logits instead of saving all of them.
        chunk_sums = jax.lax.map(lambda chunk: jax.checkpoint(head_sums)(*chunk), chunks)
        sums = jax.tree.map(jnp.sum, chunk_sums)
    return LossSums(
        target_sums=sums.losses,
        token_sums=scalars,
        correct=sums.correct,
        log_z=sums.log_z,
        nats=sums.nats,
    )


def _split_length(x_BT: jax.Array, num_chunks: int) -> jax.Array:
    """Reshapes [B, T, ...] to [chunks, B, T / chunks, ...]."""
    batch_size, length = x_BT.shape[:2]
    x_BCT = x_BT.reshape(batch_size, num_chunks, length // num_chunks, *x_BT.shape[2:])
    return jnp.moveaxis(x_BCT, 1, 0)
