"""Slices a token dataset into fixed-length training sequences.

A slicer knows which ranges of tokens form the sequence of an index; `batch_arrays` reads them into
arrays. Everything is computed from document offsets on reading; only plans for whole documents are
cached. See the package's docstring for the words.

Legend: B sequences of a batch, T tokens of a sequence, P token ranges of a batch, D documents, S
sequences of the dataset, G groups.
"""

import abc
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from MaxText.input_pipeline.local_cache import cached_arrays
from MaxText.input_pipeline.token_store.store import document_sizes
from MaxText.input_pipeline.token_store.token_dataset import TokenDataset

NO_SEQUENCE = -1
"""Sequence index past the end of the data: a row of padding, with weights and segments 0."""


class TokenRanges(NamedTuple):
    """Token ranges of some sequences, int64 [P] each, ordered by row and position."""

    row_P: np.ndarray  # row of the sequence that holds the range
    position_P: np.ndarray  # position of the range's first token in the sequence
    start_P: np.ndarray  # first token in the store
    stop_P: np.ndarray  # token after the last in the store; the last target is included
    num_context_P: np.ndarray | None = None  # leading targets without weight; None: none


class TokenOrigin(NamedTuple):
    """Tokens of a sequence that come from one document."""

    document: str  # name
    first_token: int  # counted within the document
    num_tokens: int


@dataclasses.dataclass(frozen=True)
class SequenceOptions:
    """Options for slicing."""

    length: int  # T, tokens of a sequence
    cross_document_attention: bool = False  # treat the documents of a sequence as one
    zero_loss: bool = True  # count targets with id 0
    truncate: bool = False  # drop the tokens of a document beyond one sequence


class SequenceSlicer(abc.ABC):
    """Base class for slicing a token dataset into sequences; `len` counts them.

    Attributes:
      ranges_are_joined: Ranges of a sequence are consecutive, so the first token of a range is the
        target of the token before it, and n tokens fill n - 1 positions of the whole sequence. Else
        the n tokens of each range fill n - 1 positions.
      is_single_document: No sequence has tokens of several documents.
      has_own_order: Shuffling must keep the order of sequences.
      uses_random_bits: `token_ranges` uses its random bits.
      padding_share: Share of positions without a target; 0 with packing.
      description: Identifies the sequences in data positions ("cut").
      has_documents: Batches hold positions and segment ids.
    """

    ranges_are_joined = True
    is_single_document = False
    has_own_order = False
    uses_random_bits = False
    padding_share = 0.0
    description = ""

    def __init__(self, dataset: TokenDataset, options: SequenceOptions):
        self.dataset = dataset
        self.options = options
        self.length = options.length
        self.has_documents = not (options.cross_document_attention or self.is_single_document)

    @abc.abstractmethod
    def __len__(self) -> int:
        """Returns the number of sequences, each of which occurs once per epoch."""

    def begin_step(self, sequence_index: int) -> None:
        """Called before a step is read, with the first sequence of it or after it.

        Only streams, which are read in order, need it.
        """
        return

    def token_ranges(
        self, sequence_indices_B: np.ndarray, random_bits_B: np.ndarray
    ) -> TokenRanges:
        """Returns the token ranges of sequences.

        Args:
          sequence_indices_B: int64 [B], in [0, len) or NO_SEQUENCE, which has no range.
          random_bits_B: uint64 [B], used if `uses_random_bits`.
        """
        rows = np.flatnonzero(sequence_indices_B != NO_SEQUENCE)
        ranges = self._token_ranges(sequence_indices_B[rows], random_bits_B[rows])
        return ranges._replace(row_P=rows[ranges.row_P])

    @abc.abstractmethod
    def _token_ranges(
        self, sequence_indices_B: np.ndarray, random_bits_B: np.ndarray
    ) -> TokenRanges:
        """Returns the token ranges of sequences in [0, len); `row_P` indexes the argument."""

    def first_sequences(self, documents_D: np.ndarray) -> np.ndarray:
        """Returns the first sequence (int64 [D]) of each document.

        For the number of documents, the end of the data, it is len(self).
        """
        raise NotImplementedError  # evaluation has no groups of files

    def origins(self, sequence_index: int, random_bits: int) -> list[TokenOrigin]:
        """Returns which tokens of which documents form a sequence, last target included."""
        ranges = self.token_ranges(np.array([sequence_index]), np.array([random_bits], np.uint64))
        store = self.dataset.store
        offsets = store.document_offsets
        origins = []
        for start, stop in zip(ranges.start_P.tolist(), ranges.stop_P.tolist(), strict=True):
            token = start
            while token < stop:
                document = int(np.searchsorted(offsets, token, side="right")) - 1
                end = min(stop, int(offsets[document + 1]))
                first_token = token - int(offsets[document])
                origins.append(TokenOrigin(store.document_name(document), first_token, end - token))
                token = end
        return origins


def concatenated_ranges(first_G: np.ndarray, count_G: np.ndarray) -> np.ndarray:
    """Returns the integers of G ranges [first, first + count), one range after the other."""
    before_G = np.cumsum(count_G) - count_G
    return np.arange(int(count_G.sum())) + np.repeat(first_G - before_G, count_G)


def planned_ranges(
    first_range_S: np.ndarray, sequence_indices_B: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the row and the index in a plan (int64 [P] each) of the ranges of sequences.

    `first_range_S` (int64 [S + 1]) is the first range of each sequence of the plan, and the end.
    """
    first_B = first_range_S[sequence_indices_B]
    count_B = first_range_S[sequence_indices_B + 1] - first_B
    row_P = np.repeat(np.arange(len(sequence_indices_B)), count_B)
    return row_P, concatenated_ranges(first_B, count_B)


def one_range_each(start_B: np.ndarray, stop_B: np.ndarray) -> TokenRanges:
    """Returns the ranges of sequences that consist of one range, at position 0."""
    num_sequences = len(start_B)
    return TokenRanges(
        row_P=np.arange(num_sequences),
        position_P=np.zeros(num_sequences, np.int64),
        start_P=start_B,
        stop_P=stop_B,
    )


def side_by_side(row_P: np.ndarray, start_P: np.ndarray, stop_P: np.ndarray) -> TokenRanges:
    """Returns separate ranges placed one after the other in their rows.

    A range of n tokens fills n - 1 positions: its last token is only a target.
    """
    num_targets_P = stop_P - start_P - 1
    before_P = np.cumsum(num_targets_P) - num_targets_P
    before_row_P = before_P[np.searchsorted(row_P, row_P)]
    return TokenRanges(row_P, before_P - before_row_P, start_P, stop_P)


class ConcatThenSplit(SequenceSlicer):
    """Documents concatenated, then split every T tokens.

    Sequence i has the tokens [i T, i T + T) and as targets the tokens one later, so each token but
    the first is a target once. The last sequence is padded, not dropped.
    """

    description = "documents end to end"

    def __len__(self) -> int:
        num_targets = len(self.dataset.store) - 1
        return max(0, -(-num_targets // self.length))

    def _token_ranges(
        self, sequence_indices_B: np.ndarray, random_bits_B: np.ndarray
    ) -> TokenRanges:
        start_B = sequence_indices_B * self.length
        stop_B = np.minimum(start_B + self.length + 1, len(self.dataset.store))
        return one_range_each(start_B, stop_B)

    def first_sequences(self, documents_D: np.ndarray) -> np.ndarray:
        """Returns the sequence that contains the first token of each document."""
        num_tokens = len(self.dataset.store)
        offsets_D = np.asarray(self.dataset.store.document_offsets[documents_D])
        return np.where(offsets_D >= num_tokens, len(self), offsets_D // self.length)


class SplitDocuments(SequenceSlicer):
    """Each document starts a new sequence; long ones take several (packing=false).

    A document of n tokens makes ceil((n - 1) / T) sequences, at most one with `truncate`. A single
    token, which predicts nothing, makes none. Maps 8 bytes per document.
    """

    is_single_document = True

    def __init__(self, dataset: TokenDataset, options: SequenceOptions, cache_dir: Path):
        super().__init__(dataset, options)
        end = "cut off" if options.truncate else "continued"
        self.description = f"one document per row, {end}"
        # The target of a position is the next token, except with labels: those have the same
        # position as their token.
        self._target_shift = 0 if dataset.labels is not None else 1
        key = f"{dataset.fingerprint} {self.length} {options.truncate} {self._target_shift}"
        # The kind and the arrays have the names under which they are cached.
        self._plan = cached_arrays(cache_dir, "windows1", key, self._count_sequences)
        num_positions = max(len(self) * self.length, 1)
        self.padding_share = 1 - float(self._plan["num_targets"][0]) / num_positions

    def _count_sequences(self) -> Iterator[dict[str, np.ndarray]]:
        """Yields blocks of `first_window` [D + 1] and, in the last one, `num_targets` [1].

        The former is the first sequence of each document, and the end.
        """
        offsets = self.dataset.store.document_offsets
        num_sequences = 0
        num_targets = 0
        for sizes_D in document_sizes(offsets):
            targets_D = sizes_D - self._target_shift
            count_D = np.maximum(-(-targets_D // self.length), 0)
            if self.options.truncate:
                count_D = np.minimum(count_D, 1)
            num_targets += int(np.minimum(np.maximum(targets_D, 0), count_D * self.length).sum())
            end_D = np.cumsum(count_D)
            yield {
                "first_window": num_sequences + end_D - count_D,
                "num_targets": np.empty(0, np.int64),
            }
            num_sequences += int(end_D[-1])
        yield {
            "first_window": np.array([num_sequences]),
            "num_targets": np.array([num_targets]),
        }

    @property
    def _first_sequence_D(self) -> np.ndarray:
        return self._plan["first_window"]

    def __len__(self) -> int:
        return int(self._first_sequence_D[-1])

    def _token_ranges(
        self, sequence_indices_B: np.ndarray, random_bits_B: np.ndarray
    ) -> TokenRanges:
        first_sequence_D = self._first_sequence_D
        offsets = self.dataset.store.document_offsets
        document_B = np.searchsorted(first_sequence_D, sequence_indices_B, side="right") - 1
        index_in_document_B = sequence_indices_B - first_sequence_D[document_B]
        start_B = offsets[document_B] + index_in_document_B * self.length
        stop_B = np.minimum(start_B + self.length + self._target_shift, offsets[document_B + 1])
        return one_range_each(start_B, stop_B)

    def first_sequences(self, documents_D: np.ndarray) -> np.ndarray:
        """Returns the first sequence of each document."""
        return self._first_sequence_D[documents_D]


class StitchedDocuments(SequenceSlicer):
    """One sequence from each `stitch` documents (GPT-Neo's documents_* sampling).

    With s tokens in these documents, the sequence starts at 0, or with `random` uniformly in
    0..s - (T + 1). If s < T + 1 it is padded. Tokens outside it are not seen in that epoch.
    """

    def __init__(self, dataset: TokenDataset, options: SequenceOptions, stitch: int, random: bool):
        super().__init__(dataset, options)
        self._stitch = stitch
        self.uses_random_bits = random
        start = "a random place" if random else "the beginning"
        self.description = f"a window from {start} of {stitch} documents"

    def __len__(self) -> int:
        num_documents = len(self.dataset.store.document_offsets) - 1
        return -(-num_documents // self._stitch)

    def _token_ranges(
        self, sequence_indices_B: np.ndarray, random_bits_B: np.ndarray
    ) -> TokenRanges:
        offsets = self.dataset.store.document_offsets
        first_document_B = sequence_indices_B * self._stitch
        end_document_B = np.minimum(first_document_B + self._stitch, len(offsets) - 1)
        start_B = np.asarray(offsets[first_document_B])
        end_B = np.asarray(offsets[end_document_B])
        if self.uses_random_bits:
            num_starts_B = np.maximum(end_B - start_B - self.length, 1).astype(np.uint64)
            start_B = start_B + (random_bits_B % num_starts_B).astype(np.int64)
        stop_B = np.minimum(start_B + self.length + 1, end_B)
        rows = np.flatnonzero(stop_B > start_B)  # without documents that are all empty
        return one_range_each(start_B[rows], stop_B[rows])._replace(row_P=rows)

    def first_sequences(self, documents_D: np.ndarray) -> np.ndarray:
        """Returns the first sequence that begins with each document or one after it."""
        return -(-documents_D // self._stitch)
