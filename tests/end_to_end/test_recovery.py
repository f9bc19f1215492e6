"""Skips and rollbacks of whole runs: damaged text, and learning rates that explode."""

import json
import os
import random
import shutil

import pytest
from etils import epath

from benchmarks import kills
from MaxText.checkpointing import layout

# One byte is one token nearly always, so 256 tokens of 4 x 64 are about 256 characters.
BATCH = 4 * 64
CONFIG = """
base_config: kills.yml
data_shuffle_seed: 0
enable_data_shuffling: false
packing: true
tokenizer_vocab_size: 260
dropout_rate: 0.0
learning_rate: 0.01
skip_step_interval: 16
rewind_after_skips: 4
rewind_margin: 2
checkpoint_period: 8
guard_healthy_steps: 3
max_to_keep: null
eval_interval: -1
"""


@pytest.fixture(scope="module")
def attack(tmp_path_factory):
    place = tmp_path_factory.mktemp("recovery")
    attack = kills.Attack(place, os.environ | {"JAX_PLATFORMS": "cpu"})
    for path in (place / "text").iterdir():
        path.unlink()
    draw = random.Random(0)
    sound = "".join(f"def f{i % 7}(x): return x + {i % 5}\n" for i in range(1500))
    damaged = "".join(chr(draw.randrange(33, 126)) for _ in range(6 * BATCH))
    (place / "text/0.txt").write_text(sound[: 30 * BATCH] + damaged + sound)
    (place / "recovery.yml").write_text(CONFIG)
    return attack


def run(attack, run_name, *arguments, code=0):
    command = attack.command(run_name, *arguments)
    command[2] = command[2].replace("kills.yml", "recovery.yml")
    process = kills.Run(command, attack.environment)
    assert process.end() == code, process.output
    rows = (attack.folder(run_name) / "events.jsonl").read_text().splitlines()
    return attack.folder(run_name), [json.loads(row) for row in rows], process.output


def of_kind(events, kind):
    return [row for row in events if row["event"] == kind]


@pytest.fixture(scope="module")
def gone_back(attack):
    return run(attack, "gone_back")


def test_updates_are_left_out_and_then_the_run_goes_back(gone_back):
    _, events, output = gone_back
    (rewind,) = of_kind(events, "rewind")
    before = events[: events.index(rewind)]
    skipped = [row["step"] for row in of_kind(before, "skip")]
    assert len(skipped) == 4
    assert skipped == list(range(skipped[0], skipped[0] + 4))
    assert rewind["began"] == skipped[0]
    assert rewind["noticed"] == skipped[-1]
    assert rewind["to"] == 17  # after step 16, the last good one
    assert rewind["source"] == "checkpoint of step 16"
    # From two updates before the first that was left out to the one at which that was enough.
    assert rewind["samples"] == [4 * (skipped[0] - 2), 4 * (skipped[-1] + 1)]
    assert f"GOING BACK to step 17, {rewind['source']}, leaving out samples" in output
    after = [row["step"] for row in of_kind(events[events.index(rewind) :], "step")]
    assert after == list(range(17, kills.LAST_STEP + 1))


def test_from_there_on_it_is_a_run_whose_data_never_had_that_span(attack, gone_back):
    folder, events, _ = gone_back
    (rewind,) = of_kind(events, "rewind")
    spans = json.dumps([rewind["samples"]]).replace(" ", "")
    expected, others, _ = run(attack, "left_out", f"excluded_samples={spans}")
    assert of_kind(others, "rewind") == []
    # The rest of the damaged text is too short to go back again, in both.
    assert 1 <= len(of_kind(others, "skip")) < 4
    assert kills.differences(folder, expected) == []


@pytest.mark.slow
def test_back_to_a_copy_in_memory(attack, gone_back):
    folder, events, _ = run(attack, "from_memory", "rewind_snapshot_period=5")
    (rewind,) = of_kind(events, "rewind")
    assert rewind["source"] == "copy of step 24 in memory"
    assert rewind["to"] == 25
    (other,) = of_kind(gone_back[1], "rewind")
    assert rewind["samples"] == [4 * 25, other["samples"][1]]
    assert [row["step"] for row in of_kind(events, "step")][-1] == kills.LAST_STEP
    spans = json.dumps([rewind["samples"]]).replace(" ", "")
    expected, _, _ = run(attack, "left_out_less", f"excluded_samples={spans}")
    assert kills.differences(folder, expected) == []


def test_too_often_ends_the_run(attack):
    command = attack.command("ends", "max_rewinds=0")
    command[2] = command[2].replace("kills.yml", "recovery.yml")
    process = kills.Run(command, attack.environment)
    assert process.end() == 1
    assert "max_rewinds" in process.output
    assert "Traceback" not in process.output


@pytest.mark.slow
def test_killed_before_the_next_checkpoint_it_goes_back_no_second_time(attack, gone_back):
    # Between the first update and the last one nothing is saved.
    keys = ("checkpoint_period=100", "rewind_snapshot_period=5")
    expected, events, _ = run(attack, "not_killed", *keys)
    command = attack.command("killed", *keys)
    command[2] = command[2].replace("kills.yml", "recovery.yml")
    process = kills.Run(command, attack.environment)
    assert process.wait_for(lambda: "GOING BACK" in process.output, poll=0.001)
    process.kill()
    (rewind,) = of_kind(events, "rewind")
    folder, killed_events, output = run(attack, "killed", *keys)
    assert "GOING BACK" not in output
    first, end = rewind["samples"]
    assert f"Samples {first} to {end - 1} of the training data are left out" in output
    assert kills.differences(folder, expected) == []
    (again,) = of_kind(killed_events, "rewind")
    for fact in ("number", "step", "to", "noticed", "began", "samples", "reason"):
        assert again[fact] == rewind[fact]
    steps = [row["step"] for row in of_kind(killed_events, "step")]
    assert steps == list(range(kills.LAST_STEP + 1))
    after = events[events.index(rewind) :]
    skipped = [row["step"] for row in of_kind(after, "skip")]
    assert [row["step"] for row in of_kind(killed_events, "skip")] == skipped


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """200 steps of text at a rate that suits it."""
    place = tmp_path_factory.mktemp("rates")
    attack = kills.Attack(place, os.environ | {"JAX_PLATFORMS": "cpu"})
    (place / "recovery.yml").write_text(
        "base_config: kills.yml\ncheckpoint_period: 20\nlearning_rate: 0.003\nmax_to_keep: null\n"
        "eval_interval: -1\nlr_schedule_type: constant\nwarmup_steps_fraction: 0\n"
    )
    run(attack, "trained", "steps=200")
    return attack


@pytest.mark.slow
@pytest.mark.parametrize("period", [1, 20, 100])
@pytest.mark.parametrize("rate", ["1e6", "1e3", "30", "1"])
def test_no_checkpoint_of_an_exploded_rate_is_promoted(trained, rate, period):
    name = f"rate_{rate}_{period}"
    shutil.copytree(trained.folder("trained"), trained.folder(name))
    good = trained.folder(name) / "checkpoints" / "good.json"
    logging = f"step_log_period={period}"
    run(trained, name, "steps=300", f"learning_rate={rate}", logging, code=1)
    assert max(json.loads(good.read_text())["good"]) == 199
    _, events, _ = run(trained, name, "steps=240", logging)
    losses = {row["step"]: row["learning/loss"] for row in of_kind(events, "step")}
    assert losses[239] < losses[0]
    assert not [row for row in of_kind(events, "skip") if row["step"] > 200]
    assert max(json.loads(good.read_text())["good"]) >= 200


@pytest.mark.slow
def test_a_run_that_ends_above_its_start_has_diverged(attack):
    keys = ["learning_rate=30", "skip_step_on_spikes=false", "gradient_clipping_threshold=0"]
    folder, events, output = run(attack, "blown_up", *keys, "steps=24", code=1)
    assert "the run diverged. Its checkpoints are kept" in output
    assert events[-1]["reason"] == "diverged"
    assert layout.complete_steps(epath.Path(folder) / "checkpoints")
