"""Builds the training and evaluation batch iterators.

The batch of a step is a pure function of (datasets, seed, step). Sequences have order indices over
all steps and processes, and each process reads its shard of a step, so concatenating the shards in
order gives the same global batch bit for bit, and resuming at any step needs no replay. The
package's docstring defines the words and lists the files on the way.
"""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import TypeAdapter

from MaxText.config.data_sections import DataConfig
from MaxText.config.schema import Config
from MaxText.errors import UserError
from MaxText.input_pipeline import data_sources
from MaxText.input_pipeline.data_sources import OpenDataSource
from MaxText.input_pipeline.iterator import EvalBatches, TrainIterator
from MaxText.input_pipeline.prefetch import Retries, never_stop
from MaxText.input_pipeline.sequences.batch_schedule import BatchSchedule
from MaxText.input_pipeline.sequences.batch_source import (
    WHOLE_BATCH,
    BatchShard,
    BatchSource,
    ExcludedRanges,
)
from MaxText.input_pipeline.sequences.masked_lm import MLMMasking
from MaxText.input_pipeline.sequences.order import (
    EVAL_STREAM,
    SECOND_EVAL_STREAM,
    TRAIN_STREAM,
    Concatenation,
    OrderedSequences,
    SyntheticSequences,
)
from MaxText.input_pipeline.sequences.slicing import SequenceOptions
from MaxText.input_pipeline.sequences.sliding_windows import SlidingWindows
from MaxText.runtime.first_process import first_process_first

_UNBOUNDED_EVAL_STEPS = 10  # evaluation batches of random tokens and of streams


def open_batches(
    config: Config,
    schedule: BatchSchedule,
    eval_batch_size: int,
    shard: BatchShard,
    *,
    should_stop: Callable[[], bool] = never_stop,
    log: Callable[[str], None] = print,
) -> tuple[TrainIterator, EvalBatches | None]:
    """Returns this process's training and (if enabled) evaluation batches. Collective.

    Of the processes that share a cache (data_cache_dir), the first opens the data and fills the
    cache with imports and indices; then the others open the data from the cache.

    Args:
      config: The run's configuration.
      schedule: Training batch size by step.
      eval_batch_size: Sequences of an evaluation batch over all processes.
      shard: The shard of each batch that this process reads.
      should_stop: Once it returns true, reads raise WaitCancelledError.
      log: Receives messages about the data and failed reads.

    Raises:
      UserError: As make_train_iterator and make_eval_iterator do.
    """
    eval_batches = None
    with first_process_first("opening the data", config.data.data_cache_dir):
        train_batches = make_train_iterator(config, schedule, shard, log)
        if config.evaluation.eval_interval > 0:
            eval_batches = make_eval_iterator(config, eval_batch_size, shard, log)
            eval_batches.stop_waiting(should_stop)
    train_batches.stop_waiting(should_stop)
    return train_batches, eval_batches


def make_train_iterator(
    config: Config,
    schedule: BatchSchedule,
    shard: BatchShard = WHOLE_BATCH,
    log: Callable[[str], None] = print,
) -> TrainIterator:
    """Returns this process's training batches, starting at step 0.

    Yields Batches of NumPy arrays [B, T], where B is this process's shard of the step's batch. With
    `num_epoch` the iterator ends after that many passes, and the last batch is padded with
    sequences of weight 0.

    Raises:
      UserError: A dataset is missing, damaged, too short for one sequence, or does not fit
        vocab_size; the batch does not split over the processes; or excluded_samples is not a list
        of ranges.
    """
    data = config.data
    exclusions = ExcludedRanges(data.excluded_samples)
    retries = Retries(data.data_retry, log)
    sources: list[OpenDataSource] = []
    if data.dataset_type == "synthetic":
        sequences = _synthetic(config, TRAIN_STREAM)
    else:
        num_sequences = schedule.sequences_before(config.run.steps)
        sources = data_sources.open_sources(config, True, num_sequences, retries)
        sequences = data_sources.mix_sources(data, sources)
        log(data_sources.describe(data, sources, num_sequences))
    if exclusions:
        log(f"Excluded samples (excluded_samples): {exclusions}")
    batch_source = BatchSource(
        sequences,
        schedule,
        shard,
        max_token_id=_max_token_id(config, sources),
        masking=_masking(config, sources),
        seed=data.data_shuffle_seed,
        exclusions=exclusions,
        reuse_first=data.reuse_example_batch,
    )
    return TrainIterator(
        batch_source,
        sources,
        retries,
        num_workers=_num_workers(data, sources, log),
        identity=_identity(config, schedule, sources),
    )


def _num_workers(
    data: DataConfig, sources: Sequence[OpenDataSource], log: Callable[[str], None]
) -> int:
    """Returns the number of reader processes; 0, a thread, for streams and random tokens."""
    streams = [source.entry.location for source in sources if source.stream is not None]
    if data.grain_worker_count and streams:
        log(
            f"note: grain_worker_count={data.grain_worker_count} is not used: a thread reads the "
            f"stream {streams[0]} in order"
        )
    return data.grain_worker_count if sources and not streams else 0


def _identity(
    config: Config, schedule: BatchSchedule, sources: Sequence[OpenDataSource]
) -> dict[str, Any]:
    """Returns the settings that decide which sequence an order index of the run is.

    They are stored in data positions; a run resumes only with the same ones. Names of the fields in
    messages: `iterator._IDENTITY_NAMES`.
    """
    data = config.data
    masking = config.masking
    identity: dict[str, Any] = {
        "data_set": "synthetic",
        "seed": data.data_shuffle_seed,
        "max_target_length": schedule.sequence_length,
    }
    if not sources:
        return identity
    identity["data_set"] = " ".join(source.dataset.fingerprint for source in sources)
    identity["split"] = data.train_split
    identity["shuffle"] = data.enable_data_shuffling
    identity["cut"] = "; ".join(source.sequences.slicer.description for source in sources)
    identity["file_groups"] = data.iter_file_nums
    if len(sources) > 1:
        weights = data_sources.mixture_weights(data, sources)
        identity["mixture"] = " ".join(repr(weight) for weight in weights)
    if masking.mlm_training:
        mlm_values = {f"mlm_{name}": value for name, value in masking.mlm}
        mlm_values = {"mlm_training": masking.mlm_training, **mlm_values}
        identity["masking"] = TypeAdapter(dict).dump_json(mlm_values).decode()
    return identity


def make_eval_iterator(
    config: Config,
    batch_size: int,
    shard: BatchShard = WHOLE_BATCH,
    log: Callable[[str], None] = print,
) -> EvalBatches:
    """Returns this process's evaluation batches, for repeated iteration.

    The last batch is padded with sequences of weight 0. `batch_size` counts sequences over all
    processes. Raises UserError as make_train_iterator does, and for an unknown or empty split.
    """
    sources = open_eval_sources(config, log)
    return _eval_batches(config, sources, batch_size, shard, log)


def open_eval_sources(config: Config, log: Callable[[str], None] = print) -> list[OpenDataSource]:
    """Opens every evaluation dataset; returns an empty list for random tokens."""
    if config.data.dataset_type == "synthetic":
        return []
    return data_sources.open_sources(config, False, None, Retries(config.data.data_retry, log))


def open_source_batches(
    config: Config,
    source: OpenDataSource | None,
    batch_size: int,
    shard: BatchShard,
    log: Callable[[str], None] = print,
) -> EvalBatches:
    """Returns this process's batches of one evaluation source; None: of random tokens.

    With eval_stride, sequences are sliding windows that start that many targets apart and count
    each target once; else they are those of evaluation during training. With a stride, raises
    UserError for records with labels and for documents without targets.
    """
    if source is None:
        return _eval_batches(config, [], batch_size, shard, log)
    if config.scoring.eval_stride != -1:
        windows = _sliding_windows(config, source)
        in_order = OrderedSequences(windows, seed=0, shuffle=False, num_epoch=1)
        in_order = data_sources.evaluated_half(config, source.entry, in_order)
        source = dataclasses.replace(source, sequences=in_order)
    return _eval_batches(config, [source], batch_size, shard, log)


def _eval_batches(
    config: Config,
    sources: list[OpenDataSource],
    batch_size: int,
    shard: BatchShard,
    log: Callable[[str], None],
) -> EvalBatches:
    """Returns one pass over some sources, one after the other; random tokens without any."""
    if sources:
        sequences = Concatenation([source.sequences for source in sources])
        has_streams = any(source.stream is not None for source in sources)
        max_steps = _UNBOUNDED_EVAL_STEPS if has_streams else sys.maxsize
    else:
        is_second = config.evaluation.eval_half == "second"
        sequences = _synthetic(config, SECOND_EVAL_STREAM if is_second else EVAL_STREAM)
        max_steps = _UNBOUNDED_EVAL_STEPS
    if config.evaluation.eval_steps != -1:
        max_steps = config.evaluation.eval_steps
        if config.batch.global_batch_size and not config.evaluation.eval_per_device_batch_size:
            # As many sequences on any number of devices.
            max_steps *= config.batch.gradient_accumulation_steps
    batch_source = BatchSource(
        sequences,
        BatchSchedule.constant(batch_size, config.model.shape.max_target_length),
        shard,
        max_steps=max_steps,
        max_token_id=_max_token_id(config, sources),
        masking=_masking(config, sources),
    )
    return EvalBatches(batch_source, sources, Retries(config.data.data_retry, log))


def _synthetic(config: Config, stream: int) -> SyntheticSequences:
    """Returns sequences of random tokens (dataset_type=synthetic)."""
    shape = config.model.shape
    return SyntheticSequences(
        shape.max_target_length, shape.vocab_size, config.data.data_shuffle_seed, stream
    )


def _sliding_windows(config: Config, source: OpenDataSource) -> SlidingWindows:
    """Slices a source into overlapping windows, for eval_stride."""
    name = f"{source.entry.key}={source.entry.location}"
    stride = config.scoring.eval_stride
    if source.dataset.labels is not None:
        raise UserError(
            f"{name} has labels, so its windows cannot be moved by eval_stride={stride}. Leave "
            "eval_stride=-1."
        )
    if source.dataset.loss_mask is not None or source.stream is not None:
        raise UserError(
            f"{name} has a loss mask or is a stream, so its windows cannot be moved by "
            f"eval_stride={stride}. Leave eval_stride=-1."
        )
    data = config.data
    length = config.model.shape.max_target_length
    options = SequenceOptions(length, data.cross_document_attention, data.zero_loss)
    windows = SlidingWindows(source.dataset, options, stride)
    if len(windows) == 0:
        raise UserError(
            f"{name}: no document has two tokens, so there is nothing to predict within one. "
            "Set cross_document_attention=true to score them as one text."
        )
    return windows


def _masking(config: Config, sources: Sequence[OpenDataSource]) -> MLMMasking | None:
    """Returns the masking of mlm_training; None without it, or for random tokens."""
    if not (config.masking.mlm_training and sources):
        return None
    for source in sources:
        if source.dataset.labels is not None or source.dataset.loss_mask is not None:
            raise UserError(
                f"mlm_training=true chooses its own targets, and {source.entry.location} has "
                "labels or a loss mask. Name data without, or train without mlm_training."
            )
    special_ids = {token for source in sources for token in source.dataset.special_ids}
    mask_ids = (source.dataset.mask_id for source in sources)
    mask_id = next((token for token in mask_ids if token is not None), None)
    return MLMMasking(config.masking, config.model.shape.vocab_size, mask_id, special_ids)


def _max_token_id(config: Config, sources: Sequence[OpenDataSource]) -> int | None:
    """Returns the largest id that batches may hold; None if opening the data checked all ids."""
    are_checked = all(
        source.dataset.max_token_id is not None and source.dataset.labels is None
        for source in sources
    )
    return None if are_checked else config.model.shape.vocab_size - 1
