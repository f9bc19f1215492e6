"""Rows in the order of GPT-NeoX's sample index, which Pythia was trained in."""

import numpy as np

from MaxText.input_pipeline.sequences.windows import EMPTY, Cutting, Spans, Windows
from MaxText.input_pipeline.token_store.megatron_order import GptNeoxOrder
from MaxText.input_pipeline.token_store.token_data import TokenData


class SampleWindows(Windows):
    """Sample i is the i-th row of T + 1 tokens that GPT-NeoX would train on.

    Documents in random order are laid end to end and cut every T tokens; the samples are then
    visited in another random order. Both orders come from one seed.
    """

    has_own_order = True

    def __init__(
        self,
        data: TokenData,
        cutting: Cutting,
        seed: int,
        num_samples: int | None = None,
        documents: tuple[int, int] | None = None,
    ):
        """Draws the order.

        Args:
          data: the tokens.
          cutting: how rows are cut.
          seed: GPT-NeoX's (1234 for Pythia).
          num_samples: samples of the whole run, which the order depends on; None for one epoch.
          documents: first document of the part to visit, and its end; None for all.

        Raises:
          UserError: the documents hold no sample.
        """
        super().__init__(data, cutting)
        offsets = data.stream.document_offsets
        self._order = GptNeoxOrder(offsets, cutting.length, seed, num_samples, documents)

    @property
    def description(self) -> str:
        # The order depends on how many passes are shuffled together, which this number tells.
        return f"GPT-NeoX's order of {len(self):,} samples"

    def __len__(self) -> int:
        return len(self._order)

    def spans(self, windows: np.ndarray, draws: np.ndarray) -> Spans:
        parts = []
        for row in np.flatnonzero(windows != EMPTY).tolist():
            place = 0
            for start, stop in self._order.pieces(int(windows[row])):
                parts.append((row, place, start, stop))
                place += stop - start
        return Spans(*np.array(parts, np.int64).reshape(-1, 4).T)

    def first_window(self, documents: np.ndarray) -> np.ndarray:
        # The order crosses files, so all windows are one group.
        return np.where(documents == 0, 0, len(self))
