"""Sequences in the order of GPT-NeoX's sample index, as for Pythia.

Documents of all epochs are concatenated in random order and split into samples of T + 1 tokens that
share one token with their neighbors; the samples are visited in another random order. Both come
from one numpy RandomState, documents first.

Legend: B samples of a batch, P ranges.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from MaxText.errors import UserError
from MaxText.input_pipeline.local_cache import cached_arrays
from MaxText.input_pipeline.sequences.windows import SequenceOptions, TokenRanges, Windows, expand
from MaxText.input_pipeline.token_store.store import TokenSplit


def document_range(split: str, part: int, num_documents: int) -> tuple[int, int]:
    """Returns a split's document range [first, end), of `969,30,1`.

    Raises UserError unless the shares are nonnegative with a positive sum.
    """
    try:
        shares = [float(share) for share in split.replace("/", ",").split(",")]
        shares = [*shares, 0.0, 0.0][:3]
        total = sum(shares)
        if total <= 0 or min(shares) < 0:
            raise ValueError
    except ValueError:
        raise UserError(
            f"{split!r} is not a division of a data set. Give up to three shares such as 969,30,1."
        ) from None
    ends = np.cumsum([0, *(round(share / total * float(num_documents)) for share in shares)])
    # The rounding error is subtracted from all ends, as GPT-NeoX does.
    ends[1:] -= ends[-1] - num_documents
    return int(ends[part]), int(ends[part + 1])


class GptNeoxSamples(Windows):
    """GPT-NeoX samples in its order: 12 bytes per document, 4 per sample."""

    has_own_order = True

    def __init__(
        self,
        data: TokenSplit,
        options: SequenceOptions,
        seed: int,
        cache_dir: Path,
        num_samples: int | None = None,
        documents: tuple[int, int] | None = None,
    ):
        """Draws the order.

        `num_samples` of the whole run decides how many epochs of documents are shuffled together;
        None is one epoch. `documents` is the range [first, end) to visit. Pythia's seed is 1234.
        Raises UserError if the documents are too few for one sample.
        """
        super().__init__(data, options)
        offsets = data.store.document_offsets
        first, stop = documents or (0, len(offsets) - 1)
        tokens = int(offsets[stop] - offsets[first])
        if tokens < 2 or (num_samples is None and tokens <= self.length):
            raise UserError(
                f"megatron.order=gpt_neox: the documents have {tokens} tokens, too few for a "
                f"sample of {self.length + 1}. Choose a shorter max_target_length or more data."
            )
        epochs = 1
        if num_samples is not None:
            epochs = max(1, -(-(num_samples * self.length + 1) // tokens))
        self._num_samples = (epochs * tokens - 1) // self.length
        # The sample count implies how many epochs are shuffled together, which affects the order.
        self.description = f"GPT-NeoX's order of {self._num_samples:,} samples"

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

    def __len__(self) -> int:
        return self._num_samples

    def _ranges(self, windows: np.ndarray, draws: np.ndarray) -> TokenRanges:
        offsets = self.data.store.document_offsets
        ends = self._arrays["ends"]
        first_B = self._arrays["samples"][windows].astype(np.int64) * self.length
        document_B = np.searchsorted(ends, first_B, side="right")
        counts_B = np.searchsorted(ends, first_B + self.length, side="right") - document_B + 1
        row_P = np.repeat(np.arange(len(windows)), counts_B)
        visit_P = expand(document_B, counts_B)
        document_P = self._arrays["order"][visit_P]
        end_P = ends[visit_P]
        first_P = first_B[row_P]
        stop_P = offsets[document_P + 1]
        begin_P = np.maximum(first_P, end_P - (stop_P - offsets[document_P]))
        shift_P = stop_P - end_P  # from places in the shuffled order to places in the store
        end_P = np.minimum(first_P + self.length + 1, end_P)
        ranges = row_P, begin_P - first_P, begin_P + shift_P, end_P + shift_P
        return TokenRanges(*(values_P[begin_P < end_P] for values_P in ranges))

    def first_window(self, documents: np.ndarray) -> np.ndarray:
        # The order crosses files, so all windows form one group.
        return np.where(documents == 0, 0, len(self))
