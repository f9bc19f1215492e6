"""Runs that are killed or preempted and started again end like an undisturbed run."""

import shutil
import signal
import time

import pytest

from benchmarks import fault_injection
from MaxText import exit_codes
from MaxText.monitoring.goodput import PARTS, Goodput


def kill(run, condition):
    assert run.wait_for(condition, poll=0.001), run.output
    run.kill()


def test_killed_and_resumed_it_ends_with_the_same_bits(runs, whole):
    folder = runs.folder("killed")

    def unfinished():
        return {path.name for path in (folder / "checkpoints").glob("*tmp*")}

    run = runs.start("killed")
    kill(run, lambda: runs.has_happened("killed", "step", 9))
    before = unfinished()
    run = runs.start("killed")
    kill(run, lambda: bool(unfinished() - before))
    assert unfinished() - before, "the checkpoint was committed"
    assert not (folder / "checkpoints" / str(fault_injection.LAST_STEP)).exists()

    runs.complete("killed")
    assert fault_injection.differences(folder, whole[0]) == []
    reported = runs.events("killed", "step")
    assert [event["step"] for event in reported] == list(range(fault_injection.LAST_STEP + 1))
    tokens = [event["progress/tokens"] for event in reported]
    assert tokens == [(step + 1) * 4 * 64 for step in range(fault_injection.LAST_STEP + 1)]
    assert sum(event["lost"]["steps"] for event in runs.events("killed", "start", "resume")) > 0


@pytest.mark.slow
def test_random_kills(runs, whole):
    events = list(runs.killed(len(fault_injection.MOMENTS)))
    killed = [event for event in events if isinstance(event, fault_injection.InjectedFault)]
    assert {each.moment for each in killed} == set(fault_injection.MOMENTS)
    # Some of them in the midst of the run, or nothing was shown.
    assert sum(each.last_step is not None for each in killed) >= 3
    for folder in [
        event for event in events if not isinstance(event, fault_injection.InjectedFault)
    ]:
        assert fault_injection.differences(folder, whole[0]) == []


def test_sigterm_saves_and_the_same_command_makes_up_for_the_evaluation(runs):
    # Long steps, every second with an evaluation. While step 4 is computed the run is in step 5.
    keys = [
        "per_device_batch_size=100",
        "eval_per_device_batch_size=4",
        "eval_interval=2",
        "eval_steps=1",
        "learning_rate_schedule_steps=60",
        "base_num_decoder_layers=1",
        "dropout_rate=0",
    ]
    run = runs.start("stopped", *keys, "steps=100000")
    evaluated = lambda: runs.has_happened("stopped", "evaluation", 2)  # noqa: E731
    assert run.wait_for(evaluated, poll=0.001), run.output
    time.sleep(0.03)  # nothing tells that the next step has begun
    run.send(signal.SIGTERM)
    assert run.end() == exit_codes.PREEMPTED, run.output
    assert "Traceback" not in run.output
    stopped_at = run.last_step
    saved = (runs.folder("stopped") / "checkpoints").glob("[0-9]*")
    assert max(int(path.name) for path in saved) == stopped_at
    steps = stopped_at + 2
    runs.complete("stopped", *keys, f"steps={steps}")
    (resumed,) = runs.events("stopped", "resume")
    assert resumed["step"] == stopped_at + 1
    assert [row["step"] for row in runs.rows("stopped")] == list(range(steps))
    found = [row["step"] for row in runs.events("stopped", "evaluation")]
    assert found == [step for step in range(steps) if step % 2 or step == steps - 1]


@pytest.mark.slow
def test_sigterm_ends_a_wait_for_data(runs, tmp_path):
    always = [
        f"dataset_path={tmp_path / 'data'}",
        "prepare_output_format=bin",
        "data_retry.delay=1000",
        "learning_rate_schedule_steps=60",
        "checkpoint_period=1000000",
    ]
    run = runs.start("waited", *always, "steps=1000000")
    assert run.wait_for(lambda: (run.last_step or 0) >= 3)
    contents = {file: file.read_bytes() for file in (tmp_path / "data").rglob("train/tokens*")}
    for file in contents:
        file.write_bytes(b"")
    assert run.wait_for(lambda: "could not be read" in run.output), run.output
    run.send(signal.SIGTERM)
    assert run.end() == exit_codes.PREEMPTED, run.output
    for file, content in contents.items():
        file.write_bytes(content)
    runs.complete("waited", *always, f"steps={run.last_step + 6}")
    assert [row["step"] for row in runs.rows("waited")] == list(range(run.last_step + 6))
    (resumed,) = runs.events("waited", "resume")
    assert resumed["step"] == run.last_step + 1


def test_the_comparison_sees_what_differs(whole, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(whole[0], folder)
    assert fault_injection.differences(folder, whole[0]) == []
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join([*lines[:10], lines[9], *lines[10:]]))
    assert len(fault_injection.differences(folder, whole[0])) == 2
    changed = "".join(lines).replace('"learning/loss": 5', '"learning/loss": 6')
    (folder / "metrics.jsonl").write_text(changed)
    assert fault_injection.differences(folder, whole[0]) == ["metrics"]


def test_a_goodput_table_says_what_a_failure_cost():
    def measured(rate, failures, **seconds):
        goodput = Goodput(dict.fromkeys(PARTS, 0.0) | seconds, attempts=())
        return fault_injection.GoodputMeasurement(rate, failures, goodput)

    table = fault_injection.goodput_table(
        [
            measured(0, 0, useful=90.0, startup=8.0, compile=2.0),
            measured(60, 2, useful=90.0, startup=18.0, compile=2.0, lost=6.0, checkpoint=4.0),
        ]
    )
    assert "| 0 | 0 | 1.7 | 0.90 | 0.10 | 0.00 | 0.00 |" in table
    assert "| 60 | 2 | 2.0 | 0.75 | 0.17 | 0.05 | 0.03 |" in table
    assert "cost 7.5 s of restart and 3.0 s of repeated steps on average of 2" in table
