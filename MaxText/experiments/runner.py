"""Main sequence of compare.py: accepts a request, then runs it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

from MaxText.config.problems import ConfigIssue, ConfigurationError
from MaxText.errors import UserError
from MaxText.experiments import train_subprocess
from MaxText.experiments.compare_args import KEY_OF, STEPS, CompareArgs, default_solve_for
from MaxText.experiments.comparison_plan import ComparisonSpec
from MaxText.experiments.variants import Variant, expand_variants

Log = Callable[[str], None]

# Of the default folder; file systems allow about twice as many.
_LONGEST_NAME = 120


def compare(
    request: CompareArgs, problems: Sequence[ConfigIssue], command: Sequence[str], log: Log
) -> None:
    """Plans, runs (or prints) the remaining runs, and reports the results.

    `problems` were found in the request before; `command` was typed. Raises UserError for mistakes,
    an unreachable budget or a failed run.
    """
    variants = expand_variants(request, problems)
    solve_for = solve_key_by_label(request, variants)
    folder = request.output or default_folder(request, variants)
    hardware = {variant.config.run.hardware for variant in variants}
    if len(hardware) > 1:
        raise UserError(
            f"hardware: the configurations set {' and '.join(sorted(hardware))}. Set one value for "
            "all of them on the command line."
        )
    num_devices = _num_devices(request, hardware.pop())

    # Imported once the configurations were accepted, because it imports jax.
    from MaxText.experiments.execution import run_comparison

    question = ComparisonSpec(
        request.match, cast(float | None, request.budget), solve_for, request.tolerance, num_devices
    )
    run_comparison(request, variants, question, folder, command, log)


def _num_devices(request: CompareArgs, hardware: str) -> int:
    """Returns the planned device count of runs."""
    if request.num_devices is not None and request.launch == "print":
        return request.num_devices
    present = train_subprocess.count_devices(hardware)
    if request.num_devices not in (None, present):
        raise UserError(
            f"num_devices={request.num_devices}, but this machine has {present}, so runs here "
            "would miss the budget. Add launch=print to plan for another machine."
        )
    return present


def default_folder(request: CompareArgs, variants: Sequence[Variant]) -> Path:
    """Returns a folder reproduced by the same command."""
    swept = dict.fromkeys(name for variant in variants for name in variant.swept)
    stems = [Path(path).stem for path in request.configs]
    name = "_".join(["compare", *stems, *swept, request.match])
    return Path(variants[0].config.run.base_output_directory).expanduser() / name[:_LONGEST_NAME]


def solve_key_by_label(request: CompareArgs, variants: Sequence[Variant]) -> dict[str, str]:
    """Returns the key to solve for by label; ConfigurationError if unfit."""
    names = request.solve_for or (default_solve_for(request.match),)
    num_sources = max(len(request.configs), 1)
    if len(names) == 1:
        chosen = [names[0]] * len(variants)
    elif len(names) == num_sources:
        chosen = [names[variant.source] for variant in variants]
    elif len(names) == len(variants):
        chosen = list(names)
    else:
        what = f"solve_for: {len(names)} names for {len(variants)} configurations"
        remedy = ("write", "one for each")
        raise ConfigurationError([ConfigIssue(what, ("command line",), (remedy,))])
    found: dict[str, str] = {}  # problem -> what to write
    for variant, name in zip(variants, chosen, strict=True):
        if request.match == "time" and name != STEPS:
            what = f"solve_for={name}: match=time measures the given model, and solves for steps"
            found[what] = "solve_for=steps"
        if request.match == "params" and name == STEPS:
            what = "solve_for=steps: the number of parameters does not depend on the steps"
            found[what] = "solve_for=width or depth"
        if KEY_OF.get(name, name) in variant.swept:
            what = f"{name} is swept, but match={request.match} solves for it"
            found[what] = f"solve_for= another key, or remove {name} from the sweep"
    if found:
        at = ("command line",)
        raise ConfigurationError([ConfigIssue(a, at, (("write", b),)) for a, b in found.items()])
    return {variant.label: name for variant, name in zip(variants, chosen, strict=True)}
