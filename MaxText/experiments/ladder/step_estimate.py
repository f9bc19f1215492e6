"""Step times of a ladder's rungs on hardware that is not there.

Each rung's step is compiled for the machine, as train_compile.py does, with its layers unrolled,
because compilers count the body of a loop once. The time is the compiler's own estimate where it
gives one; else the longer of compute and memory traffic of the compiled program, by the chip's
figures. Without a compiler for the machine here, it is plan.py's estimate.

As a program, in a process of its own, because a compiler is set up before jax starts:

  python -m MaxText.experiments.ladder.step_estimate CONFIG.yml v5p-8
"""

import json
import math
import sys
from pathlib import Path
from typing import NamedTuple

from MaxText.compilation import targets
from MaxText.config.loading import load_config
from MaxText.config.schema import Config, flatten, unflatten
from MaxText.errors import UserError
from MaxText.hardware.chips import find_hardware

_COMPILER = "the compiler's estimate"
_ROOFLINE = "FLOPs and bytes of the compiled program"
_PLAN = "plan.py's estimate, as no compiler for it is installed here"


class StepEstimate(NamedTuple):
    """Estimated time of a step, and what it was derived from."""

    seconds: float
    source: str


def estimate_step(config: Config, target: str, cache_folder: str) -> StepEstimate:
    """Returns the estimated time of a step on a machine.

    Call it in a process that has not imported jax.

    Args:
      config: Of the run.
      target: The machine, as train_compile.py's compile_topology.
      cache_folder: Keeps the measured peak of a CPU, so that all estimates have the same.

    Raises:
      UserError: The machine is unknown, or the step does not fit it.
    """
    machine = targets.find_target(target, 1)
    targets.prepare_environment(machine)
    hardware = find_hardware(target)

    # After the environment is prepared: they import jax.
    from MaxText.compilation.lowering import compile_lowered, lower_train_step
    from MaxText.cost.auto_layout import choose_layout
    from MaxText.cost.job_plan import make_plan
    from MaxText.cost.step_time import BANDWIDTH_SHARE
    from MaxText.hardware.peak_flops import peak_flops

    config = unflatten(flatten(config) | {"scan_layers": False})
    config = choose_layout(config, hardware, lambda line: None)
    try:
        devices = targets.devices(machine)
    except UserError:
        return StepEstimate(make_plan(config, hardware).time.estimate, _PLAN)
    compiled, _ = compile_lowered(lower_train_step(config, devices))
    costs = compiled.cost_analysis() or {}  # some backends return nothing, or -1 for unknown
    if (seconds := costs.get("optimal_seconds", 0.0)) > 0:
        return StepEstimate(seconds, _COMPILER)
    chip = hardware.chip
    share = math.sqrt(math.prod(chip.efficiency))
    peak = peak_flops(devices[0], cache_folder=cache_folder)
    compute = costs["flops"] / (share * peak.tflops * 1e12)
    memory = costs["bytes accessed"] / (BANDWIDTH_SHARE * chip.bandwidth / chip.devices)
    return StepEstimate(max(compute, memory), _ROOFLINE)


def main() -> None:
    """Prints the estimate as JSON; of a user error, its text."""
    path, target = sys.argv[1:]
    try:
        estimate = estimate_step(load_config(path), target, str(Path(path).parent))
    except UserError as error:
        sys.exit(str(error))
    print(json.dumps(estimate._asdict()))


if __name__ == "__main__":
    main()
