"""Loss over all targets of a dataset split, per source.

B rows, T tokens of a window, V vocab_size.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from MaxText.config.schema import Config
from MaxText.evaluation.scores import SourceScore
from MaxText.evaluation.tasks import log_progress
from MaxText.evaluation.text_bytes import TextBytes
from MaxText.evaluation.token_bytes import TokenByteCounts
from MaxText.inference.trained_model import Show, TrainedModel
from MaxText.input_pipeline.data_sources import OpenDataSource
from MaxText.input_pipeline.loader import open_source_batches
from MaxText.layers.batch import Batch
from MaxText.layers.model import Model
from MaxText.parallelism import mesh
from MaxText.training.objective import is_in_nats, loss_sums

LossTotals = dict[str, jax.Array]


def make_score_step(
    model: Model, *, count_correct: bool = False
) -> Callable[[Any, Batch, TokenByteCounts], LossTotals]:
    """Returns a step that sums nats, targets and their bytes of a batch.

    Nats are float32, counts int32. With `count_correct` it also counts `correct`, the argmax hits.
    """
    objective = model.section.objective

    def score_step(params: Any, batch: Batch, byte_counts: TokenByteCounts) -> LossTotals:
        sums = loss_sums(model.merge(params), batch, objective, count_correct=count_correct)
        counts_V, has_dummy_prefix_V = byte_counts
        bytes_BT = counts_V[batch.targets_BT]
        # A text that follows a control id begins with a space that the tokenizer added.
        begins_BT = has_dummy_prefix_V[batch.targets_BT] & (counts_V[batch.tokens_BT] == 0)
        counts_BT = batch.weights_BT > 0
        correct = {} if sums.correct is None else {"correct": sums.correct.astype(jnp.int32)}
        return correct | {
            "nats": sums.in_nats,
            "targets": jnp.sum(counts_BT, dtype=jnp.int32),
            "bytes": jnp.sum(jnp.where(counts_BT, bytes_BT - begins_BT, 0), dtype=jnp.int32),
        }

    return score_step


def score_data_set(
    trained: TrainedModel,
    opened: Sequence[OpenDataSource],
    text_bytes: TextBytes,
    config: Config,
    show: Show = print,
) -> list[SourceScore]:
    """Scores every source of open_eval_sources; without sources, random tokens.

    Raises UserError for batches that the devices do not divide, or unreadable data.
    """
    scorer = _Scorer(trained, config, text_bytes, show)
    return [scorer.score(source) for source in opened or [None]]


class _Scorer:
    def __init__(self, trained: TrainedModel, config: Config, text_bytes: TextBytes, show: Show):
        self._trained = trained
        self._config = config
        self._text_bytes = text_bytes
        self._show = show
        per_device = config.evaluation.eval_per_device_batch_size
        self._batch_size = mesh.microbatch_size(config.batch, trained.layout, per_device)
        self._shape = trained.model.section.shape
        self._counts_correct = config.masking.mlm_training
        self._step = trained.layout.jit(
            make_score_step(trained.model, count_correct=self._counts_correct)
        )
        self._compiled: dict[Any, Any] = {}

    def score(self, source: OpenDataSource | None) -> SourceScore:
        """Scores all batches of a source, fetching sums one batch late."""
        name = "random tokens" if source is None else source.entry.location
        batches = open_source_batches(
            self._config,
            source,
            rows=self._batch_size,
            stride=self._config.scoring.eval_stride,
            part=jax.process_index(),
            parts=jax.process_count(),
            show=self._show,
        )
        byte_counts, why = self._text_bytes.byte_counts(source)
        tables = self._placed_tables(byte_counts)
        objective = self._trained.model.section.objective
        sums: dict[str, Any] = {"nats": 0.0, "targets": 0, "bytes": 0}
        if self._counts_correct:
            sums["correct"] = 0
        waiting: LossTotals | None = None
        num_batches, compiling = 0, 0.0
        progress = log_progress(f"{name} (batches)", self._show)
        began = time.perf_counter()
        for batch in batches:
            placed = self._trained.layout.to_global_batch(batch, self._batch_size)
            step, seconds = self._step_for(placed, tables)
            compiling += seconds
            new = step(self._trained.params, placed, tables)
            _add(sums, waiting)
            waiting = new
            num_batches += 1
            progress(num_batches, len(batches))
        _add(sums, waiting)
        seconds = time.perf_counter() - began - compiling
        targets = int(sums["targets"])
        num_bytes = int(sums["bytes"])
        if byte_counts is None:
            is_whole_split = self._config.evaluation.eval_steps == -1
            num_bytes, why = self._text_bytes.from_manifest(source, targets, is_whole_split, why)
        return SourceScore(
            name=name,
            total_nll=sums["nats"],
            num_targets=targets,
            num_bytes=num_bytes,
            bytes_unavailable_reason=why,
            num_batches=num_batches,
            seconds=seconds,
            correct=sums.get("correct"),
            other_loss="" if is_in_nats(objective) else objective.loss_type,
            facts=_facts(source, len(batches.skipped)),
        )

    def _placed_tables(self, byte_counts: TokenByteCounts | None) -> TokenByteCounts:
        """Returns replicated tables of vocab_size; zeros if the bytes are unknown."""
        size = self._shape.vocab_size
        counts_V, has_dummy_prefix_V = np.zeros(size, np.int32), np.zeros(size, bool)
        if byte_counts is not None:
            # The model's vocabulary may be padded, or smaller than the tokenizer's.
            known = min(size, len(byte_counts.counts_V))
            counts_V[:known] = byte_counts.counts_V[:known]
            has_dummy_prefix_V[:known] = byte_counts.has_dummy_prefix_V[:known]
        whole = self._trained.layout.replicated
        return TokenByteCounts(
            jax.device_put(counts_V, whole), jax.device_put(has_dummy_prefix_V, whole)
        )

    def _step_for(self, batch: Batch, tables: TokenByteCounts) -> tuple[Any, float]:
        """Returns the step compiled for this structure, and compile seconds."""
        kind = jax.tree.structure(batch)
        if kind in self._compiled:
            return self._compiled[kind], 0.0
        began = time.perf_counter()
        step = self._step.lower(self._trained.params, batch, tables).compile()
        self._compiled[kind] = step
        return step, time.perf_counter() - began


def _add(sums: dict[str, Any], new: LossTotals | None) -> None:
    """Accumulates in double-precision floats and unbounded integers."""
    for name in sums if new is not None else ():
        value = new[name]  # type: ignore[index]
        sums[name] += float(value) if name == "nats" else int(value)


def _facts(source: OpenDataSource | None, num_bad: int) -> dict[str, Any]:
    if source is None:
        return {}
    data = source.data
    facts = {
        "tokens_of_split": len(data.store),
        "documents_of_split": len(data.store.document_offsets) - 1,
        "data_set": data.fingerprint,
        "tokenizer_sha256": data.tokenizer_sha256,
    }
    return facts | ({"records_left_out": num_bad} if num_bad else {})
