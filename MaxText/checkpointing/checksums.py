"""Checksums of arrays: 64 bits, independent of devices, mesh and storage.

Each element, as an unsigned integer, is mixed with its index in the array by two bijections of 32
bits (xor-shifts and odd multipliers, in the form of MurmurHash3's finalizer, constants in the
manner of https://github.com/skeeto/hash-prospector); both results are summed modulo 2^32.

- A sum has no order: every device sums what it holds, and the rest is an all-reduce of eight bytes.
- A bijection maps another element to another number, so any change of a single element changes both
  sums with certainty; other damage goes unnoticed once in 2^64.
- Sums of elements times odd numbers, which would be cheaper, miss common damage: the highest bits
of
  two elements, such as two signs, cancel whatever the multipliers are.

`array_checksums` (on devices) and `host_checksum` (NumPy) give the same numbers.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from MaxText.checkpointing.matching import Leaf, path_name

# Two pairs of shift and multiplier, and a last shift.
_FIRST = ((16, 0x7FEB352D), (15, 0x846CA68B), 16)
_SECOND = ((15, 0x2C1B3C6D), (12, 0x297A2D39), 15)
_PLACE = ((0, 0x9E3779B1), (16, 0x85EBCA6B), 13)
_OTHER_PLACE = 0xC2B2AE35
_CHUNK = 1 << 16  # elements that NumPy takes at once: its temporaries stay in the cache


def array_checksums(tree: Any) -> dict[str, str]:
    """Returns checksums of arrays on devices, by path.

    Arrays of equal shape, format and sharding share a compiled program. All processes must call it.

    Returns:
      {"params/decoder/wi": "float32[3,16,8] 0123456789abcdef"}, as `host_checksum`.
    """
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    # All are started before the first is waited for.
    sums = [
        None if _is_small(array) else _program(_mesh_of(array), array.sharding.memory_kind)(array)
        for _, array in paths
    ]
    return {
        path_name(path): host_checksum(np.asarray(array))
        if pair is None
        else _described(array, np.asarray(pair))
        for (path, array), pair in zip(paths, sums, strict=True)
    }


def host_checksum(array: np.ndarray) -> str:
    """Returns shape, format and checksum: "float32[3,16,8] 0123456789abcdef"."""
    words = np.ascontiguousarray(array).reshape(-1)
    words = words.view(f"u{min(words.dtype.itemsize, 4)}")
    sums = np.zeros(2, np.uint64)
    for start in range(0, words.size, _CHUNK):
        chunk = words[start : start + _CHUNK].astype(np.uint32)
        index = np.arange(start, start + chunk.size, dtype=np.uint64).astype(np.uint32)
        for which, mixed in enumerate(_mixed(chunk, index)):
            sums[which] += mixed.sum(dtype=np.uint64)
    return _described(array, sums.astype(np.uint32))


def first_difference(found: Mapping[str, str], wanted: Mapping[str, str]) -> str | None:
    """Describes the first array of `found` that differs from `wanted`; None if there is none."""
    for path, checksum in found.items():
        if wanted.get(path) != checksum:
            return (
                f"{path}: {checksum} was read, {wanted.get(path, 'nothing')} was saved "
                "(format, shape, checksum)"
            )
    return None


def other_leaf(found: Mapping[str, Leaf], wanted: Mapping[str, str]) -> str | None:
    """Describes an array whose stored shape or format contradicts its checksum; None if none does.

    A damaged description must not look like the model of another configuration.
    """
    described = {path: str(leaf) for path, leaf in found.items()}
    saved = {path: checksum.rpartition(" ")[0] for path, checksum in wanted.items()}
    if described == saved:
        return None
    path = min(path for path, _ in described.items() ^ saved.items())
    return f"{path} is {described.get(path, 'missing')}, {saved.get(path, 'nothing')} was saved"


def _described(array: Any, sums: np.ndarray) -> str:
    return f"{Leaf(tuple(array.shape), np.dtype(array.dtype))} {int(sums[0]):08x}{int(sums[1]):08x}"


def _is_small(array: Any) -> bool:
    """Returns whether to sum on the host in 0.5 ms: compiling takes 0.1 s for each shape."""
    if not isinstance(array, jax.Array):
        return True
    return array.size <= _CHUNK and (array.is_fully_addressable or array.is_fully_replicated)


def _mesh_of(array: jax.Array) -> Mesh | None:
    sharding = array.sharding
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return sharding.mesh
    return None


@functools.cache
def _program(mesh: Mesh | None, memory_kind: str | None) -> Any:
    def sums(array: jax.Array) -> jax.Array:
        # What lies in the host's memory has to be fetched.
        if memory_kind == "pinned_host":
            array = jax.device_put(array, jax.memory.Space.Device)
        return _sums(array)

    if mesh is None:
        return jax.jit(sums)
    # Whole on every device, so that every process can read it.
    return jax.jit(sums, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _sums(array: jax.Array) -> jax.Array:
    words = _words(array)
    # From the dimensions' own indices: flattening would move what is sharded.
    index = jnp.zeros(words.shape, jnp.uint32)
    for dimension in range(words.ndim):
        stride = math.prod(words.shape[dimension + 1 :]) % 2**32
        iota = jax.lax.broadcasted_iota(jnp.uint32, words.shape, dimension)
        index += iota * np.uint32(stride)
    zero = np.uint32(0)
    # One reduction of both: two sums take 25 times as long on CPU, where XLA writes out what they
    # share.
    both = jax.lax.reduce(_mixed(words, index), (zero, zero), _added, tuple(range(words.ndim)))
    return jnp.stack(both)


def _added(x: Any, y: Any) -> Any:
    return x[0] + y[0], x[1] + y[1]


def _words(array: jax.Array) -> jax.Array:
    """Returns the elements' bits as uint32; elements of 8 bytes are two, the lower one first."""
    if array.dtype == jnp.bool_:
        return array.astype(jnp.uint32)
    size = min(array.dtype.itemsize, 4)
    return jax.lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * size}")).astype(jnp.uint32)


def _mixed(words: Any, index: Any) -> tuple[Any, Any]:
    """Applies both bijections to uint32 words with their indices, in NumPy or jax."""
    place = _bijection(index, _PLACE)
    other = place * np.uint32(_OTHER_PLACE)
    return _bijection(words ^ place, _FIRST), _bijection(words + other, _SECOND)


def _bijection(x: Any, constants: tuple[tuple[int, int], tuple[int, int], int]) -> Any:
    *rounds, last = constants
    for shift, multiplier in rounds:
        x = (x ^ (x >> np.uint32(shift)) if shift else x) * np.uint32(multiplier)
    return x ^ (x >> np.uint32(last))
