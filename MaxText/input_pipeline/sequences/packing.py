"""Packs whole documents into sequences, by first fit or best fit.

Of a document of more than T targets, full sequences are split off; the rest is packed like a short
document. Each of these is one token range. The plan is computed once and cached.

Legend: T tokens of a sequence, D documents, R token ranges of the plan, S sequences, G groups of
documents, I ranges to pack per group, O open sequences per group, P token ranges of a batch.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from MaxText.input_pipeline.local_cache import cached_arrays
from MaxText.input_pipeline.sequences.slicing import (
    SequenceOptions,
    SequenceSlicer,
    TokenRanges,
    concatenated_ranges,
    planned_ranges,
    side_by_side,
)
from MaxText.input_pipeline.token_store.token_dataset import TokenDataset

# Packing consecutive documents in groups keeps a sequence's documents close in the files and
# vectorizes planning over groups; only the last sequences of each group stay partly empty.
GROUP = 1024

# Documents planned at a time, in whole groups: limits memory to about 200 MB.
_BLOCK_DOCUMENTS = 1024 * GROUP


def pack_groups(size_GI: np.ndarray, length: int, best_fit: bool) -> np.ndarray:
    """Packs ranges in order; returns the sequence of each within its group (int32 [G, I]).

    Args:
      size_GI: Targets of each range, at most `length`; 0 for no range.
      length: T, the room of a sequence.
      best_fit: Take the fullest sequence with enough room (the first of equals). Else take the
        first one with enough room (first fit). If none has, a new sequence is started.
    """
    num_groups, num_ranges = size_GI.shape
    # Of two consecutive sequences at least one is more than half full.
    max_sequences = min(num_ranges, int(2 * (size_GI.sum(axis=1).max(initial=0) // length) + 2))
    room_GO = np.full((num_groups, max_sequences), length, np.int32)
    sequence_GI = np.zeros(size_GI.shape, np.int32)
    groups = np.arange(num_groups)
    for index in range(num_ranges):
        size_G1 = size_GI[:, index, None]
        if best_fit:
            chosen_G = np.where(room_GO >= size_G1, room_GO, length + 1).argmin(axis=1)
        else:
            chosen_G = (room_GO >= size_G1).argmax(axis=1)
        sequence_GI[:, index] = chosen_G
        room_GO[groups, chosen_G] -= size_GI[:, index]
    return sequence_GI


class FirstFitPacking(SequenceSlicer):
    """Sequences of whole documents; longer ones give full sequences and a rest.

    A range of n tokens fills n - 1 positions, so every token but the first of its document is a
    target exactly once per epoch.
    """

    ranges_are_joined = False

    def __init__(
        self, dataset: TokenDataset, options: SequenceOptions, best_fit: bool, cache_dir: Path
    ):
        super().__init__(dataset, options)
        self.description = f"whole documents by {'best' if best_fit else 'first'} fit"
        offsets = dataset.store.document_offsets
        key = f"{dataset.fingerprint} {self.length} {best_fit} {GROUP}"
        self._plan = cached_arrays(
            cache_dir, "packing2", key, lambda: plan_packing(offsets, self.length, best_fit)
        )

    # The arrays have the names under which they are cached.
    @property
    def _first_range_S(self) -> np.ndarray:
        return self._plan["first_item"]

    @property
    def _start_R(self) -> np.ndarray:
        return self._plan["starts"]

    def __len__(self) -> int:
        return len(self._first_range_S) - 1

    def _token_ranges(
        self, sequence_indices_B: np.ndarray, random_bits_B: np.ndarray
    ) -> TokenRanges:
        row_P, range_P = planned_ranges(self._first_range_S, sequence_indices_B)
        start_P = np.asarray(self._start_R[range_P])
        offsets = self.dataset.store.document_offsets
        next_document_P = np.searchsorted(offsets, start_P, side="right")
        stop_P = np.minimum(start_P + self.length + 1, offsets[next_document_P])
        return side_by_side(row_P, start_P, stop_P)

    def first_sequences(self, documents_D: np.ndarray) -> np.ndarray:
        """Returns the first sequence whose first range starts at or after each document."""
        # Groups of documents cross files; a sequence belongs to the file of its first range.
        start_S = np.asarray(self._start_R[self._first_range_S[:-1]])
        return np.searchsorted(
            np.maximum.accumulate(start_S), self.dataset.store.document_offsets[documents_D]
        )


def plan_packing(
    offsets: np.ndarray, length: int, best_fit: bool, block_documents: int = _BLOCK_DOCUMENTS
) -> Iterator[dict[str, np.ndarray]]:
    """Yields blocks of the packing plan of a dataset.

    Args:
      offsets: int64 [D + 1], the first token of each document, and the end.
      length: T, targets of a sequence.
      best_fit: See pack_groups.
      block_documents: Documents looked at together; limits memory.

    Yields:
      `starts` (int64 [R]), the first token of each range in the order of sequences, and
      `first_item` (int64 [S + 1]), the first range of each sequence; the end is in the last block.
    """
    start_D = np.empty(0, np.int64)
    num_targets_D = np.empty(0, np.int64)
    num_ranges = 0
    num_documents = len(offsets) - 1
    for first in range(0, max(num_documents, 1), block_documents):
        block_offsets = np.asarray(offsets[first : first + block_documents + 1])
        block_targets = np.diff(block_offsets) - 1
        # Documents without a whole group wait for those of the next block.
        start_D = np.concatenate([start_D, block_offsets[:-1][block_targets > 0]])
        num_targets_D = np.concatenate([num_targets_D, block_targets[block_targets > 0]])
        is_last = first + block_documents >= num_documents
        count = len(num_targets_D)
        if not is_last:
            count = count // GROUP * GROUP
        start_R, first_range_S = _plan_groups(
            start_D[:count], num_targets_D[:count], length, best_fit
        )
        yield {"starts": start_R, "first_item": first_range_S + num_ranges}
        num_ranges += len(start_R)
        start_D = start_D[count:]
        num_targets_D = num_targets_D[count:]
    yield {"starts": np.empty(0, np.int64), "first_item": np.array([num_ranges])}


def _plan_groups(
    start_D: np.ndarray, num_targets_D: np.ndarray, length: int, best_fit: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Plans whole groups of documents.

    The order is by group, and within a group first packed sequences, then full ones.

    Returns:
      The first token of each range, in order of sequences (int64 [R]), and the first range of each
      sequence (int64 [S]).
    """
    num_full_D = num_targets_D // length
    rest_D = num_targets_D - num_full_D * length
    num_groups = -(-len(num_targets_D) // GROUP)
    rest_GI = np.zeros((num_groups, GROUP), np.int32)
    rest_GI.reshape(-1)[: len(rest_D)] = rest_D
    packed_sequence_D = pack_groups(rest_GI, length, best_fit).reshape(-1)
    # Documents (one for each range) of the rests, and of the full sequences.
    packed = np.flatnonzero(rest_D)
    full = np.repeat(np.arange(len(num_targets_D)), num_full_D)
    index_in_document = concatenated_ranges(np.zeros_like(num_full_D), num_full_D)
    start_R = np.concatenate(
        [
            start_D[packed] + num_full_D[packed] * length,
            start_D[full] + index_in_document * length,
        ]
    )
    # Packed sequences are numbered below GROUP within their group, full ones from GROUP on.
    group_R = np.concatenate([packed // GROUP, full // GROUP])
    sequence_R = np.concatenate([packed_sequence_D[packed], GROUP + np.arange(len(full))])
    order = np.lexsort((sequence_R, group_R))
    group_R = group_R[order]
    sequence_R = sequence_R[order]
    start_R = start_R[order]
    begins_sequence_R = np.ones(len(start_R), bool)
    begins_sequence_R[1:] = (sequence_R[1:] != sequence_R[:-1]) | (group_R[1:] != group_R[:-1])
    return start_R, np.flatnonzero(begins_sequence_R)
