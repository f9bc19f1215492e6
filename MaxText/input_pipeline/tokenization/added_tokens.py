"""Tokens that a tokenizer.json adds beside its vocabulary, found in a text as Hugging Face does.

Imports no jax.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Set


class AddedTokenFinder:
    """Cuts the added tokens out of a text: leftmost first, of several the longest.

    Control tokens take part in the search and stay text. So one that is written in a text hides
    what overlaps it: with the control token `<|x|>` and the added token `>y`, `<|x|>y` has no `>y`.
    """

    def __init__(self, ids: Mapping[str, int], control: Set[str]):
        """`ids`: spelling -> id of all of them, without empty ones; `control`: those that stay."""
        self._ids = dict(ids)
        self._control = frozenset(control)
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)))
        self._first_characters = {token[0] for token in self._ids}

    def split(self, text: str) -> Iterator[str | int]:
        """Ids of added tokens and the texts between them, none of which is empty."""
        start = 0
        # Looking for one character is many times faster than the pattern.
        if any(character in text for character in self._first_characters):
            for match in self._pattern.finditer(text):
                token = match.group()
                if token in self._control:
                    continue
                if start < match.start():
                    yield text[start : match.start()]
                yield self._ids[token]
                start = match.end()
        if start < len(text):
            yield text[start:]


def finder_of(ids: Mapping[str, int], control: Set[str]) -> AddedTokenFinder | None:
    """The finder of these tokens; None when all of them are control tokens or there are none."""
    return AddedTokenFinder(ids, control) if set(ids) - control else None


def longest_run_of_spaces(tokens: Iterable[str], control: Set[str]) -> int:
    """The longest run when the added tokens with spaces are just the runs of 2, 3, ... spaces.

    Returns:
      0 when there are none, or others with spaces.
    """
    with_spaces = {token for token in tokens if " " in token}
    lengths = sorted(map(len, with_spaces))
    runs = all(token.strip(" ") == "" for token in with_spaces)
    if not runs or with_spaces & control or lengths != list(range(2, len(lengths) + 2)):
        return 0
    return lengths[-1] if lengths else 0
