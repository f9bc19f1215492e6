"""Says what a run needs before anything is bought: python MaxText/plan.py CONFIG hardware=NAME"""

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
from MaxText.cost import plan_request
from MaxText.errors import UserError

USAGE = """
Says what a run needs: memory per device by cause, communication, time, days and money. Neither
compiles nor trains, and needs no accelerator.

  python MaxText/plan.py configs/gpt2.yml hardware=1xH200
  python MaxText/plan.py model_name=llama3.1-8b hardware=v5p-128 tokens=300e9 \\
      price_per_chip_hour=4.2
  python MaxText/plan.py model_name=llama2-7b hardware=8xH100 --fit

Keys (key=value) are those of train.py. Besides:

  hardware=NAME           v5p-128, v5e-16, 2xv5p-128 (two slices), 8xH100, 1xH200, cpu
  tokens=NUMBER           of the run, as 300e9 or 300B; by default what `steps` see
  price_per_chip_hour=X   of a TPU chip or a GPU, in any currency
  --fit                   look for a mesh, microbatch and remat policy that fit

docs/how-to/estimate_memory_and_cost.md says how it counts, and how far it is off.
"""


def main() -> int:
    """Exit codes: 0 it fits, 1 it does not, 2 a mistake of the user, 130 Ctrl-C."""
    arguments = sys.argv[1:]
    if any(word in ("-h", "--help", "--show-config", "--why") for word in arguments):
        command_line.parse("plan.py", arguments, USAGE)
    # Whatever accelerator this machine has is left alone.
    os.environ["JAX_PLATFORMS"] = "cpu"
    with command_line.exit_on_user_error():
        asked = plan_request.read(arguments)
        config = command_line.parse("plan.py", asked.arguments, USAGE).config
        fits = _plan(asked, config)
    return exit_codes.DONE if fits else 1


def _plan(asked: plan_request.Request, config) -> bool:
    """Prints what was asked for; False if it does not fit."""
    from MaxText.cost import hardware, plan_report
    from MaxText.cost.fitting import fitting
    from MaxText.cost.job_plan import make_plan, peak_of

    place = hardware.find(asked.hardware)
    peak = peak_of(place)
    try:
        plan = make_plan(config, place, peak)
    except UserError:
        if not asked.fit:
            raise
        plan = None
    tokens = asked.tokens
    if plan is not None:
        tokens = tokens or config.run.steps * plan.program.tokens_per_update
        print(plan_report.describe(plan, tokens, asked.price))
    if not asked.fit:
        return plan is None or plan.fits
    plans = fitting(config, place, peak)
    tokens = tokens or config.run.steps * plans[0].program.tokens_per_update
    print(f"\n{plan_report.proposals(plans, config, asked.arguments, tokens, asked.price)}")
    return True


if __name__ == "__main__":
    sys.exit(main())
