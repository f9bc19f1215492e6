"""Problems of a configuration, collected and reported together."""

import dataclasses
import difflib
from collections.abc import Iterable, Sequence

from MaxText.errors import UserError

_MIN_SIMILARITY = 0.6
_MAX_NAME = 200  # no key, value or file name of ours is as long


@dataclasses.dataclass(frozen=True)
class ConfigIssue:
    """One thing that is wrong with a configuration, and what helps to fix it.

    Attributes:
      message: The key and what is wrong with it, in one sentence.
      location: The places where the keys were set, for example "command line: steps=x".
      context: Further pairs (label, text) that help: accepted values, nearest names, the default.
        Pairs with an empty text are dropped.
      remedies: What to set instead, one alternative each.
      keys: The keys to blame, most important first. Of an issue that a rule finds they decide which
        places and defaults are shown; empty is all keys of the rule.
    """

    message: str
    location: tuple[str, ...] = ()
    context: Sequence[tuple[str, str]] = ()
    remedies: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "context", tuple(fact for fact in self.context if fact[1]))

    @property
    def facts(self) -> tuple[tuple[str, str], ...]:
        """Remedies and context as pairs (label, text), in the order in which they are printed."""
        return (*(("try", remedy) for remedy in self.remedies), *self.context)

    @property
    def text(self) -> str:
        """The message and below it the remedies, without labels."""
        return "\n".join((self.message, *self.remedies))

    def lines(self) -> list[str]:
        """Returns the lines that users read: the message, then what is labeled, indented."""
        labeled = [("set", place) for place in self.location] + list(self.facts)
        return [self.message, *(f"  {label + ':':<10}{text}" for label, text in labeled)]


class InvalidCombinationError(ValueError):
    """Keys that do not go together, found while something is derived from them.

    The rules report `issue` before a run starts. Code that derives the same from a configuration
    that no rule has checked gets the error, whose text has the remedies.
    """

    def __init__(self, issue: ConfigIssue):
        self.issue = issue
        super().__init__(issue.text)


class ConfigurationError(UserError):
    """All problems of a configuration, numbered, in one message."""

    def __init__(self, problems: Sequence[ConfigIssue]):
        self.problems = tuple(problems)
        count = len(self.problems)
        lines = [f"{count} problem{'s' if count > 1 else ''} in the configuration"]
        for number, problem in enumerate(self.problems, start=1):
            message, *details = problem.lines()
            lines += ["", f"{number:3}. {message}", *(f"     {line}" for line in details)]
        super().__init__("\n".join(lines))


def close_matches(name: str, known_names: Iterable[str], count: int = 3) -> list[str]:
    """Returns the names most like `name`, best first, or none.

    Words may be swapped: `rate_learning` is close to `learning_rate`. Case, dashes and dots do not
    count.

    Args:
      name: What a user typed.
      known_names: The names to choose from.
      count: The most names to return.
    """
    if len(name) > _MAX_NAME:
        return []
    name_forms = _comparable_forms(name.strip("-_."))
    scores = []
    for known_name in known_names:
        pairs = zip(name_forms, _comparable_forms(known_name), strict=True)
        matchers = (difflib.SequenceMatcher(None, *pair) for pair in pairs)
        # A bound first: most names are far from `name`.
        score = max(m.ratio() if m.quick_ratio() >= _MIN_SIMILARITY else 0.0 for m in matchers)
        if score >= _MIN_SIMILARITY:
            scores.append((-score, known_name))
    return [known_name for _, known_name in sorted(scores)[:count]]


def _comparable_forms(name: str) -> tuple[str, str]:
    """Returns a name in one spelling, as it is and with its words sorted."""
    spelled = name.lower().replace("-", "_").replace(".", "_")
    return spelled, "_".join(sorted(spelled.split("_")))


def nearest_fact(name: str, known_names: Iterable[str], form: str = "{}") -> tuple[str, str]:
    """Returns the pair of an issue's context with the names most like `name`, each in a form."""
    return "nearest", ", ".join(map(form.format, close_matches(name, known_names)))
