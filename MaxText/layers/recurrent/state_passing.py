"""States of a recurrence, passed from chunk to chunk and from device to device.

A chunk of tokens changes the state S of a head, keys by values, in one of two forms:

    S <- decay S + addend                                    linear attention, state space models
    S <- decay S + keys^T (values - corrections S)           the delta rule

(Yang et al. 2024, arXiv 2412.06464, section 3.3, has the second.) Decay is one number, or one for
each row of S. All else is batched over chunks, before and after: only this is one after another.

Where the mesh splits sequences, each device has a part of the sequence. A part, too, does S <- M S
+ R: each device computes M and R of its own, all gather them, and each finds the state that its
part begins with from the parts before. M is a decay, or a matrix [K, K] with the delta rule. A
document that begins inside a part has made it 0.

Legend: B sequences, N heads, P parts of a sequence, J chunks of a part, C tokens of a chunk, K
width of keys, V width of values.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from MaxText.layers.dense import einsum
from MaxText.layers.recurrent.chunks import constrain_heads

_BY_PART = ("activation_length", "activation_batch")


class DeltaUpdates(NamedTuple):
    """What the tokens of each chunk do to the state by the delta rule (formula above), float32."""

    decay: jax.Array  # [J, P, B, N, K, 1], or [J, P, B, N, 1, 1]
    keys_JPBNCK: jax.Array
    values_JPBNCV: jax.Array
    corrections_JPBNCK: jax.Array


class CorrectedStates(NamedTuple):
    """The states of a recurrence by the delta rule, float32."""

    before_JPBNKV: jax.Array  # before each chunk
    values_JPBNCV: jax.Array  # values - corrections S of the tokens
    last_BNKV: jax.Array  # after the last token


def pass_decayed_states(
    decay: jax.Array, addends_JPBNKV: jax.Array, initial_BNKV: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the state before each chunk [J, P, B, N, K, V], and the last state.

    Args:
      decay: Of each chunk, [J, P, B, N, K, 1] or [J, P, B, N, 1, 1]; float32, as the others.
      addends_JPBNKV: What each chunk adds.
      initial_BNKV: State before the first token.
    """

    def pass_chunks(state_PBNKV: jax.Array) -> tuple[jax.Array, jax.Array]:
        def advance(
            state_PBNKV: jax.Array, chunk: tuple[jax.Array, jax.Array]
        ) -> tuple[jax.Array, jax.Array]:
            decay, addend_PBNKV = chunk
            return decay * state_PBNKV + addend_PBNKV, state_PBNKV

        return jax.lax.scan(advance, state_PBNKV, (decay, addends_JPBNKV))

    begins_PBNKV = initial_BNKV[None]
    num_parts = addends_JPBNKV.shape[1]
    if num_parts > 1:
        added_PBNKV, _ = pass_chunks(jnp.zeros_like(addends_JPBNKV[0]))
        transition = jnp.prod(decay, axis=0)
        begins_PBNKV = _pass_parts(jnp.multiply, transition, added_PBNKV, initial_BNKV)
    ends_PBNKV, before_JPBNKV = pass_chunks(constrain_heads(begins_PBNKV, *_BY_PART))
    return before_JPBNKV, ends_PBNKV[-1]


def pass_corrected_states(
    updates: DeltaUpdates, initial_BNKV: jax.Array, precision: str | None
) -> CorrectedStates:
    """Returns the state before each chunk, the corrected values of tokens, and the last state.

    Args:
      updates: Of all chunks.
      initial_BNKV: State before the first token.
      precision: Of the products.
    """
    product = functools.partial(einsum, precision=precision)

    def pass_chunks(
        updates: DeltaUpdates, state_PBNKV: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        def advance(
            state_PBNKV: jax.Array, chunk: DeltaUpdates
        ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            decay, keys, values, corrections = chunk
            values -= product("pbnck,pbnkv->pbncv", corrections, state_PBNKV)
            added = product("pbnck,pbncv->pbnkv", keys, values)
            return decay * state_PBNKV + added, (state_PBNKV, values)

        return jax.lax.scan(advance, constrain_heads(state_PBNKV, *_BY_PART), updates)

    begins_PBNKV = initial_BNKV[None]
    _, num_parts, *heads, _, key_width = updates.keys_JPBNCK.shape
    if num_parts > 1:
        values = updates.values_JPBNCV
        nothing = jnp.zeros((num_parts, *heads, key_width, values.shape[-1]), jnp.float32)
        added_PBNKV, _ = pass_chunks(updates, nothing)
        # M is the state after a part that begins with I, without values.
        no_values = jnp.zeros((*values.shape[:-1], key_width), jnp.float32)
        identity = jnp.broadcast_to(jnp.eye(key_width), (num_parts, *heads, key_width, key_width))
        transition, _ = pass_chunks(updates._replace(values_JPBNCV=no_values), identity)
        transform = functools.partial(product, "bnkl,bnlv->bnkv")
        begins_PBNKV = _pass_parts(transform, transition, added_PBNKV, initial_BNKV)
    ends_PBNKV, (before_JPBNKV, values_JPBNCV) = pass_chunks(updates, begins_PBNKV)
    return CorrectedStates(before_JPBNKV, values_JPBNCV, ends_PBNKV[-1])


def _pass_parts(
    transform: Callable[[jax.Array, jax.Array], jax.Array],
    transition: jax.Array,
    added_PBNKV: jax.Array,
    initial_BNKV: jax.Array,
) -> jax.Array:
    """Returns the state before each part, [P, B, N, K, V].

    Args:
      transform: Applies the transition of a part to a state.
      transition: M of each part, [P, B, N, ...].
      added_PBNKV: R of each part.
      initial_BNKV: State before the first token.
    """

    def advance(
        state_BNKV: jax.Array, part: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        transition, added_BNKV = part
        return transform(transition, state_BNKV) + added_BNKV, state_BNKV

    # Every device computes the states of all parts, from what all have gathered.
    transition = constrain_heads(transition, None, "activation_batch")
    added_PBNKV = constrain_heads(added_PBNKV, None, "activation_batch")
    _, begins_PBNKV = jax.lax.scan(advance, initial_BNKV, (transition, added_PBNKV))
    return begins_PBNKV
