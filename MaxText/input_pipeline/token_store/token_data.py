"""What every data set looks like to the reader: a stream of tokens with document boundaries."""

import dataclasses
import hashlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np


class TokenStream(Protocol):
    """The tokens of a split as one sequence, cut into documents (or records).

    Implementations are safe to use from several threads, open their files at the first read, and
    open their own after unpickling (a reader process gets a pickled stream).
    """

    def __len__(self) -> int:
        """Tokens."""
        ...

    @property
    def document_offsets(self) -> np.ndarray:
        """int64 [documents + 1]: first token of each document, then the length of the stream."""
        ...

    def ranges(self, places: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """Reads pieces of the stream, each file once.

        Args:
          places: pairs (start, stop), 0 <= start <= stop <= len.

        Returns:
          int32 arrays [stop - start].

        Raises:
          BadRecord: a record that a place needs cannot be read; names file and offset.
        """
        ...

    def check(self, given_up: Collection[str] = ()) -> None:
        """Looks whether the files are still those that were opened, by what tells without reading.

        Those that are missing are passed over: reading them tells.

        Args:
          given_up: files that are not looked at.

        Raises:
          UnreadableFile: one was cut short.
          UserError: one is longer, or what describes the data is missing or that of others.
        """
        ...

    def document_name(self, document: int) -> str:
        """Where a document comes from, for people: file name and row or record number."""
        ...


def boundaries_digest(document_offsets: np.ndarray) -> str:
    """Hex digest of where documents begin (int64 [documents + 1])."""
    return hashlib.sha256(np.ascontiguousarray(document_offsets, "<i8").data).hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class TokenData:
    """A split that can be read.

    Attributes:
      stream: its tokens.
      description: a line or two for people.
      fingerprint: hex digest of what is read (contents, or names and sizes of files and where
        documents begin): equal data gives equal batches.
      filler_id: id written where a window has no token; its weight is 0.
      eos_id: id that ends documents, None where unknown.
      special_ids: ids that are never text (bos, eos, pad), as far as they are known.
      mask_id: id of the tokenizer's mask, None where it has none.
      vocab_size: ids of the tokenizer, None where unknown.
      largest_id: largest id that occurs, None where that is not known without reading all.
      unigram_entropy: nats per token, None where unknown.
      rows: whether each document of the stream is one training row (records of fixed length cut
        by another program), to be read whole and without looking for documents inside.
      labels: a stream as long as `stream` and cut alike, of the id to predict at each place
        (already shifted), negative where none is; None where targets are the next tokens.
      file_of_document: int64 [files + 1] first document of each file, then the end; for shuffling
        within groups of files. None where there is one file.
      tokenizer_folder: folder or file of the tokenizer, None where none is known.
      tokenizer_sha256: hex digest of the tokenizer that made the ids; empty where unknown.
    """

    stream: TokenStream
    description: str
    fingerprint: str
    filler_id: int = 0
    eos_id: int | None = None
    special_ids: tuple[int, ...] = ()
    mask_id: int | None = None
    vocab_size: int | None = None
    largest_id: int | None = None
    unigram_entropy: float | None = None
    rows: bool = False
    labels: TokenStream | None = None
    file_of_document: np.ndarray | None = None
    tokenizer_folder: Path | None = None
    tokenizer_sha256: str = ""
