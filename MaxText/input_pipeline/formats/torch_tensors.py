"""Reads integer tensors of `torch.save` without torch or running code.

A saved tensor is a zip archive of its bytes and a pickle, which is a program. Only the few names
that rebuild a plain tensor are allowed, and each maps to a function or value of this module.
"""

import io
import pickle
import pickletools
import zipfile
from typing import Any, NamedTuple

import numpy as np

from MaxText.errors import UserError

# Pickle opcodes with a memo index, whose table grows to hold it.
_MEMO_PLACES = {"PUT", "LONG_BINPUT"}


class TorchFileError(UserError):
    """Not a one-dimensional integer tensor; the caller adds the file."""


class _Type(NamedTuple):
    """An element type: numpy's name, or None if stated elsewhere."""

    code: str | None


class _Storage(NamedTuple):
    type: _Type
    key: str


class _Tensor(NamedTuple):
    key: str
    code: str
    start: int
    count: int
    step: int


def _tensor_2(storage: Any, start: Any, shape: Any, steps: Any, *rest: Any) -> _Tensor:
    return _tensor_3(storage, start, shape, steps, None, None, getattr(storage, "type", None))


def _tensor_3(
    storage: Any, start: Any, shape: Any, steps: Any, gradient: Any, hooks: Any, dtype: Any,
    *rest: Any,
) -> _Tensor:  # fmt: skip
    if not isinstance(storage, _Storage) or not isinstance(dtype, _Type) or dtype.code is None:
        raise TorchFileError("the file holds no tensor of integers")
    # A pickle can build nested lists too large to print.
    if not all(isinstance(number, int) for number in (start, *shape, *steps)):
        raise TorchFileError("the tensor's offset and shape are not integers")
    if len(shape) != 1 or len(steps) != 1:
        raise TorchFileError(f"the tensor has shape {tuple(shape)}; one dimension is expected")
    if min(start, *shape, *steps) < 0:
        raise TorchFileError("the tensor's offset or shape is negative")
    return _Tensor(storage.key, dtype.code, start, *shape, *steps)


_STORAGES = {"Byte": "u1", "Char": "i1", "Short": "i2", "Int": "i4", "Long": "i8"}
_DTYPES = ("uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64")
_KNOWN: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): _tensor_2,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor_3,
    ("collections", "OrderedDict"): lambda *_: None,  # the hooks of every tensor
    ("torch.storage", "UntypedStorage"): _Type(None),
    **{("torch", f"{name}Storage"): _Type(code) for name, code in _STORAGES.items()},
    **{("torch", name): _Type(np.dtype(name).str[1:]) for name in _DTYPES},
}


class _Reader(pickle.Unpickler):
    """An unpickler restricted to a few names."""

    def find_class(self, module: str, name: str) -> Any:
        known = _KNOWN.get((module, name))
        if known is None:
            raise TorchFileError(
                f"the file refers to {module}.{name}, which a tensor of integers does not need"
            )
        return known

    def persistent_load(self, pid: Any) -> _Storage:
        kind, storage, key = pid[:3]
        if kind != "storage" or not isinstance(storage, _Type) or not isinstance(key, str):
            raise TorchFileError("the file refers to something that is not a storage")
        return _Storage(storage, key)


def _load(pickled: bytes) -> Any:
    """Unpickles, but not what would allocate 64 GiB by ten bytes of a pickle."""
    # genops() itself rejects strings longer than the file.
    for operation, argument, _ in pickletools.genops(pickled):
        if operation.name in _MEMO_PLACES and int(argument or 0) > len(pickled):
            raise TorchFileError("the file is damaged, or was made to exhaust the memory")
    return _Reader(io.BytesIO(pickled)).load()


def read_tensor(content: bytes) -> np.ndarray:
    """Returns the tensor [N] in a torch.save file (torch 1.6 or newer).

    Raises TorchFileError if it is damaged, not a 1-D integer tensor, or asks for any other name.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            return _read_archive(archive)
    except TorchFileError:
        raise
    # A damaged pickle can raise anything.
    except Exception as error:
        raise TorchFileError(
            "not a torch.save file of torch 1.6 or newer, or damaged "
            f"({type(error).__name__}: {error})"
        ) from error


def _read_archive(archive: zipfile.ZipFile) -> np.ndarray:
    names = archive.namelist()
    if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
        raise TorchFileError("the file is compressed, which torch.save does not do")
    (pickled,) = (name for name in names if name.endswith("/data.pkl"))
    folder = pickled.removesuffix("data.pkl")
    is_big = f"{folder}byteorder" in names and archive.read(f"{folder}byteorder") == b"big"
    tensor = _load(archive.read(pickled))
    if not isinstance(tensor, _Tensor):
        raise TorchFileError(f"the file holds a {type(tensor).__name__}, not a tensor")
    dtype = np.dtype(tensor.code).newbyteorder(">" if is_big else "<")
    values = np.frombuffer(archive.read(f"{folder}data/{tensor.key}"), dtype)
    if tensor.count > 1 and tensor.step == 0:
        raise TorchFileError("the tensor repeats one element; save a contiguous copy of it")
    last = tensor.start + (tensor.count - 1) * tensor.step
    if tensor.count and last >= values.size:
        raise TorchFileError(f"the storage ends after {values.size} elements: it was truncated")
    return values[tensor.start : last + 1 : max(tensor.step, 1)] if tensor.count else values[:0]
