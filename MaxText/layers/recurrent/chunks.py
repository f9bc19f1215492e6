"""Sequences divided into chunks of tokens, and which tokens of a chunk share a document.

Recurrent mixers multiply the tokens of a chunk with each other, and pass a state from chunk to
chunk. Where the mesh splits sequences (axis context), a sequence first has a part for each device,
and each part has chunks of its own.

Legend: B sequences, T tokens, P parts of a sequence, J chunks of a part, C tokens of a chunk, N
heads, H numbers of a head.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from MaxText.layers.context import ForwardContext
from MaxText.layers.lowering.shift import earlier_tokens
from MaxText.parallelism.logical_sharding import (
    BRANCH_INPUT,
    current_sharding,
    split_axes,
    with_logical_constraint,
)


@dataclasses.dataclass(frozen=True)
class Chunks:
    """The division of sequences of `length` tokens.

    Attributes:
      length: T.
      num_parts: P; 1 unless the mesh splits sequences.
      size: C.
    """

    length: int
    num_parts: int
    size: int

    @classmethod
    def of(cls, x_BTD: jax.Array, size: int) -> "Chunks":
        """Returns the division of sequences, on the current mesh.

        Args:
          x_BTD: The input of the mixer.
          size: Most tokens of a chunk.
        """
        length = x_BTD.shape[1]
        sharding = current_sharding(BRANCH_INPUT, x_BTD.shape)
        num_parts = 1
        if sharding is not None:
            num_parts = math.prod(sharding.mesh.shape[axis] for axis in split_axes(sharding, 1))
        return cls(length, num_parts, min(size, length // num_parts))

    @property
    def number(self) -> int:
        """J, the chunks of a part."""
        return -(-self.length // (self.num_parts * self.size))

    def split(self, x_BT: jax.Array) -> jax.Array:
        """Returns x [B, T] or [B, T, N, ...] as [J, P, B, C] or [J, P, B, N, C, ...].

        The last chunk of each part is filled with zeros. A mixer for which a token of zeros leaves
        the state unchanged needs no other mask of them.
        """
        batch = x_BT.shape[0]
        x = x_BT.reshape(batch, self.num_parts, -1, *x_BT.shape[2:])
        filled = self.number * self.size
        x = jnp.pad(x, [(0, 0), (0, 0), (0, filled - x.shape[2]), *[(0, 0)] * (x.ndim - 3)])
        x = x.reshape(batch, self.num_parts, self.number, self.size, *x_BT.shape[2:])
        x = jnp.moveaxis(x, 2, 0).swapaxes(1, 2)
        if x_BT.ndim == 2:
            return with_logical_constraint(x, None, "activation_length", "activation_batch", None)
        x = x.swapaxes(3, 4)
        return constrain_heads(x, None, "activation_length", "activation_batch")

    def merge(self, x_JPBNCH: jax.Array) -> jax.Array:
        """Returns [J, P, B, N, C, H] as [B, T, N, H]; the inverse of `split`."""
        _, _, batch, num_heads, _, width = x_JPBNCH.shape
        x_BPJCNH = jnp.transpose(x_JPBNCH, (2, 1, 0, 4, 3, 5))
        x = x_BPJCNH.reshape(batch, self.num_parts, -1, num_heads, width)
        x = x[:, :, : self.length // self.num_parts]
        x_BTNH = x.reshape(batch, self.length, num_heads, width)
        return with_logical_constraint(
            x_BTNH, "activation_batch", "activation_length", "activation_heads", None
        )


def constrain_heads(x: jax.Array, *names: str | None) -> jax.Array:
    """Constrains an array to be split by its heads.

    Args:
      x: Its dimensions are those of `names`, then the heads, then others.
      *names: Logical axes of the dimensions before the heads.
    """
    unconstrained = [None] * (x.ndim - len(names) - 1)
    return with_logical_constraint(x, *names, "activation_heads", *unconstrained)


@dataclasses.dataclass(frozen=True)
class DocumentMasks:
    """Which tokens of a chunk share a document; dimensions J, P and B may be 1.

    Attributes:
      visible_JPBCC: Whether a token (row) sees another (column): it is not later, and of the same
        document.
      continues_JPBC: Whether the document of a token began before the chunk, so that it sees the
        state.
      remains_JPBC: Whether the document of a token continues to the end of the chunk, so that the
        token enters the state.
    """

    visible_JPBCC: jax.Array
    continues_JPBC: jax.Array
    remains_JPBC: jax.Array

    @property
    def keeps_state_JPB(self) -> jax.Array:
        """Whether a whole chunk is of the document that the state is of."""
        return self.continues_JPBC[..., -1]

    @classmethod
    def of(cls, context: ForwardContext, chunks: Chunks) -> "DocumentMasks":
        """Returns the masks of a batch; the first token continues the state's document."""
        begins_BT = begins_document(context, chunks.length)
        if begins_BT is None:
            number_JPBC = jnp.zeros((1, 1, 1, chunks.size), jnp.int32)
        else:
            number_JPBC = jnp.cumsum(chunks.split(begins_BT.astype(jnp.int32)), axis=-1)
        is_same = number_JPBC[..., :, None] == number_JPBC[..., None, :]
        return cls(
            visible_JPBCC=jnp.tril(is_same),
            continues_JPBC=number_JPBC == 0,
            remains_JPBC=number_JPBC == number_JPBC[..., -1:],
        )


def is_token(context: ForwardContext, length: int) -> jax.Array | None:
    """Returns whether each token is one of a prompt and no padding [B, T]; None if all are."""
    if context.lengths_B is None:
        return None
    return jnp.arange(length) < context.lengths_B[:, None]


def begins_document(context: ForwardContext, length: int) -> jax.Array | None:
    """Returns whether each token is the first of a later document [B, T]; None if there is one.

    The first token of a sequence continues the document of the state before it.
    """
    segments_BT = context.segments_BT
    if segments_BT is None:
        return None
    is_later = jnp.arange(length) > 0
    return is_later & (segments_BT != earlier_tokens(segments_BT, 1))
