"""Loss over held-out data, weighted by targets."""

import collections
import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from MaxText.layers.assembly.model import Model
from MaxText.layers.batch import Batch
from MaxText.metrics.step_line import EvaluationReport
from MaxText.training.objective import IN_NATS, loss_sums

_NATS = "nats"  # cross entropy beside an objective that has none


def evaluate(
    eval_step: Callable[[Any, Any], dict[str, jax.Array]],  # as of make_eval_step
    params: Any,
    batches: Iterable[Any],  # on device
    *,
    step: int,  # last completed training step
) -> EvaluationReport:
    """Evaluates all batches, including a partial last one."""
    began = time.perf_counter()
    totals, num_batches = sum_batches(eval_step(params, batch) for batch in batches)
    total_weights = totals.pop("total_weights", 0.0)
    correct = totals.pop("correct", None)
    nats = totals.pop(_NATS, None)
    return EvaluationReport(
        step=step,
        total_loss=totals[IN_NATS] if IN_NATS in totals else sum(totals.values()),
        total_weights=total_weights,
        num_batches=num_batches,
        seconds=time.perf_counter() - began,
        correct=correct,
        has_perplexity=IN_NATS in totals,
        total_nats=nats,
    )


def sum_batches(outputs: Iterable[Mapping[str, jax.Array]]) -> tuple[dict[str, float], int]:
    """Returns double-precision sums over batches and their number.

    Fetches outputs one batch late, to keep the device busy.
    """
    totals: dict[str, float] = collections.defaultdict(float)
    num_batches = 0
    for waiting, _ in itertools.pairwise(itertools.chain(outputs, [{}])):
        for name, value in waiting.items():
            totals[name] += float(value)
        num_batches += 1
    return totals, num_batches


def make_eval_step(
    model: Model, *, count_correct: bool = False
) -> Callable[[dict, Batch], dict[str, jax.Array]]:
    """Returns a step to sum loss, weight and optionally argmax hits."""

    def eval_step(params, batch: Batch) -> dict[str, jax.Array]:
        module = model.merge(params)
        objective = model.config.objective
        sums = loss_sums(module, batch, objective, count_correct=count_correct)
        counts = {"total_weights": jnp.sum(batch.loss_mask_BT)}
        if sums.correct is not None:
            counts["correct"] = sums.correct
        if sums.nats is not None:
            counts[_NATS] = sums.nats
        return sums.target_sums | counts

    return eval_step
