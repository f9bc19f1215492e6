"""The train state."""

import dataclasses

import jax
import optax

from MaxText.layers.params import Params
from MaxText.training.spike_guard import GuardState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything the next step depends on, besides the data."""

    step: jax.Array  # int32 scalar, steps so far, skipped ones included
    params: Params  # as checkpoints hold them; Model.merge makes a decoder of them
    opt_state: optax.OptState  # of make_optimizer's chain
    guard: GuardState | None = None  # None if the guard is disabled
    # Of the parameters, in float32 (parameter_average.py); None if none are averaged.
    average: Params | None = None
