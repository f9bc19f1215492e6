"""Estimates memory, time and cost of a run: python MaxText/plan.py CONFIG hardware=NAME"""

import os
import sys
from pathlib import Path

# The script's own folder comes first on the path; its parent gives every module one name.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from MaxText import early_signals

early_signals.install(__name__)  # before the slow imports

from MaxText import exit_codes
from MaxText.config import command_line
from MaxText.cost import plan_args
from MaxText.errors import UserError

USAGE = """
Estimates memory per device by cause, communication, time and cost of a run. Neither compiles nor
trains, and needs no accelerator.

  python MaxText/plan.py configs/gpt2.yml hardware=1xH200
  python MaxText/plan.py model_name=llama3.1-8b hardware=v5p-128 tokens=300e9 \\
      price_per_chip_hour=4.2
  python MaxText/plan.py model_name=llama2-7b hardware=8xH100 --fit

Keys (key=value) are those of train.py. In addition:

  hardware=NAME           v5p-128, v5e-16, 2xv5p-128 (two slices), 8xH100, 1xH200, cpu
  tokens=NUMBER           tokens of the run, e.g. 300e9 or 300B; by default those of `steps` steps
  price_per_chip_hour=X   price of a TPU chip or a GPU, in any currency
  --fit                   search for a mesh, microbatch size and remat policy that fit

docs/how-to/estimate_memory_and_cost.md explains the estimates and their errors.
"""


def main() -> int:
    """Exit codes: 0 the run fits, 1 it does not, 2 user error, 130 Ctrl-C."""
    arguments = sys.argv[1:]
    if any(word in ("-h", "--help", "--show-config", "--why") for word in arguments):
        command_line.parse("plan.py", arguments, USAGE)
    # Leaves the accelerators of this machine alone.
    os.environ["JAX_PLATFORMS"] = "cpu"
    with command_line.exit_on_user_error():
        args = plan_args.parse_args(arguments)
        config = command_line.parse("plan.py", args.arguments, USAGE).config
        fits = _plan(args, config)
    return exit_codes.DONE if fits else 1


def _plan(args: plan_args.PlanArgs, config) -> bool:
    """Prints the plan; returns whether it fits."""
    from MaxText.cost import hardware, plan_report
    from MaxText.cost.job_plan import make_plan, peak_of
    from MaxText.cost.plan_search import find_fitting_plans

    target = hardware.find(args.hardware)
    peak = peak_of(target)
    try:
        plan = make_plan(config, target, peak)
    except UserError:
        if not args.fit:
            raise
        plan = None
    tokens = args.tokens
    if plan is not None:
        tokens = tokens or config.run.steps * plan.program.tokens_per_update
        print(plan_report.describe(plan, tokens, args.price))
    if not args.fit:
        return plan is None or plan.fits
    plans = find_fitting_plans(config, target, peak)
    tokens = tokens or config.run.steps * plans[0].program.tokens_per_update
    print(f"\n{plan_report.format_proposals(plans, config, args.arguments, tokens, args.price)}")
    return True


if __name__ == "__main__":
    sys.exit(main())
