"""SentencePiece models (`tokenizer.model`)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from MaxText.errors import UserError
from MaxText.input_pipeline.tokenization.interface import (
    Tokenizer,
    control_ids,
    control_token_settings,
    write_files,
)

SENTENCE_PIECE_NAME = "tokenizer.model"


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model with its normalization and byte fallback."""

    def __init__(self, model: bytes, origin: str, settings: Mapping[str, Any]):
        """Builds it from model bytes; `settings` override control tokens.

        Raises UserError if sentencepiece is not installed, the bytes are not a model, or documents
        could forge a control id.
        """
        self._model_bytes = model
        self._settings = control_token_settings(settings)
        self.model = _parse(model, origin)
        ids = control_ids(settings, self._id_of)
        for name in ("bos", "eos", "pad"):
            own = getattr(self.model, f"{name}_id")()
            if f"{name}_token" not in self._settings and own >= 0:
                ids[name] = own
        vocab_size = self.model.get_piece_size()
        super().__init__(origin, model, vocab_size, ids, "sentencepiece")
        self._check_special_tokens_as_text(
            {i: self.model.id_to_piece(i) for i in ids.values() if i is not None},
            "Train the model with that token among control_symbols, or name another one in "
            "tokenizer_config.json.",
        )

    def _id_of(self, token: str) -> int | None:
        found = self.model.piece_to_id(token)
        # Missing pieces get the id of the unknown piece.
        return found if self.model.id_to_piece(found) == token else None

    def _ids(self, text: str) -> np.ndarray:
        # Without sampling, whatever the defaults of the library are.
        return np.array(self.model.encode(text, out_type=int, enable_sampling=False), np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        """Decodes; control ids have no text."""
        return self.model.decode([int(i) for i in ids if 0 <= i < self.entry.vocab_size])

    def save(self, folder: Path) -> list[Path]:
        return write_files(folder, {SENTENCE_PIECE_NAME: self._model_bytes}, self._settings)


def _parse(model: bytes, origin: str) -> Any:
    try:
        import sentencepiece
    except ImportError as error:
        raise UserError(
            f"{origin} is a SentencePiece model, and the package sentencepiece is not installed. "
            "Install it: pip install 'jaxpretrain[data]'"
        ) from error
    try:
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        size = processor.get_piece_size()
    except Exception as error:  # the type differs between versions of the library
        raise UserError(
            f"{origin} is not a SentencePiece model ({type(error).__name__}). Copy it again, or "
            "set tokenizer_type."
        ) from error
    if size == 0:
        raise UserError(f"{origin} is a SentencePiece model without pieces. Copy it again.")
    return processor
