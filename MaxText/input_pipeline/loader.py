"""Builds the training and evaluation batch iterators.

The batch of a step is a pure function of (datasets, seed, step). Samples are numbered over all
steps and hosts, and each host reads its share of a step, so concatenating the hosts in order gives
the same global batch bit for bit, and resuming at any step needs no replay.
"""

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

from pydantic import TypeAdapter

from MaxText.config.schema import Config
from MaxText.errors import UserError
from MaxText.input_pipeline import data_sources
from MaxText.input_pipeline.data_sources import OpenDataSource
from MaxText.input_pipeline.iterator import EvalBatches, TrainIterator
from MaxText.input_pipeline.prefetch import Retries, never_stop
from MaxText.input_pipeline.sequences.batch_schedule import BatchSchedule
from MaxText.input_pipeline.sequences.global_batch import ExcludedRanges, GlobalBatch
from MaxText.input_pipeline.sequences.masked_lm import MLMMasking
from MaxText.input_pipeline.sequences.order import (
    EVAL_STREAM,
    TRAIN_STREAM,
    Concatenation,
    OrderedWindows,
    SyntheticSequences,
)
from MaxText.input_pipeline.sequences.windows import SequenceOptions, SlidingWindows

_SYNTHETIC_EVAL_STEPS = 10  # evaluation batches of random tokens, which are unbounded


def open_batches(
    config: Config,
    schedule: BatchSchedule,
    eval_batch_size: int,
    part: int,
    parts: int,
    stopping: Callable[[], bool] = never_stop,
    log: Callable[[str], None] = print,
) -> tuple[TrainIterator, EvalBatches | None]:
    """Returns this process's training and (if enabled) evaluation batches.

    It reads shard `part` of `parts` of each batch. `eval_batch_size` is global.
    """
    training = make_train_iterator(config, schedule, (part, parts), log)
    training.stop_waiting(stopping)
    if config.evaluation.eval_interval <= 0:
        return training, None
    evaluating = make_eval_iterator(config, eval_batch_size, (part, parts), log)
    evaluating.stop_waiting(stopping)
    return training, evaluating


def make_train_iterator(
    config: Config,
    schedule: BatchSchedule,
    share: tuple[int, int] = (0, 1),
    log: Callable[[str], None] = print,
) -> TrainIterator:
    """Returns this host's training batches, starting at step 0.

    Yields host-local Batches of NumPy arrays [sequences of the step / hosts, T]. With `num_epoch`
    the iterator ends after that many passes, and the last batch is padded with sequences of weight
    0. `share` is the index and number of hosts.

    Raises:
      UserError: A dataset is missing, damaged, too short for one window, or does not fit
        vocab_size; the batch does not split over the hosts; or excluded_samples is not a list of
        ranges.
    """
    data = config.data
    masking = config.masking
    identity: dict[str, Any] = {
        "data_set": "synthetic",
        "seed": data.data_shuffle_seed,
        "max_target_length": schedule.window,
    }
    exclusions = ExcludedRanges(data.excluded_samples)
    retries = Retries(data.data_retry, log)
    opened: list[OpenDataSource] = []
    if data.dataset_type == "synthetic":
        rows = _synthetic(config, TRAIN_STREAM)
    else:
        num_samples = schedule.samples_before(config.run.steps)
        opened = data_sources.open_sources(config, True, num_samples, retries)
        rows = data_sources.mix_sources(data, opened)
        log(data_sources.describe(data, opened, num_samples))
        identity |= {
            "data_set": " ".join(source.data.fingerprint for source in opened),
            "split": data.train_split,
            "shuffle": data.enable_data_shuffling,
            "cut": "; ".join(source.rows.windows.description for source in opened),
            "file_groups": data.iter_file_nums,
        }
        if len(opened) > 1:
            identity["mixture"] = " ".join(map(repr, data_sources.weights(data, opened)))
        if masking.mlm_training:
            entries = {f"mlm_{name}": value for name, value in masking.mlm.as_dict().items()}
            stored = {"mlm_training": masking.mlm_training, **entries}
            identity["masking"] = TypeAdapter(dict).dump_json(stored).decode()
    if exclusions:
        log(f"Excluded samples (excluded_samples): {exclusions}")
    source = GlobalBatch(
        rows,
        schedule,
        share,
        seed=data.data_shuffle_seed,
        exclusions=exclusions,
        reuse_first=data.reuse_example_batch,
        **_processing(config, opened),
    )
    num_workers = data.grain_worker_count if opened else 0
    return TrainIterator(source, opened, retries, num_workers, identity)


def make_eval_iterator(
    config: Config,
    batch_size: int,
    share: tuple[int, int] = (0, 1),
    log: Callable[[str], None] = print,
) -> EvalBatches:
    """Returns this host's evaluation batches, for repeated iteration.

    The last batch is padded with sequences of weight 0. `batch_size` is global, `share` the index
    and number of hosts. Raises UserError as make_train_iterator does, and for an unknown or empty
    split.
    """
    opened = open_eval_sources(config, log)
    return _eval_batches(config, opened, batch_size, share, log)


def open_eval_sources(config: Config, log: Callable[[str], None] = print) -> list[OpenDataSource]:
    """Opens every evaluation dataset; returns an empty list for random tokens."""
    if config.data.dataset_type == "synthetic":
        return []
    return data_sources.open_sources(config, False, None, Retries(config.data.data_retry, log))


def open_source_batches(
    config: Config,
    source: OpenDataSource | None,
    batch_size: int,
    share: tuple[int, int],
    log: Callable[[str], None] = print,
) -> EvalBatches:
    """Returns this process's batches of one evaluation source, or of none.

    With eval_stride, windows start that many targets apart and count each target once; else they
    are packed as in evaluation during training. With a stride, raises UserError for records with
    labels and for documents without targets.
    """
    opened = [] if source is None else [source]
    if source is not None and config.scoring.eval_stride != -1:
        windows = _sliding_windows(config, source)
        rows = OrderedWindows(windows, seed=0, shuffle=False, num_epoch=1)
        opened = [dataclasses.replace(source, rows=rows)]
    return _eval_batches(config, opened, batch_size, share, log)


def _eval_batches(
    config: Config,
    opened: list[OpenDataSource],
    batch_size: int,
    share: tuple[int, int],
    log: Callable[[str], None],
) -> EvalBatches:
    schedule = BatchSchedule.constant(batch_size, config.model.shape.max_target_length)
    rows = Concatenation([source.rows for source in opened])
    num_steps = config.evaluation.eval_steps
    unlimited = sys.maxsize
    if not opened:
        rows = _synthetic(config, EVAL_STREAM)
        unlimited = _SYNTHETIC_EVAL_STEPS
    num_steps = unlimited if num_steps == -1 else num_steps
    batches = GlobalBatch(rows, schedule, share, num_steps, **_processing(config, opened))
    return EvalBatches(batches, opened, Retries(config.data.data_retry, log))


def _synthetic(config: Config, stream: int) -> SyntheticSequences:
    shape = config.model.shape
    return SyntheticSequences(
        shape.max_target_length, shape.vocab_size, config.data.data_shuffle_seed, stream
    )


def _sliding_windows(config: Config, source: OpenDataSource) -> SlidingWindows:
    name = f"{source.entry.key}={source.entry.location}"
    stride = config.scoring.eval_stride
    if source.data.labels is not None:
        raise UserError(
            f"{name} has labels, so its windows cannot be moved by eval_stride={stride}. Leave "
            "eval_stride=-1."
        )
    data = config.data
    length = config.model.shape.max_target_length
    options = SequenceOptions(length, data.cross_document_attention, data.zero_loss)
    windows = SlidingWindows(source.data, options, stride)
    if len(windows) == 0:
        raise UserError(
            f"{name}: no document has two tokens, so there is nothing to predict within one. "
            "Set cross_document_attention=true to score them as one text."
        )
    return windows


def _processing(config: Config, opened: list[OpenDataSource]) -> dict[str, Any]:
    """Returns how GlobalBatch checks and masks the sequences of some sources."""
    vocab_size = config.model.shape.vocab_size
    masked = None
    if config.masking.mlm_training and opened:
        for source in opened:
            if source.data.labels is not None:
                raise UserError(
                    f"mlm_training=true chooses its own targets, and {source.entry.location} has "
                    "labels. Name records without labels, or train without mlm_training."
                )
        special = {token for source in opened for token in source.data.special_ids}
        mask_ids = (source.data.mask_id for source in opened)
        mask_id = next((token for token in mask_ids if token is not None), None)
        masked = MLMMasking(config.masking, vocab_size, mask_id, special)
    # Without labels, opening the data may have checked all ids.
    known = all(one.data.max_token_id is not None and one.data.labels is None for one in opened)
    return {"masked": masked, "max_token_id": None if known else vocab_size - 1}
