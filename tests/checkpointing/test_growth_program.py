"""train.py as users type it: a run that grows, goes on, and outlives its source."""

import json
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest

from MaxText.checkpointing.growth.record import latest
from MaxText.checkpointing.growth.source import open_source
from MaxText.configuration.loading import configure
from tests.checkpointing.growing import save, stored_in, trained

ROOT = pathlib.Path(__file__).parents[2]
KEYS = """
decoder_block: tokenformer
dataset_type: synthetic
base_emb_dim: 32
base_num_query_heads: 4
base_num_kv_heads: 4
head_dim: 8
base_num_decoder_layers: 2
vocab_size: 64
max_target_length: 16
per_device_batch_size: 4
dtype: float32
logits_via_embedding: true
remat_policy: none
scan_layers: true
learning_rate: 0.01
steps: 3
checkpoint_period: 2
log_config: false
enable_tensorboard: false
loss_curve: false
"""


@pytest.fixture
def place(tmp_path):
    (tmp_path / "small.yml").write_text(KEYS + f"jax_cache_dir: {tmp_path}/cache\n")
    return tmp_path


@pytest.fixture
def train(place, users_environment):
    def train(run_name, *arguments, code=0):
        command = [sys.executable, str(ROOT / "MaxText/train.py"), "small.yml", *arguments]
        result = subprocess.run(
            [*command, f"run_name={run_name}", "base_output_directory=out"],
            cwd=place,
            env=users_environment | {"JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
        )
        assert result.returncode == code, result.stdout + result.stderr
        return result.stdout + result.stderr

    return train


def events(run, kind):
    rows = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    return [row for row in rows if row["event"] == kind]


def losses(run):
    return [row["learning/loss"] for row in events(run, "step")]


def values_of(step):
    """Value slots of the feed-forward, [layers, slots, width]."""
    return open_source(str(step), {}).read("layers/mlp/values/kernel")


@pytest.mark.slow
def test_a_run_grows_and_goes_on(place, train):
    train("small", "slot_num=24")
    train("same", "slot_num=24", "load_full_state_path=out/small", "steps=4")
    source = "load_parameters_path=out/small/checkpoints/2/items"
    # The command line of TokenFormer's README, whose number of stored slots is compared.
    growing = ["slot_num=40", source, "load_parameters_path_slot_number=24"]
    growing += ["growth_data=continue", "growth_moments=reused"]
    growing += ["growth_old_slots_learning_rate=0"]
    text = train("large", *growing)
    folder = place / "out" / "small" / "checkpoints" / "2"
    slots = "24 -> 40 (attention), 96 -> 160 (feed-forward)"
    assert f"Growth from {folder}: slots {slots}; growth_mode=function_preserving" in text
    assert f"zoom_dim=24, with which {folder} was trained" in text
    large = place / "out" / "large"
    (row,) = events(large, "growth")
    assert (row["slots"], row["zoom_dim"], row["moments"]) == (slots, 24, "reused")

    # Both go on with the same batch, and before the first update the function is the same.
    assert losses(large)[0] == pytest.approx(losses(place / "out" / "same")[0], rel=1e-5)
    position = json.loads((large / "checkpoints" / "2" / "iter" / "metadata").read_text())
    assert (position["step"], position["samples"]) == (3, 12 + 12)
    metadata = json.loads((large / "checkpoints" / "2" / "metadata" / "metadata").read_text())
    assert metadata["config"]["zoom_dim"] == 24
    assert latest(metadata)["slots"]["layers/mlp/keys/kernel"] == [96, 160]
    assert configure(large / "config.yml").model.pattention.zoom_dim == 24

    shutil.rmtree(place / "out" / "small")
    text = train("large", *growing, "steps=4")
    assert f"zoom_dim=24, with which {stored_in(large).folder.parent / '2'} was trained" in text
    # The run itself knows that its old slots are frozen.
    text = train("large", "slot_num=40", "steps=5")
    kept = "zoom_dim=24, growth_old_slots_learning_rate=0, with which"
    assert f"{kept} {stored_in(large).folder.parent / '3'} was trained" in text
    assert "growth_old_slots_learning_rate: 0" in (large / "config.yml").read_text()
    before, after = (values_of(large / "checkpoints" / step) for step in ("0", "4"))
    np.testing.assert_array_equal(after[:, :96], before[:, :96])
    assert np.all(np.any(after[:, 96:] != before[:, 96:], axis=-1))
    text = train("large", "slot_num=40", "growth_old_slots_learning_rate=1", "steps=6", code=2)
    assert "=1: since it grew, this run has trained its old slots with 0" in text
    assert "Traceback" not in text
    assert len(losses(large)) == 5
    assert len(events(large, "growth")) == 1
    assert latest(json.loads(
        (large / "checkpoints" / "4" / "metadata" / "metadata").read_text()
    )) == latest(metadata)  # fmt: skip


def test_another_model_is_refused_before_anything_is_compiled(place, train):
    config = configure(place / "small.yml", slot_num=24)
    save(place / "out" / "small", config, trained(config, 1))
    text = train(
        "deep", "slot_num=24", "load_parameters_path=out/small", "base_num_decoder_layers=3",
        code=2,
    )  # fmt: skip
    assert "error: growth_mode=function_preserving: a model of 3 layers made of one of 2" in text
    assert "Traceback" not in text
    assert "Compiled" not in text
