"""Masked language modeling (BERT, arXiv 1810.04805).

Masks are a pure function of (seed, number of the sequence in the run): independent of the number of
hosts and of resumes, and different in every epoch.

Legend: B sequences (rows), T tokens of a sequence, V ids, S masked positions of a batch.
"""

from collections.abc import Collection, Mapping

import numpy as np

from MaxText.config.data_sections import MaskingConfig
from MaxText.errors import UserError
from MaxText.input_pipeline.sequences.windows import INCREMENT, mix

_LARGEST_WORD = 2**64 - 1


def _random_words(seed: int, run_rows_B: np.ndarray, length: int) -> np.ndarray:
    """Returns random uint64 [B, T]; row b depends on `run_rows_B[b]` only."""
    start = mix(np.array([seed % 2**64 ^ INCREMENT], np.uint64))
    rows_B = mix(start + run_rows_B.astype(np.uint64))
    positions_T = np.arange(1, length + 1, dtype=np.uint64) * np.uint64(INCREMENT)
    return mix(rows_B[:, None] + positions_T)


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

        `tokenizer_mask_id` is used if mlm.mask_id=-1. Raises UserError for invalid settings.
        """
        mask_id = masking.mlm.mask_id if masking.mlm.mask_id >= 0 else tokenizer_mask_id
        if mask_id is None:
            raise UserError(
                "mlm.mask_id=-1 takes the mask of the tokenizer, and it has none ([MASK] or "
                "<mask>). Set mlm.mask_id to an id below vocab_size that no text contains."
            )
        kept = masking.mlm.same_token_prob
        drawn = masking.mlm.random_token_prob
        named = [("mlm.mask_id", mask_id), ("mlm.cls_token_id", masking.mlm.cls_token_id)]
        named += [("mlm.mask_ignore_ids", token) for token in masking.mlm.mask_ignore_ids]
        for key, token in named:
            if token >= vocab_size or (token < 0 and key != "mlm.cls_token_id"):
                raise UserError(
                    f"{key} names id {token}, and ids are 0 to {vocab_size - 1}. Change it or "
                    "vocab_size."
                )
        self._maskable_V = np.ones(vocab_size, bool)
        # A pad id may lie outside the table (as GPT-Neo's did); then no row contains it.
        excluded = [*(token for _, token in named), *special_ids]
        self._maskable_V[[token for token in excluded if 0 <= token < vocab_size]] = False
        self._drawable = np.flatnonzero(self._maskable_V).astype(np.int32)
        self._mask_id = mask_id
        self._cls_id = masking.mlm.cls_token_id
        # Words up to and including this one are selected, so that probability 1 selects all.
        self._last_chosen = np.uint64(
            min(max(int(masking.mlm.mask_prob * 2**64) - 1, 0), _LARGEST_WORD)
        )
        self._end_of_kept = round(kept * 2**32)
        self._end_of_drawn = min(round((kept + drawn) * 2**32), 2**32)

    def apply(
        self,
        rows: Mapping[str, np.ndarray],
        run_rows_B: np.ndarray,
        seed: int,
        length: int | None = None,
    ) -> dict[str, np.ndarray]:
        """Masks tokens of sequences; returns new arrays [B, T].

        `targets` are the original ids, and `weights` are 1 at the selected positions. CLS is
        prepended with position 0 in the segment of the next token, whose positions shift by one.

        Args:
          rows: int32 `tokens`, float32 `weights`, and with documents int32 `positions` and
            `segments` (0 is padding). Without segments, a token is padding if it has no weight and
            is not the target of one.
          run_rows_B: int64 [B], number of each sequence in the run.
          length: T of the result; None for that of `rows`. With CLS, sequences of T tokens lose
            their last one and sequences of T - 1 none.
        """
        tokens_BT = rows["tokens"]
        result = {name: rows[name] for name in ("positions", "segments") if name in rows}
        if "segments" in rows:
            real_BT = rows["segments"] > 0
        else:
            real_BT = rows["weights"] > 0
            real_BT[:, 1:] |= rows["weights"][:, :-1] > 0
        if self._cls_id >= 0:
            tokens_BT, real_BT, result = self._put_cls(tokens_BT, real_BT, result, length)
        words_BT = _random_words(seed, run_rows_B, tokens_BT.shape[1])
        chosen_BT = words_BT <= self._last_chosen
        chosen_BT &= real_BT
        chosen_BT &= self._maskable_V.take(tokens_BT)
        chosen_S = np.flatnonzero(chosen_BT)
        hidden_BT = tokens_BT.copy()
        hidden_BT.reshape(-1)[chosen_S] = self._replacements(
            tokens_BT.reshape(-1)[chosen_S], words_BT.reshape(-1)[chosen_S]
        )
        return {
            "tokens": hidden_BT,
            "targets": tokens_BT.copy(),
            "weights": chosen_BT.astype(np.float32),
            **{name: array.copy() for name, array in result.items()},
        }

    def _put_cls(
        self,
        tokens_BT: np.ndarray,
        real_BT: np.ndarray,
        rest: Mapping[str, np.ndarray],
        length: int | None,
    ) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
        num_moved = (length or tokens_BT.shape[1]) - 1

        def moved(array_BT: np.ndarray) -> np.ndarray:
            return np.concatenate([array_BT[:, :1], array_BT[:, :num_moved]], axis=1)

        tokens_BT = moved(tokens_BT)
        # A row without text gets no CLS.
        tokens_BT[real_BT[:, 0], 0] = self._cls_id
        result = {name: moved(array) for name, array in rest.items()}
        if "positions" in result:
            positions_BT = result["positions"]
            segments_BT = result["segments"]
            positions_BT[:, 1:] += (segments_BT[:, 1:] == segments_BT[:, :1]) & (
                segments_BT[:, 1:] > 0
            )
        return tokens_BT, moved(real_BT), result

    def _replacements(self, tokens_S: np.ndarray, words_S: np.ndarray) -> np.ndarray:
        """Returns the token, a random id or the mask for selected positions."""
        # Words of selected positions are all small: mix again to get uniform bits.
        words_S = mix(words_S + np.uint64(INCREMENT))
        kind_S = words_S & 0xFFFFFFFF
        hidden_S = np.where(kind_S < self._end_of_kept, tokens_S, np.int32(self._mask_id))
        drawn = np.flatnonzero((kind_S >= self._end_of_kept) & (kind_S < self._end_of_drawn))
        index = ((words_S[drawn] >> 32) * self._drawable.size) >> 32
        hidden_S[drawn] = self._drawable[index]
        return hidden_S
