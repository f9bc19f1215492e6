"""Batched completion of prompts, with streaming detokenization."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from MaxText.errors import UserError
from MaxText.inference.engine import Engine

# New tokens that fit into the first decode states; more tokens grow them.
_FORESEEN = 512

_INCOMPLETE = "\ufffd"  # decoded from an incomplete character
_LONGEST_CHARACTER = 8  # in tokens; a longer run is invalid, not incomplete
_KNOWN_OF_PROMPT = 16  # prompt ids that give context to the first new one

Decode = Callable[[Sequence[int]], str]
OnText = Callable[[int, str], None]  # takes (prompt index, new text that can no longer change)

# end: an end id; stop: a stop string; length: max_new_tokens or a full window.
FinishReason = Literal["end", "stop", "length"]


@dataclasses.dataclass
class Completion:
    prompt: list[int]  # without the dropped ids
    num_dropped: int = 0  # leading ids that did not fit the window
    tokens: list[int] = dataclasses.field(default_factory=list)  # including an end id
    log_probabilities: list[float] = dataclasses.field(default_factory=list)  # nats, temperature 1
    finish_reason: FinishReason | None = None  # None while unfinished
    text: str = ""  # up to a stop string


@dataclasses.dataclass
class Timing:
    """Seconds per prefill (including compilation) and per decode step."""

    prompts: list[float] = dataclasses.field(default_factory=list)
    steps: list[float] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class StoppingCriteria:
    """End of a text. Past the window, generation continues its newer half."""

    max_new_tokens: int = -1  # -1 fills the window
    eos_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()  # strings that end a text


def generate(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    stopping: StoppingCriteria,
    *,
    batch_size: int,
    decode: Decode,
    seed: int = 0,
    names: Sequence[tuple[int, int]] | None = None,
    on_text: OnText = lambda number, piece: None,
    timing: Timing | None = None,
) -> Iterator[tuple[int, Completion]]:
    """Yields (prompt index, completion), in order within each batch.

    Batches group prompts of similar length, longest first. Up to rounding, a completion depends
    only on its prompt, name and the seed, not on its batch. Raises UserError for non-finite logits.

    Args:
      batch_size: Rounded up to a multiple of engine.batch_divisor.
      names: Two non-negative numbers per prompt that seed its draws; default (index, 0).
    """
    batch_size = -(-min(batch_size, len(prompts)) // engine.batch_divisor) * engine.batch_divisor
    order = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))
    for first in range(0, len(order), batch_size):
        batch = []
        for number in sorted(order[first : first + batch_size]):
            prompt = prompts[number]
            wanted = stopping.max_new_tokens
            room = engine.window - len(prompt)
            half = engine.window // 2
            if wanted == -1:
                wanted = room if room > 0 else half
            # Of a long prompt the end, with at most half of the window reserved for new tokens.
            kept = prompt if room >= 0 else prompt[min(wanted, half) - engine.window :]
            batch.append(
                _ActiveSequence(
                    number,
                    (number, 0) if names is None else names[number],
                    Completion(list(kept), len(prompt) - len(kept)),
                    wanted,
                    IncrementalDetokenizer(decode, stopping.stop_strings, prompt),
                    stopping.eos_ids,
                    on_text,
                )
            )
        _run(engine, batch, batch_size, seed, timing or Timing())
        yield from ((row.number, row.completion) for row in batch)


class IncrementalDetokenizer:
    """Text of a sequence growing by a token at a time.

    A character may span several tokens, and a token may decode differently after another one, so
    the newest tokens are decoded together with preceding ones. A possible start of a stop string is
    held back. `text` is all final text without the stop string.
    """

    def __init__(self, decode: Decode, stops: Sequence[str] = (), prompt: Sequence[int] = ()):
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
        pending = self._held + both[len(known) :]
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


@dataclasses.dataclass
class _ActiveSequence:
    """A sequence in progress; `dropped` counts leading ids no longer read."""

    number: int
    name: tuple[int, int]
    completion: Completion
    wanted: int
    stream: IncrementalDetokenizer
    eos_ids: frozenset[int]
    on_text: OnText
    dropped: int = 0

    @property
    def is_active(self) -> bool:
        return self.completion.finish_reason is None

    def context(self, window: int) -> list[int]:
        """Returns the ids to prefill: all, or the newer half of a full window."""
        ids = self.completion.prompt + self.completion.tokens
        if len(ids) - self.dropped > window:
            self.dropped = len(ids) - window // 2
        return ids[self.dropped :]

    def take(self, token: int, log_probability: float) -> None:
        if math.isnan(log_probability):
            raise UserError(
                "logits are not finite: the weights are corrupted or training diverged. Use an "
                "earlier checkpoint."
            )
        completion = self.completion
        stream = self.stream
        completion.tokens.append(token)
        completion.log_probabilities.append(log_probability)
        is_end = token in self.eos_ids
        is_full = len(completion.tokens) >= self.wanted
        piece = "" if is_end else stream.add(token)
        if is_end or is_full:
            completion.finish_reason = "end" if is_end else "length"
            piece += stream.finish()
        if stream.stopped:
            completion.finish_reason = "stop"
        completion.text = stream.text
        if piece:
            self.on_text(self.number, piece)


def _run(
    engine: Engine, batch: list[_ActiveSequence], batch_size: int, seed: int, timing: Timing
) -> None:
    while active := [row for row in batch if row.is_active]:
        contexts = [row.context(engine.window) if row.is_active else [0] for row in batch]
        padding = batch_size - len(batch)
        length = max(map(len, contexts)) + 1
        began = time.perf_counter()
        seconds = timing.prompts
        state, output = engine.prefill(
            contexts + [[0]] * padding,
            [row.name for row in batch] + [(0, 0)] * padding,
            [len(row.completion.tokens) for row in batch] + [0] * padding,
            seed=seed,
            room=length + min(max(row.wanted for row in active), _FORESEEN),
        )
        while active:
            # Dispatches the next step before reading the last one's tokens, to keep the devices
            # busy. Tokens after the end of a sequence are dropped.
            newest = output
            more = any(len(row.completion.tokens) + 1 < row.wanted for row in active)
            room = length <= engine.window
            if more and room:
                state = engine.ensure_cache_capacity(state, length)
                state, output = engine.step(state)
                length += 1
            drawn = (array.tolist() for array in newest)
            for row, token, log_probability in zip(batch, *drawn, strict=False):
                if row.is_active:
                    row.take(token, log_probability)
            now = time.perf_counter()
            seconds.append(now - began)
            began = now
            seconds = timing.steps
            active = [row for row in active if row.is_active]
            if not room:
                break
