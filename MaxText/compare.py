"""Compares configurations under one budget: python MaxText/compare.py A.yml B.yml match=params"""

import sys
from pathlib import Path

# The script's own folder comes first on the path; its parent gives every module one name.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from MaxText import early_signals

early_signals.install(__name__)  # before the slow imports

from MaxText import exit_codes
from MaxText.config import command_line
from MaxText.experiments import compare_args
from MaxText.experiments.runner import compare

USAGE = """
Trains configurations under one budget, with several seeds, and reports how they differ.

  python MaxText/compare.py configs/comparisons/gpt2_style.yml \\
      configs/comparisons/llama_style.yml match=params seeds=3
  python MaxText/compare.py quickstart.yml steps=200 match=tokens seeds=2 \\
      'sweep={position_embedding: [rotary, learned], learning_rate: [1e-3, 3e-3]}'
  python MaxText/compare.py a.yml b.yml match=flops budget=1e15 free=[steps,width] launch=print

Run the same command again to resume. Keys (key=value) are those of train.py and override every
configuration. Options:

  match=WHAT      equal budget: params (the default), flops, tokens, or time of training
  budget=AMOUNT   its size: 10M, 1e15, for time 10m or 1h; by default that of the first file
  free=KEY        key to solve for: width, depth, slots, steps or an integer key; one for all, or
                  [one,for,each]. By default width for params, steps for the others
  tolerance=0.02  largest deviation from the budget
  seeds=1         runs of each; 3 is seeds 0, 1, 2 of data order and initial weights, [4,7] names
                  them
  sweep=...       {key: [a, b], ...} is every combination, [{...}, {...}] one after the other; in a
                  YAML file as `sweep:`. `stages:` there is a chain of runs:
                  docs/how-to/compare_architectures.md
  launch=print    print one command per run instead of running, and the one that reports results
  num_devices=N   devices per run, by default those of this machine
  output=FOLDER   by default maxtext_output/compare_<names>_<match>

docs/how-to/compare_architectures.md says how budgets are solved and how differences are judged.
"""

_INTERRUPTED = "Interrupted. Run the same command to resume."
_OPTIONS = ("-h", "--help", "--show-config", "--why", "--from-maxtext")


def main() -> int:
    """Exit codes: 0 done, 2 user error or failed run, 130 Ctrl-C."""
    arguments = sys.argv[1:]
    args, problems = compare_args.parse_args(arguments)
    if any(argument in _OPTIONS for argument in arguments):
        # Options are about one configuration: the first.
        command_line.parse("compare.py", [*args.configs[:1], *args.keys], USAGE)
    with command_line.exit_on_user_error(_INTERRUPTED):
        try:
            compare(args, problems, sys.argv, lambda line: print(line, flush=True))
        except SystemExit:  # SIGTERM
            print(_INTERRUPTED, file=sys.stderr)
            raise
    return exit_codes.DONE


if __name__ == "__main__":
    sys.exit(main())
