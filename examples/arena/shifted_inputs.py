"""Good: attention whose keys and values also read the token before (as RWKV's token shift).

We expect a gain: a single layer can then continue a pair of tokens that it has seen.

    x'_t = x_t + mu (x_(t-1) - x_t),   mu a learned number per channel, 0.5 at first

Legend: B sequences, T tokens, D emb_dim, N query heads, K key/value heads, H head_dim.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from MaxText.config.model_sections import ModelConfig
from MaxText.layers.attention.attention import Attention
from MaxText.layers.lowering.shift import earlier_tokens
from MaxText.layers.params import constant, param
from MaxText.layers.part import ForwardContext, Init, MixerInput, register


@register("mixer", "shifted_inputs_attention")
class ShiftedInputsAttention(Attention):
    """Attention with a token shift of the inputs of keys and of values; it does not decode."""

    def __init__(self, config: ModelConfig, init: Init, rngs: nnx.Rngs):
        super().__init__(config, init, rngs)
        D = init.dimensions.emb_dim
        self.shifts = param(rngs, (2, D), (None, "norm"), constant(0.5), dtype=init.weight_dtype)

    @classmethod
    def decodes(cls) -> bool:
        """Returns False: a cache does not keep the input of the newest token."""
        return False

    def project_inputs(
        self, x: MixerInput, context: ForwardContext
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns queries [B, T, N, H], keys and values [B, T, K, H]."""
        query_input, *key_and_value_inputs = x
        shifted = [
            x_BTD + mu_D.astype(x_BTD.dtype) * (_token_before(x_BTD, context) - x_BTD)
            for x_BTD, mu_D in zip(key_and_value_inputs, self.shifts[...], strict=True)
        ]
        return super().project_inputs((query_input, *shifted), context)


def _token_before(x_BTD: jax.Array, context: ForwardContext) -> jax.Array:
    """Returns the input of the token before; 0 at the first token of a document."""
    before_BTD = earlier_tokens(x_BTD, 1)
    segments_BT = context.segments_BT
    if segments_BT is None:
        return before_BTD
    continues_BT = earlier_tokens(segments_BT, 1) == segments_BT
    return jnp.where(continues_BT[..., None], before_BTD, 0)
