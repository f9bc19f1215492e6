"""Export to a Hugging Face checkpoint, folding the slot zoom into weights.

`AutoModelForCausalLM.from_pretrained` loads the result if transformers has the family. No
checkpoint format stores a fixed zoom. Pattention multiplies normalized scores by sqrt(zoom)
(growth/zoom.py), and TokenFormer's PyTorch code always uses the number of slots instead. If
sqrt(zoom) is applied last, value slots absorb the ratio exactly. With l2_norm_gelu it is applied
inside gelu, and the norm cancels any factor of the keys, so folding is impossible.
"""

import collections
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors.numpy import save_file

from MaxText.config.layer_sections import SlotPlace
from MaxText.config.schema import Config, flatten, unflatten
from MaxText.conversion import hf_config
from MaxText.conversion.family import Family
from MaxText.conversion.hf_checkpoint import CONFIG, GENERATION_CONFIG, SAFETENSORS
from MaxText.conversion.tensor_map import TensorMap
from MaxText.conversion.tokenizer_copy import write_json
from MaxText.conversion.weight_source import WeightSource
from MaxText.errors import UserError
from MaxText.layers.pattention import slot_place, slots_by_place

# Ids in both config.json and generation_config.json.
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def _num_bytes(spec: jax.ShapeDtypeStruct) -> int:
    return spec.size * spec.dtype.itemsize


class HFExporter:
    """Plans and writes a Hugging Face checkpoint: all tensors and config.json."""

    def __init__(
        self,
        weights: WeightSource,
        family: Family,
        dtype: str,  # of all tensors; "" keeps the stored formats
        formats: Mapping[str, str] | None = None,  # of tensors that an import widened
    ):
        self.weights, self.family, self._dtype = weights, family, dtype
        self.map = TensorMap(family, weights.model)
        self.specs: dict[str, jax.ShapeDtypeStruct] = {}
        for tensor in self.map.tensors:
            narrow = dtype or (formats or {}).get(tensor.name)
            wanted = narrow or jnp.result_type(*(weights.formats[n] for n in tensor.param_names))
            self.specs[tensor.name] = jax.ShapeDtypeStruct(tensor.shape, np.dtype(wanted))

    def write(self, folder: Path, max_shard_bytes: int) -> list[str]:
        """Writes tensors; returns file names. UserError if float16 overflows."""
        return write_safetensors(folder, self.specs, self._tensors(), max_shard_bytes)

    def _tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        for names, tensors in self.map.groups.items():
            arrays = [self.weights.read(name) for name in names]
            for tensor in tensors:
                yield tensor.name, self._cast(tensor.name, self.map.whole(tensor, arrays))

    def _cast(self, name: str, tensor: np.ndarray) -> np.ndarray:
        wanted = self.specs[name].dtype
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
        """Returns config.json.

        Keys of `kept`, the imported one, are preserved if no table determines them; `token_ids` are
        those of the tokenizer, used if `kept` has none.
        """
        sizes = collections.Counter()
        for spec in self.specs.values():
            sizes[spec.dtype.name] += _num_bytes(spec)
        same_family = hf_config.lookup_family(kept) is self.family
        determined = hf_config.table_names(self.family)
        if self.family.has_model_type or self._dtype:
            # Without effect the original dtype stays: published float32 TokenFormers say float16.
            determined |= {"dtype", "torch_dtype", "transformers_version"}
        written, rest = hf_config.to_config_json(self.family, self.weights.config), {}
        if same_family:
            written |= hf_config.kept_window(self.family, kept, written)
            rest = {name: value for name, value in kept.items() if name not in determined}
        # Without these, transformers defaults to the ids of its own tokenizers.
        named = _TOKEN_IDS if self.family.has_model_type else token_ids
        return {
            **written,
            "torch_dtype": sizes.most_common(1)[0][0],
            **{name: token_ids.get(name) for name in named},
            **rest,
        }


def write_safetensors(
    folder: Path,
    specs: Mapping[str, jax.ShapeDtypeStruct],
    tensors: Iterable[tuple[str, np.ndarray]],
    max_shard_bytes: int,
) -> list[str]:
    """Writes `tensors` in the order of `specs`; returns the file names.

    Writes several files and an index if they exceed `max_shard_bytes`.
    """
    # The factory groups tensors that share memory; no storage id means none do.
    split = split_state_dict_into_shards_factory(
        {name: _num_bytes(one) for name, one in specs.items()},
        get_storage_size=lambda size: size,
        get_storage_id=lambda size: None,
        filename_pattern=SAFETENSORS.replace(".", "{suffix}."),
        max_shard_size=max_shard_bytes,
    )
    waiting: dict[str, dict[str, np.ndarray]] = {}  # by file
    for name, tensor in tensors:
        file = split.tensor_to_filename[name]
        waiting.setdefault(file, {})[name] = np.ascontiguousarray(tensor)
        if len(waiting[file]) == len(split.filename_to_tensors[file]):
            # transformers refuses files without a format.
            save_file(waiting.pop(file), folder / file, {"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        path = folder / (SAFETENSORS + ".index.json")
        path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return list(split.filename_to_tensors)


def write_configs(
    folder: Path,
    config_json: Mapping[str, Any],
    generation: Mapping[str, Any] | None,
    family: Family,
) -> list[str]:
    """Writes config.json and generation_config.json; returns the file names.

    generation_config.json is the imported one, or derived from config.json if transformers has the
    family.
    """
    write_json(folder / CONFIG, config_json)
    if not generation and not family.in_transformers:
        return [CONFIG]
    ids = {name: config_json[name] for name in _TOKEN_IDS if config_json.get(name) is not None}
    write_json(folder / GENERATION_CONFIG, generation or {"_from_model_config": True, **ids})
    return [CONFIG, GENERATION_CONFIG]


_LAST = ("gelu_l2_norm", "l2_norm")  # normalize_type that applies sqrt(zoom) last
_INSIDE = "l2_norm_gelu"  # normalize_type that applies it inside gelu
_NO_ZOOM = {"zoom_dim": 0.0} | {f"zoom_dims.{place}": -1.0 for place in get_args(SlotPlace)}


class FoldedWeights(WeightSource):
    """Weights with value slots scaled by `factors` (by parameter name)."""

    def __init__(self, weights: WeightSource, config: Config, factors: dict[str, float]):
        super().__init__(config)
        self.formats, self.factors, self._weights = weights.formats, factors, weights

    def read(self, name: str) -> np.ndarray:
        stored = self._weights.read(name)
        if name not in self.factors:
            return stored
        product = stored.astype(np.float32)
        product *= np.float32(self.factors[name])
        return product.astype(stored.dtype)


def fold_zoom_into_values(weights: WeightSource, asked: str) -> tuple[WeightSource, str]:
    """Returns equivalent weights without a zoom, and a line to report it.

    Returns the weights unchanged and an empty line if no zoom is fixed, or no family would fit
    anyway.
    """
    config = weights.config
    pattention, emb_dim = config.model.pattention, config.model.shape.dimensions.emb_dim
    scales = {}  # value parameter -> (zoom, slots) if they differ
    for name in weights.model.parameters:
        place = slot_place(name)
        if place and name.endswith("values/kernel"):
            scale = pattention.zoom(place, emb_dim), pattention.num_slots(place, emb_dim)
            if scale[0] != scale[1]:
                scales[name] = scale
    if not scales or pattention.normalize_type not in (*_LAST, _INSIDE):
        return weights, ""
    without = unflatten(flatten(config) | _NO_ZOOM)
    try:
        family = hf_config.find_family(without, asked)
    except UserError:
        return weights, ""  # find_family reports this difference with the others
    if pattention.normalize_type == _INSIDE:
        places = {name: "zoom {:g} for {} slots".format(*scale) for name, scale in scales.items()}
        raise UserError(
            f"{family.architecture} scales scores by the number of slots, and its layout has no "
            f"zoom. This model has another scale: {slots_by_place(places)}. With normalize_type="
            f"{pattention.normalize_type} no weights make up for it, so the folder would compute "
            "something else.\n  What can be exported: the model before it grew, one that grew with "
            "growth.mode=random, and any of normalize_type=gelu_l2_norm."
        )
    factors = {name: math.sqrt(zoom / slots) for name, (zoom, slots) in scales.items()}
    words = slots_by_place({name: f"{factor:.4g}" for name, factor in factors.items()})
    return FoldedWeights(weights, without, factors), (
        "The layout has no zoom: value slots are multiplied by sqrt(zoom / slots), which keeps "
        f"the function: {words}"
    )
