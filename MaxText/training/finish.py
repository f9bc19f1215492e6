"""What a run leaves in its folder when it is done, beside its records and checkpoints."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
from etils import epath

from MaxText.configuration.schema import Config
from MaxText.input_pipeline.batch_iterators import BatchIterator
from MaxText.layers.model import Model
from MaxText.monitoring.records import Records
from MaxText.parallelism.mesh import Layout


def leave_results(
    run_folder: epath.Path,
    config: Config,
    records: Records,
    batches: BatchIterator,
    model: Model,
    params: Any,
    layout: Layout,
    eval_loss: float | None,
) -> None:
    """The validation loss beside what counting would give, a sample, the loss curve.

    Args:
      batches: whose tokenizer and unigram entropy are used, where there are any.
      eval_loss: of the last evaluation, nats per token; None without one.
    """
    line = records.terminal.line
    entropy = batches.unigram_entropy if model.section.objective.is_in_nats else None
    if eval_loss is not None and entropy is not None:
        line(f"Validation loss {eval_loss:.3f}, unigram entropy {entropy:.3f} nats")
    tokenizer = batches.tokenizer_folder
    if config.decoding.sample_tokens and tokenizer is not None:
        with _optional("sample", line):
            from MaxText.generation.sampling import write_sample

            text = write_sample(model, params, layout, config, tokenizer, run_folder)
            # Its time is part of the finish, which the last row tells.
            records.events.emit("sample", step=records.quantities.num_updates - 1, text=text)
            line(f"Sample, also in {run_folder / 'sample.txt'}:\n{text}")
    if config.monitoring.loss_curve and jax.process_index() == 0:
        with _optional("loss curve", line):
            from MaxText.monitoring.loss_curve import draw_loss_curve

            records.events.flush()
            line(f"Loss curve: {draw_loss_curve(run_folder)}")


@contextlib.contextmanager
def _optional(what: str, line: Callable[[str], None]) -> Iterator[None]:
    """Turns a failure of an optional output into a warning: the run itself is complete."""
    try:
        yield
    except Exception as error:
        line(f"!!! WARNING: the {what} could not be made: {error}")
