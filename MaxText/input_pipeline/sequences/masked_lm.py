"""Masked language modeling (BERT, arXiv 1810.04805).

Masks are a pure function of (seed, order index of the sequence in the run): independent of the
number of processes and of resumes, and different in every epoch.

Legend: B sequences (rows), T tokens of a sequence, V ids, M selected positions of a batch.
"""

from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np

from MaxText.config.data_sections import MaskingConfig
from MaxText.errors import UserError
from MaxText.input_pipeline.sequences.random_bits import INCREMENT, mix

_MAX_UINT64 = 2**64 - 1


def _position_bits(seed: int, order_indices_B: np.ndarray, length: int) -> np.ndarray:
    """Returns random uint64 [B, T]; row b depends on `order_indices_B[b]` only."""
    start = mix(np.array([seed % 2**64 ^ INCREMENT], np.uint64))
    row_state_B = mix(start + order_indices_B.astype(np.uint64))
    steps_T = np.arange(1, length + 1, dtype=np.uint64) * np.uint64(INCREMENT)
    return mix(row_state_B[:, None] + steps_T)


class _Inputs(NamedTuple):
    """Sequences before masking."""

    tokens_BT: np.ndarray
    is_text_BT: np.ndarray  # bool, False for padding
    documents: dict[str, np.ndarray]  # positions and segments [B, T], if any


class MLMMasking:
    """Converts next-token-prediction sequences to masked language modeling.

    Each eligible token is selected independently with probability `mlm.mask_prob`. Of the selected
    ones a share `mlm.same_token_prob` is kept, `mlm.random_token_prob` becomes a random id, and the
    rest becomes the mask. Exactly the selected positions are predicted. Padding, CLS, mask, other
    special ids and `mlm.mask_ignore_ids` are never selected or drawn. A short sequence may by
    chance have nothing selected, and then has no weight.
    """

    def __init__(
        self,
        masking: MaskingConfig,
        vocab_size: int,
        tokenizer_mask_id: int | None = None,
        special_ids: Collection[int] = (),
    ):
        """Initializes masking for a vocabulary.

        Args:
          masking: The mlm keys.
          vocab_size: Ids of the model.
          tokenizer_mask_id: The mask if mlm.mask_id=-1; None if the tokenizer has none.
          special_ids: Ids that are never text, of all datasets.

        Raises:
          UserError: A key names an id that does not exist, or there is no mask.
        """
        mask_id = masking.mlm.mask_id if masking.mlm.mask_id >= 0 else tokenizer_mask_id
        if mask_id is None:
            raise UserError(
                "mlm.mask_id=-1 takes the mask of the tokenizer, and it has none ([MASK] or "
                "<mask>). Set mlm.mask_id to an id below vocab_size that no text contains."
            )
        same_share = masking.mlm.same_token_prob
        random_share = masking.mlm.random_token_prob
        ids_of_keys = [("mlm.mask_id", mask_id), ("mlm.cls_token_id", masking.mlm.cls_token_id)]
        ids_of_keys += [("mlm.mask_ignore_ids", token) for token in masking.mlm.mask_ignore_ids]
        for key, token in ids_of_keys:
            if token >= vocab_size or (token < 0 and key != "mlm.cls_token_id"):
                raise UserError(
                    f"{key} names id {token}, and ids are 0 to {vocab_size - 1}. Change it or "
                    "vocab_size."
                )
        self._is_maskable_V = np.ones(vocab_size, bool)
        # A pad id may lie outside the table (as GPT-Neo's did); then no sequence contains it.
        excluded = [*(token for _, token in ids_of_keys), *special_ids]
        self._is_maskable_V[[token for token in excluded if 0 <= token < vocab_size]] = False
        self._random_ids = np.flatnonzero(self._is_maskable_V).astype(np.int32)
        self._mask_id = mask_id
        self._cls_id = masking.mlm.cls_token_id
        # Random bits up to and including this select a position, so that probability 1 selects all.
        self._last_selected = np.uint64(
            min(max(int(masking.mlm.mask_prob * 2**64) - 1, 0), _MAX_UINT64)
        )
        # Ends, of 2**32, of the draws that keep the token, and that replace it by a random id.
        self._end_of_same = round(same_share * 2**32)
        self._end_of_random = min(round((same_share + random_share) * 2**32), 2**32)

    def apply(
        self,
        arrays: Mapping[str, np.ndarray],
        order_indices_B: np.ndarray,
        seed: int,
        length: int | None = None,
    ) -> dict[str, np.ndarray]:
        """Masks tokens of sequences; returns new arrays [B, T], named as in BatchArrays.

        `targets` are the original ids, and `weights` are 1 at the selected positions. CLS is
        prepended with position 0 in the segment of the next token, whose positions shift by one.

        Args:
          arrays: int32 `tokens`, float32 `weights`, and with documents int32 `positions` and
            `segments` (0 is padding). Without segments, a token is padding if it has no weight and
            is not the target of one.
          order_indices_B: int64 [B], order index of each sequence in the run.
          seed: Seed of the masks.
          length: T of the result; None for that of `arrays`. With CLS, sequences of T tokens lose
            their last one and sequences of T - 1 none.
        """
        inputs = _unmasked(arrays)
        if self._cls_id >= 0:
            inputs = self._prepend_cls(inputs, length or inputs.tokens_BT.shape[1])
        tokens_BT = inputs.tokens_BT
        bits_BT = _position_bits(seed, order_indices_B, tokens_BT.shape[1])
        is_selected_BT = bits_BT <= self._last_selected
        is_selected_BT &= inputs.is_text_BT
        is_selected_BT &= self._is_maskable_V.take(tokens_BT)
        selected_M = np.flatnonzero(is_selected_BT)
        masked_BT = tokens_BT.copy()
        masked_BT.reshape(-1)[selected_M] = self._replacements(
            tokens_BT.reshape(-1)[selected_M], bits_BT.reshape(-1)[selected_M]
        )
        return {
            "tokens": masked_BT,
            "targets": tokens_BT.copy(),
            "weights": is_selected_BT.astype(np.float32),
            **{name: array.copy() for name, array in inputs.documents.items()},
        }

    def _prepend_cls(self, inputs: _Inputs, length: int) -> _Inputs:
        """Returns sequences of `length` tokens, moved by one position for CLS."""

        def moved(array_BT: np.ndarray) -> np.ndarray:
            return np.concatenate([array_BT[:, :1], array_BT[:, : length - 1]], axis=1)

        tokens_BT = moved(inputs.tokens_BT)
        # A row without text gets no CLS.
        tokens_BT[inputs.is_text_BT[:, 0], 0] = self._cls_id
        documents = {name: moved(array) for name, array in inputs.documents.items()}
        if "positions" in documents:
            segments_BT = documents["segments"]
            is_first_segment_BT = segments_BT[:, 1:] == segments_BT[:, :1]
            documents["positions"][:, 1:] += is_first_segment_BT & (segments_BT[:, 1:] > 0)
        return _Inputs(tokens_BT, moved(inputs.is_text_BT), documents)

    def _replacements(self, tokens_M: np.ndarray, bits_M: np.ndarray) -> np.ndarray:
        """Returns the token, a random id or the mask for selected positions."""
        # The bits of selected positions are all small numbers: mix again to get uniform bits.
        bits_M = mix(bits_M + np.uint64(INCREMENT))
        draw_M = bits_M & 0xFFFFFFFF
        replacements_M = np.where(draw_M < self._end_of_same, tokens_M, np.int32(self._mask_id))
        is_random_M = (draw_M >= self._end_of_same) & (draw_M < self._end_of_random)
        random_positions = np.flatnonzero(is_random_M)
        # The upper half of the bits, scaled to an index.
        index = ((bits_M[random_positions] >> 32) * self._random_ids.size) >> 32
        replacements_M[random_positions] = self._random_ids[index]
        return replacements_M


def _unmasked(arrays: Mapping[str, np.ndarray]) -> _Inputs:
    """Returns the tokens of sequences, and which of them are text."""
    weights_BT = arrays["weights"]
    if "segments" in arrays:
        is_text_BT = arrays["segments"] > 0
    else:
        is_text_BT = weights_BT > 0
        is_text_BT[:, 1:] |= weights_BT[:, :-1] > 0
    documents = {name: arrays[name] for name in ("positions", "segments") if name in arrays}
    return _Inputs(arrays["tokens"], is_text_BT, documents)
