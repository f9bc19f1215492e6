"""Facts about a batch that parts read besides their input, built once per forward pass.

Legend: B sequences, T tokens, R rotary dimensions of a head.
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
      segments_BT: Document number of each token, 0 is padding; None for one document.
      rotary: (sin, cos), each [B or 1, T, 1, R/2] float32, or None.
      dropout_key: None disables dropout.
      training: Whether weights are trained, in which case experts have another capacity.
      drops_tokens: Whether experts may drop tokens beyond their capacity. Off when texts are
        scored: their padding would decide which.
      layer: Index of the layer; None outside of layers.
      shared: Arrays [B, T, ...] that mixers pass to later layers, as the connection declares
        (part.Connection). A mixer may replace entries.
      slopes_N: ALiBi slopes, float32, or None.
      capacity: Tokens that decode states have room for, during the prefill of a prompt; None in
        training and scoring, which keep no state.
      lengths_B: Tokens of each row of such a prompt, followed by padding.
      positions_BT: Position of each new token in its row, during decoding.
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
        """Whether decode states are kept or read."""
        return self.capacity is not None or self.positions_BT is not None

    def in_parts(self, num_parts: int) -> Callable[[jax.Array], "Context"]:
        """Returns a function from number to the context of that part (see `split_rows`).

        Parts draw different random numbers. For training and scoring, which keep no state.
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
        """Returns this context with the index, random key and shared arrays of a layer."""
        key = self.dropout_key
        if key is not None:
            key = jax.random.fold_in(key, index)
        return dataclasses.replace(self, dropout_key=key, layer=index, shared=Shared(shared or {}))

    def key_for(self, place: int) -> jax.Array | None:
        """Returns the random key of a stream id within a layer."""
        return None if self.dropout_key is None else jax.random.fold_in(self.dropout_key, place)
