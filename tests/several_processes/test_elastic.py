"""A run that loses a process goes on with fewer, at the same global batch."""

import json
import os

import numpy as np
import pytest

from tests.several_processes.group import CONFIG, Launcher, as_users_do, rows

pytestmark = pytest.mark.slow

STEPS = 24
SAVED, KILLED = 12, 15
KEYS = """
base_output_directory: {folder}/out
dataset_type: synthetic
jax_cache_dir: {folder}/cache
opt_type: adamw
learning_rate: 1.0e-3
global_batch_size: 12
ici_fsdp_parallelism: 1
ici_data_parallelism: -1
steps: {steps}
checkpoint_period: 12
sample_tokens: 0
loss_curve: false
enable_tensorboard: false
import_modules: [{folder}/losing.py]
hooks: [lose_a_process]
"""
LOSING = f"""
import os, signal, time
import jax
from MaxText.checkpointing.checkpoint_files import finalized_steps
from MaxText.run.hooks import hook

@hook(every=1)
def lose_a_process(info):
    if (info.step, jax.process_count(), jax.process_index()) == ({KILLED}, 4, 1):
        while {SAVED} not in finalized_steps(info.run_folder / "checkpoints"):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_run_of_four_loses_one_and_ends_as_if_it_had_not(tmp_path):
    (tmp_path / "losing.py").write_text(LOSING)
    (tmp_path / "run.yml").write_text(CONFIG + KEYS.format(folder=tmp_path, steps=STEPS))
    launcher = Launcher(tmp_path, as_users_do() | {"XLA_FLAGS": os.environ["XLA_FLAGS"]})
    try:
        launcher.run(1, f"{tmp_path}/run.yml", "run_name=whole")
        elastic = ["--supervise", "--min-processes=3"]
        output = launcher.run(4, f"{tmp_path}/run.yml", "run_name=elastic", options=elastic)
    finally:
        launcher.end()
    assert "a process was killed by SIGKILL. Lost process 1 of 4. Going on with 3 proc" in output
    assert f"from the checkpoint of step {SAVED}" in output
    assert "Going on with 3 processes: 4 before" in output
    assert "global batch unchanged: 12 sequences" in output

    events = rows((tmp_path / "out/elastic/events.jsonl").read_text())
    (resume,) = (event for event in events if event["event"] == "resume")
    assert (resume["step"], resume["num_processes"]) == (SAVED + 1, 3)
    assert 0 < resume["lost"]["steps"] <= KILLED - SAVED
    assert f"Steps repeated: {resume['lost']['steps']}," in output
    whole, lossy = (
        rows((tmp_path / "out" / name / "metrics.jsonl").read_text())
        for name in ("whole", "elastic")
    )
    assert [row["step"] for row in lossy] == list(range(STEPS))
    for first, second in zip(whole, lossy, strict=True):
        # Only the order in which numbers are added differs.
        for tag in ("learning/loss", "learning/grad_norm"):
            np.testing.assert_allclose(
                first[tag], second[tag], rtol=1e-5, err_msg=json.dumps(first)
            )
