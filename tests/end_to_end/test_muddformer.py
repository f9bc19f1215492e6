"""MUDDFormer's commands, up to paths, steps and sizes, on records as its data sets have them."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest

from MaxText.configuration.loading import load
from MaxText.input_pipeline.formats.tf_example import encode
from MaxText.input_pipeline.formats.tfrecord import TFRecordWriter
from tests.house.sources import REPOSITORY

VOCAB_SIZE = 128
NAMES = ("MUDDLlama2Medium", "Llama2Medium")
SMALL = (
    "vocab_size=128 base_emb_dim=16 base_num_query_heads=2 base_num_kv_heads=2 head_dim=8 "
    "base_mlp_dim=32 base_num_decoder_layers=2 max_target_length=32 per_device_batch_size=4 "
    "eval_per_device_batch_size=4 steps=6 learning_rate_schedule_steps=6 learning_rate=0.01 "
    "warmup_steps_fraction=0 log_config=false enable_tensorboard=false loss_curve=false"
)
# Each as `python MaxText/train.py ...`, in one process, which starts jax once.
TRAIN_EACH = """
import runpy, sys
program, *lines = sys.argv[1:]
for line in lines:
    sys.argv = [program, *line.split()]
    try:
        runpy.run_path(program, run_name="__main__")
    except SystemExit as ended:
        if ended.code:
            raise
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with records of a text that repeats itself, named as those of the Pile."""
    folder = tmp_path_factory.mktemp("muddformer")
    (folder / "pile").mkdir()
    text = np.arange(100_000) % 7 + 1
    for number, name in enumerate(("pile.tfrecord.b0", "pile.tfrecord.b3", "valid.tfrecord.b0")):
        with TFRecordWriter(folder / "pile" / name) as writer:
            for row in range(12):
                start = 1000 * number + 33 * row
                writer.write(encode({"input_ids": text[start : start + 33]}))
    return folder


@pytest.mark.slow
def test_published_commands(place, users_environment):
    lines = {
        name: (
            f"MaxText/configs/base_v2.yml run_name={place}/{name} dataset_path={place}/pile "
            f"model_name={name} hardware=cpu compile_topology_num_slices=1 {SMALL} "
            f"jax_cache_dir={place}/cache data_cache_dir={place}/data_cache"
        )
        for name in NAMES
    }
    # Half of 32 is no multiple of 128.
    lines["MUDDLlama2Medium"] += " mlp_dim_multiple=8"
    result = subprocess.run(
        [sys.executable, "-c", TRAIN_EACH, str(REPOSITORY / "MaxText/train.py"), *lines.values()],
        cwd=place, env=users_environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("Completed eval after train step 5") == 2
    for name, line in lines.items():
        run = place / name
        loaded = load(line.split()).config
        assert load([str(run / "config.yml")]).config == loaded
        assert loaded.run.model_name == name
        assert loaded.model.dense_connections.dense_conn is (name == "MUDDLlama2Medium")
        assert {path.name for path in (run / "checkpoints").iterdir()} >= {"0", "5"}
        rows = [json.loads(row) for row in (run / "metrics.jsonl").read_text().splitlines()]
        losses = [row["learning/lm_loss"] for row in rows if "learning/lm_loss" in row]
        assert abs(losses[0] - math.log(VOCAB_SIZE)) < 0.2
        assert losses[-1] < losses[0] - 0.3
