"""Dense depth connections: layers read sums of all earlier hidden states.

Legend: B sequences, T tokens, D emb_dim, C streams, S sources, K hidden width.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from MaxText.config.layer_sections import DenseConfig, Dimensions
from MaxText.config.model_sections import ModelConfig
from MaxText.config.registry import register
from MaxText.layers.capture import tag
from MaxText.layers.dense import Dense, einsum_f32
from MaxText.layers.depth.aggregate import aggregate, scale_grad_only, supports_fused_norms
from MaxText.layers.depth.norms import NO_NORMS, Norms
from MaxText.layers.feed_forward.activations import ACTIVATIONS
from MaxText.layers.normalization import RMSNorm, effective_scale, inverse_rms
from MaxText.layers.params import Init, constant, normal_fan_in, param, zeros
from MaxText.layers.part import Connection, Flops, LayerInputs, PreNormalized
from MaxText.parallelism.logical_sharding import HIDDEN, with_logical_constraint


class LayerOutput(NamedTuple):
    """A hidden state for later layers: embedding or layer output."""

    x_BTD: jax.Array
    # float32 1 / sqrt(mean(x^2) + eps), set by the first aggregation that normalizes the state;
    # from then on gradients are with respect to scale * x (aggregate.scale_grad_only).
    inverse_rms_BT1: jax.Array | None = None


LayerOutputs = tuple[LayerOutput, ...]


@register("connection", "dense")
class DenseConnections(Connection):
    """Multiway dynamic dense connections (Xiao et al. 2025, section 2).

    X_0 is the embedding and X_i the output of layer i, counted from 1. In place of X_i alone, layer
    i + 1 reads sums over the sources X_0 to X_i, with weights that depend on the token: one sum for
    each of up to four streams, q, k, v and the residual stream r (`DepthAggregate`). The carry from
    layer to layer are all sources, so it grows, and layers cannot be scanned.
    """

    keeps_shapes = False
    rows = "dense connections"
    not_recomputed = ("after",)

    def __init__(self, config: ModelConfig, init: Init, rngs: nnx.Rngs) -> None:
        """Declares an aggregation for each layer that has one, and scales of the sources.

        The last `dense_saved_aggregates` of the aggregations are saved for the backward pass, not
        recomputed.
        """
        dense = config.dense_connections
        epsilon = config.block.normalization_layer_epsilon
        num_layers = init.dimensions.num_layers
        D = init.dimensions.emb_dim
        self.num_layers = num_layers
        depths = filter(dense.stands_after, range(1, num_layers + 1))
        aggregates = {
            str(depth): DepthAggregate(dense, depth, epsilon, init, rngs) for depth in depths
        }
        self.after = nnx.Dict(aggregates)
        # The last aggregation is read outside of the layers, and so saved anyway.
        recomputed = [
            depth_aggregate
            for depth_aggregate in self.after.values()
            if depth_aggregate.depth < num_layers
        ]
        num_recomputed = max(0, len(recomputed) - dense.dense_saved_aggregates)
        for depth_aggregate in recomputed[num_recomputed:]:
            depth_aggregate.is_saved = True
        self.zero_centered = init.zero_centered_norms
        # Learned scales of the normalized hidden states X_0 to X_L.
        shape = (num_layers + 1, D)
        initial = constant(0.0 if self.zero_centered else 1.0)
        self.source_norm = (
            nnx.Dict(scale=param(rngs, shape, (None, "norm"), initial, dtype=init.weight_dtype))
            if dense.mudd_prenorm
            else None
        )

    @classmethod
    def flops(cls, config: ModelConfig, dimensions: Dimensions, length: int) -> dict[str, Flops]:
        """Returns the FLOPs of the sums: 2 D per stream, source and token."""
        dense = config.dense_connections
        num_layers = dimensions.num_layers
        depths = filter(dense.stands_after, range(1, num_layers + 1))
        terms = {x: len(_streams(dense, x, num_layers)) * len(dense.sources(x)) for x in depths}
        sums = {depth: 2.0 * dimensions.emb_dim * number for depth, number in terms.items()}
        # The backward pass of the last aggregation does not read its result.
        saved_flops = sums.get(num_layers, 0.0) if dense.mudd_postnorm == "none" else 0.0
        if dense.dense_saved_aggregates:
            saved_flops = math.nan
        return {"depth aggregation": Flops(sum(sums.values()), kept=saved_flops)}

    def begin(self, x_BTD: jax.Array) -> LayerOutputs:
        """Returns the embedding as the first source."""
        return (LayerOutput(x_BTD),)

    def read(
        self, index: int, carry: LayerOutputs, norms: Mapping[str, nnx.Module]
    ) -> tuple[LayerInputs, LayerOutputs]:
        """Returns a layer's inputs, and the sources for later layers.

        Args:
          index: Of the layer; the number of layers for the input of the final norm.
          carry: The embedding and the outputs of all layers before.
          norms: The layer's own norms by stream, which are fused with the aggregation if that is
            faster. Such an input is a PreNormalized.
        """
        sources = carry
        x_BTD = carry[-1].x_BTD
        if str(index) not in self.after:
            return LayerInputs.all(x_BTD), sources
        scales = None
        if self.source_norm is not None:
            scales = effective_scale(self.source_norm["scale"], self.zero_centered)
        sums, sources = self.after[str(index)](sources, scales, norms)
        residual = sums.get("r", x_BTD)
        return LayerInputs(*(sums.get(stream, residual) for stream in LayerInputs._fields)), sources

    def write(
        self, index: int, carry: LayerOutputs, y_BTD: jax.Array, shared: dict[str, Any]
    ) -> LayerOutputs:
        """Adds a layer's output to the sources."""
        return (*carry, LayerOutput(y_BTD))

    def end(self, carry: LayerOutputs) -> jax.Array:
        """Returns the input of the final norm: the last aggregation's r, if there is one."""
        return self.read(self.num_layers, carry, {})[0].r


class DepthAggregate(nnx.Module):
    """The aggregations after one layer, one for each stream c.

        w = act(rms(X_i) W1) W2 + static          weights [C, S] of each token
        plain:   Y_c = sum_j w_cj X_j
        adding:  Y_c = X_i + post_c(sum_j w_cj rms_j(X_j)), where either norm may be absent

    W2 starts at 0 and the static weights at Y_c = X_i: initially the model is the one without
    these connections. Weights and sums are float32.
    """

    not_recomputed = ("wi",)  # every policy saves x W1

    def __init__(self, config: DenseConfig, depth: int, epsilon: float, init: Init, rngs: nnx.Rngs):
        """Declares the weights.

        Args:
          config: Of dense connections.
          depth: Number of layers before the aggregation; its sources are some of X_0 to X_depth.
          epsilon: Of the norms.
          init: Sizes, initializers and dtypes.
          rngs: RNG streams that weights are drawn from.
        """
        num_layers = init.dimensions.num_layers
        D = init.dimensions.emb_dim
        self.config = config
        self.depth = depth
        self.epsilon = epsilon
        self.sources = config.sources(depth)
        self.is_saved = False  # whether its results are saved for the backward pass
        self.streams = _streams(config, depth, num_layers)
        C = len(self.streams)
        S = len(self.sources)
        if not config.dense_dynamic:
            self.norm = self.wi = self.wo = None
        else:
            width = C * S * (config.dynamic_dense_last_layer_expand if depth == num_layers else 1)
            rounded = {"reference": (width // 64 + 1) * 64, "ceil": -(-width // 64) * 64}
            K = rounded.get(config.dynamic_dense_hidden_round, width)
            self.norm = RMSNorm(D, epsilon, init, rngs, parametric=config.mudd_prenorm)
            self.wi = Dense((D,), (K,), ("embed", None), normal_fan_in, init, rngs)
            self.wo = Dense((K,), (C, S), (None, None, None), zeros, init, rngs)
        draw = constant(self._identity())
        dtype = init.weight_dtype
        static = config.dense_static
        self.static = param(rngs, (C, S), (None, None), draw, dtype=dtype) if static else None
        normed = {"none": "", "residual": "r", "all": "qkvr"}[config.mudd_postnorm]
        norms = [x for x in self.streams if x in normed]
        self.post_norms = nnx.Dict(
            {x: RMSNorm(D, epsilon, init, rngs, initial=0.001) for x in norms}
        )

    def _identity(self) -> np.ndarray:
        """Returns static weights [C, S] with which Y_c = X_i."""
        identity = np.zeros((len(self.streams), len(self.sources)), np.float32)
        if not self.config.adds:
            identity[:, -1] = 1.0
        return identity

    def weights(self, x_BTD: jax.Array) -> jax.Array:
        """Returns the weights, float32 [B, T, C, S]; static ones [1, 1, C, S]."""
        static = self._identity() if self.static is None else self.static[...].astype(jnp.float32)
        weights_BTCS = jnp.asarray(static)[None, None]
        if self.wi is None or self.wo is None or self.norm is None:
            return weights_BTCS
        kernel_DK = self.wi.kernel[...]
        if self.norm.scale is not None:
            kernel_DK = self.norm.factors()[:, None] * kernel_DK.astype(jnp.float32)
        kernel_DK = kernel_DK.astype(self.wi.dtype)
        hidden_BTK: Any = rms_norm_matmul(x_BTD, kernel_DK, self.norm.epsilon, self.wi.precision)
        hidden_BTK = ACTIVATIONS[self.config.dynamic_dense_act_cls](hidden_BTK)
        return weights_BTCS + self.wo(hidden_BTK).astype(jnp.float32)

    def __call__(
        self, sources: LayerOutputs, scales_SD: jax.Array | None, norms: Mapping[str, nnx.Module]
    ) -> tuple[dict[str, Any], LayerOutputs]:
        """Returns y_BTD or PreNormalized by stream, and the sources to carry on.

        Args:
          sources: Embedding and outputs of all layers so far.
          scales_SD: Learned scales of all normalized sources; None if they are not normalized.
          norms: Of the next layer, by stream.
        """
        x_BTD = sources[-1].x_BTD
        weights_BTCS = self.weights(x_BTD)
        selected = [sources[index] for index in self.sources]
        if scales_SD is not None:
            scales_SD = scales_SD[np.array(self.sources)]
            selected = [
                self._normalized(source, scale_D)
                for source, scale_D in zip(selected, scales_SD, strict=True)
            ]
            # The inverse RMS is folded into the weights.
            inverse_rms: list[Any] = [source.inverse_rms_BT1 for source in selected]
            weights_BTCS = weights_BTCS * jnp.concatenate(inverse_rms, axis=-1)[:, :, None]
        fused, factors_MD = self._fused(norms, x_BTD)
        sums, states = aggregate(
            weights_BTCS,
            [source.x_BTD for source in selected],
            self.config.dense_aggregation_impl,
            scales_SD=scales_SD,
            norms=fused,
            factors_MD=factors_MD,
        )
        outputs: dict[str, Any] = {}
        for index, (stream, y_BTD) in enumerate(zip(self.streams, sums, strict=True)):
            if stream in self.post_norms:
                y_BTD = self.post_norms[stream](y_BTD)
            if self.config.adds:
                y_BTD = x_BTD + y_BTD
            y_BTD = with_logical_constraint(y_BTD, *HIDDEN)
            if self.is_saved:
                y_BTD = tag(y_BTD, "depth_aggregate")
            outputs[stream] = PreNormalized(y_BTD) if index in fused.streams else y_BTD
        new_sources = list(sources)
        for index, source, state_BTD in zip(self.sources, selected, states, strict=True):
            new_sources[index] = source._replace(x_BTD=state_BTD)
        return outputs, tuple(new_sources)

    def _fused(
        self, norms: Mapping[str, nnx.Module], x_BTD: jax.Array
    ) -> tuple[Norms, jax.Array | None]:
        """Returns the layer's norms to fuse, and their factors [M, D]."""
        stream_norms = [(index, norms.get(stream)) for index, stream in enumerate(self.streams)]
        # Not isinstance: the kernel does not know LayerNorm and ScaleNorm, which are derived.
        fusible = {index: norm for index, norm in stream_norms if type(norm) is RMSNorm}
        can_fuse = supports_fused_norms(self.config.dense_aggregation_impl, x_BTD)
        if not fusible or self.config.adds or not can_fuse:
            return NO_NORMS, None
        factors_MD = jnp.stack([norm.factors() for norm in fusible.values()])
        return Norms(tuple(fusible), self.epsilon), factors_MD

    def _normalized(self, source: LayerOutput, scale_D: jax.Array) -> LayerOutput:
        """Returns a source with its inverse RMS, which is computed once for all its readers."""
        if source.inverse_rms_BT1 is not None:
            return source
        x_BTD = source.x_BTD
        return LayerOutput(scale_grad_only(x_BTD, scale_D), inverse_rms(x_BTD, self.epsilon))


def _streams(config: DenseConfig, depth: int, num_layers: int) -> tuple[str, ...]:
    """Returns the inputs of a layer, some of "qkvr"; the final norm reads "r" alone."""
    return ("r",) if depth == num_layers else config.dense_streams


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def rms_norm_matmul(
    x_BTD: jax.Array, kernel_DK: jax.Array, epsilon: float, precision: str | None
) -> jax.Array:
    """Returns r x W [B, T, K] with r = 1 / sqrt(mean(x^2) + eps).

    Of the size of x it writes only its gradient; normalizing first would write that of r x, too.

    Args:
      x_BTD: Hidden states.
      kernel_DK: W, with the factors of the norm multiplied into it.
      epsilon: eps.
      precision: Of the products, a name of jax.lax.Precision or None.
    """
    return _rms_norm_matmul_forward(x_BTD, kernel_DK, epsilon, precision)[0]


# x_BTD, W_DK, r_BT1, r x W_BTK
_RmsNormMatmulResiduals = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def _rms_norm_matmul_forward(
    x_BTD: jax.Array, kernel_DK: jax.Array, epsilon: float, precision: str | None
) -> tuple[jax.Array, _RmsNormMatmulResiduals]:
    """Returns r x W; and as residuals x, W, r and x W."""
    # Saved under every policy: both are small, and recomputing either would read x again.
    inverse_rms_BT1 = checkpoint_name(inverse_rms(x_BTD, epsilon), "depth_product")
    product_BTK = checkpoint_name(
        einsum_f32("btd,dk->btk", x_BTD, kernel_DK, precision), "depth_product"
    )
    y_BTK = (inverse_rms_BT1 * product_BTK).astype(x_BTD.dtype)
    return y_BTK, (x_BTD, kernel_DK, inverse_rms_BT1, product_BTK)


def _rms_norm_matmul_backward(
    epsilon: float, precision: str | None, residuals: _RmsNormMatmulResiduals, grad_y_BTK: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the gradients with respect to x and W.

    With g the gradient of the result: dW = x^T (r g), and dx = (r g) W^T + (dr / dx) sum(g x W).
    """
    del epsilon
    x_BTD, kernel_DK, inverse_rms_BT1, product_BTK = residuals
    grad_y_BTK = grad_y_BTK.astype(jnp.float32)
    grad_product_BTK = (inverse_rms_BT1 * grad_y_BTK).astype(x_BTD.dtype)
    grad_kernel_DK = einsum_f32("btd,btk->dk", x_BTD, grad_product_BTK, precision)
    # dr / dx = -r^3 x / D
    grad_inverse_rms_BT1 = jnp.sum(grad_y_BTK * product_BTK, axis=-1, keepdims=True)
    share_BT1 = inverse_rms_BT1**3 * grad_inverse_rms_BT1 / x_BTD.shape[-1]
    grad_x_BTD = einsum_f32("btk,dk->btd", grad_product_BTK, kernel_DK, precision)
    grad_x_BTD = grad_x_BTD - share_BT1 * x_BTD.astype(jnp.float32)
    return grad_x_BTD.astype(x_BTD.dtype), grad_kernel_DK.astype(kernel_DK.dtype)


rms_norm_matmul.defvjp(_rms_norm_matmul_forward, _rms_norm_matmul_backward)
