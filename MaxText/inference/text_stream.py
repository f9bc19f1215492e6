"""Streaming detokenization with stop strings."""

from collections.abc import Callable, Sequence

_INCOMPLETE = "\ufffd"  # what a decoder makes of the first bytes of a character
_LONGEST_CHARACTER = 8  # tokens; more of them are no character that is still to be completed
_KNOWN_OF_PROMPT = 16  # ids of the prompt that say how the first new one is written


class TextStream:
    """The text of a growing list of ids.

    A character may take several tokens, and a tokenizer may write a token differently after
    another, so the newest tokens are decoded together with those before them. The possible
    beginning of a stop string is held back.

    Attributes:
      text: Everything certain, without the stop string.
      stopped: Whether a stop string has come.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stops: Sequence[str] = (),
        prompt: Sequence[int] = (),
    ):
        """Starts an empty text after a prompt.

        A tokenizer may drop the space of what it takes for the first word, hence the prompt.
        """
        self._decode = decode
        self._stops = [stop for stop in stops if stop]
        self._ids = list(prompt[-_KNOWN_OF_PROMPT:])
        # Ids from `_first` to `_known` are decoded again with each new one: their text is known.
        self._first, self._known = 0, len(self._ids)
        self._held = ""
        self.text = ""
        self.stopped = False

    def add(self, token: int) -> str:
        """Takes the next id; returns the newly certain text."""
        self._ids.append(token)
        known = self._decode(self._ids[self._first : self._known])
        both = self._decode(self._ids[self._first :])
        waits = len(self._ids) - self._known < _LONGEST_CHARACTER
        if (both.endswith(_INCOMPLETE) and waits) or len(both) <= len(known):
            return ""
        self._first, self._known = self._known, len(self._ids)
        return self._show(both[len(known) :], final=False)

    def finish(self) -> str:
        """Returns the rest, incomplete characters included."""
        if self.stopped:
            return ""
        known = self._decode(self._ids[self._first : self._known])
        both = self._decode(self._ids[self._first :])
        self._first = self._known = len(self._ids)
        return self._show(both[len(known) :], final=True)

    def _show(self, new: str, final: bool) -> str:
        pending = self._held + new
        places = [place for stop in self._stops if (place := pending.find(stop)) >= 0]
        if places:
            self.stopped = True
            certain = pending[: min(places)]
        else:
            certain = pending if final else pending[: len(pending) - self._overlap(pending)]
        self._held = pending[len(certain) :]
        self.text += certain
        return certain

    def _overlap(self, text: str) -> int:
        """Returns the number of trailing characters that may begin a stop string."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return size
        return 0
