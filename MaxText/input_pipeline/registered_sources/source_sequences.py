"""Training sequences of records and of streams.

Those of a DocumentSource are made by the slicers of prepared datasets.

Legend: B sequences of a batch, T tokens of a sequence.
"""

import dataclasses

import numpy as np

from MaxText.input_pipeline.registered_sources.indexed_stores import SourceRecords
from MaxText.input_pipeline.registered_sources.stream_store import StreamPosition, StreamStore
from MaxText.input_pipeline.sequences.slicing import (
    ConcatThenSplit,
    SequenceOptions,
    SequenceSlicer,
    TokenOrigin,
    TokenRanges,
    one_range_each,
)
from MaxText.input_pipeline.token_store.token_dataset import TokenDataset

_MAX_SEQUENCES = 2**32 - 1  # what OrderedSequences takes


class RecordSequences(SequenceSlicer):
    """The records of a RecordSource; each is a sequence."""

    is_single_document = True
    description = "records"

    def __init__(self, dataset: TokenDataset, options: SequenceOptions):
        # A whole sequence is one document: the store has no offsets.
        super().__init__(dataset, dataclasses.replace(options, cross_document_attention=True))

    @property
    def _store(self) -> SourceRecords:
        store = self.dataset.store
        assert isinstance(store, SourceRecords)
        return store

    def __len__(self) -> int:
        return len(self._store.reader)

    def _token_ranges(
        self, sequence_indices_B: np.ndarray, random_bits_B: np.ndarray
    ) -> TokenRanges:
        start_B = sequence_indices_B * self._store.record_size
        return one_range_each(start_B, start_B + self._store.record_size)

    def origins(self, sequence_index: int, random_bits: int) -> list[TokenOrigin]:
        """Returns the record of a sequence."""
        num_tokens = len(self._store.reader[sequence_index].tokens)
        return [TokenOrigin(self._store.document_name(sequence_index), 0, num_tokens)]


class StreamSequences(ConcatThenSplit):
    """The documents of a stream, concatenated and split every T tokens, in their own order."""

    has_own_order = True
    description = "a stream, end to end"

    @property
    def _store(self) -> StreamStore:
        store = self.dataset.store
        assert isinstance(store, StreamStore)
        return store

    def __len__(self) -> int:
        return _MAX_SEQUENCES

    def begin_step(self, sequence_index: int) -> None:
        """Reads up to the beginning of a sequence, and records the position of the stream."""
        self._store.mark(sequence_index * self.length)

    def position_before(self, sequence_index: int) -> StreamPosition:
        """Returns the nearest known position of the stream at or before a sequence."""
        return self._store.position_before(sequence_index * self.length)

    def add_position(self, position: StreamPosition) -> None:
        """Adds a position from which reading may start."""
        self._store.add_position(position)

    def origins(self, sequence_index: int, random_bits: int) -> list[TokenOrigin]:
        """Returns which tokens of which documents form a sequence."""
        start = sequence_index * self.length
        self._store.read(np.array([start]), np.array([start + self.length + 1]))
        return super().origins(sequence_index, random_bits)
