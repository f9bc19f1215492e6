"""Streaming detokenization with stop strings."""

from collections.abc import Callable, Sequence

_INCOMPLETE = "\ufffd"  # decoded from an incomplete character
_LONGEST_CHARACTER = 8  # in tokens; a longer run is invalid, not incomplete
_KNOWN_OF_PROMPT = 16  # prompt ids that give context to the first new one


class IncrementalDetokenizer:
    """Incremental detokenizer.

    A character may span several tokens, and a token may decode differently after another one, so
    the newest tokens are decoded together with preceding ones. A possible start of a stop string is
    held back. `text` is all final text without the stop string.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stops: Sequence[str] = (),
        prompt: Sequence[int] = (),
    ):
        """Starts after `prompt`: a first word may lose its space."""
        self._decode = decode
        self._stops = [stop for stop in stops if stop]
        self._ids = list(prompt[-_KNOWN_OF_PROMPT:])
        # Ids from `_first` to `_known` have final text and are decoded again as context.
        self._first, self._known = 0, len(self._ids)
        self._held = ""
        self.text = ""
        self.stopped = False

    def add(self, token: int) -> str:
        """Takes the next id and returns the new final text."""
        self._ids.append(token)
        return self._advance(final=False)

    def finish(self) -> str:
        """Returns the remaining text, including incomplete characters."""
        return "" if self.stopped else self._advance(final=True)

    def _advance(self, final: bool) -> str:
        known = self._decode(self._ids[self._first : self._known])
        both = self._decode(self._ids[self._first :])
        waits = len(self._ids) - self._known < _LONGEST_CHARACTER
        if not final and ((both.endswith(_INCOMPLETE) and waits) or len(both) <= len(known)):
            return ""
        self._first, self._known = self._known, len(self._ids)
        return self._show(both[len(known) :], final)

    def _show(self, new: str, final: bool) -> str:
        pending = self._held + new
        places = [place for stop in self._stops if (place := pending.find(stop)) >= 0]
        if places:
            self.stopped = True
            certain = pending[: min(places)]
        else:
            # The longest end of the text that may be the start of a stop string.
            starts = (stop[:size] for stop in self._stops for size in range(1, len(stop)))
            held = max((len(start) for start in starts if pending.endswith(start)), default=0)
            certain = pending if final else pending[: len(pending) - held]
        self._held = pending[len(certain) :]
        self.text += certain
        return certain
