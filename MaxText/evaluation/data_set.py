"""Loss over all targets of a dataset split, per source.

B sequences, T tokens of a sequence, V vocab_size.
"""

import functools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from MaxText.config.schema import Config
from MaxText.evaluation.scores import SourceScore, log_progress
from MaxText.evaluation.text_bytes import TextBytes, TokenByteCounts
from MaxText.evaluation.validation import ObjectiveTotals, objective_sums, sum_batches
from MaxText.inference.trained_model import Log, TrainedModel
from MaxText.input_pipeline.data_sources import OpenDataSource
from MaxText.input_pipeline.loader import open_source_batches
from MaxText.input_pipeline.sequences.batch_source import BatchShard
from MaxText.layers.assembly.model import Model
from MaxText.layers.batch import Batch
from MaxText.layers.params import Params
from MaxText.parallelism import mesh
from MaxText.training.model_objective import FrozenParams, read_frozen_params


def _score_step(
    model: Model,
    params: Params,
    batch: Batch,
    byte_counts: TokenByteCounts,
    frozen: FrozenParams,
    *,
    count_correct: bool,
) -> dict[str, jax.Array]:
    """Sums losses (float32), targets and their bytes (int32) of a batch.

    Args:
      model: With its objective.
      params: Its parameters.
      batch: Arrays [B, T].
      byte_counts: UTF-8 bytes of each id.
      frozen: Parameters of the models that the objective reads and does not train.
      count_correct: Whether to count the targets that are the argmax, too.
    """
    sums = objective_sums(model, params, batch, frozen=frozen, count_correct=count_correct)
    return sums | count_targets(batch, byte_counts)


def count_targets(batch: Batch, byte_counts: TokenByteCounts) -> dict[str, jax.Array]:
    """Returns the number of targets of a batch and of their UTF-8 bytes, int32.

    Args:
      batch: Arrays [B, T].
      byte_counts: Of each id.
    """
    counts_V, has_dummy_prefix_V = byte_counts
    bytes_BT = counts_V[batch.targets_BT]
    # A text that follows a control id begins with a space that the tokenizer added.
    added_spaces_BT = has_dummy_prefix_V[batch.targets_BT] & (counts_V[batch.tokens_BT] == 0)
    is_target_BT = batch.loss_mask_BT > 0
    return {
        "targets": jnp.sum(is_target_BT, dtype=jnp.int32),
        "bytes": jnp.sum(jnp.where(is_target_BT, bytes_BT - added_spaces_BT, 0), dtype=jnp.int32),
    }


def score_data_set(
    trained: TrainedModel,
    opened: Sequence[OpenDataSource],
    text_bytes: TextBytes,
    config: Config,
    log: Log = print,
) -> list[SourceScore]:
    """Scores every source of open_eval_sources, else random tokens.

    Args:
      trained: The model and its weights.
      opened: Data sources; empty for random tokens.
      text_bytes: Counts the bytes of targets, for bits per byte.
      config: Batch size, masking, eval_steps and the windows.
      log: Takes lines for the terminal.

    Raises:
      UserError: The devices do not divide the batch, or data cannot be read.
    """
    per_device = config.evaluation.eval_per_device_batch_size
    batch_size = mesh.microbatch_size(config.batch, trained.sharding, per_device)
    step = _CompiledScoreStep(trained, batch_size, count_correct=config.counts_correct)
    return [_score_source(source, step, text_bytes, config, log) for source in opened or [None]]


class _CompiledScoreStep:
    """The scoring step, compiled at its first batch of each structure.

    Attributes:
      compile_seconds: Time spent on compilation, which scores do not include.
      frozen: Parameters of the models that the objective reads and does not train.
    """

    def __init__(self, trained: TrainedModel, batch_size: int, *, count_correct: bool):
        """Compiles nothing yet."""
        self.trained = trained
        self.batch_size = batch_size
        self.count_correct = count_correct
        self.compile_seconds = 0.0
        self.frozen = read_frozen_params(trained.model.config, trained.sharding)
        # jit of a method of the mesh passes positional arguments only.
        score_step = functools.partial(_score_step, trained.model, count_correct=count_correct)
        self._step = trained.sharding.jit(score_step)
        self._compiled: dict[Any, jax.stages.Compiled] = {}  # by structure of the batch

    def __call__(self, batch: Batch, byte_counts: TokenByteCounts) -> dict[str, jax.Array]:
        """Returns the sums of _score_step for a batch of this host."""
        params = self.trained.params
        device_batch = self.trained.sharding.to_global_batch(batch, self.batch_size)
        structure = jax.tree.structure(device_batch)
        if structure not in self._compiled:
            compile_start = time.perf_counter()
            self._compiled[structure] = self._step.lower(
                params, device_batch, byte_counts, self.frozen
            ).compile()
            self.compile_seconds += time.perf_counter() - compile_start
        return self._compiled[structure](params, device_batch, byte_counts, self.frozen)


def _score_source(
    source: OpenDataSource | None,
    step: _CompiledScoreStep,
    text_bytes: TextBytes,
    config: Config,
    log: Log,
) -> SourceScore:
    """Scores the batches of one source, or random tokens for None."""
    trained = step.trained
    name = "random tokens" if source is None else source.entry.location
    shard = BatchShard(index=jax.process_index(), count=jax.process_count())
    batches = open_source_batches(config, source, step.batch_size, shard, log)
    byte_counts, reason = text_bytes.byte_counts(source)
    device_byte_counts = replicated_byte_counts(byte_counts, trained)
    progress = log_progress(f"{name} (batches)", log)

    def outputs() -> Iterator[dict[str, jax.Array]]:
        for num_done, batch in enumerate(batches, 1):
            yield step(batch, device_byte_counts)
            progress(num_done, len(batches))

    compile_seconds_before = step.compile_seconds
    start_time = time.perf_counter()
    sums, num_batches = sum_batches(outputs())
    seconds = time.perf_counter() - start_time
    seconds -= step.compile_seconds - compile_seconds_before
    num_targets = int(sums["targets"])
    num_bytes = int(sums["bytes"])
    totals = ObjectiveTotals.from_sums(sums)
    assert totals.nats is not None
    if byte_counts is None:
        num_bytes, reason = text_bytes.from_manifest(
            source,
            num_targets,
            is_whole_split=config.evaluation.eval_steps == -1
            and config.evaluation.eval_half == "all",
            reason=reason,
        )
    return SourceScore(
        name=name,
        total_nll=totals.nats,
        num_targets=num_targets,
        num_bytes=num_bytes,
        bytes_unavailable_reason=reason,
        num_batches=num_batches,
        seconds=seconds,
        correct=None if totals.correct is None else round(totals.correct),
        objective="" if totals.has_perplexity else trained.model.config.objective.loss_type,
        total_objective=totals.total_loss,
        facts=_facts(source, len(batches.skipped)),
    )


def replicated_byte_counts(
    byte_counts: TokenByteCounts | None, trained: TrainedModel
) -> TokenByteCounts:
    """Returns replicated tables of vocab_size; zeros if the bytes are unknown."""
    vocab_size = trained.model.config.shape.vocab_size
    counts_V = np.zeros(vocab_size, np.int32)
    has_dummy_prefix_V = np.zeros(vocab_size, bool)
    if byte_counts is not None:
        # The model's vocabulary may be padded, or smaller than the tokenizer's.
        num_ids = min(vocab_size, len(byte_counts.counts_V))
        counts_V[:num_ids] = byte_counts.counts_V[:num_ids]
        has_dummy_prefix_V[:num_ids] = byte_counts.has_dummy_prefix_V[:num_ids]
    tables = TokenByteCounts(counts_V, has_dummy_prefix_V)
    return jax.device_put(tables, trained.sharding.replicated)


def _facts(source: OpenDataSource | None, num_bad: int) -> dict[str, Any]:
    """Returns what identifies the data of a score, for the JSON file.

    `num_bad` is the number of records skipped as damaged.
    """
    if source is None:
        return {}
    data = source.dataset
    facts = {
        "tokens_of_split": len(data.store),
        "documents_of_split": len(data.store.document_offsets) - 1,
        "data_set": data.fingerprint,
        "tokenizer_sha256": data.tokenizer_sha256,
    }
    if num_bad:
        facts["records_skipped"] = num_bad
    return facts
