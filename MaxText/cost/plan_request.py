"""Command line of plan.py."""

import dataclasses
import math
import re
from collections.abc import Sequence

from MaxText.errors import UserError

_WORD = re.compile(r"(hardware|tokens|price_per_chip_hour)=(.*)", re.DOTALL)
_NUMBER = re.compile(r"((?:\d[\d_]*\.?\d*|\.\d+)(?:e[+-]?\d+)?)([KMBT]?)", re.IGNORECASE)
_SUFFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_EXAMPLES = {"tokens": "300e9 or 300B", "price_per_chip_hour": "4.2"}


@dataclasses.dataclass(frozen=True)
class Request:
    hardware: str
    tokens: float | None  # None: those of the configuration's steps
    price: float | None  # per chip-hour in any currency, if given
    fit: bool  # search for a mesh, batch and remat policy that fit
    arguments: tuple[str, ...]  # rest of the command line


def read(arguments: Sequence[str]) -> Request:
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
            "hardware= is missing: add hardware=v5p-128, hardware=8xH100 or hardware=cpu."
        )
    return Request(
        words["hardware"],
        _number("tokens", words.get("tokens")),
        _number("price_per_chip_hour", words.get("price_per_chip_hour")),
        fit,
        tuple(rest),
    )


def _number(name: str, text: str | None) -> float | None:
    if text is None:
        return None
    match = _NUMBER.fullmatch(text.strip())
    number = float(match[1]) * _SUFFIXES[match[2].upper()] if match else math.nan
    if not 0 < number < math.inf:
        raise UserError(f"{name}={text}: no number above 0. Write for example {_EXAMPLES[name]}.")
    return number
