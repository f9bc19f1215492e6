"""Compares configurations under one budget."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from MaxText import program_start

program_start.install(__name__)  # before the slow imports

from MaxText.config import command_line
from MaxText.config.sources import YAML_PATH
from MaxText.experiments.compare_args import CompareOptions, parse_args
from MaxText.experiments.ladder.ladder_args import asks_for_ladder
from MaxText.experiments.variants import check_tunable, expand_variants, solve_key_by_label

USAGE = """
Trains configurations under one budget, with several seeds, and reports how they differ.

  python MaxText/compare.py configs/comparisons/gpt2_style.yml \\
      configs/comparisons/llama_style.yml match=params seeds=3
  python MaxText/compare.py quickstart.yml steps=200 match=tokens seeds=2 \\
      'sweep={position_embedding: [rotary, learned], learning_rate: [1e-3, 3e-3]}'
  python MaxText/compare.py a.yml b.yml match=flops budget=1e15 solve_for=[steps,width] launch=print
  python MaxText/compare.py a.yml b.yml match=tokens seeds=3 tune=learning_rate
  python MaxText/compare.py a.yml b.yml ladder=6 from=1e13 to=1e16 tokens_per_parameter=20
  python MaxText/compare.py a.yml sizes=sizes.yml ladder=5 from=1e13 to=1e15

Run the same command again to resume. Keys (key=value) are those of train.py and override every
configuration.
docs/how-to/compare_architectures.md says how budgets are solved and how differences are judged,
docs/how-to/run_a_ladder.md how an architecture is judged over several sizes.
"""

_INTERRUPTED = "Interrupted. Run the same command to resume."


def main() -> None:
    """Exit codes: 0 done, 2 user error or failed run, 75 SIGTERM and notices, 130 Ctrl-C."""
    arguments = sys.argv[1:]
    # Questions are about one configuration: the first.
    files = [argument for argument in arguments if YAML_PATH.fullmatch(argument)]
    with_first_file = [argument for argument in arguments if argument not in files[1:]]
    command_line.answer_questions("compare.py", with_first_file, USAGE, CompareOptions)
    with command_line.exit_on_user_error(_INTERRUPTED):
        args, problems = parse_args(arguments)
        variants = expand_variants(args, problems)
        check_tunable(args, variants)
        tuned_at = expand_variants(args.at_tuning_size) if args.tune_at else variants
        # Once the configurations are accepted, because they import jax.
        if asks_for_ladder(args):
            from MaxText.experiments.ladder.ladder_execution import run_ladder

            run_ladder(args, variants, sys.argv, print)
        else:
            solve_for = solve_key_by_label(args, variants)
            from MaxText.experiments.execution import run_comparison

            run_comparison(args, variants, solve_for, sys.argv, print, tuned_at=tuned_at)


if __name__ == "__main__":
    sys.exit(main())
