"""Cuts a token stream into windows of a fixed length, each with targets, weights and segments.

Everything is computed when a window is read, from the document offsets: no index is stored, and
window `i` can be read without any other.

Legend: B windows, T tokens of a window.
"""

import abc
from collections.abc import Sequence

import numpy as np

from MaxText.input_pipeline.token_stream import TokenStream

# Index that stands for "no window": a row whose weights and segments are all 0.
EMPTY = -1


class Windows(abc.ABC):
    """What both ways of cutting share: rows filled from pieces of the stream.

    Attributes:
      stream: the tokens.
      length: T, tokens of a window.
      document_mask: whether documents of a window are kept apart.
      filler_id: id where there is no token.
    """

    def __init__(self, stream: TokenStream, length: int, document_mask: bool, filler_id: int):
        self.stream = stream
        self.length = length
        self.document_mask = document_mask
        self.filler_id = filler_id

    @abc.abstractmethod
    def __len__(self) -> int:
        """Number of windows."""

    @abc.abstractmethod
    def span(self, window: int) -> tuple[int, int]:
        """Place of a window in the stream: start, and the stop of its targets (at most T + 1)."""

    def read(self, windows: Sequence[int]) -> dict[str, np.ndarray]:
        """Reads windows; one call per batch lets the stream read each file once.

        Args:
          windows: indices in [0, len), or EMPTY for a row that counts nowhere.

        Returns:
          Arrays [B, T] by the names of Batch without its suffix: int32 `tokens` and `targets`,
          float32 `weights`, and with `document_mask` int32 `positions` and `segments`.

          A position counts from the first token of its document that is in the window, so it is
          below T. A weight is 0 where there is no next token, and with `document_mask` also
          where the next token begins another document.
        """
        shape = (len(windows), self.length)
        rows = {
            "tokens": np.full(shape, self.filler_id, np.int32),
            "targets": np.full(shape, self.filler_id, np.int32),
            "weights": np.zeros(shape, np.float32),
        }
        if self.document_mask:
            rows["positions"] = np.zeros(shape, np.int32)
            rows["segments"] = np.zeros(shape, np.int32)
        spans = [(0, 0) if window == EMPTY else self.span(window) for window in windows]
        for row, (span, piece) in enumerate(zip(spans, self.stream.ranges(spans), strict=True)):
            inputs = min(piece.size, self.length)
            targets = max(piece.size - 1, 0)
            rows["tokens"][row, :inputs] = piece[:inputs]
            rows["targets"][row, :targets] = piece[1:]
            rows["weights"][row, :targets] = 1
            if self.document_mask and inputs:
                starts = self._document_starts(span[0], span[0] + inputs)
                rows["weights"][row, starts - 1] = 0
                starts = starts[starts < inputs]
                rows["segments"][row, 0] = 1
                rows["segments"][row, starts] = 1
                np.cumsum(rows["segments"][row, :inputs], out=rows["segments"][row, :inputs])
                origin = np.zeros(inputs, np.int32)
                origin[starts] = starts
                np.maximum.accumulate(origin, out=origin)
                rows["positions"][row, :inputs] = np.arange(inputs, dtype=np.int32) - origin
        return rows

    def _document_starts(self, start: int, stop: int) -> np.ndarray:
        """Where documents begin in (start, stop], relative to `start`; the end counts as one."""
        offsets = self.stream.document_offsets
        first, last = np.searchsorted(offsets, [start, stop], side="right")
        return np.asarray(offsets[first:last]) - start


class PackedWindows(Windows):
    """Documents laid end to end, cut every T tokens.

    Window i reads tokens [i T, i T + T) and predicts [i T + 1, i T + T + 1), so each token of
    the stream but the first is a target once. The last window is filled up, not dropped.
    """

    def __len__(self) -> int:
        return max(0, -(-(len(self.stream) - 1) // self.length))

    def span(self, window: int) -> tuple[int, int]:
        start = window * self.length
        return start, min(start + self.length + 1, len(self.stream))


class DocumentWindows(Windows):
    """Each document begins a window of its own; long ones continue in further windows.

    A document of n tokens makes ceil((n - 1) / T) windows: one of a single token, which predicts
    nothing, makes none. Keeps 8 bytes per document in memory.
    """

    def __init__(self, stream: TokenStream, length: int, document_mask: bool, filler_id: int):
        super().__init__(stream, length, document_mask, filler_id)
        sizes = np.diff(stream.document_offsets)
        counts = np.maximum(-(-(sizes - 1) // length), 0)
        self._first_window = np.concatenate([[0], np.cumsum(counts)])

    def __len__(self) -> int:
        return int(self._first_window[-1])

    def span(self, window: int) -> tuple[int, int]:
        document = int(np.searchsorted(self._first_window, window, side="right")) - 1
        begin, end = (
            int(offset) for offset in self.stream.document_offsets[[document, document + 1]]
        )
        start = begin + (window - int(self._first_window[document])) * self.length
        return start, min(start + self.length + 1, end)
