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

Legend: S sequences of the index, D document entries.
"""

import re
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from MaxText.errors import UserError
from MaxText.input_pipeline.document_sources.byte_streams import local_file
from MaxText.input_pipeline.local_cache import cached_arrays
from MaxText.input_pipeline.token_store.store import TokenStore, document_sizes
from MaxText.input_pipeline.token_store.token_dataset import (
    TokenDataset,
    boundaries_digest,
    foreign_dataset,
)
from MaxText.storage import file_access
from MaxText.storage.file_access import FileInfo
from MaxText.storage.paths import natural_key

MAGIC = b"MMIDIDX\0\0"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "u1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # others are not types of ids
_REMEDY = "Copy it again, or make it again with the program that wrote it."
_BLOCK = 2**20  # sequences or documents looked at together


class IndexHeader(NamedTuple):
    """Header of an index."""

    dtype: np.dtype  # of the ids in .bin files
    num_sequences: int
    num_documents: int  # document entries: documents and the end


def open_megatron(
    files: Sequence[FileInfo], key: str, location: str, cache_dir: Path
) -> TokenDataset:
    """Opens a Megatron dataset.

    Args:
      files: Any of its .idx and .bin files.
      key: Configuration key that named it, for messages.
      location: Its value.
      cache_dir: Folder for document offsets.

    Raises:
      UserError: There is no index or there are several, the data do not fit it, or hold no tokens.
    """
    setting = f"{key}={location}"
    index = _find_index(files, setting)
    prefix = index.path.removesuffix(".idx")
    shards = _find_shards(prefix, index, setting)
    cache_key = f"{file_access.absolute(index.path)} {index.size} {index.tag}"
    try:
        with local_file(index.path) as name:
            index_file = Path(name)
            dtype = read_header(index_file, index).dtype
            documents = cached_arrays(
                cache_dir, "megatron1", cache_key, lambda: read_offsets(index_file, index)
            )
    except OSError as error:
        raise UserError(f"{index.path} cannot be read ({error}). {_REMEDY}") from error
    offsets = documents["document_offsets"]
    num_tokens = [shard.size // dtype.itemsize for shard in shards]
    if int(offsets[-1]) != sum(num_tokens):
        num_tokens[-1] += int(offsets[-1]) - sum(num_tokens)  # check_sizes rejects this
    store = TokenStore([shard.path for shard in shards], num_tokens, dtype, documents)
    store.check_sizes(shards)
    return foreign_dataset(
        store,
        setting=setting,
        source=f"the Megatron data {prefix}",
        fingerprint=file_access.fingerprint([index, *shards], [boundaries_digest(offsets)]),
    )


def _find_index(files: Sequence[FileInfo], setting: str) -> FileInfo:
    """Returns the .idx file of a dataset."""
    indices = [file for file in files if file.path.endswith(".idx")]
    if not indices:  # the .bin file was named
        name = re.sub(r"(-\d+-of-\d+)?\.bin$", ".idx", files[0].path)
        indices = [file_access.file_info(name)]
    if len(indices) > 1:
        names = ", ".join(Path(index.path).name for index in indices[:3])
        raise UserError(
            f"{setting} holds {len(indices)} Megatron data sets ({names} ...). Name one of "
            "them, or mix them with data_mixture_weights."
        )
    return indices[0]


def _find_shards(prefix: str, index: FileInfo, setting: str) -> list[FileInfo]:
    """Returns the .bin file, or the fixed-size byte chunks in which it was published, in order."""
    if file_access.path_type(f"{prefix}.bin"):
        return [file_access.file_info(f"{prefix}.bin")]
    folder, _, name = prefix.rpartition("/")
    # Compared as text: the name may hold characters of patterns.
    shard_name = re.compile(re.escape(name) + r"-\d+-of-\d+\.bin")
    shards = [
        file
        for file in file_access.files_in(folder or ".")
        if shard_name.fullmatch(file.path.rpartition("/")[2])
    ]
    if not shards:
        raise UserError(
            f"{setting}: no such file {prefix}.bin or {name}-*-of-*.bin, the data of "
            f"{index.path}. {_REMEDY}"
        )
    return sorted(shards, key=lambda shard: natural_key(shard.path))


def read_header(file: Path, index: FileInfo) -> IndexHeader:
    """Reads the header of an index.

    Args:
      file: The index, or a local copy of it.
      index: Path and size of the original.

    Raises:
      UserError: It is not an index, its ids have an unknown type, or its size does not fit.
    """
    with open(file, "rb") as stream:
        header = stream.read(HEADER.size)
    path = index.path
    if len(header) < HEADER.size or not header.startswith(MAGIC):
        raise UserError(
            f"{path} is not an index of Megatron data (MMIDIDX). Name the .bin and .idx "
            "that Megatron's or GPT-NeoX's preprocess_data wrote with data-impl mmap."
        )
    _, version, dtype_code, num_sequences, num_documents = HEADER.unpack(header)
    if version != 1:
        raise UserError(f"{path} has version {version}; version 1 is known. {_REMEDY}")
    if dtype_code not in DTYPES:
        raise UserError(
            f"{path}: type code {dtype_code} is not a type of ids. Name data of tokens."
        )
    expected_size = HEADER.size + 12 * num_sequences + 8 * num_documents
    if index.size != expected_size:
        raise UserError(
            f"{path} has {index.size} bytes, where its header asks for {expected_size}: it is "
            f"truncated or changed. {_REMEDY}"
        )
    return IndexHeader(np.dtype(DTYPES[dtype_code]), num_sequences, num_documents)


class _Index(NamedTuple):
    """The arrays of an index, memory-mapped."""

    path: str  # of the original, for messages
    itemsize: int  # bytes of an id
    sizes: np.ndarray  # int32 [S], tokens of each sequence
    pointers: np.ndarray  # int64 [S], first byte of each sequence
    documents: np.ndarray  # int64 [D], first sequence of each document, then S

    @classmethod
    def map(cls, file: Path, index: FileInfo) -> "_Index":
        header = read_header(file, index)
        num_sequences = header.num_sequences

        def mapped(dtype: str, count: int, offset: int) -> np.ndarray:
            if not count:
                return np.empty(0, dtype)
            return np.memmap(file, dtype, "r", offset, (count,)).view(np.ndarray)

        pointers_offset = HEADER.size + 4 * num_sequences
        return cls(
            path=index.path,
            itemsize=header.dtype.itemsize,
            sizes=mapped("<i4", num_sequences, HEADER.size),
            pointers=mapped("<i8", num_sequences, pointers_offset),
            documents=mapped("<i8", header.num_documents, pointers_offset + 8 * num_sequences),
        )


def read_offsets(file: Path, index: FileInfo) -> Iterator[dict[str, np.ndarray]]:
    """Yields blocks of `document_offsets` (int64), with the end.

    Sequences count as documents if all have one length (another program's training sequences), or
    if the index does not group them into documents. Raises UserError unless sequences are
    contiguous.
    """
    arrays = _Index.map(file, index)
    num_tokens, has_one_length = _check_sequences(arrays)
    _check_documents(arrays)
    num_sequences = len(arrays.sizes)
    documents = arrays.documents
    groups_all = len(documents) > 1 and documents[0] == 0 and documents[-1] == num_sequences
    if groups_all and not has_one_length and len(documents) <= num_sequences:
        first_sequences = documents[:-1]
        for start in range(0, len(first_sequences), _BLOCK):
            sequences = first_sequences[start : start + _BLOCK]
            # Documents without sequences may start past the last one.
            pointers = arrays.pointers[np.minimum(sequences, num_sequences - 1)]
            offsets = np.where(sequences < num_sequences, pointers // arrays.itemsize, num_tokens)
            yield {"document_offsets": offsets}
    else:
        for start in range(0, num_sequences, _BLOCK):
            pointers = arrays.pointers[start : start + _BLOCK]
            yield {"document_offsets": pointers // arrays.itemsize}
    yield {"document_offsets": np.array([num_tokens], np.int64)}


def _check_sequences(index: _Index) -> tuple[int, bool]:
    """Raises UserError unless sequences are contiguous.

    Returns:
      The number of tokens, and whether there are several sequences that all have one length, of
      which only the last may be shorter.
    """
    num_sequences = len(index.sizes)
    num_tokens = 0
    has_one_length = num_sequences > 1
    for start in range(0, num_sequences, _BLOCK):
        sizes = index.sizes[start : start + _BLOCK]
        if sizes.min() < 0:
            problem = f"has a sequence of {sizes.min()} tokens: it is damaged"
            raise UserError(f"{index.path} {problem}. {_REMEDY}")
        expected = (num_tokens + np.cumsum(sizes, dtype=np.int64) - sizes) * index.itemsize
        (wrong,) = np.nonzero(index.pointers[start : start + _BLOCK] != expected)
        if wrong.size:
            first = int(wrong[0])
            raise UserError(
                f"{index.path}: sequence {start + first} lies at byte "
                f"{index.pointers[start + first]}, where the ones before it end at "
                f"{expected[first]}; only sequences end to end are read. Merge the data again "
                "with merge_datasets.py."
            )
        is_last_block = start + _BLOCK >= num_sequences
        compared = sizes[:-1] if is_last_block else sizes
        has_one_length = has_one_length and bool((compared == index.sizes[0]).all())
        num_tokens += int(sizes.sum())
    if has_one_length:
        first_size = int(index.sizes[0])
        last_size = int(index.sizes[-1])
        is_shorter = num_sequences > 2 and 0 < last_size < first_size
        has_one_length = last_size == first_size or is_shorter
    return num_tokens, has_one_length


def _check_documents(index: _Index) -> None:
    """Raises UserError unless the document entries ascend from 0 or more to at most S."""
    documents = index.documents
    if not len(documents):
        return
    is_in_order = (
        documents[0] >= 0
        and documents[-1] <= len(index.sizes)
        and all((sizes >= 0).all() for sizes in document_sizes(documents))
    )
    if not is_in_order:
        raise UserError(
            f"{index.path}: its document entries are out of order: it is damaged. {_REMEDY}"
        )
