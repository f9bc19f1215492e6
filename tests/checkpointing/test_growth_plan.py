"""What becomes of each array: by axes, never by names."""

import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.checkpointing.growth.plan import Misfits, new_part, plan
from MaxText.checkpointing.matching import Leaf
from MaxText.layers.weights import ParameterInfo

F32 = np.dtype("float32")
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


def stored(**sizes):
    return {name: Leaf(shape, F32) for name, shape in shapes(**sizes).items()}


def wanted(**sizes):
    return {
        name: ParameterInfo(shape, jnp.float32, *AXES[name])
        for name, shape in shapes(**sizes).items()
    }


def ramp(shape, first=1):
    return np.arange(first, first + np.prod(shape), dtype=np.float32).reshape(shape)


def test_the_same_sizes_are_copied():
    same = plan(stored(), wanted())
    assert not same.changes
    assert all(leaf.copied for leaf in same.leaves.values())
    array = ramp((2, 3, 4))
    got = new_part(same.leaves["a"], array)
    np.testing.assert_array_equal(got, array)
    assert not np.shares_memory(got, array)


def test_roles_follow_from_the_axes():
    grown = plan(stored(), wanted(slots=7))
    assert {name: leaf.role for name, leaf in grown.leaves.items()} == {
        "a": "key",
        "b": "value",
        "c": "bias",
        "d": None,
    }
    assert grown.slots == {"a": (4, 7), "b": (4, 7), "c": (4, 7)}
    assert grown.layers is None
    assert grown.adds_slots
    assert not grown.drops
    takes = {
        mode: "".join(name for name, leaf in grown.leaves.items() if leaf.takes_fresh(mode))
        for mode in ("function_preserving", "random", "zero")
    }
    assert takes == {"function_preserving": "b", "random": "abc", "zero": ""}


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_old_slots_lead_and_fresh_ones_follow(name):
    leaf = plan(stored(), wanted(slots=7)).leaves[name]
    old, fresh = ramp(leaf.old.shape), ramp(leaf.new.shape, 1000)
    leading = [slice(None)] * old.ndim
    leading[leaf.slots.axis] = slice(4)
    expected = fresh.copy()
    expected[tuple(leading)] = old
    np.testing.assert_array_equal(new_part(leaf, old, fresh=fresh), expected)
    zero = new_part(leaf, old)
    np.testing.assert_array_equal(zero[tuple(leading)], old)
    assert np.count_nonzero(zero) == old.size


@pytest.mark.parametrize("slots", [7, 2])
@pytest.mark.parametrize("layers", [2, 3])
@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_parts_make_the_whole(name, layers, slots):
    leaf = plan(stored(), wanted(slots=slots, layers=layers)).leaves[name]
    old, fresh = ramp(leaf.old.shape), ramp(leaf.new.shape, 1000)
    whole = new_part(leaf, old, fresh=fresh)
    again = np.full_like(whole, np.nan)
    for axis_0 in (slice(0, 1), slice(1, None)):
        for axis_1 in (slice(0, 1), slice(1, 2), slice(2, None)):
            index = (axis_0, axis_1, *[slice(None)] * (whole.ndim - 2))
            again[index] = new_part(leaf, old, index, fresh[index])
    np.testing.assert_array_equal(again, whole)


@pytest.mark.parametrize(("old", "new"), [(18, 24), (2, 5), (5, 2), (3, 3)])
def test_layer_j_is_layer_floor_of_j_times_old_over_new(old, new):
    leaf = plan(stored(layers=old), wanted(layers=new)).leaves["a"]
    array = ramp(leaf.old.shape)
    got = new_part(leaf, array)
    for layer in range(new):
        np.testing.assert_array_equal(got[layer], array[int(layer * old / new)])


def test_18_layers_become_24():
    leaf = plan(stored(layers=18), wanted(layers=24)).leaves["c"]
    array = np.broadcast_to(np.arange(18, dtype=np.float32)[:, None], (18, 4))
    # The rule of fattorib/transformer_shmap: every third layer twice.
    expected = [0, 0, 1, 2, 3, 3, 4, 5, 6, 6, 7, 8, 9, 9, 10, 11, 12, 12, 13, 14, 15, 15, 16, 17]
    assert new_part(leaf, array)[:, 0].tolist() == expected


def test_slots_and_layers_at_once():
    leaf = plan(stored(), wanted(slots=5, layers=4)).leaves["b"]
    assert str(leaf) == "b: slots 4 -> 5, layers 2 -> 4"
    old = ramp(leaf.old.shape)
    got = new_part(leaf, old, fresh=-1.0)
    np.testing.assert_array_equal(got[:4], old[:, [0, 0, 1, 1]])
    np.testing.assert_array_equal(got[4:], np.full((1, 4, 3), -1.0))


def test_dropping_keeps_the_leading_slots():
    fewer = plan(stored(), wanted(slots=3))
    assert fewer.drops == ["slots 4 -> 3"]
    assert not fewer.adds_slots
    array = ramp((2, 3, 4))
    np.testing.assert_array_equal(new_part(fewer.leaves["a"], array), array[..., :3])
    assert plan(stored(layers=4), wanted()).drops == ["layers 4 -> 2"]


def test_the_format_is_the_wanted_one():
    halves = {name: Leaf(leaf.shape, np.dtype(jnp.bfloat16)) for name, leaf in stored().items()}
    leaf = plan(halves, wanted(slots=5)).leaves["a"]
    old = ramp(leaf.old.shape).astype(jnp.bfloat16)
    got = new_part(leaf, old)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got[..., :4], old.astype(np.float32))


def test_whatever_else_differs_is_listed():
    old = stored()
    old["d"] = Leaf((6, 9), F32)
    old["a"] = Leaf((2, 3, 4), np.dtype("int32"))
    old["z"] = old.pop("c")
    with pytest.raises(Misfits) as caught:
        plan(old, wanted(slots=7))
    assert caught.value.problems == [
        "missing     c: wanted float32[2,7]",
        "extra       z: stored float32[2,4]",
        "other kind  a: stored int32[2,3,4], wanted float32[2,3,7]",
        "other shape d: stored float32[6,9], wanted float32[5,3] (vocab 6 -> 5, embed 9 -> 3)",
    ]


def test_another_number_of_axes_is_a_mismatch():
    old = stored()
    old["a"] = Leaf((2, 12), F32)
    with pytest.raises(Misfits, match=r"other shape a: stored float32\[2,12\]"):
        plan(old, wanted())
