"""Token files of datatrove and of Dolma, read in place.

Both write the ids of a shard end to end (uint16 or uint32, little-endian, no header) and where its
documents end into a file next to it:

    datatrove   NAME.ds     NAME.ds.index   uint64 [D]: the token after each document
    Dolma       NAME.npy    NAME.csv.gz     lines of start, end (tokens), id, source, line

Neither says how many bytes an id takes: the size of the file and the end of its last document do.
Document offsets are computed once and then mapped from the cache.

Legend: D documents of a file.
"""

import csv
import gzip
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from MaxText.errors import UserError
from MaxText.input_pipeline.local_cache import cached_arrays
from MaxText.input_pipeline.token_store.store import TokenStore
from MaxText.input_pipeline.token_store.token_dataset import (
    TokenDataset,
    boundaries_digest,
    foreign_dataset,
)
from MaxText.storage import file_access
from MaxText.storage.file_access import FileInfo

_ID_TYPES = {2: np.dtype("<u2"), 4: np.dtype("<u4")}  # by bytes
_REMEDY = "Copy both files again, or make them again with the program that wrote them."
_BLOCK = 2**20  # documents handled together


def open_flat_token_files(
    files: Sequence[FileInfo], file_format: str, key: str, location: str, cache_dir: Path
) -> TokenDataset:
    """Opens token files of another program.

    Args:
      files: Its .ds or .npy files.
      file_format: "datatrove" or "dolma".
      key: Configuration key that named them, for messages.
      location: Its value.
      cache_dir: Folder for document offsets.

    Raises:
      UserError: A file of document ends is missing or damaged, it does not fit its tokens, files
        hold ids of different types, or there are no tokens.
    """
    setting = f"{key}={location}"
    flat_format = FLAT_FORMATS[file_format]
    indices = [_index_of(file, flat_format, setting) for file in files]
    contents = [f"{file_access.absolute(one.path)} {one.size} {one.tag}" for one in indices]
    documents = cached_arrays(
        cache_dir, "flat1", f"{file_format} {contents}", lambda: _read_offsets(indices, flat_format)
    )
    offsets = documents["document_offsets"]
    num_tokens = documents["num_tokens"].tolist()
    store = TokenStore(
        [file.path for file in files], num_tokens, _id_type(files, num_tokens), documents
    )
    store.check_sizes(files)
    return foreign_dataset(
        store,
        setting=setting,
        source=f"{len(files)} {flat_format.program} files at {location}",
        fingerprint=file_access.fingerprint(list(files), [boundaries_digest(offsets)]),
    )


def _index_of(file: FileInfo, flat_format: "_FlatFormat", setting: str) -> FileInfo:
    """Returns the file that says where the documents of a token file end."""
    path = f"{file.path.removesuffix(flat_format.removed_suffix)}{flat_format.index_suffix}"
    if not file_access.path_type(path):
        raise UserError(
            f"{setting}: {path} is missing, which says where the documents of {file.path} end. "
            f"Copy it from where {flat_format.program} wrote it."
        )
    return file_access.file_info(path)


def _read_offsets(
    indices: Sequence[FileInfo], flat_format: "_FlatFormat"
) -> Iterator[dict[str, np.ndarray]]:
    """Yields blocks of `document_offsets` (with the end) and of `num_tokens` of each file; int64.

    Raises UserError unless the documents of each file lie end to end.
    """
    first_token = 0
    for index in indices:
        file_tokens = 0
        for ends in flat_format.read_ends(index):
            starts = np.concatenate([[file_tokens], ends[:-1]])
            if (ends < starts).any():
                raise UserError(f"{index.path}: its documents do not lie end to end. {_REMEDY}")
            yield {
                "document_offsets": first_token + starts,
                "num_tokens": np.empty(0, np.int64),
            }
            file_tokens = int(ends[-1])
        first_token += file_tokens
        yield {
            "document_offsets": np.empty(0, np.int64),
            "num_tokens": np.array([file_tokens], np.int64),
        }
    yield {
        "document_offsets": np.array([first_token], np.int64),
        "num_tokens": np.empty(0, np.int64),
    }


def _datatrove_ends(index: FileInfo) -> Iterator[np.ndarray]:
    """Yields the document ends of a .ds.index file in blocks (int64 [D])."""
    if index.size % 8:
        raise UserError(f"{index.path} has {index.size} bytes, no multiple of 8. {_REMEDY}")
    with file_access.open_stream(index.path) as stream:
        while block := stream.read(8 * _BLOCK):
            yield np.frombuffer(block, "<u8").astype(np.int64)


def _dolma_ends(index: FileInfo) -> Iterator[np.ndarray]:
    """Yields the document ends of a .csv.gz file in blocks (int64 [D])."""
    ends: list[int] = []
    last_end = 0
    try:
        with (
            file_access.open_stream(index.path) as stream,
            gzip.open(stream, "rt", encoding="utf-8", newline="") as text,
        ):
            for start, end, *_ in csv.reader(text):
                if int(start) != last_end:
                    raise UserError(
                        f"{index.path}: a document starts at token {start}, where the one before "
                        f"it ends at {last_end}; only documents end to end are read. {_REMEDY}"
                    )
                last_end = int(end)
                ends.append(last_end)
                if len(ends) == _BLOCK:
                    yield np.array(ends, np.int64)
                    ends = []
    except UserError:
        raise
    except (ValueError, EOFError, OSError, csv.Error) as error:
        raise UserError(f"{index.path} cannot be read ({error}). {_REMEDY}") from error
    if ends:
        yield np.array(ends, np.int64)


def _id_type(files: Sequence[FileInfo], num_tokens: Sequence[int]) -> np.dtype:
    """Returns the type of the ids, from the sizes of the files; UserError if it is not one."""
    types: dict[np.dtype, str] = {}
    for file, count in zip(files, num_tokens, strict=True):
        if not count and not file.size:
            continue
        id_bytes, remainder = divmod(file.size, max(count, 1))
        if remainder or id_bytes not in _ID_TYPES:
            raise UserError(
                f"{file.path} has {file.size} bytes, where its documents hold {count} tokens of 2 "
                f"or 4 bytes: it is truncated or changed. {_REMEDY}"
            )
        types.setdefault(_ID_TYPES[id_bytes], file.path)
    if len(types) > 1:
        (first, first_path), (second, second_path) = list(types.items())[:2]
        raise UserError(
            f"{first_path} holds ids of {first.itemsize} bytes and {second_path} of "
            f"{second.itemsize}. Mix them as two data sets: data_mixture_weights."
        )
    return next(iter(types), _ID_TYPES[4])


class _FlatFormat(NamedTuple):
    """What one program writes."""

    program: str
    removed_suffix: str  # of a token file, before that of its document ends is added
    index_suffix: str
    read_ends: Callable[[FileInfo], Iterator[np.ndarray]]


FLAT_FORMATS = {
    "datatrove": _FlatFormat("datatrove", "", ".index", _datatrove_ends),
    "dolma": _FlatFormat("Dolma", ".npy", ".csv.gz", _dolma_ends),
}
