"""Speed-up in time on hardware that is not there, and the error of such an estimate here."""

import dataclasses
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from MaxText.config.serialization import resolved_yaml
from MaxText.errors import UserError
from MaxText.experiments.execution import run_python
from MaxText.experiments.ladder.effective_speedup import TIME, log_throughput_ratio
from MaxText.experiments.ladder.ladder_plan import SolvedRung
from MaxText.experiments.ladder.measurements import Arm
from MaxText.experiments.ladder.step_estimate import StepEstimate
from MaxText.storage.atomic import atomic_write_text
from MaxText.value_types import JsonObject

CPU_MACHINE = "cpu-1"
_PROGRAM = "MaxText.experiments.ladder.step_estimate"


@dataclasses.dataclass(frozen=True)
class HardwareEstimates:
    """Estimated times of all rungs on machines.

    Attributes:
      target: The machine of the verdict; "" for none.
      token_seconds: Machine -> (rung, label of the arm) -> seconds per token.
      sources: Machine -> what its estimates were derived from.
    """

    target: str = ""
    token_seconds: Mapping[str, Mapping[tuple[int, str], float]] = dataclasses.field(
        default_factory=dict
    )
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def of(self, rung: int, label: str) -> dict[str, float]:
        """Returns the seconds per token of an arm at a rung, by machine."""
        return {machine: times[rung, label] for machine, times in self.token_seconds.items()}

    @property
    def assumptions(self) -> list[str]:
        """What the estimates for the target assume, in sentences."""
        if not self.target:
            return []
        return [
            f"Time on {self.target} is estimated: {self.sources[self.target]}, for one step of "
            "each rung at its own size and batch, with unrolled layers, without input, evaluation "
            "and checkpoints. Only the ratio of the arms is used; small models use large chips "
            "badly, so that the ratio at another size may differ."
        ]

    def describe_error(self, arms: Sequence[Arm]) -> list[str]:
        """Returns the error of such ratios on this machine's CPU, where they were measured."""
        baseline, *variants = arms
        if CPU_MACHINE not in self.token_seconds:
            return []
        lines = []
        for variant in variants:
            errors = []
            for first, other in zip(baseline.rungs, variant.rungs, strict=True):
                measured = log_throughput_ratio(first, other, TIME).mean
                estimated = log_throughput_ratio(first, other, CPU_MACHINE).mean
                assert measured is not None
                assert estimated is not None
                errors.append(math.expm1(estimated - measured))
            listed = ", ".join(f"{error:+.1%}" for error in errors)
            lines.append(
                f"Error of such an estimate on this machine's CPU ({self.sources[CPU_MACHINE]}): "
                f"the estimated ratio of throughputs of {variant.label} and {baseline.label} is "
                f"off the measured one by {listed} from the smallest to the largest rung, by "
                f"{statistics.fmean(map(abs, errors)):.1%} on average."
            )
        return lines


def estimate_rungs(
    rungs: Sequence[SolvedRung],
    rates: Mapping[str, float],
    machines: Sequence[str],
    folder: Path,
    log: Callable[[str], None],
) -> HardwareEstimates:
    """Estimates the step times of all rungs on machines; those that a file has are not repeated.

    Args:
      rungs: Of the ladder.
      rates: Factor of the learning rate by label.
      machines: That of the verdict first; none to estimate nothing.
      folder: Of the ladder, which keeps the estimates.
      log: Prints a line.

    Raises:
      UserError: A machine is unknown, or a step does not fit it.
    """
    token_seconds: dict[str, dict[tuple[int, str], float]] = {}
    sources: dict[str, str] = {}
    for machine in machines:
        path = folder / f"step_estimates_{machine}.json"
        known: JsonObject = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        times = token_seconds.setdefault(machine, {})
        for solved in rungs:
            for variant in solved.sized_variants(rates):
                planned = solved.planned[variant.label]
                seconds = 0.0
                pairs = zip(variant.named_stages, planned.stages, strict=True)
                for (name, config), stage in pairs:
                    key = f"{solved.rung.folder}/{name}"
                    if key not in known:
                        log(
                            f"estimating a step of {name} at rung {solved.rung.number} on {machine}"
                        )
                        config_path = folder / f"step_estimate_{machine}.yml"
                        config_path.write_text(resolved_yaml(config), encoding="utf-8")
                        known[key] = estimate_in_process(config_path, machine)._asdict()
                        atomic_write_text(path, json.dumps(known, indent=1))
                        config_path.unlink()
                    seconds += known[key]["seconds"] * stage.steps
                    sources[machine] = known[key]["source"]
                times[solved.rung.number, variant.label] = seconds / planned.total("tokens")
    return HardwareEstimates(machines[0] if machines else "", token_seconds, sources)


def estimate_in_process(config_path: Path, machine: str) -> StepEstimate:
    """Estimates a step in a process of its own: a compiler is set up before jax starts.

    Args:
      config_path: Of the run's configuration.
      machine: As compile_topology.

    Raises:
      UserError: The machine is unknown, or the step does not fit it.
    """
    process = run_python("-m", _PROGRAM, str(config_path.absolute()), machine)
    if process.returncode:
        lines = process.stderr.strip().splitlines() or ["no message"]
        raise UserError(f"target={machine}: {lines[-1]}")
    return StepEstimate(**json.loads(process.stdout.splitlines()[-1]))
