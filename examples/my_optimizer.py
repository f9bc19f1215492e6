"""Cautious AdamW (Liang et al. 2024, arXiv 2411.16085) as an optimizer.

    python MaxText/train.py configs/quickstart.yml run_name=cautious \
        opt_type=cautious_adamw import_modules=[examples/my_optimizer.py]

An optimizer gives the direction alone: clipping, weight decay and the learning rate are those of
every run, and their keys are the usual ones.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import optax

from MaxText.config.keys import Section, key
from MaxText.layers.part import register
from MaxText.parallelism.logical_sharding import ParamSpec


class Keys(Section):
    """Cautious AdamW."""

    cautious_b1: float = key(0.9, "Decay of the first moment.", ge=0, lt=1)
    cautious_b2: float = key(0.95, "Decay of the second moment.", ge=0, lt=1)
    cautious_floor: float = key(
        1e-3, "Smallest share of numbers that the others are scaled for.", gt=0, le=1
    )


@register("optimizer", "cautious_adamw", keys=Keys)
def cautious_adamw(
    config: Keys, parameters: Mapping[str, ParamSpec]
) -> optax.GradientTransformation:
    """Returns AdamW without updates against the gradient.

    Numbers of an update whose sign is not that of the gradient are set to 0, and the others are
    divided by their share (algorithm 1 of the paper).

    Args:
      config: Keys of the optimizer.
      parameters: Shape and logical axes of each parameter, by name; not needed here.

    Returns:
      The transformation of gradients to directions, which the program subtracts.
    """
    adam = optax.scale_by_adam(b1=config.cautious_b1, b2=config.cautious_b2)

    def mask(direction: jax.Array, gradient: jax.Array) -> jax.Array:
        agrees = (direction * gradient > 0).astype(direction.dtype)
        return direction * agrees / jnp.maximum(jnp.mean(agrees), config.cautious_floor)

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        directions, state = adam.update(updates, state, params)
        return jax.tree.map(mask, directions, updates), state

    return optax.GradientTransformation(adam.init, update)
