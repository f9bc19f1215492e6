"""Detects runs with a final loss worse than an untrained model's.

Such a run ends with plausible numbers and an exit code of 0 otherwise. The difficulty is noise: a
short run on small batches must not count as diverged, so each comparison has a margin that grows
with the measured scatter of the losses.
"""

import itertools
import math
import statistics
from collections.abc import Mapping
from typing import Any, NamedTuple

from MaxText.value_types import JsonValue

_WINDOW = 9  # reports whose median is the current loss: a spike of four hardly moves it
_SCATTER_WINDOW = 33  # newest reports that the scatter is measured on
# Differences between reports that measure a scatter; with fewer, a small one may be chance.
_MIN_DIFFERENCES = 16
_MIN_ROUGH_DIFFERENCES = 6
_ASSUMED_SCATTER = 0.3  # nats per step at least until it is measured, as of 32 to 64 tokens
_SIGMA = 1.4826  # standard deviation / median absolute deviation of normal noise
# Margin above a level, as a share of the first loss, but at least so many nats.
_MARGIN_SHARE = 0.05
_MIN_MARGIN = 0.25
# The margin grows with the scatter: so many standard deviations between the first report and the
# last median, between the first report and the highest median, and between two medians. With these,
# at most 1 % of runs on pure noise of any length count as diverged (tests/monitoring/
# test_loss_trend.py).
_DEVIATIONS_OF_LAST = 5.0
_DEVIATIONS_OF_HIGHEST = 6.5
_DEVIATIONS_OF_MEDIANS = 3.5
# No scatter explains a rise of the first loss itself, or of so many nats: as in the spike guard.
_EARLY_LOSS_RISE = 4.0
# as in the spike guard
_OUTLIER_DEVIATIONS = 6.0
_MIN_DEVIATION_SHARE = 0.03


class _Report(NamedTuple):
    """A reported loss, the mean over `steps` steps."""

    loss: float
    steps: int


class LossTrend:
    """The trend of the training loss, saved with each checkpoint.

    A run has diverged if its loss, the median of the last nine reports (of the newer half if
    fewer), is above that of its first step, or above the unigram baseline after having been below
    it or above the first loss. Differences that the scatter of the losses explains do not count. A
    run that is merely short or noisy has not diverged.
    """

    def __init__(self, baseline: float | None = None, state: Mapping[str, Any] | None = None):
        """Starts a trend, or resumes one.

        Args:
          baseline: Loss of a model that knows only how often each token occurs (unigram entropy),
            in nats per token; None if there is none to compare with.
          state: The property `state` of an earlier trend.
        """
        state = state or {}
        self._baseline = baseline
        self._first: float | None = state.get("first")
        self._first_steps = int(state.get("first_steps", 1))
        self._lowest = _number(state.get("lowest"))
        self._highest = _number(state.get("highest"), -math.inf)
        self._reports = int(state.get("reports", 0))
        losses = [_number(loss) for loss in state.get("last", ())]
        steps = state.get("last_steps", ())
        self._last = [
            _Report(loss=loss, steps=num_steps)
            for loss, num_steps in zip(losses, steps, strict=True)
        ]
        self._early_scatter: float | None = state.get("early_scatter")

    def add(self, loss: float | None, steps: int = 1) -> None:
        """Records a reported loss.

        Args:
          loss: Mean over the steps, in nats per token. None or NaN counts as infinite.
          steps: Number of steps that it is the mean of.
        """
        loss = math.inf if loss is None or not math.isfinite(loss) else loss
        steps = max(steps, 1)
        if self._first is None:
            self._first = loss
            self._first_steps = steps
        self._reports += 1
        self._last = [*self._last, _Report(loss, steps)][-_SCATTER_WINDOW:]
        if self._early_scatter is None:
            self._early_scatter = _scatter(self._last, _MIN_DIFFERENCES)
        # The extremes of fewer reports would be those of single losses.
        if len(self._last) >= _WINDOW:
            current = self._current()
            self._lowest = min(self._lowest, current)
            self._highest = max(self._highest, current)

    def roll_back(self) -> None:
        """Forgets the last reports, which a rollback has undone, but not the lowest loss."""
        self._last = []
        self._highest = -math.inf

    @property
    def state(self) -> dict[str, Any]:
        """All that the trend depends on, as JSON values; infinity is None."""
        return {
            "first": self._first,
            "first_steps": self._first_steps,
            "lowest": _finite(self._lowest),
            "highest": _finite(self._highest),
            "reports": self._reports,
            "last": [_finite(report.loss) for report in self._last],
            "last_steps": [report.steps for report in self._last],
            "early_scatter": self._early_scatter,
        }

    @property
    def diverged(self) -> str:
        """Description of a divergence; empty if there is none."""
        first = self._first
        baseline = self._baseline
        if first is None or len(self._last) < 2:
            return ""
        current = self._current()
        ended = f"the training loss ended at {current:.3f}, above"
        if current > first + self._margin(_DEVIATIONS_OF_LAST, self._first_steps):
            return f"{ended} its first value {first:.3f}"
        newest = self._last[-_WINDOW:]
        steps_of_median = statistics.median(report.steps for report in newest)
        margin = self._margin(_DEVIATIONS_OF_MEDIANS, steps_of_median)
        if baseline is not None and current > baseline + margin:
            ended += f" the unigram baseline of {baseline:.3f}, "
            if self._lowest < baseline and current > self._lowest + margin:
                return f"{ended}below which it had been"
            if self._highest > first + self._margin(_DEVIATIONS_OF_HIGHEST, self._first_steps):
                return f"{ended}after it had risen above its first value"
        return ""

    @property
    def outlier_limit(self) -> float:
        """Loss above which a single step is an outlier of the last reports; infinite without any.

        For runs without a spike guard, whose limit is the same over more steps.
        """
        losses = [report.loss for report in self._last[-_WINDOW:] if math.isfinite(report.loss)]
        if not losses:
            return math.inf
        median = statistics.median(losses)
        if len(self._last) < _WINDOW:
            return median + max(abs(median), _EARLY_LOSS_RISE)
        deviation = max(self._step_scatter(), _MIN_DEVIATION_SHARE * max(abs(median), 1.0))
        return median + _OUTLIER_DEVIATIONS * deviation

    def _margin(self, deviations: float, steps: float) -> float:
        """Returns the rise above a mean of `steps` steps that does not count, in nats.

        Args:
          deviations: Standard deviations that noise may explain.
          steps: Steps in the mean that the loss is compared with.
        """
        first = abs(self._first or 0.0)
        noise = deviations * self._step_scatter() / math.sqrt(steps)
        noise = min(noise, max(first, _EARLY_LOSS_RISE))
        return max(_MIN_MARGIN, _MARGIN_SHARE * first, noise)

    def _step_scatter(self) -> float:
        """Returns the standard deviation of a step's loss around its trend.

        The smaller one of the first and of the newest reports: losses of a run that diverges
        scatter more than the first ones did.
        """
        newest = _scatter(self._last, _MIN_DIFFERENCES)
        measured = [value for value in (newest, self._early_scatter) if value is not None]
        if measured:
            return min(measured)
        return max(_ASSUMED_SCATTER, _scatter(self._last, _MIN_ROUGH_DIFFERENCES) or 0.0)

    def _current(self) -> float:
        """Returns the current loss: the median of the last reports, at most nine.

        Of fewer than 17 reports in all, only the newer half counts: the older ones are of a model
        that had learned less.
        """
        newest = self._last[-_WINDOW:]
        half = max(1, math.ceil(self._reports / 2))
        return statistics.median(report.loss for report in newest[-half:])


def _scatter(reports: list[_Report], min_differences: int) -> float | None:
    """Returns the standard deviation of a step's loss; None from too few reports.

    From differences between successive reports, so that neither a trend nor a jump counts, and with
    their median absolute deviation, so that spikes do not.
    """
    differences = [
        (newer.loss - older.loss) / math.sqrt(1 / newer.steps + 1 / older.steps)
        for older, newer in itertools.pairwise(reports)
        if math.isfinite(older.loss) and math.isfinite(newer.loss)
    ]
    if len(differences) < min_differences:
        return None
    median = statistics.median(differences)
    return _SIGMA * statistics.median(abs(difference - median) for difference in differences)


def _number(value: JsonValue, absent: float = math.inf) -> float:
    return absent if value is None else float(value)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
