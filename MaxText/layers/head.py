"""Heads: from the final hidden states to logits. The plain one, and the protocol of others.

    @register("head", "my_head", keys=MyKeys)
    class MyHead(Head):
        def __init__(self, keys, init, rngs): ...                        # declares weights
        def __call__(self, h_BTD, table, state, places_BT): ...          # float32 logits

Legend: B sequences, T tokens, D emb_dim, V vocab_size.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from MaxText.configuration.layer_sections import Dimensions
from MaxText.configuration.model_sections import Layer, Model
from MaxText.configuration.registry import lookup
from MaxText.layers.context import Context
from MaxText.layers.dense import Dense
from MaxText.layers.embedding import Embedding
from MaxText.layers.part import Init, Part


class Head(Part):
    """Turns normalized hidden states of the last layer into logits.

    With num_vocab_tiling the backward pass computes `__call__` again, but not `state`: its weights
    are among those in `not_recomputed`.
    """

    rows = "head"

    def __call__(
        self, h_BTD: jax.Array, table: Embedding, state: Any, places_BT: jax.Array
    ) -> jax.Array:
        """Float32 logits [B, T, V]; T may be any part of the sequence.

        Args:
          h_BTD: hidden states.
          table: of the tokens, for a tied head.
          state: of the whole sequence; what `state` returned.
          places_BT: where in the sequence the hidden states stand; B may be 1.
        """
        raise NotImplementedError

    def state(
        self, h_BTD: jax.Array, tokens_BT: jax.Array, context: Context, earlier: Any = None
    ) -> Any:
        """What logits read of the sequence besides their own hidden state; None for nothing.

        Args:
          h_BTD: hidden states: of whole sequences (`context.segments_BT`), of prompts
            (`context.lengths_B`), or of the next tokens (`context.positions_BT`).
          tokens_BT: the tokens that they are of.
          earlier: the state before the next tokens.

        Returns:
          A tree of arrays. While text is generated, what grows with the tokens has room for
          `context.capacity` and can be enlarged: a registered dataclass with `capacity` and
          `with_capacity`.
        """
        return None

    @classmethod
    def reads_table(cls, keys: Any) -> bool:
        """Whether it multiplies with the token table, whose product then counts as the head's."""
        return False

    @classmethod
    def state_bytes(
        cls, keys: Any, dimensions: Dimensions, length: int, itemsize: int
    ) -> tuple[int, int]:
        """Bytes of the state of a sequence: see Mixer.state_bytes."""
        return 0, 0


def head_of(section: Model) -> tuple[type[Head], Layer]:
    """The class of a model's head, and the keys it is built with."""
    return lookup("head", section.head.name), Layer(section, section.shape.dimensions)


class LinearHead(Head):
    """A matrix, or the token table (a tied head); scaled and capped."""

    def __init__(self, keys: Model, init: Init, rngs: nnx.Rngs):
        self.section = head = keys.head
        self.dtype = jnp.dtype(jnp.float32) if head.logits_dot_in_fp32 else init.dtype
        D, V = init.dimensions.emb_dim, init.dimensions.vocab_size
        if head.logits_via_embedding:
            self.logits_dense = None
        else:
            draw, has_bias = init.initializers.kernel, head.logits_bias
            self.logits_dense = Dense(
                (D,), (V,), ("embed", "vocab"), draw, init, rngs,
                use_bias=has_bias, used_in=self.dtype,
            )  # fmt: skip

    def __call__(
        self, h_BTD: jax.Array, table: Embedding, state: Any, places_BT: jax.Array
    ) -> jax.Array:
        head = self.section
        if self.logits_dense is None:
            rounded = None if head.logits_embedding_dtype == "auto" else jnp.dtype(jnp.bfloat16)
            logits_BTV = table.attend(h_BTD, self.dtype, rounded)
            if head.normalize_embedding_logits:
                logits_BTV = logits_BTV / math.sqrt(h_BTD.shape[-1])
        else:
            logits_BTV = self.logits_dense(h_BTD)
        logits_BTV = logits_BTV.astype(jnp.float32)
        if head.final_logits_soft_cap:
            cap = head.final_logits_soft_cap
            logits_BTV = cap * jnp.tanh(logits_BTV / cap)
        return logits_BTV

    @classmethod
    def reads_table(cls, keys: Model) -> bool:
        return keys.head.logits_via_embedding
