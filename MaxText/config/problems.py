"""Problems of a configuration, collected and reported together."""

import dataclasses
import difflib
from collections.abc import Iterable, Sequence

from MaxText.errors import UserError


@dataclasses.dataclass(frozen=True)
class Problem:
    what: str  # key and what is wrong with it, one sentence
    where: tuple[str, ...] = ()  # the places it was set, for example "command line: steps=x"
    # labeled lines that help to fix it: accepted values, nearest names, default
    facts: tuple[tuple[str, str], ...] = ()

    def lines(self) -> list[str]:
        """Returns the message, first line first."""
        labeled = [("set", place) for place in self.where] + list(self.facts)
        return [self.what, *(f"  {label + ':':<10}{text}" for label, text in labeled)]


class ConfigurationError(UserError):
    """All problems of a configuration in one message."""

    def __init__(self, problems: Sequence[Problem]):
        self.problems = tuple(problems)
        count = len(self.problems)
        lines = [f"{count} problem{'s' if count > 1 else ''} in the configuration"]
        for number, problem in enumerate(self.problems, start=1):
            first, *rest = problem.lines()
            lines += ["", f"{number:3}. {first}", *(f"     {line}" for line in rest)]
        super().__init__("\n".join(lines))


def close_matches(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """Returns the known names most like `name`, best first."""
    words = name.lower().replace("-", "_").replace(".", "_").strip("_")
    scores = []
    for candidate in known:
        plain = candidate.lower().replace("-", "_").replace(".", "_")
        spelling = difflib.SequenceMatcher(None, words, plain).ratio()
        order = difflib.SequenceMatcher(None, _sorted_words(words), _sorted_words(plain)).ratio()
        score = max(spelling, order)
        if score >= 0.6:
            scores.append((-score, candidate))
    return [candidate for _, candidate in sorted(scores)[:count]]


def close_matches_fact(
    name: str, known: Iterable[str], form: str = "{}"
) -> tuple[tuple[str, str], ...]:
    """Returns the nearest names as a fact of a problem, if any."""
    close = close_matches(name, known)
    return (("nearest", ", ".join(map(form.format, close))),) if close else ()


def _sorted_words(name: str) -> str:
    return "_".join(sorted(name.split("_")))
