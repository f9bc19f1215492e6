"""Cautious AdamW (Liang et al. 2024, arXiv 2411.16085) as an optimizer.

    python MaxText/train.py configs/quickstart.yml run_name=cautious \
        opt_type=cautious_adamw import_modules=[examples/my_optimizer.py]

An optimizer gives the direction alone: clipping, weight decay and the learning rate are those of
every run, and their keys are the usual ones.
"""

import jax
import jax.numpy as jnp
import optax

from MaxText.config.keys import Section, key
from MaxText.layers.part import register


class Keys(Section):
    """Cautious AdamW."""

    cautious_b1: float = key(0.9, "Decay of the first moment.", ge=0, lt=1)
    cautious_b2: float = key(0.95, "Decay of the second moment.", ge=0, lt=1)
    cautious_floor: float = key(
        1e-3, "Smallest share of numbers that the others are scaled for.", gt=0, le=1
    )


@register("optimizer", "cautious_adamw", keys=Keys)
def cautious_adamw(config, parameters):
    """AdamW without updates against the gradient."""
    adam = optax.scale_by_adam(b1=config.cautious_b1, b2=config.cautious_b2)

    def masked(update, gradient):
        agrees = (update * gradient > 0).astype(update.dtype)
        return update * agrees / jnp.maximum(jnp.mean(agrees), config.cautious_floor)

    def update(gradients, state, params=None):
        directions, state = adam.update(gradients, state, params)
        return jax.tree.map(masked, directions, gradients), state

    return optax.GradientTransformation(adam.init, update)
