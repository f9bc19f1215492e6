"""Loss over all targets of a dataset split, per source.

B rows, T tokens of a window, V vocab_size.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from MaxText.config.schema import Config
from MaxText.evaluation.scores import SourceScore, log_progress
from MaxText.evaluation.text_bytes import TextBytes, TokenByteCounts
from MaxText.evaluation.validation import sum_batches
from MaxText.inference.trained_model import Log, TrainedModel
from MaxText.input_pipeline.data_sources import OpenDataSource
from MaxText.input_pipeline.loader import open_source_batches
from MaxText.input_pipeline.sequences.batch_source import BatchShard
from MaxText.layers.assembly.model import Model
from MaxText.layers.batch import Batch
from MaxText.parallelism import mesh
from MaxText.training.objective import is_in_nats, loss_sums


def _score_step(
    model: Model, count_correct: bool, params: Any, batch: Batch, byte_counts: TokenByteCounts
) -> dict[str, jax.Array]:
    """Sums nats (float32), targets and their bytes (int32) of a batch.

    With `count_correct` also argmax hits, as `correct`.
    """
    objective = model.config.objective
    sums = loss_sums(model.merge(params), batch, objective, count_correct=count_correct)
    counts_V, has_dummy_prefix_V = byte_counts
    bytes_BT = counts_V[batch.targets_BT]
    # A text that follows a control id begins with a space that the tokenizer added.
    begins_BT = has_dummy_prefix_V[batch.targets_BT] & (counts_V[batch.tokens_BT] == 0)
    counts_BT = batch.loss_mask_BT > 0
    correct = {} if sums.correct is None else {"correct": sums.correct.astype(jnp.int32)}
    return correct | {
        "nats": sums.in_nats,
        "targets": jnp.sum(counts_BT, dtype=jnp.int32),
        "bytes": jnp.sum(jnp.where(counts_BT, bytes_BT - begins_BT, 0), dtype=jnp.int32),
    }


def score_data_set(
    trained: TrainedModel,
    opened: Sequence[OpenDataSource],
    text_bytes: TextBytes,
    config: Config,
    log: Log = print,
) -> list[SourceScore]:
    """Scores every source of open_eval_sources, else random tokens.

    Raises UserError for batches that the devices do not divide, or unreadable data.
    """
    per_device = config.evaluation.eval_per_device_batch_size
    batch_size = mesh.microbatch_size(config.batch, trained.sharding, per_device)
    objective = trained.model.config.objective
    counts_correct = config.masking.mlm_training

    def score_step(*arguments: Any) -> dict[str, jax.Array]:
        return _score_step(trained.model, counts_correct, *arguments)

    step = trained.sharding.jit(score_step)
    compiled: dict[Any, Any] = {}  # by structure of the batch

    def score(source: OpenDataSource | None) -> SourceScore:
        name = "random tokens" if source is None else source.entry.location
        shard = BatchShard(jax.process_index(), jax.process_count())
        batches = open_source_batches(config, source, batch_size, shard, log)
        byte_counts, why = text_bytes.byte_counts(source)
        tables = _placed_tables(byte_counts, trained)
        progress = log_progress(f"{name} (batches)", log)
        compiling = 0.0

        def outputs() -> Iterator[dict[str, jax.Array]]:
            nonlocal compiling
            for number, batch in enumerate(batches, 1):
                placed = trained.sharding.to_global_batch(batch, batch_size)
                kind = jax.tree.structure(placed)
                if kind not in compiled:
                    compile_began = time.perf_counter()
                    compiled[kind] = step.lower(trained.params, placed, tables).compile()
                    compiling += time.perf_counter() - compile_began
                yield compiled[kind](trained.params, placed, tables)
                progress(number, len(batches))

        began = time.perf_counter()
        sums, num_batches = sum_batches(outputs())
        seconds = time.perf_counter() - began - compiling
        targets = int(sums["targets"])
        num_bytes = int(sums["bytes"])
        if byte_counts is None:
            is_whole_split = config.evaluation.eval_steps == -1
            num_bytes, why = text_bytes.from_manifest(source, targets, is_whole_split, why)
        return SourceScore(
            name=name,
            total_nll=sums["nats"],
            num_targets=targets,
            num_bytes=num_bytes,
            bytes_unavailable_reason=why,
            num_batches=num_batches,
            seconds=seconds,
            correct=int(sums["correct"]) if counts_correct else None,
            other_loss="" if is_in_nats(objective) else objective.loss_type,
            facts=_facts(source, len(batches.skipped)),
        )

    return [score(source) for source in opened or [None]]


def _placed_tables(byte_counts: TokenByteCounts | None, trained: TrainedModel) -> TokenByteCounts:
    """Returns replicated tables of vocab_size; zeros if the bytes are unknown."""
    tables = np.zeros((2, trained.model.config.shape.vocab_size), np.int32)
    for table, known in zip(tables, byte_counts or (), strict=False):
        # The model's vocabulary may be padded, or smaller than the tokenizer's.
        table[: len(known)] = known[: len(table)]
    counts_V, has_dummy_prefix_V = tables
    placed = counts_V, has_dummy_prefix_V.astype(bool)
    return TokenByteCounts(*jax.device_put(placed, trained.sharding.replicated))


def _facts(source: OpenDataSource | None, num_bad: int) -> dict[str, Any]:
    if source is None:
        return {}
    data = source.dataset
    facts = {
        "tokens_of_split": len(data.store),
        "documents_of_split": len(data.store.document_offsets) - 1,
        "data_set": data.fingerprint,
        "tokenizer_sha256": data.tokenizer_sha256,
    }
    return facts | ({"records_skipped": num_bad} if num_bad else {})
