"""Facts about a batch for parts, besides their input."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypedDict

import jax

from MaxText.errors import UserError
from MaxText.parallelism.logical_sharding import split_batch


class Shared(dict[str, jax.Array]):
    """Arrays shared by mixers across layers; a missing one is a UserError."""

    def __missing__(self, name: str) -> jax.Array:
        raise UserError(
            f"a mixer reads context.shared[{name!r}], and the connection between layers shares "
            f"{', '.join(self) or 'nothing'}: set the connection_type that goes with the mixer"
        )


class MixerPositions(TypedDict, total=False):
    """What a position encoding tells mixers: fields of `ForwardContext`."""

    rotary: tuple[jax.Array, jax.Array] | None
    slopes_N: jax.Array | None
    query_scale: jax.Array | None


_BY_TOKEN = ("rotary", "query_scale")  # the fields of MixerPositions that are arrays [B, T, ...]


@dataclasses.dataclass(frozen=True)
class ForwardContext:
    """Facts about the batch for several parts.

    Attributes:
      segments_BT: Document of each token, from 1; 0 is padding. None is a single document.
      rotary: Table of the rotary position embedding: (sin, cos), float32 [B or 1, T, 1, R/2].
      dropout_key: RNG key of this layer; None disables dropout.
      training: Whether the model is trained. Experts have another capacity in training.
      drops_tokens: Whether experts may drop tokens beyond their capacity. Off when texts are
        scored, as their padding would decide which.
      log_layer_metrics: Whether parts return the metrics that only `log_layer_metrics` reports.
      layer: Index of the layer, an array inside a scan; None outside of layers.
      slopes_N: Slopes of ALiBi, float32.
      query_scale: Factors of queries by position, float32 [B or 1, T, 1, 1].
      other_positions: `rotary`, `slopes_N` and `query_scale` of layers with other positions than
        those of the model, by Block.position_index.
      per_layer_inputs_BTLP: Per-layer embeddings of all layers (layers/per_layer_inputs.py).
      capacity: During prefill, the tokens that decode states have room for.
      lengths_B: During prefill, the tokens of each prompt; padding follows.
      positions_BT: During decoding, the positions of the new tokens.
      shared: Arrays [B, T, ...] that mixers pass to later layers and may replace
        (part.Connection).
    """

    segments_BT: jax.Array | None = None
    rotary: tuple[jax.Array, jax.Array] | None = None
    dropout_key: jax.Array | None = None
    training: bool = False
    drops_tokens: bool = True
    log_layer_metrics: bool = False
    layer: jax.Array | int | None = None
    slopes_N: jax.Array | None = None
    query_scale: jax.Array | None = None
    other_positions: tuple[MixerPositions, ...] = ()
    per_layer_inputs_BTLP: jax.Array | None = None
    capacity: int | None = None
    lengths_B: jax.Array | None = None
    positions_BT: jax.Array | None = None
    shared: dict[str, jax.Array] = dataclasses.field(default_factory=Shared)

    @property
    def is_decoding(self) -> bool:
        """Whether decode states are kept or read."""
        return self.capacity is not None or self.positions_BT is not None

    def split(self, num_parts: int) -> Callable[[jax.Array], "ForwardContext"]:
        """Returns a function from an index to the context of a part of the batch.

        Args:
          num_parts: Parts of equal size, as `split_batch` makes them.
        """
        assert not self.is_decoding, "states of mixers belong to whole batches"

        def split_array(x: jax.Array) -> jax.Array:
            # The whole batch shares one row.
            return x[None] if x.shape[0] == 1 else split_batch(x, num_parts)

        own_positions: MixerPositions = {"rotary": self.rotary, "query_scale": self.query_scale}
        by_token = [
            {name: fields.get(name) for name in _BY_TOKEN}
            for fields in (own_positions, *self.other_positions)
        ]
        arrays = (self.segments_BT, self.per_layer_inputs_BTLP, by_token)
        split_arrays = jax.tree.map(split_array, arrays)

        def part(part_index: jax.Array) -> ForwardContext:
            def select(x: jax.Array) -> jax.Array:
                index = 0 if x.shape[0] == 1 else part_index
                return jax.lax.dynamic_index_in_dim(x, index, keepdims=False)

            selected = jax.tree.map(select, split_arrays)
            segments_BT, per_layer_inputs_BTLP, (own_arrays, *other_arrays) = selected
            other_positions: list[Any] = [
                {**fields, **arrays}
                for fields, arrays in zip(self.other_positions, other_arrays, strict=True)
            ]
            key = self.dropout_key
            if key is not None:
                key = jax.random.fold_in(key, part_index)
            return dataclasses.replace(
                self,
                segments_BT=segments_BT,
                per_layer_inputs_BTLP=per_layer_inputs_BTLP,
                **own_arrays,
                other_positions=tuple(other_positions),
                dropout_key=key,
            )

        return part

    def for_layer(
        self,
        index: jax.Array | int,
        shared: Mapping[str, jax.Array] | None = None,
        position_index: int = 0,
    ) -> "ForwardContext":
        """Returns the context of a layer.

        Args:
          index: Index of the layer, from 0; an array inside a scan.
          shared: Arrays that mixers share, from the connection.
          position_index: Which position encoding the layer has: 0 is the model's, i is entry i - 1
            of `other_positions`.
        """
        key = self.dropout_key
        if key is not None:
            key = jax.random.fold_in(key, index)
        fields: dict[str, Any] = {
            "dropout_key": key,
            "layer": index,
            "shared": Shared(shared or {}),
        }
        if position_index:
            own_positions = self.other_positions[position_index - 1]
            nothing = {"rotary": None, "slopes_N": None, "query_scale": None}
            fields |= {**nothing, **own_positions}
        return dataclasses.replace(self, **fields)

    def key_for(self, stream: int) -> jax.Array | None:
        """Returns the RNG key of a use within a layer, or None without dropout.

        Args:
          stream: RNG stream id; block.py lists them.
        """
        return None if self.dropout_key is None else jax.random.fold_in(self.dropout_key, stream)
