"""The train state."""

import dataclasses
from typing import Any

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything the next step depends on, besides the data."""

    step: Any  # int32 scalar, updates so far, skipped ones included
    params: Any  # nested dict of arrays
    opt_state: Any  # of optax
    guard: Any = None  # spike_guard.GuardState; None if the guard is disabled
