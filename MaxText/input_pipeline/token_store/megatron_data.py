"""Opens Megatron data: an `.idx` file and the ids beside it, in one `.bin` file or in parts."""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from MaxText.errors import UserError
from MaxText.input_pipeline.formats.megatron_index import read_index
from MaxText.input_pipeline.storage import fingerprint, is_url, list_files, version
from MaxText.input_pipeline.token_store.flat_files import FlatFile, FlatStream
from MaxText.input_pipeline.token_store.record_index import is_rows
from MaxText.input_pipeline.token_store.token_data import TokenData, boundaries_digest
from MaxText.input_pipeline.transient import may_pass


def open_megatron(files: Sequence[str], key: str, location: str) -> TokenData:
    """Opens one Megatron data set.

    Args:
      files: .idx and .bin files that the location names; either is enough.
      key: configuration key that named the location.
      location: it, for messages.

    Raises:
      UserError: no index or several, data that do not fit it, or no tokens.
    """
    indices = [file for file in files if file.endswith(".idx")]
    if not indices:  # the name of the .bin file was given
        indices = [re.sub(r"(-\d+-of-\d+)?\.bin$", ".idx", file) for file in files[:1]]
    if len(indices) > 1:
        raise UserError(
            f"{key}={location} holds {len(indices)} Megatron data sets "
            f"({', '.join(Path(index).name for index in indices[:3])} ...). Name one of them, or "
            "mix them with dataset_mix."
        )
    index = read_index(indices[0])
    prefix = indices[0].removesuffix(".idx")
    shards = [f"{prefix}.bin"]
    if not _exists(shards[0]):
        # Published in parts of a fixed number of bytes, to be joined.
        pattern = f"{prefix}-*-of-*.bin"
        shards = list_files(pattern, f"{key}={location}, the data of {prefix}.idx")
    firsts, total = [], 0
    for shard in shards:
        firsts.append(FlatFile(shard, total))
        total += version(shard)[0] // index.dtype.itemsize
    if index.dtype.kind == "i" and index.dtype.itemsize == 1:
        raise UserError(f"{indices[0]} has ids of one signed byte, which are no token ids.")
    sizes = np.diff(index.offsets)
    rows = is_rows(sizes)
    offsets = index.offsets if rows else index.document_offsets
    stream = FlatStream(firsts, index.dtype, offsets)
    if len(stream) == 0:
        raise UserError(f"{key}={location} holds no tokens. Name another data set.")
    kind = f"rows of {int(sizes[0]):,}" if rows else "documents"
    return TokenData(
        stream=stream,
        description=(
            f"{len(stream):,} tokens in {offsets.size - 1:,} {kind} of the Megatron data {prefix}"
        ),
        fingerprint=fingerprint([indices[0], *shards], [boundaries_digest(offsets)]),
        rows=rows,
    )


def _exists(file: str) -> bool:
    try:
        version(file)
    except UserError as error:
        if may_pass(error, is_url(file)):
            raise
        return False
    return True
