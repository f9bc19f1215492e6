"""A run as a user starts it: what it prints and leaves, what goes on from it, and mistakes."""

import shutil

import pytest

from benchmarks import fault_injection
from tests.input_pipeline.small_data import contents

STEPS = fault_injection.LAST_STEP + 1


def test_what_a_run_prints_and_leaves(runs, whole):
    folder, output = whole
    for step in (0, STEPS - 1):
        assert f"completed step: {step}, seconds: " in output
    assert f"Completed eval after train step {STEPS - 1}, loss=" in output
    assert output.splitlines()[-3].endswith(f"{folder}/checkpoints/{STEPS - 1}")
    assert "decode.py load_parameters_path=" in output.splitlines()[-2]
    rows = runs.rows("whole")
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert rows[-1]["eval/avg_loss"] > 0
    assert rows[-1]["learning/loss"] < rows[0]["learning/loss"] - 0.5
    kept = {path.name for path in (folder / "checkpoints").iterdir()}
    assert kept == {"50", "55", "59", "healthy.json"}
    assert "FLOPs per token = " in (folder / "start.txt").read_text()
    for name in ("config.yml", "events.jsonl", "tensorboard"):
        assert (folder / name).stat().st_size > 0
    assert (folder / "loss_curve.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "sample.txt").read_text().startswith("def read_lines(path):")


def test_the_events_of_a_run_name_where_its_time_went(runs, whole):
    events = runs.rows("whole", "events.jsonl")
    assert [event["event"] for event in events[:3]] == ["start", "compile", "step"]
    saves = [event["step"] for event in runs.events("whole", "checkpoint")]
    assert saves == [*range(5, STEPS, 5), STEPS - 1]
    assert [event["event"] for event in events[-2:]] == ["sample", "stop"]
    assert events[-1]["reason"] == "completed"
    assert events[0]["resolved_keys"]["dtype"] == "float32"
    seconds = events[-1]["time"] - (events[0]["time"] - events[0]["seconds"])
    assert 0.9 * seconds < sum(event["seconds"] for event in events) <= seconds + 0.1


def test_a_finished_run_is_left_as_it_is(runs, whole):
    copy = runs.folder("copy")
    shutil.copytree(whole[0], copy)
    before = contents(copy)
    assert "complete" in runs.complete("copy")
    refused = runs.complete("copy", "base_mlp_dim=96", f"steps={STEPS + 10}", code=2)
    assert "base_mlp_dim: 64 -> 96" in refused
    assert contents(copy) | {".lock": b""} == before | {".lock": b""}


@pytest.mark.slow
def test_parameters_of_another_run_start_a_new_one(runs, whole):
    runs.complete("warm", f"load_parameters_path={whole[0]}", "steps=2", "eval_interval=-1")
    (parent,) = runs.events("warm", "start")[0]["lineage"]
    assert (parent["run_name"], parent["step"], parent["how"]) == ("whole", 59, "parameters")
    assert parent["tokens"] == STEPS * 4 * 64
    first, middle = runs.rows("warm")[0], runs.rows("whole")[STEPS // 2]
    assert first["learning/loss"] < middle["learning/loss"] + 0.3


@pytest.mark.slow
def test_full_state_of_another_run_goes_on_at_its_step(runs, whole):
    runs.complete("more", f"load_full_state_path={whole[0]}/checkpoints/55")
    assert [row["step"] for row in runs.rows("more")] == [56, 57, 58, 59]
    assert runs.arrays("more", 59) == runs.arrays("whole", 59)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["stepss=3"], "steps"),
        (["prepare_source={place}/short", "dataset_path={place}/d"], "max_target_length"),
        (["per_device_batch_size=2.5"], "per_device_batch_size"),
        (["base_output_directory={place}/text/0.txt"], "base_output_directory"),
    ],
)
def test_a_mistake_gives_one_message_and_exit_code_2(runs, arguments, named):
    (runs.place / "short").mkdir(exist_ok=True)
    for name in "ab":
        (runs.place / "short" / f"{name}.txt").write_text("too short")
    words = [argument.format(place=runs.place) for argument in arguments]
    output = runs.complete("mistake", *words, code=2)
    assert output.count("error: ") == 1
    assert named in output.partition("error: ")[2]


@pytest.mark.slow
def test_a_loss_that_is_not_finite_stops_the_run(runs):
    output = runs.complete(
        "diverged", "learning_rate=1e30", "gradient_clipping_threshold=0", "adam_eps=0",
        "warmup_steps_fraction=0", "skip_step_on_spikes=false", "steps=20", code=1,
    )  # fmt: skip
    assert "abort_on_" in output
    assert runs.rows("diverged", "events.jsonl")[-1]["reason"] == "diverged"
