"""Optimizers that treat every element of a parameter alike: AdamW, Lion, SGD."""

from typing import Any

import jax.numpy as jnp
import optax

from MaxText.config.registry import register
from MaxText.config.training_sections import OptimizerConfig
from MaxText.training.optimizers.parameter_trees import ParamSpecs


@register("optimizer", "adamw")
def adamw(config: OptimizerConfig, parameters: ParamSpecs) -> optax.GradientTransformation:
    """Adam (Kingma and Ba 2015), or uncorrected as in BERT and GPT-Neo.

    Weight decay is a link of its own in the chain (`make_optimizer`), decoupled as in AdamW.

    Args:
      config: Of the optimizer. Without adam_bias_correction, the moments are not divided by
        1 - b^count.
      parameters: Not read: moments are like any parameter.
    """
    adam = scale_by_adam(config)
    if config.adam_bias_correction:
        return adam

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.ScaleByAdamState]:
        """Updates as at an infinite count, where the correction is 1, and counts on its own."""
        # The correction divides by 1 - b^count, which is 1 after many updates.
        many = state._replace(count=jnp.full_like(state.count, jnp.iinfo(jnp.int32).max))
        new_state: Any
        updates, new_state = adam.update(updates, many, params)
        count = optax.safe_increment(state.count)
        return updates, state._replace(count=count, mu=new_state.mu, nu=new_state.nu)

    return optax.GradientTransformation(adam.init, update)


def scale_by_adam(
    config: OptimizerConfig, *, nesterov: bool = False
) -> optax.GradientTransformation:
    """Returns optax's Adam with the configured constants, for all or some parameters.

    Args:
      config: Of the optimizer.
      nesterov: Whether to look ahead (Dozat 2016).
    """
    return optax.scale_by_adam(
        b1=config.adam_b1,
        b2=config.adam_b2,
        eps=config.adam_eps,
        eps_root=config.adam_eps_root,
        mu_dtype=config.mu_dtype or None,
        nesterov=nesterov,
    )


@register("optimizer", "lion")
def lion(config: OptimizerConfig, parameters: ParamSpecs) -> optax.GradientTransformation:
    """Lion (Chen et al. 2023): the sign of interpolated momentum."""
    mu_dtype = config.mu_dtype or None
    return optax.scale_by_lion(b1=config.adam_b1, b2=config.adam_b2, mu_dtype=mu_dtype)


@register("optimizer", "sgd")
def sgd(config: OptimizerConfig, parameters: ParamSpecs) -> optax.GradientTransformation:
    """Stochastic gradient descent, with momentum."""
    return optax.trace(decay=config.momentum, nesterov=config.nesterov)
