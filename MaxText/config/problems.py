"""Problems of a configuration, collected and reported together."""

import dataclasses
import difflib
from collections.abc import Iterable, Sequence

from MaxText.errors import UserError

_MIN_SIMILARITY = 0.6


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
    """Returns the known names most like `name`, best first."""
    words = _plain(name.strip("-_."))
    scores = []
    for candidate in known:
        plain = _plain(candidate)
        order = _similarity(_sorted_words(words), _sorted_words(plain))
        score = max(_similarity(words, plain), order)
        if score >= _MIN_SIMILARITY:
            scores.append((-score, candidate))
    return [candidate for _, candidate in sorted(scores)[:count]]


def _plain(name: str) -> str:
    return name.lower().replace("-", "_").replace(".", "_")


def _similarity(a: str, b: str) -> float:
    matcher = difflib.SequenceMatcher(None, a, b)
    for ratio in (matcher.real_quick_ratio, matcher.quick_ratio, matcher.ratio):
        if (found := ratio()) < _MIN_SIMILARITY:  # upper bounds first: they cost less
            return 0.0
    return found


def nearest_fact(name: str, known: Iterable[str], form: str = "{}") -> tuple[str, str]:
    return "nearest", ", ".join(map(form.format, close_matches(name, known)))


def _sorted_words(name: str) -> str:
    return "_".join(sorted(name.split("_")))
