"""Batch iterators of one process, for training and evaluation."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from MaxText.errors import UserError
from MaxText.input_pipeline.data_sources import OpenDataSource
from MaxText.input_pipeline.prefetch import Prefetcher, Retries
from MaxText.input_pipeline.registered_sources.source_sequences import StreamSequences
from MaxText.input_pipeline.registered_sources.stream_store import position_from_json
from MaxText.input_pipeline.sequences.batch_source import BatchSource, ExcludedRanges
from MaxText.layers.batch import Batch
from MaxText.storage.errors import FileReadError

# Field of a data position -> the configuration keys it depends on, for messages.
_IDENTITY_NAMES = {
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


class _ProcessBatches:
    """Batches of one process, prefetched and with retries; lazy.

    After a failed read the reader is abandoned, its files are reopened, and reading resumes at
    exactly the step that failed. Not thread-safe.

    Attributes:
      source: Returns the arrays of any step.
      opened: The datasets that `source` reads; none for random tokens.
      retries: Policy and messages of failed reads.
      has_documents: Batches hold positions and segment ids.
      skipped: Messages about bad records that were skipped when the data was imported.
    """

    _data_name: str  # for messages

    def __init__(
        self,
        source: BatchSource,
        opened: Sequence[OpenDataSource],
        retries: Retries,
        num_workers: int = 0,
    ):
        """Initializes without reading; `num_workers` processes read ahead, or a thread if 0."""
        self.source = source
        self.opened = opened
        self.retries = retries
        self.has_documents = source.has_documents
        self.skipped = [message for source in opened for message in source.dataset.skipped]
        self._num_workers = num_workers
        self._prefetcher: Prefetcher | None = None
        self._previous: dict[str, np.ndarray] | None = None  # arrays of the step before the next

    def stop_waiting(self, should_stop: Callable[[], bool]) -> None:
        """Makes reads raise WaitCancelledError once `should_stop` returns true."""
        self.retries.should_stop = should_stop

    def close(self) -> None:
        """Stops the readers; the next read restarts them at any step."""
        self._previous = None
        self._stop_prefetching()

    def _stop_prefetching(self) -> None:
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher = None

    def _read(self, step: int) -> Batch:
        """Returns the batch of the next step, or of any step after `close`.

        Raises UserError after all retries or if the data does not fit the model, or
        WaitCancelledError.
        """
        locations = ", ".join(source.entry.location for source in self.opened)
        arrays = self.retries.call(
            lambda: self._try_to_read(step),
            failure=f"Step {step} of the {self._data_name} ({locations}) could not be read",
            is_retryable=lambda error: isinstance(error, (FileReadError, OSError)),
        )
        return Batch(
            tokens_BT=arrays["tokens"],
            targets_BT=arrays["targets"],
            loss_mask_BT=arrays["weights"],
            positions_BT=arrays.get("positions"),
            segments_BT=arrays.get("segments"),
        )

    def _try_to_read(self, step: int) -> dict[str, np.ndarray]:
        """Returns the arrays of `step`, after an error from new readers that reopen the files."""
        try:
            if self._prefetcher is None:
                first_step = step if self._previous is None else step - 1
                self._prefetcher = Prefetcher(self.source, first_step, self._num_workers)
                if self._previous is not None:
                    self._check_unchanged(self._prefetcher, first_step, self._previous)
            self._previous = self._next(self._prefetcher)
            return self._previous
        except Exception:
            self._stop_prefetching()
            self._forget_files()
            raise

    def _forget_files(self) -> None:
        """Makes the next read open the files again: they may have been replaced."""
        for source in self.opened:
            source.dataset.store.reopen()
            if source.dataset.labels is not None:
                source.dataset.labels.reopen()

    def _next(self, prefetcher: Prefetcher) -> dict[str, np.ndarray]:
        return prefetcher.next(self.retries.options.timeout, self.retries.should_stop)

    def _check_unchanged(
        self, prefetcher: Prefetcher, step: int, previous: dict[str, np.ndarray]
    ) -> None:
        """Reads the previous batch again; FileReadError if it is another one."""
        try:
            arrays = self._next(prefetcher)
        except FileReadError:
            raise
        except UserError:  # ids beyond vocab_size
            arrays = {}
        if not all(np.array_equal(arrays.get(name, ()), previous[name]) for name in previous):
            raise FileReadError(
                f"The files changed: step {step}, read again, gives another batch. Restore the "
                "files that the run was started with, or start a new run (another run_name)."
            )


class TrainIterator(_ProcessBatches, Iterator[Batch]):
    """This process's training batches in order, from any step. Not thread-safe.

    Attributes:
      identity: The data settings that decide which sequence an order index of the run is.
    """

    _data_name = "training data"

    def __init__(
        self,
        source: BatchSource,
        opened: Sequence[OpenDataSource],
        retries: Retries,
        *,
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
        """Unigram entropy of the training data in nats per token, or None if unknown."""
        return self.opened[0].dataset.unigram_entropy_nats if len(self.opened) == 1 else None

    @property
    def facts(self) -> dict[str, Any]:
        """What the start event records about the training data."""
        tokenizers = {source.dataset.tokenizer_sha256 for source in self.opened} - {""}
        return {
            "train": "; ".join(source.entry.location for source in self.opened) or "random tokens",
            "identity": self.identity["data_set"],
            "tokenizer": " ".join(sorted(tokenizers)),
        }

    @property
    def tokenizer_folder(self) -> Path | None:
        """Folder or file of the tokenizer of the (first) dataset, or None if unknown."""
        return self.opened[0].dataset.tokenizer_folder if self.opened else None

    def exclude(self, first: int, end: int) -> bool:
        """Excludes the order indices [first, end) from the next batch on.

        Commutes with a seek to an earlier position. Returns whether anything changed: they may have
        been excluded. Raises UserError unless 0 <= first < end.
        """
        exclusions = ExcludedRanges([(first, end)])
        excluded = self.source.excluded
        if excluded | exclusions == excluded:
            return False
        self.close()
        self.source.exclude(exclusions, self._step)
        return True

    def get_state(self) -> dict[str, Any]:
        """Returns the data position: a JSON-serializable state, equal on every process.

        `step` comes next, `samples` is the order index of its first sequence, `excluded` are ranges
        [first, end) of order indices, `streams` is where streams resume (positions that differ
        between processes lead to the same batches). The rest is `identity`.
        """
        state = {
            "step": self._step,
            "samples": self.source.first_index_of(self._step),
            "excluded": [list(bounds) for bounds in self.source.excluded.ranges],
            **self.identity,
        }
        if self._streams:
            indices = self.source.next_indices(self._step)
            state["streams"] = {
                str(number): stream.position_before(indices[number]).as_json()
                for number, stream in self._streams.items()
            }
        return state

    @property
    def _streams(self) -> dict[int, StreamSequences]:
        """The streams among the datasets, by their numbers."""
        return {
            number: source.stream
            for number, source in enumerate(self.opened)
            if source.stream is not None
        }

    def seek(self, step: int) -> None:
        """Makes `step` the next one yielded, in constant time.

        Its sequences follow from this run's batch sizes since step 0 and the current exclusions.
        """
        self.close()
        self.source.begin_at(0, 0)
        self._step = step

    def set_state(self, position: Mapping[str, Any]) -> None:
        """Resumes at a data position of `get_state`, even with a different batch size.

        Its exclusions are added to excluded_samples and `exclude`. Raises UserError, naming each
        key with both values, if the dataset, its processing or the seed differ.
        """
        if differences := self.differences(position):
            raise UserError(
                f"The checkpoint (step {position.get('step')}) is of other data: "
                + "; ".join(differences)
                + ". Restore these settings to resume that run, or start a new run (another "
                "run_name) from its weights with load_parameters_path."
            )
        self._restore_streams(position.get("streams", {}))
        step = position["step"]
        excluded = ExcludedRanges(position["excluded"])
        self.source.exclusions |= excluded
        self.seek(step)
        self.source.begin_at(step, position["samples"], skipped=excluded)
        if upcoming := self.source.exclusions.within(self.source.first_order_index):
            self.retries.log(f"Excluded samples of the training data: {upcoming}.")

    def _restore_streams(self, positions: Mapping[str, Any]) -> None:
        """Makes streams resume at the positions of a checkpoint, by number."""
        for number, stream in self._streams.items():
            if str(number) not in positions:
                continue
            position = position_from_json(positions[str(number)])
            stream.add_position(position)
            if position.state is None and position.document:
                self.retries.log(
                    f"note: the stream {self.opened[number].entry.location} has no state, so "
                    f"{position.document:,} documents are read again before it resumes"
                )

    def differences(self, position: Mapping[str, Any]) -> list[str]:
        """Returns the reasons why a position is of other data; none if it is of these."""
        return [
            f"{keys} was {position.get(field)!r} and is {self.identity.get(field)!r}"
            for field, keys in _IDENTITY_NAMES.items()
            if position.get(field) != self.identity.get(field)
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


class EvalBatches(_ProcessBatches):
    """One ordered pass over a split per iteration; `len` counts batches."""

    _data_name = "evaluation data"

    def __len__(self) -> int:
        return len(self.source)

    def __iter__(self) -> Iterator[Batch]:
        self.close()
        try:
            for step in range(len(self)):
                yield self._read(step)
        finally:
            self.close()
