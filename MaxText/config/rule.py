"""Rules about combinations of keys: the record of a rule, and the decorator that registers one.

A rule is a function of the whole configuration. It returns the issue that it found, or None. The
rules themselves are in model_rules.py, parametrization_rules.py and rules.py; checking.py applies
them and adds to each issue where its keys were set.

A rule is skipped if one of its keys already has a problem. Rules that need the number of devices
are checked where it is known.
"""

import dataclasses
from collections.abc import Callable

from MaxText.config.problems import ConfigIssue
from MaxText.config.schema import Config

RuleFunction = Callable[[Config], ConfigIssue | None]


@dataclasses.dataclass(frozen=True)
class ConfigRule:
    """A check for an impossible combination of keys, or for a key without effect.

    Attributes:
      keys: The keys that the rule reads and blames. Their order is that of the places shown for an
        issue that names no keys of its own.
      check: Returns the issue of a configuration, or None.
      programs: Scripts (without .py) for which the rule holds; empty is all.
      finds_unused: Whether the issue is a key without effect, which is an error under
        strict_config=true only.
    """

    keys: tuple[str, ...]
    check: RuleFunction
    programs: tuple[str, ...] = ()
    finds_unused: bool = False

    def applies_to(self, program: str | None) -> bool:
        """Returns whether the rule holds for a program, by its name without .py.

        None stands for what all programs share: the rules without `programs`.
        """
        return not self.programs or program in self.programs


# Every rule, in the order in which issues are reported.
RULES: list[ConfigRule] = []


def rule(
    *keys: str, programs: tuple[str, ...] = (), finds_unused: bool = False
) -> Callable[[RuleFunction], RuleFunction]:
    """Registers a function as a rule about `keys`; a decorator.

    Args:
      keys: As ConfigRule.keys.
      programs: As ConfigRule.programs.
      finds_unused: As ConfigRule.finds_unused.
    """

    def register(function: RuleFunction) -> RuleFunction:
        RULES.append(ConfigRule(keys, function, programs, finds_unused))
        return function

    return register
