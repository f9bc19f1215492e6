"""The optimizer's update in the train step: how often, when and where XLA computes it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from MaxText.layers.params import Params
from MaxText.parallelism.logical_sharding import platform


def fetch_from_host(gradients: Params, opt_state: optax.OptState) -> tuple[Params, optax.OptState]:
    """Returns the gradients, and the optimizer state copied from host memory to the device.

    A barrier makes the copy begin once gradients exist and activations have left the device, so
    that both never need memory at the same time.
    """
    gradients, opt_state = jax.lax.optimization_barrier((gradients, opt_state))
    return gradients, jax.device_put(opt_state, jax.memory.Space.Device)


def compute_update_once(updates: optax.Updates) -> optax.Updates:
    """Returns the updates; on CPU XLA computes them once instead of twice.

    XLA fuses multiplications into each of their users, so it would compute updates twice, for their
    norm and the parameters. It never copies a division. So this divides by a one, and a barrier
    hides that the division does nothing.
    """
    if platform() != "cpu":
        return updates
    hidden_one = jax.lax.optimization_barrier(jnp.ones(()))
    return jax.tree.map(lambda update: update / hidden_one.astype(update.dtype), updates)


class UpdateInputs(NamedTuple):
    """What an update is computed from, and the decision on it."""

    gradients: Params
    opt_state: optax.OptState
    params: Params
    accept: jax.Array  # bool scalar


def repeating_updates_saves_memory() -> bool:
    """Returns whether an update had better be computed again after the decision on it: on TPU.

    Computed after the decision, new values overwrite the old ones in place. That saves the memory
    and traffic of new values next to the old ones, and costs the FLOPs of an update. CPUs copy
    what passes a barrier and would save nothing.
    """
    return platform() == "tpu"


def after_decision(inputs: UpdateInputs) -> UpdateInputs:
    """Returns the inputs, which exist only once the decision does.

    An update of them is another computation to XLA, which it does not merge with the first one.
    """
    return jax.lax.optimization_barrier(inputs)
