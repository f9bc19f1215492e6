"""Batched completion of prompts."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from MaxText.errors import UserError
from MaxText.inference.engine import Drawn, Engine
from MaxText.inference.text_stream import TextStream

# New tokens that fit into the first decode states; more tokens grow them.
_FORESEEN = 512

# end: an end id; stop: a stop string; length: max_new_tokens or a full window.
FinishReason = Literal["end", "stop", "length"]


@dataclasses.dataclass
class Completion:
    """Completion of one prompt."""

    prompt: list[int]  # without the dropped ids
    num_dropped: int = 0  # leading ids that did not fit the window
    tokens: list[int] = dataclasses.field(default_factory=list)  # including an end id
    log_probabilities: list[float] = dataclasses.field(default_factory=list)  # nats, temperature 1
    finish_reason: FinishReason | None = None  # None while unfinished
    text: str = ""  # up to a stop string; empty without a detokenizer


@dataclasses.dataclass
class Timing:
    """Seconds per prefill (including compilation) and per decode step."""

    prompts: list[float] = dataclasses.field(default_factory=list)
    steps: list[float] = dataclasses.field(default_factory=list)


# Takes (prompt index, new text that can no longer change).
ShowPiece = Callable[[int, str], None]


@dataclasses.dataclass(frozen=True)
class Limits:
    """Stopping criteria.

    With max_new_tokens=-1 the window is filled. Generation past the window continues from the newer
    half of the tokens.
    """

    max_new_tokens: int = -1
    ends: frozenset[int] = frozenset()
    stops: tuple[str, ...] = ()  # strings that end a text; they require a detokenizer


def generate(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    limits: Limits,
    *,
    rows: int,
    seed: int = 0,
    names: Sequence[tuple[int, int]] | None = None,
    decode: Callable[[Sequence[int]], str] | None = None,
    show_piece: ShowPiece | None = None,
    timing: Timing | None = None,
) -> Iterator[tuple[int, Completion]]:
    """Yields (prompt index, completion), in order within each batch.

    Batches group prompts of similar length, longest first. Up to rounding, a completion depends
    only on its prompt, name and the seed, not on its batch. Raises UserError for non-finite logits.

    Args:
      rows: Batch size; rounded up to a multiple of engine.batch_divisor.
      names: Two non-negative numbers per prompt that seed its draws; default (index, 0).
      decode: Detokenizer for the text of completions.
    """
    assert decode is not None or not limits.stops, "stop strings need text"
    num_rows = -(-min(rows, len(prompts)) // engine.batch_divisor) * engine.batch_divisor
    order = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))
    for first in range(0, len(order), num_rows):
        batch = []
        for number in sorted(order[first : first + num_rows]):
            name = (number, 0) if names is None else names[number]
            stream = None
            if decode is not None:
                stream = TextStream(decode, limits.stops, prompts[number])
            kept, wanted = _fitting(prompts[number], limits.max_new_tokens, engine.window)
            completion = Completion(kept, len(prompts[number]) - len(kept))
            batch.append(_Row(number, name, completion, wanted, stream, limits.ends, show_piece))
        _run(engine, batch, num_rows, seed, timing or Timing())
        yield from ((row.number, row.completion) for row in batch)


def _fitting(prompt: Sequence[int], max_new_tokens: int, window: int) -> tuple[list[int], int]:
    """Returns the ids of a prompt to read and the number of new tokens."""
    room = window - len(prompt)
    if max_new_tokens == -1:
        max_new_tokens = room if room > 0 else window // 2
    if len(prompt) <= window:
        return list(prompt), max_new_tokens
    # Keeps the end of a long prompt and reserves at most half of the window for new tokens.
    return list(prompt[min(max_new_tokens, window // 2) - window :]), max_new_tokens


@dataclasses.dataclass
class _Row:
    """A sequence in progress; `dropped` counts leading ids no longer read."""

    number: int
    name: tuple[int, int]
    completion: Completion
    wanted: int
    stream: TextStream | None
    ends: frozenset[int]
    show_piece: ShowPiece | None
    dropped: int = 0

    @property
    def goes_on(self) -> bool:
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
                "the model gives numbers that are not finite, so no token can be chosen: the "
                "weights are damaged, or their training diverged. Take an earlier checkpoint."
            )
        completion = self.completion
        completion.tokens.append(token)
        completion.log_probabilities.append(log_probability)
        if token in self.ends:
            completion.finish_reason = "end"
        elif self.stream is not None:
            self._show(self.stream.add(token))
            if self.stream.stopped:
                completion.finish_reason = "stop"
        if completion.finish_reason is None and len(completion.tokens) >= self.wanted:
            completion.finish_reason = "length"
        if completion.finish_reason is not None and self.stream is not None:
            self._show(self.stream.finish())
            completion.text = self.stream.text
            if self.stream.stopped:
                completion.finish_reason = "stop"  # found in the text that was held back

    def _show(self, piece: str) -> None:
        if piece and self.show_piece is not None:
            self.show_piece(self.number, piece)


def _run(engine: Engine, batch: list[_Row], num_rows: int, seed: int, timing: Timing) -> None:
    while going := [row for row in batch if row.goes_on]:
        contexts = [row.context(engine.window) if row.goes_on else [0] for row in batch]
        filling = num_rows - len(batch)
        length = max(map(len, contexts)) + 1
        began, seconds = time.perf_counter(), timing.prompts
        sequences, drawn = engine.start(
            contexts + [[0]] * filling,
            [row.name for row in batch] + [(0, 0)] * filling,
            [len(row.completion.tokens) for row in batch] + [0] * filling,
            seed=seed,
            room=length + min(max(row.wanted for row in going), _FORESEEN),
        )
        while going:
            # Dispatches the next step before reading the last one's tokens, to keep the devices
            # busy. Tokens after the end of a sequence are dropped.
            newest = drawn.on_host
            more = any(len(row.completion.tokens) + 1 < row.wanted for row in going)
            room = length <= engine.window
            if more and room:
                sequences = engine.with_room(sequences, length)
                sequences, drawn = engine.step(sequences)
                length += 1
            _take(batch, newest())
            now = time.perf_counter()
            seconds.append(now - began)
            began, seconds = now, timing.steps
            going = [row for row in going if row.goes_on]
            if not room:
                break


def _take(batch: list[_Row], drawn: Drawn) -> None:
    for row, token, log_probability in zip(
        batch, drawn.tokens_B.tolist(), drawn.log_probabilities_B.tolist(), strict=False
    ):
        if row.goes_on:
            row.take(token, log_probability)
