"""What a finished run writes and prints: a sample, the loss curve, the next commands."""

import contextlib
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
from etils import epath

from MaxText.config import command_line
from MaxText.config.registry import lookup
from MaxText.config.schema import Config
from MaxText.errors import TrainingDivergedError
from MaxText.layers.assembly.model import Model
from MaxText.layers.params import Params
from MaxText.parallelism.mesh import ShardingPlan
from MaxText.run.records import RunLogger


@contextlib.contextmanager
def optional_output(name: str, log: Callable[[str], None]) -> Iterator[None]:
    """Logs a failure of an optional output as a warning."""
    try:
        yield
    except Exception as error:
        log(f"WARNING: cannot write the {name}: {error}")


def write_sample(
    model: Model,
    params: Params,
    *,
    config: Config,
    sharding: ShardingPlan,
    tokenizer: Path | None,
    run_folder: epath.Path,
    run_logger: RunLogger,
) -> None:
    """Generates text with the final parameters, if the configuration asks for it.

    Args:
      model: The trained model.
      params: Its parameters on the devices; they stay valid.
      config: Its `decoding` section says how to sample.
      sharding: That of the parameters.
      tokenizer: Folder of the tokenizer; nothing is written without one.
      run_folder: Gets sample.txt.
      run_logger: Gets the text as an event.
    """
    if not config.decoding.sample_tokens or tokenizer is None:
        return
    log = run_logger.terminal.line
    with optional_output("sample", log):
        from MaxText.inference import decoding

        text = decoding.write_sample(
            model,
            params,
            sharding,
            config,
            tokenizer_folder=tokenizer,
            run_folder=run_folder,
        )
        # Its time is part of the shutdown, which the stop row records.
        run_logger.events.emit("sample", step=run_logger.stats.num_steps - 1, text=text)
        log(f"Sample, also in {run_folder / 'sample.txt'}:\n{text}")


def log_validation_loss(
    loss: float | None, unigram_entropy: float | None, log: Callable[[str], None]
) -> None:
    """Logs the last validation loss next to the unigram entropy of the data.

    Args:
      loss: In nats per token; None without an evaluation.
      unigram_entropy: In nats per token: the loss of a model that knows nothing but how often each
        token occurs. None if unknown, or if the objective is not in nats.
      log: Gets the line.
    """
    if loss is not None and unigram_entropy is not None:
        log(f"Validation loss {loss:.3f}, unigram entropy {unigram_entropy:.3f} nats")


def write_loss_curve(config: Config, run_folder: epath.Path, run_logger: RunLogger) -> None:
    """Draws the losses of the run to a file, on process 0, if `loss_curve` is set."""
    if not config.monitoring.loss_curve or jax.process_index() != 0:
        return
    log = run_logger.terminal.line
    with optional_output("loss curve", log):
        from MaxText.reports import report_writer

        run_logger.events.flush()  # the curve is drawn from events.jsonl
        log(f"Loss curve: {report_writer.write_loss_curve(run_folder)}")


def log_next_commands(
    model: Model,
    *,
    config: Config,
    run_folder: epath.Path,
    checkpoint: epath.Path | None,
    has_tokenizer: bool,
    log: Callable[[str], None],
) -> None:
    """Logs the newest checkpoint and the commands that use the run.

    Args:
      model: Decides whether decode.py can generate text with it.
      config: Its `import_modules` become arguments.
      run_folder: The folder of the run.
      checkpoint: Path of the newest checkpoint; None if there is none.
      has_tokenizer: Whether the run has a tokenizer, without which no text can be generated.
      log: Gets each line.
    """
    folder = shlex.quote(str(run_folder))
    if checkpoint is not None:
        log(f"Checkpoint:  {checkpoint}")
    if checkpoint is not None and has_tokenizer and _can_decode(model):
        command = f"{command_line.program_command('decode')} load_parameters_path={folder}"
        modules = [shlex.quote(module) for module in config.run.import_modules]
        if modules:
            command += f" import_modules=[{','.join(modules)}]"
        log(f"Generate:    {command} prompt='The '")
    log(f"Report:      {command_line.program_command('report')} {folder}")


def _can_decode(model: Model) -> bool:
    mixers = set(model.config.mixers)
    return model.config.attention.causal and all(lookup("mixer", name).decodes() for name in mixers)


def raise_if_diverged(problem: str, divergence: str) -> None:
    """Ends a run that learned nothing of use with an error.

    Args:
      problem: What is wrong with the final state, of `Loop.judge_final_state`; "" if nothing.
      divergence: How the training loss diverged, of `LossTrend.diverged`; "" if it did not.

    Raises:
      TrainingDivergedError: If either is not empty.
    """
    if problem:
        raise TrainingDivergedError(f"{problem}. Lower learning_rate, or inspect the data.")
    if divergence:
        raise TrainingDivergedError(
            f"{divergence}: the run diverged. Its checkpoints are kept. Lower learning_rate, or "
            "inspect the data."
        )
