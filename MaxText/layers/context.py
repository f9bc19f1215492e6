"""Facts about a batch for parts, besides their input."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from MaxText.errors import UserError
from MaxText.parallelism.logical_sharding import split_batch


class Shared(dict[str, jax.Array]):
    """Arrays shared by mixers across layers."""

    def __missing__(self, name: str) -> jax.Array:
        raise UserError(
            f"a mixer reads context.shared[{name!r}], and the connection between layers shares "
            f"{', '.join(self) or 'nothing'}: set the connection_type that goes with the mixer"
        )


@dataclasses.dataclass(frozen=True)
class ForwardContext:
    """Facts about the batch for several parts."""

    segments_BT: jax.Array | None = None  # document of each token, 0 is padding; None for one
    rotary: tuple[jax.Array, jax.Array] | None = None  # (sin, cos), float32 [B or 1, T, 1, R/2]
    dropout_key: jax.Array | None = None  # None disables dropout
    training: bool = False  # experts have another capacity in training
    # Whether experts may drop tokens beyond their capacity. Off when texts are scored, as their
    # padding would decide which.
    drops_tokens: bool = True
    layer: jax.Array | int | None = None  # layer index; None outside of layers
    slopes_N: jax.Array | None = None  # ALiBi slopes, float32
    # `rotary` and `slopes_N` of layers with other positions than the model's, by Block.positions.
    others: tuple[Mapping[str, Any], ...] = ()
    capacity: int | None = None  # during prefill: tokens that decode states have room for
    lengths_B: jax.Array | None = None  # during prefill: tokens of each prompt, padding follows
    positions_BT: jax.Array | None = None  # during decoding: positions of the new tokens
    # Arrays [B, T, ...] that mixers pass to later layers and may replace (part.Connection).
    shared: dict[str, jax.Array] = dataclasses.field(default_factory=Shared)

    @property
    def is_decoding(self) -> bool:
        """Whether decode states are kept or read."""
        return self.capacity is not None or self.positions_BT is not None

    def split(self, num_parts: int) -> Callable[[jax.Array], "ForwardContext"]:
        """Returns index -> context of a slice of the batch (`split_batch`)."""
        assert not self.is_decoding, "states of mixers belong to whole batches"

        def cut(x: jax.Array) -> jax.Array:
            # The whole batch shares one row.
            return x[None] if x.shape[0] == 1 else split_batch(x, num_parts)

        tables = [self.rotary, *(one.get("rotary") for one in self.others)]
        per_row = jax.tree.map(cut, (self.segments_BT, tables))

        def part(number: jax.Array) -> ForwardContext:
            def own(x: jax.Array) -> jax.Array:
                index = 0 if x.shape[0] == 1 else number
                return jax.lax.dynamic_index_in_dim(x, index, keepdims=False)

            segments_BT, (rotary, *rest) = jax.tree.map(own, per_row)
            others = [{**one, "rotary": x} for one, x in zip(self.others, rest, strict=True)]
            key = self.dropout_key
            if key is not None:
                key = jax.random.fold_in(key, number)
            return dataclasses.replace(
                self, segments_BT=segments_BT, rotary=rotary, others=tuple(others), dropout_key=key
            )

        return part

    def for_layer(
        self,
        index: jax.Array | int,
        shared: Mapping[str, jax.Array] | None = None,
        positions: int = 0,
    ) -> "ForwardContext":
        key = self.dropout_key
        if key is not None:
            key = jax.random.fold_in(key, index)
        own: dict[str, Any] = {"dropout_key": key, "layer": index, "shared": Shared(shared or {})}
        if positions:
            own |= {"rotary": None, "slopes_N": None, **self.others[positions - 1]}
        return dataclasses.replace(self, **own)

    def key_for(self, stream: int) -> jax.Array | None:
        return None if self.dropout_key is None else jax.random.fold_in(self.dropout_key, stream)


Context = ForwardContext  # the earlier name, for parts from outside
