"""Multi-token prediction: each position also predicts the tokens after the next one.

DeepSeek-V3, section 2.2 (https://arxiv.org/abs/2412.19437). Depth k of K joins the hidden state of
depth k - 1 with the embedding of token t + k, applies a block, and predicts token t + k + 1 with
the embedding and the head of the model:

    x_k,t = W_k [norm(emb(token_t+k)); norm(h_k-1,t)]
    h_k   = norm(block_k(x_k))
    loss  = CE(head(h_0), token_t+1) + lambda mean over k and t of CE(head(h_k), token_t+k+1)

h_k is what the head reads. So h_0 is the hidden state after the final norm, and every depth has a
final norm of its own. The paper does not say which side of the norm a depth reads; programs that
serve the published weights of DeepSeek-V3, GLM-4.5 and Qwen3-Next give depth 1 the normalized
state.

A block is one like the last layer of the model. Inference uses no weight of this objective.

Legend: B sequences, T tokens, D emb_dim, V vocab_size.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from MaxText.config.model_sections import LayerConfig, ModelConfig
from MaxText.layers.assembly.decoder import Decoder, make_final_norm, make_layer
from MaxText.layers.assembly.remat import apply_remat
from MaxText.layers.batch import Batch
from MaxText.layers.capture import scope
from MaxText.layers.context import ForwardContext
from MaxText.layers.dense import Dense
from MaxText.layers.normalization import make_norm
from MaxText.layers.params import Init
from MaxText.layers.part import LayerInputs, Scalars, register
from MaxText.layers.part_scalars import Losses, add_scalars
from MaxText.parallelism.logical_sharding import HIDDEN, with_logical_constraint
from MaxText.training.model_objective import (
    Objective,
    ObjectiveContext,
    ObjectiveSums,
    logits_of,
)
from MaxText.training.objective import cross_entropy, cross_entropy_losses

_LOSS = "mtp_loss"


class PredictionDepth(nnx.Module):
    """The weights of one depth, without embedding and head."""

    not_recomputed = ("block",)  # as in layers/part.py; the block says itself what is

    def __init__(self, config: ModelConfig, init: Init, rngs: nnx.Rngs):
        """Builds the norms, the projection and the block.

        Args:
          config: Of the model.
          init: Sizes, initializers and dtypes.
          rngs: RNG streams that weights are drawn from.
        """
        D = init.dimensions.emb_dim
        kernel = init.initializers.kernel
        layer = config.layers[-1]
        norm = layer.config.block
        parametric = norm.block_norm_parametric
        self.embedding_norm = make_norm(norm, init, rngs, parametric=parametric)
        self.hidden_norm = make_norm(norm, init, rngs, parametric=parametric)
        # Its two inputs are the embedding and the hidden state, in this order.
        self.projection = Dense((2, D), (D,), (None, "mlp", "embed"), kernel, init, rngs)
        self.block = make_layer(config, layer, rngs)
        self.final_norm = make_final_norm(config, init, rngs)

    def block_output(
        self, h_BTD: jax.Array, embedding_BTD: jax.Array, context: ForwardContext
    ) -> tuple[jax.Array, Scalars]:
        """Returns the block's output [B, T, D], and scalars as of a layer.

        Args:
          h_BTD: What the head reads at the depth before.
          embedding_BTD: Embedding of token t + k at each position t.
          context: Of the block.
        """
        inputs = (self.embedding_norm(embedding_BTD), self.hidden_norm(h_BTD))
        x_BTD = self.projection(jnp.stack(inputs, axis=2))
        x_BTD = with_logical_constraint(x_BTD, *HIDDEN)
        y_BTD, scalars, _ = self.block(LayerInputs.all(x_BTD), context)
        return y_BTD, scalars


@register("objective", "multi_token_prediction")
class MultiTokenPrediction(Objective):
    """Cross entropy of the next token, and of the mtp_num_layers tokens after it.

    `mtp_loss` is the mean over all predictions of further tokens, times mtp_loss_scaling_factor.
    Those within one document count, with the weights of their targets. `mtp_cross_entropy_k` is the
    mean at depth k, in nats.
    """

    rows = "multi-token prediction"
    layer_attributes = ("depths",)
    not_recomputed = ("depths",)

    def __init__(self, config: ModelConfig, init: Init, rngs: nnx.Rngs):
        self.config = config.objective
        self.depths = nnx.Dict(
            {
                str(index): PredictionDepth(config, init, rngs)
                for index in range(self.config.mtp_num_layers)
            }
        )

    @classmethod
    def own_layers(cls, config: ModelConfig) -> tuple[LayerConfig, ...]:
        """Returns the last layer of the model, once for each depth."""
        return config.layers[-1:] * config.objective.mtp_num_layers

    @classmethod
    def num_head_passes(cls, config: ModelConfig) -> int:
        """Returns the number of depths."""
        return config.objective.mtp_num_layers

    @classmethod
    def weights(cls, config: ModelConfig, batch: Batch) -> Losses:
        """Returns the weights of the targets of each depth, and of all depths together."""
        depths = range(1, config.objective.mtp_num_layers + 1)
        by_depth = {_metric(depth): jnp.sum(target_weights(batch, depth)) for depth in depths}
        total = sum(by_depth.values(), start=jnp.float32(0))
        return {_LOSS: total, **by_depth}

    def __call__(
        self, decoder: Decoder, batch: Batch, h_BTD: jax.Array, context: ObjectiveContext
    ) -> ObjectiveSums:
        """Returns the losses of the next token and of the tokens after it.

        Args:
          decoder: The model.
          batch: Its targets and their weights.
          h_BTD: Hidden states after the final norm.
          context: Chunks of the sequence, and the RNG key of dropout.
        """
        sums = self._next_token(decoder, batch, h_BTD, context)
        layer_scalars: Scalars = {}
        by_depth = {}
        policy = decoder.config.memory.remat_policy
        for depth, part in enumerate(self.depths.values(), start=1):
            # Positions without a target of this depth read a token of another document, or token 0.
            # They are the last ones of their document: no position with a target attends to them.
            with scope(f"multi_token_prediction/{depth}"):
                embedding_BTD = decoder.embed_tokens(shifted(batch.tokens_BT, depth))
                block_context = _block_context(part, depth, decoder, batch, context)
                block_output = functools.partial(part.block_output, context=block_context)
                block_output = apply_remat(block_output, policy, in_scan=False)
                y_BTD, scalars = block_output(h_BTD, embedding_BTD)
                h_BTD = y_BTD if part.final_norm is None else part.final_norm(y_BTD)
            layer_scalars = add_scalars(layer_scalars, scalars)
            by_depth[_metric(depth)] = _cross_entropy(depth, decoder, batch, h_BTD, context)
        total = sum(by_depth.values(), start=jnp.float32(0))
        mtp_loss = self.config.mtp_loss_scaling_factor * total
        return sums._replace(
            losses={**sums.losses, _LOSS: mtp_loss},
            metrics=jax.lax.stop_gradient(by_depth),
            layer_scalars=layer_scalars,
        )

    def _next_token(
        self, decoder: Decoder, batch: Batch, h_BTD: jax.Array, context: ObjectiveContext
    ) -> ObjectiveSums:
        """Returns the losses of the objective cross_entropy, for the next token."""

        def sums(
            logits: Callable[[], jax.Array], targets_BT: jax.Array, loss_mask_BT: jax.Array
        ) -> ObjectiveSums:
            losses, log_z_BT = cross_entropy_losses(self.config, logits(), targets_BT)
            return ObjectiveSums(
                losses={name: jnp.sum(loss_BT * loss_mask_BT) for name, loss_BT in losses.items()},
                log_z=None if log_z_BT is None else jnp.sum(log_z_BT * loss_mask_BT),
            )

        logits = logits_of(decoder, batch, h_BTD)
        return context.in_chunks(sums, logits, batch.targets_BT, batch.loss_mask_BT)


def shifted(x_BT: jax.Array, count: int) -> jax.Array:
    """Returns x_BT[:, t + count] at each position t, and 0 behind the end of the sequence."""
    return jnp.pad(x_BT[:, count:], ((0, 0), (0, min(count, x_BT.shape[1]))))


def target_weights(batch: Batch, depth: int) -> jax.Array:
    """Returns the weights of the targets of a depth, float32 [B, T].

    The target at position t is that of position t + depth. It counts with its own weight, if both
    positions are in the same document and in the same sequence.

    Args:
      batch: Arrays [B, T].
      depth: From 1.
    """
    weights_BT = shifted(batch.loss_mask_BT, depth)
    if batch.segments_BT is None:
        return weights_BT
    return weights_BT * (batch.segments_BT == shifted(batch.segments_BT, depth))


def _metric(depth: int) -> str:
    """Returns the name of the cross entropy of a depth."""
    return f"mtp_cross_entropy_{depth}"


def _block_context(
    part: PredictionDepth, depth: int, decoder: Decoder, batch: Batch, context: ObjectiveContext
) -> ForwardContext:
    """Returns the context of the block of a depth: that of the last layer, with a key of its own.

    Args:
      part: The weights of the depth.
      depth: From 1.
      decoder: The model.
      batch: Arrays [B, T].
      context: Has the RNG key of dropout.
    """
    key = context.dropout_key
    if key is not None:
        key = jax.random.fold_in(key, 2**31 - 1 - depth)  # an index that no layer has
    forward_context = decoder.forward_context(batch, key, training=context.training)
    last_layer = decoder.config.shape.dimensions.num_layers - 1
    return forward_context.for_layer(last_layer, None, part.block.position_index)


def _cross_entropy(
    depth: int, decoder: Decoder, batch: Batch, h_BTD: jax.Array, context: ObjectiveContext
) -> jax.Array:
    """Returns the weighted sum of the cross entropy of a depth.

    Args:
      depth: From 1.
      decoder: The model.
      batch: Arrays [B, T].
      h_BTD: What the head reads at this depth.
      context: Chunks of the sequence.
    """

    def sums(
        logits: Callable[[], jax.Array], targets_BT: jax.Array, weights_BT: jax.Array
    ) -> jax.Array:
        losses_BT, _ = cross_entropy(logits(), targets_BT)
        return jnp.sum(losses_BT * weights_BT)

    logits = logits_of(decoder, batch, h_BTD)
    targets_BT = shifted(batch.targets_BT, depth)
    return context.in_chunks(sums, logits, targets_BT, target_weights(batch, depth))
