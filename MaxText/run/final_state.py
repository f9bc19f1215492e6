"""Judges the state after the last step, which no later step has tested.

The loss of a step is that of the state before it, so a last step can break the parameters without
any metric to show it. One more step on known batches, whose result is thrown away, shows it: it is
compiled already, and the spike guard decides with its own limits.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from MaxText.training.metric_names import as_scalars
from MaxText.training.spike_guard import GuardState
from MaxText.training.state import TrainState

# Skipped steps in a row at the end that make a run end as diverged. Fewer can be bad batches.
MAX_SKIPPED_AT_END = 2

_CHECKED = ("loss", "grad_norm", "param_norm")


def skipped_at_end(guard: GuardState | None, last_step: int) -> int:
    """Returns how many steps in a row up to the last one were skipped.

    At most as many as the guard's window has. Blocks on the device.

    Args:
      guard: The guard of the final state; None if it is disabled, which skips nothing.
      last_step: The last step of the run.
    """
    if guard is None:
        return 0
    skipped_W = np.asarray(jax.device_get(guard.skipped_W))
    window = len(skipped_W)
    count = 0
    while count < min(window, last_step + 1) and skipped_W[(last_step - count) % window]:
        count += 1
    return count


def broken_state_reason(
    train_step: Callable[[Any, Any], tuple[Any, Mapping[str, Any]]],
    state: TrainState,
    batches: Iterable[Any],
    loss_limit: float,
) -> str:
    """Returns why a state is broken, or "" if it is not.

    A state is broken if one more step on each of the batches would be skipped: a single batch can
    be an outlier. Without batches it is not broken. Whether a state that is not broken is healthy
    is decided by `checkpointing/health.py`.

    Args:
      train_step: (state, batch) -> (state, metrics).
      state: The state, which is used up (donated).
      batches: On the devices, the newest first.
      loss_limit: Without a guard in the state, a loss up to this one is accepted.
    """
    reason = ""
    for batch in batches:
        state, outputs = train_step(state, batch)
        metrics = as_scalars(jax.device_get(dict(outputs)))
        is_finite = all(math.isfinite(metrics[name]) for name in _CHECKED)
        accepted = not metrics["skipped"] if "skipped" in metrics else metrics["loss"] <= loss_limit
        if is_finite and accepted:
            return ""
        if not reason:  # of the newest batch
            reason = f"loss {metrics['loss']:.4g}, grad_norm {metrics['grad_norm']:.4g}"
    return reason
