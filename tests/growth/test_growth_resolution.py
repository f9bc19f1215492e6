"""What is decided before the model is built, and what is refused. No arrays are read."""

import json
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from MaxText.checkpointing import checkpoint_files
from MaxText.checkpointing.compatibility import ArraySpec
from MaxText.config.schema import flatten
from MaxText.conversion.weight_source import unflatten
from MaxText.errors import UserError
from MaxText.growth.growth_plan import SourceCheckpoint
from MaxText.growth.resolve import resolve_growth, resolve_growth_from
from MaxText.run.records import emit_start
from MaxText.run.restore import RestoreResult
from MaxText.training.backend_defaults import abstract_model
from MaxText.training.state import TrainState
from tests.growth.growing import SMALL, config_of, save, stored_in
from tests.small_models import tiny_config

PARENT = "runs/small/checkpoints/0"


def source_of(config, is_known=True):
    """The parameters of a configuration, which say so or not, as a source to grow from."""
    parameters = abstract_model(config.model).parameters
    leaves = {
        name: ArraySpec(tuple(info.shape), np.dtype("float32")) for name, info in parameters.items()
    }
    metadata = {"config": json.loads(json.dumps(flatten(config)))} if is_known else {}
    stored = checkpoint_files.StoredCheckpoint(epath.Path(PARENT) / "items", 0)
    return SourceCheckpoint(str(stored), 0, metadata, leaves, pytest.fail, stored)


@pytest.fixture(scope="module")
def small():
    """Parameters of 6 slots."""
    return source_of(config_of())


def resolved(source, **keys):
    return resolve_growth_from(config_of(load_parameters_path="runs/small", **keys), source)


def zooms(result):
    section = result.config.model.pattention
    return [section.zoom(place, 32) for place in ("qkv", "proj", "ffn")]


def test_without_a_smaller_model():
    config = config_of()
    result = resolve_growth(config, [])
    assert (result.config, result.growth, result.record, result.lines) == (config, None, None, ())
    assert result.existing_slots == {}
    with pytest.raises(UserError, match=r"^growth.existing_slots_lr_scale=0: .*_path"):
        resolve_growth(config_of(**{"growth.existing_slots_lr_scale": 0}), [])


def growth_events(record, how, metadata=None):
    """Facts of the events of growth at a start."""
    rows = []
    start = RestoreResult(None, 0, None, "", how, metadata or {}, folder="runs/a", growth=record)
    emit = lambda kind, **facts: rows.append((kind, facts))  # noqa: E731
    emit_start(SimpleNamespace(lost=0, emit=emit), start, {})
    return [facts for kind, facts in rows if kind == "growth"]


def test_the_record_and_its_event(small):
    same = resolved(small)
    assert (same.growth, same.record, list(same.lines)) == (None, None, [])
    result = resolved(small, slot_num=8, **{"growth.existing_slots_lr_scale": 0.25})
    record = result.record
    assert record == json.loads(json.dumps(record))
    assert record["slots"]["layers/mlp/keys/kernel"] == [24, 32]
    assert len(record["slots"]) == len(result.existing_slots) == 10
    assert result.existing_slots["layers/self_attention/out/values/kernel"] == 6
    facts = {"step": 0, "from": "runs/a", "mode": "function_preserving", "zoom_dim": 6}
    facts |= {"slots": "6 -> 8 (attention), 24 -> 32 (feed-forward)", "moments": "zeroed"}
    facts |= {"data": "restart", "existing_slots_lr_scale": 0.25}
    assert facts["slots"] in result.lines[0]
    assert PARENT in result.lines[0]
    assert growth_events(record, "growth") == [facts]
    (deeper,) = growth_events(resolved(small, **RANDOM).record, "growth")
    assert deeper["layers"] == "2 -> 3"
    # Of a run that begins with what convert.py made larger, and of none that goes on.
    before = {"lineage": [{"folder": "runs/small"}]}
    converted = facts | {"from": "runs/small", "through": "runs/a"}
    assert growth_events(record, "parameters", before) == [converted]
    zoom_alone = record | {"slots": {}}
    for each, how in ((zoom_alone, "parameters"), (record, "resume"), (record, "full_state")):
        assert growth_events(each, how, before) == []


RANDOM = {"slot_num": 8, "base_num_decoder_layers": 3, "growth.mode": "random"}
DENSE = {"dense_conn": True, "dense_aggregation_impl": "sum", "scan_layers": False}
REFUSED = {
    # of both models, of the larger one
    "moments of the same sizes": ({}, {"growth.opt_state": "reused"}),
    "data of the same sizes": ({}, {"growth.data": "continue"}),
    "a rate of no slots": ({}, {"growth.existing_slots_lr_scale": 0.5}),
    "another zoom": ({}, {"slot_num": 8, "zoom_dim": 8}),
    "a normalization over all slots": ({"normalize_type": "softmax"}, {"slot_num": 8}),
    "other scores": ({}, {"slot_num": 8, "scale_factors.ffn": 2.0}),
    "fewer slots": ({"slot_num": 10}, {"slot_num": 6}),
    "depth": ({}, {"base_num_decoder_layers": 3}),
    "depth of dense connections": (DENSE, {"base_num_decoder_layers": 4}),
    "other sizes": (
        {},
        {"slot_num": 8, "base_emb_dim": 64, "head_dim": 16, "normalization_bias": False},
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, told):
    keys, larger = REFUSED[name]
    source = source_of(config_of(**keys))
    with pytest.raises(UserError) as caught:
        resolved(source, **keys | larger)
    told(caught.value)
    if "growth.mode=random" in str(caught.value):
        assert resolved(source, **keys | larger, **{"growth.mode": "random"}).growth


FEED_FORWARD = {"decoder_block": "llama2", "feed_forward_type": "pattention", "slot_num": 6}


@pytest.mark.parametrize(
    ("keys", "places", "right"),
    [
        (FEED_FORWARD, "24 (feed-forward)", [6, -1]),
        (
            {"proj_slot_num": 7, "ffn_slot_num": 20},
            "6 (query, key, value), 7 (output projection), 20 (feed-forward)",
            [6],
        ),
        (
            {"qkv_slot_num": 5, "proj_slot_num": 7, "ffn_slot_num": 7, "slot_num": -1},
            "5 (query, key, value), 7 (output projection, feed-forward)",
            [5, 7],
        ),
    ],
)
def test_the_number_of_stored_slots_is_compared(keys, places, right):
    def resolve_with(number):
        path = {"load_parameters_path": "x", "load_parameters_path_slot_number": number}
        return resolve_growth_from(tiny_config(**shape, **path), source)

    shape = {"decoder_block": "tokenformer", **SMALL, **keys}
    source = source_of(tiny_config(**shape))
    for number in right:
        assert resolve_with(number).growth is None
    with pytest.raises(UserError, match="stored_slot_num=9: ") as caught:
        resolve_with(9)
    assert places in str(caught.value)


OWN = {"qkv_slot_num": 5, "proj_slot_num": 7, "ffn_slot_num": 9}


@pytest.mark.parametrize(
    ("keys", "larger", "expected"),
    [
        ({}, {"slot_num": 8, "zoom_dim": 6}, [6, 6, 24]),
        ({}, {"slot_num": 8, "zoom_dim": 8, "growth.mode": "random"}, [8, 8, 32]),
        (OWN, OWN | {"qkv_slot_num": 8, "ffn_slot_num": 13}, [5, 7, 9]),
        # Untrained slots are dropped again.
        ({"slot_num": 10, "zoom_dim": 6}, {"growth.allow_truncation": True}, [6, 6, 24]),
        # A zoom that was fixed goes with the parameters, unless the user sets another one.
        ({"zoom_dim": 3}, {}, [3, 3, 12]),
        ({"zoom_dim": 5}, RANDOM, [5, 5, 20]),
        ({"zoom_dim": 5}, RANDOM | {"zoom_dim": 8}, [8, 8, 32]),
        # A part whose scale went by its slots goes by those it has now.
        ({"zoom_dims.proj": 5}, RANDOM, [8, 5, 32]),
    ],
)
def test_zoom(keys, larger, expected):
    result = resolved(source_of(config_of(**keys)), **larger)
    assert zooms(result) == expected
    if "zoom_dim" in keys and "zoom_dim" not in larger:
        assert result.record["zoom"] == {"zoom_dim": keys["zoom_dim"]}
    assert bool(result.growth) == any(name.endswith("slot_num") for name in [*keys, *larger])
    for dropped in result.growth.plan.drops if result.growth else ():
        assert any(dropped in line for line in result.lines)


def test_a_source_that_does_not_know_its_configuration():
    assert zooms(resolved(source_of(config_of(), is_known=False), slot_num=8)) == [6, 6, 24]
    source = source_of(config_of(qkv_slot_num=5, proj_slot_num=7), is_known=False)
    assert zooms(resolved(source, slot_num=8)) == [5, 7, 24]
    assert zooms(resolved(source, slot_num=8, **{"zoom_dims.qkv": 4})) == [4, 7, 24]


# --- Runs that go on --------------------------------------------------------------------------


def saved(folder, config, metadata=None):
    """A run with one checkpoint, of zeros."""
    parameters = abstract_model(config.model).parameters
    zeros = {name: np.zeros(info.shape, np.float32) for name, info in parameters.items()}
    return save(folder, config, TrainState(jnp.int32(1), unflatten(zeros), ()), metadata)


@pytest.fixture(scope="module")
def large(small, tmp_path_factory):
    """A run whose old slots are frozen since it grew: (folder, its resolved growth)."""
    first = resolved(small, slot_num=8, **{"growth.existing_slots_lr_scale": 0})
    metadata = {"lineage": [{"folder": PARENT, "growth": first.record}]}
    return saved(tmp_path_factory.mktemp("large"), first.config, metadata), first


@pytest.mark.parametrize("path", ["", "runs/that/is/gone"])
def test_a_resumed_run_keeps_its_zoom_and_rate(large, path):
    """Whether the command line still names the smaller model or not."""
    run, first = large
    again = resolve_growth(config_of(slot_num=8, load_parameters_path=path), [stored_in(run)])
    assert zooms(again) == [6, 6, 24]
    assert again.growth is None
    assert (again.record, again.existing_slots) == (first.record, first.existing_slots)
    assert again.config.checkpoint.growth.existing_slots_lr_scale == 0
    (line,) = again.lines
    assert all(text in line for text in ("zoom_dim=6", "lr_scale=0", str(stored_in(run))))


def test_a_run_has_one_rate_of_old_slots(large):
    run, first = large
    own = [stored_in(run)]
    same = resolve_growth(config_of(slot_num=8, **{"growth.existing_slots_lr_scale": 0}), own)
    assert (same.existing_slots_lr_scale, same.record) == (0, first.record)
    for rate in (1, 0.5):
        with pytest.raises(UserError, match=f"^growth.existing_slots_lr_scale={rate}") as caught:
            resolve_growth(config_of(slot_num=8, **{"growth.existing_slots_lr_scale": rate}), own)
        assert f"load_full_state_path={run}" in str(caught.value)
        # Which is a run with a record of its own.
        keys = {"load_full_state_path": str(run), "growth.existing_slots_lr_scale": rate}
        forked = resolve_growth(config_of(slot_num=8, **keys), [])
        assert forked.existing_slots_lr_scale == forked.record["existing_slots_lr_scale"] == rate
        assert forked.existing_slots == first.existing_slots
    forked = resolve_growth(config_of(slot_num=8, load_full_state_path=str(run)), [])
    assert forked.existing_slots_lr_scale == 0
    # A second growth has a record of its own.
    twice = resolve_growth(config_of(slot_num=10, load_parameters_path=str(run)), [])
    assert zooms(twice) == [6, 6, 24]
    assert twice.existing_slots["layers/mlp/keys/kernel"] == 32


def test_a_resumed_run_without_growth(tmp_path):
    # The user fixed the zoom at the first start, which the second may lack.
    run = saved(tmp_path, config_of(zoom_dim=9))
    own = [stored_in(run)]
    again = resolve_growth(config_of(), own)
    assert zooms(again) == [9, 9, 36]
    assert again.lines == [f"zoom_dim=9, with which {own[0]} was trained"]
    assert zooms(resolve_growth(config_of(load_full_state_path=str(run)), [])) == [9, 9, 36]
    assert zooms(resolve_growth(config_of(zoom_dim=5), own)) == [5, 5, 20]
    with pytest.raises(UserError, match=r"^growth.existing_slots_lr_scale=0: "):
        resolve_growth(config_of(**{"growth.existing_slots_lr_scale": 0}), own)
    # What config.yml of a run without growth may say.
    for rate in (1, None):
        config = config_of(**{"growth.existing_slots_lr_scale": rate})
        assert resolve_growth(config, own).existing_slots_lr_scale == 1
