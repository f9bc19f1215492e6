"""Batched completion of prompts."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from MaxText.errors import UserError
from MaxText.inference.detokenizer import IncrementalDetokenizer
from MaxText.inference.engine import Engine

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
OnText = Callable[[int, str], None]


@dataclasses.dataclass(frozen=True)
class StoppingCriteria:
    """Stopping criteria.

    With max_new_tokens=-1 the window is filled. Generation past the window continues from the newer
    half of the tokens.
    """

    max_new_tokens: int = -1
    eos_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()  # strings that end a text; they require a detokenizer


def generate(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    stopping: StoppingCriteria,
    *,
    batch_size: int,
    seed: int = 0,
    names: Sequence[tuple[int, int]] | None = None,
    decode: Callable[[Sequence[int]], str] | None = None,
    on_text: OnText | None = None,
    timing: Timing | None = None,
) -> Iterator[tuple[int, Completion]]:
    """Yields (prompt index, completion), in order within each batch.

    Batches group prompts of similar length, longest first. Up to rounding, a completion depends
    only on its prompt, name and the seed, not on its batch. Raises UserError for non-finite logits.

    Args:
      batch_size: Rounded up to a multiple of engine.batch_divisor.
      names: Two non-negative numbers per prompt that seed its draws; default (index, 0).
      decode: Detokenizer for the text of completions.
    """
    if decode is None and stopping.stop_strings:
        raise ValueError(f"stop_strings={stopping.stop_strings} need a detokenizer: pass decode")
    batch_size = -(-min(batch_size, len(prompts)) // engine.batch_divisor) * engine.batch_divisor
    order = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))
    for first in range(0, len(order), batch_size):
        batch = []
        for number in sorted(order[first : first + batch_size]):
            name = (number, 0) if names is None else names[number]
            stream = None
            if decode is not None:
                stream = IncrementalDetokenizer(decode, stopping.stop_strings, prompts[number])
            kept, wanted = _fitting(prompts[number], stopping.max_new_tokens, engine.window)
            completion = Completion(kept, len(prompts[number]) - len(kept))
            batch.append(
                _ActiveSequence(number, name, completion, wanted, stream, stopping.eos_ids, on_text)
            )
        _run(engine, batch, batch_size, seed, timing or Timing())
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
class _ActiveSequence:
    """A sequence in progress; `dropped` counts leading ids no longer read."""

    number: int
    name: tuple[int, int]
    completion: Completion
    wanted: int
    stream: IncrementalDetokenizer | None
    eos_ids: frozenset[int]
    on_text: OnText | None
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
        completion.tokens.append(token)
        completion.log_probabilities.append(log_probability)
        if token in self.eos_ids:
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
        if piece and self.on_text is not None:
            self.on_text(self.number, piece)


def _run(
    engine: Engine, batch: list[_ActiveSequence], batch_size: int, seed: int, timing: Timing
) -> None:
    while active := [row for row in batch if row.is_active]:
        contexts = [row.context(engine.window) if row.is_active else [0] for row in batch]
        padding = batch_size - len(batch)
        length = max(map(len, contexts)) + 1
        began, seconds = time.perf_counter(), timing.prompts
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
            newest = output.on_host
            more = any(len(row.completion.tokens) + 1 < row.wanted for row in active)
            room = length <= engine.window
            if more and room:
                state = engine.ensure_cache_capacity(state, length)
                state, output = engine.step(state)
                length += 1
            tokens = newest()
            for row, token, log_probability in zip(
                batch, tokens.tokens_B.tolist(), tokens.log_probabilities_B.tolist(), strict=False
            ):
                if row.is_active:
                    row.take(token, log_probability)
            now = time.perf_counter()
            seconds.append(now - began)
            began, seconds = now, timing.steps
            active = [row for row in active if row.is_active]
            if not room:
                break
