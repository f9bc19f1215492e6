"""Training on data of every kind: mixtures, stages, masked tokens, records of the Pile."""

import json

import numpy as np
import pytest

from tests.house.sources import REPOSITORY
from tests.input_pipeline.small_data import random_documents, write_data_set
from tests.input_pipeline.token_store.token_files import write_tfrecord

VOCAB_SIZE = 300
KEYS = (
    "prepare_source= base_num_decoder_layers=1 dropout_rate=0 max_target_length=32 "
    "attention_block_size=16 steps=8 eval_interval=-1 checkpoint_period=1000"
)


@pytest.fixture(scope="module")
def folder(runs):
    folder = runs.place / "sets"
    for number, name in enumerate(("a", "b")):
        documents = random_documents(number, 60, 60, VOCAB_SIZE)
        write_data_set(folder / name, {"train": documents, "validation": documents[:5]}, VOCAB_SIZE)
    return folder


@pytest.mark.slow
def test_stages_of_a_mixture_resume_with_another_batch(runs, folder):
    keys = [
        *KEYS.split(),
        "sequence_length_stages=[[0,16],[2,32]]",
        f"data_mixture_weights=[[{folder}/a,1],[{folder}/b,3,documents_random,2]]",
    ]
    output = runs.complete("staged", *keys)
    assert "33.33% of the sequences: " in output
    # 4 windows of 32 tokens are 8 rows of 16 at first.
    assert "Train step (8 x 16 tokens)" in output
    assert "Train step (4 x 32 tokens)" in output
    assert len(runs.rows("staged")) == 8
    runs.complete("staged", *keys, "steps=10", "per_device_batch_size=8")
    assert runs.rows("staged")[-1]["step"] == 9
    saved = sorted((runs.folder("staged") / "checkpoints").glob("*/iter/metadata"))
    samples = [json.loads(path.read_text())["samples"] for path in saved]
    assert samples == [8 * 4, 8 * 4 + 2 * 8]


SOURCES = REPOSITORY / "tests" / "input_pipeline" / "registered_sources" / "numbered.py"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["numbered", "stateful"])
def test_a_data_source_resumes_exactly(runs, name):
    keys = [
        *KEYS.split(),
        f"dataset_type={name}",
        f"import_modules=[{SOURCES}]",
        "vocab_size=50000",
        "learning_rate_schedule_steps=8",
    ]
    runs.complete(f"{name}_whole", *keys)
    runs.complete(f"{name}_parts", *keys, "steps=3")
    runs.complete(f"{name}_parts", *keys)
    whole, parts = (
        [row["learning/loss"] for row in runs.rows(f"{name}_{kind}")] for kind in ("whole", "parts")
    )
    assert len(whole) == 8
    assert parts == whole


@pytest.mark.slow
def test_masked_tokens_are_learned(runs, folder):
    output = runs.complete(
        "masked",
        *KEYS.split(),
        f"dataset_path={folder}/a",
        "mlm_training=true",
        "mlm.mask_id=127",
        "learning_rate=0.01",
        "mlm.cls_token_id=126",
        "eval_interval=8",
        "eval_steps=1",
    )
    first = next(line for line in output.splitlines() if "completed step: 0" in line)
    predicted = int(first.split("total_weights: ")[1].split(",")[0])
    # 15 % of 4 rows of 31 tokens.
    assert 5 <= predicted <= 35
    assert "masked_accuracy=" in output
    assert np.isfinite([row["learning/lm_loss"] for row in runs.rows("masked")]).all()


@pytest.mark.slow
def test_pile_records_are_read_in_their_order(runs):
    draw = np.random.default_rng(0).integers
    names = ("b0", "b3", "b10", "valid")
    (runs.place / "pile/valid").mkdir(parents=True)
    records = {name: draw(0, VOCAB_SIZE, (12, 33)) for name in names}
    for name, ids in records.items():
        file = "valid/pile.tfrecord.b0" if name == "valid" else f"pile.tfrecord.{name}"
        write_tfrecord(runs.place / "pile" / file, ids)
    output = runs.complete(
        "pile",
        *KEYS.split(),
        f"dataset_path={runs.place}/pile",
        "eval_split=valid",
        "zero_loss=false",
        "enable_data_shuffling=false",
        "eval_interval=8",
    )
    assert "36 rows of 33" in output
    # 8 steps of 4 rows: b0, b3, then 8 rows of b10; ids 0 are not targets.
    targets = np.concatenate([records[name][:, 1:] for name in names[:3]])
    for step in range(8):
        counted = (targets[4 * step : 4 * step + 4] != 0).sum()
        line = next(line for line in output.splitlines() if f"completed step: {step}," in line)
        assert f"total_weights: {counted}," in line
    assert f"total_weights={(records['valid'][:, 1:] != 0).sum()}," in output
