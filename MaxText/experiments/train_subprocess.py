"""Runs train.py in subprocesses, also to measure its steps."""

import contextlib
import os
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from filelock import FileLock, Timeout

from MaxText.config.config_files import REPOSITORY
from MaxText.config.maxtext_keys import ALIASES
from MaxText.config.registry import registrations
from MaxText.config.schema import Config, all_keys, flatten, unflatten
from MaxText.config.serialization import resolved_yaml
from MaxText.errors import UserError
from MaxText.experiments.comparison_plan import Plan, Trial, run_config
from MaxText.experiments.variants import Variant
from MaxText.metrics.run_record import read_run
from MaxText.program_start import handled

TRAIN = REPOSITORY / "MaxText" / "train.py"
_LOCK = ".running"
_PATIENCE_SECONDS = 60.0  # for an interrupted run to exit
_ROUNDS = 2  # configurations alternate, so that a slow phase of the machine does not hit only one
_STEPS = 24
_WARMUP_STEPS = 4  # warm-up steps of a process
_FOLDER = "measuring"  # of the short runs, deleted afterwards
_UNSTEADY = 0.1  # relative difference between rounds that is reported

_COUNT_DEVICES = """
import sys
from MaxText.runtime import start_up
start_up.choose_platform(sys.argv[1])
print("devices", len(start_up.find_devices(sys.argv[1])))
"""


def key_variables(environment: Mapping[str, str]) -> list[str]:
    """Returns environment variables overriding a run's keys."""
    names = {f"M_{name.upper()}" for name in (*all_keys(), *ALIASES)}
    return sorted(names.intersection(environment))


def subprocess_env() -> dict[str, str]:
    """Returns the environment without key variables: keys are resolved."""
    excluded = key_variables(os.environ)
    return {name: value for name, value in os.environ.items() if name not in excluded}


def train_command(config: Path) -> list[str]:
    # A relative path with "=" (labels contain it) would parse as key=value.
    is_like_key = "=" in str(config) and not config.is_absolute()
    return [sys.executable, str(TRAIN), f"./{config}" if is_like_key else str(config)]


def count_devices(hardware: str) -> int:
    """Returns the device count of this machine; raises UserError if none."""
    command = [sys.executable, "-c", _COUNT_DEVICES, hardware]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=subprocess_env(), capture_output=True, text=True, check=False
    )
    words = done.stdout.split()
    if done.returncode or words[:1] != ["devices"]:
        error = (done.stderr.strip().splitlines() or ["no message"])[-1]
        error = error.removeprefix("MaxText.errors.UserError: ")
        raise UserError(f"cannot count the devices of this machine: {error}")
    return int(words[1])


def tail(log: Path, count: int = 12) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    return "\n".join(f"  | {line}" for line in lines[-count:]) or "  | (nothing)"


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Locks a comparison's folder; UserError if taken or not writable.

    A run that outlives a killed command holds the lock of its own run folder.
    """
    lock = FileLock(folder / _LOCK, timeout=0)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise UserError(
            f"{folder} is locked by another compare.py process. Wait for it, stop it, or set "
            "output= to another folder."
        ) from None
    except OSError as error:
        raise UserError(
            f"cannot write to the folder {folder}: {error}. Set output= to another folder."
        ) from error
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def signals_as_exceptions() -> Iterator[None]:
    """Raises SystemExit on SIGTERM and SIGHUP, so no run outlives the program."""

    def stop(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    with handled((signal.SIGTERM, signal.SIGHUP), stop):
        yield


def train(run: Trial) -> int:
    """Runs train.py to its end; returns the exit code, negative for a signal.

    On KeyboardInterrupt and other exceptions, the run is interrupted and awaited before the
    exception propagates.
    """
    write_config(run)
    run.folder.mkdir(exist_ok=True)
    with run.log.open("ab") as log:
        process = subprocess.Popen(
            train_command(run.config_path),
            env=subprocess_env(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # In its own process group, Ctrl-C reaches it exactly once, through us.
            process_group=0,
        )
        try:
            return process.wait()
        except BaseException:
            _terminate(process)
            raise


def write_config(run: Trial) -> None:
    """Writes the run's configuration next to its folder."""
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    # Keys of a module that only other configurations import are unknown to this run.
    others = [one.keys.model_fields for one in registrations() if one.keys and not one.is_built_in]
    values, known = flatten(run.config), all_keys()
    omitted = {n for fields in others for n in fields if values[n] == known[n].default}
    run.config_path.write_text(resolved_yaml(run.config, omitted=omitted), encoding="utf-8")


def _terminate(process: subprocess.Popen) -> None:
    """Interrupts a run and waits; kills it on a second Ctrl-C or timeout."""
    # Shells ignore SIGINT in a script's background jobs, and the run inherits that.
    is_deaf = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM if is_deaf else signal.SIGINT)
    try:
        process.wait(_PATIENCE_SECONDS)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def time_steps(plan: Plan, variants: Sequence[Variant], log: Callable[[str], None]) -> None:
    """Adds missing measurements to the plan and saves it after each."""
    stages = {name: config for one in variants for name, config in one.named_stages}
    for name, config in stages.items():
        batch = config.batch
        if batch.enable_rampup_batch_size or batch.sequence_length_stages:
            raise UserError(
                f"{name}: match=time needs a constant batch shape, but batches change during the "
                "run (enable_rampup_batch_size, sequence_length_stages). Use match=flops or "
                "match=tokens."
            )
    for index in range(_ROUNDS):
        for name, config in stages.items():
            rounds = plan.measurements.setdefault(name, [])
            if len(rounds) > index:
                continue
            folder = plan.folder / _FOLDER / f"{name}_{index}"
            log(f"measuring {name}, round {index + 1} of {_ROUNDS}: {_STEPS} steps")
            rounds.append(_step_seconds(name, config, folder))
            plan.save()
    shutil.rmtree(plan.folder / _FOLDER, ignore_errors=True)
    for name, rounds in plan.measurements.items():
        medians = [statistics.median(seconds) for seconds in rounds]
        line = f"  {name}: {seconds_per_step(rounds):.4g} s per step"
        if max(medians) > min(medians) * (1 + _UNSTEADY):
            seconds = " and ".join(f"{median:.4g}" for median in medians)
            line += f", but rounds took {seconds} s: other programs may use this machine"
        log(line)


def seconds_per_step(rounds: Sequence[Sequence[float]]) -> float:
    return statistics.median(seconds for one in rounds for seconds in one)


def short_config(config: Config, folder: Path) -> Config:
    """Returns the configuration of a short run with training only."""
    keys = flatten(run_config(config, {}, folder, seed=0))
    # Initial weights do not affect the step time, and may not exist yet.
    beginning = {
        name: key.default
        for name, key in all_keys().items()
        if name.startswith(("load_parameters_", "growth_"))
    }
    return unflatten(
        keys
        | beginning
        | {
            "steps": _STEPS,
            "step_log_period": 1,
            "eval_interval": -1,
            "target_eval_loss": 0.0,
            "enable_checkpointing": False,
            "enable_tensorboard": False,
            "loss_curve": False,
            "sample_tokens": 0,
            "profiler": "",
        }
    )


def _step_seconds(name: str, config: Config, folder: Path) -> list[float]:
    shutil.rmtree(folder, ignore_errors=True)
    run = Trial(name, 0, short_config(config, folder), folder, 0.0)
    code = train(run)
    if code:
        raise UserError(
            f"{name}: the timing run exited with code {code}. Last lines of {run.log}:\n"
            f"{tail(run.log)}"
        )
    rows = [row for row in read_run(folder).steps if row["step"] >= _WARMUP_STEPS]
    if not rows:
        raise UserError(
            f"{name}: the data end within {_WARMUP_STEPS} steps, too few to time one. Set "
            "num_epoch=-1."
        )
    return [row["seconds"] / row["updates"] for row in rows]
