"""Training that is killed at any moment ends like training that nobody disturbed."""

import json
import os
import shutil
import signal

import pytest

from benchmarks import kills
from MaxText import exit_codes
from tests.small_models import some_quick


@pytest.fixture(scope="module")
def attack(tmp_path_factory):
    return kills.Attack(tmp_path_factory.mktemp("kills"), os.environ | {"JAX_PLATFORMS": "cpu"})


@pytest.fixture(scope="module")
def undisturbed(attack):
    return attack.undisturbed()


def test_twenty_kills(attack, undisturbed):
    events = list(attack.killed(20))
    killed = [event for event in events if isinstance(event, kills.Kill)]
    folders = [event for event in events if not isinstance(event, kills.Kill)]
    assert {each.moment for each in killed} == set(kills.MOMENTS)
    assert len(killed) == 20
    # Some of them in the midst of the run, or nothing was shown.
    assert sum(each.last_step is not None for each in killed) >= 8
    for folder in folders:
        assert kills.differences(folder, undisturbed) == []


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "count"), [(2, 6), (4, 3)])
def test_kills_of_one_of_several_processes(tmp_path, processes, count):
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    attack = kills.Attack(tmp_path / "kills", environment | {"JAX_PLATFORMS": "cpu"}, 3, processes)
    expected = attack.undisturbed()
    events = list(attack.killed(count))
    killed = [event for event in events if isinstance(event, kills.Kill)]
    assert len(killed) == count
    assert any(each.last_step is not None for each in killed)
    assert {each.how for each in killed} == {"SIGKILL", "SIGSTOP"}
    for event in events:
        if not isinstance(event, kills.Kill):
            assert kills.differences(event, expected) == []


@pytest.mark.parametrize("step", some_quick([39, 7], 2))  # 39: an evaluation is due, made up for
def test_sigterm_saves_and_the_same_command_goes_on(attack, undisturbed, step):
    run_name = f"stopped_at_{step}"
    run = kills.Run(attack.command(run_name), attack.environment)
    assert run.wait_for(lambda: (run.last_step or 0) >= step - 2, poll=0.001)
    run.send(signal.SIGTERM)
    assert run.end() == exit_codes.PREEMPTED, run.output
    assert "Traceback" not in run.output
    stopped_at = run.last_step
    assert stopped_at < kills.LAST_STEP
    saved = sorted(
        int(path.name) for path in (attack.folder(run_name) / "checkpoints").glob("[0-9]*")
    )
    assert saved[-1] == stopped_at
    attack.finish(run_name)
    events = (attack.folder(run_name) / "events.jsonl").read_text().splitlines()
    (resumed,) = [row for row in map(json.loads, events) if row["event"] == "resume"]
    assert resumed["step"] == stopped_at + 1
    assert kills.differences(attack.folder(run_name), undisturbed) == []


@pytest.mark.slow
def test_sigterm_ends_a_wait_for_data(attack, tmp_path):
    def start(*arguments):
        return kills.Run(attack.command("waited", *arguments), attack.environment)

    always = [
        f"dataset_path={tmp_path / 'data'}", "prepare_output_format=bin", "data_retry_seconds=1000",
        "learning_rate_schedule_steps=60", "checkpoint_period=1000000",
    ]  # fmt: skip
    run = start(*always, "steps=1000000")
    assert run.wait_for(lambda: (run.last_step or 0) >= 3)
    files = sorted((tmp_path / "data").rglob("train/tokens*"))
    contents = [file.read_bytes() for file in files]
    for file in files:
        file.write_bytes(b"")
    assert run.wait_for(lambda: "could not be read" in run.output), run.output
    run.send(signal.SIGTERM)
    assert run.end() == exit_codes.PREEMPTED, run.output
    assert "Traceback" not in run.output
    stopped_at = run.last_step
    for file, content in zip(files, contents, strict=True):
        file.write_bytes(content)

    again = start(*always, f"steps={stopped_at + 6}")
    assert again.end() == 0, again.output
    folder = attack.folder("waited")
    steps = [json.loads(row)["step"] for row in (folder / "metrics.jsonl").read_text().splitlines()]
    assert sorted(set(steps)) == list(range(stopped_at + 6))
    events = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    (resumed,) = [row for row in events if row["event"] == "resume"]
    assert resumed["step"] == stopped_at + 1


def test_the_comparison_sees_what_differs(attack, undisturbed, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(undisturbed, folder)
    assert kills.differences(folder, undisturbed) == []
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join([*lines[:10], lines[9], *lines[10:]]))
    assert len(kills.differences(folder, undisturbed)) == 2
    (folder / "metrics.jsonl").write_text(
        "".join(lines).replace('"learning/loss": 5', '"learning/loss": 6')
    )
    assert kills.differences(folder, undisturbed) == ["metrics"]
