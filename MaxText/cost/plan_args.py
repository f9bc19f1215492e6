"""Options of plan.py."""

import dataclasses
import math
import re
from collections.abc import Mapping

from MaxText.config.program_options import option

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


_AMOUNTS = "a number such as 300e9 or 300B"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of plan.py."""

    hardware: str = option(
        "", "v5p-128, v5e-16, 2xv5p-128 (two slices), 8xH100, h100-8, cpu.", required=True
    )
    tokens: float | None = option(
        None,
        "Tokens of the run, e.g. 300B; by default those of `steps` steps.",
        read=parse_amount,
        accepts=_AMOUNTS,
    )
    price_per_chip_hour: float | None = option(
        None,
        "Price of a TPU chip or a GPU, in any currency.",
        read=parse_amount,
        accepts=_AMOUNTS,
    )
    fit: bool = option(False, "Search for a mesh, microbatch size and remat policy that fit.")
