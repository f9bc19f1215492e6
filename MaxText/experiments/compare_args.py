"""Parses and checks the command line of compare.py, without jax.

Apart from the program's own arguments (OPTIONS) it consists of configuration files, and of
key=value arguments that apply to each of them.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from MaxText.config import values
from MaxText.config.catalog import all_keys
from MaxText.config.maxtext_keys import ALIASES
from MaxText.config.problems import Problem, close_matches
from MaxText.config.sources import ARGUMENT, YAML_PATH
from MaxText.cost.plan_args import parse_amount

Match = Literal["params", "flops", "tokens", "time"]
Launch = Literal["run", "print"]

OPTIONS = (
    "match", "seeds", "budget", "free", "tolerance", "launch", "output", "num_devices", "sweep",
)  # fmt: skip
# Keys that are set per run. A value for all runs would be silently overwritten.
SET_PER_RUN = {
    "data_shuffle_seed": "seeds=",
    "init_weights_seed": "seeds=",
    "metrics_file": "the folder of each run",
}
# Names of what to solve for, besides key names.
WIDTH, DEPTH, SLOTS, STEPS = "width", "depth", "slots", "steps"
_FREE_NAMES = (WIDTH, DEPTH, SLOTS, STEPS)
# Key of a name, if it differs.
KEY_OF = {WIDTH: "base_emb_dim", DEPTH: "base_num_decoder_layers", SLOTS: "slot_num"}

_TIME_SUFFIXES = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


@dataclasses.dataclass(frozen=True)
class CompareArgs:
    """A requested comparison."""

    configs: tuple[str, ...] = ()  # paths of configuration files as typed
    keys: tuple[str, ...] = ()  # key=value for every configuration
    match: Match = "params"
    seeds: tuple[int, ...] = (0,)
    budget: float | None = None  # None uses the first configuration; seconds for match=time
    free: tuple[str, ...] = ()  # one for all configurations or one each; empty for the default
    tolerance: float = 0.02  # largest relative deviation from the budget
    launch: Launch = "run"
    output: Path | None = None  # None names the folder after the configurations
    num_devices: int | None = None  # None counts those of this machine
    sweep: Any = None  # as config_files parses values


class _ArgumentError(Exception):
    """An invalid argument, with its problem."""

    def __init__(self, what: str, *facts: tuple[str, str]):
        super().__init__(what)
        self.problem = Problem(what, ("command line",), facts)


def default_free(match: Match) -> str:
    """Returns the default key to solve for."""
    return WIDTH if match == "params" else STEPS


def parse_args(arguments: Sequence[str]) -> tuple[CompareArgs, list[Problem]]:
    """Parses the command line.

    Returns the request and all problems in the program's own arguments. `variants.expand` checks
    the configurations.
    """
    configs, keys, problems = [], [], []
    texts: dict[str, str] = {}
    words = iter(arguments)
    for argument in words:
        match = ARGUMENT.fullmatch(argument)
        name, text = match.groups() if match else ("", "")
        dashed, _, value = argument.lstrip("-").partition("=")
        if argument.startswith("-") and dashed in OPTIONS:
            what = f"argument {argument!r}: write options without dashes"
            fact = ("write", f"{dashed}={value or next(words, 'VALUE')}")
            problems.append(Problem(what, ("command line",), (fact,)))
        elif name in OPTIONS:
            if texts.get(name, text) != text:
                problems.append(
                    Problem(f"{name}: given twice with different values", ("command line",))
                )
            texts[name] = text
        elif name == "stages":
            what = "stages: they belong to one configuration, so write them in its file"
            fact = ("write", "stages: [{steps: 100, slot_num: 64}, {...}] in a YAML file")
            problems.append(Problem(what, (f"command line, {argument}",), (fact,)))
        elif match and name in SET_PER_RUN:
            what = f"{name}: {SET_PER_RUN[name]} sets it for each run of a comparison"
            problems.append(Problem(what, (f"command line, {argument}",)))
        elif close := _suggest(name):
            fact = ("nearest", ", ".join(f"{word}=..." for word in close))
            what = f"{name}: neither an option of this program nor a key"
            problems.append(Problem(what, (f"command line, {argument}",), (fact,)))
        elif not match and YAML_PATH.fullmatch(argument):
            configs.append(argument)
        else:
            keys.append(argument)
    problems += _remote(arguments)

    found: dict[str, Any] = {}
    for name, read_word in _readers(texts.get("match", "")).items():
        if name in texts:
            try:
                found[name] = read_word(texts[name])
            except _ArgumentError as error:
                problems.append(error.problem)
    if found.get("match") == "time" and "num_devices" in found:
        what = "num_devices: match=time measures steps on this machine, not on another one"
        problems.append(Problem(what, ("command line",), (("instead", "run it there"),)))
    return CompareArgs(
        tuple(configs), tuple(keys), output=_output(texts.get("output", ""), keys), **found
    ), problems


def _suggest(name: str) -> list[str]:
    """Returns the nearest known words, if the first is one of this program."""
    keys = all_keys()
    if not name or name in keys or name in ALIASES:
        return []
    close = close_matches(name, [*OPTIONS, *keys])
    return close if close and close[0] in OPTIONS else []


def _readers(match: str) -> dict[str, Callable[[str], Any]]:
    return {
        "match": lambda text: _choice("match", text, get_args(Match)),
        "launch": lambda text: _choice("launch", text, get_args(Launch)),
        "seeds": _seeds,
        "budget": lambda text: _budget(text, match == "time"),
        "free": _free,
        "tolerance": _tolerance,
        "num_devices": lambda text: _whole("num_devices", text, least=1),
        "sweep": _sweep,
    }


def _output(text: str, keys: Sequence[str]) -> Path | None:
    """Returns the comparison's folder from output= or run_name."""
    typed = dict(word.split("=", 1) for word in keys if "=" in word)
    base, name = typed.get("base_output_directory", ""), typed.get("run_name", "")
    if text:
        folder = text
    elif name:
        folder = name if "/" in name and not base else f"{base or 'maxtext_output'}/{name}"
    else:
        return None
    return Path(folder).expanduser()


def _remote(words: Sequence[str]) -> list[Problem]:
    names = ("output", "base_output_directory", "run_name")
    return [
        Problem(
            f"{word.partition('=')[0]}: comparisons need a local folder",
            (f"command line, {word}",),
        )
        for word in words
        if word.partition("=")[0] in names and "://" in word
    ]


def _choice(name: str, text: str, choices: Sequence[str]) -> str:
    if text in choices:
        return text
    close = close_matches(text, choices)
    facts = [("accepted", ", ".join(choices))]
    facts += [("nearest", close[0])] if close else []
    raise _ArgumentError(f"{name}: {text!r} is not a valid choice", *facts)


def _whole(name: str, text: str, least: int) -> int:
    digits = text.strip().replace("_", "")
    if not (digits.isascii() and digits.isdigit()) or int(digits) < least:
        raise _ArgumentError(f"{name}: {text!r} is not a whole number, {least} or more")
    return int(digits)


def _items(text: str) -> list[str]:
    return [item.strip() for item in text.strip().removeprefix("[").removesuffix("]").split(",")]


def _seeds(text: str) -> tuple[int, ...]:
    """Parses seeds: `3` is 0, 1, 2; `[3]` and `4,7` are lists."""
    if "," not in text and not text.startswith("["):
        return tuple(range(_whole("seeds", text, least=1)))
    seeds = tuple(_whole("seeds", item, least=0) for item in _items(text))
    if len(set(seeds)) < len(seeds):
        raise _ArgumentError(f"seeds: {text!r} names a seed twice")
    return seeds


def _budget(text: str, is_time: bool) -> float:
    amount = parse_amount(text, _TIME_SUFFIXES) if is_time else parse_amount(text)
    if amount is None:
        examples = ("600", "10m", "1.5h") if is_time else ("1e15", "10M", "1.5B")
        example = ("write", " or ".join(f"budget={text}" for text in examples))
        raise _ArgumentError(f"budget: {text!r} is not an amount above 0", example)
    return amount


def _tolerance(text: str) -> float:
    try:
        tolerance = float(text)
    except ValueError:
        tolerance = math.nan
    if not 0 < tolerance < 1:
        raise _ArgumentError(f"tolerance: {text!r} is not a fraction between 0 and 1")
    return tolerance


def _free(text: str) -> tuple[str, ...]:
    names = tuple(_items(text))
    keys = all_keys()
    for name in names:
        if name in _FREE_NAMES:
            continue
        if name not in keys:
            close = close_matches(name, [*_FREE_NAMES, *keys])
            raise _ArgumentError(
                f"free: {name!r} is neither {', '.join(_FREE_NAMES)} nor a key",
                *([("nearest", ", ".join(close))] if close else []),
            )
        if keys[name].annotation is not int:
            kind = values.type_name(keys[name].annotation)
            raise _ArgumentError(f"free: {name} is not a whole number but {kind}")
    return names


def _sweep(text: str) -> Any:
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is None:
            raise values.InvalidValueError("is empty")
        return values.from_node(node)
    except (yaml.YAMLError, values.InvalidValueError) as error:
        reason = getattr(error, "problem", None) or str(error)
        raise _ArgumentError(
            f"sweep: {text!r} cannot be read: {reason}",
            ("write", "'sweep={position_embedding: [rotary, learned]}', in quotes"),
        ) from error
