"""Average of the parameters over the last steps, in the train state beside them."""

from typing import cast

import jax
import jax.numpy as jnp

from MaxText.config.training_sections import ParameterAverageConfig
from MaxText.layers.params import Params


def initial_average(config: ParameterAverageConfig, params: Params) -> Params | None:
    """Returns the parameters in float32; None if none are averaged."""
    if config.type == "none":
        return None
    return jax.tree.map(lambda parameter: parameter.astype(jnp.float32), params)


def update_average(
    config: ParameterAverageConfig, average: Params | None, params: Params, step: jax.Array
) -> Params | None:
    """Returns the average after a step; None if there is none.

    Of n averaged steps, a mean gives each the weight 1 / n. An exponential moving average gives the
    newest 1 / horizon, and is a mean until n = horizon, so that it does not depend on the
    parameters before the first averaged step.

    Args:
      config: type, start_step and horizon.
      average: Before the step, float32.
      params: After the step. A skipped step counts again what it left.
      step: Number of the step, int32.
    """
    if average is None:
        return None
    num_steps = step - config.start_step + 1
    weight = 1.0 / jnp.maximum(num_steps, 1).astype(jnp.float32)
    if config.type == "ema":
        weight = jnp.maximum(weight, 1.0 / config.horizon)

    def add(old: jax.Array, parameter: jax.Array) -> jax.Array:
        parameter = parameter.astype(jnp.float32)
        return jnp.where(num_steps <= 1, parameter, old + weight * (parameter - old))

    return jax.tree.map(add, average, params)


def averaged_params(average: Params, params: Params) -> Params:
    """Returns the average in the dtypes of the parameters, to evaluate."""
    return cast(Params, jax.tree.map(lambda x, like: x.astype(like.dtype), average, params))
