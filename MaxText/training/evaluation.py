"""Loss over held-out data: the sum over all targets divided by their number."""

import time
from collections.abc import Callable, Iterable
from typing import Any

import jax

from MaxText.monitoring.step_line import EvaluationReport


def evaluate(
    eval_step: Callable[[Any, Any], dict[str, jax.Array]],
    params: Any,
    batches: Iterable[Any],
    *,
    step: int,
) -> EvaluationReport:
    """Runs over all batches, the last partial one included.

    Sums are read one batch late, so that the device always has work, and added in double precision.

    Args:
      eval_step: (params, batch) -> sums over the batch (training.step.make_eval_step).
      batches: on devices.
      step: the last update done before, for the report.
    """
    began = time.perf_counter()
    totals = {"lm_loss": 0.0, "total_weights": 0.0}
    num_batches = 0
    waiting: dict[str, jax.Array] | None = None

    def add(sums: dict[str, jax.Array] | None) -> None:
        for name in totals if sums is not None else ():
            totals[name] += float(sums[name])  # type: ignore[index]

    for batch in batches:
        sums = eval_step(params, batch)
        add(waiting)
        waiting = sums
        num_batches += 1
    add(waiting)
    return EvaluationReport(
        step=step,
        total_loss=totals["lm_loss"],
        total_weights=totals["total_weights"],
        num_batches=num_batches,
        seconds=time.perf_counter() - began,
    )
