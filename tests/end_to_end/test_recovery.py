"""Skipped steps and rollbacks of whole runs: damaged text, and learning rates that explode."""

import json
import random
import shutil

import pytest

from benchmarks import fault_injection
from MaxText.storage.atomic import write_json_with_digest

# One byte is one token nearly always, so 256 tokens of 4 x 64 are about 256 characters.
BATCH = 4 * 64
KEYS = (
    "data_shuffle_seed=0 enable_data_shuffling=false packing=true tokenizer_vocab_size=260 "
    "dropout_rate=0.0 learning_rate=0.01 skip_step_interval=16 rollback.after_skips=4 "
    "rollback.margin=2 checkpoint_period=8 healthy_after_steps=3 max_to_keep=null eval_interval=-1"
)


@pytest.fixture(scope="module")
def damaged(runs):
    """The keys of runs over text with a damaged span after step 30."""
    draw = random.Random(0)
    sound = "".join(f"def f{i % 7}(x): return x + {i % 5}\n" for i in range(1500))
    noise = "".join(chr(draw.randrange(33, 126)) for _ in range(6 * BATCH))
    (runs.place / "damaged").mkdir()
    (runs.place / "damaged/0.txt").write_text(sound[: 30 * BATCH] + noise + sound)
    place = f"{runs.place}/damaged"
    return [*KEYS.split(), f"prepare_source={place}", f"dataset_path={place}_data"]


@pytest.fixture(scope="module")
def rolled_back(runs, damaged):
    output = runs.complete("rolled_back", *damaged)
    return runs.rows("rolled_back", "events.jsonl"), output


def of_kind(events, kind):
    return [row for row in events if row["event"] == kind]


def test_steps_are_skipped_and_then_the_run_rolls_back(rolled_back):
    events, output = rolled_back
    (rollback,) = of_kind(events, "rollback")
    skipped = [row["step"] for row in of_kind(events[: events.index(rollback)], "step_skipped")]
    assert skipped == list(range(skipped[0], skipped[0] + 4))
    assert (rollback["onset_step"], rollback["detected_step"]) == (skipped[0], skipped[-1])
    assert rollback["restored_step"] == 17  # after step 16, the last healthy one
    assert rollback["source"] == "checkpoint of step 16"
    # From two steps before the first skipped one to the one at which that was enough.
    assert rollback["samples"] == [4 * (skipped[0] - 2), 4 * (skipped[-1] + 1)]
    assert rollback["source"] in output
    after = [row["step"] for row in of_kind(events[events.index(rollback) :], "step")]
    assert after == list(range(17, fault_injection.LAST_STEP + 1))


@pytest.mark.slow
def test_from_there_on_it_is_a_run_whose_data_never_had_that_span(runs, damaged, rolled_back):
    (rollback,) = of_kind(rolled_back[0], "rollback")
    runs.complete("excluded", *damaged, f"excluded_samples=[{rollback['samples']}]")
    assert not runs.events("excluded", "rollback")
    # The rest of the damaged text is too short for another rollback, in both.
    assert 1 <= len(runs.events("excluded", "step_skipped")) < 4
    assert fault_injection.differences(runs.folder("rolled_back"), runs.folder("excluded")) == []


@pytest.mark.slow
def test_killed_before_the_next_checkpoint_it_excludes_the_same_data(runs, damaged):
    # Between the first step and the last one nothing is saved.
    keys = [*damaged, "checkpoint_period=100", "rollback.snapshot_period=5"]
    runs.complete("not_killed", *keys)
    run = runs.start("killed_after_rollback", *keys)
    assert run.wait_for(lambda: runs.has_happened("killed_after_rollback", "rollback"), poll=0.001)
    run.kill()
    assert "Rolling back" not in runs.complete("killed_after_rollback", *keys)
    names = ("killed_after_rollback", "not_killed")
    assert fault_injection.differences(*map(runs.folder, names)) == []
    (again, rollback) = (runs.events(name, "rollback")[0] for name in names)
    for fact in ("number", "step", "restored_step", "detected_step", "samples", "reason"):
        assert again[fact] == rollback[fact]
    steps = [row["step"] for row in runs.events("killed_after_rollback", "step")]
    assert steps == list(range(fault_injection.LAST_STEP + 1))


CALM = (
    "checkpoint_period=20 max_to_keep=null eval_interval=-1 lr_schedule_type=constant "
    "warmup_steps_fraction=0"
)


@pytest.fixture(scope="module")
def trained(runs):
    runs.complete("trained", *CALM.split(), "learning_rate=0.003", "steps=100")
    return runs.folder("trained")


@pytest.mark.slow
# Not finite at once, logged seldom; skipped; a rise that lasts.
@pytest.mark.parametrize(("rate", "period"), [("1e6", 100), ("30", 20), ("1", 1)])
def test_no_checkpoint_of_an_exploded_rate_is_promoted(runs, trained, rate, period):
    name, keys = f"rate_{rate}", [*CALM.split(), f"step_log_period={period}"]
    shutil.copytree(trained, runs.folder(name))
    good = runs.folder(name) / "checkpoints" / "healthy.json"
    runs.complete(name, *keys, f"learning_rate={rate}", "steps=200", code=1)
    assert runs.rows(name, "events.jsonl")[-1]["reason"] == "diverged"
    assert max(json.loads(good.read_text())["healthy"]) == 99
    runs.complete(name, *keys, "learning_rate=0.003", "steps=140")
    losses = {row["step"]: row["learning/loss"] for row in runs.events(name, "step")}
    assert losses[139] < losses[0]
    assert not [row for row in runs.events(name, "step_skipped") if row["step"] > 100]
    assert max(json.loads(good.read_text())["healthy"]) >= 100


def healthy_steps(folder):
    return json.loads((folder / "checkpoints" / "healthy.json").read_text())["healthy"]


@pytest.mark.slow
def test_a_state_that_the_last_step_broke_is_no_start_for_the_next_run(runs, trained):
    shutil.copytree(trained, runs.folder("last_step"))
    checkpoints = runs.folder("last_step") / "checkpoints"
    output = runs.complete("last_step", *CALM.split(), "learning_rate=1e6", "steps=101", code=1)
    assert "the state after step 100 is broken" in output
    assert runs.rows("last_step", "events.jsonl")[-1]["reason"] == "diverged"
    assert max(healthy_steps(runs.folder("last_step"))) == 99
    assert (checkpoints / "100.unhealthy").exists()
    assert not (checkpoints / "100").exists()

    # As an earlier version left it: the broken state is the newest one, and counts as healthy.
    stuck = runs.folder("stuck")
    shutil.copytree(runs.folder("last_step"), stuck)
    (stuck / "checkpoints" / "100.unhealthy").rename(stuck / "checkpoints" / "100")
    steps = [*healthy_steps(stuck), 100]
    write_json_with_digest(stuck / "checkpoints" / "healthy.json", "healthy", steps)
    runs.complete("stuck", *CALM.split(), "learning_rate=0.003", "steps=140")
    targets = [row["restored_step"] for row in runs.events("stuck", "rollback")]
    assert targets == [101, 100]
    assert (stuck / "checkpoints" / "100.unhealthy").exists()

    runs.complete("last_step", *CALM.split(), "learning_rate=0.003", "steps=140")
    for name in ("last_step", "stuck"):
        losses = {row["step"]: row["learning/loss"] for row in runs.events(name, "step")}
        assert losses[139] < losses[0]
        assert max(healthy_steps(runs.folder(name))) == 139


@pytest.mark.slow
def test_a_run_whose_last_steps_were_all_skipped_fails(runs, trained):
    shutil.copytree(trained, runs.folder("skipped_end"))
    keys = [*CALM.split(), "learning_rate=30", "steps=106", "step_log_period=20"]
    output = runs.complete("skipped_end", *keys, code=1)
    assert "the last 5 steps, up to step 105, were all skipped" in output
    assert max(healthy_steps(runs.folder("skipped_end"))) == 99
    # The same command fails again, the right rate goes on.
    runs.complete("skipped_end", *keys, code=1)
    runs.complete("skipped_end", *CALM.split(), "learning_rate=0.003", "steps=106")
