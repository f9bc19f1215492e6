"""Log-probabilities of continuations and of hidden tokens."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from MaxText.errors import UserError
from MaxText.evaluation.masked_text import Masked, MaskIds
from MaxText.evaluation.position_scorer import PositionScorer, Progress, ScoreRequest, ScoreResult
from MaxText.inference.trained_model import TrainedModel


class Continuation(NamedTuple):
    """Ids to score after a context. Both hold at least one id."""

    context: Sequence[int]
    ids: Sequence[int]


class Loglikelihood(NamedTuple):
    """Score of a continuation."""

    log_probability: float  # in nats, summed over the ids
    is_greedy: bool  # whether each id is the argmax


class LoglikelihoodScorer:
    """Scores continuations under a causal model."""

    def __init__(self, trained: TrainedModel):
        """Compiles nothing yet. Raises UserError for non-causal models."""
        if not trained.model.config.attention.causal:
            raise UserError(
                "only causal models can score continuations, and this model has causal=false: it "
                "was trained to predict masked tokens. eval.py scores it with "
                "eval_tasks=[lambada,wikitext] and on data sets."
            )
        self._scorer = PositionScorer(trained)
        self.window = self._scorer.window

    def score(
        self, continuations: Sequence[Continuation], progress: Progress | None = None
    ) -> list[Loglikelihood]:
        """Returns one score per continuation, in order.

        Contexts that exceed the window are truncated on the left. Raises UserError for a
        continuation without ids or longer than the window.
        """
        requests, owners = self._requests(continuations)
        scores: dict[int, Loglikelihood] = {}
        for results in self._scorer.score(requests):
            for result in results:
                start = 0
                for owner, count in owners[result.request]:
                    part = slice(start, start + count)
                    total = float(np.sum(result.log_probabilities_C[part], dtype=np.float64))
                    scores[owner] = Loglikelihood(total, bool(result.is_argmax_C[part].all()))
                    start += count
            if progress is not None:
                progress(len(scores), len(continuations))
        return [scores[number] for number in range(len(continuations))]

    def _requests(
        self, continuations: Sequence[Continuation]
    ) -> tuple[list[ScoreRequest], list[list[tuple[int, int]]]]:
        """Deduplicates inputs: one-token answers to a question share a pass.

        Also returns (continuation index, its number of positions) for each request, in order.
        """
        by_input: dict[bytes, tuple[ScoreRequest, list[tuple[int, int]]]] = {}
        for number, (context, ids) in enumerate(continuations):
            if not ids or len(ids) > self.window:
                raise UserError(
                    f"continuation {number} has {len(ids)} tokens; it must have between 1 and "
                    f"max_target_length={self.window}."
                )
            if not context:
                raise ValueError(f"continuation {number} has no context: put a bos or eos id first")
            whole = np.array([*context, *ids][-(self.window + 1) :], np.int32)
            read = whole[:-1]
            request, owners = by_input.setdefault(read.tobytes(), (ScoreRequest(read, [], []), []))
            request.positions.extend(range(len(read) - len(ids), len(read)))
            request.targets.extend(ids)
            owners.append((number, len(ids)))
        return [one for one, _ in by_input.values()], [owners for _, owners in by_input.values()]


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


class MaskedScorer:
    """Scores hidden tokens under a bidirectional model.

    Inputs match training, except that no token is replaced by a random one: CLS first if the model
    was trained with it, and the mask id at hidden positions. `window` excludes CLS.
    """

    def __init__(self, trained: TrainedModel, ids: MaskIds):
        """Compiles nothing yet. Raises UserError for causal models."""
        if trained.model.config.attention.causal:
            raise UserError(
                "only masked language models (mlm_training=true) can score hidden tokens, and "
                "this model is causal."
            )
        self.ids = ids
        self._scorer = PositionScorer(trained, ids)
        self.window = self._scorer.window

    def score(self, texts: Sequence[Masked], progress: Progress | None = None) -> list[ScoreResult]:
        """Returns one result per text, in order. Texts have 1 to `window` ids."""
        found: list[ScoreResult] = []
        requests = [
            ScoreRequest(ids, list(hidden), [int(ids[position]) for position in hidden], hidden)
            for ids, hidden in texts
        ]
        for results in self._scorer.score(requests):
            found += results
            if progress is not None:
                progress(len(found), len(texts))
        return sorted(found, key=lambda result: result.request)
