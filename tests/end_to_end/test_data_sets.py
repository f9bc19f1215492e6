"""Training on data of every kind, as a user types it: mixtures, stages, masked tokens, records."""

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from MaxText.input_pipeline.formats.tf_example import encode
from MaxText.input_pipeline.formats.tfrecord import TFRecordWriter

from ..input_pipeline.small_data import random_documents, write_data_set

ROOT = pathlib.Path(__file__).parents[2]
VOCAB_SIZE = 128
SMALL = f"""
base_config: quickstart.yml
prepare_source: ""
dataset_path: ""
vocab_size: {VOCAB_SIZE}
base_emb_dim: 16
base_num_query_heads: 2
base_num_kv_heads: 2
head_dim: 8
base_mlp_dim: 32
base_num_decoder_layers: 1
max_target_length: 32
per_device_batch_size: 4
steps: 8
step_log_period: 1
eval_interval: -1
checkpoint_period: 1000
sample_tokens: 0
loss_curve: false
enable_tensorboard: false
log_config: false
attention_block_size: 16
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a configuration, two prepared sets, and compiled programs that runs share."""
    folder = tmp_path_factory.mktemp("data_sets")
    (folder / "small.yml").write_text(f"{SMALL}\njax_cache_dir: {folder}/cache\n")
    for number, name in enumerate(("a", "b")):
        documents = random_documents(number, 60, 60, VOCAB_SIZE)
        write_data_set(folder / name, {"train": documents, "validation": documents[:5]}, VOCAB_SIZE)
    return folder


@pytest.fixture
def train(place, users_environment):
    def train(run_name, *arguments, code=0):
        command = [sys.executable, str(ROOT / "MaxText/train.py"), "small.yml"]
        keys = [f"run_name={run_name}", f"base_output_directory={place}/out", *arguments]
        keys.append(f"data_cache_dir={place}/data_cache")
        result = subprocess.run(
            [*command, *keys], cwd=place, env=users_environment, capture_output=True, text=True,
            timeout=300, check=False,
        )  # fmt: skip
        assert result.returncode == code, result.stderr
        return result

    return train


def losses(place, run_name):
    lines = (place / "out" / run_name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["learning/lm_loss"] for line in lines]


def test_stages_and_rampup_resume_with_another_batch(place, train):
    keys = [
        "dataset_path=a",
        "enable_rampup_batch_size=true",
        "per_device_batch_size_start=2",
        "per_device_batch_size_increment=2",
        "global_rampup_samples=6",
        "sequence_length_stages=[[0,16],[2,32]]",
    ]
    output = train("staged", *keys).stdout
    # Two steps of 2 windows as 4 rows of 16, one more of 2 windows, then 4 windows.
    assert "Train step (2 x 32 tokens)" in output
    assert "Train step (4 x 32 tokens)" in output
    assert "stage from step 3" in output
    assert len(losses(place, "staged")) == 8
    output = train("staged", *keys, "steps=10", "per_device_batch_size=8").stdout
    assert "completed step: 9," in output
    positions = [
        json.loads(path.read_text())
        for path in sorted((place / "out/staged/checkpoints").glob("*/iter/metadata"))
    ]
    # 3 steps of 2, 5 of 4, then 2 of 8.
    assert [position["samples"] for position in positions] == [26, 42]


@pytest.mark.slow
def test_a_pass_ends_with_its_last_window_also_after_another_batch(place, train):
    keys = ["dataset_path=a", "num_epoch=1"]
    train("pass", *keys)
    assert len(losses(place, "pass")) == 8  # of 4 windows
    tokens = json.loads((place / "a/manifest.json").read_text())["splits"]["train"]["num_tokens"]
    windows = -(-(tokens - 1) // 32)
    assert windows > 32
    larger = [*keys, "steps=100", "per_device_batch_size=16"]
    train("pass", *larger)
    assert len(losses(place, "pass")) == 8 + -(-(windows - 32) // 16)
    assert "num_epoch=1. Raise num_epoch to go on." in train("pass", *larger).stdout


def test_mixture_says_how_often_it_passes_over_each_source(train):
    output = train("mixed", "dataset_mix=[[a,1],[b,3,documents_random,2]]").stdout
    assert "33.33% of the rows from a: " in output
    assert "completed step: 7," in output


def test_masked_tokens_are_learned(place, train):
    output = train(
        "masked", "dataset_path=a", "mlm_training=true", "mlm_mask_id=127", "learning_rate=0.01",
        "mlm_cls_token_id=126", "eval_interval=8", "eval_steps=1",
    ).stdout  # fmt: skip
    assert "Completed eval after train step 7" in output
    weights = next(line for line in output.splitlines() if "completed step: 0" in line)
    predicted = int(weights.split("total_weights: ")[1].split(",")[0])
    # 15 % of 4 rows of 31 tokens.
    assert 5 <= predicted <= 35
    assert "masked_accuracy=" in output
    assert np.isfinite(losses(place, "masked")).all()


def test_pile_records_are_read_in_their_order(place, train):
    rng = np.random.default_rng(0)
    records = {step: rng.integers(0, VOCAB_SIZE, (12, 33)) for step in (0, 3, 10, 100)}
    folder = place / "pile"
    (folder / "valid").mkdir(parents=True)
    for step, ids in records.items():
        name = "valid/pile.tfrecord.b0" if step == 100 else f"pile.tfrecord.b{step}"
        with TFRecordWriter(folder / name) as writer:
            for row in ids:
                writer.write(encode({"input_ids": row}))
    output = train(
        "pile", "dataset_path=pile", "eval_split=valid", "enable_data_shuffling=false",
        "zero_loss=false", "eval_interval=8", "per_device_batch_size=4", "checkpoint_period=4",
    ).stdout  # fmt: skip
    assert "36 rows of 33" in output
    # 8 steps of 4 rows: b0, b3, then 8 rows of b10; ids 0 are no targets.
    targets = np.concatenate([records[step][:, 1:] for step in (0, 3, 10)])
    for step in range(8):
        counted = (targets[4 * step : 4 * step + 4] != 0).sum()
        line = next(line for line in output.splitlines() if f"completed step: {step}," in line)
        assert f"total_weights: {counted}," in line
    assert f"total_weights={(records[100][:, 1:] != 0).sum()}," in output


def test_a_vanished_file_is_named(place, train):
    documents = random_documents(0, 200, 60, VOCAB_SIZE)
    write_data_set(place / "gone_set", {"train": documents}, VOCAB_SIZE)
    next((place / "gone_set/train").glob("tokens-00001-*")).unlink()
    error = train("gone", "dataset_path=gone_set", code=2).stderr
    assert "tokens-00001" in error
    assert "Traceback" not in error
