"""Slots that were trained before a run grew, at a learning rate of their own."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from MaxText.checkpointing.growth.plan import SLOTS
from MaxText.checkpointing.matching import path_name
from MaxText.parallelism.constraints import ParameterInfo


def slow_old_slots(
    optimizer: optax.GradientTransformation,
    parameters: Mapping[str, ParameterInfo],
    old_slots: Mapping[str, int],
    factor: float,
) -> optax.GradientTransformation:
    """`optimizer` whose updates of old slots, weight decay included, are multiplied by `factor`.

    Its state is that of `optimizer`, so a checkpoint does not depend on the factor.

    Args:
      parameters: name -> facts, of the model to train.
      old_slots: parameter name -> leading slots that are old.
      factor: 0 freezes them.
    """
    if factor == 1 or not old_slots:
        return optimizer

    def slowed(path: Any, update: jax.Array) -> jax.Array:
        name = path_name(path)
        if name not in old_slots:
            return update
        axis = parameters[name].logical_axes.index(SLOTS)
        is_old = jax.lax.broadcasted_iota(jnp.int32, update.shape, axis) < old_slots[name]
        # Not a product with 0, which would let an update that is no number through.
        return jnp.where(is_old, jnp.zeros_like(update) if factor == 0 else factor * update, update)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = optimizer.update(updates, state, params)
        return jax.tree_util.tree_map_with_path(slowed, updates), state

    return optax.GradientTransformation(optimizer.init, update)
