"""Export to a Hugging Face checkpoint, and comparison with transformers.

`AutoModelForCausalLM.from_pretrained` loads the result if transformers has the family. No
checkpoint format stores a fixed zoom. Pattention multiplies normalized scores by sqrt(zoom)
(growth/resolve.py), and TokenFormer's PyTorch code always uses the number of slots instead. If
sqrt(zoom) is applied last, value slots absorb the ratio exactly. With l2_norm_gelu it is applied
inside gelu, and the norm cancels any factor of the keys, so folding is impossible.
"""

import collections
import itertools
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
from MaxText.conversion.hf_import import TensorMap
from MaxText.conversion.tokenizer_copy import write_json
from MaxText.conversion.weight_source import WeightSource, unflatten
from MaxText.errors import UserError
from MaxText.input_pipeline.tokenization.interface import read_json
from MaxText.layers.batch import Batch
from MaxText.layers.feed_forward.pattention import slot_place, slots_by_place
from MaxText.storage.atomic import apply_umask
from MaxText.training.backend_defaults import abstract_model

# Relative to the largest logit. Both use float32, in another order; measured: 2e-6 for GPT-2 sizes.
LOGITS_TOLERANCE = 1e-4
LOSS_TOLERANCE = 1e-4
_ROWS = 2
_LENGTH = 64

# Ids in both config.json and generation_config.json.
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def write_folder(
    folder: Path,
    weights: WeightSource,
    family: Family,
    record: Mapping[str, Any],
    *,
    dtype: str = "",
    max_shard_bytes: int = 10**9,
    token_ids: Mapping[str, int] = {},
) -> list[str]:
    """Writes tensors and configurations; returns the names of the files.

    Args:
      record: That of the import, if the model was imported.
      dtype: Of all tensors; empty for the stored formats.
      max_shard_bytes: Larger results are split into several files.
      token_ids: Of the tokenizer, by name in config.json.

    Raises:
      UserError: If float16 overflows.
    """
    tensor_map = TensorMap(family, weights.model)
    narrowed = record.get("formats") or {}
    specs = {}
    sizes = collections.Counter()
    for tensor in tensor_map.tensors:
        stored = jnp.result_type(*(weights.formats[name] for name in tensor.param_names))
        kind = np.dtype(dtype or narrowed.get(tensor.name) or stored)
        specs[tensor.name] = jax.ShapeDtypeStruct(tensor.shape, kind)
        sizes[kind.name] += specs[tensor.name].size * kind.itemsize

    constant_dtype = np.dtype(dtype or jnp.result_type(*weights.formats.values()))
    constants = {
        name: np.array(value, constant_dtype)
        for name, value in family.constant_tensors(len(weights.config.model.layers)).items()
    }
    specs |= {name: jax.ShapeDtypeStruct((), constant_dtype) for name in constants}
    specs |= {name: specs[repeated] for name, repeated in tensor_map.copies.items()}

    # Without these, transformers defaults to the ids of its own tokenizers.
    id_names = _TOKEN_IDS if family.has_model_type else token_ids
    ids = {name: token_ids.get(name) for name in id_names}
    config = hf_config.to_config_json(family, weights.config)
    # Programs outside transformers know the older name.
    dtype_name = "dtype" if family.in_transformers else "torch_dtype"
    config |= {dtype_name: sizes.most_common(1)[0][0], **ids}
    config |= _imported_keys(family, record.get("config") or {}, is_cast=bool(dtype))
    write_json(folder / CONFIG, config)
    names = [CONFIG]
    generation = record.get("generation_config")
    if generation or family.in_transformers:
        ids = {name: config[name] for name in _TOKEN_IDS if config.get(name) is not None}
        write_json(folder / GENERATION_CONFIG, generation or {"_from_model_config": True, **ids})
        names.append(GENERATION_CONFIG)
    tensors = itertools.chain(_tensors(tensor_map, weights, specs), constants.items())
    files = write_safetensors(folder, specs, tensors, max_shard_bytes)
    if len(files) > 1:
        files = [f"{len(files)} files of tensors and their index"]
    return [*names, *files]


def _tensors(
    tensor_map: TensorMap, weights: WeightSource, specs: Mapping[str, jax.ShapeDtypeStruct]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the names and values of tensors, also of those that repeat another one.

    Args:
      tensor_map: Of the family and the model.
      weights: Of the model.
      specs: The dtype of each tensor.
    """
    repeated_as = collections.defaultdict(list)
    for name, repeated in tensor_map.copies.items():
        repeated_as[repeated].append(name)
    for names, group in tensor_map.groups.items():
        arrays = [weights.read(name) for name in names]
        for tensor in group:
            joined = tensor.join(arrays)
            cast = _cast(tensor.name, joined, specs[tensor.name].dtype)
            for name in (tensor.name, *repeated_as[tensor.name]):
                yield name, cast


def weights_left_out(family: Family, weights: WeightSource) -> int:
    """Returns the number of weights that the format has no tensors for, read only by training."""
    parameters = weights.model.parameters
    return sum(parameters[name].size for name in TensorMap(family, weights.model).left_out)


def _cast(name: str, array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Casts a tensor; UserError if float16 overflows."""
    with np.errstate(over="ignore"):
        cast = array.astype(dtype, copy=False)
    if dtype == np.float16 and np.isinf(cast).any() and not np.isinf(array).any():
        raise UserError(
            f"{name} has {np.abs(array.astype(np.float32)).max():.6g}, and float16 ends at 65504. "
            "Use dtype=bfloat16 or dtype=float32."
        )
    return cast


def _imported_keys(family: Family, config: Mapping[str, Any], is_cast: bool) -> dict[str, Any]:
    """Returns keys of an imported config.json to write again: those that no table determines."""
    if hf_config.lookup_family(config) is not family:
        return {}
    determined = hf_config.table_names(family)
    if family.has_model_type or is_cast:
        # Without effect the original dtype stays: published float32 TokenFormers say float16.
        determined |= {"dtype", "torch_dtype", "transformers_version"}
    return {name: value for name, value in config.items() if name not in determined}


def write_safetensors(
    folder: Path,
    specs: Mapping[str, jax.ShapeDtypeStruct],
    tensors: Iterable[tuple[str, np.ndarray]],
    max_shard_bytes: int,
) -> list[str]:
    """Writes tensors; returns the file names.

    Args:
      specs: Shape and dtype of each tensor, in the order of the files.
      tensors: Names and values, in any order. A file is written when it has all of its tensors.
      max_shard_bytes: Writes several files and an index if the tensors exceed it.
    """
    # The factory groups tensors that share memory; no storage id means none do.
    split = split_state_dict_into_shards_factory(
        {name: spec.size * spec.dtype.itemsize for name, spec in specs.items()},
        get_storage_size=lambda size: size,
        get_storage_id=lambda size: None,
        filename_pattern=SAFETENSORS.replace(".", "{suffix}."),
        max_shard_size=max_shard_bytes,
    )
    unwritten: dict[str, dict[str, np.ndarray]] = {}  # by file
    for name, tensor in tensors:
        file = split.tensor_to_filename[name]
        unwritten.setdefault(file, {})[name] = np.asarray(tensor, order="C")
        if len(unwritten[file]) == len(split.filename_to_tensors[file]):
            # transformers refuses files without a format.
            save_file(unwritten.pop(file), folder / file, {"format": "pt"})
            apply_umask(folder / file)  # safetensors leaves it readable by the owner only
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_json(folder / (SAFETENSORS + ".index.json"), index)
    return list(split.filename_to_tensors)


_LAST = ("gelu_l2_norm", "l2_norm")  # normalize_type that applies sqrt(zoom) last
_NO_ZOOM = {"zoom_dim": 0.0} | {
    f"zoom_dims.{slots_place}": -1.0 for slots_place in get_args(SlotPlace)
}


class FoldedWeights(WeightSource):
    """Weights that are multiplied by `factors` (by parameter name), with another configuration."""

    def __init__(self, weights: WeightSource, config: Config, factors: dict[str, float]):
        super().__init__(config)
        self.formats = weights.formats
        self._factors = factors
        self._weights = weights

    def read(self, name: str) -> np.ndarray:
        """Returns one parameter, scaled if it has a factor."""
        stored = self._weights.read(name)
        if name not in self._factors:
            return stored
        return (stored.astype(np.float32) * np.float32(self._factors[name])).astype(stored.dtype)


def fold_zoom_into_values(weights: WeightSource) -> tuple[WeightSource, str]:
    """Returns equivalent weights without a zoom, and a line to report it.

    Returns the weights unchanged and an empty line if no zoom is fixed, or it cannot be folded.
    """
    config = weights.config
    pattention = config.model.pattention
    emb_dim = config.model.shape.dimensions.emb_dim
    factors = {}
    if pattention.normalize_type not in _LAST:
        return weights, ""
    for name in weights.model.parameters:
        slots_place = slot_place(name)
        if slots_place and name.endswith("values/kernel"):
            num_slots = pattention.num_slots(slots_place, emb_dim)
            ratio = pattention.zoom(slots_place, emb_dim) / num_slots
            if ratio != 1:
                factors[name] = math.sqrt(ratio)
    if not factors:
        return weights, ""
    factors_by_place = slots_by_place({name: f"{factor:.4g}" for name, factor in factors.items()})
    config_without_zoom = schema.unflatten(schema.flatten(config) | _NO_ZOOM)
    return FoldedWeights(weights, config_without_zoom, factors), (
        "The layout has no zoom: value slots are multiplied by sqrt(zoom / slots), which keeps "
        f"the function: {factors_by_place}"
    )


def check_verifiable(family: Family, config: Config) -> None:
    """Refuses an impossible verification before any work is done."""
    absent = hf_config.absent_in_transformers(family, config)
    if absent:
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
    weights: WeightSource,
    folder: Path,
    shown_folder: str,
    log: Callable[[str], None],
    dtype: str = "",
) -> None:
    """Compares logits and loss of random tokens with those of transformers.

    Args:
      folder: A Hugging Face folder with the same weights.
      shown_folder: Its name in messages.
      log: Gets a line with the differences.
      dtype: Our tensors are rounded to it, like the exported ones; empty if they were not.

    Raises:
      UserError: If they differ.
    """
    config = weights.config.model
    length = min(_LENGTH, config.shape.max_target_length)
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, config.shape.vocab_size, (_ROWS, length)).astype(np.int32)
    expected = _their_logits(folder, tokens)
    actual = _our_logits(weights, tokens, dtype)
    difference = float(np.abs(actual - expected).max())
    largest = float(np.abs(expected).max())
    our_loss = _loss(actual, tokens)
    their_loss = _loss(expected, tokens)
    line = (
        f"logits differ by at most {difference:.2g} (largest logit {largest:.3g}), loss "
        f"{our_loss:.6f} here and {their_loss:.6f} in transformers"
    )
    is_close = difference <= LOGITS_TOLERANCE * max(1.0, largest)
    if not (is_close and abs(our_loss - their_loss) <= LOSS_TOLERANCE * their_loss):
        raise UserError(
            f"{shown_folder} gives different results in transformers: {line}. Nothing was written. "
            "Please report this with the folder's config.json."
        )
    log(f"Verified: {line}")


def _our_logits(weights: WeightSource, tokens: np.ndarray, dtype: str) -> np.ndarray:
    """Returns the logits [B, T, V] of this program's model, on CPU in float32."""
    exact = {"dtype": "float32", "matmul_precision": "highest"}
    model = abstract_model(schema.unflatten(schema.flatten(weights.config) | exact).model)
    formats = {name: dtype or weights.formats[name] for name in model.parameters}
    params = unflatten({name: weights.read(name).astype(kind) for name, kind in formats.items()})

    @jax.jit
    def compute_logits(params, tokens_BT):
        decoder = model.merge(jax.tree.map(lambda x: x.astype(jnp.float32), params))
        return decoder(Batch(tokens_BT, tokens_BT, jnp.ones(tokens_BT.shape)))

    with jax.default_device(jax.devices("cpu")[0]):
        return np.asarray(compute_logits(params, tokens))


def _their_logits(folder: Path, tokens: np.ndarray) -> np.ndarray:
    """Returns the logits [B, T, V] of transformers' model, on CPU in float32."""
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    config = read_json(folder / CONFIG)
    is_multimodal = hf_config.text_model(config) is not config
    kind = "AutoModelForImageTextToText" if is_multimodal else "AutoModelForCausalLM"
    model = getattr(transformers, kind).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    if hasattr(model, "set_experts_implementation"):  # of transformers 5
        # Its default, a grouped product, refuses experts whose width is no multiple of 16 bytes.
        model.set_experts_implementation("eager")
    with torch.no_grad():
        ids = torch.from_numpy(tokens.astype(np.int64))
        return model.eval()(input_ids=ids).logits.numpy()


def _loss(logits: np.ndarray, tokens: np.ndarray) -> float:
    """Returns the mean cross-entropy of the next tokens."""
    scores = logits[:, :-1].astype(np.float64)
    chosen = np.take_along_axis(scores, tokens[:, 1:, None], -1)[..., 0]
    return float((np.logaddexp.reduce(scores, axis=-1) - chosen).mean())
