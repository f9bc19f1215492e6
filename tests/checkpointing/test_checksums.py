"""Checksums: the same on device and host, and another for anything that changes."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.checkpointing.checksums import array_checksums, first_mismatch, host_checksum

FORMATS = [
    jnp.bool_,
    jnp.int8,
    jnp.bfloat16,
    jnp.float16,
    jnp.float8_e4m3fn,
    jnp.int32,
    jnp.float32,
    np.int64,
    np.float64,
]


def numbers(shape, dtype=np.float32, seed=0):
    return np.asarray(3 * np.random.default_rng(seed).normal(size=shape)).astype(dtype)


@pytest.mark.parametrize("dtype", FORMATS, ids=lambda dtype: np.dtype(dtype).name)
def test_devices_and_host_agree(dtype):
    # The last one is large enough to be summed by a compiled program.
    arrays = [numbers(shape, dtype) for shape in [(), (0,), (3, 0, 2), (5,), (3, 230, 101)]]
    with jax.enable_x64(np.dtype(dtype).itemsize == 8):
        found = array_checksums([jnp.asarray(array) for array in arrays])
    assert list(found.values()) == [host_checksum(array) for array in arrays]


def test_the_numbers_never_change():
    """They stand in checkpoints."""
    assert (
        host_checksum(np.arange(40, dtype=np.uint32) * 123_456_789) == "uint32[40] f3e4c1191e96a3ab"
    )


def test_any_single_bit_is_seen():
    bits = random.Random(0)
    for dtype in (np.uint32, np.uint64):
        array = numbers((40, 50)).view(np.uint32).astype(dtype)
        original, size = host_checksum(array), 8 * array.itemsize
        for _ in range(200):
            damaged = array.copy()
            damaged.reshape(-1)[bits.randrange(2000)] ^= dtype(1 << bits.randrange(size))
            found = host_checksum(damaged)
            # Both halves differ: each is a bijection of the element.
            assert found[-16:-8] != original[-16:-8]
            assert found[-8:] != original[-8:]


def test_other_damage_is_seen():
    array = numbers((40, 50))
    signs, swapped, hole, moved = (array.copy() for _ in range(4))
    signs[3, :2] *= -1  # the highest bits of two elements
    swapped[[1, 2]] = swapped[[2, 1]]
    hole[7:9] = 0
    moved[1:] = array[:-1]
    variants = [
        signs,
        swapped,
        hole,
        moved,
        -array,
        array.T,
        array.reshape(50, 40),
        array[:39],
        array.view(np.int32),
    ]
    assert len({host_checksum(x) for x in [array, *variants]}) == len(variants) + 1


def test_paths_are_those_of_the_state_and_the_difference_is_named():
    tree = {"params": {"wi": jnp.ones(3)}, "opt_state": (jnp.int32(1),)}
    found = array_checksums(tree)
    assert set(found) == {"params/wi", "opt_state/0"}
    assert first_mismatch({"params/wi": found["params/wi"]}, found) is None
    difference = first_mismatch(found, found | {"params/wi": "float32[3] 0000000000000000"})
    assert difference is not None
    assert difference.startswith("params/wi: float32[3]")
