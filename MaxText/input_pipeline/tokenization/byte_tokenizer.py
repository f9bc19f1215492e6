"""The byte tokenizer, with an id for each byte of UTF-8."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from MaxText.input_pipeline.token_store.manifest import TokenizerEntry
from MaxText.input_pipeline.tokenization.interface import TextTokenizer
from MaxText.input_pipeline.tokenization.tokenizer_files import write_files

BYTE_NAMES = ("byte", "bytes")  # values of tokenizer_path for this tokenizer

_CONTROL = {256: "<eos>", 257: "<bos>", 258: "<pad>"}
_ENTRY = TokenizerEntry(
    origin="bytes of UTF-8",
    sha256=hashlib.sha256(b"bytes of UTF-8, then eos, bos and pad").hexdigest(),
    vocab_size=259,
    eos_id=256,
    bos_id=257,
    pad_id=258,
)


class ByteTokenizer(TextTokenizer):
    """Ids 0 to 255 are bytes; 256 is eos, 257 bos, 258 padding."""

    def __init__(self, num_threads: int = 0):
        super().__init__(_ENTRY, "numpy", num_threads=num_threads)

    def _ids(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        """Decodes; control ids are written <eos>, <bos>, <pad>."""
        pieces = [
            bytes([i]) if i < 256 else _CONTROL[i].encode()
            for i in map(int, ids)
            if 0 <= i < _ENTRY.vocab_size
        ]
        return b"".join(pieces).decode("utf-8", "replace")

    def save(self, folder: Path) -> list[Path]:
        return write_files(folder, {}, {"tokenizer_type": BYTE_NAMES[0]})
