"""The command that prepare_data.py prints: it fits the data, runs, and resumes."""

import re
import shlex
import subprocess
import sys

import numpy as np
import pytest

from MaxText.api import batches
from MaxText.config.loading import load
from MaxText.input_pipeline.prepare.first_run import train_arguments
from tests.house.sources import REPOSITORY
from tests.input_pipeline.small_data import EOS, write_data_set


def documents(num_tokens, vocab_size=259):
    """One document of exactly so many ids."""
    ids = np.arange(num_tokens) % (vocab_size - 1) + 1
    ids[-1] = EOS
    return [ids]


def config_of(arguments):
    return load(shlex.split(" ".join(arguments)), "train.py").config


@pytest.mark.parametrize("num_tokens", [3, 22, 129, 130, 2_000, 50_000])
@pytest.mark.parametrize("num_validation", [None, 2, 40, 3_000])
def test_a_small_data_set_is_read_as_the_command_says(tmp_path, num_tokens, num_validation):
    splits = {"train": documents(num_tokens)}
    if num_validation is not None:
        splits["validation"] = documents(num_validation)
    folder = tmp_path / "my text's"
    manifest = write_data_set(folder, splits, vocab_size=259)
    arguments = train_arguments(manifest, str(folder))
    config = config_of(arguments)
    assert "learning_rate=6e-3" in arguments
    assert config.run.run_name == "my-text-s"
    assert config.model.shape.vocab_size == 259
    assert config.schedule.learning_rate == 6e-3
    assert config.schedule.num_warmup_steps > 0
    assert 100 <= config.run.steps <= 2000
    assert config.model.shape.max_target_length <= min(128, num_tokens - 1)
    batch = next(batches(config))
    assert batch.tokens_BT.shape == (16, config.model.shape.max_target_length)
    interval = config.evaluation.eval_interval
    assert (interval > 0) == (num_validation is not None)
    if num_validation is not None:
        assert config.run.steps // interval in (10, 11)
        targets = sum(batch.loss_mask_BT.sum() for batch in batches(config, "eval"))
        assert 0 < targets < num_validation


@pytest.mark.parametrize(
    ("num_tokens", "model", "learning_rate", "steps"),
    [
        (20_000, "default", 6e-3, 100),
        (300_000, "default", 6e-3, 585),
        (20_000_000, "default", 6e-3, 2000),
        (60_000_000, "pythia-70m", 1e-3, 3662),
        (900_000_000, "pythia-70m", 1e-3, 20_000),
        (1_000_000_000, "gpt2-124m", 6e-4, 40_690),
        (10**12, "gpt2-124m", 6e-4, 50_000),
    ],
)
def test_the_model_and_the_steps_follow_the_size_of_the_data(
    tmp_path, num_tokens, model, learning_rate, steps
):
    splits = {"train": documents(200), "validation": documents(200)}
    manifest = write_data_set(tmp_path / "corpus", splits, vocab_size=259)
    train = manifest.splits["train"].model_copy(update={"num_tokens": num_tokens})
    validation = train.model_copy(update={"num_tokens": num_tokens // 100})
    larger = manifest.model_copy(update={"splits": {"train": train, "validation": validation}})
    config = config_of(train_arguments(larger, str(tmp_path / "corpus")))
    assert config.run.model_name == model
    assert config.schedule.learning_rate == learning_rate
    assert config.run.steps == steps
    length = config.model.shape.max_target_length
    sequences = config.batch.per_device_batch_size * config.batch.gradient_accumulation_steps
    if steps > 100:  # no more than four epochs
        assert steps * sequences * length <= 4 * num_tokens
    assert config.run.run_name == "corpus"
    eval_steps = config.evaluation.eval_steps
    assert eval_steps in (-1, 50)
    if eval_steps == -1:
        assert num_tokens // 100 <= 51 * sequences * length


def test_a_bucket_gives_the_name(tmp_path):
    manifest = write_data_set(tmp_path / "x", {"train": documents(200)}, vocab_size=259)
    assert "run_name=corpus.v2" in train_arguments(manifest, "gs://bucket/some/corpus.v2/")
    assert "run_name=first" in train_arguments(manifest, "/")
    assert train_arguments(manifest.model_copy(update={"splits": {}}), "x") == []


@pytest.mark.slow
def test_the_printed_command_runs_and_resumes(tmp_path):
    """As typed, in a folder whose name needs quotes."""
    (tmp_path / "text").mkdir()
    for number in range(40):
        (tmp_path / "text" / f"{number}.txt").write_text(f"text number {number}. " * 20)

    def run(command):
        done = subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout

    program = shlex.quote(str(REPOSITORY / "MaxText" / "prepare_data.py"))
    keys = "prepare_source=text dataset_path='my data' tokenizer_path=bytes"
    printed = run(f"{shlex.quote(sys.executable)} {program} {keys} validation_fraction=0.1")
    command = printed.strip().splitlines()[-1].strip()
    first = run(re.sub(r"steps=\d+", "steps=12", command) + " eval_interval=6 hardware=cpu")
    assert len(re.findall("Completed eval", first)) == 2
    resumed = run(re.sub(r"steps=\d+", "steps=14", command) + " eval_interval=6 hardware=cpu")
    assert "completed step: 0," not in resumed
    assert "checkpoints/13" in resumed
