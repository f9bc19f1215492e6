"""Which stored numbers each number of a grown array is, whole or in shards."""

import numpy as np
import pytest

from MaxText.checkpointing.compatibility import ArraySpec
from MaxText.growth.growth_plan import AxisResize, ParamGrowth, grow_shard


def growth(old_layers, new_layers, old_slots=4, new_slots=4):
    """Of an array [layers, 3, slots]."""
    dtype = np.dtype(np.float32)
    return ParamGrowth(
        old_spec=ArraySpec((old_layers, 3, old_slots), dtype),
        new_spec=ArraySpec((new_layers, 3, new_slots), dtype),
        slots=AxisResize(axis=2, old_size=old_slots, new_size=new_slots),
        layers=AxisResize(axis=0, old_size=old_layers, new_size=new_layers),
        role="key",
    )


def numbers(shape, first=0):
    return np.arange(first, first + np.prod(shape), dtype=np.float32).reshape(shape)


@pytest.mark.parametrize(("old", "new"), [(18, 24), (2, 5), (5, 2), (3, 3)])
def test_layers_repeat_or_are_omitted_evenly(old, new):
    stored = numbers((old, 3, 4))
    copied_layers = [int(layer * old / new) for layer in range(new)]
    np.testing.assert_array_equal(grow_shard(growth(old, new), stored), stored[copied_layers])
    if old == 18:  # every third layer twice, as fattorib/transformer_shmap does it
        assert copied_layers[:9] == [0, 0, 1, 2, 3, 3, 4, 5, 6]


@pytest.mark.parametrize("layers", [2, 3])
@pytest.mark.parametrize("slots", [7, 4, 2])
def test_shards_make_up_the_whole(layers, slots):
    leaf = growth(2, layers, new_slots=slots)
    stored = numbers((2, 3, 4))
    fresh = numbers((layers, 3, slots), 1000)
    whole = grow_shard(leaf, stored, fresh=fresh)
    kept = min(slots, 4)
    np.testing.assert_array_equal(whole[..., kept:], fresh[..., kept:])
    np.testing.assert_array_equal(whole[0, :, :kept], stored[0, :, :kept])
    joined = np.full_like(whole, np.nan)
    for layer_range in (slice(0, 1), slice(1, None)):
        for slot_range in (slice(0, 1), slice(1, 5), slice(5, None)):
            index = (layer_range, slice(None), slot_range)
            joined[index] = grow_shard(leaf, stored, index, fresh[index])
    np.testing.assert_array_equal(joined, whole)
