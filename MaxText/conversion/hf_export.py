"""Export to a Hugging Face checkpoint, and comparison with transformers.

`AutoModelForCausalLM.from_pretrained` loads the result if transformers has the family. No
checkpoint format stores a fixed zoom. Pattention multiplies normalized scores by sqrt(zoom)
(growth/resolve.py), and TokenFormer's PyTorch code always uses the number of slots instead. If
sqrt(zoom) is applied last, value slots absorb the ratio exactly. With l2_norm_gelu it is applied
inside gelu, and the norm cancels any factor of the keys, so folding is impossible.
"""

import collections
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors.numpy import save_file

from MaxText.config import schema
from MaxText.config.layer_sections import SlotPlace
from MaxText.config.schema import Config
from MaxText.conversion import hf_config
from MaxText.conversion.family import Family
from MaxText.conversion.hf_checkpoint import CONFIG, GENERATION_CONFIG, SAFETENSORS
from MaxText.conversion.tensor_map import TensorMap
from MaxText.conversion.tokenizer_copy import write_json
from MaxText.conversion.weight_source import WeightSource, abstract_model, unflatten
from MaxText.errors import UserError
from MaxText.layers.batch import Batch
from MaxText.layers.pattention import slot_place, slots_by_place

# Relative to the largest logit. Both use float32, in another order; measured: 2e-6 for GPT-2 sizes.
LOGITS_TOLERANCE = 1e-4
LOSS_TOLERANCE = 1e-4
_ROWS, _LENGTH = 2, 64

# Ids in both config.json and generation_config.json.
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


class HFExporter:
    """Writes a Hugging Face checkpoint: all tensors and config.json."""

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
                whole, wanted = self.map.whole(tensor, arrays), self.specs[tensor.name].dtype
                with np.errstate(over="ignore"):
                    cast = whole.astype(wanted, copy=False)
                if wanted == np.float16 and np.isinf(cast).any() and not np.isinf(whole).any():
                    raise UserError(
                        f"{tensor.name} has {np.abs(whole.astype(np.float32)).max():.6g}, and "
                        "float16 ends at 65504. Use dtype=bfloat16 or dtype=float32."
                    )
                yield tensor.name, cast

    def write_configs(
        self,
        folder: Path,
        kept: Mapping[str, Any],
        generation: Mapping[str, Any] | None,
        token_ids: Mapping[str, int],
    ) -> list[str]:
        """Writes config.json and generation_config.json; returns the file names.

        Keys of `kept`, the imported config.json, are preserved if no table determines them;
        `token_ids` are those of the tokenizer, used if `kept` has none. `generation` is the
        imported generation_config.json; else it is derived if transformers has the family.
        """
        sizes = collections.Counter()
        for spec in self.specs.values():
            sizes[spec.dtype.name] += spec.size * spec.dtype.itemsize
        family = self.family
        written, rest = hf_config.to_config_json(family, self.weights.config), {}
        if hf_config.lookup_family(kept) is family:
            determined = hf_config.table_names(family)
            if family.has_model_type or self._dtype:
                # Without effect the original dtype stays: published float32 TokenFormers say
                # float16.
                determined |= {"dtype", "torch_dtype", "transformers_version"}
            written |= hf_config.kept_window(family, kept, written)
            rest = {name: value for name, value in kept.items() if name not in determined}
        # Without these, transformers defaults to the ids of its own tokenizers.
        named = _TOKEN_IDS if family.has_model_type else token_ids
        ids = {name: token_ids.get(name) for name in named}
        config = {**written, "torch_dtype": sizes.most_common(1)[0][0], **ids, **rest}
        write_json(folder / CONFIG, config)
        if not generation and not family.in_transformers:
            return [CONFIG]
        ids = {name: config[name] for name in _TOKEN_IDS if config.get(name) is not None}
        write_json(folder / GENERATION_CONFIG, generation or {"_from_model_config": True, **ids})
        return [CONFIG, GENERATION_CONFIG]


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
        {name: one.size * one.dtype.itemsize for name, one in specs.items()},
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
        write_json(folder / (SAFETENSORS + ".index.json"), index)
    return list(split.filename_to_tensors)


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
    without = schema.unflatten(schema.flatten(config) | _NO_ZOOM)
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


def check_verifiable(family: Family, config: Config) -> None:
    """Refuses an impossible verification before any work is done."""
    if absent := hf_config.absent_in_transformers(family, config):
        raise UserError(
            f"--verify compares with transformers, which has no {absent}. Remove --verify."
        )
    try:
        import torch  # pyright: ignore[reportMissingImports]  # noqa: F401
        import transformers  # pyright: ignore[reportMissingImports]  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"--verify needs torch and transformers ({error}): pip install '.[torch]'."
        ) from error


def verify(
    weights: WeightSource, folder: Path, shown: str, log: Callable[[str], None], dtype: str = ""
) -> None:
    """Compares logits and loss of random tokens; UserError if they differ.

    With `dtype`, our tensors are rounded to it like the exported ones.
    """
    config = weights.config.model
    length = min(_LENGTH, config.shape.max_target_length)
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, config.shape.vocab_size, (_ROWS, length)).astype(np.int32)
    expected, actual = _their_logits(folder, tokens), _our_logits(weights, tokens, dtype)
    difference, largest = float(np.abs(actual - expected).max()), float(np.abs(expected).max())
    our_loss, their_loss = _loss(actual, tokens), _loss(expected, tokens)
    line = (
        f"logits differ by at most {difference:.2g} (largest logit {largest:.3g}), loss "
        f"{our_loss:.6f} here and {their_loss:.6f} in transformers"
    )
    is_close = difference <= LOGITS_TOLERANCE * max(1.0, largest)
    if not (is_close and abs(our_loss - their_loss) <= LOSS_TOLERANCE * their_loss):
        raise UserError(
            f"{shown} gives different results in transformers: {line}. Nothing was written. "
            "Please report this with the folder's config.json."
        )
    log(f"Verified: {line}")


def _our_logits(weights: WeightSource, tokens: np.ndarray, dtype: str) -> np.ndarray:
    exact = {"dtype": "float32", "matmul_precision": "highest"}
    model = abstract_model(schema.unflatten(schema.flatten(weights.config) | exact))
    formats = {name: dtype or weights.formats[name] for name in model.parameters}
    params = unflatten({name: weights.read(name).astype(kind) for name, kind in formats.items()})

    @jax.jit
    def run(params, tokens_BT):
        decoder = model.merge(jax.tree.map(lambda x: x.astype(jnp.float32), params))
        batch = Batch(tokens_BT, tokens_BT, jnp.ones(tokens_BT.shape))
        return decoder(batch)

    with jax.default_device(jax.devices("cpu")[0]):
        return np.asarray(run(params, tokens))


def _their_logits(folder: Path, tokens: np.ndarray) -> np.ndarray:
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    with torch.no_grad():
        return model.eval()(torch.from_numpy(tokens.astype(np.int64))).logits.numpy()


def _loss(logits: np.ndarray, tokens: np.ndarray) -> float:
    scores = logits[:, :-1].astype(np.float64)
    chosen = np.take_along_axis(scores, tokens[:, 1:, None], -1)[..., 0]
    return float((np.logaddexp.reduce(scores, axis=-1) - chosen).mean())
