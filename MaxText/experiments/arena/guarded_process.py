"""Trains or measures a run of an arena session, with a guard over the candidate's code.

    python MaxText/experiments/arena/guarded_process.py train CONFIG.yml [TRUSTED.py ...]
    python MaxText/experiments/arena/guarded_process.py first|second CONFIG.yml [TRUSTED.py ...]

The first is train.py. It ends with exit code 2 and lines that begin with `refused:` if the
candidate's code opened files, started processes, or replaced functions of the program. The second
measures the validation loss of the finished run (measurement.py) and writes it next to CONFIG.yml.

TRUSTED are source files of the session, such as those of its data, which may read files.
"""

import sys
from collections.abc import Collection
from pathlib import Path
from typing import NoReturn

_SCRIPT = Path(__file__).resolve()
_TRAIN = "train"
REFUSED = "refused: "  # begins each line that says what the candidate's code did


def train_command(config: Path, trusted: Collection[str] = ()) -> list[str]:
    """Returns the command that trains a configuration file under guard.

    Args:
      config: Path of the file.
      trusted: Source files of the session.
    """
    return [sys.executable, str(_SCRIPT), _TRAIN, str(config.absolute()), *trusted]


def measure_command(config: Path, half: str, trusted: Collection[str] = ()) -> list[str]:
    """Returns the command that measures the run of a configuration file.

    Args:
      config: Path of the file.
      half: Of the validation text, first or second.
      trusted: Source files of the session.
    """
    return [sys.executable, str(_SCRIPT), half, str(config.absolute()), *trusted]


def _train(config: str, trusted: Collection[str]) -> int:
    """Trains; returns an exit code of exit_codes.py."""
    from MaxText import exit_codes
    from MaxText.experiments.arena.isolation import Guard, IsolationError
    from MaxText.run.training_program import train_from_command_line

    reported: set[str] = set()

    def report(problem: str) -> None:
        """Writes a problem once: at once, as a run that fails may end without coming back."""
        if problem not in reported:
            reported.add(problem)
            sys.stderr.write(f"{REFUSED}{problem}\n")

    guard = Guard(trusted, report)
    sys.argv = [str(_SCRIPT.parents[2] / "train.py"), config]
    try:
        code = train_from_command_line("")
    except IsolationError:
        code = exit_codes.USER_ERROR
    for problem in guard.problems():
        report(problem)
    return exit_codes.USER_ERROR if reported else code


def _measure(half: str, config: str, trusted: Collection[str]) -> int:
    """Measures a run and writes the result; returns the exit code."""
    from MaxText.experiments.arena.isolation import Guard

    guard = Guard(trusted)
    from MaxText.experiments.arena import measurement

    measurement.write(Path(config), "second" if half == "second" else "first", guard)
    return 0


def main() -> NoReturn:
    """Trains or measures, as the first argument says."""
    from MaxText import program_start

    program_start.install("__main__", tune_malloc=True)
    from MaxText.runtime import processes

    task, config, *trusted = sys.argv[1:]
    if task == _TRAIN:
        processes.run(lambda: _train(config, trusted))
    processes.run(lambda: _measure(task, config, trusted))


if __name__ == "__main__":
    sys.path[0] = str(_SCRIPT.parents[3])
    main()
