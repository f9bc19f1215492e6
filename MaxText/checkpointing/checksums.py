"""64-bit array checksums, independent of devices, mesh and storage.

Two 32-bit bijections (the form of MurmurHash3's finalizer, constants in the manner of
https://github.com/skeeto/hash-prospector) mix each element, as uint32, with its index; both
results are summed modulo 2^32. Sums are order-independent, so devices need one 8-byte all-reduce.
Any change of a single element changes both sums; other damage goes unnoticed once in 2^64.
(Cheaper element-times-odd-number sums miss common damage: two flipped sign bits cancel.)

`array_checksums` (on devices) and `host_checksum` (NumPy) give the same numbers.
"""

import functools
import math
from collections.abc import Mapping
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from MaxText.checkpointing.compatibility import ArraySpec, leaf_path
from MaxText.value_types import PyTree

# (shift, multiplier) pairs and a final shift.
_FIRST = ((16, 0x7FEB352D), (15, 0x846CA68B), 16)
_SECOND = ((15, 0x2C1B3C6D), (12, 0x297A2D39), 15)
_INDEX = ((0, 0x9E3779B1), (16, 0x85EBCA6B), 13)
_INDEX_FACTOR = 0xC2B2AE35
_CHUNK = 1 << 16  # elements per NumPy call, so that temporaries stay in cache

Bits = TypeVar("Bits", np.ndarray, jax.Array)  # uint32


def array_checksums(tree: PyTree) -> dict[str, str]:
    """Returns `host_checksum` strings by path; a collective call."""
    arrays = {leaf_path(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}
    # Dispatches all programs before blocking on the first result.
    sums = {path: _program(x.sharding)(x) for path, x in arrays.items() if not _is_small(x)}
    return {
        path: _format(array, np.asarray(sums[path])) if path in sums else host_checksum(array)
        for path, array in arrays.items()
    }


def host_checksum(array: np.ndarray) -> str:
    """Returns shape, dtype and checksum: "float32[3,16,8] 0123456789abcdef"."""
    bits = np.ascontiguousarray(array).reshape(-1)
    bits = bits.view(f"u{min(bits.dtype.itemsize, 4)}")
    sums = np.zeros(2, np.uint64)
    for start in range(0, bits.size, _CHUNK):
        chunk = bits[start : start + _CHUNK].astype(np.uint32)
        index = np.arange(start, start + chunk.size, dtype=np.uint64).astype(np.uint32)
        for hash_index, hashes in enumerate(_hash(chunk, index)):
            sums[hash_index] += hashes.sum(dtype=np.uint64)
    return _format(array, sums.astype(np.uint32))


def first_mismatch(checksums: Mapping[str, str], saved: Mapping[str, str]) -> str | None:
    """Describes the first array whose checksum differs from the saved one, or returns None.

    Args:
      checksums: Of arrays that were read, by path.
      saved: Those of all arrays when they were saved.
    """
    for path, checksum in checksums.items():
        if saved.get(path) != checksum:
            return (
                f"{path}: {checksum} was read, {saved.get(path, 'nothing')} was saved "
                "(format, shape, checksum)"
            )
    return None


def first_spec_mismatch(specs: Mapping[str, ArraySpec], checksums: Mapping[str, str]) -> str | None:
    """Describes an array with another shape or dtype than was saved, or returns None.

    Args:
      specs: Of all arrays of a checkpoint, by path.
      checksums: Those of all arrays when they were saved; they begin with shape and dtype.
    """
    described = {path: str(leaf) for path, leaf in specs.items()}
    saved = {path: checksum.rpartition(" ")[0] for path, checksum in checksums.items()}
    if described == saved:
        return None
    path = min(path for path, _ in described.items() ^ saved.items())
    return f"{path} is {described.get(path, 'missing')}, {saved.get(path, 'nothing')} was saved"


def _format(array: jax.Array | np.ndarray, sums: np.ndarray) -> str:
    spec = ArraySpec(tuple(array.shape), np.dtype(array.dtype))
    return f"{spec} {int(sums[0]):08x}{int(sums[1]):08x}"


def _is_small(array: jax.Array | np.ndarray) -> bool:
    """Returns whether to sum on the host instead of compiling."""
    if not isinstance(array, jax.Array):
        return True
    return array.size <= _CHUNK and (array.is_fully_addressable or array.is_fully_replicated)


@functools.cache
def _program(sharding: jax.sharding.Sharding) -> jax.stages.Wrapped:
    def sums(array: jax.Array) -> jax.Array:
        # Arrays offloaded to host memory must be copied to the device first.
        if sharding.memory_kind == "pinned_host":
            array = jax.device_put(array, jax.memory.Space.Device)
        bits = _as_uint32(array)
        dimensions = tuple(range(bits.ndim))
        zero = np.uint32(0)
        # Indices per dimension, because flattening would reshard.
        index = jnp.zeros(bits.shape, jnp.uint32)
        for dimension in dimensions:
            stride = np.uint32(math.prod(bits.shape[dimension + 1 :]) % 2**32)
            index += stride * jax.lax.broadcasted_iota(jnp.uint32, bits.shape, dimension)
        # One reduce: two sums would make XLA on CPU materialize their shared input (25x as long).
        pair = jax.lax.reduce(
            _hash(bits, index), (zero, zero), lambda x, y: (x[0] + y[0], x[1] + y[1]), dimensions
        )
        return jnp.stack(pair)

    if not isinstance(sharding, NamedSharding):
        return jax.jit(sums)
    # Replicated, so that every process can read it.
    return jax.jit(sums, out_shardings=NamedSharding(sharding.mesh, PartitionSpec()))


def _as_uint32(array: jax.Array) -> jax.Array:
    """Returns the bits as uint32; 8-byte elements give low and high words."""
    if array.dtype == jnp.bool_:
        return array.astype(jnp.uint32)
    size = min(array.dtype.itemsize, 4)
    return jax.lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * size}")).astype(jnp.uint32)


def _hash(bits: Bits, index: Bits) -> tuple[Bits, Bits]:
    index_hash = _bijection(index, _INDEX)
    other = index_hash * np.uint32(_INDEX_FACTOR)
    return _bijection(bits ^ index_hash, _FIRST), _bijection(bits + other, _SECOND)


def _bijection(x: Bits, constants: tuple[tuple[int, int], tuple[int, int], int]) -> Bits:
    *rounds, last = constants
    for shift, multiplier in rounds:
        x = (x ^ (x >> np.uint32(shift)) if shift else x) * np.uint32(multiplier)
    return x ^ (x >> np.uint32(last))
