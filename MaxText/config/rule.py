"""Rules about combinations of keys, one small function each.

A rule is skipped if one of its keys already has a problem. Rules that need the number of devices
are checked where it is known.
"""

import functools
import inspect
import operator
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from MaxText.config.schema import Config, all_keys

_OBJECTS = {"config": "", "model": "model", "dimensions": "model.shape.dimensions"}
_Check = TypeVar("_Check", bound=Callable[..., str | None])

RULES: list["ConfigCheck"] = []


class ConfigCheck(NamedTuple):
    """An impossible combination of keys, or one with an unused key."""

    keys: tuple[str, ...]  # the keys to blame; messages name the place each was set
    # gets arguments by name; gives what is wrong, or None. Further lines of the message say what to
    # try instead.
    function: Callable[..., str | None]
    arguments: tuple[str, ...]  # names of keys, or of _OBJECTS
    programs: tuple[str, ...]  # scripts (without .py) for which the rule holds; empty is all
    # whether it finds a key that does nothing, which is an error under strict_config only
    finds_unused: bool

    def check(self, config: Config) -> str | None:
        return self.function(**{name: _getter(name)(config) for name in self.arguments})


@functools.cache
def _getter(name: str) -> Callable[[Config], Any]:
    path = _OBJECTS[name] if name in _OBJECTS else ".".join((*all_keys()[name].section, name))
    return operator.attrgetter(path) if path else lambda config: config


def rule(*more: str, programs: str = "", finds_unused: bool = False) -> Callable[[_Check], _Check]:
    """Registers a function of keys to check, or of names of _OBJECTS.

    `more` are other keys to blame; a function that takes **keys gets their values as well.
    """

    def register(function: _Check) -> _Check:
        parameters = inspect.signature(function).parameters.values()
        arguments = tuple(one.name for one in parameters if one.kind is not one.VAR_KEYWORD)
        keys = (*(name for name in arguments if name not in _OBJECTS), *more)
        if len(arguments) < len(parameters):
            arguments += more
        RULES.append(ConfigCheck(keys, function, arguments, tuple(programs.split()), finds_unused))
        return function

    return register
