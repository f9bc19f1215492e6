"""Two mixers in one layer, on the same norm: their outputs are added (Falcon-H1, arXiv 2507.22448).

    y = a_out attention(a_in x) + mixer(x)

The second mixer is named by parallel_mixer. Its factors are keys of its own.

Legend: B sequences, T tokens, D emb_dim.
"""

from typing import Any, Self

import jax
from flax import nnx

from MaxText.config.layer_sections import Dimensions
from MaxText.config.model_sections import LayerConfig, ModelConfig
from MaxText.config.registry import lookup
from MaxText.layers.capture import scope
from MaxText.layers.context import ForwardContext
from MaxText.layers.dense import scaled
from MaxText.layers.part import DecodeState, Flops, Init, Mixer, Scalars


class BesideMixer(Mixer):
    """A second mixer, to `combine` with a mixer that is built from the model's keys.

    The decode state is a pair of those of both.
    """

    not_recomputed = ("out", "parallel_mixer")
    parallel_mixer: Mixer
    in_multiplier: float
    out_multiplier: float

    @classmethod
    def build(cls, layer: LayerConfig, init: Init, rngs: nnx.Rngs) -> Self:
        """Builds both mixers; see `Part.build`."""
        part = super().build(layer, init, rngs)
        part.in_multiplier = layer.config.attention.attention_in_multiplier
        part.out_multiplier = layer.config.attention.attention_out_multiplier
        part.parallel_mixer = second_mixer(layer.config).build(layer, init, rngs)
        return part

    @classmethod
    def flops(cls, config: ModelConfig, dimensions: Dimensions, length: int) -> dict[str, Flops]:
        """Returns the FLOPs of both mixers; see `Part.flops`."""
        second = second_mixer(config)
        config_of_second = second.config_of(LayerConfig(config, dimensions))
        rows = dict(super().flops(config, dimensions, length))
        for row, flops in second.flops(config_of_second, dimensions, length).items():
            rows[row] = _added(rows[row], flops) if row in rows else flops
        return rows

    @classmethod
    def state_bytes(
        cls, config: ModelConfig, dimensions: Dimensions, length: int, itemsize: int
    ) -> tuple[int, int]:
        """Returns bytes of the states of both mixers; see `Part.state_bytes`."""
        second = second_mixer(config)
        config_of_second = second.config_of(LayerConfig(config, dimensions))
        of_second = second.state_bytes(config_of_second, dimensions, length, itemsize)
        of_first = super().state_bytes(config, dimensions, length, itemsize)
        return of_first[0] + of_second[0], of_first[1] + of_second[1]

    def _inputs(self, x: Any) -> tuple[Any, Any]:
        """Returns the inputs of both mixers."""
        first = jax.tree.map(lambda x_BTD: scaled(x_BTD, self.in_multiplier), x)
        has_one_input = self.has_separate_inputs and not self.parallel_mixer.has_separate_inputs
        return first, x[0] if has_one_input else x

    def _sum(self, first_BTD: jax.Array, second_BTD: jax.Array) -> jax.Array:
        """Returns the layer's output from those of both mixers."""
        return scaled(first_BTD, self.out_multiplier) + second_BTD

    def __call__(self, x: Any, context: ForwardContext) -> tuple[jax.Array, Scalars]:
        """Returns the sum of both outputs, [B, T, D], and the losses of both."""
        first, second = self._inputs(x)
        first_BTD, losses = super().__call__(first, context)
        with scope("parallel_mixer"):
            second_BTD, second_losses = self.parallel_mixer(second, context)
        return self._sum(first_BTD, second_BTD), losses | second_losses

    def prefill(self, x: Any, context: ForwardContext) -> tuple[jax.Array, DecodeState]:
        """Returns the output for prompts, and the states of both mixers."""
        first, second = self._inputs(x)
        first_BTD, first_state = super().prefill(first, context)
        second_BTD, second_state = self.parallel_mixer.prefill(second, context)
        return self._sum(first_BTD, second_BTD), (first_state, second_state)

    def decode_step(
        self, x: Any, state: DecodeState, context: ForwardContext
    ) -> tuple[jax.Array, DecodeState]:
        """Returns the output of new tokens, and the states of both mixers after them."""
        first, second = self._inputs(x)
        first_state, second_state = state
        first_BTD, first_state = super().decode_step(first, first_state, context)
        second_BTD, second_state = self.parallel_mixer.decode_step(second, second_state, context)
        return self._sum(first_BTD, second_BTD), (first_state, second_state)


def second_mixer(config: ModelConfig) -> type[Mixer]:
    """Returns the class of a layer's second mixer."""
    return lookup("mixer", config.block.parallel_mixer)


def _added(first: Flops, second: Flops) -> Flops:
    """Returns the FLOPs of both mixers in one row of the table."""
    executed = (
        f.by_rule if f.hardware_flops is None else f.hardware_flops for f in (first, second)
    )
    return Flops(
        by_rule=first.by_rule + second.by_rule,
        hardware_flops=sum(executed),
        recomputed=first.recomputed + second.recomputed,
        backward=max(first.backward, second.backward),
        kept=first.kept + second.kept,
    )
