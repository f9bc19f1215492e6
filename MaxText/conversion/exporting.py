"""Weights of ours as a folder of Hugging Face.

`AutoModelForCausalLM.from_pretrained` loads it if transformers has the family.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from MaxText.conversion.family import Family
from MaxText.conversion.hugging_face_folder import CONFIG, GENERATION_CONFIG
from MaxText.conversion.safetensors_files import Planned, SafetensorsFiles
from MaxText.conversion.settings import (
    kept_window,
    kept_words,
    named_family,
    settled_names,
    to_config_json,
)
from MaxText.conversion.tensor_map import TensorMap
from MaxText.conversion.weights import Weights, num_bytes
from MaxText.errors import UserError

# Ids that a folder names both for the model and for generation.
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


class FolderExport:
    """What will be written: names, shapes and formats of all tensors, and config.json.

    Attributes:
      map: tensors of theirs and arrays of ours.
      planned: every tensor to be written.
    """

    def __init__(
        self,
        weights: Weights,
        family: Family,
        dtype: str,
        formats: Mapping[str, str] | None = None,
    ):
        """
        Args:
          dtype: format of all tensors, or "" for the one that each array is stored in.
          formats: of tensors that an import made wider: without `dtype` they are that again.
        """
        self.weights, self.family, self._dtype = weights, family, dtype
        self.map = TensorMap(family, weights.model)
        self.planned: dict[str, Planned] = {}
        for tensor in self.map.tensors:
            narrow = dtype or (formats or {}).get(tensor.name)
            wanted = np.dtype(narrow) if narrow else self._format(tensor.ours)
            self.planned[tensor.name] = Planned(tensor.shape, wanted)

    def _format(self, ours: tuple[str, ...]) -> np.dtype:
        formats = {self.weights.formats[name].name for name in ours}
        return np.dtype(formats.pop() if len(formats) == 1 else "float32")

    def peak_bytes(self) -> int:
        """Memory at the peak: arrays that share tensors, as much while they are read, a tensor."""
        sizes = num_bytes(self.weights)
        groups = max(sum(sizes[name] for name in ours) for ours in self.map.groups)
        largest = max(sizes.values())
        return groups + 2 * largest + max(planned.num_bytes for planned in self.planned.values())

    def write(self, folder: Path, max_shard_bytes: int) -> list[str]:
        """Writes the tensors; returns the names of the files.

        Raises:
          UserError: a number does not fit the format that was asked for.
        """
        with SafetensorsFiles(folder, self.planned, max_shard_bytes) as files:
            for ours, tensors in self.map.groups.items():
                arrays = [self.weights.read(name) for name in ours]
                for tensor in tensors:
                    whole = self.map.whole(tensor, arrays)
                    files.write(tensor.name, self._cast(tensor.name, whole))
            return files.names

    def _cast(self, name: str, tensor: np.ndarray) -> np.ndarray:
        wanted = self.planned[name].dtype
        if tensor.dtype == wanted:
            return tensor
        with np.errstate(over="ignore"):
            cast = tensor.astype(wanted)
        if wanted == np.float16 and np.isinf(cast).any() and not np.isinf(tensor).any():
            raise UserError(
                f"{name} has {np.abs(tensor.astype(np.float32)).max():.6g}, and float16 ends at "
                "65504. Use dtype=bfloat16 or dtype=float32."
            )
        return cast

    def config_json(self, kept: Mapping[str, Any], token_ids: Mapping[str, int]) -> dict[str, Any]:
        """config.json.

        Args:
          kept: of the folder that the weights came from; what the table does not decide stays.
          token_ids: of the tokenizer, where `kept` has none.
        """
        sizes: dict[str, int] = {}
        for planned in self.planned.values():
            name = planned.dtype.name
            sizes[name] = sizes.get(name, 0) + planned.num_bytes
        same_family = named_family(kept) is self.family
        settled = settled_names(self.family)
        if self.family.has_model_type or self._dtype:
            # Where it decides nothing it stays: published TokenFormers say float16, being float32.
            settled |= {"dtype", "torch_dtype", "transformers_version"}
        rest = {name: value for name, value in kept.items() if name not in settled and same_family}
        written = to_config_json(self.family, self.weights.config)
        if same_family:
            written |= kept_window(self.family, kept, written) | kept_words(self.family, kept)
        # Without these the classes of transformers name ids of their own tokenizers.
        named = _TOKEN_IDS if self.family.has_model_type else token_ids
        return {
            **written,
            "torch_dtype": max(sizes, key=lambda name: sizes[name]),
            **{name: token_ids.get(name) for name in named},
            **rest,
        }


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes a JSON object as Hugging Face's files are."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_configs(
    folder: Path,
    config_json: Mapping[str, Any],
    generation: Mapping[str, Any] | None,
    family: Family,
) -> list[str]:
    """config.json, and generation_config.json: the one of the import, or the ids of tokens.

    Returns:
      The names of the files. Without transformers only an import brings the second.
    """
    write_json(folder / CONFIG, config_json)
    if not generation and not family.in_transformers:
        return [CONFIG]
    ids = {name: config_json[name] for name in _TOKEN_IDS if config_json.get(name) is not None}
    write_json(folder / GENERATION_CONFIG, generation or {"_from_model_config": True, **ids})
    return [CONFIG, GENERATION_CONFIG]
