"""Weights of sums over a history of hidden states: how each token's come of the state before a sum.

As `DepthSum.weights`, for a loop whose backward pass is its own. A kernel may make them along with
the sums, of the state that it has on the chip; then nothing of them is kept. Otherwise, of all that
lies between a state and its weights, the loop keeps one number of each token and makes the rest
again.

Legend: B sequences, T tokens, D emb_dim, K hidden width of what makes weights, E weights of a token
with filling.
"""

from typing import Any

import jax
import jax.numpy as jnp

from MaxText.layers.activations import ACTIVATIONS
from MaxText.layers.connections import (
    DepthSum,
    float_product,
    inverse_rms,
    product_of_normalized_backward,
)
from MaxText.layers.depth_reading import Making, Product, Recipe, makes_weights
from MaxText.layers.history_plan import SumWeights


class TokenWeights:
    """w = act(r x W1) W2 + fixed, or the fixed ones alone: of one sum, or all in the loop.

    Attributes:
      recipe: for a kernel that makes weights along with sums; None where they are made before.
    """

    def __init__(self, one: DepthSum, state_BTD: jax.Array, *, kernel: bool):
        """`kernel`: whether sums are made by one."""
        self.epsilon = None if one.norm is None else one.norm.epsilon
        self.precision: Any = None if one.wi is None else one.wi.precision
        name = one.section.dense_activation
        self.activation = ACTIVATIONS[name]
        self.tokens, self.dtype = state_BTD.shape[:2], state_BTD.dtype
        self.recipe = None
        if kernel and one.wi is not None and self.epsilon is not None:
            # Products of narrower formats are exact as they are.
            precision = self.precision if self.dtype == jnp.float32 else None
            recipe = Recipe(name, self.epsilon, precision)
            hidden_width = one.wi.kernel.shape[-1]
            self.recipe = recipe if makes_weights(state_BTD, recipe, hidden_width) else None

    def for_sum(
        self, own: SumWeights, x_BTD: jax.Array, place: Any, inverse_rms_BT1: jax.Array | None
    ) -> tuple[jax.Array | Making, Product | None]:
        """What a sum after the state x is given, and what its weights are made of if that is known.

        Args:
          place: of x among the sources.
          inverse_rms_BT1: as in `product`.
        """
        if self.recipe is None:
            product = self.product(own, x_BTD, inverse_rms_BT1)
            return self(own, product), product
        assert own.wi_JDK is not None
        assert own.wo_JKE is not None
        wi_DK, wo_KE = (kernel.astype(self.dtype) for kernel in (own.wi_JDK, own.wo_JKE))
        return Making(wi_DK, wo_KE, own.fixed_JE, jnp.int32(place)), None

    def product(
        self, own: SumWeights, x_BTD: jax.Array, inverse_rms_BT1: jax.Array | None = None
    ) -> Product | None:
        """Of a sum after the state x; None if its weights are fixed.

        Args:
          inverse_rms_BT1: if it is known, which spares a read of x.
        """
        if self.epsilon is None or own.wi_JDK is None:
            return None
        if inverse_rms_BT1 is None:
            inverse_rms_BT1 = inverse_rms(x_BTD, self.epsilon)
        kernel_DK = own.wi_JDK.astype(x_BTD.dtype)
        product_BTK = float_product("btd,dk->btk", x_BTD, kernel_DK, self.precision)
        return Product(product_BTK, inverse_rms_BT1)

    def __call__(self, own: SumWeights, product: Product | None) -> jax.Array:
        """[B, T, E], float32."""
        if product is None:
            return jnp.broadcast_to(own.fixed_JE, (*self.tokens, own.fixed_JE.shape[-1]))
        return self._of_normalized(own, self._normalized(product))

    def backward(
        self,
        own: SumWeights,
        x_BTD: jax.Array,
        product: Product | None,
        of_weights_BTE: jax.Array,
    ) -> tuple[SumWeights, jax.Array | None]:
        """Gradients of the parameters, and of x if it has one."""
        if product is None or own.wi_JDK is None:
            of_fixed_E = jnp.sum(of_weights_BTE, axis=(0, 1))
            return SumWeights(of_fixed_E, None, None, {}), None
        _, vjp = jax.vjp(self._of_normalized, own, self._normalized(product))
        of_own, of_y_BTK = vjp(of_weights_BTE)
        of_x_BTD, of_kernel_DK = product_of_normalized_backward(
            self.epsilon,
            self.precision,
            (x_BTD, own.wi_JDK.astype(x_BTD.dtype), product.inverse_rms_BT1, product.product_BTK),
            of_y_BTK,
        )
        return of_own._replace(wi_JDK=of_kernel_DK.astype(own.wi_JDK.dtype)), of_x_BTD

    def _normalized(self, product: Product) -> jax.Array:
        """y_BTK in the format of hidden states."""
        return (product.inverse_rms_BT1 * product.product_BTK).astype(self.dtype)

    def _of_normalized(self, own: SumWeights, y_BTK: jax.Array) -> jax.Array:
        assert own.wo_JKE is not None
        hidden_BTK = self.activation(y_BTK)
        moving_BTE = jnp.einsum(
            "btk,ke->bte", hidden_BTK, own.wo_JKE.astype(hidden_BTK.dtype), precision=self.precision
        )
        return own.fixed_JE + moving_BTE.astype(jnp.float32)
