"""Global batches of NumPy arrays by step, without excluded samples.

A run numbers only the samples it reads (N), while the data number all.

Legend: B sequences (rows), T tokens of a window.
"""

import dataclasses
import sys
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from MaxText.errors import UserError
from MaxText.input_pipeline.sequences.batch_schedule import BatchSchedule
from MaxText.input_pipeline.sequences.masked_lm import MLMMasking
from MaxText.input_pipeline.sequences.order import SequenceDataset, SyntheticSequences

_LARGEST = 2**61  # far below 2**63, so that sums of sample numbers do not overflow


@dataclasses.dataclass(frozen=True)
class ExcludedRanges:
    """Disjoint ranges (first, end) of excluded samples, in order.

    They are merged from any ranges. Raises UserError unless 0 <= first < end.
    """

    pairs: Iterable[Sequence[int]] = ()

    def __post_init__(self):
        merged: list[tuple[int, int]] = []
        for first, end in sorted((int(first), int(end)) for first, end in self.pairs):
            if not 0 <= first < end <= _LARGEST:
                raise UserError(
                    f"excluded_samples: [{first}, {end}] is not a range of samples. Give the "
                    "first excluded sample and the one after the last, 0 <= first < end."
                )
            if merged and first <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(end, merged[-1][1])
            else:
                merged.append((first, end))
        object.__setattr__(self, "pairs", tuple(merged))

    def __bool__(self) -> bool:
        return bool(self.pairs)

    def __or__(self, other: "ExcludedRanges") -> "ExcludedRanges":
        return ExcludedRanges((*self.pairs, *other.pairs))

    def within(self, first: int, end: int = _LARGEST) -> "ExcludedRanges":
        clipped = ((max(first, start), min(end, stop)) for start, stop in self.pairs)
        return ExcludedRanges(pair for pair in clipped if pair[0] < pair[1])

    def count(self) -> int:
        return sum(end - first for first, end in self.pairs)

    def samples(self, indices_N: np.ndarray) -> np.ndarray:
        """Returns the data numbers (int64 [N]) of included samples by index."""
        if not self:
            return indices_N
        bounds = np.array(self.pairs, np.int64)
        skipped = np.concatenate([[0], np.cumsum(bounds[:, 1] - bounds[:, 0])])
        before = bounds[:, 0] - skipped[:-1]  # included samples before each range
        return indices_N + skipped[np.searchsorted(before, indices_N, side="right")]

    def __str__(self) -> str:
        return ", ".join(f"{first} to {end - 1}" for first, end in self.pairs) or "none"


NO_EXCLUSIONS = ExcludedRanges()


class GlobalBatch:
    """This host's share of each global batch, padded past the data.

    `exclusions` are the excluded samples from `first_sample` on.
    """

    def __init__(
        self,
        rows: SequenceDataset | SyntheticSequences,
        schedule: BatchSchedule,
        share: tuple[int, int],
        num_steps: int = sys.maxsize,
        *,
        max_token_id: int | None,
        masked: MLMMasking | None,
        seed: int = 0,
        exclusions: ExcludedRanges = NO_EXCLUSIONS,
        reuse_first: bool = False,
    ):
        """Initializes the share (index, count) of a host.

        Refuses ids above `max_token_id`, unless it is None. `reuse_first` repeats the batch of step
        0. Raises UserError if the batches do not split over the hosts.
        """
        for stage in schedule.stages:
            if stage.samples < 1 or stage.samples % share[1]:
                raise UserError(
                    f"A global batch of {stage.samples} sequences cannot be split evenly over "
                    f"{share[1]} hosts: change per_device_batch_size so that it is a multiple of "
                    f"{share[1]}."
                )
        self.schedule = schedule
        self.has_documents = rows.has_documents
        self.exclusions = exclusions
        self.begin_at(0, 0)
        self._rows = rows
        self._share = share
        self._limit = num_steps
        self._max_token_id = max_token_id
        self._masked = masked
        self._seed = seed
        self._reuse_first = reuse_first
        self._first: dict[str, np.ndarray] | None = None

    def begin_at(self, step: int, sample: int, passed: ExcludedRanges = NO_EXCLUSIONS) -> None:
        """Makes `sample` the first one of `step`; later steps continue.

        Exclusions before `sample` no longer apply; `passed` are those that earlier steps skipped.
        """
        self.first_step = step
        self.first_sample = sample
        self._passed = passed.within(0, max(0, sample))

    def exclude(self, exclusions: ExcludedRanges, step: int) -> None:
        """Excludes samples from `step` on; samples of earlier steps do not change."""
        self.begin_at(step, self.samples_before(step), self.excluded)
        self.exclusions |= exclusions

    @property
    def excluded(self) -> ExcludedRanges:
        return self._passed | self.exclusions.within(max(0, self.first_sample))

    def samples_before(self, step: int) -> int:
        """Returns the number in the data of the first sample of `step`."""
        return int(self._numbers(step, np.zeros(1, np.int64))[0])

    def sample_range(self, step: int) -> tuple[int, int]:
        """Returns a step's range [first, end) of samples over all hosts."""
        ends = np.array([0, self.schedule.at(step).samples - 1], np.int64)
        first, last = self._numbers(step, ends).tolist()
        return max(0, first), max(0, last + 1)

    def _numbers(self, step: int, indices_N: np.ndarray) -> np.ndarray:
        """Converts indices in a batch to sample numbers in the data (int64 [N])."""
        excluded = self.excluded
        first = max(0, self.first_sample)
        ahead = self.schedule.samples_before(step) - self.schedule.samples_before(self.first_step)
        first_index = self.first_sample - excluded.within(0, first).count()
        return excluded.samples(first_index + ahead + indices_N)

    def __len__(self) -> int:
        total = self._rows.num_rows
        if total == sys.maxsize:
            return self._limit
        left = total - self.first_sample
        if left > 0:
            left -= self.exclusions.within(self.first_sample, total).count()
        # With smaller batches from here on, the data may end before step 0 of this schedule.
        samples = self.schedule.samples_before(self.first_step) + left
        return max(0, min(self._limit, self.schedule.steps_for(samples)))

    def __getitem__(self, step: int) -> dict[str, np.ndarray]:
        """Returns the named arrays of a batch; UserError for too large ids."""
        if not self._reuse_first:
            return self._batch(step)
        if self._first is None:
            self._first = self._batch(0)
        return self._first

    def _batch(self, step: int) -> dict[str, np.ndarray]:
        stage = self.schedule.at(step)
        rows_B = self._rows_of(step)
        arrays = self._rows.read(rows_B)
        if self._max_token_id is not None:
            # Targets that are labels need not occur among the tokens.
            ids_BT = np.maximum(arrays["tokens"], arrays["targets"])
            if ids_BT.max(initial=0) > self._max_token_id:
                self._refuse(ids_BT, rows_B)
        if self._masked is not None:
            arrays = self._masked.apply(arrays, rows_B, self._seed, self.schedule.window)
        if stage.length != self.schedule.window:
            arrays = split_to_length(arrays, stage.length)
        return arrays

    def origin(self, step: int) -> list[list[tuple[str, int, int]]]:
        return [self._rows.origin(row) for row in self._rows_of(step).tolist()]

    def _rows_of(self, step: int) -> np.ndarray:
        index, count = self._share
        share = self.schedule.at(step).samples // count
        return self._numbers(step, index * share + np.arange(share, dtype=np.int64))

    def _refuse(self, ids_BT: np.ndarray, rows_B: np.ndarray) -> None:
        row = int(ids_BT.max(axis=1).argmax())
        documents = ", ".join(name for name, _, _ in self._rows.origin(int(rows_B[row])))
        largest = ids_BT.max()
        size = (self._max_token_id or 0) + 1
        raise UserError(
            f"vocab_size={size} is too small: id {largest} occurs in {documents}. Raise "
            "vocab_size, or check that these are token ids of the tokenizer you mean "
            "(token_records.field, grain_file_type)."
        )


def split_to_length(arrays: Mapping[str, np.ndarray], length: int) -> dict[str, np.ndarray]:
    """Splits sequences [B, T] into [B T / length, length]."""
    folded = {name: array.reshape(-1, length) for name, array in arrays.items()}
    if "positions" in folded:
        segments = folded["segments"]
        positions = folded["positions"]
        first = np.where(segments == segments[:, :1], positions[:, :1], 0)
        folded["positions"] = np.where(segments > 0, positions - first, 0)
    return folded
