"""Stochastic rounding from float32 to bfloat16, of second moments and of weights."""

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import KeyPath

from MaxText.value_types import PyTree, Tree

_SECOND_MOMENT = "nu"  # field of optax's states, and of those of training/optimizers
_DROPPED_BITS = 16  # of float32 that bfloat16 lacks
_MOMENT_STREAM = 0
_WEIGHT_STREAM = 1


def round_stochastically(x: jax.Array, key: jax.Array) -> jax.Array:
    """Rounds float32 up or down to bfloat16 so that the mean is exact.

    Random bits are added to those that bfloat16 lacks, which are then dropped. Infinities and NaN
    stay.

    Args:
      x: float32, any shape.
      key: A random key. The bits of an element depend on its place and not on the sharding.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    kept = (bits + noise) >> _DROPPED_BITS
    rounded = jax.lax.bitcast_convert_type(kept.astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), rounded, x.astype(jnp.bfloat16))


def add_updates_stochastically(params: Tree, updates: Tree, step: jax.Array) -> Tree:
    """Returns parameters + updates; sums of bfloat16 parameters are rounded stochastically.

    Args:
      params: Arrays of any dtype; those that are not bfloat16 are rounded to the nearest.
      updates: A tree like the parameters.
      step: int32 scalar; each has random bits of its own.
    """

    def add(key: jax.Array, parameter: jax.Array, update: jax.Array) -> jax.Array:
        if parameter.dtype != jnp.bfloat16:
            return optax.apply_updates(parameter, update)  # pyright: ignore[reportReturnType]
        total = parameter.astype(jnp.float32) + update.astype(jnp.float32)
        return round_stochastically(total, key)

    return jax.tree.map(add, _keys(params, step, _WEIGHT_STREAM), params, updates)


def _keys(tree: Tree, step: jax.Array, stream: int) -> Tree:
    """Returns a tree of random keys, one for each leaf."""
    key = jax.random.fold_in(jax.random.key(stream), step)
    structure = jax.tree.structure(tree)
    return structure.unflatten(list(jax.random.split(key, structure.num_leaves)))


def with_second_moments_in(
    transform: optax.GradientTransformation, dtype: str
) -> optax.GradientTransformationExtraArgs:
    """Stores second moments of a transform in `dtype`, and computes with them in float32.

    Args:
      transform: Second moments are leaves below a field `nu` of its state.
      dtype: float32; or bfloat16, which is rounded stochastically. A moment rounded to the nearest
        would not change by less than 1/256 of it, as it does in a step with b2 = 0.999.

    Returns:
      A transform whose `update` needs the argument `step`, int32.
    """
    inner = optax.with_extra_args_support(transform)

    def is_second_moment(path: KeyPath) -> bool:
        return any(getattr(entry, "name", "") == _SECOND_MOMENT for entry in path)

    def cast(state: PyTree, dtype: str) -> PyTree:
        def cast_leaf(path: KeyPath, leaf: jax.Array) -> jax.Array:
            return leaf.astype(dtype) if is_second_moment(path) else leaf

        return jax.tree_util.tree_map_with_path(cast_leaf, state)

    def round_moments(state: PyTree, step: jax.Array) -> PyTree:
        def round_leaf(path: KeyPath, leaf: jax.Array, key: jax.Array) -> jax.Array:
            return round_stochastically(leaf, key) if is_second_moment(path) else leaf

        keys = _keys(state, step, _MOMENT_STREAM)
        return jax.tree_util.tree_map_with_path(round_leaf, state, keys)

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: jax.Array,
    ) -> tuple[optax.Updates, optax.OptState]:
        state = cast(state, "float32")
        updates, state = inner.update(updates, state, params, **extra_args)
        if dtype == "bfloat16":
            return updates, round_moments(state, extra_args["step"])
        return updates, cast(state, dtype)

    return optax.GradientTransformationExtraArgs(
        lambda params: cast(transform.init(params), dtype), update
    )
