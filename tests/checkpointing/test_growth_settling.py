"""What is fixed before the model is built, and what is refused."""

import dataclasses
import json

import jax.numpy as jnp
import pytest

from MaxText.checkpointing.growth.record import event_facts, latest
from MaxText.checkpointing.growth.settling import settle
from MaxText.errors import UserError
from MaxText.monitoring.lineage import Lineage
from MaxText.training.state import TrainState
from tests.checkpointing.growing import config_of, grow, program, save, stored_in


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A run whose only checkpoint holds fresh parameters of 6 slots."""
    return save(tmp_path_factory.mktemp("small"), config_of(), first_state(config_of()))


def first_state(config):
    return dataclasses.replace(program(config).state, step=jnp.int32(1))


def settled(source, **keys):
    return settle(config_of(load_parameters_path=str(source), **keys), [])


def refused(source, **keys):
    with pytest.raises(UserError) as caught:
        settled(source, **keys)
    return str(caught.value)


def test_nothing_to_load():
    config = config_of()
    result = settle(config, [])
    assert (result.config, result.growth, result.record, result.lines) == (config, None, None, ())
    assert result.old_slots == {}


def test_the_same_sizes_do_not_grow(small):
    result = settled(small)
    assert (result.growth, result.record, list(result.lines)) == (None, None, [])
    for keys in ({"growth_moments": "reused"}, {"growth_data": "continue"}):
        assert "so nothing grows. load_full_state_path" in refused(small, **keys)
    message = refused(small, growth_old_slots_learning_rate=0.5)
    assert "none of them is new" in message


def test_the_record(small):
    result = settled(small, slot_num=8, growth_old_slots_learning_rate=0.25)
    record = result.record
    assert record == json.loads(json.dumps(record))
    assert record["slots"]["layers/mlp/keys/kernel"] == [24, 32]
    assert len(record["slots"]) == len(result.old_slots) == 10
    assert result.old_slots["layers/self_attention/out/values/kernel"] == 6
    assert event_facts(record, "runs/a") == {
        "from": "runs/a",
        "mode": "function_preserving",
        "slots": "6 -> 8, 24 -> 32",
        "zoom_dim": 6,
        "moments": "zeroed",
        "data": "restart",
        "old_slots_learning_rate": 0.25,
    }
    assert result.lines[0] == (
        f"Growth from {stored_in(small)}: slots 6 -> 8, 24 -> 32; growth_mode=function_preserving"
    )


@pytest.mark.parametrize("number", [6, -1])
def test_the_number_of_the_reference_is_compared(small, number):
    assert settled(small, slot_num=8, load_parameters_path_slot_number=number).growth


@pytest.mark.parametrize("number", [8, 24, 5])
def test_another_number_is_refused(small, number):
    message = refused(small, slot_num=8, load_parameters_path_slot_number=number)
    assert f"slot_number={number}: " in message
    assert "holds parameters of 6, 24 slots" in message


def test_a_zoom_of_another_number_is_refused(small):
    message = refused(small, slot_num=8, zoom_dim=8)
    assert "qkv 6, not 8; proj 6, not 8; ffn 24, not 32" in message
    assert "growth_mode=random" in message
    assert settled(small, slot_num=8, zoom_dim=6).config.model.pattention.zoom_dim == 6
    random = settled(small, slot_num=8, zoom_dim=8, growth_mode="random")
    assert random.config.model.pattention.zoom_dim == 8


@pytest.mark.parametrize("normalize_type", ["softmax", "gelu_layer_norm"])
def test_normalisations_that_see_every_slot(tmp_path, normalize_type):
    config = config_of(normalize_type=normalize_type)
    run = save(tmp_path, config, first_state(config))
    message = refused(run, slot_num=8, normalize_type=normalize_type)
    assert f"with normalize_type={normalize_type} every new slot takes part" in message
    assert "Set growth_mode=random" in message
    assert settled(run, slot_num=8, normalize_type=normalize_type, growth_mode="random").growth


def test_other_scores_are_refused(small):
    message = refused(small, slot_num=8, ffn_scale_factor=2.0)
    assert "ffn_scale_factor 1.0 -> 2.0" in message
    assert settled(small, slot_num=8, ffn_scale_factor=2.0, growth_mode="zero").growth


def test_every_parameter_that_does_not_fit_is_listed(small):
    message = refused(small, slot_num=8, base_emb_dim=64, head_dim=16, normalization_bias=False)
    lines = message.splitlines()
    assert sum("other shape layers/" in line for line in lines) == 10
    assert "(embed 32 -> 64)" in message
    assert any("extra       decoder_norm/bias" in line for line in lines)
    assert "  base_emb_dim: 32 -> 64" in lines


def test_a_checkpoint_that_does_not_know_its_configuration(tmp_path):
    config = config_of()
    run = save(tmp_path, config, first_state(config), {"config": {}})
    result = settled(run, slot_num=8)
    assert result.config.model.pattention.zoom_dim == 6
    # The same number of slots everywhere says nothing about which part is which.
    config = config_of(qkv_slot_num=5, proj_slot_num=7)
    run = save(tmp_path / "b", config, first_state(config), {"config": {}})
    assert "Set qkv_zoom_dim to the number" in refused(run, slot_num=8)
    keys = {"qkv_zoom_dim": 5, "proj_zoom_dim": 7}
    section = settled(run, slot_num=8, **keys).config.model.pattention
    assert (section.qkv_zoom_dim, section.proj_zoom_dim, section.ffn_zoom_dim) == (5, 7, 24)


def test_a_fixed_zoom_goes_with_the_parameters(tmp_path):
    config = config_of(zoom_dim=3)
    run = save(tmp_path, config, first_state(config))
    result = settled(run)
    assert result.config.model.pattention.zoom_dim == 3
    assert result.growth is None
    assert result.record["zoom"] == {"zoom_dim": 3}
    # Whoever sets another one means it; restoring lists the difference.
    assert settled(run, zoom_dim=5).config.model.pattention.zoom_dim == 5


class Quantities:
    """Updates of 10 tokens and 100 operations."""

    def tokens_before(self, step):
        return 10 * step

    def flops_before(self, step):
        return 100.0 * step


def test_a_resumed_run_keeps_its_zoom_although_the_source_is_gone(small, tmp_path):
    grown = grow(tmp_path / "large", small, slot_num=8, growth_old_slots_learning_rate=0)
    lineage = Lineage.of(grown.start, Quantities())
    (parent,) = lineage.ancestors
    assert (parent.how, parent.step, parent.growth) == ("growth", 0, grown.settled.record)
    state = dataclasses.replace(grown.start.state, step=jnp.int32(1))
    run = save(tmp_path / "large", grown.settled.config, state, lineage.metadata(0))

    gone = config_of(slot_num=8, load_parameters_path=str(tmp_path / "nowhere"))
    again = settle(gone, [stored_in(run)])
    assert again.config.model.pattention.zoom_dim == 6
    assert again.growth is None
    assert again.old_slots == grown.settled.old_slots
    assert again.lines == [f"zoom_dim=6, with which {stored_in(run)} was trained"]
    # The same for a run that goes on with the whole state.
    forked = settle(config_of(slot_num=8, load_full_state_path=str(run)), [])
    assert forked.config.model.pattention.zoom_dim == 6
    assert latest(lineage.metadata(0)) == again.record
    # And for one that grows once more: its record is its own.
    twice = settled(run, slot_num=10)
    assert twice.config.model.pattention.zoom_dim == 6
    assert twice.old_slots["layers/mlp/keys/kernel"] == 32


def test_parameters_without_optimizer_state(tmp_path):
    config = config_of()
    state = first_state(config)
    run = save(tmp_path / "small", config, TrainState(state.step, state.params, ()))
    with pytest.raises(UserError, match=r"(?s)missing     opt_state/1/count.*=zeroed"):
        grow(tmp_path / "large", run, slot_num=8, growth_moments="reused")


def test_a_run_goes_on_with_a_zoom_that_its_user_fixed(tmp_path):
    # By an argument or a config file of the first start, which the second may lack.
    config = config_of(zoom_dim=9)
    run = save(tmp_path / "run", config, first_state(config))
    again = settle(config_of(), [stored_in(run)])
    assert again.config.model.pattention.zoom_dim == 9
    assert again.lines == [f"zoom_dim=9, with which {stored_in(run)} was trained"]
    full = settle(config_of(load_full_state_path=str(run)), [])
    assert full.config.model.pattention.zoom_dim == 9
    assert settle(config_of(zoom_dim=5), [stored_in(run)]).config.model.pattention.zoom_dim == 5
