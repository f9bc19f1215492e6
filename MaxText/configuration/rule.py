"""What a rule about a combination of keys is."""

from collections.abc import Callable
from typing import NamedTuple

from MaxText.configuration.schema import Config


class Rule(NamedTuple):
    """One impossible combination.

    Attributes:
      keys: the keys to blame; messages name the place each was set.
      check: gives what is wrong, or None; further lines say what to try instead.
      programs: scripts (without .py) for which the rule holds; empty is all.
    """

    keys: tuple[str, ...]
    check: Callable[[Config], str | None]
    programs: tuple[str, ...] = ()
