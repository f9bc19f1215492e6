"""A whole comparison with a stand-in for train.py: order, resuming, failures, printing."""

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from MaxText.comparison import child_processes, comparing, measuring, running
from MaxText.comparison.comparing import free_by_label
from MaxText.comparison.request import read
from MaxText.comparison.variants import expand
from MaxText.configuration.problems import ConfigurationError
from MaxText.errors import UserError
from tests.comparison.small_comparison import compare


def test_runs_go_seed_by_seed_and_end_in_a_result(trained, configs):
    lines = compare("a.yml", "b.yml", "match=tokens", "seeds=2")
    assert trained == ["a/seed_0", "b/seed_0", "a/seed_1", "b/seed_1"]
    assert "match=tokens: 256 tokens each, as a has; 1 device" in lines
    text = "\n".join(lines)
    assert "[1/4] a seed 0: validation loss 4.0000" in text
    assert "b is lower than a by 0.5000 nats/token (95 % interval 0.5000 to 0.5000" in text
    out = configs / "out"
    assert {path.name for path in out.iterdir()} >= {
        "comparison.json", "runs.csv", "summary.csv", "report.html", "a", "b",
    }  # fmt: skip
    assert "training out/a/seed_0" in (out / "a" / "seed_0" / "train.log").read_text()
    page = (out / "report.html").read_text()
    assert "b is lower than a by 0.5000" in page
    assert "What was made equal" in page


def test_the_same_command_runs_nothing_twice(trained, configs):
    first = compare("a.yml", "b.yml", "match=tokens", "seeds=1")
    trained.clear()
    again = compare("a.yml", "b.yml", "match=tokens", "seeds=1")
    assert trained == []
    assert "All 2 runs in out had finished before; none is run again." in again
    assert first[-2:] == again[-2:]
    compare("a.yml", "b.yml", "match=tokens", "seeds=2")
    assert trained == ["a/seed_1", "b/seed_1"]


def test_a_run_that_failed_stops_the_comparison_and_is_gone_on_with(trained, configs):
    (configs / "fail").touch()
    with pytest.raises(UserError) as caught:
        compare("a.yml", "b.yml", "match=tokens")
    message = str(caught.value)
    assert "a seed 0: train.py ended with exit code 2" in message
    assert "| error: it fails" in message
    assert "out/a/seed_0/train.log" in message
    (configs / "fail").unlink()
    trained.clear()
    compare("a.yml", "b.yml", "match=tokens")
    assert trained == ["a/seed_0", "b/seed_0"]


def test_a_run_that_diverges_is_a_result(trained, configs):
    lines = compare("a.yml", "sweep={learning_rate: [1e-2, 3]}", "match=tokens", "seeds=2")
    text = "\n".join(lines)
    assert "learning_rate=3 seed 0: diverged at step 0" in text
    assert "learning_rate=3: 2 diverged, in no mean." in text
    trained.clear()
    compare("a.yml", "sweep={learning_rate: [1e-2, 3]}", "match=tokens", "seeds=2")
    assert trained == []


def test_ctrl_c_ends_the_run_and_the_same_command_goes_on(trained, configs, ctrl_c_counts):
    (configs / "stop").touch()
    events = configs / "out" / "a" / "seed_0" / "events.jsonl"

    def interrupt() -> None:
        while not (events.exists() and '"step"' in events.read_text()):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        compare("a.yml", "b.yml", "match=tokens")
    assert json.loads(events.read_text().splitlines()[-1])["reason"] == "interrupted"
    (configs / "stop").unlink()
    lines = compare("a.yml", "b.yml", "match=tokens")
    assert "[1/2] a seed 0: goes on" in lines


def test_two_commands_do_not_work_in_one_folder(trained, configs):
    with (
        running.hold(configs / "out"),
        pytest.raises(UserError, match=r"another compare\.py, or a run that it started"),
    ):
        compare("a.yml", "b.yml", "match=tokens")
    assert trained == []


def test_time_is_measured_in_turns_and_kept(trained, configs):
    lines = compare("a.yml", "b.yml", "match=time", "budget=6s")
    assert trained[:4] == ["measuring/a_0", "measuring/b_0", "measuring/a_1", "measuring/b_1"]
    assert "  a: steps 4 -> 60, learning_rate_schedule_steps 4 -> 60" in lines
    assert "  b: steps 4 -> 30, learning_rate_schedule_steps 4 -> 30" in lines
    assert not (configs / "out" / "measuring").exists()
    trained.clear()
    compare("a.yml", "b.yml", "match=time", "budget=6s", "seeds=2")
    assert trained == ["a/seed_1", "b/seed_1"]


def test_batches_that_change_have_no_one_step(trained, configs):
    with pytest.raises(UserError, match="batches change"):
        compare("a.yml", "b.yml", "match=time", "sequence_length_stages=[[0,8],[2,16]]")


def test_a_measured_run_only_trains(configs):
    config = expand(read(["a.yml", "b.yml", "eval_interval=2", "target_eval_loss=1"])[0])[0].config
    short = measuring.short_config(config, configs / "m")
    assert (short.evaluation.eval_interval, short.evaluation.target_eval_loss) == (-1, 0)
    assert short.monitoring.step_log_period == 1
    assert not short.checkpoint.enable_checkpointing


def test_a_rise_of_the_seconds_between_rounds_is_said(trained, configs, monkeypatch):
    times = iter([[0.1] * 3, [0.1] * 3, [0.2] * 3, [0.1] * 3])
    monkeypatch.setattr(measuring, "_step_seconds", lambda *_: next(times))
    lines = compare("a.yml", "b.yml", "match=time", "budget=6s", "launch=print")
    assert any("the rounds gave 0.1 and 0.2: other programs" in line for line in lines)


def test_printed_lines_are_a_script(trained, configs, monkeypatch):
    monkeypatch.setenv("M_STEPS", "8")
    arguments = ("a.yml", "b.yml", "match=flops", "free=[steps,width]", "launch=print")
    lines = compare(*arguments, "num_devices=4")
    commands = [line for line in lines if not line.startswith("#")]
    assert trained == []
    assert [shlex.split(line)[:3] for line in commands[:2]] == [["env", "-u", "M_STEPS"]] * 2
    assert [shlex.split(line)[-1] for line in commands[:2]] == [
        "out/a/seed_0.yml", "out/b/seed_0.yml",
    ]  # fmt: skip
    assert shlex.split(commands[2])[1:] == ["compare.py", *arguments, "num_devices=4"]
    assert len(commands) == 3

    # What the lines give is gathered, and what is left is printed again.
    from MaxText.configuration.loading import configure

    monkeypatch.delenv("M_STEPS")
    config = configure("out/a/seed_0.yml")
    assert (config.run.steps, config.run.run_name) == (8, "seed_0")


def test_what_was_run_by_hand_is_gathered(trained, configs):
    compare("a.yml", "b.yml", "match=tokens", "launch=print")
    for name in ("a", "b"):
        path = configs / "out" / name / "seed_0"
        path.mkdir()
        subprocess.run(running.train_command(path.with_suffix(".yml")), check=True)
    trained.clear()
    lines = compare("a.yml", "b.yml", "match=tokens", "launch=print")
    assert trained == []
    assert any(line.startswith("b is lower than a by 0.5000") for line in lines)


def test_differences_are_warned_of(trained, configs):
    (configs / "b.yml").write_text("base_config: a.yml\nlearning_rate: 5.0e-2\n")
    lines = compare("a.yml", "b.yml", "match=params", "launch=print")
    assert "# warning: the configurations differ in learning_rate: 0.01 (a); 0.05 (b)" in lines


def free(*arguments: str) -> dict[str, str]:
    request, problems = read(arguments)
    assert not problems
    return free_by_label(request, expand(request))


def test_what_is_free(configs):
    assert free("a.yml", "b.yml") == {"a": "width", "b": "width"}
    assert free("a.yml", "b.yml", "match=flops") == {"a": "steps", "b": "steps"}
    assert free("a.yml", "b.yml", "free=[width,depth]") == {"a": "width", "b": "depth"}
    sweep = "sweep={qkv_bias: [true, false]}"
    by_file = free("a.yml", "b.yml", sweep, "free=[width,depth]")
    assert list(by_file.values()) == ["width", "width", "depth", "depth"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["free=[width,depth,width]"], "free: 3 names for 2 configurations"),
        (["free=steps"], "does not depend on the steps"),
        (["match=time", "free=width"], "solves for steps"),
        (["match=tokens", "sweep={steps: [1, 2]}"], "steps is swept, and match=tokens solves"),
        (["sweep={base_emb_dim: [32, 64]}"], "width is swept"),
    ],
)
def test_what_cannot_be_free(configs, arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        free("a.yml", "b.yml", *arguments)


def test_the_folder_is_named_after_what_is_compared(configs):
    def folder(*arguments: str) -> str:
        request, _ = read(arguments)
        return str(comparing.default_folder(request, expand(request)))

    assert folder("a.yml", "b.yml") == "maxtext_output/compare_a_b_params"
    assert folder("a.yml", "sweep={qkv_bias: [true, false]}", "base_output_directory=o") == (
        "o/compare_a_qkv_bias_params"
    )


def test_configurations_for_different_devices_are_refused(trained, configs):
    (configs / "b.yml").write_text("base_config: a.yml\nhardware: tpu\n")
    with pytest.raises(UserError, match="hardware: the configurations want cpu and tpu"):
        compare("a.yml", "b.yml")


def test_a_plan_for_another_machine_is_not_run_here(trained, configs):
    with pytest.raises(UserError, match=r"num_devices=8 is not what this machine has \(1\)"):
        compare("a.yml", "b.yml", "match=tokens", "num_devices=8")
    assert trained == []


def test_a_folder_that_cannot_be_written(trained, configs):
    (configs / "out").touch()
    with pytest.raises(UserError, match="cannot write to the comparison's folder out"):
        compare("a.yml", "b.yml", "match=tokens")


def test_rules_of_train_are_checked_before_anything_runs(trained, configs):
    with pytest.raises(UserError, match="names no records for it"):
        compare(
            "a.yml", "b.yml", "match=tokens", "dataset_type=grain", "grain_train_files=x/*.tfrecord"
        )
    assert trained == []


def test_a_label_with_an_equals_sign_is_no_key_where_the_folder_is_this_one(configs):
    path = Path("learning_rate=1e-2/seed_0.yml")
    assert child_processes.train_command(path)[-1] == f"./{path}"
    assert child_processes.train_command(configs / path)[-1] == str(configs / path)


def test_a_run_that_ignores_ctrl_c_is_terminated(trained, configs):
    (configs / "stop").touch()
    program = f"""
import os, signal, sys
sys.path.insert(0, {str(child_processes.REPOSITORY)!r})
from pathlib import Path
from MaxText.comparison import running
from MaxText.comparison.plan import Run
from MaxText.configuration.loading import configure

signal.signal(signal.SIGINT, signal.SIG_IGN)
folder = Path("out/a/seed_0")
config = configure("a.yml", run_name="seed_0", base_output_directory="out/a")
running.train_command = lambda path: [sys.executable, "stand_in.py", str(path)]

def on_steps(steps):
    if steps:
        raise SystemExit(143)

folder.mkdir(parents=True)
running.train(Run("a", 0, config, folder, 1.0), os.open("lock", os.O_CREAT), on_steps)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=configs, timeout=50, check=False)
    assert done.returncode == 143
