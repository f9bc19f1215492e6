"""Names of the metrics of a train step.

A step reports its loss, the parts of it, and other numbers under names of one space. Objectives and
layers bring names of their own, which may not be those of other metrics.
"""

import math
from collections.abc import Mapping

import numpy as np

from MaxText.layers.part_scalars import PER_LAYER
from MaxText.training import spike_guard

IN_NATS = "lm_loss"  # name of a loss that is a cross entropy at the targets, in nats

# Metrics of a step that are no part of its loss, besides norms by layer, "grad_norm/layer_0".
_NOT_LOSSES = frozenset(
    ("log_z", "grad_norm", "update_norm", "param_norm", "learning_rate", "total_weights")
)
_NORMS = frozenset(("grad_norm", "update_norm", "param_norm", "update_ratio"))  # of every layer
# Names that no objective or layer may use: the above, the guard's, the sum of all losses, what the
# records derive from others, and what an evaluation counts.
_TAKEN = (
    _NOT_LOSSES
    | spike_guard.METRICS
    | {"loss", "perplexity", "current_learning_rate"}
    | {"avg_loss", "avg_perplexity", "total_loss", "masked_accuracy", "seconds"}
)


def is_loss(name: str) -> bool:
    """Returns whether a metric of a train step is its loss, a part of it, or a mean beside it.

    The latter are metrics of the objective and of layers. All of these are reported as means since
    the last report, so that the parts add up to the loss.
    """
    return "/" not in name and name not in _NOT_LOSSES and name not in spike_guard.METRICS


def name_problem(name: str) -> str | None:
    """Returns why an objective or a layer may not give a loss or metric this name, or None.

    The text follows the name in a message.
    """
    if name in _TAKEN:
        return "the name of another metric: rename it"
    if "/" in name:  # the names of parts of others, which are not averaged over steps
        return "which contains a slash: rename it"
    return None


def as_scalars(metrics: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Returns the metrics of a step as numbers, arrays by layer as "<name>/layer_0" and so on.

    A layer that has not returned a metric has no number; it has a NaN in the array, and so has a
    layer whose metric is none.
    """
    scalars = {}
    for name, value in metrics.items():
        if not name.endswith(PER_LAYER):
            scalars[name] = np.asarray(value).item()
            continue
        is_norm = name.removesuffix(PER_LAYER) in _NORMS
        for layer, number in enumerate(np.asarray(value).tolist()):
            if is_norm or not math.isnan(number):
                scalars[f"{name}_{layer}"] = number
    return scalars
