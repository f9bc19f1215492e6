"""The interface of stores of tokens: files (`store.py`) or a user's data source."""

from typing import Protocol

import numpy as np


class TokenReader(Protocol):
    """Random access to the ids of documents, one after the other; `len` counts tokens."""

    @property
    def dtype(self) -> np.dtype:
        """Integer type in which the ids are stored."""
        ...

    def __len__(self) -> int:
        """Returns the number of tokens."""
        ...

    @property
    def document_offsets(self) -> np.ndarray:
        """int64 [D + 1]: first token of each document, then the end."""
        ...

    @property
    def file_of_document(self) -> np.ndarray | None:
        """int64 [files + 1]: first document of each source file and the end; None if unknown."""
        ...

    def document_name(self, document: int) -> str:
        """Returns a name for messages."""
        ...

    def read(self, start_P: np.ndarray, stop_P: np.ndarray) -> np.ndarray:
        """Returns the ids (int32) of ranges [start, stop), one range after the other."""
        ...

    def reopen(self) -> None:
        """Makes the next read open its files again: they may have been replaced."""
        ...


class MaskedTokenReader(TokenReader, Protocol):
    """A store that also knows which tokens count as targets."""

    def read_loss_mask(self, start_P: np.ndarray, stop_P: np.ndarray) -> np.ndarray:
        """Returns bool like `read`: whether each token counts as a target."""
        ...
