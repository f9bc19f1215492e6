"""train.py as several processes of this machine: the run of one, through signals and deaths."""

import json
import os
import signal
import subprocess
import time

import numpy as np
import pytest

from MaxText import exit_codes
from tests import programs
from tests.several_processes.group import end

pytestmark = pytest.mark.slow

STEPS = 24
# Four devices in all, however many processes have them.
CONFIG = """
base_config: quickstart.yml
base_output_directory: {place}/out
dataset_path: {place}/data
prepare_source: {place}/text
jax_cache_dir: {place}/cache
validation_fraction: 0.1
tokenizer_vocab_size: 300
vocab_size: 300
base_emb_dim: 16
base_num_query_heads: 2
base_num_kv_heads: 2
head_dim: 8
base_mlp_dim: 32
base_num_decoder_layers: 1
max_target_length: 32
per_device_batch_size: 2
opt_type: adamw
learning_rate: 1.0e-3
steps: {steps}
step_log_period: 1
eval_interval: 8
eval_steps: 2
checkpoint_period: 5
guard_healthy_steps: 2
sample_tokens: 8
heartbeat_timeout: 300
log_config: false
"""
LONGEST_SECONDS = 400.0


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("several")
    (folder / "text").mkdir()
    for number in range(12):
        words = " ".join(f"def f{i % 7}(x): return x + {i % 5}\n" for i in range(120 + number))
        (folder / "text" / f"{number}.txt").write_text(words)
    (folder / "run.yml").write_text(CONFIG.format(place=folder, steps=STEPS))
    return folder


def start(place, run_name, number, *options, log, keys=()):
    """launch.py with four devices over `number` processes; `keys` are those of the run."""
    inherited = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS" and not k.startswith("M_")}
    arguments = [
        "local", str(number), f"--devices={4 // number}", "--grace=40",
        f"--logs={place}/logs/{run_name}", *options, "--", f"{place}/run.yml",
        f"run_name={run_name}", *keys,
    ]  # fmt: skip
    return programs.start(
        "launch.py", arguments, place, inherited, stdout=log, stderr=subprocess.STDOUT
    )


@pytest.fixture
def launch(place):
    """Starts a run; whatever is left of it is ended after the test."""
    started = []

    def launch(run_name, number, *options, keys=()):
        path = place / f"{run_name}-{number}.out"
        with path.open("w") as log:
            process = start(place, run_name, number, *options, log=log, keys=keys)
        started.append(process)
        return process, path

    yield launch
    end(started)


def wait_for_step(process, path, step):
    until = time.monotonic() + LONGEST_SECONDS
    while f"completed step: {step}," not in path.read_text():
        assert process.poll() is None, path.read_text()
        assert time.monotonic() < until, path.read_text()
        time.sleep(0.02)


@pytest.fixture(scope="module")
def whole(place):
    """The run of one process that nothing disturbs."""
    path = place / "whole.out"
    with path.open("w") as log, start(place, "whole", 1, log=log) as process:
        assert process.wait(LONGEST_SECONDS) == 0, path.read_text()
    return place / "out/whole"


def rows(folder, name):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def assert_same_run(folder, whole):
    """The same losses at every step and evaluation, each once."""
    ours, theirs = rows(folder, "metrics.jsonl"), rows(whole, "metrics.jsonl")
    assert [row["step"] for row in ours] == list(range(STEPS))
    for left, right in zip(ours, theirs, strict=True):
        # Only the order in which four numbers are added may differ.
        for tag in ("learning/loss", "learning/grad_norm"):
            np.testing.assert_allclose(left[tag], right[tag], rtol=1e-5, err_msg=f"{left['step']}")
    evaluations = [
        [row for row in rows(run, "events.jsonl") if row["event"] == "evaluation"]
        for run in (folder, whole)
    ]
    assert [row["step"] for row in evaluations[0]] == [row["step"] for row in evaluations[1]]
    for left, right in zip(*evaluations, strict=True):
        np.testing.assert_allclose(left["eval/avg_loss"], right["eval/avg_loss"], rtol=1e-5)
    assert (folder / "sample.txt").read_text() == (whole / "sample.txt").read_text()


def pid_of(folder, process):
    return json.loads((folder / "processes" / f"{process}.json").read_text())["pid"]


def test_a_dead_process_is_replaced_and_training_continues_exactly(whole, place, launch):
    process, path = launch("killed", 2, "--supervise")
    wait_for_step(process, path, 12)
    os.kill(pid_of(place / "out/killed", 1), signal.SIGKILL)
    assert process.wait(LONGEST_SECONDS) == 0, path.read_text()
    output = path.read_text()
    assert "starting all 2 again" in output
    assert "slowest: process 1" in output
    assert_same_run(place / "out/killed", whole)


def test_a_notice_to_one_of_four_saves_all_and_two_go_on(whole, place, launch):
    process, path = launch("notice", 4)
    wait_for_step(process, path, 7)
    os.kill(pid_of(place / "out/notice", 2), signal.SIGTERM)
    assert process.wait(LONGEST_SECONDS) == exit_codes.PREEMPTED, path.read_text()
    stopped = rows(place / "out/notice", "events.jsonl")[-1]
    assert (stopped["event"], stopped["reason"]) == ("stop", "preempted")
    process, path = launch("notice", 2)
    assert process.wait(LONGEST_SECONDS) == 0, path.read_text()
    resumed = [
        row for row in rows(place / "out/notice", "events.jsonl") if row["event"] == "resume"
    ]
    assert resumed[0]["lost"]["steps"] == 0
    assert_same_run(place / "out/notice", whole)


def test_halves_of_the_sequences_on_each_process(whole, place, launch):
    # Processes stand for slices; both read all rows, and the ring goes from one to the other.
    keys = ["dcn_data_parallelism=1", "dcn_context_parallelism=2",
            "context_parallel_strategy=ring"]  # fmt: skip
    process, path = launch("halves", 2, keys=keys)
    assert process.wait(LONGEST_SECONDS) == 0, path.read_text()
    assert "mesh: fsdp 2, context 2" in path.read_text()
    assert_same_run(place / "out/halves", whole)
