"""Builds the training and evaluation batch iterators.

The batch of a step is a pure function of (datasets, seed, step). Samples are numbered over all
steps and hosts, and each host reads its share of a step, so concatenating the hosts in order gives
the same global batch bit for bit, and resuming at any step needs no replay.
"""

import sys
from collections.abc import Callable
from typing import Any

from MaxText.config.data_sections import Data, Masking, Preparation
from MaxText.errors import UserError
from MaxText.input_pipeline import data_sources
from MaxText.input_pipeline.iterator import BatchIterator, EvalBatches
from MaxText.input_pipeline.retry import RetryLog, RetryPolicy
from MaxText.input_pipeline.sequences.batch_schedule import BatchPlan
from MaxText.input_pipeline.sequences.exclusions import Holes
from MaxText.input_pipeline.sequences.global_batch import GlobalBatch
from MaxText.input_pipeline.sequences.masked_lm import MaskedLanguageModel
from MaxText.input_pipeline.sequences.synthetic import EVAL_STREAM, SyntheticRows
from MaxText.input_pipeline.sequences.windows import PackedWindows

_SYNTHETIC_EVAL_STEPS = 10  # evaluation batches of random tokens, which are unbounded


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
    masking: Masking, opened: list[data_sources.OpenedSource], vocab_size: int
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
    entries: list[data_sources.Entry],
    split: str,
    *,
    window: int,
    vocab_size: int,
    num_samples: int | None,
    for_training: bool,
    log: RetryLog,
    show: Callable[[str], None],
) -> tuple[list[data_sources.OpenedSource], MaskedLanguageModel | None]:
    with_cls = int(masking.mlm_training and masking.mlm_cls_token_id >= 0)
    opened = data_sources.open_sources(
        data,
        preparation,
        entries,
        split,
        # CLS takes one position of each sequence.
        length=window - with_cls,
        vocab_size=vocab_size,
        num_samples=num_samples,
        for_training=for_training,
        show=show,
        log=log,
    )
    if masking.mlm_training:
        # Bidirectional attention would see padding, so segments are needed to mask it. Of
        # packed windows only the last has padding.
        for source in opened:
            windows = source.rows.windows
            whole = data.attend_across_documents and isinstance(windows, PackedWindows)
            windows.has_documents = not whole
    return opened, _masked(masking, opened, vocab_size)


def _unchecked_ids(opened: list[data_sources.OpenedSource], vocab_size: int) -> int | None:
    """Returns the largest id to check batches for; None if opening the data checked all ids."""
    known = all(one.data.largest_id is not None and one.data.labels is None for one in opened)
    return None if known else vocab_size - 1


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
    process: dict[str, Any] = {"process_index": process_index, "process_count": process_count}
    identity: dict[str, Any] = {
        "data_set": "synthetic",
        "seed": data.data_shuffle_seed,
        "max_target_length": plan.window,
    }
    holes = Holes(data.excluded_samples)
    left_out = f"Samples left out (excluded_samples): {holes}" if holes else ""
    if data.dataset_type == "synthetic":
        rows = SyntheticRows(plan.window, vocab_size, data.data_shuffle_seed)
        return BatchIterator(
            GlobalBatch(rows, plan, **process, holes=holes),
            identity,
            has_documents=False,
            reuse_first=data.reuse_example_batch,
            description=left_out,
            show=show,
        )
    log = RetryLog(show)
    num_samples = None if num_steps is None else plan.samples_before(num_steps)
    opened, masked = _open(
        data,
        masking,
        preparation,
        data_sources.train_entries(data),
        data.train_split,
        window=plan.window,
        vocab_size=vocab_size,
        num_samples=num_samples,
        for_training=True,
        log=log,
        show=show,
    )
    rows = data_sources.combine(data, opened)
    source = GlobalBatch(
        rows,
        plan,
        **process,
        masked=masked,
        seed=data.data_shuffle_seed,
        largest_id=_unchecked_ids(opened, vocab_size),
        holes=holes,
    )
    identity |= {
        "data_set": " ".join(source.data.fingerprint for source in opened),
        "split": data.train_split,
        "shuffle": data.enable_data_shuffling,
        "cut": "; ".join(source.rows.windows.description for source in opened),
        "file_groups": data.iter_file_nums,
    }
    if len(opened) > 1:
        identity["mixture"] = " ".join(map(repr, data_sources.weights(data, opened)))
    if masked is not None:
        identity["masking"] = masking.model_dump_json()
    return BatchIterator(
        source,
        identity,
        has_documents=rows.has_documents,
        num_workers=data.grain_worker_count,
        reuse_first=data.reuse_example_batch,
        opened=opened,
        description="\n".join(
            filter(None, [data_sources.describe(data, opened, num_samples), left_out])
        ),
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
    options: dict[str, Any] = {
        "process_index": process_index,
        "process_count": process_count,
        "num_steps": sys.maxsize if eval_steps == -1 else eval_steps,
    }
    if data.dataset_type == "synthetic":
        if eval_steps == -1:
            show(
                f"note: dataset_type=synthetic never ends: an evaluation takes "
                f"{_SYNTHETIC_EVAL_STEPS} batches (eval_steps)"
            )
            options["num_steps"] = _SYNTHETIC_EVAL_STEPS
        rows = SyntheticRows(max_target_length, vocab_size, data.data_shuffle_seed, EVAL_STREAM)
        source = GlobalBatch(rows, plan, **options)
        return EvalBatches(source, False, log=RetryLog(show))
    log = RetryLog(show)
    opened, masked = _open(
        data,
        masking,
        preparation,
        data_sources.eval_entries(data),
        data.eval_split,
        window=max_target_length,
        vocab_size=vocab_size,
        num_samples=None,
        for_training=False,
        log=log,
        show=show,
    )
    rows = data_sources.chain(opened)
    source = GlobalBatch(
        rows,
        plan,
        **options,
        masked=masked,
        largest_id=_unchecked_ids(opened, vocab_size),
    )
    return EvalBatches(source, rows.has_documents, opened, RetryPolicy.of(data), log)
