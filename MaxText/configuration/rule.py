"""What a rule about a combination of keys is."""

from collections.abc import Callable
from typing import NamedTuple

from MaxText.configuration.schema import Config


class Rule(NamedTuple):
    """One impossible combination, or one in which a key does nothing.

    Attributes:
      keys: the keys to blame; messages name the place each was set.
      check: gives what is wrong, or None; further lines say what to try instead.
      programs: scripts (without .py) for which the rule holds; empty is all.
      is_idle: whether it finds a key that does nothing, which is an error under strict_config only.
    """

    keys: tuple[str, ...]
    check: Callable[[Config], str | None]
    programs: tuple[str, ...] = ()
    is_idle: bool = False
