"""An auxiliary loss on a hidden layer: predict the next token from there, too.

    python MaxText/train.py examples/hidden_layer_loss.yml

The output of a layer in the middle gets a linear probe of its own, whose cross entropy is added to
that of the model (deep supervision, Lee et al. 2015, https://arxiv.org/abs/1409.5185; as early
exits in LayerSkip, Elhoushi et al. 2024, https://arxiv.org/abs/2404.16710):

    loss = CE(head(norm(h_L)), targets) + w CE(W h_l / rms(h_l), targets)

Legend: B sequences, T tokens, D emb_dim, V vocab_size.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from MaxText.config.keys import Section, key
from MaxText.config.layer_sections import Dimensions
from MaxText.layers.assembly.decoder import Decoder
from MaxText.layers.batch import Batch
from MaxText.layers.dense import Dense
from MaxText.layers.part import Init, register
from MaxText.training.model_objective import (
    Objective,
    ObjectiveContext,
    ObjectiveSums,
    logits_of,
)
from MaxText.training.objective import cross_entropy


class Keys(Section):
    """Loss on a hidden layer."""

    probed_layer: int = key(1, "Layer whose output the probe reads, from 0.", ge=0)
    probe_weight: float = key(0.3, "Weight of the probe's cross entropy.", ge=0)


@register("objective", "hidden_layer", keys=Keys)
class HiddenLayerLoss(Objective):
    """Cross entropy of the model, and of a probe of one of its layers."""

    def __init__(self, config: Keys, init: Init, rngs: nnx.Rngs):
        self.config = config
        D = init.dimensions.emb_dim
        V = init.dimensions.vocab_size
        kernel = init.initializers.kernel
        self.probe = Dense((D,), (V,), ("embed", "vocab"), kernel, init, rngs)

    @classmethod
    def problem(cls, config: Keys, dimensions: Dimensions) -> str | None:
        """Returns why the layer cannot be read, or None."""
        if config.probed_layer < dimensions.num_layers:
            return None
        last = dimensions.num_layers - 1
        return f"probed_layer={config.probed_layer}, and the last layer is {last}"

    def read_layers(self) -> Sequence[int]:
        """Returns the layer that the probe reads."""
        return (self.config.probed_layer,)

    def __call__(
        self, decoder: Decoder, batch: Batch, h_BTD: jax.Array, context: ObjectiveContext
    ) -> ObjectiveSums:
        """Returns both cross entropies, and the share of targets that the probe ranks first.

        Args:
          decoder: The model.
          batch: Its targets and their weights.
          h_BTD: Final hidden states.
          context: Has the output of the probed layer.
        """
        probed_BTD = context.layer_outputs[self.config.probed_layer]

        def sums(
            logits: Callable[[], jax.Array],
            probed_BTD: jax.Array,
            targets_BT: jax.Array,
            loss_mask_BT: jax.Array,
        ) -> ObjectiveSums:
            """Returns the sums of a chunk of tokens."""
            losses_BT, _ = cross_entropy(logits(), targets_BT)
            probe_logits_BTV = self.probe(unit_rms(probed_BTD)).astype(jnp.float32)
            probe_losses_BT, _ = cross_entropy(probe_logits_BTV, targets_BT)
            is_first_BT = jnp.argmax(probe_logits_BTV, axis=-1) == targets_BT
            probe_loss = jnp.sum(probe_losses_BT * loss_mask_BT)
            return ObjectiveSums(
                losses={
                    "lm_loss": jnp.sum(losses_BT * loss_mask_BT),
                    "probe_loss": self.config.probe_weight * probe_loss,
                },
                metrics={"probe_accuracy": jnp.sum(is_first_BT * loss_mask_BT)},
            )

        logits = logits_of(decoder, batch, h_BTD)
        return context.in_chunks(sums, logits, probed_BTD, batch.targets_BT, batch.loss_mask_BT)


def unit_rms(x_BTD: jax.Array) -> jax.Array:
    """Returns hidden states divided by their root mean square."""
    square_BT1 = jnp.mean(jnp.square(x_BTD.astype(jnp.float32)), axis=-1, keepdims=True)
    return (x_BTD * jax.lax.rsqrt(square_BT1 + 1e-6)).astype(x_BTD.dtype)
