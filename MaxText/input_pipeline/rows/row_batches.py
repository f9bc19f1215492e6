"""The batch of each step, as NumPy arrays, from the rows of a run.

Imports no jax.

Legend: B rows, T tokens of a window.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from MaxText.errors import UserError
from MaxText.input_pipeline.rows.batch_plan import BatchPlan
from MaxText.input_pipeline.rows.masked_lm import MaskedLanguageModel
from MaxText.input_pipeline.rows.mixture import Rows
from MaxText.input_pipeline.streams.bad_record import BadRecord

# Name of a batch's entry that lists the records that could not be read.
_BAD = "bad_records"


class RowBatches:
    """Batches of the rows of a run, one step at a time.

    Rows past the end of the data have weight 0 everywhere: the last batch is filled with them.
    """

    def __init__(
        self,
        rows: Rows,
        plan: BatchPlan,
        process_index: int = 0,
        process_count: int = 1,
        num_steps: int = sys.maxsize,
        masked: MaskedLanguageModel | None = None,
        seed: int = 0,
        skip_bad: bool = False,
        largest_id: int | None = None,
    ):
        """Fixes what is read.

        Args:
          rows: of the run.
          plan: samples of each step.
          process_index, process_count: this host among all.
          num_steps: steps at most.
          masked: hides tokens; None leaves rows as they are.
          seed: of what is hidden.
          skip_bad: whether a row that cannot be read becomes one without weight.
          largest_id: ids above it are refused; None where no id can be.
        """
        self.plan = plan
        self.first_step, self.first_sample = 0, 0
        self._rows = rows
        self._process = process_index, process_count
        self._limit = num_steps
        self._masked = masked
        self._seed = seed
        self._skip_bad = skip_bad
        self._largest_id = largest_id

    def begin_at(self, step: int, sample: int) -> None:
        """Makes `sample` the first one that `step` reads; later steps go on from there."""
        self.first_step, self.first_sample = step, sample

    def samples_before(self, step: int) -> int:
        """Samples of the run read before `step`."""
        skipped = self.plan.samples_before(self.first_step)
        return self.first_sample + self.plan.samples_before(step) - skipped

    def __len__(self) -> int:
        if self._rows.num_rows == sys.maxsize:
            return self._limit
        skipped = self.first_sample - self.plan.samples_before(self.first_step)
        # With smaller batches from here on the data may have ended before step 0 of this plan.
        return max(0, min(self._limit, self.plan.steps_for(self._rows.num_rows - skipped)))

    def __getitem__(self, step: int) -> dict[str, Any]:
        stage = self.plan.at(step)
        rows_B = self._rows_of(step)
        bad: list[BadRecord] = []
        try:
            arrays: dict[str, Any] = self._rows.read(rows_B, bad.append if self._skip_bad else None)
        except BadRecord as problem:
            raise UserError(
                f"{problem}. Copy the file again, or set on_bad_record=skip to leave such rows out."
            ) from problem
        if self._largest_id is not None:
            # Labels are targets that need not occur among the tokens.
            ids_BT = np.maximum(arrays["tokens"], arrays["targets"])
            if ids_BT.max(initial=0) > self._largest_id:
                self._refuse(ids_BT, rows_B)
        if self._masked is not None:
            arrays = self._masked.apply(arrays, rows_B, self._seed, self.plan.window)
        if stage.length != self.plan.window:
            arrays = fold(arrays, stage.length)
        if bad:
            arrays[_BAD] = tuple(map(str, bad))
        return arrays

    def origin(self, step: int) -> list[list[tuple[str, int, int]]]:
        """What each row of this host's batch holds before it is cut into stages, see Rows."""
        return [self._rows.origin(row) for row in self._rows_of(step).tolist()]

    def _rows_of(self, step: int) -> np.ndarray:
        index, count = self._process
        share = self.plan.at(step).samples // count
        return self.samples_before(step) + index * share + np.arange(share, dtype=np.int64)

    def _refuse(self, ids_BT: np.ndarray, rows_B: np.ndarray) -> None:
        row = int(ids_BT.max(axis=1).argmax())
        documents = ", ".join(name for name, _, _ in self._rows.origin(int(rows_B[row])))
        largest, size = ids_BT.max(), (self._largest_id or 0) + 1
        raise UserError(
            f"vocab_size={size} is too small: id {largest} occurs in {documents}. Raise "
            "vocab_size, or check that these are token ids of the tokenizer you mean "
            "(tokens_field, grain_file_type)."
        )


def fold(arrays: Mapping[str, np.ndarray], length: int) -> dict[str, np.ndarray]:
    """Cuts rows [B, T] into rows [B T / length, length]; positions restart in each."""
    folded = {name: array.reshape(-1, length) for name, array in arrays.items()}
    if "positions" in folded:
        segments, positions = folded["segments"], folded["positions"]
        begun = np.where(segments == segments[:, :1], positions[:, :1], 0)
        folded["positions"] = np.where(segments > 0, positions - begun, 0)
    return folded


class BadRecords:
    """Counts the records that were skipped and ends the run when there are too many.

    A record that is met again, in the next epoch or evaluation, counts once.
    """

    def __init__(self, limit: int, show: Callable[[str], None]):
        """Args: `limit`: records after which it raises; `show`: takes a line for each."""
        self._limit = limit
        self._show = show
        self._seen: set[str] = set()
        self._news: list[str] = []

    def take(self, arrays: dict[str, Any]) -> None:
        """Notes what a batch could not read.

        Raises:
          UserError: the limit is reached.
        """
        for message in arrays.pop(_BAD, ()):
            if message in self._seen:
                continue
            self._seen.add(message)
            self._news.append(message)
            self._show(f"Skipped a record ({self.count} so far): {message}")
            if self.count >= self._limit:
                raise UserError(
                    f"{self.count} records could not be read, and max_bad_records={self._limit}. "
                    f"The last one: {message}. Mend the files, or raise the limit."
                )

    @property
    def count(self) -> int:
        """Different records so far."""
        return len(self._seen)

    def drain(self) -> list[str]:
        """What was noted since the last call: file, place and reason of each record."""
        news, self._news = self._news, []
        return news
