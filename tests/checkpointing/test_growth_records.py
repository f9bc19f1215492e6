"""What a growth leaves in a run's records, and where its data begins."""

import pytest

from MaxText.checkpointing.growth.record import sizes
from MaxText.checkpointing.starting_data import begin_data, complete
from MaxText.checkpointing.starting_point import Start
from MaxText.errors import UserError
from MaxText.monitoring.run_facts import emit_start

RECORD = {
    "mode": "random",
    "slots": {
        "layers/mlp/keys/kernel": [16, 24],
        "layers/self_attention/out/keys/kernel": [4, 6],
        "layers/self_attention/query/keys/kernel": [4, 6],
    },
    "layers": [2, 3],
    "zoom": {},
    "moments": "zeroed",
    "data": "restart",
    "old_slots_learning_rate": 0.5,
}


class Events:
    lost = 0

    def __init__(self):
        self.rows = []

    def emit(self, kind, **facts):
        self.rows.append((kind, facts))


def start(how, **fields):
    return Start(None, 0, None, "parameters", how, folder="runs/a", growth=RECORD, **fields)


def test_a_growth_is_an_event():
    events = Events()
    emit_start(events, start("growth"), {})
    assert [kind for kind, _ in events.rows] == ["start", "growth"]
    assert events.rows[1][1] == {
        "step": 0,
        "from": "runs/a",
        "mode": "random",
        "slots": "4 -> 6 (attention), 16 -> 24 (feed-forward)",
        "layers": "2 -> 3",
        "moments": "zeroed",
        "data": "restart",
        "old_slots_learning_rate": 0.5,
    }


def test_a_resumed_run_does_not_grow_again():
    for how in ("resume", "full_state"):
        events = Events()
        emit_start(events, start(how), {})
        assert "growth" not in [kind for kind, _ in events.rows]


def test_a_growth_before_the_run_is_an_event_of_it():
    metadata = {"lineage": [{"folder": "runs/small"}]}
    events = Events()
    emit_start(events, start("parameters", metadata=metadata), {})
    kind, facts = events.rows[-1]
    assert kind == "growth"
    assert (facts["from"], facts["through"]) == ("runs/small", "runs/a")
    assert facts["layers"] == "2 -> 3"
    # A zoom that came with the parameters is no growth.
    events, same = Events(), RECORD | {"slots": {}, "layers": None, "zoom": {"zoom_dim": 3}}
    emit_start(events, start("parameters")._replace(growth=same), {})
    assert [kind for kind, _ in events.rows] == ["start"]


@pytest.mark.parametrize(
    ("slots", "words"),
    [
        ({"query": 5, "key": 5, "out": 5, "mlp": 5}, "5 -> 9 (attention, feed-forward)"),
        ({"query": 5, "key": 5, "out": 7},
         "5 -> 9 (query, key, value), 7 -> 9 (output projection)"),
        ({"out": 7, "mlp": 28}, "7 -> 9 (output projection), 28 -> 9 (feed-forward)"),
    ],
)  # fmt: skip
def test_sizes_name_their_places(slots, words):
    found = {}
    for part, old in slots.items():
        place = "mlp" if part == "mlp" else f"self_attention/{part}"
        found |= {f"layers/{place}/{side}/kernel": [old, 9] for side in ("keys", "values")}
    assert sizes(RECORD | {"slots": found}) == {"slots": words, "layers": "2 -> 3"}


class Batches:
    """Of 7 steps; positions are of other data."""

    num_steps = 7

    def __init__(self):
        self.step = None

    def seek(self, step):
        self.step = step

    def resume(self, position):
        raise UserError("The checkpoint stands at step 3 of other data.")


def test_data_begins_at_the_first_step():
    batches = Batches()
    assert begin_data(start("growth"), batches, 10) == 6
    assert batches.step == 0
    assert begin_data(start("growth"), batches, 5) == 4


def test_other_data_cannot_go_on():
    position = {"step": 0, "samples": 12}
    with pytest.raises(UserError, match=r"^growth_data=continue: .* Or set growth_data=restart"):
        begin_data(start("growth")._replace(position=position), Batches(), 10)
    with pytest.raises(UserError, match=r"^The checkpoint stands at step 3 of other data\.$"):
        begin_data(start("resume")._replace(position=position), Batches(), 10)


def test_a_run_without_a_step_left():
    begun = start("resume")
    assert complete(begun, 7, 6, -1).endswith("steps=7, num_epoch=-1. Raise steps to go on.")
    assert complete(begun, 9, 6, 1).endswith("num_epoch=1. Raise num_epoch to go on.")
