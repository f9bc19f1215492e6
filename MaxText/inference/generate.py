"""Batched completion of prompts, with streaming detokenization.

`generate` sorts prompts into batches, runs the engine until every sequence of a batch has ended,
and refills a full window with its newer half. Text is detokenized incrementally, to stream it and
to find stop strings.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from MaxText.errors import UserError
from MaxText.inference.engine import Engine

# New tokens that fit into the first decode states; more tokens grow them.
_INITIAL_NEW_TOKENS = 512

_INCOMPLETE = "\ufffd"  # decoded from an incomplete character
_LONGEST_CHARACTER = 8  # in tokens; a longer run is invalid, not incomplete
_PROMPT_CONTEXT = 16  # last prompt ids, decoded together with the first new one

Decode = Callable[[Sequence[int]], str]
OnText = Callable[[int, str], None]  # takes (prompt index, new text that can no longer change)

# end: an end id; stop: a stop string; length: max_new_tokens or a full window.
FinishReason = Literal["end", "stop", "length"]


@dataclasses.dataclass
class Completion:
    """The tokens generated for a prompt, and their text."""

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


def generate(  # noqa: PLR0913
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    stopping: StoppingCriteria,
    *,
    batch_size: int,
    decode: Decode,
    seed: int = 0,
    draw_ids: Sequence[tuple[int, int]] | None = None,
    on_text: OnText = lambda index, piece: None,
    timing: Timing | None = None,
) -> Iterator[tuple[int, Completion]]:
    """Yields (prompt index, completion), in order within each batch.

    Batches group prompts of similar length, longest first. Up to rounding, a completion depends
    only on its prompt, draw id and the seed, not on its batch.

    Args:
      engine: The model and its sampling settings.
      prompts: Token ids, at least one each.
      stopping: When a completion ends.
      batch_size: Rounded up to a multiple of engine.batch_divisor.
      decode: Converts ids to text.
      seed: Seed of all draws.
      draw_ids: Two non-negative numbers per prompt that seed its draws; default (index, 0).
      on_text: Called with the prompt index and new text as soon as that text is final.
      timing: Filled with the seconds of each prefill and decode step.

    Raises:
      UserError: Logits are not finite.
    """
    batch_size = -(-min(batch_size, len(prompts)) // engine.batch_divisor) * engine.batch_divisor
    order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
    for batch_start in range(0, len(order), batch_size):
        batch = []
        for index in sorted(order[batch_start : batch_start + batch_size]):
            prompt = prompts[index]
            context, max_new_tokens = _fit_window(prompt, stopping.max_new_tokens, engine.window)
            batch.append(
                _ActiveSequence(
                    prompt_index=index,
                    draw_id=(index, 0) if draw_ids is None else draw_ids[index],
                    completion=Completion(context, num_dropped=len(prompt) - len(context)),
                    max_new_tokens=max_new_tokens,
                    detokenizer=IncrementalDetokenizer(decode, stopping.stop_strings, prompt),
                    eos_ids=stopping.eos_ids,
                    on_text=on_text,
                )
            )
        _run(engine, batch, batch_size, seed, timing or Timing())
        for sequence in batch:
            yield sequence.prompt_index, sequence.completion


def _fit_window(prompt: Sequence[int], max_new_tokens: int, window: int) -> tuple[list[int], int]:
    """Returns the end of a prompt that fits the window, and the number of new tokens.

    A prompt that exceeds the window loses its beginning, with at most half of the window reserved
    for new tokens.

    Args:
      prompt: Ids of a prompt.
      max_new_tokens: The requested number; -1 fills the window.
      window: Tokens that the model can read.
    """
    num_free = window - len(prompt)
    half = window // 2
    if max_new_tokens == -1:
        max_new_tokens = num_free if num_free > 0 else half
    if num_free < 0:
        prompt = prompt[min(max_new_tokens, half) - window :]
    return list(prompt), max_new_tokens


class IncrementalDetokenizer:
    """Text of a sequence growing by a token at a time.

    A character may span several tokens, and a token may decode differently after another one, so
    the newest tokens are decoded together with preceding ones. A possible start of a stop string is
    held back.

    Attributes:
      text: All final text, without the stop string.
      stopped: Whether a stop string ended the text.
    """

    def __init__(self, decode: Decode, stops: Sequence[str] = (), prompt: Sequence[int] = ()):
        """Starts after a prompt.

        Args:
          decode: Converts ids to text.
          stops: Strings that end the text; empty ones are ignored.
          prompt: Ids before the first new one. Without them, a first word may lose its space.
        """
        self._decode = decode
        self._stops = [stop for stop in stops if stop]
        self._ids = list(prompt[-_PROMPT_CONTEXT:])
        # Ids from `_context_start` to `_num_decoded` have final text and are decoded again as
        # context of those after them.
        self._context_start = 0
        self._num_decoded = len(self._ids)
        self._held = ""  # decoded text that may be the start of a stop string
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
        """Decodes the newest ids and returns the text that became final.

        With `final`, no id follows: incomplete characters and held text become final, too.
        """
        context_text = self._decode(self._ids[self._context_start : self._num_decoded])
        text = self._decode(self._ids[self._context_start :])
        may_be_incomplete = len(self._ids) - self._num_decoded < _LONGEST_CHARACTER
        is_incomplete = text.endswith(_INCOMPLETE) and may_be_incomplete
        if not final and (is_incomplete or len(text) <= len(context_text)):
            return ""
        self._context_start = self._num_decoded
        self._num_decoded = len(self._ids)
        pending = self._held + text[len(context_text) :]
        stop_offsets = [pending.find(stop) for stop in self._stops if stop in pending]
        if stop_offsets:
            self.stopped = True
            final_text = pending[: min(stop_offsets)]
        elif final:
            final_text = pending
        else:
            final_text = pending[: len(pending) - self._num_held(pending)]
        self._held = pending[len(final_text) :]
        self.text += final_text
        return final_text

    def _num_held(self, pending: str) -> int:
        """Returns the length of the longest end of a text that may start a stop string."""
        num_held = 0
        for stop in self._stops:
            for size in range(1, len(stop)):
                if pending.endswith(stop[:size]):
                    num_held = max(num_held, size)
        return num_held


@dataclasses.dataclass
class _ActiveSequence:
    """A sequence in progress."""

    prompt_index: int
    draw_id: tuple[int, int]  # as of Engine.prefill
    completion: Completion
    max_new_tokens: int
    detokenizer: IncrementalDetokenizer
    eos_ids: frozenset[int]
    on_text: OnText
    num_dropped: int = 0  # leading ids of prompt and tokens that are no longer read

    @property
    def is_active(self) -> bool:
        """Whether tokens are still to be generated."""
        return self.completion.finish_reason is None

    def context(self, window: int) -> list[int]:
        """Returns the ids to prefill: all, or the newer half of a full window."""
        ids = self.completion.prompt + self.completion.tokens
        if len(ids) - self.num_dropped > window:
            self.num_dropped = len(ids) - window // 2
        return ids[self.num_dropped :]

    def append(self, token: int, log_probability: float) -> None:
        """Appends a sampled token, and ends the sequence if it is complete.

        Raises UserError if the log-probability is NaN, because logits were not finite.
        """
        if math.isnan(log_probability):
            raise UserError(
                "logits are not finite: the weights are corrupted or training diverged. Use an "
                "earlier checkpoint."
            )
        completion = self.completion
        detokenizer = self.detokenizer
        completion.tokens.append(token)
        completion.log_probabilities.append(log_probability)
        is_end = token in self.eos_ids
        is_full = len(completion.tokens) >= self.max_new_tokens
        new_text = "" if is_end else detokenizer.add(token)
        if is_end or is_full:
            completion.finish_reason = "end" if is_end else "length"
            new_text += detokenizer.finish()
        if detokenizer.stopped:
            completion.finish_reason = "stop"
        completion.text = detokenizer.text
        if new_text:
            self.on_text(self.prompt_index, new_text)


def _run(
    engine: Engine, batch: list[_ActiveSequence], batch_size: int, seed: int, timing: Timing
) -> None:
    """Generates until every sequence of a batch is complete.

    Each turn of the outer loop prefills the batch and decodes until the window of its longest
    sequence is full; the next turn continues with the newer half of the full windows.

    Args:
      engine: Runs the model.
      batch: At most `batch_size` sequences.
      batch_size: Sequences per compiled step; the batch is padded to it.
      seed: Seed of all draws.
      timing: Filled with the seconds of each prefill and decode step.
    """
    while active := [sequence for sequence in batch if sequence.is_active]:
        contexts = [
            sequence.context(engine.window) if sequence.is_active else [0] for sequence in batch
        ]
        num_padding = batch_size - len(batch)
        length = max(map(len, contexts)) + 1
        step_start = time.perf_counter()
        durations = timing.prompts
        max_new_tokens = max(sequence.max_new_tokens for sequence in active)
        state, output = engine.prefill(
            contexts + [[0]] * num_padding,
            [sequence.draw_id for sequence in batch] + [(0, 0)] * num_padding,
            [len(sequence.completion.tokens) for sequence in batch] + [0] * num_padding,
            seed=seed,
            expected_length=length + min(max_new_tokens, _INITIAL_NEW_TOKENS),
        )
        while active:
            # Dispatches the next step before reading the last one's tokens, to keep the devices
            # busy. Tokens after the end of a sequence are dropped.
            unread_output = output
            needs_step = any(
                len(sequence.completion.tokens) + 1 < sequence.max_new_tokens for sequence in active
            )
            has_room = length <= engine.window
            if needs_step and has_room:
                state = engine.ensure_cache_capacity(state, length)
                state, output = engine.step(state)
                length += 1
            tokens = unread_output.tokens_B.tolist()
            log_probabilities = unread_output.log_probabilities_B.tolist()
            # Not strict: the outputs include those of padding sequences.
            for sequence, token, log_probability in zip(
                batch, tokens, log_probabilities, strict=False
            ):
                if sequence.is_active:
                    sequence.append(token, log_probability)
            step_end = time.perf_counter()
            durations.append(step_end - step_start)
            step_start = step_end
            durations = timing.steps
            active = [sequence for sequence in active if sequence.is_active]
            if not has_room:
                break
