"""Command line of plan.py."""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

from MaxText.errors import UserError

_WORD = re.compile(r"(hardware|tokens|price_per_chip_hour)=(.*)", re.DOTALL)
_AMOUNT = re.compile(r"((?:\d[\d_]*\.?\d*|\.\d+)(?:e[+-]?\d+)?)([A-Za-z]?)", re.IGNORECASE)
COUNT_SUFFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_EXAMPLES = {"tokens": "300e9 or 300B", "price_per_chip_hour": "4.2"}


@dataclasses.dataclass(frozen=True)
class PlanArgs:
    hardware: str
    tokens: float | None  # None: those of the configuration's steps
    price: float | None  # per chip-hour in any currency, if given
    fit: bool  # search for a mesh, batch and remat policy that fit
    arguments: tuple[str, ...]  # rest of the command line


def parse_args(arguments: Sequence[str]) -> PlanArgs:
    words: dict[str, str] = {}
    rest, fit = [], False
    for argument in arguments:
        match = _WORD.fullmatch(argument)
        if match:
            words[match[1]] = match[2]
        elif argument == "--fit":
            fit = True
        else:
            rest.append(argument)
    if "hardware" not in words:
        raise UserError(
            "hardware= is missing. Add hardware=v5p-128, hardware=8xH100 or hardware=cpu."
        )
    return PlanArgs(
        words["hardware"],
        _number("tokens", words.get("tokens")),
        _number("price_per_chip_hour", words.get("price_per_chip_hour")),
        fit,
        tuple(rest),
    )


def _number(name: str, text: str | None) -> float | None:
    if text is None:
        return None
    number = parse_amount(text)
    if number is None:
        raise UserError(
            f"{name}={text}: not a number above 0. Write for example {_EXAMPLES[name]}."
        )
    return number


def parse_amount(text: str, suffixes: Mapping[str, float] = COUNT_SUFFIXES) -> float | None:
    """Parses a positive number with a suffix, e.g. "300B"; None if it is not one."""
    match = _AMOUNT.fullmatch(text.strip())
    factor = suffixes.get(match[2], suffixes.get(match[2].upper())) if match else None
    if match is None or factor is None:
        return None
    amount = float(match[1]) * factor
    return amount if 0 < amount < math.inf else None
