"""What a run carries from step to step."""

import dataclasses
from typing import Any

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything the next step depends on, besides the data.

    Attributes:
      step: int32 scalar, updates done so far.
      params: nested dict of arrays.
      opt_state: the optimizer's state (optax).
    """

    step: Any
    params: Any
    opt_state: Any
