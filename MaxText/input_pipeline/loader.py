"""Batches for training and evaluation: `train_loader` and `eval_loader`.

The batch of step s is a pure function of (data sets, seed, s). The rows of a run are numbered over
all steps and hosts, and host h takes its part of each step's rows, so hosts joined in order give
the same global batch bit for bit, however many they are, and continuing at any step needs no
replay. Grain runs the readers, in threads or processes, and keeps the next batches ready.

Legend: B rows, T tokens of a window.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import grain
import numpy as np
from absl import flags

from MaxText.configuration.data_sections import Data, Masking, Preparation
from MaxText.errors import UserError
from MaxText.input_pipeline import sources
from MaxText.input_pipeline.batch import Batch
from MaxText.input_pipeline.rows.batch_plan import BatchPlan
from MaxText.input_pipeline.rows.masked_lm import MaskedLanguageModel
from MaxText.input_pipeline.rows.row_batches import BadRecords, RowBatches
from MaxText.input_pipeline.rows.synthetic import EVAL_STREAM, SyntheticRows
from MaxText.input_pipeline.rows.windows import PackedWindows
from MaxText.input_pipeline.storage import is_url

# An element is a whole batch: a few threads hide slow storage, and few batches are kept ready.
# Mapped files need no waiting, and threads that only compute hand Python's lock to and fro: batches
# of 64 x 1024 then cost 1.1 ms of CPU with one thread and 2.0 ms with four.
_READ_THREADS = 4
_BATCHES_READY = 4


class _StepsFrom:
    """A source whose element 0 is step `first`: how a reader starts in the middle for free."""

    def __init__(self, source: RowBatches, first: int):
        self._source = source
        self._first = first

    def __len__(self) -> int:
        return max(0, len(self._source) - self._first)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._source[self._first + index]


def _read_ahead(source: RowBatches, first: int, num_workers: int, num_threads: int) -> Any:
    """Grain's iterator over `source` from step `first` on, with batches prepared ahead."""
    dataset = grain.MapDataset.source(_StepsFrom(source, first)).to_iter_dataset(
        grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=_BATCHES_READY)
    )
    if num_workers:
        # Grain reads absl flags in the processes it starts; programs without absl's main never
        # parse any, so their defaults are declared final here.
        if not flags.FLAGS.is_parsed():
            flags.FLAGS.mark_as_parsed()
        dataset = dataset.mp_prefetch(
            grain.MultiprocessingOptions(num_workers=num_workers, per_worker_buffer_size=2)
        )
    return iter(dataset)


def _num_threads(opened: list[sources.OpenedSource]) -> int:
    mapped = all(
        hasattr(source.data.stream, "gather") and not is_url(source.entry.location)
        for source in opened
    )
    return 1 if mapped else _READ_THREADS


def _to_batch(arrays: Mapping[str, np.ndarray]) -> Batch:
    return Batch(
        tokens_BT=arrays["tokens"],
        targets_BT=arrays["targets"],
        weights_BT=arrays["weights"],
        positions_BT=arrays.get("positions"),
        segments_BT=arrays.get("segments"),
    )


class BatchIterator(Iterator[Batch]):
    """The host's training batches in order, from any step.

    Not for several threads at once. Nothing is read before the first `next`.
    """

    def __init__(
        self,
        source: RowBatches,
        identity: dict[str, Any],
        *,
        has_documents: bool,
        bad_records: BadRecords,
        num_workers: int = 0,
        reuse_first: bool = False,
        opened: list[sources.OpenedSource] | None = None,
        description: str = "",
    ):
        """Starts before step 0.

        Args:
          source: the batches by step.
          identity: what fixes the meaning of a sample; part of every position.
          has_documents: whether batches carry positions and segments.
          bad_records: takes note of records that are skipped.
          num_workers: reader processes, 0 for threads of this one.
          reuse_first: yield the batch of step 0 at every step.
          opened: the data sets, None for random tokens.
          description: lines about them.
        """
        self.has_documents = has_documents
        self.description = description
        self.bad_records = bad_records
        self._source = source
        self._identity = identity
        self._opened = opened or []
        self._num_workers = num_workers
        self._reuse_first = reuse_first
        self._first_batch: Batch | None = None
        self._reader: Any = None
        self._step = 0

    @property
    def num_steps(self) -> int | None:
        """Batches of the whole run, None when the data repeats without end."""
        return None if len(self._source) == sys.maxsize else len(self._source)

    @property
    def unigram_entropy(self) -> float | None:
        """Of the tokens trained on, in nats; None for a mixture or where it is not known."""
        return self._opened[0].data.unigram_entropy if len(self._opened) == 1 else None

    @property
    def facts(self) -> dict[str, Any]:
        """What tells whether two runs saw the same: the data, and the tokenizer if known."""
        tokenizers = {source.data.tokenizer_sha256 for source in self._opened} - {""}
        return {
            "train": "; ".join(source.entry.location for source in self._opened) or "random tokens",
            "identity": self._identity["data_set"],
            "tokenizer": " ".join(sorted(tokenizers)),
        }

    @property
    def tokenizer_folder(self) -> Path | None:
        """Where the tokenizer of the (first) data set lies, None where there is none."""
        return self._opened[0].data.tokenizer_folder if self._opened else None

    @property
    def opened(self) -> list[sources.OpenedSource]:
        """The data sets; none for random tokens."""
        return self._opened

    def origin(self, step: int) -> list[list[tuple[str, int, int]]]:
        """Of each row of a step: (document, first token of it in the row, tokens there)."""
        return self._source.origin(step)

    @property
    def position(self) -> dict[str, Any]:
        """State after the last batch yielded: JSON-able, the same on every host.

        `step` is the step of the next batch and `samples` the samples read before it; the rest
        says which data these count in.
        """
        samples = self._source.samples_before(self._step)
        return {"step": self._step, "samples": samples, **self._identity}

    def seek(self, step: int, samples: int | None = None) -> None:
        """Makes `step` the next one yielded. Reads nothing, whatever the distance.

        Args:
          step: from 0.
          samples: samples that were read before it; None for what this run's batches give.
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

        Raises:
          UserError: the data set, its reading or the seed differ, so that the saved position would
            stand for other text. Names each key with both values.
        """
        differences = [
            f"{words} was {position.get(name)!r} and is {self._identity.get(name)!r}"
            for name, words in _KEY_OF.items()
            if position.get(name) != self._identity.get(name)
        ]
        if differences:
            raise UserError(
                f"The checkpoint stands at step {position.get('step')} of other data: "
                + "; ".join(differences)
                + ". Set back what differs to continue that run exactly, or begin a new run "
                "(another run_name) from its weights with load_parameters_path."
            )
        self.seek(position["step"], position.get("samples"))

    def __iter__(self) -> "BatchIterator":
        return self

    def __next__(self) -> Batch:
        if self._step >= len(self._source):
            self.close()
            raise StopIteration
        if self._reuse_first:
            if self._first_batch is None:
                self._first_batch = self._take(self._source[0])
            batch = self._first_batch
        else:
            if self._reader is None:
                self._reader = _read_ahead(
                    self._source, self._step, self._num_workers, _num_threads(self._opened)
                )
            arrays = next(self._reader)
            if self._num_workers:
                # Out of the memory shared with the reader, which is then free for the next one.
                arrays = {
                    name: np.array(value) if isinstance(value, np.ndarray) else value
                    for name, value in arrays.items()
                }
            batch = self._take(arrays)
        self._step += 1
        return batch

    def _take(self, arrays: dict[str, Any]) -> Batch:
        self.bad_records.take(arrays)
        return _to_batch(arrays)

    def close(self) -> None:
        """Stops the readers; the next `next` starts them again."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None


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


class EvalBatches:
    """One pass over a split, in order, each time it is iterated. `len` is its batches."""

    def __init__(
        self,
        source: RowBatches,
        has_documents: bool,
        bad_records: BadRecords,
        opened: list[sources.OpenedSource] | None = None,
    ):
        """Args: as of BatchIterator."""
        self._opened = opened or []
        self.has_documents = has_documents
        self.bad_records = bad_records
        self._source = source

    def __len__(self) -> int:
        return len(self._source)

    def __iter__(self) -> Iterator[Batch]:
        reader = _read_ahead(self._source, 0, 0, _num_threads(self._opened))
        try:
            for arrays in reader:
                self.bad_records.take(arrays)
                yield _to_batch(arrays)
        finally:
            reader.close()


def _check_hosts(plan: BatchPlan, process_index: int, process_count: int) -> None:
    assert 0 <= process_index < process_count, (process_index, process_count)
    for stage in plan.stages:
        if stage.samples < 1 or stage.samples % process_count:
            raise UserError(
                f"A global batch of {stage.samples} sequences cannot be split evenly over "
                f"{process_count} hosts: change per_device_batch_size so that it is a multiple of "
                f"{process_count}."
            )


def _masked(
    masking: Masking, opened: list[sources.OpenedSource], vocab_size: int
) -> MaskedLanguageModel | None:
    if not masking.mlm_training:
        return None
    special: set[int] = set()
    mask_id = None
    for source in opened:
        if source.data.labels is not None:
            raise UserError(
                f"mlm_training=true chooses its own targets, and {source.entry.location} has "
                "labels. Name records without labels, or train without mlm_training."
            )
        special.update(source.data.special_ids)
        mask_id = source.data.mask_id if mask_id is None else mask_id
    return MaskedLanguageModel(masking, vocab_size, mask_id, special)


def _open(
    data: Data,
    masking: Masking,
    preparation: Preparation,
    entries: list[sources.Entry],
    split: str,
    *,
    window: int,
    vocab_size: int,
    num_samples: int | None,
    for_training: bool,
    show: Callable[[str], None],
) -> tuple[list[sources.OpenedSource], MaskedLanguageModel | None]:
    with_cls = int(masking.mlm_training and masking.mlm_cls_token_id >= 0)
    opened = sources.open_sources(
        data,
        preparation,
        entries,
        split,
        # CLS takes one place of each row.
        length=window - with_cls,
        vocab_size=vocab_size,
        num_samples=num_samples,
        for_training=for_training,
        show=show,
    )
    if masking.mlm_training:
        # From both sides, filling would be seen. Of rows cut from one stream only the last has any.
        for source in opened:
            windows = source.rows.windows
            whole = data.attend_across_documents and isinstance(windows, PackedWindows)
            windows.has_documents = not whole
    return opened, _masked(masking, opened, vocab_size)


def train_loader(
    data: Data,
    *,
    plan: BatchPlan,
    vocab_size: int,
    masking: Masking | None = None,
    preparation: Preparation | None = None,
    process_index: int = 0,
    process_count: int = 1,
    num_steps: int | None = None,
    show: Callable[[str], None] = print,
) -> BatchIterator:
    """This host's rows of each training batch, from step 0 on.

    Args:
      data: the keys about data.
      plan: samples and length of each step's batch, over all hosts (accumulation included).
      vocab_size: ids the model knows.
      masking: the keys about masked language modelling.
      preparation: the keys about tokenising text while reading.
      process_index: this host.
      process_count: hosts.
      num_steps: steps of the run, which GPT-NeoX's order and what is said about passes over a
        mixture depend on; None where it has no end.
      show: takes lines about what is done.

    Returns:
      An iterator over host-local Batch of NumPy arrays [rows of the step / process_count, T].
      With `num_epoch` it ends after that many passes, the last batch filled up with rows of
      weight 0; otherwise it never ends.

    Raises:
      UserError: a data set is missing, damaged, too short for one window, or does not fit
        vocab_size; or the batch does not split over the hosts.
    """
    masking, preparation = masking or Masking(), preparation or Preparation()
    _check_hosts(plan, process_index, process_count)
    process: dict[str, Any] = {"process_index": process_index, "process_count": process_count}
    identity: dict[str, Any] = {
        "data_set": "synthetic",
        "seed": data.data_shuffle_seed,
        "max_target_length": plan.window,
    }
    bad_records = BadRecords(data.max_bad_records, show)
    if data.dataset_type == "synthetic":
        rows = SyntheticRows(plan.window, vocab_size, data.data_shuffle_seed)
        return BatchIterator(
            RowBatches(rows, plan, **process),
            identity,
            has_documents=False,
            bad_records=bad_records,
            reuse_first=data.reuse_example_batch,
        )
    num_samples = None if num_steps is None else plan.samples_before(num_steps)
    opened, masked = _open(
        data,
        masking,
        preparation,
        sources.train_entries(data),
        data.train_split,
        window=plan.window,
        vocab_size=vocab_size,
        num_samples=num_samples,
        for_training=True,
        show=show,
    )
    rows = sources.combine(data, opened)
    source = RowBatches(
        rows,
        plan,
        **process,
        masked=masked,
        seed=data.data_shuffle_seed,
        skip_bad=data.on_bad_record == "skip",
        largest_id=_largest_allowed(opened, vocab_size),
    )
    identity |= {
        "data_set": " ".join(source.data.fingerprint for source in opened),
        "split": data.train_split,
        "shuffle": data.enable_data_shuffling,
        "cut": "; ".join(source.rows.windows.description for source in opened),
        "file_groups": data.iter_file_nums,
    }
    if len(opened) > 1:
        identity["mixture"] = " ".join(map(repr, sources.weights(data, opened)))
    if masked is not None:
        identity["masking"] = masking.model_dump_json()
    return BatchIterator(
        source,
        identity,
        has_documents=rows.has_documents,
        bad_records=bad_records,
        num_workers=data.grain_worker_count,
        reuse_first=data.reuse_example_batch,
        opened=opened,
        description=sources.describe(data, opened, num_samples),
    )


def _largest_allowed(opened: list[sources.OpenedSource], vocab_size: int) -> int | None:
    known = all(source.data.largest_id is not None for source in opened)
    return None if known else vocab_size - 1


def eval_loader(
    data: Data,
    *,
    eval_steps: int,
    max_target_length: int,
    vocab_size: int,
    global_batch_size: int,
    masking: Masking | None = None,
    preparation: Preparation | None = None,
    process_index: int = 0,
    process_count: int = 1,
    show: Callable[[str], None] = print,
) -> EvalBatches:
    """This host's rows of the evaluation batches: what is evaluated on in order, once.

    Args:
      data: the keys about data.
      eval_steps: batches at most; -1 for the whole split.
      max_target_length: T, tokens of a window.
      vocab_size: ids the model knows.
      global_batch_size: sequences of a batch over all hosts.
      masking: the keys about masked language modelling.
      preparation: the keys about tokenising text while reading.
      process_index: this host.
      process_count: hosts.
      show: takes lines about what is done.

    Returns:
      Batches that can be iterated again and again, the last one filled up with rows of weight 0.

    Raises:
      UserError: as train_loader; also an unknown or empty split, eval_steps=0, or random tokens
        without eval_steps.
    """
    masking, preparation = masking or Masking(), preparation or Preparation()
    plan = BatchPlan.constant(global_batch_size, max_target_length)
    _check_hosts(plan, process_index, process_count)
    if eval_steps == 0:
        raise UserError("eval_steps=0 evaluates nothing: use -1 (the whole split) or 1 and above.")
    options: dict[str, Any] = {
        "process_index": process_index,
        "process_count": process_count,
        "num_steps": sys.maxsize if eval_steps == -1 else eval_steps,
    }
    bad_records = BadRecords(data.max_bad_records, show)
    if data.dataset_type == "synthetic":
        if eval_steps == -1:
            raise UserError(
                "dataset_type=synthetic never ends, so an evaluation needs eval_steps (batches)."
            )
        rows = SyntheticRows(max_target_length, vocab_size, data.data_shuffle_seed, EVAL_STREAM)
        return EvalBatches(RowBatches(rows, plan, **options), False, bad_records)
    opened, masked = _open(
        data,
        masking,
        preparation,
        sources.eval_entries(data),
        data.eval_split,
        window=max_target_length,
        vocab_size=vocab_size,
        num_samples=None,
        for_training=False,
        show=show,
    )
    rows = sources.chain(opened)
    source = RowBatches(
        rows,
        plan,
        **options,
        masked=masked,
        skip_bad=data.on_bad_record == "skip",
        largest_id=_largest_allowed(opened, vocab_size),
    )
    return EvalBatches(source, rows.has_documents, bad_records, opened)
