"""Measures the validation loss of a finished run in a process of its own.

The session's number comes from here and not from the run: this process loads the checkpoint,
imports the candidate for its forward pass only, gives it no targets, computes the cross entropy
itself, and checks on the trained weights and the real text that no position sees what it predicts.
"""

import dataclasses
import json
import math
import os
import signal
import subprocess
import time
from collections.abc import Collection
from pathlib import Path
from typing import Literal

import numpy as np

from MaxText.config.loading import load
from MaxText.config.problems import ConfigurationError
from MaxText.config.schema import Config, flatten, unflatten
from MaxText.errors import UserError, first_line
from MaxText.experiments.arena.guarded_process import measure_command
from MaxText.experiments.arena.isolation import Guard
from MaxText.runtime import start_up
from MaxText.storage.atomic import atomic_write_text

Half = Literal["first", "second"]

_CHECKED_BATCHES = 4  # on which leaks are looked for, spread over the text


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Loss of one run on one half of the validation text.

    Attributes:
      loss: Mean cross entropy in nats per target; NaN if it could not be measured.
      num_targets: Targets that count.
      num_bytes: Their UTF-8 bytes; None if the tokenizer does not tell.
      seconds: That the measurement took, without imports.
      reasons: Why the run does not count; empty if it does.
    """

    loss: float
    num_targets: int
    num_bytes: int | None
    seconds: float
    reasons: tuple[str, ...]

    @property
    def bits_per_byte(self) -> float | None:
        """Cross entropy in bits per UTF-8 byte of the targets; None if bytes are unknown."""
        if not self.num_bytes:
            return None
        return self.loss * self.num_targets / self.num_bytes / math.log(2)

    def to_json(self) -> str:
        """Returns the measurement as a JSON object; `loss` is null if it is not finite."""
        fields = dataclasses.asdict(self)
        fields["loss"] = self.loss if math.isfinite(self.loss) else None
        return json.dumps(fields)

    @classmethod
    def from_json(cls, text: str) -> "Measurement":
        """Returns the measurement that `to_json` wrote."""
        fields = json.loads(text)
        fields["loss"] = math.nan if fields["loss"] is None else fields["loss"]
        fields["reasons"] = tuple(fields["reasons"])
        return cls(**fields)


def measure_run(
    config_path: Path, half: Half, *, timeout: float = 600.0, trusted: Collection[str] = ()
) -> Measurement:
    """Measures a run in a subprocess; what goes wrong there is a reason of the result.

    Args:
      config_path: The configuration that the run was trained with.
      half: Of the validation text.
      timeout: Seconds after which the process and its children are killed.
      trusted: Source files of the session, such as those of its data.
    """
    result = result_path(config_path, half)
    log_path = result.with_suffix(".log")
    result.unlink(missing_ok=True)
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            measure_command(config_path, half, trusted),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        try:
            code = process.wait(timeout)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return _failed(f"its validation loss was not measured within {timeout:.0f} s")
    if not result.is_file():
        lines = log_path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return _failed(
            f"its validation loss could not be measured (exit code {code}): "
            f"{lines[-1] if lines else 'no message'}"
        )
    return Measurement.from_json(result.read_text(encoding="utf-8"))


def _failed(reason: str) -> Measurement:
    """Returns a measurement without a loss."""
    return Measurement(math.nan, 0, None, 0.0, (reason,))


def measure(config: Config, half: Half) -> Measurement:
    """Measures the newest checkpoint of a run in this process.

    Args:
      config: That the run was trained with.
      half: Of the validation text.

    Raises:
      UserError: There is no checkpoint, or the data cannot be read.
    """
    import jax

    from MaxText.evaluation.data_set import count_targets, replicated_byte_counts
    from MaxText.evaluation.text_bytes import TextBytes
    from MaxText.experiments.arena.information_leaks import find_leaks, target_losses
    from MaxText.inference.model_tokenizer import ModelTokenizer, open_tokenizer
    from MaxText.inference.trained_model import load_model, resolve_weights
    from MaxText.input_pipeline.loader import open_eval_sources, open_source_batches
    from MaxText.input_pipeline.sequences.batch_source import BatchShard
    from MaxText.layers.batch import Batch
    from MaxText.layers.params import Params
    from MaxText.parallelism import mesh

    began = time.perf_counter()
    run = config.run
    run_folder = f"{run.base_output_directory}/{run.run_name}"
    keys = {"load_parameters_path": run_folder, "eval_half": half}
    config = unflatten(flatten(config) | keys)
    weights = resolve_weights(config)
    try:
        tokenizer = open_tokenizer(config, weights.folder, weights.metadata, typed=False)
        if isinstance(tokenizer, ModelTokenizer):
            tokenizer = tokenizer.tokenizer
    except UserError as error:
        tokenizer = error  # bits per byte are unknown then
    trained = load_model(config, weights=weights)
    text_bytes = TextBytes(config.masking.mlm_training, tokenizer)
    batch_size = mesh.microbatch_size(
        config.batch, trained.sharding, config.evaluation.eval_per_device_batch_size
    )
    compiled = trained.sharding.jit(
        lambda params, batch: target_losses(trained.model, params, batch)
    )
    count = jax.jit(count_targets)

    def losses(params: Params, batch: Batch) -> np.ndarray:
        return np.asarray(compiled(params, trained.sharding.to_global_batch(batch, batch_size)))

    reasons = step_reasons(weights.folder, run.steps)
    total_nats = total_weights = 0.0
    num_targets = num_bytes = 0
    bytes_are_known = True
    for source in open_eval_sources(config) or [None]:
        byte_counts, _ = text_bytes.byte_counts(source)
        bytes_are_known = bytes_are_known and byte_counts is not None
        device_byte_counts = replicated_byte_counts(byte_counts, trained)
        batches = open_source_batches(config, source, batch_size, BatchShard())
        period = max(1, len(batches) // _CHECKED_BATCHES)
        for index, batch in enumerate(batches):
            weights_BT = np.asarray(batch.loss_mask_BT, np.float64)
            total_nats += float(np.sum(losses(trained.params, batch) * weights_BT))
            total_weights += float(weights_BT.sum())
            counts = count(batch, device_byte_counts)
            num_targets += int(counts["targets"])
            num_bytes += int(counts["bytes"])
            if index % period == 0:
                dtype = trained.model.config.numerics.dtype
                reasons += find_leaks(losses, trained.params, batch, dtype=dtype, seed=index)
    loss = total_nats / total_weights if total_weights else math.nan
    if not math.isfinite(loss):
        reasons.append(f"its validation loss is {loss}")
    return Measurement(
        loss=loss,
        num_targets=num_targets,
        num_bytes=num_bytes if bytes_are_known else None,
        seconds=time.perf_counter() - began,
        reasons=tuple(dict.fromkeys(reasons)),
    )


def step_reasons(checkpoint: str, steps: int) -> list[str]:
    """Returns a reason if a checkpoint is of a later step than the run has."""
    name = Path(checkpoint).name
    if name.isdigit() and int(name) >= steps:
        return [f"its checkpoint is of step {name}, and the session's runs have {steps} steps"]
    return []


def write(config_path: Path, half: Half, guard: Guard) -> None:
    """Measures a run in this process, and writes the result next to its configuration.

    Args:
      config_path: The configuration that the run was trained with.
      half: Of the validation text.
      guard: From before anything of the candidate is imported.
    """
    try:
        config = load([str(config_path)]).config
        start_up.choose_platform(config.run.hardware)
        measurement = measure(config, half)
    except ConfigurationError as error:
        measurement = _failed("; ".join(issue.text for issue in error.problems))
    except Exception as error:  # a candidate can raise anything
        measurement = _failed(f"{type(error).__name__}: {first_line(error)}")
    reasons = tuple(dict.fromkeys((*guard.problems(), *measurement.reasons)))
    measurement = dataclasses.replace(measurement, reasons=reasons)
    atomic_write_text(result_path(config_path, half), measurement.to_json())


def result_path(config_path: Path, half: Half) -> Path:
    """Returns the file of a measurement, next to the configuration of its run."""
    return config_path.with_name(f"{config_path.stem}.{half}.json")
