"""Sequences in the order of GPT-NeoX's sample index, in which Pythia was trained.

Documents are concatenated in random order, over all epochs at once, and split into samples of T + 1
tokens that share one token with their neighbors; the samples are visited in another random order.
Both come from one numpy RandomState, documents first.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from MaxText.errors import UserError
from MaxText.input_pipeline.array_cache import cached_arrays
from MaxText.input_pipeline.sequences.windows import EMPTY, Cutting, Spans, Windows
from MaxText.input_pipeline.token_store.store import TokenData


def document_range(split: str, part: int, num_documents: int) -> tuple[int, int]:
    """Returns the first document and the end of part 0, 1 or 2 of data split as `969,30,1`.

    Args:
      split: Shares of training, validation and test, separated by commas or slashes.

    Raises:
      UserError: The shares are not nonnegative numbers with a positive sum.
    """
    try:
        shares = [float(share) for share in split.replace("/", ",").split(",")]
        shares = [*shares, 0.0, 0.0][:3]
        total = sum(shares)
        if total <= 0 or min(shares) < 0:
            raise ValueError
    except ValueError:
        raise UserError(
            f"{split!r} is no division of a data set. Give up to three shares such as 969,30,1."
        ) from None
    ends = np.cumsum([0, *(round(share / total * float(num_documents)) for share in shares)])
    # What rounding made too many or too few is taken from all ends alike, as GPT-NeoX does.
    ends[1:] -= ends[-1] - num_documents
    return int(ends[part]), int(ends[part + 1])


class SampleWindows(Windows):
    """The samples of GPT-NeoX in its order.

    Maps 12 bytes per document and epoch, and 4 per sample.
    """

    has_own_order = True

    def __init__(
        self,
        data: TokenData,
        cutting: Cutting,
        seed: int,
        cache_dir: Path,
        num_samples: int | None = None,
        documents: tuple[int, int] | None = None,
    ):
        """Draws the order.

        Args:
          seed: GPT-NeoX's (1234 for Pythia).
          cache_dir: Folder for the orders of large data.
          num_samples: Samples of the whole run, which decide how many epochs of documents are
            shuffled together; None for one epoch.
          documents: First document and end of the part to visit; None for all.

        Raises:
          UserError: The documents hold no sample.
        """
        super().__init__(data, cutting)
        offsets = data.store.document_offsets
        first, stop = documents or (0, len(offsets) - 1)
        tokens = int(offsets[stop] - offsets[first])
        if tokens < 2 or (num_samples is None and tokens <= self.length):
            raise UserError(
                f"megatron_order=gpt_neox: the documents have {tokens} tokens, too few for a "
                f"sample of {self.length + 1}. Choose a shorter max_target_length or more data."
            )
        epochs = 1
        if num_samples is not None:
            epochs = max(1, -(-(num_samples * self.length + 1) // tokens))
        self._num_samples = (epochs * tokens - 1) // self.length

        def draw() -> Iterator[dict[str, np.ndarray]]:
            random = np.random.RandomState(seed)
            order = np.tile(np.arange(first, stop, dtype=np.int32), epochs)
            random.shuffle(order)
            ends = np.cumsum(np.diff(offsets[first : stop + 1])[order - first], dtype=np.int64)
            is_large = self._num_samples >= 2**32 - 2
            samples = np.arange(self._num_samples, dtype=np.int64 if is_large else np.uint32)
            random.shuffle(samples)
            yield {"order": order, "ends": ends, "samples": samples}

        key = f"{data.fingerprint} {self.length} {seed} {epochs} {first} {stop}"
        self._arrays = cached_arrays(cache_dir, "gpt_neox1", key, draw)

    @property
    def description(self) -> str:
        # The order depends on how many passes are shuffled together, which this number tells.
        return f"GPT-NeoX's order of {len(self):,} samples"

    def __len__(self) -> int:
        return self._num_samples

    def spans(self, windows: np.ndarray, draws: np.ndarray) -> Spans:
        parts = []
        for row in np.flatnonzero(windows != EMPTY).tolist():
            place = 0
            for start, stop in self.pieces(int(windows[row])):
                parts.append((row, place, start, stop))
                place += stop - start
        return Spans(*np.array(parts, np.int64).reshape(-1, 4).T)

    def first_window(self, documents: np.ndarray) -> np.ndarray:
        # The order crosses files, so all windows are one group.
        return np.where(documents == 0, 0, len(self))

    def pieces(self, sample: int) -> list[tuple[int, int]]:
        """Returns the token ranges (start, stop) of a sample, one of each document it touches."""
        offsets, ends = self.data.store.document_offsets, self._arrays["ends"]
        start = int(self._arrays["samples"][sample]) * self.length
        stop = start + self.length + 1
        first, last = np.searchsorted(ends, [start, stop - 1], side="right").tolist()
        pieces = []
        for place in range(first, last + 1):
            end = int(ends[place])
            document = int(self._arrays["order"][place])
            document_start, document_stop = int(offsets[document]), int(offsets[document + 1])
            # Tokens of the order that lie before this document, and what of it is in the sample.
            before = end - (document_stop - document_start)
            low, high = max(start, before), min(stop, end)
            if low < high:
                pieces.append((document_start + low - before, document_start + high - before))
        return pieces
