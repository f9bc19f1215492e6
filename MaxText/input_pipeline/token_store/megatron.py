r"""Megatron-LM data: ids in `.bin` files, and an `.idx` file.

    MMIDIDX\0\0           9 bytes
    version 1             uint64
    dtype code            uint8, see DTYPES
    S, sequences          uint64
    D, document entries   uint64
    sizes                 int32 [S], tokens
    pointers              int64 [S], bytes
    documents             int64 [D], first sequence of each document, then S

All little-endian. A document is usually one sequence. Data is read in place; document offsets are
computed from the index once and then mapped from the cache.
"""

import re
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from MaxText.errors import UserError
from MaxText.input_pipeline.document_sources.byte_streams import local_file
from MaxText.input_pipeline.local_cache import cached_arrays
from MaxText.input_pipeline.token_store.store import (
    TokenData,
    TokenStore,
    boundaries_digest,
    foreign_data,
    record_length,
)
from MaxText.storage import file_access
from MaxText.storage.file_access import FileInfo

MAGIC = b"MMIDIDX\0\0"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "u1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # others are not types of ids
_AGAIN = "Copy it again, or make it again with the program that wrote it."


def open_megatron(files: Sequence[FileInfo], key: str, location: str, cache_dir: Path) -> TokenData:
    """Opens a Megatron dataset, given any of its .idx and .bin files.

    Raises UserError for no index or several, data that do not fit it, or no tokens.
    """
    indices = [file for file in files if file.path.endswith(".idx")]
    if not indices:  # the .bin file was named
        name = re.sub(r"(-\d+-of-\d+)?\.bin$", ".idx", files[0].path)
        indices = [file_access.file_info(name)]
    if len(indices) > 1:
        names = ", ".join(Path(index.path).name for index in indices[:3])
        raise UserError(
            f"{key}={location} holds {len(indices)} Megatron data sets ({names} ...). Name one of "
            "them, or mix them with data_mixture_weights."
        )
    (index,) = indices
    prefix = index.path.removesuffix(".idx")
    if file_access.path_type(f"{prefix}.bin"):
        shards = [file_access.file_info(f"{prefix}.bin")]
    else:  # published as fixed-size byte chunks to concatenate
        pattern = f"{prefix}-*-of-*.bin"
        shards = file_access.list_files(pattern, f"{key}={location}, the data of {prefix}.idx")
    identity = f"{file_access.absolute(index.path)} {index.size} {index.tag}"
    try:
        with local_file(index.path) as name:
            file = Path(name)
            dtype = read_header(file, index)[0]
            documents = cached_arrays(
                cache_dir,
                "megatron1",
                identity,
                lambda: [{"document_offsets": read_offsets(file, index)}],
            )
    except OSError as error:
        raise UserError(f"{index.path} cannot be read ({error}). {_AGAIN}") from error
    offsets = documents["document_offsets"]
    num_tokens = [shard.size // dtype.itemsize for shard in shards]
    if int(offsets[-1]) != sum(num_tokens):
        num_tokens[-1] += int(offsets[-1]) - sum(num_tokens)  # check_sizes rejects this
    store = TokenStore([shard.path for shard in shards], num_tokens, dtype, documents)
    store.check_sizes(shards)
    fingerprint = file_access.fingerprint([index, *shards], [boundaries_digest(offsets)])
    return foreign_data(store, f"{key}={location}", f"the Megatron data {prefix}", fingerprint)


def read_header(file: Path, index: FileInfo) -> tuple[np.dtype, int, int]:
    """Returns the dtype of ids, and the numbers of sequences and entries."""
    with open(file, "rb") as stream:
        header = stream.read(HEADER.size)
    path = index.path
    if len(header) < HEADER.size or not header.startswith(MAGIC):
        raise UserError(
            f"{path} is not an index of Megatron data (MMIDIDX). Name the .bin and .idx "
            "that Megatron's or GPT-NeoX's preprocess_data wrote with data-impl mmap."
        )
    _, version, code, num_sequences, num_documents = HEADER.unpack(header)
    if version != 1:
        raise UserError(f"{path} has version {version}; version 1 is known. {_AGAIN}")
    if code not in DTYPES:
        raise UserError(f"{path}: type code {code} is not a type of ids. Name data of tokens.")
    expected = HEADER.size + 12 * num_sequences + 8 * num_documents
    if index.size != expected:
        raise UserError(
            f"{path} has {index.size} bytes, where its header asks for {expected}: it is "
            f"truncated or changed. {_AGAIN}"
        )
    return np.dtype(DTYPES[code]), num_sequences, num_documents


def read_offsets(file: Path, index: FileInfo) -> np.ndarray:
    """Returns the document offsets (int64 [D + 1]).

    Sequences count as documents if all have one length (another program's training sequences), or
    if the index does not group them into documents. Raises UserError unless sequences are
    contiguous.
    """
    dtype, num_sequences, num_documents = read_header(file, index)
    content, at = file.read_bytes(), HEADER.size
    sizes = np.frombuffer(content, "<i4", num_sequences, at)
    pointers = np.frombuffer(content, "<i8", num_sequences, at + 4 * num_sequences)
    documents = np.frombuffer(content, "<i8", num_documents, at + 12 * num_sequences)
    offsets = np.append(0, np.cumsum(sizes, dtype=np.int64))
    if sizes.min(initial=0) < 0:
        problem = f"has a sequence of {sizes.min()} tokens: it is damaged"
        raise UserError(f"{index.path} {problem}. {_AGAIN}")
    wrong = np.flatnonzero(pointers != offsets[:-1] * dtype.itemsize)
    if wrong.size:
        first = int(wrong[0])
        raise UserError(
            f"{index.path}: sequence {first} lies at byte {pointers[first]}, where the ones before "
            f"it end at {offsets[first] * dtype.itemsize}; only sequences end to end are read. "
            "Merge the data again with merge_datasets.py."
        )
    if num_documents and (
        documents.min() < 0 or documents.max() > num_sequences or (np.diff(documents) < 0).any()
    ):
        raise UserError(
            f"{index.path}: its document entries are out of order: it is damaged. {_AGAIN}"
        )
    is_grouped = 1 < num_documents <= num_sequences and record_length(offsets) is None
    if is_grouped and documents[0] == 0 and documents[-1] == num_sequences:
        return offsets[documents]
    return offsets
