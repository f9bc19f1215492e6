"""Runs of an arena session: their configuration, their process, and what is recorded of them."""

import dataclasses
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from MaxText import exit_codes
from MaxText.config.serialization import entry_lines
from MaxText.errors import UserError
from MaxText.experiments import execution
from MaxText.experiments.arena import examination
from MaxText.experiments.arena.guarded_process import REFUSED, train_command
from MaxText.experiments.arena.ledger import (
    BASELINE,
    CandidateRow,
    TrialRow,
    TrialState,
)
from MaxText.experiments.arena.measurement import measure_run
from MaxText.experiments.arena.session import Session
from MaxText.experiments.execution import SHORT_RUN_KEYS, start_training, tail, terminate
from MaxText.experiments.solver import steps_changes
from MaxText.monitoring.run_record import RunHistory, read_run
from MaxText.runtime.start_up import FAST_COMPILATION
from MaxText.storage.atomic import atomic_write_text

NUM_EVALUATIONS = 4  # of a run, after equal shares of its steps
_MAX_RESTARTS = 2  # of a run that the machine, not the candidate, has ended
_STORAGE_FAILED = "error: storage failed"
# Keys of every run of a session, whatever its configuration says.
_KEYS = {
    "eval_half": "first",
    "enable_checkpointing": True,
    "save_checkpoint_on_start": False,
    "save_checkpoint_on_completion": True,
    "max_to_keep": 1,
    "metrics_file": "",
    "enable_tensorboard": False,
    "enable_wandb": False,
    "enable_trackio": False,
    "enable_mlflow": False,
    "loss_curve": False,
    "log_config": False,
    "sample_tokens": 0,
    "profiler": "",
}


@dataclasses.dataclass(frozen=True)
class ArenaTrial:
    """One run of a session.

    Attributes:
      owner: Name of a candidate, or BASELINE.
      seed: Of the order of the data and of the initial weights.
      steps: Of the run.
      source: Resolved configuration of its owner.
      folder: Run folder; the configuration lies next to it.
    """

    owner: str
    seed: int
    steps: int
    source: Path
    folder: Path

    @property
    def config_path(self) -> Path:
        """The complete configuration of the run."""
        return self.folder.with_name(f"{self.folder.name}.yml")

    @property
    def log(self) -> Path:
        """Output of the run."""
        return self.folder / "train.log"

    @property
    def name(self) -> str:
        """Owner and seed, as logged."""
        return f"{self.owner} seed {self.seed}"


def make_trial(session: Session, owner: str, steps: int, seed: int) -> ArenaTrial:
    """Returns a run of a candidate, or of the baseline."""
    folder = session.runs_folder(owner)
    source = session.baseline_path if owner == BASELINE else folder / examination.CONFIG
    return ArenaTrial(owner, seed, steps, source, folder / f"seed_{seed}")


def write_trial_config(trial: ArenaTrial, overrides: Mapping[str, Any] = {}) -> None:
    """Writes the complete configuration of a run.

    Args:
      trial: The run.
      overrides: Keys that differ, of a run that only measures time.
    """
    # Plain YAML: this process does not know the keys of a candidate's parts.
    keys = yaml.safe_load(trial.source.read_text(encoding="utf-8"))
    keys |= steps_changes(keys, trial.steps) | _KEYS
    keys |= {
        "run_name": trial.folder.name,
        "base_output_directory": str(trial.folder.parent.absolute()),
        "data_shuffle_seed": trial.seed,
        "init_weights_seed": trial.seed,
        "eval_interval": -(-trial.steps // NUM_EVALUATIONS),
    }
    keys |= overrides
    lines = [line for name, value in keys.items() for line in entry_lines(name, value)]
    trial.folder.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_text(trial.config_path, "\n".join(lines) + "\n")


class TrialProcess:
    """A run at work."""

    def __init__(
        self,
        trial: ArenaTrial,
        *,
        trusted: Sequence[str],
        time_limit: float | None,
        environment: Mapping[str, str] | None = None,
    ):
        """Starts a run, or resumes it from its checkpoint.

        Args:
          trial: The run.
          trusted: Modules of the baseline.
          time_limit: Seconds after which it is killed; None for never.
          environment: Of the process; by default this one's without variables that set keys.
        """
        self.trial = trial
        self._trusted = trusted
        self._time_limit = time_limit
        self._environment = environment
        self._restarts = 0
        write_trial_config(trial)
        self._start()

    def _start(self) -> None:
        trial = self.trial
        self._began = time.monotonic()
        self._log_begin = trial.log.stat().st_size if trial.log.exists() else 0
        command = train_command(trial.config_path, self._trusted)
        self._process = start_training(command, trial.log, self._environment)
        atomic_write_text(_process_file(trial), str(self._process.pid))

    def poll(self) -> TrialRow | None:
        """Returns the result of the run; None while it is at work.

        Raises:
          UserError: The storage failed, so that no run can go on.
        """
        code = self._process.poll()
        if code is None:
            if self._time_limit is None or time.monotonic() - self._began < self._time_limit:
                return None
            self._kill()
            return self._row("failed", (f"it hangs: no end within {self._time_limit:,.0f} s",))
        if code in exit_codes.RESTARTABLE and self._restarts < _MAX_RESTARTS:
            self._restarts += 1
            self._start()
            return None
        return self._ended(code)

    def stop(self, reason: str) -> TrialRow:
        """Ends a clear loser; returns its result."""
        self._kill()
        return self._row("stopped", (reason,))

    def interrupt(self) -> None:
        """Lets the run save its state and end."""
        terminate(self._process)
        _process_file(self.trial).unlink(missing_ok=True)

    def evaluations(self) -> tuple[float, ...]:
        """Returns the validation losses so far."""
        record = _load_record(self.trial)
        return () if record is None else evaluation_losses(record)

    def _kill(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        _process_file(self.trial).unlink(missing_ok=True)

    def _ended(self, code: int) -> TrialRow:
        trial = self.trial
        _process_file(trial).unlink(missing_ok=True)
        with trial.log.open("rb") as log:
            log.seek(self._log_begin)
            output = log.read().decode(errors="replace")
        refusals = [
            line.removeprefix(REFUSED) for line in output.splitlines() if line.startswith(REFUSED)
        ]
        if refusals:
            return self._row("refused", tuple(dict.fromkeys(refusals)))
        if _STORAGE_FAILED in output:
            raise UserError(f"{trial.name}: {_last_line(output)}")
        record = _load_record(trial)
        if record is not None and record.state == "diverged":
            return self._row("diverged", (f"it diverged at step {record.last_step}",))
        if code or record is None or record.state != "completed":
            reason = f"train.py exited with code {code}: {_last_line(output)}"
            return self._row("failed", (reason,))
        measurement = measure_run(trial.config_path, "first", trusted=self._trusted)
        if measurement.reasons:
            return self._row("refused", measurement.reasons)
        bytes_per_token = None
        if measurement.num_bytes:
            bytes_per_token = measurement.num_bytes / measurement.num_targets
        row = self._row("completed", ())
        return dataclasses.replace(row, loss=measurement.loss, bytes_per_token=bytes_per_token)

    def _row(self, state: TrialState, reasons: tuple[str, ...]) -> TrialRow:
        record = _load_record(self.trial)
        facts: dict[str, Any] = {}
        if record is not None:
            facts = {
                "evaluations": evaluation_losses(record),
                "train_seconds": sum(row.get("seconds") or 0.0 for row in record.steps),
                "tokens": record.tokens,
                "flops": record.flops,
            }
        return TrialRow(
            owner=self.trial.owner,
            seed=self.trial.seed,
            state=state,
            reasons=reasons,
            duration=round(time.monotonic() - self._began, 1),
            **facts,
        )


def evaluation_losses(record: RunHistory) -> tuple[float, ...]:
    """Returns the validation losses during training, in order."""
    losses = (row.get("eval/avg_loss") for row in record.evaluations)
    return tuple(loss for loss in losses if loss is not None)


def end_orphan(trial: ArenaTrial) -> None:
    """Kills the process of a run that has outlived a killed session."""
    path = _process_file(trial)
    if not path.exists():
        return
    pid = int(path.read_text(encoding="utf-8") or 0)
    command = Path(f"/proc/{pid}/cmdline")
    # The number may be another program's by now.
    if pid and command.exists() and str(trial.config_path.absolute()) in _text(command):
        os.killpg(pid, signal.SIGKILL)
        while command.exists() and _text(command):
            time.sleep(0.05)
    path.unlink(missing_ok=True)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def examine(session: Session, folder: Path, spec: str | None, *, time_limit: float) -> CandidateRow:
    """Examines a candidate, or the baseline, in a process of its own.

    Args:
      session: Of the candidate.
      folder: Gets the result.
      spec: Of the candidate; None for the baseline.
      time_limit: Seconds after which the candidate is refused.

    Returns:
      Its row; what went wrong is a reason in it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / examination.RESULT).unlink(missing_ok=True)
    log = folder / "examination.log"
    command = [sys.executable, "-m", "MaxText.experiments.arena.examination"]
    command += [str(session.folder), str(folder), *([] if spec is None else [spec])]
    process = start_training(command, log, _examination_environment())
    code = _wait(process, time_limit)
    reason = ""
    if code is None:
        reason = f"its examination did not end within {time_limit:,.0f} s"
    elif code:
        reason = f"its examination ended with code {code}: {tail(log, 1).strip(' |')}"
    row = None if reason else examination.load_examination(folder)
    if row is None:
        reason = reason or "its examination left no result"
        return CandidateRow(name=folder.name, spec=spec or "", reasons=(reason,))
    return row


def _wait(process: subprocess.Popen[bytes], time_limit: float) -> int | None:
    """Returns the exit code of a process; None if it was killed after `time_limit` seconds."""
    try:
        return process.wait(time_limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None
    except BaseException:
        terminate(process)
        raise


def _examination_environment() -> dict[str, str]:
    """Returns the environment of an examination: the CPU, and programs that compile fast."""
    environment = execution.subprocess_env()
    paths = [str(execution.REPOSITORY), environment.get("PYTHONPATH", "")]
    return environment | {
        "XLA_FLAGS": f"{environment.get('XLA_FLAGS', '')} {FAST_COMPILATION}".strip(),
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }


def measure_seconds(
    session: Session,
    row: CandidateRow,
    *,
    number: int,
    trusted: Sequence[str],
    time_limit: float,
) -> float:
    """Returns the median seconds of a training step, of a short run of its own.

    Args:
      session: Of the run.
      row: Of the candidate or the baseline.
      number: Of the measurement, which names its folder.
      trusted: Modules of the baseline.
      time_limit: Seconds after which it is killed.

    Raises:
      UserError: The run fails; the message is a reason to discard the candidate.
    """
    trial = make_trial(session, row.name, SHORT_RUN_KEYS["steps"], seed=0)
    folder = trial.folder.with_name(f"timing_{number}")
    trial = dataclasses.replace(trial, folder=folder)
    write_trial_config(trial, SHORT_RUN_KEYS)
    process = start_training(train_command(trial.config_path, trusted), trial.log)
    code = _wait(process, time_limit)
    if code is None:
        raise UserError(f"its steps hang: no end within {time_limit:,.0f} s")
    if code:
        raise UserError(f"its timing run exited with code {code}: {tail(trial.log, 1).strip(' |')}")
    seconds = statistics.median(execution.read_step_seconds(folder, row.name))
    shutil.rmtree(folder)  # so that reports show whole runs only
    return seconds


def _process_file(trial: ArenaTrial) -> Path:
    return trial.folder.with_name(f"{trial.folder.name}.pid")


def _load_record(trial: ArenaTrial) -> RunHistory | None:
    """Returns the record of a run; None before its first row."""
    try:
        return read_run(trial.folder)
    except UserError:
        return None


def _last_line(output: str) -> str:
    lines = output.strip().splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or ["no message"])[-1]
