"""Pattention: attention from tokens to learned slots.

TokenFormer (Wang et al. 2024, arXiv 2410.23168, section 3.2) and its JAX and PyTorch programs,
whose constants differ. More slots (n of them) make a larger model of the same width: a checkpoint
grows by slots whose keys are 0 (`MaxText/growth`).

Slots have one of three roles in a layer: "qkv" (projections to queries, keys and values), "proj"
(projection of attention's output) and "ffn" (in place of the MLP).
"""

import dataclasses
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from MaxText.config.layer_sections import PattentionConfig, SlotPlace
from MaxText.config.model_sections import LayerConfig, ModelConfig
from MaxText.config.registry import register
from MaxText.layers.capture import tag
from MaxText.layers.context import ForwardContext
from MaxText.layers.dense import Axes, Dense
from MaxText.layers.normalization import rms_normalize
from MaxText.layers.params import Init, Initializer, Shape
from MaxText.layers.part import FeedForward, Part, Scalars
from MaxText.parallelism.logical_sharding import BRANCH_INPUT, with_logical_constraint

ZOOMED = ("l2_norm_gelu", "gelu_l2_norm", "l2_norm")  # normalize_type that scales by sqrt(zoom)
# Values of normalize_type under which a zero key adds nothing: Theta(0) is 0, and a score of 0
# changes neither the sum of squares nor gelu of the other scores.
_PRESERVING = (*ZOOMED, "gelu")
_LAYER_NORM_EPSILON = 1e-6  # the default of flax, which the JAX program uses
_ROLES: dict[SlotPlace, str] = {
    "qkv": "query, key, value",
    "proj": "output projection",
    "ffn": "feed-forward",
}


def slot_place(name: str) -> SlotPlace | None:
    """Returns the role of the slots of a parameter, or None if it has no slots.

    Args:
      name: Path of the parameter, such as "layers/self_attention/query/keys/kernel".
    """
    parts = name.split("/")
    if "mlp" in parts:
        return "ffn"
    if "self_attention" in parts:
        return "proj" if "out" in parts else "qkv"
    return None


def slots_by_place(numbers: Mapping[str, str]) -> str:
    """Formats values by the role of their slots: "24 -> 40 (attention), 96 (feed-forward)".

    Args:
      numbers: Path of a parameter -> its value, such as a number of slots.
    """
    roles_of_value: dict[str, list[str]] = {}
    for role in (None, *_ROLES):
        values = {value for name, value in numbers.items() if slot_place(name) == role}
        for value in sorted(values):
            roles = roles_of_value.setdefault(value, [])
            if role is not None:
                roles.append(_ROLES[role])
    descriptions = []
    for value, roles in roles_of_value.items():
        descriptions.append(f"{value} ({', '.join(roles)})" if roles else value)
    text = ", ".join(descriptions)
    return text.replace("query, key, value, output projection", "attention")


@dataclasses.dataclass(frozen=True)
class Theta:
    """The configured function from scores to slot weights (section 3.2).

    Attributes:
      config: normalize_type, epsilon, scale factors and zoom.
      role: Role of the slots in the layer.
      emb_dim: D, by which the zoom is a number of slots.
    """

    config: PattentionConfig
    role: SlotPlace
    emb_dim: int

    def __call__(self, scores: jax.Array) -> jax.Array:
        """Returns slot weights from scores [..., n]; computes in float32."""
        kind = self.config.normalize_type
        y = scores.astype(jnp.float32)
        if kind in ("l2_norm_gelu", "l2_norm"):
            y = self._l2_normalize(y)
        if kind == "softmax":
            y = jax.nn.softmax(y, axis=-1) * y.shape[-1]
        elif kind != "l2_norm":
            y = jax.nn.gelu(y, approximate=self.config.gelu_approximate)
        if kind == "gelu_l2_norm":
            y = self._l2_normalize(y)
        elif kind == "gelu_layer_norm":
            y = rms_normalize(y - jnp.mean(y, axis=-1, keepdims=True), None, _LAYER_NORM_EPSILON)
        factor = getattr(self.config.scale_factors, self.role)
        return (y * factor).astype(scores.dtype)

    def _l2_normalize(self, a: jax.Array) -> jax.Array:
        """Returns sqrt(zoom) a / (|a| + epsilon), with a finite gradient at 0."""
        epsilon = self.config.score_norm_epsilon
        if epsilon is None:
            epsilon = 1e-5 if self.config.normalize_type == "l2_norm_gelu" else 1e-8
        square = jnp.sum(jnp.square(a), axis=-1, keepdims=True)
        # sqrt has no gradient at 0, and 1 / |a|^2 overflows for subnormal |a|^2. Both branches of
        # `where` are differentiated, so sqrt must not see a zero at all.
        is_zero = square < jnp.finfo(jnp.float32).tiny
        norm = jnp.where(is_zero, 0.0, jnp.sqrt(jnp.where(is_zero, 1.0, square)))
        if epsilon == 0:
            norm = jnp.where(is_zero, 1.0, norm)
        return a / (norm + epsilon) * math.sqrt(self.config.zoom(self.role, self.emb_dim))


class Pattention(Part):
    """y = Theta(x K) V, with n key slots K and n value slots V.

    Scores are not divided by the root of the width. Optional biases are added to both products.
    """

    not_recomputed = ("values",)

    def __init__(
        self,
        config: PattentionConfig,
        init: Init,
        rngs: nnx.Rngs,
        role: SlotPlace,
        *,
        inputs: int,
        outputs: int,
        use_bias: bool,
    ):
        """Declares the slots.

        Args:
          config: Theta, and the number of slots.
          init: Sizes, initializers and dtypes.
          rngs: RNG streams that weights are drawn from.
          role: Role of the slots in the layer.
          inputs: Width of x.
          outputs: Width of y.
          use_bias: Whether both products have biases.
        """
        emb_dim = init.dimensions.emb_dim
        draw = init.initializers
        n = config.num_slots(role, emb_dim)
        self.theta = Theta(config, role, emb_dim)
        self.scores_name = "mlpwi" if role == "ffn" else "slot_scores"  # in remat policies
        keys, values = (draw.kernel, draw.output) if role == "ffn" else draw.attention_slots
        # Inputs and outputs shard like the residual stream, even if they are heads.
        self.keys = Dense((inputs,), (n,), ("embed", "slots"), keys, init, rngs, use_bias=use_bias)
        self.values = Dense(
            (n,), (outputs,), ("slots", "embed"), values, init, rngs, use_bias=use_bias
        )

    @classmethod
    def slots_problem(cls, layer: LayerConfig) -> str | None:
        """Returns why new slots change the output; see `Part.slots_problem`."""
        kind = layer.config.pattention.normalize_type
        if kind in _PRESERVING:
            return None
        return (
            f"normalize_type={kind}: new slots change the normalization of existing ones.\n"
            "  Set growth.mode=random. The function can be preserved with "
            f"{', '.join(_PRESERVING)}."
        )

    def attend(self, x: jax.Array) -> jax.Array:
        """Returns Theta(x K) V, [B, T, outputs], of x [B, T, inputs]."""
        scores = tag(self.keys(x), self.scores_name)
        scores = with_logical_constraint(scores, *BRANCH_INPUT[:2], "activation_slots")
        return self.values(self.theta(scores))


def _sharded_slots(layer: LayerConfig, role: SlotPlace) -> dict[str, tuple[str, int]]:
    num_slots = layer.config.pattention.num_slots(role, layer.dimensions.emb_dim)
    return {f"{role}_slot_num": ("slots", num_slots)}


@register("projection", "pattention")
class PattentionProjection(Pattention):
    """Pattention as an attention projection; h of head n is n * H + h."""

    def __init__(  # noqa: PLR0913, PLR0917
        self,
        model: ModelConfig,
        init: Init,
        rngs: nnx.Rngs,
        role: SlotPlace,
        inputs: Shape,
        outputs: Shape,
        *,
        axes: Axes,
        initializer: Initializer,
        use_bias: bool,
    ):
        """Declares the slots of a projection.

        Args:
          model: Keys of the model.
          init: Sizes, initializers and dtypes.
          rngs: RNG streams that weights are drawn from.
          role: "qkv" or "proj".
          inputs: Input dimensions: (D,), or (N, H) of the output projection.
          outputs: Output dimensions.
          axes: Logical axes of a dense matrix in its place; slots have their own.
          initializer: Initializer of a dense matrix in its place; slots have their own.
          use_bias: Whether both products have biases.
        """
        super().__init__(
            model.pattention,
            init,
            rngs,
            role,
            inputs=math.prod(inputs),
            outputs=math.prod(outputs),
            use_bias=use_bias,
        )
        self.num_input_dims = len(inputs)
        self.outputs = outputs

    @classmethod
    def sharded_sizes(cls, layer: LayerConfig) -> dict[str, tuple[str, int]]:
        """Returns the numbers of slots; see `Part.sharded_sizes`."""
        return _sharded_slots(layer, "qkv") | _sharded_slots(layer, "proj")

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the projection [B, T, outputs...] of x [B, T, inputs...]."""
        leading = x.shape[: x.ndim - self.num_input_dims]
        return self.attend(x.reshape(*leading, -1)).reshape(*leading, *self.outputs)


@register("feed_forward", "pattention")
class PattentionFeedForward(Pattention, FeedForward):
    """Pattention in place of the MLP."""

    def __init__(self, config: ModelConfig, init: Init, rngs: nnx.Rngs):
        D = init.dimensions.emb_dim
        use_bias = config.feed_forward.ffn_bias
        Pattention.__init__(
            self, config.pattention, init, rngs, "ffn", inputs=D, outputs=D, use_bias=use_bias
        )

    @classmethod
    def sharded_sizes(cls, layer: LayerConfig) -> dict[str, tuple[str, int]]:
        """Returns the number of slots; see `Part.sharded_sizes`."""
        return _sharded_slots(layer, "ffn")

    def __call__(self, x_BTD: jax.Array, context: ForwardContext) -> tuple[jax.Array, Scalars]:
        """Returns the output [B, T, D], and no losses."""
        return tag(self.attend(x_BTD), "mlpwo"), {}
