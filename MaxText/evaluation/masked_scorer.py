"""Batched log-probabilities of hidden tokens under a masked language model.

C: hidden positions of a text.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from MaxText.errors import UserError
from MaxText.evaluation.masked_text import Masked, MaskIds
from MaxText.evaluation.place_reader import PlaceReader, Progress, Row
from MaxText.inference.trained_model import TrainedModel


class HiddenScore(NamedTuple):
    """Scores of the hidden tokens of a text."""

    log_probabilities_C: np.ndarray  # float32, in nats, given all visible tokens
    likeliest_C: np.ndarray  # bool, whether each hidden token is the argmax


class MaskedScorer:
    """Scores hidden tokens under a bidirectional model.

    Inputs match training, except that no token is replaced by a random one: CLS first if the model
    was trained with it, and the mask id at hidden positions. `window` excludes CLS.
    """

    def __init__(self, trained: TrainedModel, ids: MaskIds):
        """Compiles nothing yet. Raises UserError for causal models."""
        if trained.model.section.attention.causal:
            raise UserError(
                "hidden tokens have a probability under a masked language model only "
                "(mlm_training=true), and this model is causal."
            )
        self.ids = ids
        self._reader = PlaceReader(trained, ids)
        self.window = self._reader.window

    def score(self, texts: Sequence[Masked], progress: Progress | None = None) -> list[HiddenScore]:
        """Returns one score per text, in order. Texts have 1 to `window` ids."""
        scores: list[HiddenScore | None] = [None] * len(texts)
        num_done = 0
        rows = [
            Row(ids, hidden, [int(ids[place]) for place in hidden], hidden) for ids, hidden in texts
        ]
        for answers in self._reader.read(rows):
            for row, losses_C, likeliest_C in answers:
                scores[row] = HiddenScore(-losses_C, likeliest_C)
            num_done += len(answers)
            if progress is not None:
                progress(num_done, len(texts))
        assert None not in scores
        return scores  # type: ignore[return-value]
