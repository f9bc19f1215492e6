"""Writes safetensors files tensor by tensor, in any order.

The library's own writer wants all tensors of a file in memory at once. A file is 8 bytes of header
length, a JSON header with every name, format, shape and place, and the numbers; when all shapes are
known, each tensor can be written to its place when it comes. Source: the format's description in
the safetensors repository.
"""

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, NamedTuple

import numpy as np
from huggingface_hub import split_state_dict_into_shards_factory

from MaxText.conversion.hugging_face_folder import SAFETENSORS

_FORMATS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
# transformers refuses files that do not name the library they are for.
_METADATA = {"format": "pt"}
_PATTERN = SAFETENSORS.replace(".", "{suffix}.")


class Planned(NamedTuple):
    """Shape and format of a tensor to be written."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of its numbers."""
        return int(np.prod(self.shape)) * self.dtype.itemsize


class SafetensorsFiles:
    """One file, or several with an index where there is more than `max_shard_bytes`.

    A context manager; every planned tensor must be written before it ends.
    """

    def __init__(self, folder: Path, tensors: Mapping[str, Planned], max_shard_bytes: int):
        self._folder = folder
        self._tensors = dict(tensors)
        sizes = {name: planned.num_bytes for name, planned in tensors.items()}
        # The factory groups what shares memory; numbers of bytes share none.
        self._split = split_state_dict_into_shards_factory(
            sizes,
            get_storage_size=lambda size: size,
            get_storage_id=lambda size: None,
            filename_pattern=_PATTERN,
            max_shard_size=max_shard_bytes,
        )
        self._places: dict[str, tuple[IO[bytes], int]] = {}
        self._stack = contextlib.ExitStack()

    @property
    def names(self) -> list[str]:
        """Names of the files."""
        return list(self._split.filename_to_tensors)

    def __enter__(self) -> "SafetensorsFiles":
        for name, tensors in self._split.filename_to_tensors.items():
            file = self._stack.enter_context((self._folder / name).open("wb"))
            self._begin(file, tensors)
        if self._split.is_sharded:
            index = {"metadata": self._split.metadata, "weight_map": self._split.tensor_to_filename}
            path = self._folder / (SAFETENSORS + ".index.json")
            path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        return self

    def _begin(self, file: IO[bytes], names: list[str]) -> None:
        header: dict[str, object] = {"__metadata__": _METADATA}
        offset, starts = 0, {}
        for name in names:
            planned = self._tensors[name]
            starts[name] = offset
            header[name] = {
                "dtype": _FORMATS[planned.dtype.name],
                "shape": planned.shape,
                "data_offsets": [offset, offset + planned.num_bytes],
            }
            offset += planned.num_bytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # numbers begin at a multiple of 8
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)
        self._places |= {name: (file, 8 + len(text) + start) for name, start in starts.items()}

    def write(self, name: str, tensor: np.ndarray) -> None:
        """Writes one planned tensor to its place."""
        planned = self._tensors[name]
        assert (tensor.shape, tensor.dtype) == planned, (name, tensor.shape, tensor.dtype)
        file, place = self._places.pop(name)
        file.seek(place)
        file.write(np.ascontiguousarray(tensor).view(np.uint8).data)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()
        assert error is not None or not self._places, f"never written: {sorted(self._places)[:3]}"
