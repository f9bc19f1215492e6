"""Builds the training and evaluation batch iterators.

The batch of a step is a pure function of (datasets, seed, step). Samples are numbered over all
steps and hosts, and each host reads its share of a step, so concatenating the hosts in order gives
the same global batch bit for bit, and resuming at any step needs no replay.
"""

import sys
from collections.abc import Callable
from typing import Any

from pydantic import TypeAdapter

from MaxText.config.data_sections import DataConfig, MaskingConfig, PreparationConfig
from MaxText.config.schema import Config
from MaxText.errors import UserError
from MaxText.input_pipeline import data_sources
from MaxText.input_pipeline.data_sources import OpenDataSource
from MaxText.input_pipeline.iterator import BatchIterator, EvalBatches
from MaxText.input_pipeline.prefetch import RetryLog, RetryPolicy, never
from MaxText.input_pipeline.sequences.batch_schedule import BatchSchedule
from MaxText.input_pipeline.sequences.global_batch import ExcludedRanges, GlobalBatch
from MaxText.input_pipeline.sequences.masked_lm import MLMMasking
from MaxText.input_pipeline.sequences.order import (
    EVAL_STREAM,
    Concatenation,
    EpochPermutation,
    OrderedWindows,
    SequenceDataset,
    SyntheticSequences,
)
from MaxText.input_pipeline.sequences.windows import (
    ConcatThenSplit,
    SequenceOptions,
    SlidingWindows,
)
from MaxText.input_pipeline.token_store.opening import OpenRequest

_SYNTHETIC_EVAL_STEPS = 10  # evaluation batches of random tokens, which are unbounded


def open_batches(
    config: Config,
    schedule: BatchSchedule,
    eval_batch_size: int,
    part: int,
    parts: int,
    stopping: Callable[[], bool] = never,
    log: Callable[[str], None] = print,
) -> tuple[BatchIterator, EvalBatches | None]:
    """Returns this process's training and (if enabled) evaluation batches.

    It reads shard `part` of `parts` of each batch. `eval_batch_size` is global.
    """
    reading: dict[str, Any] = {
        "masking": config.masking,
        "preparation": config.preparation,
        "vocab_size": config.model.shape.vocab_size,
        "process_index": part,
        "process_count": parts,
        "log": log,
    }
    evaluation = config.evaluation
    training = make_train_iterator(
        config.data, schedule=schedule, num_steps=config.run.steps, **reading
    )
    training.stop_waiting(stopping)
    if training.description:
        log(training.description)
    if evaluation.eval_interval <= 0:
        return training, None
    evaluating = make_eval_iterator(
        config.data,
        eval_steps=evaluation.eval_steps,
        max_target_length=config.model.shape.max_target_length,
        global_batch_size=eval_batch_size,
        **reading,
    )
    evaluating.stop_waiting(stopping)
    return training, evaluating


def make_train_iterator(
    data: DataConfig,
    *,
    schedule: BatchSchedule,
    vocab_size: int,
    masking: MaskingConfig | None = None,
    preparation: PreparationConfig | None = None,
    process_index: int = 0,
    process_count: int = 1,
    num_steps: int | None = None,
    log: Callable[[str], None] = print,
) -> BatchIterator:
    """Returns this host's training batches, starting at step 0.

    Yields host-local Batches of NumPy arrays [sequences of the step / process_count, T]. With
    `num_epoch` the iterator ends after that many passes, and the last batch is padded with
    sequences of weight 0. `num_steps` of the run affects GPT-NeoX's order; None is unbounded.

    Raises:
      UserError: A dataset is missing, damaged, too short for one window, or does not fit
        vocab_size; the batch does not split over the hosts; or excluded_samples is not a list of
        ranges.
    """
    masking, preparation = masking or MaskingConfig(), preparation or PreparationConfig()
    _check_hosts(schedule, process_index, process_count)
    identity: dict[str, Any] = {
        "data_set": "synthetic",
        "seed": data.data_shuffle_seed,
        "max_target_length": schedule.window,
    }
    exclusions = ExcludedRanges(data.excluded_samples)
    excluded = f"Excluded samples (excluded_samples): {exclusions}" if exclusions else ""
    retry_log = RetryLog(log)
    opened: list[OpenDataSource] = []
    if data.dataset_type == "synthetic":
        rows = SyntheticSequences(schedule.window, vocab_size, data.data_shuffle_seed)
        description = excluded
    else:
        num_samples = None if num_steps is None else schedule.samples_before(num_steps)
        request = OpenRequest(data, preparation, True, vocab_size, log)
        opened = _open(request, masking, schedule.window, num_samples, retry_log)
        rows = data_sources.mix_sources(data, opened)
        lines = [data_sources.describe(data, opened, num_samples), excluded]
        description = "\n".join(filter(None, lines))
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
    source = GlobalBatch(
        rows, schedule, process_index, process_count,
        seed=data.data_shuffle_seed, exclusions=exclusions,
        **_processing(opened, masking, vocab_size),
    )  # fmt: skip
    return BatchIterator(
        source,
        opened,
        identity,
        policy=RetryPolicy.of(data),
        retry_log=retry_log,
        num_workers=data.grain_worker_count if opened else 0,
        reuse_first=data.reuse_example_batch,
        description=description,
    )


def make_eval_iterator(
    data: DataConfig,
    *,
    eval_steps: int,
    max_target_length: int,
    vocab_size: int,
    global_batch_size: int,
    masking: MaskingConfig | None = None,
    preparation: PreparationConfig | None = None,
    process_index: int = 0,
    process_count: int = 1,
    log: Callable[[str], None] = print,
) -> EvalBatches:
    """Returns this host's evaluation batches, for repeated iteration.

    The last batch is padded with sequences of weight 0. `eval_steps` is the maximum number of
    batches; -1 is the whole split. Raises UserError as make_train_iterator does, and for an unknown
    or empty split.
    """
    masking, preparation = masking or MaskingConfig(), preparation or PreparationConfig()
    schedule = BatchSchedule.constant(global_batch_size, max_target_length)
    _check_hosts(schedule, process_index, process_count)
    retry_log = RetryLog(log)
    opened: list[OpenDataSource] = []
    if data.dataset_type == "synthetic":
        if eval_steps == -1:
            eval_steps = _SYNTHETIC_EVAL_STEPS
            log(
                "note: dataset_type=synthetic is unbounded: an evaluation takes "
                f"{_SYNTHETIC_EVAL_STEPS} batches (eval_steps)"
            )
        rows = SyntheticSequences(
            max_target_length, vocab_size, data.data_shuffle_seed, EVAL_STREAM
        )
    else:
        request = OpenRequest(data, preparation, False, vocab_size, log)
        opened = _open(request, masking, max_target_length, None, retry_log)
        rows = Concatenation([source.rows for source in opened])
    share = process_index, process_count
    return _eval_batches(
        data, opened, rows, schedule, share, eval_steps, masking, vocab_size, retry_log
    )


def _eval_batches(
    data: DataConfig,
    opened: list[OpenDataSource],
    rows: SequenceDataset,
    schedule: BatchSchedule,
    share: tuple[int, int],
    eval_steps: int,
    masking: MaskingConfig,
    vocab_size: int,
    retry_log: RetryLog,
) -> EvalBatches:
    num_steps = sys.maxsize if eval_steps == -1 else eval_steps
    options = _processing(opened, masking, vocab_size)
    batches = GlobalBatch(rows, schedule, *share, num_steps=num_steps, **options)
    return EvalBatches(batches, opened, RetryPolicy.of(data), retry_log)


def open_eval_sources(config: Config, log: Callable[[str], None] = print) -> list[OpenDataSource]:
    """Opens every evaluation dataset; returns an empty list for random tokens."""
    if config.data.dataset_type == "synthetic":
        return []
    shape = config.model.shape
    request = OpenRequest(config.data, config.preparation, False, shape.vocab_size, log)
    return _open(request, config.masking, shape.max_target_length, None, RetryLog(log))


def open_source_batches(
    config: Config,
    source: OpenDataSource | None,
    *,
    rows: int,
    stride: int,
    part: int,
    parts: int,
    log: Callable[[str], None] = print,
) -> EvalBatches:
    """Returns this process's batches of one evaluation source.

    `stride` is the number of targets between the starts of windows, each counted once; -1 for
    adjacent windows, packed as in evaluation during training. With a stride, raises UserError for
    records with labels and for documents without targets.
    """
    eval_steps, masking = config.evaluation.eval_steps, config.masking
    length, vocab_size = config.model.shape.max_target_length, config.model.shape.vocab_size
    if source is None:
        return make_eval_iterator(
            config.data,
            eval_steps=eval_steps,
            max_target_length=length,
            vocab_size=vocab_size,
            global_batch_size=rows,
            process_index=part,
            process_count=parts,
            log=log,
        )
    data, sequences, retry_log = config.data, source.rows, RetryLog(log)
    if stride != -1:
        windows = _sliding_windows(data, source, stride, length)
        sequences = OrderedWindows(windows, EpochPermutation(len(windows), 0, False, 1), 0)
        masking = MaskingConfig()
    schedule, share = BatchSchedule.constant(rows, length), (part, parts)
    _check_hosts(schedule, *share)
    return _eval_batches(
        data, [source], sequences, schedule, share, eval_steps, masking, vocab_size, retry_log
    )


def _sliding_windows(
    data: DataConfig, source: OpenDataSource, stride: int, length: int
) -> SlidingWindows:
    name = f"{source.entry.key}={source.entry.location}"
    if source.data.labels is not None:
        raise UserError(
            f"{name} has labels, so its windows cannot be moved by eval_stride={stride}. Leave "
            "eval_stride=-1."
        )
    options = SequenceOptions(length, data.cross_document_attention, data.zero_loss)
    windows = SlidingWindows(source.data, options, stride)
    if len(windows) == 0:
        raise UserError(
            f"{name}: no document has two tokens, so there is nothing to predict within one. "
            "Set cross_document_attention=true to score them as one text."
        )
    return windows


def _check_hosts(schedule: BatchSchedule, process_index: int, process_count: int) -> None:
    assert 0 <= process_index < process_count, (process_index, process_count)
    for stage in schedule.stages:
        if stage.samples < 1 or stage.samples % process_count:
            raise UserError(
                f"A global batch of {stage.samples} sequences cannot be split evenly over "
                f"{process_count} hosts: change per_device_batch_size so that it is a multiple of "
                f"{process_count}."
            )


def _open(
    request: OpenRequest,
    masking: MaskingConfig,
    window: int,
    num_samples: int | None,
    retry_log: RetryLog,
) -> list[OpenDataSource]:
    # CLS takes one position of each sequence.
    with_cls = masking.mlm_training and masking.mlm.cls_token_id >= 0
    opened = data_sources.open_sources(request, window - with_cls, num_samples, retry_log)
    if masking.mlm_training:
        # Bidirectional attention would see padding, so segments are needed to mask it. Of
        # packed windows only the last has padding.
        for source in opened:
            windows = source.rows.windows
            whole = request.data.cross_document_attention and isinstance(windows, ConcatThenSplit)
            windows.has_documents = not whole
    return opened


def _processing(
    opened: list[OpenDataSource], masking: MaskingConfig, vocab_size: int
) -> dict[str, Any]:
    """Returns how GlobalBatch checks and masks the sequences of some sources."""
    # Without labels, opening the data may have checked all ids.
    known = all(one.data.largest_id is not None and one.data.labels is None for one in opened)
    options: dict[str, Any] = {"largest_id": None if known else vocab_size - 1}
    if masking.mlm_training and opened:
        for source in opened:
            if source.data.labels is not None:
                raise UserError(
                    f"mlm_training=true chooses its own targets, and {source.entry.location} has "
                    "labels. Name records without labels, or train without mlm_training."
                )
        special = {token for source in opened for token in source.data.special_ids}
        mask_ids = (source.data.mask_id for source in opened)
        mask_id = next((token for token in mask_ids if token is not None), None)
        options["masked"] = MLMMasking(masking, vocab_size, mask_id, special)
    return options
