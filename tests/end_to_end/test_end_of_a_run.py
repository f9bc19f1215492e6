"""A run that was killed between its last checkpoint and its stop event."""

import shutil

import pytest

KEYS = ("steps=12", "eval_interval=12", "checkpoint_period=20", "loss_curve=true")


@pytest.fixture(scope="module")
def ended(runs):
    runs.complete("ended", *KEYS)
    return runs.folder("ended")


def cut(folder, num_rows):
    """Leaves so many rows of events.jsonl; returns the kinds of all rows."""
    file = folder / "events.jsonl"
    rows = file.read_text().splitlines(keepends=True)
    file.write_text("".join(rows[:num_rows]))
    return rows


def test_a_complete_run_is_left_as_it_is(runs, ended):
    before = (ended / "events.jsonl").read_bytes()
    assert "The run is complete" in runs.complete("ended", *KEYS)
    assert (ended / "events.jsonl").read_bytes() == before


# Without the stop row; without the checkpoint and the evaluation as well; without any step.
@pytest.mark.parametrize("missing", [1, 3, None])
def test_the_same_command_writes_the_missing_end(runs, ended, missing):
    name = f"cut_{missing}"
    shutil.copytree(ended, runs.folder(name))
    (runs.folder(name) / "loss_curve.png").unlink()
    evaluation = runs.events(name, "evaluation")[-1]
    if missing is None:
        (runs.folder(name) / "events.jsonl").unlink()
    else:
        cut(runs.folder(name), -missing)
    runs.complete(name, *KEYS)
    (stop,) = runs.events(name, "stop")
    assert stop["reason"] == "completed"
    (again,) = runs.events(name, "evaluation")
    assert (again["step"], again["eval/avg_loss"]) == (11, evaluation["eval/avg_loss"])
    assert (runs.folder(name) / "loss_curve.png").exists()
    assert "The run is complete" in runs.complete(name, *KEYS)


def test_a_diverged_run_has_diverged_for_a_second_start_as_well(runs, ended):
    shutil.copytree(ended, runs.folder("diverged"))
    file = runs.folder("diverged") / "events.jsonl"
    file.write_text(file.read_text().replace('"reason": "completed"', '"reason": "diverged"'))
    assert "The run is complete" in runs.complete("diverged", *KEYS, code=1)


def test_a_learning_rate_of_0_is_accepted_with_a_warning(runs):
    output = runs.complete("rate_0", *KEYS, "learning_rate=0")
    (warning,) = runs.events("rate_0", "warning")
    assert warning["reason"].startswith("the learning rate is 0 at every step (learning_rate=0)")
    assert f"WARNING: {warning['reason']}" in output
