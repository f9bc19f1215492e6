"""Validation loss during training: the loss over held-out data, weighted by targets.

eval.py has its own step (data_set.py), which counts bytes as well.
"""

import collections
import itertools
import time
from collections.abc import Callable, Iterable, Mapping

import jax
import jax.numpy as jnp

from MaxText.layers.assembly.model import Model
from MaxText.layers.batch import Batch
from MaxText.layers.params import Params
from MaxText.monitoring.step_line import EvaluationReport
from MaxText.training.objective import IN_NATS, loss_sums

_NATS = "nats"  # cross entropy, for an objective whose loss is not in nats

EvalStep = Callable[[Params, Batch], dict[str, jax.Array]]


def evaluate(
    eval_step: EvalStep,
    params: Params,
    batches: Iterable[Batch],
    *,
    step: int,
) -> EvaluationReport:
    """Evaluates all batches, including a partial last one.

    Args:
      eval_step: As of make_eval_step, possibly compiled.
      params: On device.
      batches: On device.
      step: The last completed training step, for the report.
    """
    start_time = time.perf_counter()
    totals, num_batches = sum_batches(eval_step(params, batch) for batch in batches)
    total_weights = totals.pop("total_weights", 0.0)
    correct = totals.pop("correct", None)
    nats = totals.pop(_NATS, None)
    return EvaluationReport(
        step=step,
        total_loss=totals[IN_NATS] if IN_NATS in totals else sum(totals.values()),
        total_weights=total_weights,
        num_batches=num_batches,
        seconds=time.perf_counter() - start_time,
        correct=correct,
        has_perplexity=IN_NATS in totals,
        total_nats=nats,
    )


def sum_batches(outputs: Iterable[Mapping[str, jax.Array]]) -> tuple[dict[str, float], int]:
    """Returns double-precision sums over batches by name, and the number of batches.

    Fetches outputs one batch late, to keep the device busy.
    """
    totals: dict[str, float] = collections.defaultdict(float)
    num_batches = 0
    for batch_output, _ in itertools.pairwise(itertools.chain(outputs, [{}])):
        for name, value in batch_output.items():
            totals[name] += float(value)
        num_batches += 1
    return totals, num_batches


def make_eval_step(model: Model, *, count_correct: bool = False) -> EvalStep:
    """Returns a function that sums a batch's losses and the weights of its targets.

    With `count_correct` it also counts the targets that are the argmax, as masked language models
    report them.
    """

    def eval_step(params: Params, batch: Batch) -> dict[str, jax.Array]:
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
