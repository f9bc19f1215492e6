"""Builds the batches of a training run, and of each dataset to score."""

import sys
from collections.abc import Callable
from typing import Any

from MaxText.config.schema import Config
from MaxText.errors import UserError
from MaxText.input_pipeline import data_sources
from MaxText.input_pipeline.data_sources import OpenedSource
from MaxText.input_pipeline.iterator import BatchIterator, EvalBatches
from MaxText.input_pipeline.loader import eval_loader, train_loader
from MaxText.input_pipeline.prefetch import never
from MaxText.input_pipeline.retry import RetryLog, RetryPolicy
from MaxText.input_pipeline.sequences.batch_schedule import BatchPlan
from MaxText.input_pipeline.sequences.global_batch import GlobalBatch
from MaxText.input_pipeline.sequences.order import OrderedWindows, WindowOrder
from MaxText.input_pipeline.sequences.sliding_windows import SlidingWindows
from MaxText.input_pipeline.sequences.windows import Cutting


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
    reading = {
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


def open_eval_sources(config: Config, show: Callable[[str], None] = print) -> list[OpenedSource]:
    """Opens every evaluation dataset; returns an empty list for random tokens."""
    if config.data.dataset_type == "synthetic":
        return []
    return data_sources.open_sources(
        config.data,
        config.preparation,
        data_sources.eval_entries(config.data),
        config.data.eval_split,
        length=config.model.shape.max_target_length,
        vocab_size=config.model.shape.vocab_size,
        num_samples=None,
        for_training=False,
        show=show,
    )


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
    if source is not None and stride != -1:
        return _sliding(config, source, stride, rows, part, parts, show)
    data, shape = config.data, config.model.shape
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


def _sliding(
    config: Config,
    source: OpenedSource,
    stride: int,
    rows: int,
    part: int,
    parts: int,
    show: Callable[[str], None],
) -> EvalBatches:
    data, shape = config.data, config.model.shape
    name = f"{source.entry.key}={source.entry.location}"
    if source.data.labels is not None:
        raise UserError(
            f"{name} has labels, whose windows are as they were written: eval_stride={stride} "
            "cannot move them. Leave eval_stride=-1."
        )
    cutting = Cutting(shape.max_target_length, data.attend_across_documents, data.zero_loss)
    windows = SlidingWindows(source.data, cutting, stride)
    if len(windows) == 0:
        raise UserError(
            f"{name}: no document has two tokens, so there is nothing to predict within one. "
            "Set attend_across_documents=true to score them as one text."
        )
    limit = config.evaluation.eval_steps
    batches = GlobalBatch(
        OrderedWindows(windows, WindowOrder(len(windows), 0, False, 1), 0),
        BatchPlan.constant(rows, shape.max_target_length),
        process_index=part,
        process_count=parts,
        num_steps=sys.maxsize if limit == -1 else limit,
        largest_id=None if source.data.largest_id is not None else shape.vocab_size - 1,
    )
    policy = RetryPolicy.of(data)
    return EvalBatches(batches, windows.has_documents, [source], policy, RetryLog(show))
