"""Reads integer tensors of `torch.save` without torch or running code.

A saved tensor is a zip archive of its bytes and a pickle, which is a program. Only the few names
that rebuild a plain tensor are allowed, and each maps to a function or value of this module.
"""

import io
import pickle
import zipfile
from typing import Any

import numpy as np

from MaxText.errors import UserError


class TorchFileError(UserError):
    """Not a one-dimensional integer tensor; the caller adds the file."""


def _tensor_2(
    storage: np.ndarray,
    start: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    *unused: object,
) -> np.ndarray:
    """Returns a one-dimensional tensor, a strided range of its storage."""
    if len(shape) != 1:
        raise TorchFileError(f"the tensor has shape {tuple(shape)}; one dimension is expected")
    values = storage[start :: strides[0] or 1][: shape[0]]
    if len(values) != shape[0] or (strides[0] == 0 and shape[0] > 1):
        raise TorchFileError("the tensor is truncated or repeats an element; save a copy of it")
    return values


def _tensor_3(
    storage: np.ndarray,
    start: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    *other_arguments: Any,
) -> np.ndarray:
    """Returns a tensor of a type without a storage class.

    The other arguments are whether it has a gradient, its hooks, and its type.
    """
    _, _, dtype, *_ = other_arguments
    return _tensor_2(storage.view(dtype), start, shape, strides)


_STORAGES = {"Byte": "u1", "Char": "i1", "Short": "i2", "Int": "i4", "Long": "i8"}
_DTYPES = ("uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64")
_KNOWN: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): _tensor_2,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor_3,
    ("collections", "OrderedDict"): lambda *_: None,  # the hooks of every tensor
    ("torch.storage", "UntypedStorage"): "u1",
    **{("torch", f"{name}Storage"): code for name, code in _STORAGES.items()},
    **{("torch", name): np.dtype(name).str[1:] for name in _DTYPES},
}


class _Reader(pickle.Unpickler):
    """An unpickler restricted to a few names."""

    def __init__(self, archive: zipfile.ZipFile):
        """Reads data.pkl of the archive."""
        (pickled,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
        super().__init__(io.BytesIO(archive.read(pickled)))
        self._archive = archive
        self._folder = pickled.removesuffix("data.pkl")

    def find_class(self, module: str, name: str) -> Any:
        """Returns what stands for a name; TorchFileError for any other name than the few."""
        allowed = _KNOWN.get((module, name))
        if allowed is None:
            raise TorchFileError(
                f"the file refers to {module}.{name}, which a tensor of integers does not need"
            )
        return allowed

    def persistent_load(self, pid: tuple[Any, ...]) -> np.ndarray:
        """Returns a storage, from the file of the archive that holds its bytes."""
        _, code, key = pid[:3]
        content = self._archive.read(f"{self._folder}data/{key}")
        return np.frombuffer(content, f"<{code}")


def read_tensor(content: bytes) -> np.ndarray:
    """Returns the tensor [N] in a torch.save file (torch 1.6 or newer).

    Raises TorchFileError if it is damaged, not a 1-D integer tensor, or asks for any other name.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            tensor = _Reader(archive).load()
    except TorchFileError:
        raise
    # A damaged pickle can raise anything.
    except Exception as error:
        raise TorchFileError(
            "not a torch.save file of torch 1.6 or newer, or damaged "
            f"({type(error).__name__}: {error})"
        ) from error
    if not isinstance(tensor, np.ndarray):
        raise TorchFileError(f"the file holds a {type(tensor).__name__}, not a tensor")
    return tensor
