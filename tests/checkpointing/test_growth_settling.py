"""What is fixed before the model is built, and what is refused."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.checkpointing.growth.record import event_facts, latest
from MaxText.checkpointing.growth.settling import settle
from MaxText.conversion.weights import model_of, nested
from MaxText.errors import UserError
from MaxText.monitoring.lineage import Lineage
from MaxText.training.state import TrainState
from tests.checkpointing.growing import SMALL, config_of, grow, program, save, stored_in
from tests.small_models import tiny_config


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A run whose only checkpoint holds fresh parameters of 6 slots."""
    return save(tmp_path_factory.mktemp("small"), config_of(), first_state(config_of()))


def first_state(config):
    return dataclasses.replace(program(config).state, step=jnp.int32(1))


def sizes_alone(config):
    """Parameters of a model as a state: zeros, which need no compilation."""
    parameters = model_of(config).parameters
    zeros = {name: np.zeros(info.shape, np.float32) for name, info in parameters.items()}
    return TrainState(jnp.int32(1), nested(zeros), ())


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
        "slots": "6 -> 8 (attention), 24 -> 32 (feed-forward)",
        "zoom_dim": 6,
        "moments": "zeroed",
        "data": "restart",
        "old_slots_learning_rate": 0.25,
    }
    assert result.lines[0] == (
        f"Growth from {stored_in(small)}: slots 6 -> 8 (attention), 24 -> 32 (feed-forward); "
        "growth_mode=function_preserving"
    )


@pytest.mark.parametrize("number", [6, -1])
def test_the_number_of_the_reference_is_compared(small, number):
    assert settled(small, slot_num=8, load_parameters_path_slot_number=number).growth


@pytest.mark.parametrize("number", [8, 24, 5])
def test_another_number_is_refused(small, number):
    message = refused(small, slot_num=8, load_parameters_path_slot_number=number)
    assert f"slot_number={number}: " in message
    assert "has slots 6 (attention), 24 (feed-forward), which is slot_num=6." in message


FEED_FORWARD = {"decoder_block": "llama2", "feed_forward_type": "pattention"}
OWN = "6 (query, key, value), 7 (output projection), 20 (feed-forward)"
TWO = "5 (query, key, value), 7 (output projection, feed-forward)"


@pytest.mark.parametrize(
    ("keys", "words", "right", "right_if_unknown"),
    [
        (FEED_FORWARD | {"slot_num": 6}, "24 (feed-forward)", [6], [6]),
        ({"slot_num": 6, "proj_slot_num": 7, "ffn_slot_num": 20}, OWN, [6], [6, 7, 20]),
        ({"slot_num": -1, "ffn_slot_num": 20}, "32 (attention), 20 (feed-forward)", [32], [20, 32]),
        ({"qkv_slot_num": 5, "proj_slot_num": 7, "ffn_slot_num": 7, "slot_num": -1}, TWO,
         [5, 7], [5, 7]),
    ],
    ids=["feed-forward alone", "own numbers", "the width", "no slot_num"],
)  # fmt: skip
def test_the_number_of_models_whose_places_differ(tmp_path, keys, words, right, right_if_unknown):
    def configured(**more):
        shape = {"decoder_block": "tokenformer", **SMALL, **keys, **more}
        return tiny_config(**shape)

    config = configured()
    for name, extra, accepted in (
        ("known", {}, right), ("unknown", {"config": {}}, right_if_unknown)
    ):  # fmt: skip
        run = save(tmp_path / name, config, sizes_alone(config), extra)

        def starting(number, run=str(run)):
            path = {"load_parameters_path": run, "load_parameters_path_slot_number": number}
            return settle(configured(**path), [])

        for number in accepted:
            assert starting(number).growth is None
        with pytest.raises(UserError) as caught:
            starting(9)
        numbers = " or ".join(map(str, accepted))
        assert f"has slots {words}, which is slot_num={numbers}. " in str(caught.value)


def test_a_model_without_slots_has_no_number_of_them(tmp_path):
    config = tiny_config("llama2")
    run = save(tmp_path, config, sizes_alone(config))
    path = {"load_parameters_path": str(run), "load_parameters_path_slot_number": 6}
    with pytest.raises(UserError, match=r"slot_number=6: .* has no slots\."):
        settle(tiny_config("llama2", **path), [])


def test_a_zoom_of_another_number_is_refused(small):
    message = refused(small, slot_num=8, zoom_dim=8)
    assert "qkv_zoom_dim 6, not 8; proj_zoom_dim 6, not 8; ffn_zoom_dim 24, not 32" in message
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

    # Whether the command line still names the smaller model or not.
    for path in (str(tmp_path / "nowhere"), ""):
        gone = config_of(slot_num=8, load_parameters_path=path)
        again = settle(gone, [stored_in(run)])
        assert again.config.model.pattention.zoom_dim == 6
        assert again.growth is None
        assert again.old_slots == grown.settled.old_slots
        assert again.old_slots_learning_rate == 0
        assert again.config.checkpoint.growth_old_slots_learning_rate == 0
        assert again.lines == [
            f"zoom_dim=6, growth_old_slots_learning_rate=0, with which {stored_in(run)} was trained"
        ]
    # The same for a run that goes on with the whole state.
    forked = settle(config_of(slot_num=8, load_full_state_path=str(run)), [])
    assert forked.config.model.pattention.zoom_dim == 6
    assert latest(lineage.metadata(0)) == again.record
    # And for one that grows once more: its record is its own.
    twice = settled(run, slot_num=10)
    assert twice.config.model.pattention.zoom_dim == 6
    assert twice.old_slots["layers/mlp/keys/kernel"] == 32


def test_a_run_has_one_rate_of_old_slots(small, tmp_path):
    grown = grow(tmp_path / "large", small, slot_num=8, growth_old_slots_learning_rate=0)
    metadata = Lineage.of(grown.start, Quantities()).metadata(0)
    state = dataclasses.replace(grown.start.state, step=jnp.int32(1))
    run = save(tmp_path / "large", grown.settled.config, state, metadata)
    own = [stored_in(run)]
    # Without the smaller model, as that may be gone.
    same = settle(config_of(slot_num=8, growth_old_slots_learning_rate=0), own)
    assert (same.old_slots_learning_rate, same.record) == (0, grown.settled.record)
    for rate in (1, 0.5):
        with pytest.raises(UserError) as caught:
            settle(config_of(slot_num=8, growth_old_slots_learning_rate=rate), own)
        message = str(caught.value)
        assert message.startswith(f"growth_old_slots_learning_rate={rate}: since it grew, this run")
        assert f"with 0 ({own[0]})" in message
        assert f"load_full_state_path={run}." in message
        # Which is a run with a record of its own.
        keys = {"load_full_state_path": str(run), "growth_old_slots_learning_rate": rate}
        forked = settle(config_of(slot_num=8, **keys), [])
        assert forked.old_slots_learning_rate == forked.record["old_slots_learning_rate"] == rate
        assert forked.old_slots == grown.settled.old_slots
    forked = settle(config_of(slot_num=8, load_full_state_path=str(run)), [])
    assert forked.old_slots_learning_rate == 0


def test_a_rate_of_old_slots_without_any(small):
    config = config_of(growth_old_slots_learning_rate=0)
    with pytest.raises(UserError, match=r"^growth_old_slots_learning_rate=0: has no effect with"):
        settle(config, [])
    with pytest.raises(UserError, match=r"^growth_old_.*=0: the run of .* has added no slots, so"):
        settle(config, [stored_in(small)])
    # What config.yml of a run without growth may say.
    for rate in (1, None):
        config = config_of(growth_old_slots_learning_rate=rate)
        assert settle(config, [stored_in(small)]).old_slots_learning_rate == 1


def test_parameters_without_optimizer_state(tmp_path):
    config = config_of()
    state = first_state(config)
    run = save(tmp_path / "small", config, TrainState(state.step, state.params, ()))
    with pytest.raises(UserError, match=r"(?s)missing     opt_state/1/count.*=zeroed"):
        grow(tmp_path / "large", run, slot_num=8, growth_moments="reused")


@pytest.mark.parametrize("mode", ["random", "zero"])
def test_a_fixed_zoom_stays_in_the_other_modes(tmp_path, mode):
    config = config_of(zoom_dim=5)
    run = save(tmp_path / "a", config, sizes_alone(config))
    keys = {"slot_num": 8, "base_num_decoder_layers": 3, "growth_mode": mode}
    for more in ({}, {"base_num_decoder_layers": 2}):
        result = settled(run, **(keys | more))
        assert result.config.model.pattention.zoom_dim == 5
        assert result.record["zoom"] == {"zoom_dim": 5}
        assert result.lines[1:] == [
            f"zoom_dim=5, with which {stored_in(run)} was trained",
            "To scale scores by the new number of slots instead, set zoom_dim to it.",
        ]
    # Whoever sets another one means it.
    result = settled(run, **keys, zoom_dim=8)
    assert (result.config.model.pattention.zoom_dim, len(result.lines)) == (8, 1)
    # A part whose scale went by its slots goes by those it has now.
    config = config_of(proj_zoom_dim=5)
    run = save(tmp_path / "b", config, sizes_alone(config))
    section = settled(run, **keys).config.model.pattention
    assert [section.zoom(place, 32) for place in ("qkv", "proj", "ffn")] == [8, 5, 32]


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
