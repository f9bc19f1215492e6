"""Runs of a session in processes of their own: trained, measured, and refused."""

import json
import subprocess

import pytest

from MaxText.experiments.arena import guarded_process, measurement
from tests.house.sources import REPOSITORY

CONFIG = """
run_name: {name}
base_output_directory: {folder}
import_modules: [{part}]
mixer: {mixer}
dataset_type: synthetic
vocab_size: 32
base_emb_dim: 16
base_num_query_heads: 2
base_num_kv_heads: 2
head_dim: 8
base_mlp_dim: 16
base_num_decoder_layers: 1
max_target_length: 12
per_device_batch_size: 4
cross_document_attention: true
steps: {steps}
eval_interval: 2
eval_steps: 2
eval_half: first
learning_rate: 1.0e-2
enable_checkpointing: true
save_checkpoint_on_completion: true
hardware: cpu
log_config: false
enable_tensorboard: false
loss_curve: false
"""


@pytest.fixture
def run(tmp_path, users_environment, monkeypatch):
    """Trains a mixer of a file under guard."""
    monkeypatch.setattr(measurement.os, "environ", users_environment)

    def train(mixer, part=REPOSITORY / "tests/experiments/arena/cheats.py", steps=2):
        config = tmp_path / f"{mixer}.yml"
        config.write_text(
            CONFIG.format(name=mixer, folder=tmp_path, part=part, mixer=mixer, steps=steps)
        )
        process = subprocess.run(
            guarded_process.train_command(config),
            env=users_environment,
            capture_output=True,
            text=True,
            check=False,
        )
        return config, process

    return train


@pytest.mark.slow
def test_the_loss_of_a_run_is_measured_again_on_both_halves(run, tmp_path):
    config, process = run("honest_mean")
    assert process.returncode == 0, process.stderr
    first, second = (measurement.measure_run(config, half) for half in ("first", "second"))
    events = map(json.loads, (tmp_path / "honest_mean/events.jsonl").read_text().splitlines())
    (reported,) = [row["eval/avg_loss"] for row in events if row["event"] == "evaluation"]
    assert first.reasons == second.reasons == ()
    assert first.loss == pytest.approx(reported, rel=1e-6)
    assert second.loss != first.loss


@pytest.mark.slow
def test_a_leak_is_found_in_the_trained_weights(run):
    config, process = run("shifted_mask", steps=20)
    assert process.returncode == 0, process.stderr
    result = measurement.measure_run(config, "first")
    assert any("it sees later tokens" in reason for reason in result.reasons)
    assert measurement.Measurement.from_json(result.to_json()) == result


@pytest.mark.slow
def test_a_run_whose_code_writes_files_is_refused(run, tmp_path):
    source = (REPOSITORY / "tests/experiments/arena/cheats.py").read_text()
    part = tmp_path / "writes.py"
    part.write_text(source + f"\n\nopen({str(tmp_path / 'outside.txt')!r}, 'w')\n")
    _, process = run("honest_mean", part)
    assert process.returncode == 2
    assert "refused: it must compute, and do nothing else: writes.py" in process.stderr
    assert not (tmp_path / "outside.txt").exists()
