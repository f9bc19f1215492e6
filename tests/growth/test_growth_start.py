"""Runs that begin with the parameters of a smaller model."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.errors import UserError
from MaxText.growth import initialize
from MaxText.growth.resolve import resolve_growth
from MaxText.parallelism import mesh
from MaxText.training.assembly import setup_train
from tests.growth.growing import (
    by_name,
    config_of,
    grow,
    grow_from_random,
    logits,
    program,
    save,
    stored_in,
    trained,
)

DENSE = {"dense_conn": True, "dense_aggregation_impl": "sum", "scan_layers": False}
BIASES = {"qkv_bias": True, "proj_bias": True, "ffn_bias": True}
DIFFERENT_LAYERS = {"dense_first_layer_norms": "one", "block_norm_parametric": True}
# Normalizations under which slots can be added without a change of the function.
PRESERVING = [
    {"normalize_type": "l2_norm_gelu"},
    {"normalize_type": "gelu_l2_norm"} | BIASES | DENSE | DIFFERENT_LAYERS,
    {"normalize_type": "l2_norm", "scan_layers": False},
    {"normalize_type": "gelu"} | DENSE,
]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A run of 2 updates: (folder, configuration, state)."""
    config = config_of()
    state = trained(config)
    return save(tmp_path_factory.mktemp("small"), config, state), config, state


@pytest.mark.slow
@pytest.mark.parametrize("keys", PRESERVING)
def test_growth_keeps_the_function(tmp_path, keys):
    config = config_of(**keys)
    state = trained(config)
    run = save(tmp_path / "a", config, state)
    before = logits(config, state.params)
    for sizes in ({"slot_num": 10}, {"slot_num": 16, "ffn_slot_num": 70}):
        folder = tmp_path / str(sizes["slot_num"])
        grown = grow_from_random(folder, run, **sizes, **keys)
        growth = grown.resolved.growth
        assert growth is not None
        assert growth.plan.slots
        assert all(new > old for old, new in growth.plan.slots.values())
        config, params = grown.resolved.config, grown.start.state.params
        if keys["normalize_type"] != "gelu":
            assert config.model.pattention.zoom_dim == 6
        after = logits(config, params)
        np.testing.assert_allclose(after, before, rtol=0, atol=1e-5 * np.abs(before).max())
        # A second growth begins with slots that are all in use.
        state = program(config).random_state(steps=1, seed=2)
        before = logits(config, state.params)
        run = save(folder, config, state)


@pytest.mark.parametrize(
    ("mode", "zoom", "moments", "data", "layers"),
    [
        ("function_preserving", 6, "zeroed", "continue", [0, 1]),
        ("zero", 0, "reused", "restart", [0, 1]),
        ("random", 0, "warmed", "restart", [0, 0, 1]),
    ],
)
def test_slots_layers_scale_and_moments(small, tmp_path, mode, zoom, moments, data, layers):
    def by_name_repeated(tree):
        return {
            name: array[layers] if name.startswith("layers/") else array
            for name, array in by_name(tree).items()
        }

    run, config, state = small
    assert config.model.pattention.zoom_dim == 0
    keys = {"growth.mode": mode, "growth.opt_state": moments, "growth.data": data}
    grown = grow_from_random(
        tmp_path, run, slot_num=10, base_num_decoder_layers=len(layers), **keys
    )
    assert grown.resolved.config.model.pattention.zoom_dim == zoom
    assert grown.start.changes["slot_num"] == ("6", "10")
    position = {"step": 0, "samples": 8} if data == "continue" else None
    assert grown.start[1:5] == (0, position, f"parameters grown from {stored_in(run)}", "growth")
    assert int(grown.start.state.step) == 0
    leaves, old = grown.resolved.growth.plan.leaves, by_name_repeated(state.params)
    for name, array in grown.params.items():
        stored = tuple(slice(size) for size in old[name].shape)
        np.testing.assert_array_equal(array[stored], old[name])
    slot_keys, values = (grown.params[f"layers/mlp/{kind}/kernel"] for kind in ("keys", "values"))
    assert np.any(slot_keys[..., 24:]) == (mode == "random")
    # Values that are not zero let every new slot learn.
    assert np.all(values[:, 24:]) == (mode != "zero")

    found = grown.start.state.opt_state
    assert int(found[1].count) == (0 if moments == "zeroed" else 2)
    assert int(found[4].count) == 0  # the schedule restarts
    for kind in ("mu", "nu"):
        got = by_name(getattr(found[1], kind))
        old = by_name_repeated(getattr(state.opt_state[1], kind))
        for name, leaf in leaves.items():
            stored = tuple(slice(size) for size in old[name].shape)
            expected = np.zeros(leaf.new_spec.shape)
            if kind == "nu" and moments == "warmed" and leaf.slots:
                expected += old[name].mean(leaf.slots.axis, keepdims=True)
            if moments != "zeroed":
                expected[stored] = old[name]
                np.testing.assert_array_equal(got[name][stored], old[name])
            np.testing.assert_allclose(got[name], expected, rtol=1e-6)


def test_slots_are_dropped_and_numbers_cast(tmp_path):
    config, halves = config_of(), functools.partial(jax.tree.map, lambda x: x.astype(jnp.bfloat16))
    state = trained(config)
    state = dataclasses.replace(state, params=halves(state.params))
    run = save(tmp_path / "small", config, state)
    keys = {"growth.mode": "random", "growth.allow_truncation": True}
    grown = grow_from_random(tmp_path / "smaller", run, slot_num=4, **keys)
    old = by_name(state.params)
    for name, array in grown.params.items():
        kept = old[name][tuple(slice(size) for size in array.shape)]
        np.testing.assert_array_equal(array, kept.astype(array.dtype), strict=True)
    assert grown.params["layers/mlp/keys/kernel"].shape[-1] == 16


def test_moments_and_data_that_are_not_there(small, tmp_path):
    run, config, state = small
    bare = save(tmp_path / "bare", config, dataclasses.replace(state, opt_state=()))
    (bare / "checkpoints" / "1" / "iter").rename(tmp_path / "iter")
    for source, key, keys, match in (
        (run, "growth.opt_state=reused", {"opt_type": "sgd"}, "opt_state/1/trace.*=zeroed"),
        (bare, "growth.opt_state=reused", {}, "opt_state/1/count.*=zeroed"),
        (bare, "growth.data=continue", {}, "growth.data=restart"),
    ):
        name, value = key.split("=")
        with pytest.raises(UserError, match=rf"(?s){key}.*{match}"):
            grow_from_random(tmp_path / "large", source, slot_num=10, **{name: value}, **keys)


@pytest.mark.parametrize("factor", [0.0, 0.5])
def test_updates_of_old_slots_are_scaled(small, factor):
    """Of the optimizer that train.py assembles."""
    run, _, _ = small

    def updates(number, **keys):
        config = config_of(load_parameters_path=str(run), slot_num=10, **keys)
        resolved = resolve_growth(config, [])
        sharding = mesh.make_sharding_plan(config.mesh, jax.devices()[:1], config.model.pipeline)
        rate = resolved.existing_slots_lr_scale
        built = setup_train(resolved.config, sharding, resolved.existing_slots, rate)
        params = program(resolved.config).random_state().params
        gradients = jax.tree.map(lambda x: x + number, params)
        state = built.optimizer.init(params)
        moved, state = jax.jit(built.optimizer.update)(gradients, state, params)
        return resolved, by_name(moved), jax.tree.structure(state)

    resolved, plain, structure = updates(0.0)
    _, slowed, same = updates(0.0, **{"growth.existing_slots_lr_scale": factor})
    assert structure == same
    for name, leaf in resolved.growth.plan.leaves.items():
        expected = plain[name].copy()
        assert np.all(expected)
        if leaf.slots:
            expected[tuple(slice(size) for size in leaf.old_spec.shape)] *= factor
        np.testing.assert_allclose(slowed[name], expected, rtol=1e-6)
    if factor == 0:  # frozen whatever the update is
        _, slowed, _ = updates(np.nan, **{"growth.existing_slots_lr_scale": factor})
        name = "layers/mlp/values/kernel"
        assert not np.any(slowed[name][:, :24])
        assert np.all(np.isnan(slowed[name][:, 24:]))


def test_one_array_at_a_time(tmp_path, monkeypatch):
    """Besides the arrays of the new model there is one stored array, and no second model."""

    def nbytes(arrays):
        return sum(array.nbytes for array in arrays if not array.is_deleted())

    sizes = {"base_emb_dim": 64, "head_dim": 16}
    run = save(
        tmp_path / "small",
        config_of(slot_num=60, **sizes),
        trained(config_of(slot_num=60, **sizes)),
    )
    peaks, original, before = [], initialize.grow_shard, nbytes(jax.live_arrays())

    def watched(leaf, stored, *arguments):
        peaks.append(nbytes(jax.live_arrays()) + stored.nbytes)
        return original(leaf, stored, *arguments)

    monkeypatch.setattr(initialize, "grow_shard", watched)
    grown = grow(tmp_path / "large", run, slot_num=64, **{"growth.mode": "random"}, **sizes)
    # Not of the growth: the moments, and the fresh state that this test draws from.
    others = nbytes(jax.tree.leaves((grown.start.state.opt_state, grown.program.state)))
    sizes = [array.nbytes for array in grown.params.values()]
    assert len(peaks) == len(sizes)
    assert max(peaks) - before - others < sum(sizes) + 2 * max(sizes) < 2 * sum(sizes)
