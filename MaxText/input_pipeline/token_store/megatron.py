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
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from MaxText.errors import UserError
from MaxText.input_pipeline.document_sources.byte_streams import local_file
from MaxText.input_pipeline.local_cache import cached_arrays
from MaxText.input_pipeline.token_store.store import (
    TokenDataset,
    TokenStore,
    boundaries_digest,
    document_sizes,
    foreign_data,
)
from MaxText.storage import file_access
from MaxText.storage.file_access import FileInfo
from MaxText.storage.paths import natural_key

MAGIC = b"MMIDIDX\0\0"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "u1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # others are not types of ids
_AGAIN = "Copy it again, or make it again with the program that wrote it."
_BLOCK = 2**20


def open_megatron(
    files: Sequence[FileInfo], key: str, location: str, cache_dir: Path
) -> TokenDataset:
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
        folder, _, name = prefix.rpartition("/")
        # Compared as text: the name may hold characters of patterns.
        shard_name = re.compile(re.escape(name) + r"-\d+-of-\d+\.bin")
        shards = [
            shard
            for shard in file_access.files_in(folder or ".")
            if shard_name.fullmatch(shard.path.rpartition("/")[2])
        ]
        shards.sort(key=lambda shard: natural_key(shard.path))
        if not shards:
            raise UserError(
                f"{key}={location}: no such file {prefix}.bin or {name}-*-of-*.bin, the data of "
                f"{index.path}. {_AGAIN}"
            )
    identity = f"{file_access.absolute(index.path)} {index.size} {index.tag}"
    try:
        with local_file(index.path) as name:
            file = Path(name)
            dtype = read_header(file, index)[0]
            documents = cached_arrays(
                cache_dir, "megatron1", identity, lambda: read_offsets(file, index)
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


def read_offsets(file: Path, index: FileInfo) -> Iterator[dict[str, np.ndarray]]:
    """Yields blocks of `document_offsets` (int64), with the end.

    Sequences count as documents if all have one length (another program's training sequences), or
    if the index does not group them into documents. Raises UserError unless sequences are
    contiguous.
    """
    dtype, num_sequences, num_documents = read_header(file, index)
    path = index.path
    at = HEADER.size

    def mapped(kind: str, count: int, offset: int) -> np.ndarray:
        if not count:
            return np.empty(0, kind)
        return np.memmap(file, kind, "r", offset, (count,)).view(np.ndarray)

    sizes = mapped("<i4", num_sequences, at)
    pointers = mapped("<i8", num_sequences, at + 4 * num_sequences)
    documents = mapped("<i8", num_documents, at + 12 * num_sequences)
    total = 0
    is_even = num_sequences > 1
    for start in range(0, num_sequences, _BLOCK):
        block = sizes[start : start + _BLOCK]
        if block.min() < 0:
            problem = f"has a sequence of {block.min()} tokens: it is damaged"
            raise UserError(f"{path} {problem}. {_AGAIN}")
        firsts = total + np.cumsum(block, dtype=np.int64) - block
        wrong = np.flatnonzero(pointers[start : start + _BLOCK] != firsts * dtype.itemsize)
        if wrong.size:
            first = int(wrong[0])
            raise UserError(
                f"{path}: sequence {start + first} lies at byte {pointers[start + first]}, where "
                f"the ones before it end at {firsts[first] * dtype.itemsize}; only sequences end "
                "to end are read. Merge the data again with merge_datasets.py."
            )
        inner = block[:-1] if start + _BLOCK >= num_sequences else block
        is_even = is_even and bool((inner == sizes[0]).all())
        total += int(block.sum())
    if num_documents and (
        documents[0] < 0
        or documents[-1] > num_sequences
        or any((block < 0).any() for block in document_sizes(documents))
    ):
        raise UserError(f"{path}: its document entries are out of order: it is damaged. {_AGAIN}")
    whole = num_documents > 1 and documents[0] == 0 and documents[-1] == num_sequences
    last = int(sizes[-1]) if num_sequences else 0
    is_even = is_even and (last == sizes[0] or (num_sequences > 2 and 0 < last < int(sizes[0])))
    firsts_of = documents[:-1] if whole and not is_even and num_documents <= num_sequences else None
    if firsts_of is None:
        for start in range(0, num_sequences, _BLOCK):
            yield {"document_offsets": pointers[start : start + _BLOCK] // dtype.itemsize}
    else:
        for start in range(0, len(firsts_of), _BLOCK):
            sequences = firsts_of[start : start + _BLOCK]
            # Documents without sequences may start past the last one.
            begins = pointers[np.minimum(sequences, num_sequences - 1)] // dtype.itemsize
            yield {"document_offsets": np.where(sequences < num_sequences, begins, total)}
    yield {"document_offsets": np.array([total], np.int64)}
