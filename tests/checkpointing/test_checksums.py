"""Checksums: the same on device and host, and another for anything that changes."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.checkpointing.checksums import array_checksums, first_difference, host_checksum

FORMATS = [jnp.bool_, jnp.int8, jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.int32,
           jnp.float32]  # fmt: skip


def numbers(shape, dtype=np.float32, seed=0):
    return np.asarray(3 * np.random.default_rng(seed).normal(size=shape)).astype(dtype)


@pytest.mark.parametrize("dtype", FORMATS, ids=lambda dtype: np.dtype(dtype).name)
def test_devices_and_host_agree(dtype):
    # The last one is large enough to be summed by a compiled program.
    arrays = [numbers(shape, dtype) for shape in [(), (0,), (3, 0, 2), (5,), (3, 230, 101)]]
    found = array_checksums([jnp.asarray(array) for array in arrays])
    assert list(found.values()) == [host_checksum(array) for array in arrays]


def test_elements_of_eight_bytes():
    for dtype in (np.int64, np.float64):
        array = numbers((300, 301), dtype)
        with jax.enable_x64(True):
            assert array_checksums([jnp.asarray(array)])["0"] == host_checksum(array)
        changed = array.copy()
        changed.view(np.uint64)[7, 3] ^= 1 << 40
        assert host_checksum(changed) != host_checksum(array)


def by_definition(values):
    """Both sums in Python's own integers."""

    def bijection(x, rounds, last):
        for shift, multiplier in rounds:
            x = ((x ^ (x >> shift)) if shift else x) * multiplier % 2**32
        return x ^ (x >> last)

    first = second = 0
    for index, value in enumerate(values):
        place = bijection(index, [(0, 0x9E3779B1), (16, 0x85EBCA6B)], 13)
        first += bijection(value ^ place, [(16, 0x7FEB352D), (15, 0x846CA68B)], 16)
        other = (value + place * 0xC2B2AE35) % 2**32
        second += bijection(other, [(15, 0x2C1B3C6D), (12, 0x297A2D39)], 15)
    return f"{first % 2**32:08x}{second % 2**32:08x}"


def test_the_numbers_are_those_of_the_definition():
    """They stand in checkpoints: another program text must not give others."""
    array = np.arange(40, dtype=np.uint32) * 123_456_789
    assert host_checksum(array) == f"uint32[40] {by_definition(array.tolist())}"


def test_any_single_bit_is_seen():
    array = numbers((40, 50))
    original, bits = host_checksum(array), random.Random(0)
    for _ in range(300):
        damaged = array.copy()
        damaged.reshape(-1).view(np.uint32)[bits.randrange(2000)] ^= np.uint32(
            1 << bits.randrange(32)
        )
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
    variants = [signs, swapped, hole, moved, -array, array.T, array.reshape(50, 40), array[:39],
                array.view(np.int32)]  # fmt: skip
    assert len({host_checksum(x) for x in [array, *variants]}) == len(variants) + 1
    zeros = {host_checksum(np.zeros(n, np.float32))[-16:] for n in range(1, 6)}
    assert len(zeros) == 5


def test_paths_are_those_of_the_state_and_the_difference_is_named():
    tree = {"params": {"wi": jnp.ones(3)}, "opt_state": (jnp.int32(1),)}
    found = array_checksums(tree)
    assert set(found) == {"params/wi", "opt_state/0"}
    assert first_difference(found, found) is None
    assert first_difference({"params/wi": found["params/wi"]}, found) is None
    wrong = found | {"params/wi": "float32[3] 0000000000000000"}
    difference = first_difference(found, wrong)
    assert difference is not None
    assert difference.startswith("params/wi: float32[3]")
