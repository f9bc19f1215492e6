"""Measures seconds per training step with short runs of train.py."""

import shutil
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from MaxText.config.catalog import all_keys, unflatten
from MaxText.config.schema import Config
from MaxText.config.serialization import flatten
from MaxText.errors import UserError
from MaxText.experiments.comparison_plan import Plan, Trial, run_config
from MaxText.experiments.train_subprocess import tail, train
from MaxText.experiments.variants import Variant
from MaxText.metrics.run_record import read_run

_ROUNDS = 2  # configurations alternate, so that a slow phase of the machine does not hit only one
_STEPS = 24
_WARMUP_STEPS = 4  # warm-up steps of a process
_FOLDER = "measuring"  # of the short runs, deleted afterwards
_UNSTEADY = 0.1  # relative difference between rounds that is reported


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
    """Returns the median over all rounds."""
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
