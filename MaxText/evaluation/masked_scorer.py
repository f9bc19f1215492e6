"""Log-probabilities of hidden tokens under a masked language model, many texts at a time.

Legend: C hidden places of a text.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from MaxText.errors import UserError
from MaxText.evaluation.masked_text import Masked, MaskIds
from MaxText.evaluation.place_reader import PlaceReader, Progress, Row
from MaxText.inference.trained_model import TrainedModel


class HiddenScore(NamedTuple):
    """What the model says of the hidden tokens of a text.

    Attributes:
      log_probabilities_C: float32, of each hidden token given all that is not hidden, in nats.
      likeliest_C: bool, whether each is the likeliest id at its place.
    """

    log_probabilities_C: np.ndarray
    likeliest_C: np.ndarray


class MaskedScorer:
    """Scores hidden tokens under a trained model that sees both sides.

    The model reads a text as it did in training: after CLS where it had one, with the mask at each
    hidden place, and without random ids.

    Attributes:
      ids: of mask and CLS.
      window: tokens of a text that the model reads at most (max_target_length, less one for CLS).
    """

    def __init__(self, trained: TrainedModel, ids: MaskIds):
        """Compiles nothing yet.

        Raises:
          UserError: a causal model, or a batch that the devices do not divide.
        """
        if trained.model.section.attention.causal:
            raise UserError(
                "hidden tokens have a probability under a masked language model only "
                "(mlm_training=true), and this model is causal."
            )
        self.ids = ids
        self._reader = PlaceReader(trained, ids)
        self.window = self._reader.window

    def score(self, texts: Sequence[Masked], progress: Progress | None = None) -> list[HiddenScore]:
        """One score for each text, in their order; each is one forward pass of its length.

        Every text has at least one id and at most `window`.
        """
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
