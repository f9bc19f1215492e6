"""Problems of a configuration, collected and reported together."""

import dataclasses
import difflib
from collections.abc import Iterable, Sequence

from MaxText.errors import UserError

_MIN_SIMILARITY = 0.6
_MAX_NAME = 200  # no key, value or file name of ours is as long


@dataclasses.dataclass(frozen=True)
class ConfigIssue:
    message: str  # key and what is wrong with it, one sentence
    location: tuple[str, ...] = ()  # the places it was set, for example "command line: steps=x"
    # labeled lines that help to fix it: accepted values, nearest names, default; not empty ones
    context: Sequence[tuple[str, str]] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "context", tuple(fact for fact in self.context if fact[1]))

    def lines(self) -> list[str]:
        labeled = [("set", place) for place in self.location] + list(self.context)
        return [self.message, *(f"  {label + ':':<10}{text}" for label, text in labeled)]


class ConfigurationError(UserError):
    """All problems of a configuration in one message."""

    def __init__(self, problems: Sequence[ConfigIssue]):
        self.problems = tuple(problems)
        count = len(self.problems)
        lines = [f"{count} problem{'s' if count > 1 else ''} in the configuration"]
        for number, problem in enumerate(self.problems, start=1):
            first, *rest = problem.lines()
            lines += ["", f"{number:3}. {first}", *(f"     {line}" for line in rest)]
        super().__init__("\n".join(lines))


def close_matches(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """Returns the names most like `name`, best first; words may be swapped."""
    if len(name) > _MAX_NAME:
        return []
    wanted = _forms(name.strip("-_."))
    scores = []
    for candidate in known:
        pairs = zip(wanted, _forms(candidate), strict=True)
        matchers = (difflib.SequenceMatcher(None, *pair) for pair in pairs)
        # A bound first: most names are far from `name`.
        score = max(m.ratio() if m.quick_ratio() >= _MIN_SIMILARITY else 0.0 for m in matchers)
        if score >= _MIN_SIMILARITY:
            scores.append((-score, candidate))
    return [candidate for _, candidate in sorted(scores)[:count]]


def _forms(name: str) -> tuple[str, str]:
    plain = name.lower().replace("-", "_").replace(".", "_")
    return plain, "_".join(sorted(plain.split("_")))


def nearest_fact(name: str, known: Iterable[str], form: str = "{}") -> tuple[str, str]:
    return "nearest", ", ".join(map(form.format, close_matches(name, known)))
