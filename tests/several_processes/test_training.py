"""train.py as several processes of this machine: the run of one, through signals and deaths."""

import os
import signal

import numpy as np
import pytest

from MaxText import exit_codes
from tests.several_processes.group import (
    CONFIG,
    Launcher,
    as_users_do,
    ended,
    pid_of,
    rows,
    wait_until,
)

pytestmark = pytest.mark.slow

STEPS = 40
KEYS = """
base_output_directory: {place}/out
dataset_path: {place}/data
prepare_source: {place}/text
jax_cache_dir: {place}/cache
validation_fraction: 0.1
opt_type: adamw
learning_rate: 1.0e-3
steps: {steps}
eval_interval: 10
checkpoint_period: 12
sample_tokens: 8
loss_curve: false
enable_tensorboard: false
heartbeat_timeout: 300
"""


@pytest.fixture(scope="module")
def launcher(tmp_path_factory):
    folder = tmp_path_factory.mktemp("several")
    (folder / "text").mkdir()
    for number in range(12):
        words = " ".join(f"def f{i % 7}(x): return x + {i % 5}\n" for i in range(120 + number))
        (folder / "text" / f"{number}.txt").write_text(words)
    (folder / "run.yml").write_text(CONFIG + KEYS.format(place=folder, steps=STEPS))
    launcher = Launcher(folder, as_users_do() | {"XLA_FLAGS": os.environ["XLA_FLAGS"]})
    yield launcher
    launcher.end()


@pytest.fixture
def start(launcher):
    config = f"{launcher.folder}/run.yml"
    return lambda number, name, *keys, **options: launcher.start(
        number, config, f"run_name={name}", *keys, **options
    )


@pytest.fixture(scope="module")
def whole(launcher):
    """The run of one process that nothing disturbs."""
    launcher.run(1, f"{launcher.folder}/run.yml", "run_name=whole")
    return launcher.folder / "out/whole"


def has_done(path, step):
    return lambda: f"completed step: {step}," in path.read_text()


def assert_same_run(whole, name):
    """The same losses at every step and evaluation, each once."""
    folders = (whole.parent / name, whole)
    first, second = (rows((folder / "metrics.jsonl").read_text()) for folder in folders)
    assert [row["step"] for row in first] == list(range(STEPS))
    for left, right in zip(first, second, strict=True):
        # Only the order in which four numbers are added may differ.
        for tag in ("learning/loss", "learning/grad_norm"):
            np.testing.assert_allclose(left[tag], right[tag], rtol=1e-5, err_msg=f"{left['step']}")
    for left, right in zip(*[events(folder, "evaluation") for folder in folders], strict=True):
        assert left["step"] == right["step"]
        np.testing.assert_allclose(left["eval/avg_loss"], right["eval/avg_loss"], rtol=1e-5)
    samples = [(folder / "sample.txt").read_text() for folder in folders]
    assert samples[0] == samples[1]


def events(folder, kind):
    return [row for row in rows((folder / "events.jsonl").read_text()) if row["event"] == kind]


def test_two_processes_prepare_their_text_once(launcher, start):
    keys = [f"dataset_path={launcher.folder}/once", "steps=2", "eval_interval=-1"]
    output = ended(*start(2, "once", *keys))
    assert "completed step: 1," in output
    assert output.count("Read 12 documents") == 1
    assert output.count(f"Wrote {launcher.folder}/once") == 1


def test_a_notice_to_one_of_four_saves_all_and_two_go_on_one_of_which_dies(whole, start):
    folder = whole.parent / "disturbed"
    process, path = start(4, "disturbed")
    wait_until(has_done(path, 7), process, path)
    os.kill(pid_of(path, 2), signal.SIGTERM)
    ended(process, path, exit_codes.PREEMPTED)
    assert events(folder, "stop")[-1]["reason"] == "preempted"

    # Processes stand for slices; both read all rows, and the ring goes from one to the other.
    keys = ["dcn_data_parallelism=1", "dcn_context_parallelism=2", "context_parallel_strategy=ring"]
    process, path = start(2, "disturbed", *keys, options=["--supervise", "--grace-period=5"])
    wait_until(has_done(path, 30), process, path)
    os.kill(pid_of(path, 1), signal.SIGKILL)
    output = ended(process, path)
    assert "mesh: fsdp 2, context 2" in output
    assert "Restarting all 2 processes" in output
    assert events(folder, "resume")[0]["lost"]["steps"] == 0
    assert_same_run(whole, "disturbed")
