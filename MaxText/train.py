"""Trains a language model: MaxText/train.py CONFIG.yml key=value ...

Reads the command line and reports errors. run/training.py is the training itself, top to bottom.
"""

import pathlib
import sys
from typing import NoReturn

if __name__ == "__main__":
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

from MaxText import program_start

program_start.install(__name__, tune_malloc=True)  # before the slow imports

from MaxText.run.training_program import train_from_command_line
from MaxText.runtime import processes

USAGE = """Trains a language model.

  python MaxText/train.py configs/quickstart.yml
  python MaxText/train.py configs/gpt2.yml run_name=first dataset_path=DIR steps=1000

The same command again resumes from the newest checkpoint of the run."""


def main() -> NoReturn:
    """Trains; exits with a code of exit_codes.py."""
    processes.run(lambda: train_from_command_line(USAGE))


if __name__ == "__main__":
    main()
