"""The token dataset: a token store and what is known about its tokens."""

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from MaxText.errors import UserError
from MaxText.input_pipeline.token_store.store import TokenStore, document_sizes
from MaxText.input_pipeline.token_store.token_reader import MaskedTokenReader, TokenReader

_HASHED_OFFSETS = 2**13  # offsets hashed at a time


@dataclasses.dataclass(frozen=True)
class TokenDataset:
    """One split of a dataset, opened.

    Attributes:
      store: The tokens and the boundaries of documents.
      description: What it is, for the log.
      fingerprint: Hex digest of the contents, or of file names, sizes and document boundaries:
        equal data gives equal batches.
      record_length: Tokens of each record if all have one length (the last may be shorter), as
        another program slices training sequences; None for documents.
      labels: A store parallel to `store` with the id to predict at each position (already shifted),
        negative for none; None if targets are the next tokens.
      loss_mask: `store`, if its tokens have a loss mask; None if all count as targets.
    """

    store: TokenReader
    description: str
    fingerprint: str
    pad_id: int = 0  # padding id
    eos_id: int | None = None
    special_ids: tuple[int, ...] = ()  # known ids that are never text (bos, eos, pad)
    mask_id: int | None = None
    vocab_size: int | None = None
    max_token_id: int | None = None  # None if unknown without reading everything
    unigram_entropy_nats: float | None = None  # nats per token
    record_length: int | None = None
    labels: TokenReader | None = None
    loss_mask: MaskedTokenReader | None = None
    skipped: tuple[str, ...] = ()  # descriptions of records that the import skipped
    tokenizer_folder: Path | None = None  # folder or file of the tokenizer
    tokenizer_sha256: str = ""
    tokens_sha256: str = ""  # of all ids as bytes, by the manifest
    num_text_bytes: int = 0  # UTF-8 bytes of the text; 0 if unknown
    has_bos: bool = False  # whether a control id precedes each text


def foreign_dataset(
    store: TokenStore, *, setting: str, source: str, fingerprint: str, **fields: Any
) -> TokenDataset:
    """Returns the dataset of another program's token files.

    Args:
      store: The tokens.
      setting: Key and location of the data, for messages.
      source: What the data are, for messages.
      fingerprint: See TokenDataset.
      **fields: Further fields of TokenDataset.

    Raises:
      UserError: There are no tokens.
    """
    if not len(store):
        raise UserError(
            f"{setting}: {source} hold no tokens. Check that these are the files you mean."
        )
    length = record_length(store.document_offsets)
    num_documents = len(store.document_offsets) - 1
    records = f"rows of {length:,}" if length else "documents"
    description = f"{len(store):,} tokens in {num_documents:,} {records} of {source}"
    return TokenDataset(store, description, fingerprint, record_length=length, **fields)


def boundaries_digest(document_offsets: np.ndarray) -> str:
    """Returns a digest of document offsets, for fingerprints."""
    digest = hashlib.sha256()
    for first in range(0, len(document_offsets), _HASHED_OFFSETS):
        block = document_offsets[first : first + _HASHED_OFFSETS]
        digest.update(block.astype("<i8", copy=False).data)
    return digest.hexdigest()[:16]


def record_length(document_offsets: np.ndarray) -> int | None:
    """Returns the common length of documents, of which the last may be shorter; else None."""
    num_documents = len(document_offsets) - 1
    if num_documents < 2:
        return None
    length = int(document_offsets[1] - document_offsets[0])
    last_length = int(document_offsets[-1] - document_offsets[-2])
    is_shorter = num_documents > 2 and 0 < last_length < length
    if last_length != length and not is_shorter:
        return None
    all_but_last = document_sizes(document_offsets[:-1])
    return length if all(bool((sizes == length).all()) for sizes in all_but_last) else None
