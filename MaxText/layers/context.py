"""What any part may read besides its input. Built once per forward pass.

Legend: B sequences, T tokens, R turned dimensions of a head.
"""

import dataclasses
from collections.abc import Callable, Mapping

import jax

from MaxText.errors import UserError
from MaxText.parallelism.constraints import split_rows


class Shared(dict[str, jax.Array]):
    """Arrays that mixers share across layers."""

    def __missing__(self, name: str) -> jax.Array:
        raise UserError(
            f"a mixer reads context.shared[{name!r}], and the connection between layers shares "
            f"{', '.join(self) or 'nothing'}: set the connection_type that goes with the mixer"
        )


@dataclasses.dataclass(frozen=True)
class Context:
    """Facts about the batch that several parts need.

    Attributes:
      segments_BT: document number of each token, 0 is padding; None means one document.
      rotary: (sin, cos), each [B or 1, T, 1, R/2] float32, or None without rotary positions.
      dropout_key: None switches dropout off.
      training: whether weights are being trained; experts then have another capacity.
      drops_tokens: whether experts may drop tokens beyond their capacity. Not where texts are
        scored: their padding would decide which.
      layer: number of the layer that reads this, from 0; None outside of layers.
      shared: arrays [B, T, ...] that mixers hand to those of later layers, as the connection
        between layers says (part.Connection); a mixer reads entries, and may replace them.
      slopes_N: float32, what ALiBi lowers the scores of each query head by for every token of
        distance; None without.
      capacity: tokens that the state of each mixer shall have room for, while a prompt is read
        whose continuation will be generated; None in training and scoring, which keep no state.
      lengths_B: tokens of each row of such a prompt; what stands behind them is filling.
      positions_BT: place of each new token in its row, while text is generated.
    """

    segments_BT: jax.Array | None = None
    rotary: tuple[jax.Array, jax.Array] | None = None
    dropout_key: jax.Array | None = None
    training: bool = False
    drops_tokens: bool = True
    layer: jax.Array | int | None = None
    slopes_N: jax.Array | None = None
    capacity: int | None = None
    lengths_B: jax.Array | None = None
    positions_BT: jax.Array | None = None
    shared: dict[str, jax.Array] = dataclasses.field(default_factory=Shared)

    @property
    def generates(self) -> bool:
        """Whether text is being generated: states are kept, or read."""
        return self.capacity is not None or self.positions_BT is not None

    def in_parts(self, num_parts: int) -> Callable[[jax.Array], "Context"]:
        """The contexts of parts of the rows, cut as by `split_rows`, by their numbers.

        Each draws other random numbers. For training and scoring, which keep no state.
        """
        assert not self.generates, "states of mixers belong to whole batches"

        def cut(x: jax.Array) -> jax.Array:
            # One row stands for all.
            return x[None] if x.shape[0] == 1 else split_rows(x, num_parts)

        per_row = jax.tree.map(cut, (self.segments_BT, self.rotary))

        def part(number: jax.Array) -> Context:
            def own(x: jax.Array) -> jax.Array:
                place = 0 if x.shape[0] == 1 else number
                return jax.lax.dynamic_index_in_dim(x, place, keepdims=False)

            segments_BT, rotary = jax.tree.map(own, per_row)
            key = self.dropout_key
            if key is not None:
                key = jax.random.fold_in(key, number)
            return dataclasses.replace(
                self, segments_BT=segments_BT, rotary=rotary, dropout_key=key
            )

        return part

    def for_layer(
        self, index: jax.Array | int, shared: Mapping[str, jax.Array] | None = None
    ) -> "Context":
        """This context with the number and the random key of layer `index`, and what it shares."""
        key = self.dropout_key
        if key is not None:
            key = jax.random.fold_in(key, index)
        return dataclasses.replace(self, dropout_key=key, layer=index, shared=Shared(shared or {}))

    def key_for(self, place: int) -> jax.Array | None:
        """The random key of one place within a layer; places are numbered by the caller."""
        return None if self.dropout_key is None else jax.random.fold_in(self.dropout_key, place)
