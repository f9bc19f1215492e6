"""Options of compare.py for ladders, and their checks, without jax."""

import dataclasses
import math
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from MaxText.config.keys import Count, Natural
from MaxText.config.problems import ConfigIssue
from MaxText.config.program_options import option
from MaxText.cost.plan_args import parse_amount

Transfer = Literal["scaled", "none"]

WIDTH_AND_DEPTH = "width_and_depth"
DEPTH_ONLY = "depth"
SIZE_RULES = (WIDTH_AND_DEPTH, DEPTH_ONLY)

MIN_RUNGS = 5  # fewer leave too few degrees of freedom for an interval; 6 are recommended
MIN_SPAN = 30.0  # of compute; 100 or more are recommended
MIN_GRID_SIZES = 5  # of a parabola; its three coefficients leave two degrees of freedom
DEFAULT_SEEDS = (0, 1)
SWEEP_SEED = 10_000  # of runs that tune a hyper-parameter

RATE_KEY = "learning_rate"
DECAY_KEY = "adam_weight_decay"
_ADVISED_SPAN = 100.0

# Options that plan a comparison at one size, and what decides in a ladder instead.
_ONE_SIZE = {
    "match": "every rung has equal FLOPs",
    "budget": "from= and to= are the FLOPs of the smallest and the largest rung",
    "solve_for": "steps are solved for",
}
# Options without effect where every size is trained at every compute.
_NOT_OF_GRID = {
    "aspect": "the file of sizes has the shapes",
    "tokens_per_parameter": "the FLOPs and the size decide the tokens",
    "linf": "the laws of a grid have an asymptote of their own",
    "timings": "best sizes are those at equal FLOPs",
    "target": "best sizes are those at equal FLOPs",
}

_COMPUTES = "FLOPs of one run, such as 1e13"


def _sizes(text: str) -> str | Path:
    if text in SIZE_RULES:
        return text
    path = Path(text).expanduser()
    if path.suffix not in (".yml", ".yaml"):
        raise ValueError(f"{text!r} is neither {', '.join(SIZE_RULES)} nor a YAML file")
    if not path.exists():
        raise ValueError(f"the file {text} does not exist")
    return path


@dataclasses.dataclass(frozen=True, kw_only=True)
class LadderOptions:
    """Options of a ladder: the same configurations at several sizes."""

    ladder: Count | None = option(
        None, "Number of rungs: train every configuration at so many sizes.", metavar="NUMBER"
    )
    from_: float | None = option(
        None,
        "FLOPs of a run at the smallest rung, met by the nearest size.",
        read=parse_amount,
        accepts=_COMPUTES,
    )
    to: float | None = option(
        None,
        "FLOPs of a run at the largest rung, met by the nearest size.",
        read=parse_amount,
        accepts=_COMPUTES,
    )
    tokens_per_parameter: Annotated[float, Field(gt=0)] = option(
        20.0, "Training tokens per parameter of the first configuration, at every rung."
    )
    sizes: str | Path = option(
        WIDTH_AND_DEPTH,
        "Rule of the sizes: width_and_depth, depth, or a YAML file with a list of one mapping of "
        "keys per rung; with ladder=, from= and to=, every size of the file at every compute.",
        read=_sizes,
        accepts="width_and_depth, depth or a YAML file",
    )
    aspect: Annotated[float, Field(gt=0)] | None = option(
        None, "Width per layer at every rung; by default that of the first configuration."
    )
    batch_exponent: Annotated[float, Field(ge=0, le=1)] = option(
        0.383, "Batch size grows with the training tokens to this power; 0 keeps it."
    )
    horizon_exponent: Annotated[float, Field(ge=0, le=1)] = option(
        0.3, "Learning rates of larger rungs fall with the training tokens to this power."
    )
    transfer: Transfer = option(
        "scaled",
        "Learning rate of larger rungs. scaled: by width, batch and tokens. none: as in the file.",
    )
    lr_sweep: Natural = option(
        0,
        "Smallest rungs at which the learning rate is swept by factors of two first.",
        metavar="NUMBER",
    )
    linf: Annotated[float, Field(ge=0)] | None = option(
        None, "Asymptote of the losses in nats per token, by default fitted."
    )
    timings: Natural = option(
        5, "Interleaved timings of every rung, for the speed-up in time; 0 for none."
    )
    target: str = option(
        "", "Machine for an estimated speed-up in time: v5p-8, h100-1.", metavar="MACHINE"
    )
    jobs: Count | None = option(
        None,
        "Runs at a time: here 1 by default, and several on equal shares of the cores or GPUs; of "
        "an array all by default.",
    )


def ladder_issues(options: LadderOptions, given: Collection[str]) -> list[ConfigIssue]:
    """Returns what is wrong with the options of a ladder, and with those that have none.

    Args:
      options: As parsed.
      given: Names of the options on the command line.
    """
    if not asks_for_ladder(options):
        alone = sorted(set(given) & _names_of_ladder())
        if not alone:
            return []
        message = f"{', '.join(alone)}: these are options of a ladder, and ladder= is missing"
        return [_issue(message, "ladder=6 from=1e13 to=1e16")]
    issues = [
        _issue(f"{name}={getattr(options, name)}: in a ladder, {reason}", f"remove {name}=")
        for name, reason in _ONE_SIZE.items()
        if name in given
    ]
    if options.transfer == "none" and "horizon_exponent" in given:
        message = "horizon_exponent: with transfer=none learning rates are those of the file"
        issues.append(_issue(message, "transfer=scaled"))
    if isinstance(options.sizes, Path):
        return issues + _listed_issues(options, given)
    if options.sizes == DEPTH_ONLY and options.aspect is not None:
        issues.append(_issue("aspect: with sizes=depth the width is that of the file", "one"))
    return issues + _span_issues(options)


def _listed_issues(options: LadderOptions, given: Collection[str]) -> list[ConfigIssue]:
    """Returns what is wrong with the options beside a file of sizes."""
    if not is_size_grid(options):
        fixed = [name for name in ("from", "to", "aspect") if name in given]
        if not fixed:
            return []
        message = f"{', '.join(fixed)}: the file sizes={options.sizes} has the sizes"
        remedy = f"remove {'=, '.join(fixed)}="
        if "aspect" not in fixed:
            remedy += ", or add ladder=5, which trains every size at that many computes"
        return [_issue(message, remedy)]
    issues = [
        _issue(f"{name}: with every size at every compute, {reason}", f"remove {name}=")
        for name, reason in _NOT_OF_GRID.items()
        if name in given
    ]
    low = options.from_
    high = options.to
    if low is None or high is None or (low >= high) != (options.ladder == 1):
        message = (
            f"ladder={options.ladder} sizes={options.sizes}: every size is trained at that many "
            "computes, between from= and to="
        )
        issues.append(_issue(message, "ladder=5 from=1e13 to=1e15"))
    return issues


def _span_issues(options: LadderOptions) -> list[ConfigIssue]:
    """Returns what is wrong with the number of rungs and their compute."""
    low = options.from_
    high = options.to
    if low is None or high is None:
        missing = " and ".join(n for n, v in (("from", low), ("to", high)) if v is None)
        message = f"{missing}: the FLOPs of a run at the smallest and the largest rung are needed"
        return [_issue(message, "ladder=6 from=1e13 to=1e16")]
    problems = []
    rungs = options.ladder or 0
    if rungs < MIN_RUNGS:
        problems.append(f"ladder={rungs}: an interval needs at least {MIN_RUNGS} rungs")
    span = high / low
    if span < MIN_SPAN:
        problems.append(
            f"from={low:g} to={high:g}: a law needs a span of compute of at least {MIN_SPAN:g}, "
            f"and this is {span:.3g}"
        )
    if not problems:
        return []
    # Down, not up: the plan that works costs no more than the one that was asked for.
    nearest_low = low if span >= MIN_SPAN else round_down(high / _ADVISED_SPAN)
    plan = f"ladder={max(rungs, MIN_RUNGS + 1)} from={nearest_low:g} to={high:g}"
    return [_issue(problem, plan) for problem in problems]


def round_down(number: float) -> float:
    """Returns the largest number with one significant digit that is not above `number`."""
    unit = 10.0 ** math.floor(math.log10(number))
    return math.floor(number / unit * (1 + 1e-9)) * unit


def round_up(number: float) -> float:
    """Returns the least number with two significant digits that is not below `number`."""
    unit = 10.0 ** (math.floor(math.log10(number)) - 1)
    return math.ceil(number / unit * (1 - 1e-9)) * unit


def asks_for_ladder(options: LadderOptions) -> bool:
    """Whether a ladder is asked for: by its number of rungs, or by their sizes."""
    return options.ladder is not None or isinstance(options.sizes, Path)


def is_size_grid(options: LadderOptions) -> bool:
    """Whether every size of a file is trained at every compute, to find the best sizes."""
    return isinstance(options.sizes, Path) and options.ladder is not None


def ladder_name(options: LadderOptions) -> str:
    """Returns what tells a ladder from others of the same configurations, for a folder's name."""
    ratio = f"{options.tokens_per_parameter:g}"
    if isinstance(options.sizes, Path):
        if is_size_grid(options):
            ratio = f"{options.ladder}_{options.from_:g}_{options.to:g}"
        return f"{options.sizes.stem}_{ratio}"
    return f"{options.ladder}_{options.from_:g}_{options.to:g}_{ratio}"


def _names_of_ladder() -> set[str]:
    names = {field.name.rstrip("_") for field in dataclasses.fields(LadderOptions)}
    return names - {"ladder", "jobs"}  # several runs at a time are possible in any comparison


def _issue(message: str, remedy: str) -> ConfigIssue:
    return ConfigIssue(message, ("command line",), (("write", remedy),))
