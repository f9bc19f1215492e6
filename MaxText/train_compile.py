"""Compiles a train step for absent devices."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from MaxText import program_start

program_start.install(__name__)  # before the slow imports

from MaxText.compilation import targets
from MaxText.config import command_line

USAGE = """Compiles the train step of a configuration for a named machine, without that machine.

  python MaxText/train_compile.py configs/gpt2.yml compile_topology=v5p-8
  python MaxText/train_compile.py configs/gpt2.yml compile_topology=v5e-256 \\
      compile_topology_num_slices=2 compiled_trainstep_file=step.bin
  python MaxText/train_compile.py configs/gpt2.yml compile_topology=h100-8

Prints memory by cause, FLOPs, bytes, communication, and the compiler's time estimate.
docs/how-to/compile_ahead_of_time.md has the machines and the rules."""


def main() -> None:
    """Exit codes: 0 done, 2 user error or too little memory, 130 Ctrl-C."""
    config = command_line.parse("train_compile.py", sys.argv[1:], USAGE).config
    with command_line.exit_on_user_error("Interrupted. Nothing was written."):
        run = config.run
        target = targets.find_target(run.compile_topology, run.compile_topology_num_slices)
        targets.prepare_environment(target)
        from MaxText.compilation.ahead_of_time import train_compile

        train_compile(config, target, print)


if __name__ == "__main__":
    sys.exit(main())
