"""Hugging Face checkpoints: config.json and tensors, read one at a time.

Supports safetensors, in one file or sharded with an index, and the older pytorch_model.bin, which
needs torch. Downloads nothing: hub ids resolve to the local cache.
"""

import collections
import functools
import os
import pickle
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from MaxText.errors import UserError, first_line
from MaxText.input_pipeline.tokenization.interface import read_json

PREFIX = "hf:"
CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
SAFETENSORS = "model.safetensors"
_INDEX = ".index.json"
_TORCH = "pytorch_model.bin"
_ADAPTER = "adapter_config.json"
# Written by save_pretrained of a model that is distributed over processes.
_DISTRIBUTED = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors$")
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack")
_MAX_NAMES = 5  # of files in a message

# Floating-point formats of safetensors -> NumPy names.
_FORMATS = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}


class TensorInfo(NamedTuple):
    """Shape and NumPy format of a tensor in a file."""

    shape: tuple[int, ...]
    dtype: str
    file: Path

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    @property
    def is_floating(self) -> bool:
        """Whether it can be read as parameters."""
        return self.dtype in ("float32", "bfloat16", "float16")


def local_path(text: str) -> Path:
    """Returns a path that a user typed, with ~ replaced."""
    return Path(os.path.expanduser(text))  # unlike Path.expanduser, takes unknown users


def is_file(path: Path) -> bool:
    """Returns whether a file exists; UserError if its folder cannot be read."""
    try:
        return path.is_file()
    except OSError as error:
        is_short = len(path.name) < 256
        shown_path = path if is_short else path.with_name(f"{path.name[:40]}...")
        raise UserError(f"{shown_path} cannot be read: {error.strerror}.") from error


def is_hf_checkpoint(path: str) -> bool:
    """Returns whether a path is a Hugging Face checkpoint.

    It has the prefix or a config.json. Raises UserError without permission to search the folder.
    """
    return path.startswith(PREFIX) or is_file(local_path(path) / CONFIG)


def resolve_hf_path(path: str, key: str) -> Path:
    """Returns the folder of `hf:PATH`, `hf:HUB_ID` or a plain path."""
    name = path.removeprefix(PREFIX)
    folder = local_path(name)
    # Checked first, because it reports missing permissions.
    has_config = is_file(folder / CONFIG)
    if name and folder.is_dir():
        if not has_config:
            advice = (
                "Use the folder that save_pretrained wrote, or that was downloaded from the hub."
            )
            if is_file(folder / _ADAPTER):
                advice = (
                    f"It has an {_ADAPTER}: merge the adapter into its base model with peft's "
                    "merge_and_unload, save the result, and use that folder."
                )
            raise UserError(
                f"{key}={path}: {folder} is not a Hugging Face model folder: it has no {CONFIG}. "
                f"{advice}"
            )
        return folder
    if not name or folder.exists() or name.count("/") > 1 or name[0] in "./~":
        problem = f"{folder} is not a folder" if name else "there is no path"
        raise UserError(f"{key}={path}: {problem} (seen from {Path.cwd()}). Check the path.")
    # Imported late: it takes a third of a second.
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(name, local_files_only=True))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{key}={path}: {name} is neither a folder nor in the Hugging Face hub cache. Nothing "
            f"is downloaded: run `hf download {name}` first, or copy the folder to this machine."
        ) from error


def find_weights(folder: Path, config: Mapping[str, Any]) -> Path:
    """Returns the file of weights, or the index of several, that transformers reads.

    A folder may hold the same weights more than once. transformers prefers the file that
    config.json names, then safetensors, then one file over an index (modeling_utils.py,
    _get_resolved_checkpoint_files). It ignores variants such as model.fp16.safetensors.

    Args:
        folder: of the checkpoint.
        config: its config.json.

    Raises:
        UserError: there is none, or transformers would add an adapter or read another format.
    """
    if is_file(folder / _ADAPTER):
        raise UserError(
            f"{folder} has an {_ADAPTER}: transformers adds the adapter to the weights, which is "
            "not supported here. Merge it with peft's merge_and_unload and save the result, or "
            f"remove {_ADAPTER} to read the weights without the adapter."
        )
    named = config.get("transformers_weights")
    if named is not None:
        path = Path(str(named))
        _require_inside(path, f"{folder / CONFIG} has transformers_weights={named}")
        if not path.name.endswith((".safetensors", f".safetensors{_INDEX}")):
            raise UserError(
                f"{folder / CONFIG} has transformers_weights={named}, which is neither a "
                "safetensors file nor the index of several. Copy the folder again."
            )
        return folder / path
    names = sorted(path.name for path in folder.iterdir())
    if any(_DISTRIBUTED.match(name) for name in names):
        raise UserError(
            f"{folder} holds a distributed checkpoint (shard-...-model-...safetensors), which "
            "is not supported here. Load it in transformers and call save_pretrained."
        )
    for name in (SAFETENSORS, SAFETENSORS + _INDEX, _TORCH, _TORCH + _INDEX):
        if (folder / name).is_file():
            return folder / name
    similar = [name for name in names if Path(name).suffix in _WEIGHT_SUFFIXES]
    unread = f" It has {', '.join(similar[:_MAX_NAMES])}, which are not read." if similar else ""
    raise UserError(
        f"{folder} has neither {SAFETENSORS} nor {_TORCH}, nor an index of several files.{unread} "
        "Copy the weights as well, under the names that save_pretrained gives them."
    )


def _require_inside(path: Path, fact: str) -> None:
    if path.is_absolute() or ".." in path.parts:
        raise UserError(
            f"{fact}, which is outside its folder. Only files inside are read: copy the folder "
            "again from a source you trust."
        )


# What wrapper modules add to the names of a state_dict, anywhere in a name.
_WRAPPERS = {
    "_orig_mod",  # torch.compile
    "module",  # DistributedDataParallel, DataParallel, DeepSpeed
    "_fsdp_wrapped_module",  # FullyShardedDataParallel
    "_fpw_module",  # FullyShardedDataParallel of older versions and of fairscale
    "_checkpoint_wrapped_module",  # activation checkpointing
    "_forward_module",  # Lightning Fabric
}


def without_wrappers(
    file_names: Iterable[str], expected: Collection[str]
) -> tuple[dict[str, str], list[str]]:
    """Maps tensor names of the bare model to those in the files.

    Wrapper modules (torch.compile, DDP, FSDP, a Lightning module) add words to the names in a
    state_dict. Known words are removed wherever they are; any other prefix is removed if most
    names are expected ones after it.

    Args:
        file_names: as in the files.
        expected: the model's names, with alternatives. Words in them are never removed.

    Returns:
        File names by name without wrappers, and what was removed, such as ["_orig_mod."].

    Raises:
        UserError: two tensors have the same name without wrappers.
    """
    expected_words = {word for name in expected for word in name.split(".")}
    removed: set[str] = set()
    bare_names: dict[str, str] = {}  # by file name
    for name in file_names:
        path = name.split(".")
        removed.update(f"{word}." for word in path if word in _WRAPPERS - expected_words)
        bare_names[name] = ".".join(word for word in path if word not in _WRAPPERS - expected_words)
    prefixes = collections.Counter(_prefix(name, expected) for name in bare_names.values())
    del prefixes[None]  # of names that are not expected after any prefix
    prefix = max(prefixes, key=lambda candidate: prefixes[candidate], default=None)
    if prefix:
        removed.add(prefix)
        bare_names = {name: bare.removeprefix(prefix) for name, bare in bare_names.items()}
    by_bare_name: dict[str, str] = {}
    for name, bare in bare_names.items():
        if bare in by_bare_name:
            raise UserError(
                f"the files have both {by_bare_name[bare]} and {name}, the same tensor but for the "
                f"names of wrapper modules ({', '.join(sorted(removed))}). Save the model's own "
                "state_dict again, without the copy."
            )
        by_bare_name[bare] = name
    return by_bare_name, sorted(removed)


# Where multimodal models have the text model, and the names of its own: transformers 5, and before.
_TEXT_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "lm_head.": "lm_head.",
    "mtp.": "mtp.",  # multi-token prediction, of the text
}


def text_tensors(file_names: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """Finds the tensors of the text model in a multimodal model.

    Args:
        file_names: as in the files.

    Returns:
        File names by name in the text model alone, and groups of other tensors with their numbers,
        such as ["vision_tower (12 tensors)"].
    """
    text_names: dict[str, str] = {}
    others: collections.Counter[str] = collections.Counter()
    for name in file_names:
        bare = ".".join(word for word in name.split(".") if word not in _WRAPPERS)
        prefix = next((prefix for prefix in _TEXT_PREFIXES if bare.startswith(prefix)), None)
        if prefix is None:
            others[bare.removeprefix("model.").partition(".")[0]] += 1
        else:
            text_names[_TEXT_PREFIXES[prefix] + bare.removeprefix(prefix)] = name
    return text_names, [f"{part} ({count} tensors)" for part, count in sorted(others.items())]


def _prefix(name: str, expected: Collection[str]) -> str | None:
    """Returns the shortest prefix after which a name is an expected one, or None."""
    ends = [0, *(match.end() for match in re.finditer(r"\.", name))]
    return next((name[:end] for end in ends if name[end:] in expected), None)


class TensorFiles:
    """Tensors of a folder by name, read on demand."""

    def __init__(self, folder: Path, config: Mapping[str, Any] | None = None):
        """Reads names and shapes; `config` is config.json.

        Raises UserError for missing weights or files, truncated files, or if torch is needed.
        """
        self.folder = folder
        self.found: dict[str, TensorInfo] = {}
        self._open = functools.lru_cache(maxsize=1)(_open)  # at most one file is mapped
        for file in self._files(find_weights(folder, config or {})):
            self.found |= self._describe(file)

    def _files(self, weights: Path) -> list[Path]:
        """Returns a file of weights, or the shards in an index.

        Shards are sorted by name: of a tensor in several of them, both programs take the last.
        """
        if not weights.name.endswith(_INDEX):
            return [weights]
        weight_map = read_json(weights).get("weight_map")
        if not isinstance(weight_map, Mapping) or not weight_map:
            raise UserError(f"{weights} has no weight_map. Copy it again.")
        shards = sorted({Path(str(name)) for name in weight_map.values()})
        for shard in shards:
            # The hub cache has links to outside, but names in an index never leave it.
            _require_inside(shard, f"{weights} lists {shard}")
        return [self.folder / shard for shard in shards]

    def _describe(self, file: Path) -> dict[str, TensorInfo]:
        """Returns the tensors of a file by name."""
        handle = self._open(file)
        infos = {}
        for name in handle.keys():  # noqa: SIM118 (safe_open is not a mapping)
            if file.suffix == ".safetensors":
                part = handle.get_slice(name)
                kind = str(part.get_dtype())
                infos[name] = TensorInfo(tuple(part.get_shape()), _FORMATS.get(kind, kind), file)
            else:
                tensor = handle[name]
                kind = tensor.dtype if str(tensor.layout) == "torch.strided" else tensor.layout
                kind = str(kind).removeprefix("torch.")
                infos[name] = TensorInfo(tuple(tensor.shape), kind, file)
        return infos

    def read(self, name: str) -> np.ndarray:
        """Returns a tensor by its name in the files."""
        info = self.found[name]
        handle = self._open(info.file)
        if info.file.suffix == ".safetensors":
            return handle.get_tensor(name)
        tensor = handle[name].detach().contiguous()
        if info.dtype == "bfloat16":
            import torch  # pyright: ignore[reportMissingImports]

            return tensor.view(torch.int16).numpy().view(np.dtype("bfloat16"))
        return tensor.numpy()


def _open(file: Path) -> Any:
    """Opens a file of tensors; UserError if it is incomplete or cannot be read."""
    try:
        file.open("rb").close()  # safetensors reports "no such file" without read permission
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}.") from error
    if file.suffix != ".safetensors":
        return _open_torch(file)
    import jax  # noqa: F401 (makes the name bfloat16 known to NumPy)
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{file} ({file.stat().st_size:,} bytes) is not a complete safetensors file: {error}. "
            "Copy it again."
        ) from error


def _open_torch(file: Path) -> Mapping[str, Any]:
    """Opens a file of PyTorch's own format; returns its tensors by name."""
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UserError(
            f"{file.name} is in PyTorch's own format, which needs torch: pip install '.[torch]'. "
            "A model.safetensors needs no extra package."
        ) from error
    import zipfile

    try:
        # Files from before torch 1.6 are not zip archives and cannot be memory-mapped.
        mapped = zipfile.is_zipfile(file)
        state = torch.load(file, map_location="cpu", mmap=mapped, weights_only=True)
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{file} cannot be read by torch as tensors alone: it is damaged, or holds other "
            "objects, which can run arbitrary code. Copy it again, or use a model.safetensors."
        ) from error
    except Exception as error:  # of many types
        reason = first_line(error)[:200]
        raise UserError(
            f"{file} cannot be read by torch: {reason}. Copy it again, or use a model.safetensors."
        ) from error
    if not isinstance(state, Mapping):
        raise UserError(f"{file} is not a dict of tensors.")
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
