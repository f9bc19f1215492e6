"""Writes safetensors files, with one file in memory at a time."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors.numpy import save_file

from MaxText.conversion.hugging_face_folder import SAFETENSORS

# transformers refuses files without a format.
_METADATA = {"format": "pt"}


class Planned(NamedTuple):
    """Shape and format of a tensor to be written."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize


def write(
    folder: Path,
    planned: Mapping[str, Planned],
    tensors: Iterable[tuple[str, np.ndarray]],
    max_shard_bytes: int,
) -> list[str]:
    """Writes `tensors` in the order of `planned`; returns the file names.

    Writes several files and an index if they exceed `max_shard_bytes`.
    """
    # The factory groups tensors that share memory; no storage id means none do.
    split = split_state_dict_into_shards_factory(
        {name: one.num_bytes for name, one in planned.items()},
        get_storage_size=lambda size: size,
        get_storage_id=lambda size: None,
        filename_pattern=SAFETENSORS.replace(".", "{suffix}."),
        max_shard_size=max_shard_bytes,
    )
    waiting: dict[str, dict[str, np.ndarray]] = {}  # by file
    for name, tensor in tensors:
        assert (tensor.shape, tensor.dtype) == planned[name], (name, tensor.shape, tensor.dtype)
        file = split.tensor_to_filename[name]
        waiting.setdefault(file, {})[name] = np.ascontiguousarray(tensor)
        if len(waiting[file]) == len(split.filename_to_tensors[file]):
            save_file(waiting.pop(file), folder / file, _METADATA)
    assert not waiting, f"never written: {sorted(waiting)}"
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        path = folder / (SAFETENSORS + ".index.json")
        path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return list(split.filename_to_tensors)
