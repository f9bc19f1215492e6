"""Runs of a comparison as processes, with a stand-in for train.py."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from MaxText.config.config_files import REPOSITORY
from MaxText.config.loading import load_config
from MaxText.errors import UserError
from MaxText.experiments import execution
from MaxText.experiments.comparison_plan import Trial
from MaxText.program_start import StopRequestedError
from tests.experiments import stand_in
from tests.experiments.small_comparison import compare


@pytest.fixture
def processes(one_device, configs, monkeypatch):
    """A file "fail" or "stop" in the working folder makes a run fail or wait."""
    command = [sys.executable, stand_in.__file__]
    monkeypatch.setattr(execution, "train_command", lambda config: [*command, str(config)])
    return configs


def test_a_run_that_failed_stops_the_comparison(processes):
    (processes / "fail").touch()
    message = "a seed 0: train.py exited with code 1.*out/a/seed_0/train.log.*error: it fails"
    with pytest.raises(UserError, match=f"(?s){message}"):
        compare("a.yml", "b.yml", "match=tokens")
    assert not (processes / "out" / "b").exists()


def after_a_step(folder, number):
    """Sends a signal to this process."""
    events = folder / "events.jsonl"
    while not (events.exists() and '"step"' in events.read_text()):
        time.sleep(0.02)
    os.kill(os.getpid(), number)


def test_ctrl_c_ends_the_run_at_work(processes, ctrl_c_counts):
    (processes / "stop").touch()
    events = processes / "out" / "a" / "seed_0" / "events.jsonl"
    arguments = events.parent, signal.SIGINT
    threading.Thread(target=after_a_step, args=arguments, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        compare("a.yml", "b.yml", "match=tokens")
    assert json.loads(events.read_text().splitlines()[-1])["reason"] == "interrupted"
    assert (events.parent / "train.log").read_text().startswith("training out/a/seed_0")


def test_a_run_that_ignores_ctrl_c_is_terminated(processes, ctrl_c_counts):
    """As in jobs that shells start in the background."""
    (processes / "stop").touch()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    folder = Path("out/a/seed_0")
    config = load_config("a.yml", run_name="seed_0", base_output_directory="out/a")
    began = time.monotonic()
    threading.Thread(target=after_a_step, args=(folder, signal.SIGTERM), daemon=True).start()
    with pytest.raises(StopRequestedError), execution.signals_as_exceptions():
        execution.train(Trial("a", 0, config, folder, 1.0))
    assert time.monotonic() - began < 30  # a deaf run would sleep for a minute
    last = json.loads((folder / "events.jsonl").read_text().splitlines()[-1])
    assert (last["event"], last["step"]) == ("step", 0)


def test_a_run_knows_no_keys_of_modules_that_only_others_import(tmp_path):
    example = REPOSITORY / "examples/moving_average.py"
    keys = {"mixer": "moving_average", "average_tokens": 9.0}
    with_part = load_config(import_modules=[str(example)], **keys)
    for config, has_key in ((with_part, True), (load_config(dataset_type="synthetic"), False)):
        run = Trial("a", 0, config, tmp_path / "a", 1.0)
        execution.write_config(run)
        assert ("average_tokens: 9" in run.config_path.read_text()) == has_key
        assert ("average_tokens" in run.config_path.read_text()) == has_key


def test_two_commands_do_not_work_in_one_folder(trained, configs):
    with (
        execution.lock_folder(configs / "out"),
        pytest.raises(UserError, match="out is locked by"),
    ):
        compare("a.yml", "b.yml", "match=tokens")
    assert not trained


def test_a_label_with_an_equals_sign_is_no_key(configs):
    path = Path("learning_rate=1e-2/seed_0.yml")
    assert execution.train_command(path)[-1] == f"./{path}"
    assert execution.train_command(configs / path)[-1] == str(configs / path)
