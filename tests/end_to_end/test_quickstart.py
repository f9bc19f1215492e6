"""The quickstart as a user runs it, with fewer steps: train, kill, resume, misuse."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
import warnings

import numpy as np
import pytest

from tests.small_models import some_quick

ROOT = pathlib.Path(__file__).parents[2]
# Laid over the quickstart: fewer steps of a smaller model on a smaller text.
SMALLER = """
base_config: quickstart.yml
base_output_directory: {place}/out
dataset_path: {place}/data
prepare_source: {place}/text
jax_cache_dir: {place}/cache
validation_fraction: 0.1
tokenizer_vocab_size: 300
vocab_size: 300
base_emb_dim: 32
base_num_query_heads: 2
base_num_kv_heads: 2
head_dim: 16
base_mlp_dim: 64
base_num_decoder_layers: 2
max_target_length: 64
per_device_batch_size: 4
steps: 24
step_log_period: 1
eval_interval: 12
eval_steps: 2
checkpoint_period: 4
sample_tokens: 8
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a small text, and compiled programs that the runs share."""
    folder = tmp_path_factory.mktemp("quickstart")
    text = folder / "text"
    text.mkdir()
    for number in range(12):
        words = " ".join(f"def f{i % 7}(x): return x + {i % 5}\n" for i in range(120 + number))
        (text / f"{number}.txt").write_text(words)
    (folder / "small.yml").write_text(SMALLER.format(place=folder))
    return folder


def command(place, run_name, *arguments):
    program = str(ROOT / "MaxText/train.py")
    return [sys.executable, program, f"{place}/small.yml", f"run_name={run_name}", *arguments]


@pytest.fixture
def run(place, users_environment):
    def run(run_name, *arguments):
        return subprocess.run(
            command(place, run_name, *arguments),
            cwd=place, env=users_environment, capture_output=True, text=True, timeout=300,
            check=False,
        )  # fmt: skip

    return run


@pytest.fixture(scope="module")
def users_environment():
    """The fixture of all tests, for the module."""
    return {k: v for k, v in os.environ.items() if not k.startswith("M_")}


@pytest.fixture(scope="module")
def whole(place, users_environment):
    """An uninterrupted run."""
    result = subprocess.run(
        command(place, "whole"), cwd=place, env=users_environment, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return place / "out/whole", result.stdout


def parameters(run_folder, step):
    """All arrays of a checkpoint, by name."""
    import orbax.checkpoint as ocp

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sharding info not provided")  # one device reads it all
        tree = ocp.PyTreeCheckpointer().restore(run_folder / "checkpoints" / str(step) / "items")
    flat: dict = {}

    def collect(prefix, node):
        if isinstance(node, dict):
            for name, child in node.items():
                collect(f"{prefix}/{name}", child)
        elif isinstance(node, list | tuple):
            for index, child in enumerate(node):
                collect(f"{prefix}/{index}", child)
        elif node is not None:
            flat[prefix] = np.asarray(node)

    collect("", tree)
    return flat


def assert_same_bits(left, right):
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].tobytes() == right[name].tobytes(), name


def rows(run_folder, name="metrics.jsonl"):
    return [json.loads(line) for line in (run_folder / name).read_text().splitlines()]


def test_what_a_run_prints_and_leaves(whole):
    folder, output = whole
    assert "completed step: 0, seconds: " in output
    assert "completed step: 23, seconds: " in output
    assert "Completed eval after train step 23, loss=" in output
    assert "unigram entropy" in output
    before = output.split("completed step: 0")[0].splitlines()
    assert len(before) <= 45
    # Names of folders are as long as they are.
    assert not [line for line in before if len(line.replace(str(folder.parents[1]), "")) > 100]
    assert output.splitlines()[-3].endswith(f"{folder}/checkpoints/23")
    assert "decode.py load_parameters_path=" in output.splitlines()[-2]
    assert rows(folder)[23]["eval/avg_loss"] > 0
    assert "FLOPs per token = " in (folder / "start.txt").read_text()
    assert [row["step"] for row in rows(folder)] == list(range(24))
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["20", "23", "good.json"]
    for name in ("config.yml", "events.jsonl", "sample.txt"):
        assert (folder / name).stat().st_size > 0
    assert (folder / "loss_curve.png").read_bytes().startswith(b"\x89PNG")
    assert list((folder / "tensorboard").glob("events*"))
    losses = [row["learning/loss"] for row in rows(folder)]
    assert losses[-1] < losses[0] - 0.5
    assert (folder / "sample.txt").read_text().startswith("def read_lines(path):")
    events = rows(folder, "events.jsonl")
    assert [event["event"] for event in events[:3]] == ["start", "compile", "step"]
    assert [event["step"] for event in events if event["event"] == "checkpoint"] == [
        4, 8, 12, 16, 20, 23,
    ]  # fmt: skip
    assert [event["event"] for event in events[-2:]] == ["sample", "stop"]
    assert events[-1]["reason"] == "completed"
    # Every second is somewhere: what the events do not name is little.
    seconds = events[-1]["time"] - (events[0]["time"] - events[0]["seconds"])
    assert 0.9 * seconds < sum(event["seconds"] for event in events) <= seconds + 0.1


def test_the_same_command_again_finds_nothing_to_do(whole, run):
    result = run("whole")
    assert result.returncode == 0, result.stderr
    assert "complete" in result.stdout


@pytest.mark.slow  # 20 kills of a run of its own are in test_kills.py
def test_killed_at_any_moment_and_restarted_ends_with_the_same_bits(
    whole, place, users_environment
):
    expected = parameters(whole[0], 23)
    folder = place / "out/killed"
    for with_checkpoint in (False, True):  # two kills, then to the end
        log = place / "killed.log"
        with log.open("w") as output:
            process = subprocess.Popen(
                command(place, "killed"), cwd=place, env=users_environment, stdout=output,
                stderr=subprocess.STDOUT,
            )  # fmt: skip
        deadline = time.time() + 200
        while time.time() < deadline and process.poll() is None:
            complete = [p for p in (folder / "checkpoints").glob("*") if p.name.isdigit()]
            if len(rows_so_far(log)) >= 6 and (complete or not with_checkpoint):
                break
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    result = subprocess.run(
        command(place, "killed"), cwd=place, env=users_environment, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "checkpoint of step" in result.stdout
    assert_same_bits(parameters(folder, 23), expected)
    assert [row["step"] for row in rows(folder)] == list(range(24))
    losses = [row["learning/loss"] for row in rows(whole[0])]
    assert [row["learning/loss"] for row in rows(folder)] == losses
    events = rows(folder, "events.jsonl")
    reported = [event for event in events if event["event"] == "step"]
    assert [event["step"] for event in reported] == list(range(24))
    assert [event["learning/loss"] for event in reported] == losses
    tokens = [event["progress/tokens"] for event in reported]
    assert tokens == [(step + 1) * 4 * 64 for step in range(24)]
    starts = [event for event in events if event["event"] in ("start", "resume")]
    assert [event["attempt"] for event in starts] == [0, 1, 2]
    assert sum(event["lost"]["steps"] for event in starts) > 0


def rows_so_far(log):
    return [line for line in log.read_text().splitlines() if line.startswith("completed step")]


def test_parameters_of_another_run_start_a_new_one(whole, run, place):
    result = run("warm", f"load_parameters_path={whole[0]}", "steps=2", "eval_interval=-1")
    assert result.returncode == 0, result.stderr
    (parent,) = rows(place / "out/warm", "events.jsonl")[0]["lineage"]
    assert (parent["run_name"], parent["step"], parent["how"]) == ("whole", 23, "parameters")
    assert parent["tokens"] == 24 * 4 * 64
    first = rows(place / "out/warm")[0]["learning/loss"]
    assert first < rows(whole[0])[12]["learning/loss"] + 0.3


def test_full_state_of_another_run_goes_on_at_its_step(whole, run, place):
    result = run("more", f"load_full_state_path={whole[0]}/checkpoints/20", "sample_tokens=0")
    assert result.returncode == 0, result.stderr
    assert [row["step"] for row in rows(place / "out/more")] == [21, 22, 23]
    assert_same_bits(parameters(place / "out/more", 23), parameters(whole[0], 23))


def mistakes(place):
    empty, short = place / "empty", place / "short"
    empty.mkdir(exist_ok=True)
    short.mkdir(exist_ok=True)
    (short / "a.txt").write_text("too short")
    (short / "b.txt").write_text("too short")
    return {
        "a typo": (["stepss=3"], "steps"),
        "a string for a number": (["steps=many"], "many"),
        "a missing preset": (["model_name=no_such"], "no_such"),
        "a missing corpus": (
            [f"prepare_source={place}/nowhere", f"dataset_path={place}/d1"], "nowhere"),
        "an empty corpus": ([f"prepare_source={empty}", f"dataset_path={place}/d2"], "empty"),
        "a corpus below one window": (
            [f"prepare_source={short}", f"dataset_path={place}/d3"], "max_target_length"),
        "a batch that does not divide": (["per_device_batch_size=2.5"], "per_device_batch_size"),
        "a mesh that does not match": (["ici_tensor_parallelism=3"], "ici_tensor_parallelism"),
        "an output folder that is a file": (
            [f"base_output_directory={place}/text/0.txt"], "base_output_directory"),
        "a small vocabulary": (["vocab_size=100"], "vocab_size"),
    }  # fmt: skip


@pytest.mark.parametrize("number", some_quick(range(10), 3))
def test_mistakes_give_one_message_and_exit_code_2(whole, run, place, number):
    what, (arguments, named) = list(mistakes(place).items())[number]
    result = run("mistake", *arguments)
    assert result.returncode == 2, (what, result.stderr)
    assert named in result.stderr, (what, result.stderr)
    assert "Traceback" not in result.stderr
    assert result.stderr.startswith("error: ")


def test_another_shape_is_refused_and_nothing_is_damaged(whole, run, place):
    copy = place / "out/copy"
    shutil.copytree(whole[0], copy)
    (copy / ".lock").unlink()

    def content():
        return {p: p.read_bytes() for p in copy.rglob("*") if p.is_file() and p.name != ".lock"}

    before = content()
    result = run("copy", "base_mlp_dim=96", "steps=30")
    assert result.returncode == 2
    assert "base_mlp_dim: 64 -> 96" in result.stderr
    assert "Traceback" not in result.stderr
    assert content() == before


def test_a_loss_that_is_not_finite_stops_the_run_without_saving(run, place):
    result = run("diverged", "learning_rate=1e30", "gradient_clipping_threshold=0",
                 "warmup_steps_fraction=0", "adam_eps=0", "checkpoint_period=3",
                 "skip_step_on_spikes=false")  # fmt: skip
    assert result.returncode == 1, result.stdout + result.stderr
    assert "abort_on_" in result.stderr
    assert rows(place / "out/diverged", "events.jsonl")[-1]["reason"] == "diverged"
