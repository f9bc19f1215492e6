"""Reads integer tensors of `torch.save` without torch or running code.

A saved tensor is a pickle, which is a program. Only the few names that rebuild a plain tensor are
allowed, and each maps to a class of this module that only stores its arguments.
"""

import io
import pickle
import pickletools
import struct
import zipfile
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from MaxText.errors import UserError

# Legacy format (before zip archives): magic number and version.
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_VERSION = 1001

# Pickle opcodes with a memo index, whose table grows to hold it.
_MEMO_PLACES = {"PUT", "LONG_BINPUT"}

_STORAGES = {
    "ByteStorage": "u1",
    "CharStorage": "i1",
    "ShortStorage": "i2",
    "IntStorage": "i4",
    "LongStorage": "i8",
}
_DTYPES = {
    "uint8": "u1", "int8": "i1", "int16": "i2", "int32": "i4", "int64": "i8",
    "uint16": "u2", "uint32": "u4", "uint64": "u8",
}  # fmt: skip


class TorchFileError(UserError):
    """Not a one-dimensional integer tensor; the caller adds the file."""


class _Type(NamedTuple):
    """An element type: numpy's name, or None if stated elsewhere."""

    code: str | None


class _Storage(NamedTuple):
    type: _Type
    key: str
    count: int


class _Tensor(NamedTuple):
    storage: _Storage
    code: str
    start: int
    count: int
    step: int


def _tensor(storage: Any, start: Any, shape: Any, steps: Any, code: Any) -> _Tensor:
    if not isinstance(storage, _Storage) or code is None:
        raise TorchFileError("the file holds no tensor of integers")
    # A pickle can build nested lists too large to print.
    if not all(isinstance(number, int) for number in (*shape, *steps)):
        raise TorchFileError("the tensor's shape is not integers")
    if len(shape) != 1 or len(steps) != 1:
        raise TorchFileError(f"the tensor has shape {tuple(shape)}; one dimension is expected")
    numbers = (start, shape[0], steps[0])
    if not all(isinstance(number, int) and number >= 0 for number in numbers):
        raise TorchFileError("the tensor's offset in its storage is not an integer")
    return _Tensor(storage, code, *numbers)


def _tensor_2(storage: Any, start: Any, shape: Any, steps: Any, *rest: Any) -> _Tensor:
    code = storage.type.code if isinstance(storage, _Storage) else None
    return _tensor(storage, start, shape, steps, code)


def _tensor_3(
    storage: Any, start: Any, shape: Any, steps: Any, gradient: Any, hooks: Any, dtype: Any,
    *rest: Any,
) -> _Tensor:  # fmt: skip
    return _tensor(storage, start, shape, steps, dtype.code if isinstance(dtype, _Type) else None)


def _nothing(*arguments: Any) -> None:
    """Replaces the empty dictionary of hooks of every tensor."""


_KNOWN: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): _tensor_2,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor_3,
    ("collections", "OrderedDict"): _nothing,
    ("torch.storage", "UntypedStorage"): _Type(None),
    **{("torch", name): _Type(code) for name, code in _STORAGES.items()},
    **{("torch", name): _Type(code) for name, code in _DTYPES.items()},
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
        kind, storage, key, _, count = pid[:5]
        if kind != "storage" or not isinstance(storage, _Type) or not isinstance(key, str):
            raise TorchFileError("the file refers to something that is not a storage")
        return _Storage(storage, key, count)


def _loaded(file: io.BytesIO) -> Any:
    """Returns the next pickle in a file.

    Checks it first: ten bytes of pickle can allocate 64 GiB, by the length of a byte string or a
    huge memo index.
    """
    start = file.tell()
    size = file.getbuffer().nbytes
    # genops() itself rejects strings longer than the file.
    for operation, argument, _ in pickletools.genops(file):
        if operation.name in _MEMO_PLACES and int(argument or 0) > size:
            raise TorchFileError("the file is damaged, or was made to exhaust the memory")
    file.seek(start)
    return _Reader(file).load()


def read_tensor(content: bytes) -> np.ndarray:
    """Returns the tensor [N] in a torch.save file, new or legacy.

    Raises TorchFileError if it is damaged, not a 1-D integer tensor, or asks for any other name.
    """
    try:
        if content[:2] == b"PK":
            return _read_zip(content)
        return _read_legacy(io.BytesIO(content))
    except TorchFileError:
        raise
    # A damaged pickle can raise anything.
    except Exception as error:
        raise TorchFileError(
            f"not a torch.save file, or damaged ({type(error).__name__}: {error})"
        ) from error


def _read_zip(content: bytes) -> np.ndarray:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        names = archive.namelist()
        if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
            raise TorchFileError("the file is compressed, which torch.save does not do")
        (pickled,) = (name for name in names if name.endswith("/data.pkl"))
        folder = pickled.removesuffix("data.pkl")
        order = "<"
        if f"{folder}byteorder" in names and archive.read(f"{folder}byteorder") == b"big":
            order = ">"
        tensor = _loaded(io.BytesIO(archive.read(pickled)))
        return _next_batch(
            tensor, order, lambda storage: archive.read(f"{folder}data/{storage.key}")
        )


def _read_legacy(file: io.BytesIO) -> np.ndarray:
    if _loaded(file) != _LEGACY_MAGIC or _loaded(file) != _LEGACY_VERSION:
        raise TorchFileError("not a torch.save file")
    system = _loaded(file)
    order = "<" if system["little_endian"] else ">"
    tensor = _loaded(file)
    keys = _loaded(file)

    def bytes_of(storage: _Storage) -> bytes:
        if keys != [storage.key]:
            raise TorchFileError(f"the file has {len(keys)} storages; one is expected")
        (count,) = struct.unpack(f"{order}q", file.read(8))
        return file.read(count * np.dtype(storage.type.code or "u1").itemsize)

    return _next_batch(tensor, order, bytes_of)


def _next_batch(tensor: Any, order: str, bytes_of: Callable[[_Storage], bytes]) -> np.ndarray:
    if not isinstance(tensor, _Tensor):
        raise TorchFileError(f"the file holds a {type(tensor).__name__}, not a tensor")
    values = np.frombuffer(bytes_of(tensor.storage), np.dtype(f"{order}{tensor.code}"))
    if tensor.count > 1 and tensor.step == 0:
        raise TorchFileError("the tensor repeats one element; save a contiguous copy of it")
    last = tensor.start + (tensor.count - 1) * tensor.step
    if tensor.count and last >= values.size:
        raise TorchFileError(f"the storage ends after {values.size} elements: it was truncated")
    if tensor.count <= 1:
        return values[tensor.start : tensor.start + tensor.count]
    return values[tensor.start : last + 1 : tensor.step]
