"""What recurrent mixers share: whole sequences, prompts and new tokens are one computation.

Legend: B sequences, T tokens, D emb_dim.
"""

import jax

from MaxText.layers.context import ForwardContext
from MaxText.layers.part import DecodeState, Mixer, Scalars


class RecurrentMixer(Mixer):
    """A mixer that goes on from a state of fixed size, with `advance` as its only computation."""

    def advance(
        self, x_BTD: jax.Array, state: DecodeState, context: ForwardContext
    ) -> tuple[jax.Array, DecodeState]:
        """Returns the output of further tokens [B, T, D], and the state after them.

        Args:
          x_BTD: Normalized input.
          state: State before the first token; None is that of an empty sequence.
          context: Facts about the batch.
        """
        raise NotImplementedError

    def __call__(self, x_BTD: jax.Array, context: ForwardContext) -> tuple[jax.Array, Scalars]:
        """Returns the output [B, T, D], and no losses."""
        y_BTD, _ = self.advance(x_BTD, None, context)
        return y_BTD, {}

    def prefill(self, x_BTD: jax.Array, context: ForwardContext) -> tuple[jax.Array, DecodeState]:
        """Returns the output of prompts, and the state after them."""
        return self.advance(x_BTD, None, context)

    def decode_step(
        self, x_BTD: jax.Array, state: DecodeState, context: ForwardContext
    ) -> tuple[jax.Array, DecodeState]:
        """Returns the output of new tokens, and the state after them."""
        return self.advance(x_BTD, state, context)
