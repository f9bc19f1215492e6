"""Batched log-probabilities of continuations of contexts."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from MaxText.errors import UserError
from MaxText.evaluation.place_reader import PlaceReader, Progress, Row
from MaxText.inference.trained_model import TrainedModel


class Continuation(NamedTuple):
    """Ids to score after a context. Both hold at least one id."""

    context: Sequence[int]
    ids: Sequence[int]


class Score(NamedTuple):
    """Score of a continuation."""

    log_probability: float  # in nats, summed over the ids
    is_greedy: bool  # whether each id is the argmax


# For each row, (continuation index, its number of positions) in order.
_Owners = list[list[tuple[int, int]]]


class ContinuationScorer:
    """Scores continuations under a causal model; `window` is max_target_length."""

    def __init__(self, trained: TrainedModel):
        """Compiles nothing yet. Raises UserError for non-causal models."""
        if not trained.model.section.attention.causal:
            raise UserError(
                "continuations have a probability under a causal model only, and this one has "
                "causal=false: it was trained to fill in hidden tokens. eval.py scores such a "
                "model with eval_tasks=[lambada,wikitext] and on data sets."
            )
        self._reader = PlaceReader(trained)
        self.window = self._reader.window

    def score(
        self, continuations: Sequence[Continuation], progress: Progress | None = None
    ) -> list[Score]:
        """Returns one score per continuation, in order.

        Contexts that exceed the window are truncated on the left. Raises UserError for a
        continuation without ids or longer than the window.
        """
        rows, owners = self._rows(continuations)
        scores: list[Score | None] = [None] * len(continuations)
        num_done = 0
        for answers in self._reader.read(rows):
            for row, losses_C, likeliest_C in answers:
                start = 0
                for owner, count in owners[row]:
                    part = slice(start, start + count)
                    total = float(np.sum(losses_C[part], dtype=np.float64))
                    scores[owner] = Score(-total, bool(likeliest_C[part].all()))
                    start += count
                num_done += len(owners[row])
            if progress is not None:
                progress(num_done, len(continuations))
        assert None not in scores
        return scores  # type: ignore[return-value]

    def _rows(self, continuations: Sequence[Continuation]) -> tuple[list[Row], _Owners]:
        """Deduplicates inputs: one-token answers to a question share a pass."""
        found: dict[bytes, tuple[np.ndarray, list[int], list[int], list[tuple[int, int]]]] = {}
        for number, (context, ids) in enumerate(continuations):
            if not ids or len(ids) > self.window:
                raise UserError(
                    f"continuation {number} has {len(ids)} tokens, and between 1 and the model's "
                    f"window of max_target_length={self.window} can be scored at once."
                )
            assert context, "a continuation needs an id to follow"
            whole = np.array([*context, *ids][-(self.window + 1) :], np.int32)
            read = whole[:-1]
            _, places, targets, owners = found.setdefault(read.tobytes(), (read, [], [], []))
            places += range(len(read) - len(ids), len(read))
            targets += ids
            owners.append((number, len(ids)))
        rows = [Row(read, places, targets) for read, places, targets, _ in found.values()]
        return rows, [owners for *_, owners in found.values()]


def rolling(ids: Sequence[int], prefix: int, window: int) -> list[Continuation]:
    """Splits a text into continuations that score each id exactly once.

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
