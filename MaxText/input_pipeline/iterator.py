"""Batch iterators of one host, for training and evaluation."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from MaxText.errors import UserError
from MaxText.input_pipeline.data_sources import OpenDataSource
from MaxText.input_pipeline.prefetch import RetryingReader, RetryLog, RetryPolicy
from MaxText.input_pipeline.sequences.global_batch import ExcludedRanges, GlobalBatch
from MaxText.layers.batch import Batch

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
    """Batches of one host, prefetched and with retries; lazy."""

    _what: str

    def __init__(
        self,
        source: GlobalBatch,
        opened: Sequence[OpenDataSource],
        policy: RetryPolicy,
        retry_log: RetryLog,
        num_workers: int = 0,
    ):
        self.has_documents = source.has_documents
        self.retry_log = retry_log
        self.skipped = [message for one in opened for message in one.data.skipped]
        self._reader = RetryingReader(
            source,
            opened,
            what=self._what,
            retry_log=retry_log,
            policy=policy,
            num_processes=num_workers,
        )

    def stop_waiting(self, when: Callable[[], bool]) -> None:
        """Makes reads raise WaitCancelledError once `when` is true."""
        self._reader.stopping = when

    def _read(self, step: int) -> Batch:
        arrays = self._reader.read(step)
        return Batch(
            tokens_BT=arrays["tokens"],
            targets_BT=arrays["targets"],
            loss_mask_BT=arrays["weights"],
            positions_BT=arrays.get("positions"),
            segments_BT=arrays.get("segments"),
        )


class BatchIterator(_HostBatches, Iterator[Batch]):
    """This host's training batches in order, from any step. Not thread-safe.

    `identity` holds the data settings that determine the meaning of sample numbers.
    """

    _what = "training data"

    def __init__(
        self,
        source: GlobalBatch,
        opened: Sequence[OpenDataSource],
        identity: dict[str, Any],
        *,
        policy: RetryPolicy,
        retry_log: RetryLog,
        num_workers: int = 0,
        reuse_first: bool = False,
        description: str = "",
    ):
        """Initializes before step 0; `reuse_first` repeats its batch."""
        super().__init__(source, opened, policy, retry_log, num_workers)
        self._source = source
        self.opened = opened
        self.identity = identity
        self.description = description
        self._reuse_first = reuse_first
        self._first_batch: Batch | None = None
        self._step = 0

    @property
    def num_steps(self) -> int | None:
        """Total batches of the run; None if unbounded."""
        return None if len(self._source) == sys.maxsize else len(self._source)

    @property
    def unigram_entropy(self) -> float | None:
        """Unigram entropy of the training data in nats per token, or None."""
        return self.opened[0].data.unigram_entropy if len(self.opened) == 1 else None

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

    def origin(self, step: int) -> list[list[tuple[str, int, int]]]:
        """Returns (document, first token, tokens) for each sequence of a step."""
        return self._source.origin(step)

    def sample_range(self, step: int) -> tuple[int, int]:
        """Returns a step's range [first, end) of samples over all hosts."""
        return self._source.sample_range(step)

    def exclude(self, first: int, end: int) -> bool:
        """Excludes samples [first, end) from the next batch on, if they are not.

        Commutes with a seek to an earlier position. Returns whether anything changed. Raises
        UserError unless 0 <= first < end.
        """
        exclusions, known = ExcludedRanges([(first, end)]), self._source.excluded
        if known | exclusions == known:
            return False
        self.close()
        self._source.exclude(exclusions, self._step)
        return True

    @property
    def position(self) -> dict[str, Any]:
        """JSON-serializable state after the last batch, equal on every host.

        `step` is the next step, `samples` the number of its first sample in the data, `excluded`
        all excluded ranges [first, end); the rest identifies the data.
        """
        return {
            "step": self._step,
            "samples": self._source.samples_before(self._step),
            "excluded": [list(pair) for pair in self._source.excluded.pairs],
            **self.identity,
        }

    def seek(self, step: int, samples: int | None = None) -> None:
        """Makes `step` the next one yielded, in constant time.

        `samples` is the number of its first sample in the data; None computes it from this run's
        batch sizes since step 0 and the current exclusions.
        """
        assert step >= 0, step
        self.close()
        self._source.begin_at(*((0, 0) if samples is None else (step, samples)))
        self._step = step

    def resume(self, position: Mapping[str, Any]) -> None:
        """Resumes at a saved position, even with a different batch size.

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
        step, samples = position["step"], position.get("samples")
        saved = ExcludedRanges(position.get("excluded", ()))
        self._source.exclusions |= saved
        self.seek(step, samples)
        if samples is not None:
            self._source.begin_at(step, samples, passed=saved)
        ahead = self._source.exclusions.within(self._source.first_sample)
        if ahead:
            line = f"Excluded samples of the training data: {ahead}."
            if ahead != saved.within(self._source.first_sample):
                line += f" The checkpoint had: {saved}."
            self.retry_log.log(line)

    def differences(self, position: Mapping[str, Any]) -> list[str]:
        """Returns the reasons against a position of other data, if any."""
        return [
            f"{words} was {position.get(name)!r} and is {self.identity.get(name)!r}"
            for name, words in _KEY_OF.items()
            if position.get(name) != self.identity.get(name)
        ]

    def __iter__(self) -> "BatchIterator":
        return self

    def __next__(self) -> Batch:
        if self._step >= len(self._source):
            self.close()
            raise StopIteration
        if self._reuse_first:
            if self._first_batch is None:
                self._first_batch = self._read(0)
                self.close()
            batch = self._first_batch
        else:
            batch = self._read(self._step)
        self._step += 1
        return batch

    def close(self) -> None:
        """Stops the readers; `next` restarts them."""
        self._reader.close()


class EvalBatches(_HostBatches):
    """One ordered pass over a split per iteration; `len` counts batches."""

    _what = "evaluation data"

    def __len__(self) -> int:
        return len(self._reader.source)

    def __iter__(self) -> Iterator[Batch]:
        self._reader.close()
        try:
            for step in range(len(self)):
                yield self._read(step)
        finally:
            self._reader.close()
