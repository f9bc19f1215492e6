"""Casts and layouts of arrays inside the scan over layers."""

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from MaxText.layers.params import Params
from MaxText.parallelism.logical_sharding import (
    HIDDEN,
    current_num_stages,
    current_sharding,
    has_mesh,
    platform,
    split_axes,
)
from MaxText.value_types import Tree


def with_token_major_layout(tree: Tree) -> Tree:
    """Constrains hidden states [B, T, ...] to a token-major layout on TPU, without transposes.

    Not where tokens or stages are split, too: to constrain such arrays XLA gathers them whole, 288
    GB in a step of 7B on 4 stages of 8 chips (libtpu 0.0.42). No effect without a mesh, as exported
    programs are for other machines, too.
    """
    if not has_mesh() or platform() != "tpu":
        return tree

    def token_major(x: jax.Array) -> jax.Array:
        sharding = current_sharding(HIDDEN[: x.ndim], x.shape[: len(HIDDEN)])
        if sharding is not None and (split_axes(sharding, 1) or current_num_stages() > 1):
            return x
        return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))

    return jax.tree.map(token_major, tree)


def keep_casts_in_loop(weights: Params) -> Params:
    """Keeps casts of a layer's matrices in the loop over layers.

    On TPU, XLA otherwise casts the whole stack before the forward pass and keeps the copy through
    the backward pass: 0.4 of 15.1 GB for a 1.4B model on 4 chips. It moves casts out of loops even
    through barriers, but not through reduce_precision, which changes no bit here. No effect without
    a mesh, as exported programs are for other machines, too.
    """
    if not has_mesh() or platform() != "tpu":
        return weights

    def hold(x: jax.Array) -> jax.Array:
        # Kernels with heads get another layout before the loop, for which they had better be cast.
        if x.dtype != jnp.float32 or x.ndim > 2:
            return x
        return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=23)

    return jax.tree.map(hold, weights)
