"""Random access by step to the batches of a run, without excluded samples.

The sequences of a run are counted in two ways (see the package's docstring): order indices count
all of them, read indices only those that are not excluded. A batch has consecutive read indices.

Legend: B sequences (rows) of a shard, T tokens of a sequence, N sequences.
"""

import dataclasses
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from MaxText.errors import UserError
from MaxText.input_pipeline.sequences.batch_schedule import BatchSchedule
from MaxText.input_pipeline.sequences.masked_lm import MLMMasking
from MaxText.input_pipeline.sequences.order import SequenceDataset, SyntheticSequences
from MaxText.input_pipeline.sequences.slicing import TokenOrigin

_LARGEST = 2**61  # far below 2**63, so that sums of order indices do not overflow


class BatchShard(NamedTuple):
    """The part of each global batch that one process reads."""

    index: int = 0
    count: int = 1  # of shards, which are equally large


WHOLE_BATCH = BatchShard()


@dataclasses.dataclass(frozen=True)
class ExcludedRanges:
    """Disjoint ranges [first, end) of excluded order indices, ascending.

    They are merged from any ranges. Raises UserError unless 0 <= first < end.
    """

    ranges: Iterable[Sequence[int]] = ()

    def __post_init__(self):
        merged: list[tuple[int, int]] = []
        for first, end in sorted((int(first), int(end)) for first, end in self.ranges):
            if not 0 <= first < end <= _LARGEST:
                raise UserError(
                    f"excluded_samples: [{first}, {end}] is not a range of samples. Give the "
                    "first excluded sample and the one after the last, 0 <= first < end."
                )
            if merged and first <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(end, merged[-1][1])
            else:
                merged.append((first, end))
        object.__setattr__(self, "ranges", tuple(merged))

    def __bool__(self) -> bool:
        return bool(self.ranges)

    def __or__(self, other: "ExcludedRanges") -> "ExcludedRanges":
        return ExcludedRanges((*self.ranges, *other.ranges))

    def within(self, first: int, end: int = _LARGEST) -> "ExcludedRanges":
        """Returns the excluded order indices in [first, end)."""
        clipped = (
            (max(first, range_first), min(end, range_end)) for range_first, range_end in self.ranges
        )
        return ExcludedRanges(bounds for bounds in clipped if bounds[0] < bounds[1])

    def count(self) -> int:
        """Returns how many order indices are excluded."""
        return sum(end - first for first, end in self.ranges)

    def order_indices(self, read_indices_N: np.ndarray) -> np.ndarray:
        """Converts read indices to order indices (int64 [N])."""
        if not self:
            return read_indices_N
        bounds = np.array(self.ranges, np.int64)
        # Of each range: excluded order indices up to it, and read indices before it.
        num_excluded = np.concatenate([[0], np.cumsum(bounds[:, 1] - bounds[:, 0])])
        num_read_before = bounds[:, 0] - num_excluded[:-1]
        ranges_before_N = np.searchsorted(num_read_before, read_indices_N, side="right")
        return read_indices_N + num_excluded[ranges_before_N]

    def __str__(self) -> str:
        return ", ".join(f"{first} to {end - 1}" for first, end in self.ranges) or "none"


NO_EXCLUSIONS = ExcludedRanges()


class BatchSource:
    """This process's shard of each global batch, by step; padded past the end of the data.

    Attributes:
      schedule: Batch sizes by step.
      has_documents: Batches hold positions and segment ids.
      first_step: Step from which the batches follow the schedule and `exclusions`.
      first_order_index: Order index of the first sequence of `first_step`.
      exclusions: Excluded order indices; those before `first_order_index` do not apply.
    """

    def __init__(  # noqa: PLR0913
        self,
        sequences: SequenceDataset | SyntheticSequences,
        schedule: BatchSchedule,
        shard: BatchShard,
        *,
        max_token_id: int | None,
        masking: MLMMasking | None,
        max_steps: int = sys.maxsize,
        seed: int = 0,
        exclusions: ExcludedRanges = NO_EXCLUSIONS,
        reuse_first: bool = False,
    ):
        """Initializes before step 0.

        Args:
          sequences: The sequences in the order of the run.
          schedule: Batch sizes by step.
          shard: The shard to read.
          max_token_id: Larger ids are refused on reading; None if they are known to fit.
          masking: Turns the sequences into those of masked language modeling; None leaves them.
          max_steps: Length of this source, if the data do not end before.
          seed: Seed of the masks.
          exclusions: Sequences to leave out.
          reuse_first: Repeats the batch of step 0.

        Raises:
          UserError: The batches do not split over the processes.
        """
        for stage in schedule.stages:
            if stage.num_sequences < 1 or stage.num_sequences % shard.count:
                raise UserError(
                    f"A global batch of {stage.num_sequences} sequences cannot be split evenly "
                    f"over {shard.count} hosts: change per_device_batch_size so that it is a "
                    f"multiple of {shard.count}."
                )
        self.schedule = schedule
        self.has_documents = sequences.has_documents
        self.exclusions = exclusions
        self.begin_at(0, 0)
        self._sequences = sequences
        self._shard = shard
        self._max_steps = max_steps
        self._max_token_id = max_token_id
        self._masking = masking
        self._seed = seed
        self._reuse_first = reuse_first
        self._first_batch: dict[str, np.ndarray] | None = None

    def begin_at(
        self, step: int, order_index: int, skipped: ExcludedRanges = NO_EXCLUSIONS
    ) -> None:
        """Makes the sequence at `order_index` the first one of `step`; later steps continue.

        Exclusions before it no longer apply; `skipped` are those that earlier steps left out.
        """
        self.first_step = step
        self.first_order_index = order_index
        self._skipped = skipped.within(0, max(0, order_index))

    def exclude(self, exclusions: ExcludedRanges, step: int) -> None:
        """Excludes sequences from `step` on; those of earlier steps do not change."""
        self.begin_at(step, self.first_index_of(step), self.excluded)
        self.exclusions |= exclusions

    @property
    def excluded(self) -> ExcludedRanges:
        """The ranges that earlier steps left out or later ones will."""
        return self._skipped | self.exclusions.within(max(0, self.first_order_index))

    def first_index_of(self, step: int) -> int:
        """Returns the order index of the first sequence of `step`."""
        return int(self._order_indices(step, np.zeros(1, np.int64))[0])

    def next_indices(self, step: int) -> list[int]:
        """Returns the order index of each dataset's first sequence at or after `step`."""
        return self._sequences.next_indices(max(0, self.first_index_of(step)))

    def order_range(self, step: int) -> tuple[int, int]:
        """Returns a step's range [first, end) of order indices over all processes."""
        last_in_batch = self.schedule.at(step).num_sequences - 1
        first, last = self._order_indices(step, np.array([0, last_in_batch], np.int64)).tolist()
        return max(0, first), max(0, last + 1)

    def _order_indices(self, step: int, batch_indices_N: np.ndarray) -> np.ndarray:
        """Converts indices within a global batch to order indices (int64 [N])."""
        excluded = self.excluded
        num_excluded_before = excluded.within(0, max(0, self.first_order_index)).count()
        first_read_index = self.first_order_index - num_excluded_before
        sequences_since = self.schedule.sequences_before(step) - self.schedule.sequences_before(
            self.first_step
        )
        return excluded.order_indices(first_read_index + sequences_since + batch_indices_N)

    def __len__(self) -> int:
        """Returns the number of steps; sys.maxsize if unbounded."""
        end = self._sequences.num_sequences
        if end == sys.maxsize:
            return self._max_steps
        num_left = end - self.first_order_index
        if num_left > 0:
            num_left -= self.exclusions.within(self.first_order_index, end).count()
        # With smaller batches from here on, the data may end before step 0 of this schedule.
        num_sequences = self.schedule.sequences_before(self.first_step) + num_left
        return max(0, min(self._max_steps, self.schedule.steps_for(num_sequences)))

    def __getitem__(self, step: int) -> dict[str, np.ndarray]:
        """Returns the arrays of a step, named as in BatchArrays.

        Raises:
          UserError: An id is above `max_token_id`.
          FileReadError: A file is missing, truncated or damaged.
        """
        if not self._reuse_first:
            return self._read(step)
        if self._first_batch is None:
            self._first_batch = self._read(0)
        return self._first_batch

    def _read(self, step: int) -> dict[str, np.ndarray]:
        """Reads, checks and masks the sequences of a step's shard; splits them into rows."""
        stage = self.schedule.at(step)
        self._sequences.begin_step(max(0, self.first_index_of(step)))
        order_indices_B = self._shard_indices(step)
        arrays = self._sequences.read(order_indices_B)
        if self._max_token_id is not None:
            # Targets that are labels need not occur among the tokens.
            ids_BT = np.maximum(arrays["tokens"], arrays["targets"])
            if ids_BT.max(initial=0) > self._max_token_id:
                self._refuse(ids_BT, order_indices_B)
        if self._masking is not None:
            arrays = self._masking.apply(
                arrays, order_indices_B, self._seed, self.schedule.sequence_length
            )
        if stage.length != self.schedule.sequence_length:
            arrays = split_to_length(arrays, stage.length)
        return arrays

    def origins(self, step: int) -> list[list[TokenOrigin]]:
        """Returns which tokens of which documents form each sequence of a step's shard."""
        return [self._sequences.origins(index) for index in self._shard_indices(step).tolist()]

    def _shard_indices(self, step: int) -> np.ndarray:
        """Returns the order indices of this process's sequences of a step (int64 [B])."""
        size = self.schedule.at(step).num_sequences // self._shard.count
        first_in_batch = self._shard.index * size
        return self._order_indices(step, first_in_batch + np.arange(size, dtype=np.int64))

    def _refuse(self, ids_BT: np.ndarray, order_indices_B: np.ndarray) -> None:
        """Raises UserError about the largest id of a batch."""
        row = int(ids_BT.max(axis=1).argmax())
        origins = self._sequences.origins(int(order_indices_B[row]))
        documents = ", ".join(origin.document for origin in origins)
        vocab_size = (self._max_token_id or 0) + 1
        raise UserError(
            f"vocab_size={vocab_size} is too small: id {ids_BT.max()} occurs in {documents}. Raise "
            "vocab_size, or check that these are token ids of the tokenizer you mean "
            "(token_records.field, grain_file_type)."
        )


def split_to_length(arrays: Mapping[str, np.ndarray], length: int) -> dict[str, np.ndarray]:
    """Splits sequences [B, T] into rows [B T / length, length], with positions from 0."""
    rows = {name: array.reshape(-1, length) for name, array in arrays.items()}
    if "positions" in rows:
        segments = rows["segments"]
        positions = rows["positions"]
        # The document at the start of a row may have begun in the row before.
        first_position = np.where(segments == segments[:, :1], positions[:, :1], 0)
        rows["positions"] = np.where(segments > 0, positions - first_position, 0)
    return rows
