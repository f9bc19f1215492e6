"""Batch iterators of one host, for training and evaluation."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from MaxText.errors import UserError
from MaxText.input_pipeline.data_sources import OpenDataSource
from MaxText.input_pipeline.prefetch import Prefetcher, Retries
from MaxText.input_pipeline.sequences.global_batch import ExcludedRanges, GlobalBatch
from MaxText.layers.batch import Batch
from MaxText.storage import file_access
from MaxText.storage.errors import FileReadError

# Position field -> the configuration keys it depends on, for messages.
_KEY_OF = {
    "data_set": "the data (its contents, or the names and sizes of its files)",
    "split": "train_split",
    "seed": "data_shuffle_seed",
    "shuffle": "enable_data_shuffling",
    "cut": "the way rows are cut (packing, grain_packing_type, use_truncation, "
    "data_mixture_weights)",
    "file_groups": "iter_file_nums",
    "mixture": "the weights of the mixture",
    "masking": "the mlm_ keys",
    "max_target_length": "max_target_length",
}


class _HostBatches:
    """Batches of one host, prefetched and with retries; lazy.

    After a failed read the reader is abandoned, its files are reopened, and reading resumes at
    exactly the step that failed. Not thread-safe.
    """

    _what: str

    def __init__(
        self,
        source: GlobalBatch,
        opened: Sequence[OpenDataSource],
        retries: Retries,
        num_workers: int = 0,
    ):
        self.source = source
        self.opened = opened
        self.retries = retries
        self.has_documents = source.has_documents
        self.skipped = [message for one in opened for message in one.data.skipped]
        self._num_workers = num_workers
        self._prefetcher: Prefetcher | None = None
        self._last: dict[str, Any] | None = None  # arrays of the step before the next one

    def stop_waiting(self, when: Callable[[], bool]) -> None:
        """Makes reads raise WaitCancelledError once `when` is true."""
        self.retries.stopping = when

    def close(self) -> None:
        """Stops the readers; the next read restarts them at any step."""
        self._last = None
        self._stop()

    def _stop(self) -> None:
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher = None

    def _read(self, step: int) -> Batch:
        """Returns the batch of the next step, or of any step after `close`.

        Raises UserError after all retries or if the data does not fit the model, or
        WaitCancelledError.
        """
        where = ", ".join(one.entry.location for one in self.opened)
        arrays = self.retries.call(
            f"Step {step} of the {self._what} ({where}) could not be read",
            lambda: self._attempt(step),
            lambda error: isinstance(error, (FileReadError, OSError)),
        )
        return Batch(
            tokens_BT=arrays["tokens"],
            targets_BT=arrays["targets"],
            loss_mask_BT=arrays["weights"],
            positions_BT=arrays.get("positions"),
            segments_BT=arrays.get("segments"),
        )

    def _attempt(self, step: int) -> dict[str, Any]:
        try:
            if self._prefetcher is None:
                first = step if self._last is None else step - 1
                self._prefetcher = Prefetcher(self.source, first, self._num_workers)
                if self._last is not None:
                    self._check_unchanged(self._prefetcher, first, self._last)
            self._last = self._next(self._prefetcher)
            return self._last
        except Exception:
            self._stop()
            stores = [store for one in self.opened for store in (one.data.store, one.data.labels)]
            file_access.invalidate_cache([file for one in stores if one for file in one.files])
            raise

    def _next(self, prefetcher: Prefetcher) -> dict[str, Any]:
        return prefetcher.next(self.retries.options.timeout, self.retries.stopping)

    def _check_unchanged(self, prefetcher: Prefetcher, step: int, last: dict[str, Any]) -> None:
        """Reads the last batch again; FileReadError if it is another one."""
        try:
            again = self._next(prefetcher)
        except FileReadError:
            raise
        except UserError:  # ids beyond vocab_size
            again = {}
        if not all(np.array_equal(again.get(name, ()), last[name]) for name in last):
            raise FileReadError(
                f"The files changed: step {step}, read again, gives another batch. Restore the "
                "files that the run was started with, or start a new run (another run_name)."
            )


class TrainIterator(_HostBatches, Iterator[Batch]):
    """This host's training batches in order, from any step. Not thread-safe.

    `identity` holds the data settings that determine the meaning of sample numbers.
    """

    _what = "training data"

    def __init__(
        self,
        source: GlobalBatch,
        opened: Sequence[OpenDataSource],
        retries: Retries,
        num_workers: int,
        identity: dict[str, Any],
    ):
        """Initializes before step 0."""
        super().__init__(source, opened, retries, num_workers)
        self.identity = identity
        self._step = 0

    @property
    def num_steps(self) -> int | None:
        """Total batches of the run; None if unbounded."""
        return None if len(self.source) == sys.maxsize else len(self.source)

    @property
    def unigram_entropy_nats(self) -> float | None:
        """Unigram entropy of the training data in nats per token, or None."""
        return self.opened[0].data.unigram_entropy_nats if len(self.opened) == 1 else None

    @property
    def facts(self) -> dict[str, Any]:
        tokenizers = {source.data.tokenizer_sha256 for source in self.opened} - {""}
        return {
            "train": "; ".join(source.entry.location for source in self.opened) or "random tokens",
            "identity": self.identity["data_set"],
            "tokenizer": " ".join(sorted(tokenizers)),
        }

    @property
    def tokenizer_folder(self) -> Path | None:
        return self.opened[0].data.tokenizer_folder if self.opened else None

    def exclude(self, first: int, end: int) -> bool:
        """Excludes samples [first, end) from the next batch on, if they are not.

        Commutes with a seek to an earlier position. Returns whether anything changed. Raises
        UserError unless 0 <= first < end.
        """
        exclusions = ExcludedRanges([(first, end)])
        known = self.source.excluded
        if known | exclusions == known:
            return False
        self.close()
        self.source.exclude(exclusions, self._step)
        return True

    def get_state(self) -> dict[str, Any]:
        """Returns a JSON-serializable state, equal on every host.

        `step` comes next, `samples` counts those before it, `excluded` are ranges [first, end).
        """
        return {
            "step": self._step,
            "samples": self.source.samples_before(self._step),
            "excluded": [list(pair) for pair in self.source.excluded.pairs],
            **self.identity,
        }

    def seek(self, step: int) -> None:
        """Makes `step` the next one yielded, in constant time.

        Its samples follow from this run's batch sizes since step 0 and the current exclusions.
        """
        self.close()
        self.source.begin_at(0, 0)
        self._step = step

    def set_state(self, position: Mapping[str, Any]) -> None:
        """Resumes at a saved state, even with a different batch size.

        Saved exclusions are added to excluded_samples and `exclude`. Raises UserError, naming each
        key with both values, if the dataset, its processing or the seed differ.
        """
        if differences := self.differences(position):
            raise UserError(
                f"The checkpoint (step {position.get('step')}) is of other data: "
                + "; ".join(differences)
                + ". Restore these settings to resume that run, or start a new run (another "
                "run_name) from its weights with load_parameters_path."
            )
        step = position["step"]
        samples = position.get("samples")
        saved = ExcludedRanges(position.get("excluded", ()))
        self.source.exclusions |= saved
        self.seek(step)
        if samples is not None:
            self.source.begin_at(step, samples, passed=saved)
        if ahead := self.source.exclusions.within(self.source.first_sample):
            self.retries.log(f"Excluded samples of the training data: {ahead}.")

    def differences(self, position: Mapping[str, Any]) -> list[str]:
        """Returns the reasons against a position of other data, if any."""
        return [
            f"{words} was {position.get(name)!r} and is {self.identity.get(name)!r}"
            for name, words in _KEY_OF.items()
            if position.get(name) != self.identity.get(name)
        ]

    def __iter__(self) -> "TrainIterator":
        return self

    def __next__(self) -> Batch:
        if self._step >= len(self.source):
            self.close()
            raise StopIteration
        batch = self._read(self._step)
        self._step += 1
        return batch


class EvalBatches(_HostBatches):
    """One ordered pass over a split per iteration; `len` counts batches."""

    _what = "evaluation data"

    def __len__(self) -> int:
        return len(self.source)

    def __iter__(self) -> Iterator[Batch]:
        self.close()
        try:
            for step in range(len(self)):
                yield self._read(step)
        finally:
            self.close()
