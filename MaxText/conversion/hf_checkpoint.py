"""Hugging Face checkpoints: config.json and tensors, read one at a time.

Supports safetensors, in one file or sharded with an index, and the older pytorch_model.bin, which
needs torch. Downloads nothing: hub ids resolve to the local cache.
"""

import functools
import os
from collections.abc import Mapping
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
    return Path(os.path.expanduser(text))  # unlike Path.expanduser, takes unknown users


def is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError as error:
        shown = path if len(path.name) < 256 else path.with_name(f"{path.name[:40]}...")
        raise UserError(f"{shown} cannot be read: {error.strerror}.") from error


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
            raise UserError(
                f"{key}={path}: {folder} is not a Hugging Face model folder: it has no {CONFIG}. "
                "Use the folder that save_pretrained wrote, or that was downloaded from the hub."
            )
        return folder
    if not name or folder.exists() or name.count("/") > 1 or name[0] in "./~":
        what = f"{folder} is not a folder" if name else "there is no path"
        raise UserError(f"{key}={path}: {what} (seen from {Path.cwd()}). Check the path.")
    # Imported late: it takes a third of a second.
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(name, local_files_only=True))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{key}={path}: {name} is neither a folder nor in the Hugging Face hub cache. Nothing "
            f"is downloaded: run `hf download {name}` first, or copy the folder to this machine."
        ) from error


class TensorFiles:
    """Tensors of a folder by name, read on demand."""

    def __init__(self, folder: Path):
        """Reads names and shapes.

        Raises UserError for missing weights or files, truncated files, or if torch is needed.
        """
        self.folder = folder
        self.found: dict[str, TensorInfo] = {}
        self._open = functools.lru_cache(maxsize=1)(_open)  # at most one file is mapped
        for file in self._files():
            self.found |= self._describe(file)

    def _files(self) -> list[Path]:
        for name in (SAFETENSORS, _TORCH):
            index = self.folder / (name + _INDEX)
            if index.is_file():
                weights = read_json(index).get("weight_map")
                if not isinstance(weights, Mapping) or not weights:
                    raise UserError(f"{index} has no weight_map. Copy it again.")
                files = list(map(Path, dict.fromkeys(map(str, weights.values()))))
                for file in files:
                    # The hub cache has links to outside, but names in an index never leave it.
                    if file.is_absolute() or ".." in file.parts:
                        raise UserError(
                            f"{index} lists {file}, which is outside its folder. Only files inside "
                            "are read: copy the folder again from a source you trust."
                        )
                return [self.folder / file for file in files]
            if (self.folder / name).is_file():
                return [self.folder / name]
        raise UserError(
            f"{self.folder} has neither {SAFETENSORS} nor {_TORCH}, nor an index of several files. "
            "Copy the weights as well."
        )

    def _describe(self, file: Path) -> dict[str, TensorInfo]:
        handle = self._open(file)
        found = {}
        for name in handle.keys():  # noqa: SIM118 (safe_open is not a mapping)
            if file.suffix == ".safetensors":
                part = handle.get_slice(name)
                kind = str(part.get_dtype())
                found[name] = TensorInfo(tuple(part.get_shape()), _FORMATS.get(kind, kind), file)
            else:
                tensor = handle[name]
                kind = tensor.dtype if str(tensor.layout) == "torch.strided" else tensor.layout
                kind = str(kind).removeprefix("torch.")
                found[name] = TensorInfo(tuple(tensor.shape), kind, file)
        return found

    def read(self, name: str) -> np.ndarray:
        found = self.found[name]
        handle = self._open(found.file)
        if found.file.suffix == ".safetensors":
            return handle.get_tensor(name)
        tensor = handle[name].detach().contiguous()
        if found.dtype == "bfloat16":
            import torch  # pyright: ignore[reportMissingImports]

            return tensor.view(torch.int16).numpy().view(np.dtype("bfloat16"))
        return tensor.numpy()


def _open(file: Path) -> Any:
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


def _open_torch(file: Path) -> Any:
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
    except Exception as error:  # of many types; objects other than tensors are refused
        reason = first_line(error)[:200]
        raise UserError(
            f"{file} cannot be read by torch: {reason}. Copy it again, or use a model.safetensors."
        ) from error
    if not isinstance(state, Mapping):
        raise UserError(f"{file} is not a dict of tensors.")
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
