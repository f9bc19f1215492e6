"""Parses and checks the command line of arena.py, without jax."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from MaxText.config.keys import Count
from MaxText.config.problems import ConfigIssue, ConfigurationError
from MaxText.config.program_options import option, read_options
from MaxText.cost.plan_args import COUNT_SUFFIXES, parse_amount
from MaxText.experiments.compare_args import SET_PER_RUN, TIME_SUFFIXES

# Costs of counted_cost.MATCHES that budget= does not equalize; that module imports jax.
MATCHES = ("parameters", "stored_bytes", "bytes", "tokens")
BudgetUnit = Literal["FLOPs", "seconds"]


@dataclasses.dataclass(frozen=True)
class Budget:
    """What each run may cost."""

    amount: float
    unit: BudgetUnit


def parse_budget(text: str) -> Budget:
    """Returns the budget of a text such as 1e15, 20T (FLOPs), 90s, 5m or 1h (training time).

    Raises ValueError for any other text.
    """
    if text[-1:] in ("s", "m", "h"):
        return Budget(parse_amount(text, TIME_SUFFIXES), "seconds")
    return Budget(parse_amount(text, COUNT_SUFFIXES), "FLOPs")


def _matches(text: str) -> tuple[str, ...]:
    names = tuple(item.strip() for item in text.strip("[] ").split(",") if item.strip())
    for name in names:
        if name not in MATCHES:
            raise ValueError(f"{name!r} is not a cost")
    return names


def _folder(text: str) -> Path:
    if not text or "://" in text:
        raise ValueError(f"{text!r} is not a local folder")
    return Path(text).expanduser()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArenaOptions:
    """Options of arena.py. All but the last four are settings of a session, given once."""

    baseline: str = option("", "Configuration that candidates are compared with.", metavar="A.yml")
    budget: Budget | None = option(
        None,
        "Cost of each run: FLOPs (1e15) or training time (90s, 5m, 1h) of which candidates get as "
        "much as the baseline; by default the FLOPs of its own steps.",
        read=parse_budget,
        accepts="FLOPs such as 1e15, or a time such as 90s, 5m or 1h",
    )
    match: tuple[str, ...] = option(
        (),
        f"Further costs that may not exceed the baseline's, of {', '.join(MATCHES)}; tokens gives "
        "candidates the baseline's steps.",
        read=_matches,
        accepts=", ".join(MATCHES),
    )
    tolerance: Annotated[float, Field(ge=0, lt=1)] = option(
        0.02, "By how much they may exceed them."
    )
    alpha: Annotated[float, Field(gt=0, lt=0.5)] = option(
        0.05, "Largest chance that the session keeps any candidate that is no better."
    )
    num_candidates: Count = option(
        20, "Candidates that the session may run, which share alpha equally."
    )
    min_effect: Annotated[float, Field(ge=0)] = option(
        0.0, "Improvement that a candidate must exceed, in nats per token."
    )
    # At least FIRST_LOOK of sequential_test.py, which imports scipy.
    max_seeds: Annotated[int, Field(ge=3)] = option(10, "Most seeds of a candidate.")
    baseline_seeds: Annotated[int, Field(ge=2)] = option(
        4, "Seeds of the baseline that run first, and show its noise."
    )
    time_limit: float | None = option(
        None,
        "Longest duration of a run (90s, 1h); by default 5 times that of the baseline's slowest "
        "run, and 2 minutes.",
        read=lambda text: parse_amount(text, TIME_SUFFIXES),
        accepts="a time such as 90s, 10m or 1h",
    )
    candidate: tuple[str, ...] = option(
        (),
        "B.yml or part.py[:CLASS], with its own key=value in the same quotes; may be repeated.",
        metavar="B.yml|PART.py",
        repeated=True,
    )
    output: Path | None = option(
        None, "Folder of the session.", read=_folder, accepts="a local folder", required=True
    )
    jobs: Count = option(1, "Runs at once; GPUs are divided among them.")
    final: bool = option(
        False, "Measure kept candidates and the baseline on the hidden half of the validation text."
    )


# Options of a call, not of a session.
PER_CALL = ("candidate", "output", "jobs", "final")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArenaArgs:
    """A request: options, which of them were given, and key=value for all runs."""

    options: ArenaOptions
    given: tuple[str, ...]
    keys: tuple[str, ...]

    @property
    def output(self) -> Path:
        """Folder of the session."""
        assert self.options.output is not None
        return self.options.output


def parse_args(arguments: Sequence[str]) -> ArenaArgs:
    """Returns the request of a command line.

    Args:
      arguments: The command line without the program.

    Raises:
      ConfigurationError: With everything that is wrong.
    """
    parsed = read_options(ArenaOptions, arguments)
    problems = list(parsed.problems)
    for file in parsed.config_files:
        facts = (("write", f"baseline={file} or candidate={file}"),)
        problems.append(ConfigIssue(f"{file} is neither", ("command line",), facts))
    for word in parsed.operands:
        problems.append(ConfigIssue(f"{word} is no option", ("command line",)))
    for setting in parsed.settings:
        name = setting.partition("=")[0]
        if name in SET_PER_RUN:
            message = f"{name}: {SET_PER_RUN[name]} sets it for each run of a session"
            problems.append(ConfigIssue(message, (f"command line, {setting}",)))
    if problems:
        raise ConfigurationError(problems)
    return ArenaArgs(options=parsed.options, given=parsed.given, keys=tuple(parsed.settings))
