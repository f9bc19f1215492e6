"""Detects runs with a final loss worse than an untrained model's."""

import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

_WINDOW = 9  # reports whose median is the current loss: a spike of four hardly moves it
# Margin above a level, as a share of the first loss, but at least so many nats, because losses of
# small batches vary by a few tenths.
_MARGIN_SHARE, _MIN_MARGIN = 0.05, 0.25


class LossTrend:
    """The trend of the training loss, saved with each checkpoint.

    A run has diverged if its loss, the median of the last nine reports (of the newer half if
    fewer), is above that of its first step, or above the unigram baseline after having been below
    it or above the first loss. A run that is merely short has not.
    """

    def __init__(self, baseline: float | None = None, state: Mapping[str, Any] | None = None):
        """Starts or resumes from `state`; `baseline` is in nats per token."""
        state = state or {}
        self._baseline = baseline
        self._first: float | None = state.get("first")
        self._lowest = _number(state.get("lowest"))
        self._highest = _number(state.get("highest"), -math.inf)
        self._reports = int(state.get("reports", 0))
        self._last = [_number(loss) for loss in state.get("last", ())]

    def add(self, loss: float | None) -> None:
        """Records a loss in nats per token; None or NaN counts as infinite."""
        loss = math.inf if loss is None or not math.isfinite(loss) else loss
        if self._first is None:
            self._first = loss
        self._reports += 1
        self._last = [*self._last, loss][-_WINDOW:]
        now = self._now()
        self._lowest, self._highest = min(self._lowest, now), max(self._highest, now)

    def add_rows(
        self, rows: Iterable[Mapping[str, Any]], tag: str = "learning/lm_loss"
    ) -> "LossTrend":
        for row in rows:
            if tag in row and not row.get("learning/skipped"):
                self.add(row[tag])
        return self

    def roll_back(self) -> None:
        self._last, self._highest = [], -math.inf

    @property
    def state(self) -> dict[str, Any]:
        return {
            "first": self._first,
            "lowest": _finite(self._lowest),
            "highest": _finite(self._highest),
            "reports": self._reports,
            "last": [_finite(loss) for loss in self._last],
        }

    @property
    def diverged(self) -> str:
        """Description of a divergence; empty if there is none."""
        if self._first is None or len(self._last) < 2:
            return ""
        now, baseline = self._now(), self._baseline
        ended = f"the training loss ended at {now:.3f}, above"
        margin = max(_MIN_MARGIN, _MARGIN_SHARE * self._first)
        above_first = self._first + margin
        if now > above_first:
            return f"{ended} its first value {self._first:.3f}"
        if baseline is not None and now > baseline + margin:
            ended += f" the unigram baseline of {baseline:.3f}, "
            if self._lowest < baseline:
                return f"{ended}below which it had been"
            if self._highest > above_first:
                return f"{ended}after it had risen above its first value"
        return ""

    def _now(self) -> float:
        newer = self._last[-max(1, math.ceil(self._reports / 2)) :]
        return statistics.median(newer)


def _number(value: Any, absent: float = math.inf) -> float:
    return absent if value is None else float(value)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
