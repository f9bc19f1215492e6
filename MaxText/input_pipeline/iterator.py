"""The host's batches in order: of a run (BatchIterator) and of an evaluation (EvalBatches)."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from MaxText.errors import UserError
from MaxText.input_pipeline.data_sources import OpenedSource
from MaxText.input_pipeline.retry import RetryingReader, RetryLog, RetryPolicy
from MaxText.input_pipeline.sequences.exclusions import Holes
from MaxText.input_pipeline.sequences.global_batch import GlobalBatch
from MaxText.layers.batch import Batch

# Words of a position -> the configuration keys they come from, for messages.
_KEY_OF = {
    "data_set": "the data (its contents, or the names and sizes of its files)",
    "split": "train_split",
    "seed": "data_shuffle_seed",
    "shuffle": "enable_data_shuffling",
    "cut": "the way rows are cut (packing, grain_packing_type, use_truncation, dataset_mix)",
    "file_groups": "iter_file_nums",
    "mixture": "the weights of the mixture",
    "masking": "the mlm_ keys",
    "max_target_length": "max_target_length",
}


class BatchIterator(Iterator[Batch]):
    """The host's training batches in order, from any step.

    A failed read is tried again, see RetryingReader. Not for several threads at once. Nothing is
    read before the first `next`.

    Samples are numbered as the data are, over all steps and hosts; some may be left out.

    Attributes:
      has_documents: whether batches carry positions and segments.
      description: lines about the data.
      retry_log: what was read again.
      skipped: records that were left out, in words.
      identity: what fixes the meaning of a sample; part of every position.
      opened: the data sets; none for random tokens.
    """

    def __init__(
        self,
        source: GlobalBatch,
        identity: dict[str, Any],
        *,
        has_documents: bool,
        num_workers: int = 0,
        reuse_first: bool = False,
        opened: list[OpenedSource] | None = None,
        description: str = "",
        policy: RetryPolicy | None = None,
        log: RetryLog | None = None,
        show: Callable[[str], None] = print,
    ):
        """Starts before step 0.

        Args:
          source: the batches by step.
          identity: what fixes the meaning of a sample; part of every position.
          has_documents: whether batches carry positions and segments.
          num_workers: reader processes, 0 for threads of this one.
          reuse_first: yield the batch of step 0 at every step.
          opened: the data sets, None for random tokens.
          description: lines about them.
          policy: of failed reads; None for no further try.
          log: takes what is read again; None for one of its own.
          show: takes lines about what is read again and left out.
        """
        self.has_documents = has_documents
        self.description = description
        self.retry_log = log or RetryLog(show)
        self.identity = identity
        self.opened = opened or []
        self.skipped = _skipped(self.opened)
        self._reader = RetryingReader(
            source,
            self.opened,
            what="training data",
            log=self.retry_log,
            policy=policy or RetryPolicy(),
            num_processes=num_workers,
        )
        self._reuse_first = reuse_first
        self._first_batch: Batch | None = None
        self._show = show
        self._step = 0

    @property
    def _source(self) -> GlobalBatch:
        return self._reader.source

    @property
    def num_steps(self) -> int | None:
        """Batches of the whole run, None when the data repeats without end.

        Depends on where the run stands and what it leaves out, so that `seek`, `resume` and
        `exclude` change it.
        """
        return None if len(self._source) == sys.maxsize else len(self._source)

    @property
    def unigram_entropy(self) -> float | None:
        """Of the tokens trained on, in nats; None for a mixture or where it is not known."""
        return self.opened[0].data.unigram_entropy if len(self.opened) == 1 else None

    @property
    def facts(self) -> dict[str, Any]:
        """What tells whether two runs saw the same: the data, and the tokenizer if known."""
        tokenizers = {source.data.tokenizer_sha256 for source in self.opened} - {""}
        return {
            "train": "; ".join(source.entry.location for source in self.opened) or "random tokens",
            "identity": self.identity["data_set"],
            "tokenizer": " ".join(sorted(tokenizers)),
        }

    @property
    def tokenizer_folder(self) -> Path | None:
        """Where the tokenizer of the (first) data set lies, None where there is none."""
        return self.opened[0].data.tokenizer_folder if self.opened else None

    def origin(self, step: int) -> list[list[tuple[str, int, int]]]:
        """Of each row of a step: (document, first token of it in the row, tokens there)."""
        return self._source.origin(step)

    def sample_range(self, step: int) -> tuple[int, int]:
        """First sample that a step reads, on any host, and the one after its last.

        Those that are left out in between lie in the range too.
        """
        return self._source.sample_range(step)

    def exclude(self, first: int, end: int) -> None:
        """Leaves out samples [first, end) from the next batch on: later ones move up.

        What was read before stays read. Who also goes back to an earlier position may do so before
        or after: what is left out once stays left out.

        Raises:
          UserError: not 0 <= first < end.
        """
        holes = Holes([(first, end)])
        self.close()
        self._source.leave_out(holes, self._step)

    def exclude_once(self, first: int, end: int) -> bool:
        """As `exclude`, unless all of it is left out already.

        Returns:
          Whether something is left out that was not.
        """
        known = self._source.left_out
        if known | Holes([(first, end)]) == known:
            return False
        self.exclude(first, end)
        return True

    @property
    def position(self) -> dict[str, Any]:
        """State after the last batch yielded: JSON-able, the same on every host.

        `step` is the step of the next batch, `samples` the number in the data of its first sample
        (without holes these are the samples read before it), `excluded` the [first, end) of what
        was or will be left out; the rest says which data these count in.
        """
        return {
            "step": self._step,
            "samples": self._source.samples_before(self._step),
            "excluded": [list(pair) for pair in self._source.left_out.pairs],
            **self.identity,
        }

    def seek(self, step: int, samples: int | None = None) -> None:
        """Makes `step` the next one yielded. Reads nothing, whatever the distance.

        Args:
          step: from 0.
          samples: number in the data of its first sample; None for what this run's batches give
            from step 0 on, with all that is left out now.
        """
        assert step >= 0, step
        self.close()
        if samples is None:
            self._source.begin_at(0, 0)
        else:
            self._source.begin_at(step, samples)
        self._step = step

    def resume(self, position: Mapping[str, Any]) -> None:
        """Goes on where a saved position stands, also with another batch size.

        What was left out then stays left out, beside what excluded_samples and `exclude` say.

        Raises:
          UserError: the data set, its reading or the seed differ, so that the saved position would
            stand for other text. Names each key with both values.
        """
        if differences := self.differences(position):
            raise UserError(
                f"The checkpoint stands at step {position.get('step')} of other data: "
                + "; ".join(differences)
                + ". Set back what differs to continue that run exactly, or begin a new run "
                "(another run_name) from its weights with load_parameters_path."
            )
        step, samples = position["step"], position.get("samples")
        saved = Holes(position.get("excluded", ()))
        self._source.holes |= saved
        self.seek(step, samples)
        if samples is not None:
            self._source.begin_at(step, samples, passed=saved)
        self._show_left_out(saved)

    def differences(self, position: Mapping[str, Any]) -> list[str]:
        """Why samples of a position are not those of these data, in words; empty if they are."""
        return [
            f"{words} was {position.get(name)!r} and is {self.identity.get(name)!r}"
            for name, words in _KEY_OF.items()
            if position.get(name) != self.identity.get(name)
        ]

    def _show_left_out(self, saved: Holes) -> None:
        """Says what is left out from here on, and what of it the checkpoint did not know."""
        ahead = self._source.holes.within(self._source.first_sample)
        if not ahead:
            return
        line = f"Samples of the training data that are left out: {ahead}."
        if ahead != saved.within(self._source.first_sample):
            line += f" The checkpoint had: {saved}."
        self._show(line)

    def __iter__(self) -> "BatchIterator":
        return self

    def __next__(self) -> Batch:
        if self._step >= len(self._source):
            self.close()
            raise StopIteration
        if self._reuse_first:
            if self._first_batch is None:
                self._first_batch = self._take(0)
                self.close()
            batch = self._first_batch
        else:
            batch = self._take(self._step)
        self._step += 1
        return batch

    def _take(self, step: int) -> Batch:
        return _to_batch(self._reader.read(step))

    def stop_waiting(self, when: Callable[[], bool]) -> None:
        """Lets `next` raise StopWaiting as soon as `when` is true, in the midst of a wait too."""
        self._reader.stopping = when

    def close(self) -> None:
        """Stops the readers; the next `next` starts them again."""
        self._reader.close()


class EvalBatches:
    """One pass over a split, in order, each time it is iterated. `len` is its batches.

    Attributes:
      has_documents, retry_log, skipped: as of BatchIterator.
    """

    def __init__(
        self,
        source: GlobalBatch,
        has_documents: bool,
        opened: list[OpenedSource] | None = None,
        policy: RetryPolicy | None = None,
        log: RetryLog | None = None,
    ):
        """Args: as of BatchIterator."""
        self.has_documents = has_documents
        self.retry_log = log or RetryLog(print)
        self.skipped = _skipped(opened or [])
        self._reader = RetryingReader(
            source,
            opened or [],
            what="evaluation data",
            log=self.retry_log,
            policy=policy or RetryPolicy(),
        )

    def stop_waiting(self, when: Callable[[], bool]) -> None:
        """As of BatchIterator, for iterating."""
        self._reader.stopping = when

    def __len__(self) -> int:
        return len(self._reader.source)

    def __iter__(self) -> Iterator[Batch]:
        self._reader.close()
        try:
            for step in range(len(self)):
                yield _to_batch(self._reader.read(step))
        finally:
            self._reader.close()


def _skipped(opened: Sequence[OpenedSource]) -> list[str]:
    return [message for source in opened for message in source.data.skipped]


def _to_batch(arrays: Mapping[str, np.ndarray]) -> Batch:
    return Batch(
        tokens_BT=arrays["tokens"],
        targets_BT=arrays["targets"],
        weights_BT=arrays["weights"],
        positions_BT=arrays.get("positions"),
        segments_BT=arrays.get("segments"),
    )
