"""Estimates memory, time and cost of a run."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from MaxText import program_start

program_start.install(__name__)  # before the slow imports

from MaxText import exit_codes
from MaxText.config import command_line
from MaxText.config.schema import Config
from MaxText.cost.plan_args import PlanOptions
from MaxText.errors import UserError

USAGE = """
Estimates memory per device by cause, communication, time and cost of a run. Neither compiles nor
trains, and needs no accelerator.

  python MaxText/plan.py configs/gpt2.yml hardware=1xH200
  python MaxText/plan.py model_name=llama3.1-8b hardware=v5p-128 tokens=300e9 \\
      price_per_chip_hour=4.2
  python MaxText/plan.py model_name=llama2-7b hardware=8xH100 --fit

Keys (key=value) are those of train.py. docs/how-to/estimate_memory_and_cost.md explains the
estimates and their errors.
"""


def main() -> int:
    """Exit codes: 0 the run fits, 1 it does not, 2 user error, 130 Ctrl-C."""
    # Leaves the accelerators of this machine alone.
    os.environ["JAX_PLATFORMS"] = "cpu"
    with command_line.exit_on_user_error():
        loaded, parsed = command_line.parse_with_options(
            "plan.py", sys.argv[1:], USAGE, PlanOptions
        )
        fits = _plan(parsed.options, loaded.config, parsed.configuration)
    return exit_codes.SUCCESS if fits else 1


def _plan(options: PlanOptions, config: Config, arguments: Sequence[str]) -> bool:
    """Prints the plan; returns whether it fits."""
    from MaxText.cost import plan_report
    from MaxText.cost.auto_layout import choose_layout
    from MaxText.cost.job_plan import find_fitting_plans, make_plan
    from MaxText.hardware import chips as hardware

    target = hardware.find_hardware(options.hardware)
    config = choose_layout(config, target, print)
    try:
        plan = make_plan(config, target)
    except UserError:
        if not options.fit:
            raise
        plan = None
    tokens = options.tokens
    if plan is not None:
        tokens = tokens or config.run.steps * plan.program.tokens_per_update
        print(plan_report.describe(plan, tokens, options.price_per_chip_hour, not options.fit))
    if not options.fit:
        return plan is None or plan.fits
    plans = find_fitting_plans(config, target)
    tokens = tokens or config.run.steps * plans[0].program.tokens_per_update
    price = options.price_per_chip_hour
    print(f"\n{plan_report.format_proposals(plans, config, arguments, tokens, price)}")
    return True


if __name__ == "__main__":
    sys.exit(main())
