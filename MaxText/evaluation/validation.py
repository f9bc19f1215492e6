"""Validation loss during training: the loss over held-out data, weighted by targets.

eval.py has its own step (data_set.py), which counts bytes as well.
"""

import collections
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Self

import jax
import jax.numpy as jnp

from MaxText.layers.assembly.model import Model
from MaxText.layers.batch import Batch
from MaxText.layers.params import Params
from MaxText.monitoring.step_line import EvaluationReport
from MaxText.training.metric_names import IN_NATS
from MaxText.training.model_objective import FrozenParams, objective_class
from MaxText.training.objective import loss_sums, loss_weights

_NATS = "nats"  # cross entropy, for an objective whose loss is not in nats
_TOTAL = "total_weights"
_CORRECT = "correct"
_WEIGHT = "weight/"  # before the name of a loss or metric, its weight
_LOSS = "loss/"  # before the name of a loss, its sum
_METRIC = "metric/"  # before the name of a metric that is not minimized, its sum

# (parameters, batch) -> sums; (parameters, batch, frozen parameters) for an objective with some.
EvalStep = Callable[..., dict[str, jax.Array]]


@dataclasses.dataclass(frozen=True)
class ObjectiveTotals:
    """Sums of an objective over an evaluation.

    Attributes:
      losses: Sum of each loss, by name.
      metrics: Sum of each metric that is not minimized, by name.
      weights: What sums are divided by, by name, if that is not `total_weights`.
      total_weights: Sum of the weights of the targets.
      nats: Sum of the cross entropy of the targets; None if unknown.
      correct: Weight of the targets that were the argmax; None if not counted.
    """

    losses: Mapping[str, float]
    metrics: Mapping[str, float]
    weights: Mapping[str, float]
    total_weights: float
    nats: float | None
    correct: float | None

    @classmethod
    def from_sums(cls, sums: Mapping[str, float]) -> Self:
        """Returns the totals of `objective_sums` of all batches; other numbers are ignored."""

        def named(prefix: str) -> dict[str, float]:
            return {
                name.removeprefix(prefix): value
                for name, value in sums.items()
                if name.startswith(prefix)
            }

        losses = named(_LOSS)
        metrics = named(_METRIC)
        return cls(
            losses=losses,
            metrics=metrics,
            weights=named(_WEIGHT),
            total_weights=sums.get(_TOTAL, 0.0),
            nats=(losses | metrics).get(IN_NATS, sums.get(_NATS)),
            correct=sums.get(_CORRECT),
        )

    @property
    def has_perplexity(self) -> bool:
        """Whether a loss is a cross entropy in nats. The others are then auxiliary losses."""
        return IN_NATS in self.losses

    @property
    def total_loss(self) -> float:
        """The objective without auxiliary losses, its mean times `total_weights`."""
        if self.has_perplexity:
            return self.losses[IN_NATS]
        own_weights = self.weights
        return sum(
            value if name not in own_weights else self.total_weights * self._mean(name, value)
            for name, value in self.losses.items()
        )

    @property
    def loss(self) -> float:
        """Mean of the objective without auxiliary losses; NaN without targets."""
        return self.total_loss / (self.total_weights or math.nan)

    @property
    def parts(self) -> dict[str, float]:
        """Means of the losses and metrics that have names of their own, by name."""
        return {
            name: self._mean(name, value)
            for name, value in (*self.losses.items(), *self.metrics.items())
            if name != IN_NATS and name in self.weights
        }

    def _mean(self, name: str, value: float) -> float:
        return value / (self.weights.get(name, self.total_weights) or math.nan)


def objective_sums(
    model: Model,
    params: Params,
    batch: Batch,
    *,
    frozen: FrozenParams | None = None,
    count_correct: bool = False,
) -> dict[str, jax.Array]:
    """Returns sums over a batch, to add up and give to `ObjectiveTotals`.

    Args:
      model: With its objective.
      params: Its parameters.
      batch: Arrays [B, T].
      frozen: Parameters of the models that the objective reads and does not train.
      count_correct: Whether to count the targets that are the argmax, as masked language models
        report them.
    """
    sums = loss_sums(
        model.merge(params),
        batch,
        model.config.objective,
        count_correct=count_correct,
        frozen=frozen,
    )
    outputs = {f"{_LOSS}{name}": value for name, value in sums.target_sums.items()}
    outputs |= {f"{_METRIC}{name}": value for name, value in sums.metric_sums.items()}
    outputs[_TOTAL] = jnp.sum(batch.loss_mask_BT)
    for name, metric in sums.layer_metrics.items():
        outputs |= {f"{_METRIC}{name}": metric.total, f"{_WEIGHT}{name}": metric.weight}
    if objective_class(model.config) is not None:
        # Also those of the targets: a weight says that a loss has a name of its own.
        names = (*sums.target_sums, *sums.metric_sums)
        weights = dict.fromkeys(names, outputs[_TOTAL]) | loss_weights(model, batch)
        outputs |= {f"{_WEIGHT}{name}": weights[name] for name in names}
    if sums.correct is not None:
        outputs[_CORRECT] = sums.correct
    if sums.nats is not None:
        outputs[_NATS] = sums.nats
    return outputs


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
    sums, num_batches = sum_batches(eval_step(params, batch) for batch in batches)
    totals = ObjectiveTotals.from_sums(sums)
    return EvaluationReport(
        step=step,
        total_loss=totals.total_loss,
        total_weights=totals.total_weights,
        num_batches=num_batches,
        seconds=time.perf_counter() - start_time,
        correct=totals.correct,
        has_perplexity=totals.has_perplexity,
        total_nats=totals.nats,
        parts=totals.parts,
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

    def eval_step(
        params: Params, batch: Batch, frozen: FrozenParams | None = None
    ) -> dict[str, jax.Array]:
        return objective_sums(model, params, batch, frozen=frozen, count_correct=count_correct)

    return eval_step


def with_frozen(eval_step: EvalStep, frozen: FrozenParams) -> EvalStep:
    """Returns a step of parameters and batch alone.

    Args:
      eval_step: As of make_eval_step, possibly compiled.
      frozen: Parameters of the models that the objective reads and does not train, on the devices.
    """

    def step(params: Params, batch: Batch) -> dict[str, jax.Array]:
        return eval_step(params, batch, frozen)

    return step
