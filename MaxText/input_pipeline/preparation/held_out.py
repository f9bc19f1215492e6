"""Selects the documents held out for validation, by hash."""

import math

import numpy as np

from MaxText.input_pipeline.sequences.splitmix import INCREMENT, scatter

TRAIN, VALIDATION, TEST = "train", "validation", "test"
"""Names of splits; a corpus without splits of its own is divided into the first two."""

HELD_OUT, SAMPLED = 0, 1
"""Purposes of a hash. The hashes of different purposes are independent."""

_BITS = 2**64 - 1
_PURPOSE_STEP = 0xD1B54A32D192ED03

_SHARD_BITS = 40  # Limits: 2**40 documents per shard, 2**24 shards per corpus


def document_number(shard: int, index: int) -> int:
    """Returns a number in the corpus for document `index` of a shard.

    Numbers increase with gaps between shards, so they do not depend on earlier shards' sizes.
    """
    assert index < 2**_SHARD_BITS, index
    return (shard << _SHARD_BITS) + index


def shard_of(number: int) -> int:
    return number >> _SHARD_BITS


def hashes(seed: int, purpose: int, numbers_N: np.ndarray) -> np.ndarray:
    """Returns SplitMix64 hashes (uint64 [N]) of the seed, the purpose and each number."""
    start = (seed * INCREMENT + purpose * _PURPOSE_STEP) & _BITS
    return scatter(numbers_N.astype(np.uint64) + np.uint64(start))


def held_out_below(fraction: float) -> int:
    return math.ceil(fraction * 2**64)
