"""Final outputs of a run: loss, sample, loss curve, next commands."""

import contextlib
import shlex
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from etils import epath

from MaxText.checkpointing import checkpoint_files
from MaxText.config import command_line
from MaxText.config.registry import lookup
from MaxText.config.schema import Config
from MaxText.errors import TrainingDivergedError
from MaxText.input_pipeline.iterator import TrainIterator
from MaxText.parallelism.mesh import ShardingPlan
from MaxText.run.records import RunLogger
from MaxText.training.assembly import TrainSetup
from MaxText.training.objective import is_in_nats


def write_final_artifacts(
    run_folder: epath.Path,
    config: Config,
    run_logger: RunLogger,
    batches: TrainIterator,
    setup: TrainSetup,
    state: Any,
    sharding: ShardingPlan,
    eval_loss: float | None,
) -> None:
    """Prints and writes the final outputs of a run.

    `eval_loss` is that of the last evaluation in nats per token, None without one. Raises
    TrainingDivergedError if the training loss diverged.
    """
    line, model = run_logger.terminal.line, setup.model
    entropy = batches.unigram_entropy_nats if is_in_nats(model.config.objective) else None
    if eval_loss is not None and entropy is not None:
        line(f"Validation loss {eval_loss:.3f}, unigram entropy {entropy:.3f} nats")
    tokenizer = batches.tokenizer_folder
    if config.decoding.sample_tokens and tokenizer is not None:
        with _optional("sample", line):
            from MaxText.inference.decoding import write_sample

            text = write_sample(model, state.params, sharding, config, tokenizer, run_folder)
            # Its time is part of the finish, which the stop row records.
            run_logger.events.emit("sample", step=run_logger.stats.num_steps - 1, text=text)
            line(f"Sample, also in {run_folder / 'sample.txt'}:\n{text}")
    if config.monitoring.loss_curve and jax.process_index() == 0:
        with _optional("loss curve", line):
            from MaxText.reports.report_writer import write_loss_curve

            run_logger.events.flush()
            line(f"Loss curve: {write_loss_curve(run_folder)}")
    can_generate = (
        tokenizer is not None
        and model.config.attention.causal
        and all(lookup("mixer", name).decodes() for name in set(model.config.mixers))
    )
    for text in _next_steps(run_folder, can_generate, config.run.import_modules):
        line(text)
    if diverged := run_logger.trend.diverged:
        raise TrainingDivergedError(
            f"{diverged}: the run diverged. Its checkpoints are kept. Lower learning_rate, or "
            "inspect the data."
        )


def _next_steps(
    run_folder: epath.Path, can_generate: bool, modules: Sequence[str] = ()
) -> list[str]:
    """Returns the checkpoint's path and likely next commands, as log lines."""
    folder = shlex.quote(str(run_folder))
    report = f"Report:      {command_line.program_command('report')} {folder}"
    folder_of_steps = run_folder / checkpoint_files.CHECKPOINTS
    if not (steps := checkpoint_files.finalized_steps(folder_of_steps)):
        return [report]
    lines = [f"Checkpoint:  {folder_of_steps / str(steps[-1])}"]
    if can_generate:
        words = f"{command_line.program_command('decode')} load_parameters_path={folder}"
        if modules:
            words += f" import_modules=[{','.join(map(shlex.quote, modules))}]"
        lines.append(f"Generate:    {words} prompt='The '")
    return [*lines, report]


@contextlib.contextmanager
def _optional(what: str, line: Callable[[str], None]) -> Iterator[None]:
    """Logs a failure of an optional output as a warning."""
    try:
        yield
    except Exception as error:
        line(f"WARNING: cannot write the {what}: {error}")
