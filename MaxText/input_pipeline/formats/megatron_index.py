"""Megatron's `.idx` files: where the sequences of a flat `.bin` file of token ids begin.

    MMIDIDX\\0\\0           9 bytes
    version 1             uint64
    type of an id         uint8, see DTYPES
    S, sequences          uint64
    D, entries below      uint64
    sizes                 int32 [S], tokens
    pointers              int64 [S], bytes
    documents             int64 [D], first sequence of each document, then S

Everything is little-endian. A document is mostly one sequence.
"""

import dataclasses
import os
import struct
from collections.abc import Sequence

import numpy as np

from MaxText.errors import UserError
from MaxText.input_pipeline.storage import open_stream

MAGIC = b"MMIDIDX\0\0"
_HEADER = struct.Struct("<9sQBQQ")

# 6 and 7 are floats, which Megatron-LM and GPT-NeoX number in different order.
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "float", 7: "float", 8: "<u2"}


@dataclasses.dataclass(frozen=True)
class MegatronIndex:
    """What an index says about its `.bin` file.

    Attributes:
      dtype: type of a stored id, little-endian.
      offsets: int64 [S + 1]: first token of each sequence, then the end.
      documents: int64 [D]: first sequence of each document, then S.
    """

    dtype: np.dtype
    offsets: np.ndarray
    documents: np.ndarray

    @property
    def document_offsets(self) -> np.ndarray:
        """int64: first token of each document, then the end.

        Sequences count as documents where the index does not divide them among documents.
        """
        documents = self.documents
        whole = documents.size > 1 and documents[0] == 0 and documents[-1] == self.offsets.size - 1
        if whole and documents.size < self.offsets.size:
            return self.offsets[documents]
        return self.offsets


def read_index(path: str) -> MegatronIndex:
    """Reads and checks an index, local or a URL.

    Raises:
      UserError: no index, another version, ids that are floats, damaged, or sequences that do
        not lie end to end.
    """
    again = "Copy it again, or make it again with the program that wrote it."
    try:
        with open_stream(path) as stream:
            content = stream.read()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error}). {again}") from error
    if len(content) < _HEADER.size or not content.startswith(MAGIC):
        raise UserError(
            f"{path} does not begin as an index of Megatron data (MMIDIDX). Name the .bin and .idx "
            "that Megatron's or GPT-NeoX's preprocess_data wrote with data-impl mmap."
        )
    _, version, code, num_sequences, num_documents = _HEADER.unpack_from(content)
    if version != 1:
        raise UserError(f"{path} has version {version}; version 1 is known. {again}")
    if DTYPES.get(code, "float") == "float":
        raise UserError(f"{path}: type code {code} is none of integers. Name a data set of tokens.")
    expected = _HEADER.size + 12 * num_sequences + 8 * num_documents
    if len(content) != expected:
        raise UserError(
            f"{path} has {len(content)} bytes, where its header asks for {expected}: it was cut "
            f"short or changed. {again}"
        )
    dtype = np.dtype(DTYPES[code])
    at = _HEADER.size
    sizes = np.frombuffer(content, "<i4", num_sequences, at)
    pointers = np.frombuffer(content, "<i8", num_sequences, at + 4 * num_sequences)
    documents = np.frombuffer(content, "<i8", num_documents, at + 12 * num_sequences)
    if num_sequences and sizes.min() < 0:
        raise UserError(f"{path} has a sequence of {sizes.min()} tokens: it is damaged. {again}")
    offsets = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    wrong = np.flatnonzero(pointers != offsets[:-1] * dtype.itemsize)
    if wrong.size:
        raise UserError(
            f"{path}: sequence {wrong[0]} lies at byte {pointers[wrong[0]]}, where the ones before "
            f"it end at {offsets[wrong[0]] * dtype.itemsize}; only sequences end to end are read. "
            "Merge the data again with merge_datasets.py."
        )
    if documents.size and (
        documents.min() < 0 or documents.max() > num_sequences or (np.diff(documents) < 0).any()
    ):
        raise UserError(f"{path}: its document entries are out of order: it is damaged. {again}")
    return MegatronIndex(dtype, offsets, documents.astype(np.int64))


def write_index(
    path: str | os.PathLike[str], dtype: np.dtype, sizes: Sequence[int], documents: Sequence[int]
) -> None:
    """Writes the index of sequences that lie end to end.

    Args:
      path: of the .idx file.
      dtype: integer type of the ids in the .bin file, below 64 bits or int64.
      sizes: tokens of each sequence.
      documents: first sequence of each document, then the number of sequences.
    """
    codes = {np.dtype(name): code for code, name in DTYPES.items() if name != "float"}
    tokens = np.asarray(sizes, "<i4")
    ends = np.cumsum(tokens, dtype=np.int64) * dtype.itemsize
    pointers = np.concatenate([[0], ends[:-1]]) if tokens.size else ends
    with open(path, "wb") as file:
        code = codes[dtype.newbyteorder("<")]
        file.write(_HEADER.pack(MAGIC, 1, code, len(sizes), len(documents)))
        file.write(tokens.tobytes())
        file.write(pointers.astype("<i8").tobytes())
        file.write(np.asarray(documents, "<i8").tobytes())
