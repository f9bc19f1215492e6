"""Options of plan.py."""

import math
import re
from collections.abc import Mapping
from typing import Annotated

from MaxText.config.command_line import ProgramOptions
from MaxText.config.keys import Parser, key

_AMOUNT = re.compile(r"((?:\d[\d_]*\.?\d*|\.\d+)(?:e[+-]?\d+)?)([A-Za-z]?)", re.IGNORECASE)
COUNT_SUFFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def parse_amount(text: str, suffixes: Mapping[str, float] = COUNT_SUFFIXES) -> float:
    """Parses a positive number with a suffix, e.g. "300B".

    Raises ValueError for any other text.
    """
    match = _AMOUNT.fullmatch(text.strip())
    factor = suffixes.get(match[2], suffixes.get(match[2].upper())) if match else None
    amount = float(match[1]) * factor if match and factor else 0
    if not 0 < amount < math.inf:
        raise ValueError(f"{text!r} is not an amount above 0")
    return amount


Amount = Annotated[float | None, Parser(parse_amount, "a number such as 300e9 or 300B")]


class PlanOptions(ProgramOptions):
    """Options of plan.py."""

    REQUIRED = ("hardware",)

    hardware: str = key("", "v5p-128, v5e-16, 2xv5p-128 (two slices), 8xH100, h100-8, cpu.")
    tokens: Amount = key(None, "Tokens of the run, e.g. 300B; by default those of `steps` steps.")
    price_per_chip_hour: Amount = key(None, "Price of a TPU chip or a GPU, in any currency.")
    fit: bool = key(False, "Search for a mesh, microbatch size and remat policy that fit.")
