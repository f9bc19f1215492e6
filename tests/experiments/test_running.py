"""Runs of a comparison as processes, with a stand-in for train.py; and how much time is left."""

import functools
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from MaxText.config.loading import configure
from MaxText.errors import UserError
from MaxText.experiments import train_subprocess
from MaxText.experiments.comparison_plan import Trial
from MaxText.experiments.runs_progress import RunsProgress
from tests.experiments import stand_in
from tests.experiments.small_comparison import compare
from tests.small_models import tiny_config


@pytest.fixture
def processes(one_device, configs, monkeypatch):
    """A file "fail" or "stop" in the working folder makes a run fail or wait."""
    command = [sys.executable, stand_in.__file__]
    monkeypatch.setattr(train_subprocess, "train_command", lambda config: [*command, str(config)])
    return configs


def test_a_run_that_failed_stops_the_comparison(processes):
    (processes / "fail").touch()
    said = "a seed 0: train.py exited with code 1.*out/a/seed_0/train.log.*error: it fails"
    with pytest.raises(UserError, match=f"(?s){said}"):
        compare("a.yml", "b.yml", "match=tokens")
    assert not (processes / "out" / "b").exists()


def test_ctrl_c_ends_the_run_at_work(processes, ctrl_c_counts):
    (processes / "stop").touch()
    events = processes / "out" / "a" / "seed_0" / "events.jsonl"

    def interrupt() -> None:
        while not (events.exists() and '"step"' in events.read_text()):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        compare("a.yml", "b.yml", "match=tokens")
    assert json.loads(events.read_text().splitlines()[-1])["reason"] == "interrupted"
    assert (events.parent / "train.log").read_text().startswith("training out/a/seed_0")


def test_a_run_that_ignores_ctrl_c_is_terminated(processes, ctrl_c_counts):
    """As in jobs that shells start in the background."""
    (processes / "stop").touch()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    folder = Path("out/a/seed_0")
    config = configure("a.yml", run_name="seed_0", base_output_directory="out/a")
    began = time.monotonic()

    def on_steps(steps: int) -> None:
        if steps:
            raise SystemExit(143)

    with pytest.raises(SystemExit):
        train_subprocess.train(Trial("a", 0, config, folder, 1.0), on_steps)
    assert time.monotonic() - began < 30  # a deaf run would sleep for a minute
    last = json.loads((folder / "events.jsonl").read_text().splitlines()[-1])
    assert (last["event"], last["step"]) == ("step", 0)


def test_two_commands_do_not_work_in_one_folder(trained, configs):
    with (
        train_subprocess.lock_folder(configs / "out"),
        pytest.raises(UserError, match="out is locked by"),
    ):
        compare("a.yml", "b.yml", "match=tokens")
    assert not trained


def test_a_label_with_an_equals_sign_is_no_key(configs):
    path = Path("learning_rate=1e-2/seed_0.yml")
    assert train_subprocess.train_command(path)[-1] == f"./{path}"
    assert train_subprocess.train_command(configs / path)[-1] == str(configs / path)


@pytest.fixture
def progress(monkeypatch):
    """(clock, runs, lines shown, what makes a RunsProgress of them)."""
    clock, lines = SimpleNamespace(now=100.0), []
    monkeypatch.setattr("sys.stderr.isatty", lambda: False)
    config = tiny_config(steps=10)
    runs = [Trial(f"r{i}", 0, config, Path(f"r{i}"), weight) for i, weight in enumerate((1.0, 3.0))]
    start = functools.partial(RunsProgress, runs, log=lines.append, now=lambda: clock.now)
    return clock, runs, lines, start


def test_time_left_is_work_left_at_the_speed_so_far(progress):
    clock, (first, second), lines, start = progress
    with start([]) as shown:
        shown.begin(first, 0)
        clock.now += 6  # up to the first step
        shown.steps(1)
        assert shown.eta() == ""
        clock.now += 4
        shown.steps(5)  # 0.4 of work in 4 s
        assert shown.eta() == ", about 0:00:35 left"  # 3.5 of work
        clock.now += 5
        shown.end(first, "validation loss 4.0")
        shown.begin(second, 0)
        clock.now += 4
        shown.steps(0)
        clock.now += 26
        shown.skip(second, f"diverged at step 3, {shown.took}")
    assert lines == [
        "[1/2] r0 seed 0: started",
        "[1/2] r0 seed 0: validation loss 4.0, 0:00:15, about 0:00:30 left",
        "[2/2] r1 seed 0: started", "[2/2] r1 seed 0: diverged at step 3, 0:00:30",
    ]  # fmt: skip


def test_lines_go_above_the_bar_of_a_terminal(progress, monkeypatch, capsys):
    _, (first, second), lines, start = progress
    for stream in ("stderr", "stdout"):
        monkeypatch.setattr(f"sys.{stream}.isatty", lambda: True)
    with start([first]) as shown:
        shown.begin(second, 0)
        shown.end(second, "validation loss 4.0")
    assert not lines
    assert "[2/2] r1 seed 0: validation loss 4.0" in capsys.readouterr().err
