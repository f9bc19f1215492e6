"""Builds the training and evaluation batch iterators.

The batch of a step is a pure function of (datasets, seed, step). Samples are numbered over all
steps and hosts, and each host reads its share of a step, so concatenating the hosts in order gives
the same global batch bit for bit, and resuming at any step needs no replay.
"""

import sys
from collections.abc import Callable
from typing import Any

from MaxText.config.data_sections import Data, Masking, Preparation
from MaxText.config.schema import Config
from MaxText.errors import UserError
from MaxText.input_pipeline import data_sources
from MaxText.input_pipeline.data_sources import OpenedSource, SourcesRequest
from MaxText.input_pipeline.iterator import BatchIterator, EvalBatches
from MaxText.input_pipeline.prefetch import never
from MaxText.input_pipeline.retry import RetryLog, RetryPolicy
from MaxText.input_pipeline.sequences.batch_schedule import BatchPlan
from MaxText.input_pipeline.sequences.global_batch import GlobalBatch, Holes
from MaxText.input_pipeline.sequences.masked_lm import MaskedLanguageModel
from MaxText.input_pipeline.sequences.order import (
    EVAL_STREAM,
    OrderedWindows,
    SyntheticRows,
    WindowOrder,
)
from MaxText.input_pipeline.sequences.sliding_windows import SlidingWindows
from MaxText.input_pipeline.sequences.windows import Cutting, PackedWindows

_SYNTHETIC_EVAL_STEPS = 10  # evaluation batches of random tokens, which are unbounded


def open_batches(
    config: Config,
    plan: BatchPlan,
    eval_rows: int,
    part: int,
    parts: int,
    stopping: Callable[[], bool] = never,
    show: Callable[[str], None] = print,
) -> tuple[BatchIterator, EvalBatches | None]:
    """Returns this process's training batches, and evaluation batches if enabled.

    It reads shard `part` of `parts` of each batch. `eval_rows` is the global evaluation batch size.
    """
    reading: dict[str, Any] = {
        "masking": config.masking,
        "preparation": config.preparation,
        "vocab_size": config.model.shape.vocab_size,
        "process_index": part,
        "process_count": parts,
        "show": show,
    }
    evaluation = config.evaluation
    training = train_loader(config.data, plan=plan, num_steps=config.run.steps, **reading)
    training.stop_waiting(stopping)
    if training.description:
        show(training.description)
    if evaluation.eval_interval <= 0:
        return training, None
    evaluating = eval_loader(
        config.data,
        eval_steps=evaluation.eval_steps,
        max_target_length=config.model.shape.max_target_length,
        global_batch_size=eval_rows,
        **reading,
    )
    evaluating.stop_waiting(stopping)
    return training, evaluating


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
    """Returns this host's training batches, starting at step 0.

    Yields host-local Batches of NumPy arrays [sequences of the step / process_count, T]. With
    `num_epoch` the iterator ends after that many passes, and the last batch is padded with
    sequences of weight 0. `num_steps` of the run affects GPT-NeoX's order; None is unbounded.

    Raises:
      UserError: A dataset is missing, damaged, too short for one window, or does not fit
        vocab_size; the batch does not split over the hosts; or excluded_samples is not a list of
        ranges.
    """
    masking, preparation = masking or Masking(), preparation or Preparation()
    _check_hosts(plan, process_index, process_count)
    identity: dict[str, Any] = {
        "data_set": "synthetic",
        "seed": data.data_shuffle_seed,
        "max_target_length": plan.window,
    }
    holes = Holes(data.excluded_samples)
    left_out = f"Excluded samples (excluded_samples): {holes}" if holes else ""
    log = RetryLog(show)
    opened: list[OpenedSource] = []
    options: dict[str, Any] = {}
    if data.dataset_type == "synthetic":
        rows = SyntheticRows(plan.window, vocab_size, data.data_shuffle_seed)
        description = left_out
    else:
        num_samples = None if num_steps is None else plan.samples_before(num_steps)
        request = SourcesRequest(data, preparation, True, vocab_size, show)
        opened = _open(request, masking, plan.window, num_samples, log)
        rows = data_sources.combine(data, opened)
        lines = [data_sources.describe(data, opened, num_samples), left_out]
        description = "\n".join(filter(None, lines))
        options = _processing(opened, masking, vocab_size)
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
            identity["masking"] = masking.model_dump_json()
    source = GlobalBatch(
        rows, plan, process_index, process_count,
        seed=data.data_shuffle_seed, holes=holes, **options,
    )  # fmt: skip
    return BatchIterator(
        source,
        identity,
        has_documents=rows.has_documents,
        num_workers=data.grain_worker_count if opened else 0,
        reuse_first=data.reuse_example_batch,
        opened=opened,
        description=description,
        policy=RetryPolicy.of(data),
        log=log,
        show=show,
    )


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
    """Returns this host's evaluation batches, which can be iterated repeatedly.

    The last batch is padded with sequences of weight 0. `eval_steps` is the maximum number of
    batches; -1 is the whole split. Raises UserError as train_loader does, and for an unknown or
    empty split, or eval_steps=0.
    """
    masking, preparation = masking or Masking(), preparation or Preparation()
    plan = BatchPlan.constant(global_batch_size, max_target_length)
    _check_hosts(plan, process_index, process_count)
    if eval_steps == 0:
        raise UserError("eval_steps=0 evaluates nothing: use -1 (the whole split) or 1 and above.")
    log = RetryLog(show)
    opened: list[OpenedSource] = []
    options: dict[str, Any] = {}
    if data.dataset_type == "synthetic":
        if eval_steps == -1:
            eval_steps = _SYNTHETIC_EVAL_STEPS
            show(
                "note: dataset_type=synthetic is unbounded: an evaluation takes "
                f"{_SYNTHETIC_EVAL_STEPS} batches (eval_steps)"
            )
        rows = SyntheticRows(max_target_length, vocab_size, data.data_shuffle_seed, EVAL_STREAM)
    else:
        request = SourcesRequest(data, preparation, False, vocab_size, show)
        opened = _open(request, masking, max_target_length, None, log)
        rows = data_sources.chain(opened)
        options = _processing(opened, masking, vocab_size)
    source = GlobalBatch(
        rows, plan, process_index, process_count, num_steps=_step_limit(eval_steps), **options
    )
    return EvalBatches(source, rows.has_documents, opened, RetryPolicy.of(data), log)


def open_eval_sources(config: Config, show: Callable[[str], None] = print) -> list[OpenedSource]:
    """Opens every evaluation dataset; returns an empty list for random tokens."""
    if config.data.dataset_type == "synthetic":
        return []
    shape = config.model.shape
    request = SourcesRequest(config.data, config.preparation, False, shape.vocab_size, show)
    return data_sources.open_sources(request, shape.max_target_length)


def open_source_batches(
    config: Config,
    source: OpenedSource | None,
    *,
    rows: int,
    stride: int,
    part: int,
    parts: int,
    show: Callable[[str], None] = print,
) -> EvalBatches:
    """Returns this process's batches of one dataset, to evaluate it alone.

    `stride` is the number of targets between the starts of windows, each counted once; -1 for
    adjacent windows, packed as in evaluation during training. With a stride, raises UserError for
    records with labels and for documents without targets.
    """
    data, shape = config.data, config.model.shape
    if source is not None and stride != -1:
        windows = _sliding_windows(data, source, stride, shape.max_target_length)
        batches = GlobalBatch(
            OrderedWindows(windows, WindowOrder(len(windows), 0, False, 1), 0),
            BatchPlan.constant(rows, shape.max_target_length),
            part,
            parts,
            num_steps=_step_limit(config.evaluation.eval_steps),
            largest_id=_unchecked_ids([source], shape.vocab_size),
        )
        policy = RetryPolicy.of(data)
        return EvalBatches(batches, windows.has_documents, [source], policy, RetryLog(show))
    if source is not None:
        entry = source.entry
        named: Any = entry.location
        if entry.key == "dataset_mix":
            named = ((entry.location, entry.stitch, entry.sampling, entry.weight),)
        data = data.model_copy(update={entry.key: named})
    return eval_loader(
        data,
        eval_steps=config.evaluation.eval_steps,
        max_target_length=shape.max_target_length,
        vocab_size=shape.vocab_size,
        global_batch_size=rows,
        masking=config.masking,
        preparation=config.preparation,
        process_index=part,
        process_count=parts,
        show=show,
    )


def _sliding_windows(data: Data, source: OpenedSource, stride: int, length: int) -> SlidingWindows:
    name = f"{source.entry.key}={source.entry.location}"
    if source.data.labels is not None:
        raise UserError(
            f"{name} has labels, so its windows cannot be moved by eval_stride={stride}. Leave "
            "eval_stride=-1."
        )
    cutting = Cutting(length, data.attend_across_documents, data.zero_loss)
    windows = SlidingWindows(source.data, cutting, stride)
    if len(windows) == 0:
        raise UserError(
            f"{name}: no document has two tokens, so there is nothing to predict within one. "
            "Set attend_across_documents=true to score them as one text."
        )
    return windows


def _step_limit(eval_steps: int) -> int:
    return sys.maxsize if eval_steps == -1 else eval_steps


def _check_hosts(plan: BatchPlan, process_index: int, process_count: int) -> None:
    assert 0 <= process_index < process_count, (process_index, process_count)
    for stage in plan.stages:
        if stage.samples < 1 or stage.samples % process_count:
            raise UserError(
                f"A global batch of {stage.samples} sequences cannot be split evenly over "
                f"{process_count} hosts: change per_device_batch_size so that it is a multiple of "
                f"{process_count}."
            )


def _open(
    request: SourcesRequest,
    masking: Masking,
    window: int,
    num_samples: int | None,
    log: RetryLog,
) -> list[OpenedSource]:
    # CLS takes one position of each sequence.
    with_cls = masking.mlm_training and masking.mlm_cls_token_id >= 0
    opened = data_sources.open_sources(request, window - with_cls, num_samples, log)
    if masking.mlm_training:
        # Bidirectional attention would see padding, so segments are needed to mask it. Of
        # packed windows only the last has padding.
        for source in opened:
            windows = source.rows.windows
            whole = request.data.attend_across_documents and isinstance(windows, PackedWindows)
            windows.has_documents = not whole
    return opened


def _processing(opened: list[OpenedSource], masking: Masking, vocab_size: int) -> dict[str, Any]:
    """Returns how GlobalBatch checks and masks the sequences of some sources."""
    return {
        "masked": _masked(masking, opened, vocab_size) if masking.mlm_training else None,
        "largest_id": _unchecked_ids(opened, vocab_size),
    }


def _masked(masking: Masking, opened: list[OpenedSource], vocab_size: int) -> MaskedLanguageModel:
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


def _unchecked_ids(opened: list[OpenedSource], vocab_size: int) -> int | None:
    """Returns the largest id to check batches for; None if opening the data checked all ids."""
    known = all(one.data.largest_id is not None and one.data.labels is None for one in opened)
    return None if known else vocab_size - 1
