"""Inputs of the scorer."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

Progress = Callable[[int, int], None]  # (done, total)


class Continuation(NamedTuple):
    """Ids to score after a context. Both hold at least one id."""

    context: Sequence[int]
    ids: Sequence[int]


def rolling_windows(ids: Sequence[int], prefix: int, window: int) -> list[Continuation]:
    """Splits a text into continuations with each id exactly once.

    Windows are disjoint, except that the last one is moved left until it is full and scores only
    the remaining ids. The first id follows `prefix`. Same as loglikelihood_rolling of
    lm-evaluation-harness.
    """
    found = []
    for start in range(0, len(ids), window):
        end = min(start + window, len(ids))
        context = ids[max(0, end - window - 1) : start] if start else [prefix]
        found.append(Continuation(context, ids[start:end]))
    return found
