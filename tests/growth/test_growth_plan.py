"""What becomes of each array: by axes, never by names."""

import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.checkpointing.compatibility import ArraySpec
from MaxText.growth.growth_plan import grow_shard, plan
from MaxText.parallelism.logical_sharding import ParamSpec

# Names say nothing here: "a" makes slots, "b" sums over them, "c" is added to them.
AXES = {
    "a": (("layers", "embed", "slots"), 1),
    "b": (("slots", "layers", "embed"), 1),
    "c": (("layers", "slots"), 0),
    "d": (("vocab", "embed"), 0),
}


def shapes(slots=4, layers=2, embed=3):
    return {"a": (layers, embed, slots), "b": (slots, layers, embed), "c": (layers, slots),
            "d": (5, embed)}  # fmt: skip


def ramp(shape, first=1):
    return np.arange(first, first + np.prod(shape), dtype=np.float32).reshape(shape)


@pytest.mark.parametrize("layers", [2, 3, 5])
@pytest.mark.parametrize("slots", [7, 4, 2])
def test_stored_slots_lead_and_layers_repeat(slots, layers):
    """Layer j is layer floor(j * old / new); the whole is made of the parts of devices."""
    halves = np.dtype(jnp.bfloat16)
    stored = {name: ArraySpec(shape, halves) for name, shape in shapes().items()}
    wanted = {
        name: ParamSpec(shape, jnp.float32, *AXES[name])
        for name, shape in shapes(slots=slots, layers=layers).items()
    }
    for leaf in plan(stored, wanted).leaves.values():
        old, fresh = ramp(leaf.old.shape).astype(halves), ramp(leaf.new.shape, 1000)
        expected = fresh.copy()
        taken = old
        if leaf.layers:
            taken = np.take(taken, [j * 2 // layers for j in range(layers)], leaf.layers.axis)
        kept = tuple(slice(min(sizes)) for sizes in zip(taken.shape, leaf.new.shape, strict=True))
        expected[kept] = taken[kept]
        got = grow_shard(leaf, old, fresh=fresh)
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got, expected)
        zeros = np.zeros_like(fresh)
        zeros[kept] = taken[kept]
        np.testing.assert_array_equal(grow_shard(leaf, old), zeros)
        again = np.full_like(fresh, np.nan)
        for axis_0 in (slice(0, 1), slice(1, None)):
            for axis_1 in (slice(0, 1), slice(1, 2), slice(2, None)):
                index = (axis_0, axis_1, *[slice(None)] * (fresh.ndim - 2))
                again[index] = grow_shard(leaf, old, index, fresh[index])
        np.testing.assert_array_equal(again, expected)
