"""Inputs of the scorer: continuations, and texts with hidden tokens.

Pseudo-log-likelihood sums log p(token | rest of the text) over the tokens, each hidden in turn
(Salazar et al. 2020, arXiv 1910.14659). It overestimates words of several tokens, because
neighboring tokens reveal the hidden one. Word scores therefore hide each token together with the
following ones (PLL-word-l2r, Kauf and Ivanova 2023, arXiv 2305.10588); by the chain rule, the sum
is the log-probability of the word.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from MaxText.config.schema import Config
from MaxText.errors import UserError
from MaxText.inference.model_tokenizer import ModelTokenizer

Progress = Callable[[int, int], None]  # (done, total)


class Continuation(NamedTuple):
    """Ids to score after a context. Both hold at least one id."""

    context: Sequence[int]
    ids: Sequence[int]


class ScoreRequest(NamedTuple):
    """One model input and the positions to score."""

    ids: np.ndarray  # int32 [T], without CLS and unmasked
    positions: list[int]  # in `ids`
    targets: list[int]  # the id to score at each position
    hidden: Sequence[int] = ()  # positions in `ids` that the mask id replaces


class MaskIds(NamedTuple):
    """Ids added to a text by masked language modeling."""

    mask: int
    cls: int | None  # begins every row; None if the model was trained without it


def rolling_windows(ids: Sequence[int], prefix: int, window: int) -> list[Continuation]:
    """Splits a text into continuations with each id exactly once.

    Windows are disjoint, except that the last one is moved left until it is full and scores only
    the remaining ids. The first id follows `prefix`. Same as loglikelihood_rolling of
    lm-evaluation-harness.
    """
    found = []
    for start in range(0, len(ids), window):
        end = min(start + window, len(ids))
        context = ids[max(0, end - window - 1) : start] if start else [prefix]
        found.append(Continuation(context, ids[start:end]))
    return found


def mask_ids(config: Config, tokenizer: ModelTokenizer) -> MaskIds:
    """Returns mlm.mask_id, or else the tokenizer's mask, and mlm.cls_token_id.

    Raises UserError if there is no mask, or an id exceeds the model's vocabulary.
    """
    masking, vocab_size = config.masking, config.model.shape.vocab_size
    mask, cls = masking.mlm.mask_id, masking.mlm.cls_token_id
    if mask < 0:
        of_tokenizer = tokenizer.tokenizer.entry.mask_id
        if of_tokenizer is None:
            raise UserError(
                "mlm.mask_id=-1 uses the mask token of the tokenizer, and that of "
                f"{tokenizer.folder} has none ([MASK] or <mask>). Set mlm.mask_id to the mask id "
                "that the model was trained with."
            )
        mask = of_tokenizer
    for key, name, i in (("mlm.mask_id", "mask", mask), ("mlm.cls_token_id", "CLS", cls)):
        if i >= vocab_size:
            raise UserError(
                f"the {name} id is {i}, but the model has vocab_size={vocab_size}. Set {key} to "
                "the id that the model was trained with."
            )
    return MaskIds(mask, cls if cls >= 0 else None)


def strip_cls_prefix(tokenizer: ModelTokenizer, cls: int | None) -> ModelTokenizer:
    """Removes CLS from the tokenizer's prefix, for texts with their own."""
    if cls is None or tokenizer.prefix[:1] != (cls,):
        return tokenizer
    return dataclasses.replace(tokenizer, prefix=tokenizer.prefix[1:])


def hide(ids: np.ndarray, hidden: Sequence[int]) -> ScoreRequest:
    """Returns the request to score tokens at ascending positions `hidden`."""
    positions = list(hidden)
    return ScoreRequest(ids, positions, ids[positions].tolist(), hidden)


def mask_word_left_to_right(ids: Sequence[int], start: int) -> Iterator[ScoreRequest]:
    """Hides the word from `start` on, then all but its first token, and so on.

    The word's log-probability is the sum over the first hidden token of each.
    """
    array = np.array(ids, np.int32)
    for place in range(start, len(ids)):
        yield hide(array, range(place, len(ids)))


def mask_each_token(ids: Sequence[int], start: int, window: int) -> Iterator[ScoreRequest]:
    """Hides each token from `start` on once, alone, in a text of any length.

    Windows of `window` tokens are disjoint, except that the last one is moved left until it is full
    and hides only the remaining tokens.
    """
    for begin in range(0, len(ids), window):
        end = min(begin + window, len(ids))
        left = max(0, end - window)
        array = np.array(ids[left:end], np.int32)
        for place in range(max(begin, start), end):
            yield hide(array, (place - left,))
