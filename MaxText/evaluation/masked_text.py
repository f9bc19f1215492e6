"""Texts with hidden tokens, for models that were trained to fill them in. Imports no jax.

The pseudo-log-likelihood of a text is the sum over its tokens of log p(token | the rest of the
text), each token hidden in its turn (Salazar et al. 2020, arXiv 1910.14659). Of a word of several
tokens it promises too much, because the tokens beside the hidden one give it away. Where a word is
asked for, each of its tokens is therefore hidden together with those after it (Kauf and Ivanova
2023, arXiv 2305.10588: PLL-word-l2r); the sum is its log-probability by the chain rule.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from MaxText.config.schema import Config
from MaxText.errors import UserError
from MaxText.inference.model_tokenizer import ModelTokenizer


class MaskIds(NamedTuple):
    """The ids that masked language modelling puts beside those of texts.

    Attributes:
      mask: stands where a token is hidden.
      cls: begins every row; None where the model was trained without.
    """

    mask: int
    cls: int | None


class Masked(NamedTuple):
    """A part of a text with hidden tokens.

    Attributes:
      ids: int32 [T], as they are; several of these share one array.
      hidden: places in `ids`, at least one, in their order.
    """

    ids: np.ndarray
    hidden: Sequence[int]


def mask_ids(config: Config, tokenizer: ModelTokenizer) -> MaskIds:
    """By mlm_mask_id, else by the tokenizer; and by mlm_cls_token_id.

    Raises:
      UserError: neither names a mask, or the model has no row for one of the two.
    """
    masking, vocab_size = config.masking, config.model.shape.vocab_size
    mask = masking.mlm_mask_id
    if mask < 0:
        of_tokenizer = tokenizer.tokenizer.entry.mask_id
        if of_tokenizer is None:
            raise UserError(
                "mlm_mask_id=-1 takes the mask of the tokenizer, and that of "
                f"{tokenizer.folder} has none ([MASK] or <mask>). Set mlm_mask_id to the id that "
                "hid tokens when the model was trained."
            )
        mask = of_tokenizer
    cls = masking.mlm_cls_token_id
    for key, name, i in (("mlm_mask_id", "mask", mask), ("mlm_cls_token_id", "CLS", cls)):
        if i >= vocab_size:
            raise UserError(
                f"{name} is id {i}, and the model has vocab_size={vocab_size} ids, from 0. Set "
                f"{key} to the id that the model was trained with."
            )
    return MaskIds(mask, cls if cls >= 0 else None)


def without_cls(tokenizer: ModelTokenizer, cls: int | None) -> ModelTokenizer:
    """The tokenizer for texts that get CLS anyway: one that begins them with CLS, does not."""
    if cls is None or tokenizer.prefix[:1] != (cls,):
        return tokenizer
    return dataclasses.replace(tokenizer, prefix=tokenizer.prefix[1:])


def hide_word(ids: Sequence[int], start: int) -> Iterator[Masked]:
    """The word from `start` to the end of a text: hidden whole, then all but its first token...

    The log-probability of the word is the sum of those of the first hidden token of each.
    """
    array = np.array(ids, np.int32)
    for place in range(start, len(ids)):
        yield Masked(array, range(place, len(ids)))


def hide_each(ids: Sequence[int], start: int, window: int) -> Iterator[Masked]:
    """A text of any length: each token from `start` on is hidden once, alone.

    Windows lie side by side; the last is moved left until it is full, and hides what the others
    have not.

    Args:
      window: tokens of the text that are read at once, at most.
    """
    for begin in range(0, len(ids), window):
        end = min(begin + window, len(ids))
        left = max(0, end - window)
        array = np.array(ids[left:end], np.int32)
        for place in range(max(begin, start), end):
            yield Masked(array, (place - left,))
