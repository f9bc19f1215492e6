"""What a run carries from step to step."""

import dataclasses
from typing import Any

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything the next step depends on, besides the data.

    Attributes:
      step: int32 scalar, updates so far, those left out included.
      params: nested dict of arrays.
      opt_state: the optimizer's state (optax).
      guard: what earlier updates looked like (spike_guard.GuardState); None where no update is
        ever left out.
    """

    step: Any
    params: Any
    opt_state: Any
    guard: Any = None
