"""Kills training repeatedly; compares with an undisturbed run.

    python benchmarks/fault_injection.py --kills 200

A small run on text of its own is killed with SIGKILL at random moments: in the first second, while
it starts, in a step, in an evaluation, while a checkpoint is being written. The same command starts
it again. When it is done its last checkpoint (parameters, optimizer state, position in the data),
its metrics and its evaluations must be those of the undisturbed run, bit for bit, and each step
must have one row. Then the next run begins, until there were as many kills as asked for.

    python benchmarks/fault_injection.py --failures-per-hour 0 60 120 --steps 600

measures goodput: the share of a run's time in which it does steps that it keeps. Runs are killed at
exponentially distributed times, the same ones for the same seed, and started again at once.
"""

import argparse
import functools
import json
import math
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from MaxText.monitoring.goodput import Goodput  # noqa: E402
from MaxText.monitoring.run_record import read_run  # noqa: E402

CONFIG = """
base_config: quickstart.yml
base_output_directory: {place}/out
dataset_path: {place}/data
prepare_source: {place}/text
jax_cache_dir: {place}/cache
validation_fraction: 0.1
tokenizer_vocab_size: 300
vocab_size: 300
base_emb_dim: 32
base_num_query_heads: 2
base_num_kv_heads: 2
head_dim: 16
base_mlp_dim: 64
base_num_decoder_layers: 2
max_target_length: 64
per_device_batch_size: 4
dropout_rate: 0.1
steps: 60
step_log_period: 1
eval_interval: 8
eval_steps: 4
checkpoint_period: 5
max_to_keep: 3
healthy_after_steps: 3
sample_tokens: 0
loss_curve: false
enable_tensorboard: false
log_config: false
"""
LAST_STEP = 59
Popen = Callable[..., Any]  # as subprocess.Popen
# A run that says nothing for so long is stuck, which is a failure of its own.
_PATIENCE = 600.0
_COMPLETED = re.compile(r"completed step: (\d+),")


class InjectedFault(NamedTuple):
    """A killed process."""

    moment: str  # one of MOMENTS
    last_step: int | None  # the last one reported since the last start


class Run:
    """One process of a run, with a thread for its output."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], popen: Popen):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        environment = environment | {"PYTHONUNBUFFERED": "1"}
        self._process = popen(command, cwd=ROOT, env=environment, **pipes)
        self.lines: list[str] = []
        # completed; the last of these
        self.num_steps = 0
        self.last_step = None
        self.first_step_time: float | None = None  # monotonic seconds
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self.lines.append(line)
                completed = _COMPLETED.match(line)
                if completed:
                    if self.first_step_time is None:
                        self.first_step_time = time.monotonic()
                    self.last_step = int(completed[1])
                    self.num_steps += 1

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def wait_for(self, condition: Callable[[], bool], poll: float = 0.05) -> bool:
        """Waits for `condition`; returns False if the process ends first."""
        until = time.monotonic() + _PATIENCE
        while not condition():
            if self.has_ended:
                return False
            if time.monotonic() > until:
                self.kill()
                raise AssertionError(f"stuck:\n{self.output}")
            time.sleep(poll)
        return True

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        self.end()

    def end(self) -> int:
        """Waits for the end; the exit code."""
        with self._process:
            code = self._process.wait(_PATIENCE)
            self._reader.join()
        return code

    @property
    def output(self) -> str:
        return "".join(self.lines)


# Conditions that come true one after the other, and the longest time after them, in seconds.
Moment = tuple[Sequence[Callable[[], bool]], float]
MOMENTS = ("in a step", "in a save", "in an evaluation", "in the first second", "while starting")


def _moment(name: str, run: Run, folder: pathlib.Path, draw: random.Random) -> Moment:
    def is_writing() -> bool:
        checkpoints = folder / "checkpoints"
        return checkpoints.is_dir() and any("tmp" in name for name in os.listdir(checkpoints))

    number = draw.randrange(1, 25)
    match name:
        case "in a step":
            return [lambda: run.num_steps > number], 0.03
        case "in a save":
            saves = [is_writing, lambda: not is_writing()] * draw.randrange(1, 4)
            return [*saves, is_writing], 0.05
        case "in an evaluation":
            return [lambda: run.last_step is not None and (run.last_step + 1) % 8 == 0], 0.02
        case "while starting":
            # Lines are a clock that runs alike everywhere: about 60 before the first step.
            return [lambda: len(run.lines) >= 2 * number], 0.0
    return [], 1.0


class FaultInjection:
    """Killed runs and the undisturbed one."""

    def __init__(
        self,
        folder: pathlib.Path,
        environment: dict[str, str],
        seed: int = 0,
        popen: Popen = subprocess.Popen,
    ):
        """Writes text and configuration into a folder."""
        self._popen = popen
        self._place = folder
        self.environment = environment
        self._draw = random.Random(seed)
        (folder / "text").mkdir(parents=True)
        for number in range(12):
            source_text = " ".join(
                f"def f{i % 7}(x): return x + {i % 5}\n" for i in range(120 + number)
            )
            (folder / "text" / f"{number}.txt").write_text(source_text)
        (folder / "kills.yml").write_text(CONFIG.format(place=folder))

    def command(self, run_name: str, *arguments: str) -> list[str]:
        config = [str(self._place / "kills.yml"), f"run_name={run_name}", *arguments]
        return [sys.executable, str(ROOT / "MaxText/train.py"), *config]

    def start(self, run_name: str, *arguments: str) -> Run:
        """Starts a run, or goes on with it."""
        return Run(self.command(run_name, *arguments), self.environment, self._popen)

    def folder(self, run_name: str) -> pathlib.Path:
        return self._place / "out" / run_name

    def finish(self, run_name: str) -> pathlib.Path:
        """Runs the command until it ends by itself; returns its folder."""
        _end(self.start(run_name))
        return self.folder(run_name)

    def killed(self, kills: int, moments: Sequence[str] = MOMENTS) -> Iterator[Any]:
        """Kills runs at moments taken in turn.

        Yields:
          An InjectedFault after each kill, and the folder of each run that is done.
        """
        done = number = 0
        while done < kills:
            name = f"killed_{number}"
            number = number + 1
            run = self.start(name)
            while done < kills and self._reaches(moments[done % len(moments)], run, name):
                run.kill()
                yield InjectedFault(moments[done % len(moments)], run.last_step)
                done += 1
                run = self.start(name)
            _end(run)
            yield self.folder(name)

    def _reaches(self, moment: str, run: Run, name: str) -> bool:
        """Waits for a moment; returns False if the run is over before."""
        conditions, longest = _moment(moment, run, self.folder(name), self._draw)
        if not all(run.wait_for(condition, poll=0.001) for condition in conditions):
            return False
        time.sleep(self._draw.uniform(0, longest))
        return not run.has_ended


def _end(run: Run) -> None:
    code = run.end()
    assert code == 0, f"exit code {code}:\n{run.output}"


def arrays_of(folder: pathlib.Path, step: int) -> dict[str, Any]:
    """Every array of a checkpoint, by name."""
    import jax
    import numpy as np
    import orbax.checkpoint.experimental.v1 as ocp

    checkpoint = str(folder / "checkpoints" / str(step))
    described = ocp.metadata(checkpoint, checkpointable_name="items").metadata
    # Onto the host: the devices that wrote it may be those of several processes.
    abstract = jax.tree.map(lambda _: np.ndarray, described)
    tree = ocp.load(checkpoint, abstract, checkpointable_name="items")
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def _rows(folder: pathlib.Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def numbers_of(folder: pathlib.Path) -> dict[str, Any]:
    """Metric rows and evaluations of a run, without times."""
    metrics = [
        {name: value for name, value in row.items() if name.split("/")[0] in ("step", "learning")}
        for row in _rows(folder, "metrics.jsonl")
    ]
    evaluations = [
        {"step": row["step"], "loss": row["eval/avg_loss"], "weights": row["eval/total_weights"]}
        for row in _rows(folder, "events.jsonl")
        if row["event"] == "evaluation"
    ]
    return {"metrics": metrics, "evaluations": evaluations}


def contents_of(run: pathlib.Path) -> dict[str, bytes]:
    """Contents of all arrays at the end of a run."""
    return {name: array.tobytes() for name, array in arrays_of(run, LAST_STEP).items()}


def differences(folder: pathlib.Path, expected: pathlib.Path) -> list[str]:
    """Differences between two runs' ends; none if bitwise equal."""
    changes = []
    arrays = contents_of(folder)
    expected_arrays = contents_of(expected)
    for name in arrays | expected_arrays:
        if arrays.get(name) != expected_arrays.get(name):
            changes.append(f"array {name}")
    position = f"checkpoints/{LAST_STEP}/iter/metadata"
    if json.loads((folder / position).read_text()) != json.loads((expected / position).read_text()):
        changes.append("position in the data")
    mine = numbers_of(folder)
    other = numbers_of(expected)
    if [row["step"] for row in mine["metrics"]] != list(range(LAST_STEP + 1)):
        changes.append(f"steps of the metric rows: {[row['step'] for row in mine['metrics']]}")
    changes += [name for name in mine if mine[name] != other[name]]
    return changes


class GoodputMeasurement(NamedTuple):
    """A run that was killed at random times, of `failures_per_hour` on average."""

    failures_per_hour: float
    num_failures: int
    goodput: Goodput

    @property
    def wall_seconds(self) -> float:
        """From the first start to the end."""
        return self.goodput.running_seconds + self.goodput.down_seconds

    @property
    def start_seconds(self) -> float:
        """Of all starts together, up to the first step of each."""
        seconds = self.goodput.seconds
        return seconds["startup"] + seconds["compile"] + self.goodput.down_seconds


def measure_goodput(
    injection: FaultInjection, rate: float, steps: int, seed: int
) -> GoodputMeasurement:
    """Runs to the end under failures that are independent of what the run does.

    Args:
      injection: Starts the runs.
      rate: Failures per hour.
      steps: Steps of the run, of which each 50th is saved.
      seed: Of the times of the failures.
    """
    draw = random.Random(seed)
    # At a low learning rate: hundreds of steps on such a text are unstable otherwise.
    keys = ("checkpoint_period=50", "eval_interval=-1", "learning_rate=1e-3")
    arguments = (f"steps={steps}", *keys)
    name = f"goodput_{rate:g}"
    next_failure = time.monotonic()
    num_failures = 0
    while True:
        run = injection.start(name, *arguments)
        next_failure += draw.expovariate(rate / 3600) if rate else math.inf
        if not run.wait_for(functools.partial(_is_past, next_failure)):
            _end(run)
            history = read_run(injection.folder(name))
            return GoodputMeasurement(rate, num_failures, history.goodput)
        run.kill()
        num_failures += 1


def _is_past(moment: float) -> bool:
    return time.monotonic() >= moment


def goodput_table(measurements: Sequence[GoodputMeasurement]) -> str:
    """Returns the shares of each run's time as a table in Markdown, and what a failure cost."""
    lines = [
        "| failures per hour | failures | minutes | goodput | starts | repeated steps | other |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for each in measurements:
        useful, lost = (each.goodput.seconds[part] for part in ("useful", "lost"))
        shares = [
            seconds / each.wall_seconds
            for seconds in (
                useful,
                each.start_seconds,
                lost,
                each.wall_seconds - useful - each.start_seconds - lost,
            )
        ]
        lines.append(
            f"| {each.failures_per_hour:g} | {each.num_failures} | {each.wall_seconds / 60:.1f} | "
            f"{' | '.join(f'{share:.2f}' for share in shares)} |"
        )
    num_failures = sum(each.num_failures for each in measurements)
    if num_failures:
        starts = sum(each.start_seconds for each in measurements)
        restart = starts / (num_failures + len(measurements))
        repeated = sum(each.goodput.seconds["lost"] for each in measurements) / num_failures
        lines += [
            "",
            f"A failure cost {restart:.1f} s of restart and {repeated:.1f} s of repeated steps on "
            f"average of {num_failures}.",
        ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    rates_help = "measures goodput instead; 0 is added"
    parser.add_argument("--failures-per-hour", type=float, nargs="+", help=rates_help)
    parser.add_argument("--steps", type=int, default=600, help="of a run whose goodput is measured")
    options = parser.parse_args()
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        environment = dict(os.environ) | {"JAX_PLATFORMS": "cpu"}
        attack = FaultInjection(pathlib.Path(folder), environment, options.seed)
        if options.failures_per_hour:
            rates = sorted({0.0, *options.failures_per_hour})
            # Data and compiled steps, which later starts find.
            _end(attack.start("prepared", "steps=10"))
            measured = []
            for rate in rates:
                measured.append(measure_goodput(attack, rate, options.steps, options.seed))
                print(goodput_table(measured), flush=True)
            return 0
        expected = attack.finish("undisturbed")
        for event in attack.killed(options.kills):
            if isinstance(event, InjectedFault):
                print(f"{event.moment}, after step {event.last_step}", flush=True)
                continue
            changes = differences(event, expected)
            wrong += bool(changes)
            print(f"{event.name}: {'; '.join(changes) or 'the same bit for bit'}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
