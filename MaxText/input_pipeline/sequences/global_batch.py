"""The batch of each step, as NumPy arrays, from the rows of a run.

Imports no jax.

Legend: B rows, T tokens of a window.
"""

import sys
from collections.abc import Mapping

import numpy as np

from MaxText.errors import UserError
from MaxText.input_pipeline.sequences.batch_schedule import BatchPlan
from MaxText.input_pipeline.sequences.exclusions import NO_HOLES, Holes
from MaxText.input_pipeline.sequences.masked_lm import MaskedLanguageModel
from MaxText.input_pipeline.sequences.order import Rows


class GlobalBatch:
    """This host's share of the batches of a run, one step at a time.

    Rows past the end of the data have weight 0 everywhere: the last batch is filled with them.

    Attributes:
      plan: samples of each step.
      holes: samples of the data that are left out, from `first_sample` on.
      first_step, first_sample: see begin_at.
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
        largest_id: int | None = None,
        holes: Holes = NO_HOLES,
    ):
        """Fixes what is read.

        Args:
          rows: of the run.
          plan: samples of each step.
          process_index, process_count: this host among all.
          num_steps: steps at most.
          masked: hides tokens; None leaves rows as they are.
          seed: of what is hidden.
          largest_id: ids above it are refused; None where no id can be.
          holes: samples that are left out.
        """
        self.plan = plan
        self.holes = holes
        self.begin_at(0, 0)
        self._rows = rows
        self._process = process_index, process_count
        self._limit = num_steps
        self._masked = masked
        self._seed = seed
        self._largest_id = largest_id

    def begin_at(self, step: int, sample: int, passed: Holes = NO_HOLES) -> None:
        """Makes `sample` of the data the first one that `step` may read; later steps go on.

        Args:
          step: from 0.
          sample: its number in the data. Holes before it change nothing any more.
          passed: what steps before `step` left out.
        """
        self.first_step, self.first_sample = step, sample
        self._passed = passed.within(0, max(0, sample))

    def leave_out(self, holes: Holes, step: int) -> None:
        """Adds holes for `step` and later ones; what earlier steps read stays what it was."""
        self.begin_at(step, self.samples_before(step), self.left_out)
        self.holes |= holes

    @property
    def left_out(self) -> Holes:
        """What steps before `first_step` have left out, and what it and later ones will."""
        return self._passed | self.holes.within(max(0, self.first_sample))

    def samples_before(self, step: int) -> int:
        """Number in the data of the first sample that `step` reads.

        Without holes these are the samples read before it.
        """
        return int(self._numbers(step, np.zeros(1, np.int64))[0])

    def sample_range(self, step: int) -> tuple[int, int]:
        """First sample of the data that a step reads on all hosts, and the one after its last."""
        ends = np.array([0, self.plan.at(step).samples - 1], np.int64)
        first, last = self._numbers(step, ends).tolist()
        return max(0, first), max(0, last + 1)

    def _numbers(self, step: int, places_N: np.ndarray) -> np.ndarray:
        """Numbers in the data (int64 [N]) of samples of a step, by their places in its batch."""
        ahead = self.plan.samples_before(step) - self.plan.samples_before(self.first_step)
        numbers_N = ahead + places_N
        return np.where(
            numbers_N >= 0,
            self.holes.ahead(self.first_sample, numbers_N),
            self._passed.behind(self.first_sample, -numbers_N),
        )

    def __len__(self) -> int:
        total = self._rows.num_rows
        if total == sys.maxsize:
            return self._limit
        left = total - self.first_sample
        if left > 0:
            left -= self.holes.within(self.first_sample, total).count()
        # With smaller batches from here on the data may have ended before step 0 of this plan.
        samples = self.plan.samples_before(self.first_step) + left
        return max(0, min(self._limit, self.plan.steps_for(samples)))

    def __getitem__(self, step: int) -> dict[str, np.ndarray]:
        """The batch of a step: arrays by name.

        Raises:
          UnreadableFile: a file cannot be read.
          UserError: an id is too large.
        """
        stage = self.plan.at(step)
        rows_B = self._rows_of(step)
        arrays = self._rows.read(rows_B)
        if self._largest_id is not None:
            # Labels are targets that need not occur among the tokens.
            ids_BT = np.maximum(arrays["tokens"], arrays["targets"])
            if ids_BT.max(initial=0) > self._largest_id:
                self._refuse(ids_BT, rows_B)
        if self._masked is not None:
            arrays = self._masked.apply(arrays, rows_B, self._seed, self.plan.window)
        if stage.length != self.plan.window:
            arrays = fold(arrays, stage.length)
        return arrays

    def origin(self, step: int) -> list[list[tuple[str, int, int]]]:
        """What each row of this host's batch holds before it is cut into stages, see Rows."""
        return [self._rows.origin(row) for row in self._rows_of(step).tolist()]

    def _rows_of(self, step: int) -> np.ndarray:
        index, count = self._process
        share = self.plan.at(step).samples // count
        return self._numbers(step, index * share + np.arange(share, dtype=np.int64))

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
