"""Sequences in the order of GPT-NeoX's sample index, as for Pythia.

Documents of all epochs are concatenated in random order and split into sequences (GPT-NeoX:
samples) of T + 1 tokens that share one token with their neighbors; they are visited in another
random order. Both orders come from one numpy RandomState, documents first.

Legend: B sequences of a batch, P token ranges.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from MaxText.errors import UserError
from MaxText.input_pipeline.local_cache import cached_arrays
from MaxText.input_pipeline.sequences.slicing import (
    SequenceOptions,
    SequenceSlicer,
    TokenRanges,
    concatenated_ranges,
)
from MaxText.input_pipeline.token_store.token_dataset import TokenDataset


def document_range(split: str, part: int, num_documents: int) -> tuple[int, int]:
    """Returns the documents [first, end) of one part of a dataset.

    Args:
      split: Up to three shares of the documents, such as `969,30,1` or `90/10`.
      part: Index of the share: 0 is training, 1 validation, 2 test.
      num_documents: Documents of the dataset.

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
            f"{split!r} is not a division of a data set. Give up to three shares such as 969,30,1."
        ) from None
    ends = np.cumsum([0, *(round(share / total * float(num_documents)) for share in shares)])
    # The rounding error is subtracted from all ends, as GPT-NeoX does.
    ends[1:] -= ends[-1] - num_documents
    return int(ends[part]), int(ends[part + 1])


class GptNeoxSequences(SequenceSlicer):
    """GPT-NeoX's samples in its order: 12 bytes per document, 4 per sequence.

    Sequence indices follow GPT-NeoX's order, over all epochs, so they must not be shuffled again.
    """

    has_own_order = True

    def __init__(
        self,
        dataset: TokenDataset,
        options: SequenceOptions,
        seed: int,
        cache_dir: Path,
        *,
        num_sequences: int | None = None,
        documents: tuple[int, int] | None = None,
    ):
        """Draws the order.

        Args:
          dataset: The tokens.
          options: T is `options.length`.
          seed: Seed of numpy's RandomState; 1234 for Pythia.
          cache_dir: Folder for the order.
          num_sequences: Sequences of the whole run, which decide how many epochs of documents are
            shuffled together; None is one epoch.
          documents: Range [first, end) of the documents to visit; None is all.

        Raises:
          UserError: The documents are too few for one sequence.
        """
        super().__init__(dataset, options)
        offsets = dataset.store.document_offsets
        first, stop = documents or (0, len(offsets) - 1)
        num_tokens = int(offsets[stop] - offsets[first])
        if num_tokens < 2 or (num_sequences is None and num_tokens <= self.length):
            raise UserError(
                f"megatron.order=gpt_neox: the documents have {num_tokens} tokens, too few for a "
                f"sample of {self.length + 1}. Choose a shorter max_target_length or more data."
            )
        epochs = 1
        if num_sequences is not None:
            epochs = max(1, -(-(num_sequences * self.length + 1) // num_tokens))
        self._num_sequences = (epochs * num_tokens - 1) // self.length
        # The count implies how many epochs are shuffled together, which affects the order.
        self.description = f"GPT-NeoX's order of {self._num_sequences:,} samples"

        def draw() -> Iterator[dict[str, np.ndarray]]:
            random = np.random.RandomState(seed)
            order = np.tile(np.arange(first, stop, dtype=np.int32), epochs)
            random.shuffle(order)
            sizes = np.diff(offsets[first : stop + 1])[order - first]
            is_large = self._num_sequences >= 2**32 - 2
            samples = np.arange(self._num_sequences, dtype=np.int64 if is_large else np.uint32)
            random.shuffle(samples)
            # order: document of each visit. ends: tokens up to the end of each visit. samples:
            # GPT-NeoX's sample of each sequence index.
            yield {"order": order, "ends": np.cumsum(sizes, dtype=np.int64), "samples": samples}

        key = f"{dataset.fingerprint} {self.length} {seed} {epochs} {first} {stop}"
        self._arrays = cached_arrays(cache_dir, "gpt_neox1", key, draw)

    def __len__(self) -> int:
        return self._num_sequences

    def _token_ranges(
        self, sequence_indices_B: np.ndarray, random_bits_B: np.ndarray
    ) -> TokenRanges:
        """Returns a range for each document that a sequence has tokens of.

        A visit is one occurrence of a document in the shuffled order over all epochs.
        """
        offsets = self.dataset.store.document_offsets
        ends = self._arrays["ends"]
        # Tokens are counted in the shuffled order of documents, until they are shifted below.
        first_B = self._arrays["samples"][sequence_indices_B].astype(np.int64) * self.length
        first_visit_B = np.searchsorted(ends, first_B, side="right")
        end_visit_B = np.searchsorted(ends, first_B + self.length, side="right") + 1
        num_visits_B = end_visit_B - first_visit_B
        row_P = np.repeat(np.arange(len(sequence_indices_B)), num_visits_B)
        visit_P = concatenated_ranges(first_visit_B, num_visits_B)
        document_P = self._arrays["order"][visit_P]
        first_P = first_B[row_P]
        visit_end_P = ends[visit_P]
        document_end_P = offsets[document_P + 1]
        visit_begin_P = visit_end_P - (document_end_P - offsets[document_P])
        begin_P = np.maximum(first_P, visit_begin_P)
        end_P = np.minimum(first_P + self.length + 1, visit_end_P)
        shift_P = document_end_P - visit_end_P  # from the shuffled order to the store
        has_tokens = begin_P < end_P
        return TokenRanges(
            row_P=row_P[has_tokens],
            position_P=(begin_P - first_P)[has_tokens],
            start_P=(begin_P + shift_P)[has_tokens],
            stop_P=(end_P + shift_P)[has_tokens],
        )

    def first_sequences(self, documents_D: np.ndarray) -> np.ndarray:
        """Returns 0 for document 0, else the number of sequences."""
        # The order crosses files, so all sequences form one group.
        return np.where(documents_D == 0, 0, len(self))
