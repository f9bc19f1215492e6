"""Runs that begin with the parameters of a smaller model."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.checkpointing.growth import placing
from MaxText.errors import UserError
from tests.checkpointing.growing import by_name, config_of, grow, logits, program, save, trained
from tests.small_models import random_batch, some_quick

# Whole TokenFormers whose normalisation lets slots be added without a change.
KEEPING = [
    {"normalize_type": "l2_norm_gelu"},
    {"normalize_type": "gelu_l2_norm", "qkv_bias": True, "proj_bias": True, "ffn_bias": True},
    {"normalize_type": "l2_norm", "scan_layers": False},
    {"normalize_type": "gelu"},
]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A run of 2 updates: (folder, configuration, state)."""
    config = config_of()
    state = trained(config)
    return save(tmp_path_factory.mktemp("small"), config, state), config, state


@pytest.mark.parametrize("keys", some_quick(KEEPING, 2), ids=lambda keys: keys["normalize_type"])
def test_the_function_is_kept_and_every_new_slot_learns(tmp_path, keys):
    config = config_of(**keys)
    state = dataclasses.replace(program(config).state, step=jnp.int32(1))
    run = save(tmp_path / "small", config, state)
    grown = grow(tmp_path / "large", run, slot_num=10, **keys)
    before = logits(config, state.params)
    after = logits(grown.settled.config, grown.start.state.params)
    np.testing.assert_allclose(after, before, rtol=0, atol=1e-5 * np.abs(before).max())

    # A first moment that began at zero tells whether there has been a gradient.
    moved, state = {}, grown.start.state
    for seed in range(2):
        state, _ = grown.program.step(state, random_batch(config, 4, seed=seed))
        moments = by_name(state.opt_state[1].mu)
        for name, (old, _) in grown.settled.growth.plan.slots.items():
            axis = grown.program.model.parameters[name].logical_axes.index("slots")
            new = np.moveaxis(moments[name], axis, -1)[..., old:]
            # [layers, ..., slots] -> whether each slot of each layer has had a gradient.
            has = np.any(new.reshape(2, -1, new.shape[-1]), axis=1)
            moved[name] = moved.get(name, False) | has
        if seed == 0:
            assert not any(has.any() for name, has in moved.items() if "values" in name)
            assert all(has.all() for name, has in moved.items() if "keys/kernel" in name)
    assert all(has.all() for has in moved.values())
    assert len(moved) == 10 + 5 * bool(keys.get("ffn_bias"))


def test_old_parts_and_zoom(small, tmp_path):
    run, config, state = small
    grown = grow(tmp_path, run, slot_num=10)
    old = by_name(state.params)
    for name, array in grown.params.items():
        stored = grown.settled.growth.plan.leaves[name]
        leading = tuple(slice(size) for size in stored.old.shape)
        np.testing.assert_array_equal(array[leading], old[name])
    assert grown.settled.config.model.pattention.zoom_dim == 6
    assert any(line.startswith("zoom_dim=6, with which") for line in grown.lines)
    assert grown.start.changes["slot_num"] == ("6", "10")
    assert (grown.start.how, grown.start.first_step, grown.start.position) == ("growth", 0, None)
    assert config.model.pattention.zoom_dim == 0


def test_two_growths_keep_the_first_zoom(small, tmp_path):
    run, config, _ = small
    middle = grow(tmp_path / "m", run, slot_num=10)
    stored, _ = middle.program.step(middle.start.state, random_batch(config, 4))
    save(tmp_path / "m", middle.settled.config, stored)
    large = grow(tmp_path / "l", tmp_path / "m", slot_num=16, ffn_slot_num=70)
    assert large.settled.config.model.pattention.zoom_dim == 6
    before = logits(middle.settled.config, stored.params)
    after = logits(large.settled.config, large.start.state.params)
    np.testing.assert_allclose(after, before, rtol=0, atol=1e-5 * np.abs(before).max())


def test_parts_with_sizes_of_their_own_have_zooms_of_their_own(tmp_path):
    config = config_of(qkv_slot_num=5, proj_slot_num=7, ffn_slot_num=9)
    state = trained(config)
    run = save(tmp_path / "small", config, state)
    grown = grow(tmp_path / "l", run, qkv_slot_num=8, proj_slot_num=7, ffn_slot_num=13)
    section = grown.settled.config.model.pattention
    assert [section.qkv_zoom_dim, section.proj_zoom_dim, section.ffn_zoom_dim] == [5, 7, 9]
    before = logits(config, state.params)
    after = logits(grown.settled.config, grown.start.state.params)
    np.testing.assert_allclose(after, before, rtol=0, atol=1e-5 * np.abs(before).max())


def test_dropping_slots_that_were_never_trained_is_the_way_back(small, tmp_path):
    run, _, state = small
    grown = grow(tmp_path / "l", run, slot_num=10)
    untrained = dataclasses.replace(grown.start.state, step=jnp.int32(1))
    save(tmp_path / "l", grown.settled.config, untrained)
    with pytest.raises(
        UserError, match=r"slots 10 -> 6 .attention., 40 -> 24 .*growth_allow_shrinking"
    ):
        grow(tmp_path / "s", tmp_path / "l", slot_num=6)
    back = grow(tmp_path / "s", tmp_path / "l", slot_num=6, growth_allow_shrinking=True)
    dropped = "slots 10 -> 6 (attention), 40 -> 24 (feed-forward)"
    assert f"What is dropped can change the function: {dropped}" in back.lines
    assert back.settled.config.model.pattention.zoom_dim == 6
    for name, array in by_name(state.params).items():
        np.testing.assert_array_equal(back.params[name], array)


def test_a_deeper_model_repeats_layers(small, tmp_path):
    run, _, state = small
    with pytest.raises(UserError, match=r"(?s)4 layers made of one of 2.*growth_mode=random"):
        grow(tmp_path / "l", run, base_num_decoder_layers=4)
    deep = grow(tmp_path / "l", run, base_num_decoder_layers=4, growth_mode="random")
    old = by_name(state.params)
    for name, array in deep.params.items():
        expected = old[name][[0, 0, 1, 1]] if name.startswith("layers/") else old[name]
        np.testing.assert_array_equal(array, expected)
    assert deep.settled.record["layers"] == [2, 4]
    assert not deep.settled.old_slots


def test_modes_of_the_reference_leave_the_scale_alone(small, tmp_path):
    run, _, _ = small
    for mode in ("random", "zero"):
        grown = grow(tmp_path / mode, run, slot_num=10, growth_mode=mode)
        assert grown.settled.config.model.pattention.zoom_dim == 0
        new = grown.params["layers/mlp/keys/kernel"][..., 24:]
        assert np.any(new) == (mode == "random")


@pytest.mark.parametrize("moments", ["zeroed", "reused", "warmed"])
def test_moments(small, tmp_path, moments):
    run, _, state = small
    grown = grow(tmp_path, run, slot_num=10, growth_moments=moments)
    count = int(grown.start.state.opt_state[1].count)
    schedule = grown.start.state.opt_state[4].count
    assert (count, int(schedule), int(grown.start.state.step)) == (
        0 if moments == "zeroed" else 2, 0, 0
    )  # fmt: skip
    for kind in ("mu", "nu"):
        got = by_name(getattr(grown.start.state.opt_state[1], kind))
        stored = by_name(getattr(state.opt_state[1], kind))
        for name, leaf in grown.settled.growth.plan.leaves.items():
            if moments == "zeroed":
                assert not np.any(got[name])
                continue
            old = tuple(slice(size) for size in leaf.old.shape)
            np.testing.assert_array_equal(got[name][old], stored[name])
            if leaf.copied:
                continue
            axis = leaf.slots.axis
            new = np.take(got[name], range(leaf.slots.old, leaf.slots.new), axis)
            if kind == "nu" and moments == "warmed":
                mean = stored[name].mean(axis, keepdims=True)
                np.testing.assert_allclose(new, np.broadcast_to(mean, new.shape), rtol=1e-6)
            else:
                assert not np.any(new)
    # Taken over, they are trained with.
    after, metrics = grown.program.step(
        grown.start.state, random_batch(grown.settled.config, 4, seed=5)
    )
    assert np.isfinite(metrics["loss"])
    assert int(after.opt_state[1].count) == count + 1


def test_warmed_moments_of_a_deeper_model(small, tmp_path):
    run, _, state = small
    grown = grow(
        tmp_path, run, slot_num=8, base_num_decoder_layers=4, growth_mode="random",
        growth_moments="warmed",
    )  # fmt: skip
    name = "layers/mlp/values/kernel"
    stored = by_name(state.opt_state[1].nu)[name]
    got = by_name(grown.start.state.opt_state[1].nu)[name]
    np.testing.assert_array_equal(got[:, :24], stored[[0, 0, 1, 1]])
    means = stored.mean(1, keepdims=True)[[0, 0, 1, 1]]
    np.testing.assert_allclose(got[:, 24:], np.broadcast_to(means, (4, 8, 32)), rtol=1e-6)


@pytest.mark.parametrize("factor", some_quick([0.0, 0.5], 2))
def test_old_slots_at_a_rate_of_their_own(small, tmp_path, factor):
    run, config, _ = small
    keys = {"slot_num": 10, "growth_mode": "random"}
    slowed = grow(tmp_path / "a", run, growth_old_slots_learning_rate=factor, **keys)
    plain = grow(tmp_path / "b", run, **keys)
    batch = random_batch(config, 4, seed=3)
    before, start = plain.params, slowed.start.state
    after = {
        kind: by_name(grown.program.step(grown.start.state, batch)[0].params)
        for kind, grown in (("slowed", slowed), ("plain", plain))
    }
    assert jax.tree.structure(start.opt_state) == jax.tree.structure(plain.start.state.opt_state)
    for name, leaf in plain.settled.growth.plan.leaves.items():
        moved = {kind: params[name] - before[name] for kind, params in after.items()}
        old = tuple(slice(size) for size in leaf.old.shape)
        expected = moved["plain"].copy()
        if leaf.slots:
            assert np.all(np.any(expected, axis=leaf.slots.axis))
            expected[old] *= factor
            if factor == 0:
                np.testing.assert_array_equal(after["slowed"][name][old], before[name][old])
        np.testing.assert_allclose(moved["slowed"], expected, rtol=1e-3, atol=1e-7)


def test_data_goes_on_where_the_smaller_model_stood(small, tmp_path):
    run, _, _ = small
    grown = grow(tmp_path / "a", run, slot_num=10, growth_data="continue")
    assert grown.start.position == {"step": 0, "samples": 8}
    assert grown.start.first_step == 0
    (run / "checkpoints" / "1" / "iter").rename(tmp_path / "iter")
    try:
        with pytest.raises(UserError, match=r"does not say where its data stood.*=restart"):
            grow(tmp_path / "b", run, slot_num=10, growth_data="continue")
    finally:
        (tmp_path / "iter").rename(run / "checkpoints" / "1" / "iter")


def test_one_array_at_a_time(tmp_path, monkeypatch):
    """Beside the arrays of the new model there is one stored array, and no second model."""
    config = config_of(base_emb_dim=64, head_dim=16, slot_num=60)
    run = save(tmp_path / "small", config, trained(config, 1))
    large = {"base_emb_dim": 64, "head_dim": 16, "slot_num": 64, "growth_mode": "random"}
    peaks, original, before = [], placing.new_part, live_bytes()

    def watched(leaf, stored, *arguments):
        peaks.append(live_bytes() + stored.nbytes)
        return original(leaf, stored, *arguments)

    monkeypatch.setattr(placing, "new_part", watched)
    grown = grow(tmp_path / "large", run, **large)
    # Not of the growth: the moments, and the fresh state that this test draws from.
    others = nbytes(grown.start.state.opt_state) + nbytes(grown.program.state)
    sizes = [array.nbytes for array in grown.params.values()]
    assert len(peaks) == len(sizes)
    assert max(peaks) - before - others < sum(sizes) + 2 * max(sizes) < 2 * sum(sizes)


def live_bytes():
    return sum(array.nbytes for array in jax.live_arrays() if not array.is_deleted())


def nbytes(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def test_moments_of_another_optimizer(small, tmp_path):
    run, _, _ = small
    with pytest.raises(
        UserError, match=r"(?s)missing     opt_state/1/trace.*growth_moments=zeroed"
    ):
        grow(tmp_path, run, slot_num=10, growth_moments="reused", opt_type="sgd")
